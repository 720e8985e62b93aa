"""The notebooks of examples/ run from the first cell to the last; their cells hold assertions."""

from __future__ import annotations

import json
import linecache

import pytest
from checkout import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

pytestmark = pytest.mark.simulator


def run(notebook: dict, name: str) -> int:
    """Execute the code cells in one namespace, as Jupyter does. Return their number."""
    space = {"__name__": "__main__"}
    codes = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    for number, code in enumerate(codes, 1):
        file = f"/{name}/cell_{number}.py"
        # CuTe DSL reads the source of the functions that it compiles.
        lines = [f"{line}\n" for line in code.splitlines()]
        linecache.cache[file] = len(code), None, lines, file
        exec(compile(code, file, "exec"), space)
    return len(codes)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch, capsys):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.delenv("FA4_HD256_ARCH", raising=False)
    assert run(json.loads(path.read_text("utf-8")), path.stem) > 4
    assert "largest error" in capsys.readouterr().out


def test_a_cell_that_fails_is_seen():
    cells = [{"cell_type": "code", "source": ["x = 1\n", "assert x == 2"]}]
    with pytest.raises(AssertionError):
        run({"cells": cells}, "planted")
    assert len(NOTEBOOKS) == 2
