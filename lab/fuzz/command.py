"""`python -m lab.fuzz`: run random programs, compare two runs, shrink what differs."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sm100_sim.progress import counted

from . import outcome as outcomes_of
from .families import FAMILIES
from .outcome import Outcome, Variant, variant
from .shrink import shrink

#: Programs that are shrunk at most.
_SHRUNK = 40
_DESCRIPTION = """run random legal PTX programs on a GPU of compute capability 9.0 or in the
simulator, write what each one gave, and compare it with what another run gave; the exit status is
1 if they differ"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m lab.fuzz", description=_DESCRIPTION)
    p.add_argument(
        "--on",
        choices=("simulator", "gpu", "both"),
        default="simulator",
        help="where the programs run (default %(default)s); a GPU needs a CUDA driver, "
        "cuda-bindings and numpy; on both, programs that differ are shrunk",
    )
    p.add_argument(
        "--families",
        default=",".join(FAMILIES),
        help="of which families, with commas (default: all)",
    )
    p.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    p.add_argument("--count", type=int, default=20, help="seeds of each family (default 20)")
    p.add_argument(
        "--programs",
        type=Path,
        help="file of programs to run, one a line, instead: "
        "FAMILY/SEED or FAMILY/SEED-PIECE-PIECE without these pieces",
    )
    p.add_argument(
        "--level",
        type=int,
        default=4,
        choices=range(5),
        help="how far the GPU's driver optimises (default %(default)s)",
    )
    p.add_argument("--processes", type=int, default=1, help="at the same time (default 1)")
    p.add_argument("--out", type=Path, help="file for what each program gave")
    p.add_argument("--against", type=Path, help="file of another run to compare with")
    p.add_argument(
        "--outputs", type=Path, help="file (.npz) for the outputs of programs that differ"
    )
    return p


def chosen(arguments: argparse.Namespace) -> list[Variant]:
    """The programs that the arguments name. Raises ValueError for what names none."""
    if arguments.programs is not None:
        return [variant(line) for line in arguments.programs.read_text().split()]
    names = arguments.families.split(",")
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ValueError(f"--families {','.join(unknown)}; accepted are {', '.join(FAMILIES)}")
    seeds = range(arguments.first, arguments.first + arguments.count)
    return [Variant(f"{name}/{seed}") for name in names for seed in seeds]


def _on_both(programs: list[Variant], arguments: argparse.Namespace) -> int:
    """Run on the GPU and in the simulator of one machine, and shrink what differs."""
    gpu, about = _runner(arguments, "gpu")
    simulator, _ = _runner(arguments, "simulator")
    start = time.perf_counter()
    theirs = _outcomes(gpu, programs)
    print(f"{len(theirs)} programs in {time.perf_counter() - start:.1f} s on {about['device']}")
    start = time.perf_counter()
    mine = _outcomes(simulator, programs)
    print(f"{len(mine)} programs in {time.perf_counter() - start:.1f} s on sm100_sim")
    print("\n".join(_table(mine, theirs)), flush=True)
    if arguments.out:
        outcomes_of.save(arguments.out, theirs, about)
    found = [variant(key) for key in differences(mine, theirs)]
    arguments.level = 0
    plain = _outcomes(_runner(arguments, "gpu")[0], found)
    for one in found:
        key = one.key
        print(
            f"{_line(key, mine[key], theirs[key])}; compiled without optimisation: "
            + ("the same as here" if mine[key].agrees(plain[key]) else _words(plain[key]))
        )
    for one, smallest in shrink(
        found[:: -(-len(found) // _SHRUNK) or 1],
        lambda some: _outcomes(simulator, some),
        lambda some: _outcomes(gpu, some),
    ).items():
        print(f"{one.key} is smallest as {smallest.key}", flush=True)
    return 1 if found else 0


def _outcomes(run: Callable[..., Iterator], programs: list[Variant]) -> dict[str, Outcome]:
    return {one.key: outcome for one, outcome, _ in run(programs)}


def _runner(arguments: argparse.Namespace, on: str) -> tuple[Callable[..., Iterator], dict]:
    """Return (function that runs programs there, description of the machine)."""
    processes = arguments.processes
    if on == "gpu":
        from sm100_sim.tools.golden.record import Gpu

        from .gpu import run

        level = arguments.level
        return lambda some: run(some, processes, level), {**Gpu().description(), "level": level}
    from .simulate import run as simulate

    return lambda some: simulate(some, processes), {"device": "sm100_sim"}


def differences(mine: dict[str, Outcome], theirs: dict[str, Outcome]) -> list[str]:
    """Keys of the programs on which two runs differ."""
    return [
        key for key, outcome in mine.items() if key in theirs and not outcome.agrees(theirs[key])
    ]


def main(given: list[str]) -> int:
    """Run the command; 1 if outcomes differ from those of the other run."""
    p = parser()
    arguments = p.parse_args(given)
    try:
        programs = chosen(arguments)
    except ValueError as error:
        p.error(str(error))
    if arguments.on == "both":
        if arguments.against or arguments.outputs:
            p.error("--on both compares the two machines; --against and --outputs are for one")
        return _on_both(programs, arguments)
    theirs = outcomes_of.load(arguments.against)[0] if arguments.against else {}
    run, about = _runner(arguments, arguments.on)
    start = time.perf_counter()
    mine: dict[str, Outcome] = {}
    kept: dict[str, Any] = {}
    for one, outcome, outputs in counted(run(programs), len(programs), "running", "program"):
        mine[one.key] = outcome
        other = theirs.get(one.key)
        if arguments.outputs and outputs and other and not outcome.agrees(other):
            kept |= {f"{one.key}#{i}": array for i, array in enumerate(outputs)}
    seconds = time.perf_counter() - start
    if arguments.out:
        outcomes_of.save(arguments.out, mine, about)
    if arguments.outputs:
        np.savez_compressed(arguments.outputs, **kept)
    print("\n".join(_table(mine, theirs)))
    print(f"{len(mine)} programs in {seconds:.1f} s on {about['device']}", flush=True)
    found = differences(mine, theirs)
    for key in found[:200]:
        print(_line(key, mine[key], theirs[key]))
    return 1 if found else 0


def _line(key: str, mine: Outcome, theirs: Outcome) -> str:
    return f"{key} differs: {_words(mine)}; the other run: {_words(theirs)}"


def _words(outcome: Outcome) -> str:
    text = outcome.text.splitlines()[0][:160] if outcome.text else outcome.output
    return f"{outcome.state} {text}".rstrip()


def _table(mine: dict[str, Outcome], theirs: dict[str, Outcome]) -> Iterable[str]:
    """Programs by family and what they gave."""
    different = Counter(key.partition("/")[0] for key in differences(mine, theirs))
    counts: dict[str, Counter] = {}
    for key, outcome in mine.items():
        counts.setdefault(key.partition("/")[0], Counter())[outcome.state] += 1
    for family, states in counts.items():
        parts = ", ".join(f"{number} {state}" for state, number in states.most_common())
        compared = f"; {different[family]} differ" if theirs else ""
        yield f"{family}: {parts}{compared}"
