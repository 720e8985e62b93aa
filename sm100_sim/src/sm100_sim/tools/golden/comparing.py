"""Compares a case's outputs with recorded ones: bit for bit, or within the bound of the PTX ISA."""

from __future__ import annotations

import numpy as np

from .bounds import FORMATS, bound_of, values
from .cases import Case
from .rules.scripts import FREE, STEPS

#: Quarters of an SM, each with a register file: warp w belongs to number w % 4.
_QUARTERS = 4

#: Cases whose results lie on the other side of a flush to zero in the simulator: it rounds first,
#: and so keeps 2^-126 where the hardware gives zero (`isa/arithmetic/floating.py`).
LATE_FLUSH = {"smallest/mul.rn.ftz.f32", "smallest/fma.rn.ftz.f32"}


def comparable(array: np.ndarray, floats: str) -> np.ndarray:
    """The bits of an output; where NaN payloads are left open, every NaN is the same."""
    if not floats:
        return array.ravel()
    layout = FORMATS[floats.removesuffix("x2")]
    words: np.ndarray = np.ascontiguousarray(array).ravel().view(layout.words)
    magnitude = words & layout.words(layout.magnitude)
    return np.where(
        magnitude > layout.words(layout.infinity), layout.words(layout.magnitude), words
    )


def difference(
    case: Case, got: list[np.ndarray], recorded: list[np.ndarray], late_flush: bool = False
) -> str:
    """First disagreement of a case's outputs with the recorded ones, or nothing.

    late_flush: accept what `LATE_FLUSH` says, as of the simulator.
    """
    for number, (mine, theirs) in enumerate(zip(got, recorded, strict=True)):
        left, right = (comparable(array, case.floats) for array in (mine, theirs))
        bad = left != right
        if late_flush and case.name in LATE_FLUSH:
            bad &= ~((left & 0x7FFFFFFF == 0x00800000) & (right == left & 0x80000000))
        if bad.any():
            at = int(np.argmax(bad))
            inputs = [
                hex(int(array.ravel()[at])) for array in case.inputs if array.size == mine.size
            ]
            return (
                f"{case.name}: output {number}, {bad.sum()} of {bad.size} differ, first at "
                f"{at}: {int(left[at]):#x}, recorded {int(right[at]):#x}; inputs {inputs}"
            )
    return ""


def out_of_bound(case: Case, got: list[np.ndarray]) -> str:
    """Describe how an approximate case's only output violates the ISA's bound; "" if it does
    not."""
    (mine,) = got
    inputs = [values(array, case.floats) for array in case.inputs]
    return bound_of(case).measure(inputs, values(mine, case.floats)).wrong


def rule_difference(
    case: Case, found: tuple[str, list[np.ndarray]], recorded: tuple[str, list[np.ndarray]]
) -> str:
    """Describe how a case with a rule departs from its recording; "" if it does not.

    found, recorded: ending and outputs. An ending other than "done" and "hang" names the error; of
    one found "error" (the simulator's) it is enough that there was one, or that the case is
    undefined.
    """
    (ending, outputs), (wanted, expected) = found, recorded
    if ending == "error" and (wanted not in ("done", "hang") or case.undefined):
        return ""
    if ending != wanted:
        return f"{case.name}: {ending}, recorded {wanted}"
    if ending == "hang":
        return _progress_difference(case, outputs, expected)
    return difference(case, outputs, expected) if ending == "done" else ""


def _progress_difference(case: Case, mine: list[np.ndarray], recorded: list[np.ndarray]) -> str:
    """Compare the sums of two warps' steps: which warp of a quarter gets its registers first is
    open."""
    found = [
        array[0][:, :FREE].reshape(case.grid, -1, _QUARTERS, STEPS).sum(axis=1)
        for array in (mine, recorded)
    ]
    if (found[0] == found[1]).all():
        return ""
    return f"{case.name}: steps passed by quarter {found[0].tolist()}, recorded {found[1].tolist()}"
