"""Golden vectors: single instructions on this machine beside what a Hopper GPU recorded, and
beside what the simulator predicts where no GPU has recorded anything yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from bench.bringup.outcome import Outcome, Target, is_fault
from bench.bringup.stages.gpu import predicted, run_case
from sm100_sim.tools import golden
from sm100_sim.tools.golden import Case, Vectors
from sm100_sim.tools.golden.comparing import difference, out_of_bound
from sm100_sim.tools.golden.instructions import gather, mma, pairs, tcgen05
from sm100_sim.tools.golden.instructions.tcgen05 import Probe
from sm100_sim.tools.golden.record import DriverError

#: The driver's call that a module is refused at, by ptxas or for its version of the PTX ISA.
LOADING = "cuModuleLoadData"


@lru_cache(maxsize=1)
def _recorded() -> dict[str, Case]:
    # wgmma is Hopper's alone, and its vectors were recorded there.
    return {case.name: case for case in golden.all_cases() if not case.rule and not case.hopper}


@lru_cache(maxsize=1)
def _probes() -> dict[str, Probe]:
    probes = (*mma.probes(), *tcgen05.probes(), *pairs.probes(), *gather.probes())
    return {probe.case.name: probe for probe in probes}


@lru_cache(maxsize=1)
def _vectors() -> Vectors:
    return Vectors()


def missing(target: Target) -> str:
    """The vectors come with sm100_sim."""
    try:
        Vectors()
    except FileNotFoundError as error:
        return f"no vectors here: {error}"
    return ""


def items(target: Target) -> list[str]:
    """Names of the cases: those a Hopper GPU has recorded, then those of Blackwell alone."""
    return [*_recorded(), *(_probes() if target.has_tcgen05 else ())]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    if item in _probes():
        return _against_expectation(_probes()[item], target, note)
    return _against_recording(_recorded()[item], target, note)


def _against_expectation(probe: Probe, target: Target, note: Callable[[str], None]) -> Outcome:
    """No GPU has recorded these: numpy says what the manual promises, the simulator what it does. A
    GPU that departs from numpy "differs": manual, case or GPU may be what is wrong."""
    case = probe.case
    note(f"{probe.what}; grid {case.grid}, block {case.block}, cluster {case.cluster}")
    found = run_case(target, case)
    wrong = probe.wrong(found)
    values = {} if probe.show is None else {"here": probe.show(found)}
    if not target.is_gpu:
        return Outcome("failed" if wrong else "passed", wrong, values)
    try:
        simulated = predicted(case)
    except ImportError as error:
        return Outcome("differs" if wrong else "passed", wrong, {**values, "simulator": str(error)})
    if probe.show is not None:
        values["simulator"] = probe.show(simulated)
    elif not wrong and any((a != b).any() for a, b in zip(found, simulated)):
        wrong = "as numpy has it, and not as the simulator predicts"
    if wrong:
        values |= _both(found, simulated)
    return Outcome("differs" if wrong else "passed", wrong or "", values)


def _both(found: list[np.ndarray], simulated: list[np.ndarray]) -> dict:
    """The first words that differ, as this machine and as the simulator have them."""
    for number, (here, there) in enumerate(zip(found, simulated)):
        places = np.argwhere(here != there)[:8]
        if len(places):
            return {
                "output": number,
                "places": places.tolist(),
                "found": [hex(int(here[tuple(p)])) for p in places],
                "predicted": [hex(int(there[tuple(p)])) for p in places],
            }
    return {"simulator": "the same words"}


def _against_recording(case: Case, target: Target, note: Callable[[str], None]) -> Outcome:
    try:
        recorded = _vectors().outputs(case)
    except KeyError as error:
        return Outcome("skipped", str(error.args[0]))
    note(f"grid {case.grid}, block {case.block}, cluster {case.cluster}")
    if case.faults:
        return _expect_fault(case, target)
    try:
        found = run_case(target, case)
    except DriverError as error:
        if not str(error).startswith(LOADING):
            raise
        return Outcome("failed", f"the driver refuses a module that an H200's took: {error}")
    if not case.approximate:
        wrong = difference(case, found, recorded, late_flush=not target.is_gpu)
        return Outcome("failed" if wrong else "passed", wrong)
    wrong = out_of_bound(case, found)
    same = float(np.mean(found[0] == recorded[0]))
    text = wrong or ("" if same == 1 else f"within the bound; {same:.1%} equal the recording")
    return Outcome("failed" if wrong else "passed", text, {"equal": round(same, 4)})


def _expect_fault(case: Case, target: Target) -> Outcome:
    try:
        run_case(target, case)
    except Exception as error:
        if not is_fault(error):
            raise
        # The context is broken: the runner starts a new process behind this one.
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        recorded = _vectors().manifest["faults"][case.name]
        if target.is_gpu and (LOADING in said) != (LOADING in recorded):
            return Outcome("failed", f"{said}; recorded: {recorded}", {"broken": True})
        return Outcome("passed", f"refused, as recorded: {said}", {"broken": True})
    return Outcome("failed", "no error, where the recording has one")
