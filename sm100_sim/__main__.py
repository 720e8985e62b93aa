"""`python -m sm100_sim SCRIPT.py [args...]` runs a GPU script in the simulator;
`python -m sm100_sim mutate SCRIPT.py [args...]` measures what the sanitizer finds (see `--help`);
`python -m sm100_sim record [--out DIR]` records golden vectors on a Hopper GPU.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

# The simulator is imported where it is needed: `record` runs where llvmlite is not installed.
if TYPE_CHECKING:
    from .mutation import Launch

_MUTATE = """run SCRIPT.py, which launches kernels in the simulator, and for the first launch of
each kernel leave out one synchronisation instruction after the other: each mutant is run under the
sanitizer, first in the fixed schedule and then with seeds, until something is found"""
_RECORD = """run small PTX kernels on a GPU of compute capability 9.0 and store their results, which
the tests replay in the simulator; needs a CUDA driver, cuda-bindings and numpy"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status, of `mutate` 1 if a mutant survived."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["record"]:
        return _record(arguments[1:])
    if arguments[:1] != ["mutate"]:
        from .attach.runner import run_script

        return run_script(arguments)
    parser = argparse.ArgumentParser(prog="python -m sm100_sim")
    commands = parser.add_subparsers(dest="command", required=True)
    mutate = commands.add_parser("mutate", help="mutation score of a kernel", description=_MUTATE)
    mutate.add_argument("--seeds", type=int, default=20, help="most seeds a mutant (default 20)")
    mutate.add_argument("--strict", action="store_true", help="the letter of the PTX ISA")
    mutate.add_argument("--clusters", type=int, help="clusters resident at once")
    mutate.add_argument("--kernel", help="only kernels whose name contains this")
    mutate.add_argument("script")
    mutate.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return _mutate(parser.parse_args(arguments))


def _record(arguments: list[str]) -> int:
    from .golden import DIRECTORY
    from .golden.record import record

    parser = argparse.ArgumentParser(prog="python -m sm100_sim record", description=_RECORD)
    parser.add_argument("--out", type=Path, default=DIRECTORY,
                        help="directory of the vectors (default: %(default)s)")
    return 1 if record(parser.parse_args(arguments).out) else 0


def _mutate(choice: argparse.Namespace) -> int:
    from .launcher import Options
    from .mutation import captured, mutants

    options = Options(clusters=choice.clusters, sanitize="strict" if choice.strict else True)
    seen: set[str] = set()
    survived = 0

    def take(launch: Launch) -> None:
        nonlocal survived
        name = launch.config.kernel_name
        if name in seen or (choice.kernel or "") not in name:
            return
        seen.add(name)
        counts: Counter[str] = Counter()
        print(f"kernel {name}, grid {launch.config.grid}", flush=True)
        for mutant in mutants(launch, options, choice.seeds):
            counts[mutant.outcome] += 1
            print(f"  {mutant}".splitlines()[0][:400], flush=True)
        survived += counts["survived"]
        print(f"  caught {counts['caught']}, redundant {counts['redundant']}, "
              f"survived {counts['survived']}", flush=True)

    sys.argv = [choice.script, *choice.args]
    with captured(take):
        runpy.run_path(choice.script, run_name="__main__")
    if not seen:
        print("the script launched no such kernel in the simulator", file=sys.stderr)
        return 2
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
