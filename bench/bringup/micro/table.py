"""Defines a microbenchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .timed import Timed


@dataclass(frozen=True)
class Micro:
    """name; unit; the kernels to time; value: clocks of a round of each -> the figure.

    constant: the constant of the timing model that it sets, or "". what: one line for a reader.
    tcgen05: whether it needs a GPU of compute capability 10.x. seconds: `value` gets the seconds of
    a launch, by the driver's events around a graph of `LAUNCHES`, in place of clocks of a round.
    around: what the model counts in such a round beside the constant, taken off the value; wakes:
    how often a warp is woken by a barrier beside that. The tests compute them by replaying the
    kernels.
    """

    name: str
    unit: str
    kernels: tuple[Timed, ...]
    value: Callable[..., float]
    constant: str
    what: str
    tcgen05: bool = False
    seconds: bool = False
    around: float = 0.0
    wakes: int = 0

    def figure(self, *series: float, wake: float = 0.0) -> float:
        """The value less what is around it, from one number for each kernel. wake: clocks of the
        GPU's `barrier_wake`."""
        return self.value(*series) - self.around - self.wakes * wake


#: Launches of a kernel whose seconds are taken.
LAUNCHES = 50
