"""`python -m sm100_sim mutate SCRIPT.py [args...]`: the mutation score of a script's kernels."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from pathlib import Path

_DESCRIPTION = """run SCRIPT.py and, for the first launch of each of its kernels, leave out one
synchronisation instruction after the other: each mutant is run under the sanitizer, first in the
fixed schedule and then with seeds, until it is caught; the exit status is 1 if one survives that
no named edge shows to be redundant"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sm100_sim mutate", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=20, help="most seeds a mutant (default 20)")
    parser.add_argument(
        "--confirm",
        type=int,
        help="seeds after which a mutant for which every "
        "run has named an edge counts as redundant (default: all)",
    )
    parser.add_argument("--strict", action="store_true", help="the letter of the PTX ISA")
    parser.add_argument(
        "--strict-order",
        action="store_true",
        help="the same, and only listed pairs of tcgen05 instructions are in order",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--clusters", type=int, help="clusters resident at once")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument(
        "--launches",
        type=int,
        default=1,
        help="launches of each kernel; mutants that one does not catch are tried "
        "in the next (default 1)",
    )
    parser.add_argument(
        "--accept-findings",
        action="store_true",
        help="also kernels with findings of their own, which then catch nothing",
    )
    parser.add_argument(
        "--as-is",
        action="store_true",
        help="the script launches in the simulator by itself; otherwise it is a "
        "GPU script and runs as in `python -m sm100_sim SCRIPT.py`",
    )
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def mutate(arguments: list[str]) -> int:
    """Run the command; 1 if a mutant survived, 2 if nothing was launched."""
    parser = _parser()
    choice = parser.parse_args(arguments)
    if choice.seeds < 0 or choice.jobs < 1 or choice.launches < 1:
        parser.error("--seeds takes numbers from 0 on, --jobs and --launches from 1 on")
    if not Path(choice.script).is_file():
        print(f"sm100_sim: {choice.script!r} is not a file", file=sys.stderr)
        return 2
    from sm100_sim.attach import attached
    from sm100_sim.launcher import Options

    from .score import Collector, captured

    def write(line: str) -> None:
        print(line, flush=True)

    reading = "strict-order" if choice.strict_order else "strict" if choice.strict else True
    collector = Collector(
        Options(clusters=choice.clusters, sanitize=reading),
        choice.seeds, choice.confirm, jobs=choice.jobs, launches=choice.launches,
        kernel=choice.kernel, accept=choice.accept_findings, write=write,
    )  # fmt: skip
    sys.argv = [choice.script, *choice.args]
    sys.path.insert(0, str(Path(choice.script).resolve().parent))
    with captured(collector.take), contextlib.nullcontext() if choice.as_is else attached():
        runpy.run_path(choice.script, run_name="__main__")
    if not collector.scores:
        print("the script launched no such kernel in the simulator", file=sys.stderr)
        return 2
    return 1 if any(score.count("survived") for score in collector.scores) else 0
