"""Rules of the machine (docs/silicon.md), each kept by one kernel and broken by another: how these
end here, beside what a Hopper GPU recorded. Kernels that hang or fault belong to it; each of them
costs its process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages.golden import missing as missing
from bench.bringup.stages.gpu import gpu
from sm100_sim.tools import golden
from sm100_sim.tools.golden import Case, Vectors
from sm100_sim.tools.golden.cases import retargeted
from sm100_sim.tools.golden.comparing import rule_difference


@lru_cache(maxsize=1)
def _cases() -> dict[str, Case]:
    return {case.name: case for case in golden.all_cases() if case.rule and not case.hopper}


@lru_cache(maxsize=1)
def _vectors() -> Vectors:
    return Vectors()


def items(target: Target) -> list[str]:
    return list(_cases())


def ending(case: Case, target: Target) -> tuple[str, list]:
    """Return how a case ends on the target, and its outputs."""
    if target.is_gpu:
        return gpu().ending(replace(case, ptx=retargeted(case.ptx, target.capability)))[:2]
    from sm100_sim.tools.golden.replay import ending as simulated

    return simulated(case)[:2]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """One case. What differs from another GPU's answer is no failure by itself: the rule may be
    another here, and then simulator or kernels have to follow."""
    case, vectors = _cases()[item], _vectors()
    try:
        recorded = vectors.ending(case), vectors.outputs(case)
    except KeyError as error:
        return Outcome("skipped", str(error.args[0]))
    note(f"grid {case.grid}, block {case.block}, cluster {case.cluster}: {case.rule}")
    found = ending(case, target)
    wrong = rule_difference(case, found, recorded)
    values: dict[str, Any] = {"ending": found[0]}
    if target.is_gpu and found[0].startswith(("hang", "run")):
        values["broken"] = True
    return Outcome("differs" if wrong else "passed", wrong, values)
