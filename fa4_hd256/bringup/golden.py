"""Golden vectors: single instructions on this machine beside what a Hopper GPU recorded, and
beside what the simulator predicts where no GPU has recorded anything yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from sm100_sim import golden
from sm100_sim.golden import Case, Vectors
from sm100_sim.golden.comparing import difference, out_of_bound

from .gpu import run_case
from .outcome import Outcome, Target


@lru_cache(maxsize=1)
def _recorded() -> dict[str, Case]:
    return {case.name: case for case in golden.all_cases()}


@lru_cache(maxsize=1)
def _vectors() -> Vectors:
    return Vectors()


def missing(target: Target) -> str:
    """The vectors lie in a checkout, not in an installed package."""
    try:
        Vectors()
    except FileNotFoundError as error:
        return f"no vectors here: {error}; run it in a checkout"
    return ""


def items(target: Target) -> list[str]:
    """Names of the cases: those a Hopper GPU has recorded."""
    return list(_recorded())


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """One case."""
    return _against_recording(_recorded()[item], target, note)


def _against_recording(case: Case, target: Target, note: Callable[[str], None]) -> Outcome:
    try:
        recorded = _vectors().outputs(case)
    except KeyError as error:
        return Outcome("skipped", str(error.args[0]))
    note(f"grid {case.grid}, block {case.block}, cluster {case.cluster}")
    if case.faults:
        return _expect_fault(case, target)
    found = run_case(target, case)
    if not case.approximate:
        wrong = difference(case, found, recorded, late_flush=not target.is_gpu)
        return Outcome("failed" if wrong else "passed", wrong)
    wrong = out_of_bound(case, found)
    same = float(np.mean(found[0] == recorded[0]))
    text = wrong or ("" if same == 1 else f"within the bound; {same:.1%} equal the recording")
    return Outcome("failed" if wrong else "passed", text, {"equal": round(same, 4)})


def _expect_fault(case: Case, target: Target) -> Outcome:
    from .child import is_fault

    try:
        run_case(target, case)
    except Exception as error:
        if not is_fault(error):
            raise
        # The context is broken: the runner starts a new process behind this one.
        return Outcome("passed", f"refused, as recorded: {type(error).__name__}", {"broken": True})
    return Outcome("failed", "no error, where the recording has one")
