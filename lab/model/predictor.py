"""Predicted times of the suite's cases, of every implementation whose kernels can be replayed.

`PROVIDERS` lists those; one more is one more class with the methods of `Provider`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256 import progress
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.nvfp4_format import NVFP4
from fa4_hd256.run.kernel_names import in_words
from lab.model.backward import Backward
from lab.model.forward import Kernel
from lab.model.ours import Ours
from lab.model.peers import flash_attn_4, frost
from lab.model.peers.flash_attn_4 import FlashAttention4, FlashAttention4Divided
from lab.model.peers.flash_attn_4_five import FlashAttention4FiveProducts
from lab.model.peers.frost import Frost
from lab.model.peers.frost_backward import FrostBackward
from lab.model.stated_errors import ratio_error
from lab.paths import Paths
from lab.published.rows import Build, Published
from lab.whole.conditions import BURST, SUSTAINED, Call
from sm100_sim.timing import Machine, Values, load


class Provider(Protocol):
    """An implementation whose kernels the timing model replays.

    A variant says which of its kernels, in a form that is the same for all cases that share it;
    `forward` and `backward` compile and replay it, keep what they find (`replays.kept`, by the
    versions or the code of what is replayed), and say how it cuts a case into tiles.
    """

    name: str

    def version(self) -> str:
        """Return the version of what is replayed."""

    def replays(self, build: Build) -> bool:
        """Return True if what is replayed is that very build, for any of its options that `variant`
        takes for a case."""

    def refuses(self, case: Case, direction: str) -> str | None:
        """Return why a case cannot be predicted, None if it can."""

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        """Return (whether a call takes CLC, its KV splits) if it requests neither."""

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Hashable:
        """The kernel that a case takes. divided: with KV splits, whose number is left open."""

    def forward(self, variant: Any, machine: Machine, draws: int) -> Kernel: ...

    def backward(self, variant: Any, machine: Machine, draws: int) -> Backward | FrostBackward: ...


#: Ours with the forward's tiles however few the rows, to be held beside what calls take.
OURS_FORWARD = Ours(ForwardConfig())
#: Ours over keys and values in e4m3.
OURS_E4M3 = Ours(kv_dtype=torch.float8_e4m3fn)
#: Ours over keys and values in NVFP4.
OURS_NVFP4 = Ours(kv_dtype=NVFP4)
_ALL: tuple[Provider, ...] = (
    Ours(), OURS_FORWARD, OURS_E4M3, OURS_NVFP4, FlashAttention4(), FlashAttention4FiveProducts(),
    FlashAttention4Divided(), Frost(),
)  # fmt: skip
PROVIDERS = {one.name: one for one in _ALL}


#: Builds that only published rates are of.
HISTORY: tuple[Provider, ...] = (*flash_attn_4.HISTORY, *frost.HISTORY)


def replayable(row: Published) -> Provider | None:
    """Return what replays the very kernel of a published rate, None if nothing does."""
    for provider in (*PROVIDERS.values(), *HISTORY):
        if provider.replays(row.build) and provider.refuses(row.problem, row.direction) is None:
            try:
                provider.variant(row.problem, row.direction, divided=row.parts > 1)
            except ValueError:
                continue
            return provider
    return None


@dataclass(frozen=True)
class Predicted:
    """seconds: float64, the central prediction first, then those of the draws, of a burst;
    sustained: under lasting load. bound: what decides the central one, None where several kernels
    share the time. paths: of the replays behind it."""

    seconds: np.ndarray
    sustained: np.ndarray
    bound: str | None
    paths: Paths = Paths()

    @property
    def low(self) -> float:
        return float(self.seconds.min())

    @property
    def high(self) -> float:
        return float(self.seconds.max())


@dataclass
class Predictor:
    """The timing model for one machine. draws: replays beside the central one. ratio_error: as
    `stated_errors.ratio_error`, by default none."""

    machine: Machine
    draws: int = 4
    ratio_error: Callable[..., float] = lambda case, direction, **load: 0.0
    _kernels: dict = field(default_factory=dict)

    def refuses(self, provider: str, case: Case, direction: str) -> str | None:
        """Return why a case cannot be predicted, None if it can."""
        if provider not in PROVIDERS:
            return "the timing model needs its kernels' SASS; measured only"
        return PROVIDERS[provider].refuses(case, direction)

    def forward(self, provider: str, case: Case, use_clc: bool = False, splits: int = 1) -> Kernel:
        """The kernel that a forward takes, replayed at the first call. use_clc: of ours. splits:
        parts of its keys."""
        variant = PROVIDERS[provider].variant(case, FORWARD, use_clc, splits > 1)
        found = self._replayed(provider, FORWARD, variant)
        return found.divided(splits) if splits > 1 else found

    def backward(
        self, provider: str, case: Case, use_clc: bool = False
    ) -> Backward | FrostBackward:
        """The backward that a case takes, each of its kernels replayed where a case first needs
        it."""
        variant = PROVIDERS[provider].variant(case, BACKWARD, use_clc)
        return self._replayed(provider, BACKWARD, variant)

    def _replayed(self, provider: str, direction: str, variant: Hashable) -> Any:
        key = provider, direction, variant
        if key not in self._kernels:
            chosen = PROVIDERS[provider]
            make = getattr(chosen, direction)
            told = in_words(variant) or "full"
            with progress.step(f"replaying {provider} {chosen.version()}, {direction}: {told}"):
                self._kernels[key] = make(variant, self.machine, self.draws)
        return self._kernels[key]

    def predict(self, provider: str, case: Case, direction: str) -> Predicted:
        """Predict a call with its default scheduler and KV splits. Raises ValueError for a case
        that `refuses` gives a reason for."""
        reason = self.refuses(provider, case, direction)
        if reason:
            raise ValueError(f"{provider}, {case}: {reason}")
        use_clc, splits = PROVIDERS[provider].default(case, direction, self.machine)
        if direction == BACKWARD:
            backward = self.backward(provider, case, use_clc)
            calls = backward.calls(case)
            return Predicted(*self._seconds(calls, backward.values), None, backward.paths_of(case))
        return self.predict_forward(provider, case, use_clc, splits)

    def _seconds(
        self, calls: Sequence[Call], values: Sequence[Values]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (seconds of a burst, sustained seconds) of a call for each of the drawn
        machines."""
        burst, sustained = (
            np.array([one.seconds(drawn, load) for one, drawn in zip(calls, values)])
            for load in (BURST, SUSTAINED)
        )
        return burst, sustained

    def predict_forward(
        self, provider: str, case: Case, use_clc: bool = False, splits: int = 1
    ) -> Predicted:
        """A forward; use_clc, splits: see `forward`. With KV splits, the kernel that combines them
        included, at a launch (`ForwardTiling.dependent`) and HBM's rate."""
        kernel = self.forward(provider, case, use_clc, splits)
        calls = kernel.calls(case)
        schedules = calls[0].schedules
        bound = schedules[0][1].bound if len(schedules) == 1 else None
        return Predicted(*self._seconds(calls, kernel.values), bound, kernel.paths_of(case))


def predictor_of(machine: str, draws: int) -> Predictor:
    """Return a predictor for the machine of that name, whose ratios count with the error of their
    class. Raises ValueError for a machine of Hopper."""
    chosen = load(machine)
    if chosen.architecture == "sm_90a":
        raise ValueError(
            f"machine {machine!r}: calls on Hopper are measured, and predicted by `python -m lab "
            "predict`; accepted are machines of compute capability 10.x"
        )
    return Predictor(chosen, draws, ratio_error)
