"""Runs programs in the simulator."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sm100_sim.errors import Hang, SimulationError
from sm100_sim.interrupt import end_with_parent, starting_workers
from sm100_sim.launcher import forget_kernels
from sm100_sim.tools.golden.cases import Case
from sm100_sim.tools.golden.replay import replay

from .outcome import ENDED, HANG, REFUSED, VARIES, Outcome, Variant, digest

#: Schedules of a program that may hang (its end must not depend on them) and of any other one.
_HANG_SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"seed": 1}, {"seed": 2}, {"seed": 3})
_SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"schedule": "lazy"})

Result = tuple[Variant, Outcome, "list[np.ndarray] | None"]


def _once(case: Case, options: dict) -> tuple[str, str, list[np.ndarray] | None]:
    try:
        return ENDED, "", replay(case, **options)
    except Hang:
        return HANG, "", None
    except SimulationError as error:
        return REFUSED, f"{type(error).__name__}: {error}", None


def outcome_of(variant: Variant) -> Result:
    """Return the outcome of a variant in the simulator, the same under several schedules."""
    case = variant.case()
    found = [
        _once(case, options) for options in (_HANG_SCHEDULES if variant.may_hang else _SCHEDULES)
    ]
    forget_kernels()
    states = [(state, digest(outputs) if outputs else "") for state, _, outputs in found]
    state, text, outputs = found[0]
    if len(set(states)) > 1:
        seen = ", ".join(" ".join(part for part in one if part) for one in states)
        text, outputs = f"depends on the schedule: {seen}", None
        state = VARIES if variant.may_hang else REFUSED
    output = digest(outputs) if outputs else ""
    return variant, Outcome(state, case.digest(), output, text), outputs


def _prepare() -> None:
    """Initialise a worker: thousands of programs that run once are not worth keeping on disk."""
    end_with_parent()
    os.environ["SM100_SIM_CACHE_DIR"] = "off"


def run(variants: Iterable[Variant], processes: int = 1) -> Iterator[Result]:
    """Run variants in the simulator: what each one gave, and its outputs if it ended."""
    context = multiprocessing.get_context("spawn")
    with starting_workers():
        workers = context.Pool(processes, _prepare, maxtasksperchild=2000)
    with workers as pool:
        yield from pool.imap(outcome_of, variants, 8)
