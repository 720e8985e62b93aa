"""Stated error of the model in a ratio of two projects' kernels, by class of call.

No published rate is of both kernels of such a ratio.  So it counts with what `lab validate` finds
single rows of its class to be off, at the fitted clocks of their GPUs, since both kernels have the
same clock.
"""

from __future__ import annotations

from bench.suite import BACKWARD, Case

UP_TO_2K, UP_TO_32K, LONGER, CHUNKS = "1k-2k", "4k-32k", "64k-128k", "chunks"

#: Root mean square error of a class.  They are wider than those of
#: lab/docs/tables/validate_aims.md, so that each has 15 rows or more.
CLASSES = {
    "forward, up to 2k": 0.051,
    "forward, full, to 32k": 0.020,
    "forward, causal, to 32k": 0.030,
    "forward, fewer queries than keys": 0.046,
    "forward, longer or under load": 0.074,
    "backward": 0.054,
}


def lengths_of(queries: int, keys: int) -> str:
    """The class of a call's lengths: `CHUNKS` where there are fewer queries than keys."""
    if queries < keys:
        return CHUNKS
    return UP_TO_2K if keys <= 2048 else UP_TO_32K if keys <= 32768 else LONGER


def class_of(case: Case, direction: str, *, sustained: bool = False) -> str:
    """One of `CLASSES`.  sustained: under lasting load; else a burst."""
    if direction == BACKWARD:
        return "backward"
    queries, keys = (max(lengths) for lengths in zip(*case.lengths, strict=True))
    lengths = lengths_of(queries, keys)
    if sustained or lengths == LONGER:
        return "forward, longer or under load"
    if lengths == CHUNKS:
        return "forward, fewer queries than keys"
    if lengths == UP_TO_2K:
        return "forward, up to 2k"
    return f"forward, {'causal' if case.causal else 'full'}, to 32k"


def ratio_error(case: Case, direction: str, *, sustained: bool = False) -> float:
    """Return the error of the logarithm of two kernels' ratio, beside what sets of constants
    show."""
    return CLASSES[class_of(case, direction, sustained=sustained)]


def stated_errors() -> str:
    """All classes, as notes of tables have them."""
    return "; ".join(f"{name}: {error:.1%}" for name, error in CLASSES.items())
