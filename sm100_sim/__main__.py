"""`python -m sm100_sim SCRIPT.py [args...]` runs a GPU script in the simulator;
`python -m sm100_sim mutate SCRIPT.py [args...]` measures what the sanitizer finds (see `--help`);
`python -m sm100_sim record [--out DIR]` records golden vectors on a Hopper GPU,
`python -m sm100_sim litmus --out FILE` counts there what may be seen out of order;
`python -m sm100_sim fuzz` runs random PTX programs there or in the simulator (see `--help`).
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from pathlib import Path

# The simulator is imported where it is needed: `record` runs where llvmlite is not installed.

_MUTATE = """run SCRIPT.py and, for the first launch of each of its kernels, leave out one
synchronisation instruction after the other: each mutant is run under the sanitizer, first in the
fixed schedule and then with seeds, until it is caught; the exit status is 1 if one survives that
no named edge shows to be redundant"""
_RECORD = """run small PTX kernels on a GPU of compute capability 9.0 and store their results, which
the tests replay in the simulator; needs a CUDA driver, cuda-bindings and numpy"""
_LITMUS = """pass messages between warps millions of times on a GPU of compute capability 9.0 and
count stale ones; measure what only a GPU can tell (time-outs, co-residence, launches)"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status, of `mutate` 1 if a mutant survived."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["record"]:
        return _record(arguments[1:])
    if arguments[:1] == ["fuzz"]:
        from .tools.fuzz.command import main as fuzz

        return fuzz(arguments[1:])
    if arguments[:1] == ["litmus"]:
        return _litmus(arguments[1:])
    if arguments[:1] != ["mutate"]:
        from .attach.runner import run_script

        return run_script(arguments)
    parser = argparse.ArgumentParser(prog="python -m sm100_sim")
    commands = parser.add_subparsers(dest="command", required=True)
    mutate = commands.add_parser("mutate", help="mutation score of a kernel", description=_MUTATE)
    mutate.add_argument("--seeds", type=int, default=20, help="most seeds a mutant (default 20)")
    mutate.add_argument("--confirm", type=int, help="seeds after which a mutant for which every "
                        "run has named an edge counts as redundant (default: all)")
    mutate.add_argument("--strict", action="store_true", help="the letter of the PTX ISA")
    mutate.add_argument("--strict-order", action="store_true",
                        help="the same, and only listed pairs of tcgen05 instructions are in order")
    mutate.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    mutate.add_argument("--clusters", type=int, help="clusters resident at once")
    mutate.add_argument("--kernel", default="", help="only kernels whose name contains this")
    mutate.add_argument("--launches", type=int, default=1,
                        help="launches of each kernel; mutants that one does not catch are tried "
                        "in the next (default 1)")
    mutate.add_argument("--accept-findings", action="store_true",
                        help="also kernels with findings of their own, which then catch nothing")
    mutate.add_argument("--as-is", action="store_true",
                        help="the script launches in the simulator by itself; otherwise it is a "
                        "GPU script and runs as in `python -m sm100_sim SCRIPT.py`")
    mutate.add_argument("script")
    mutate.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    choice = parser.parse_args(arguments)
    if choice.seeds < 0 or choice.jobs < 1 or choice.launches < 1:
        mutate.error("--seeds takes numbers from 0 on, --jobs and --launches from 1 on")
    return _mutate(choice)


def _record(arguments: list[str]) -> int:
    from .tools.golden import DIRECTORY, all_cases, groups
    from .tools.golden.record import record

    parser = argparse.ArgumentParser(prog="python -m sm100_sim record", description=_RECORD)
    parser.add_argument("--out", type=Path, default=DIRECTORY,
                        help="directory of the vectors (default: %(default)s)")
    parser.add_argument("--groups", default="",
                        help="record these groups alone, with commas; the others stay as they are")
    choice = parser.parse_args(arguments)
    chosen, known = tuple(filter(None, choice.groups.split(","))), groups(all_cases())
    if not known.keys() >= set(chosen):
        parser.error(f"--groups {choice.groups}; accepted are {', '.join(known)}")
    return 1 if record(choice.out, chosen) else 0


def _litmus(arguments: list[str]) -> int:
    from .tools.golden.litmus_run import run
    from .tools.golden.probes import PROBES

    parser = argparse.ArgumentParser(prog="python -m sm100_sim litmus", description=_LITMUS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of what was found")
    parser.add_argument("--seconds", type=float, default=1.0,
                        help="seconds for each way to pass a message (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(PROBES), help="these alone")
    choice = parser.parse_args(arguments)
    found = run(choice.out, choice.seconds, choice.only)
    return 1 if any("failed" in result for result in found.values()) else 0


def _mutate(choice: argparse.Namespace) -> int:
    from .attach import attached
    from .launcher import Options
    from .mutation.score import Collector, captured

    def write(line: str) -> None:
        print(line, flush=True)

    reading = "strict-order" if choice.strict_order else "strict" if choice.strict else True
    collector = Collector(
        Options(clusters=choice.clusters, sanitize=reading),
        choice.seeds, choice.confirm, jobs=choice.jobs, launches=choice.launches,
        kernel=choice.kernel, accept=choice.accept_findings, write=write,
    )
    sys.argv = [choice.script, *choice.args]
    sys.path.insert(0, str(Path(choice.script).resolve().parent))
    with captured(collector.take), contextlib.nullcontext() if choice.as_is else attached():
        runpy.run_path(choice.script, run_name="__main__")
    if not collector.scores:
        print("the script launched no such kernel in the simulator", file=sys.stderr)
        return 2
    return 1 if any(score.count("survived") for score in collector.scores) else 0


if __name__ == "__main__":
    sys.exit(main())
