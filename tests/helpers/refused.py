"""Command lines that are refused at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from checkout import ROOT


def refusals(package: str, expected: Mapping[tuple[str, ...], str]) -> None:
    """Assert that each command line of `python -m package` gives exit status 2 and its text, before
    anything that takes long is loaded."""
    code = (
        "import sys\n"
        f"from {package}.__main__ import main\n"
        f"for given in {list(expected)!r}:\n"
        "    try:\n"
        "        status = main(list(given))\n"
        "    except SystemExit as error:\n"
        "        status = error.code\n"
        "    print(status, {'torch', 'cutlass', 'llvmlite'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 set()"] * len(expected), done.stdout + done.stderr
    assert all(text in done.stderr for text in expected.values()), done.stderr
