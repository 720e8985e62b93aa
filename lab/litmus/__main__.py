"""`python -m lab.litmus`: run the probes and the litmus kernels on a GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .probes import PROBES
from .processes import run

_DESCRIPTION = """pass messages between warps millions of times on a GPU of compute capability
9.0 and count stale ones; measure what only a GPU can tell (time-outs, co-residence, launches)"""


def main(arguments: list[str]) -> int:
    """Run the probes; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m lab.litmus", description=_DESCRIPTION)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of what was found")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="seconds for each way to pass a message (default: %(default)s)",
    )
    parser.add_argument("--only", nargs="+", choices=list(PROBES), help="these alone")
    choice = parser.parse_args(arguments)
    found = run(choice.out, choice.seconds, choice.only)
    return 1 if any("failed" in result for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
