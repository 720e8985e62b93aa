"""Predicted times of the suite's cases, for ours and for flash-attn-4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sm100_sim.timing.machine_constants import Machine

from . import flash_attn_4, modelled, workload
from .providers import OURS
from .suite import FORWARD, Case

PREDICTED = (OURS, flash_attn_4.PACKAGE)


@dataclass(frozen=True)
class Predicted:
    """seconds: float64, the central prediction first, then those of the draws. bound: what decides
    the central one."""

    seconds: np.ndarray
    bound: str

    @property
    def low(self) -> float:
        return float(self.seconds.min())

    @property
    def high(self) -> float:
        return float(self.seconds.max())


@dataclass
class Predictor:
    """The timing model for one machine. draws: replays beside the central one. note: is told what
    is being replayed, which takes a while."""

    machine: Machine
    draws: int = 4
    note: Callable[[str], None] = lambda text: None
    _kernels: dict = field(default_factory=dict)

    def refuses(self, provider: str, case: Case, direction: str) -> str | None:
        """Why a case cannot be predicted, None if it can."""
        if provider not in PREDICTED:
            return "the timing model needs its kernels' SASS for sm_100a; measured only"
        if direction != FORWARD:
            return "no model of the backward yet"
        if provider == flash_attn_4.PACKAGE:
            return flash_attn_4.unavailable()
        return None

    def kernel(self, provider: str, kind: workload.Kind) -> modelled.Kernel:
        """The forward kernel of a kind, replayed at the first call."""
        if (provider, kind) not in self._kernels:
            self.note(f"replaying {provider}, {kind}")
            self._kernels[provider, kind] = self._replayed(provider, kind)
        return self._kernels[provider, kind]

    def _replayed(self, provider: str, kind: workload.Kind) -> modelled.Kernel:
        name, draws = self.machine.name, self.draws
        if provider == OURS:
            if kind.is_dense:
                return modelled.our_kernel(kind.causal, name, draws)
            return workload.our_kernel(workload.Variant(kind), self.machine, draws)
        if kind.is_dense:
            return modelled.their_kernel(workload.HEAD_DIM, kind.causal, name, draws)
        return workload.their_kernel(kind, self.machine, draws)

    def predict(self, provider: str, case: Case, direction: str) -> Predicted:
        """Raises ValueError for a case that `refuses` gives a reason for."""
        reason = self.refuses(provider, case, direction)
        if reason:
            raise ValueError(f"{provider}, {case}: {reason}")
        found = workload.run(case, self.kernel(provider, workload.Kind.of(case)))
        return Predicted(np.array([s.seconds for s in found]), found[0].bound)
