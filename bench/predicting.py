"""Predicted times of the suite's cases, for ours and for flash-attn-4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from schedulers.choice import prefers_clc
from sm100_sim.timing.machine_constants import Machine

from . import flash_attn_4, modelled, workload
from .providers import OURS
from .replays import Paths
from .suite import BACKWARD, FORWARD, Case

PREDICTED = (OURS, flash_attn_4.PACKAGE)


@dataclass(frozen=True)
class Predicted:
    """seconds: float64, the central prediction first, then those of the draws. bound: what decides
    the central one, None where several kernels share the time. paths: of the replays behind it.
    unlimited: seconds without the power limit, None where several kernels share the time."""

    seconds: np.ndarray
    bound: str | None
    paths: Paths = Paths()
    unlimited: np.ndarray | None = None

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
        if direction != FORWARD and not _is_plain(case):
            return "the model has the backward of sequences of one length, full and causal"
        if provider == flash_attn_4.PACKAGE:
            return flash_attn_4.unavailable()
        return None

    def kernel(
        self, provider: str, kind: workload.Kind, use_clc: bool = False
    ) -> modelled.Kernel:
        """The forward kernel of a kind, replayed at the first call; use_clc: of ours."""
        key = provider, kind, use_clc
        if key not in self._kernels:
            self.note(f"replaying {provider}, {kind}{', CLC' if use_clc else ''}")
            self._kernels[key] = self._replayed(*key)
        return self._kernels[key]

    def _replayed(self, provider: str, kind: workload.Kind, use_clc: bool) -> modelled.Kernel:
        name, draws = self.machine.name, self.draws
        if provider == OURS:
            if kind.is_dense:
                return modelled.our_kernel(kind.causal, name, draws, use_clc=use_clc)
            return workload.our_kernel(workload.Variant(kind, use_clc), self.machine, draws)
        if kind.is_dense:
            return modelled.their_kernel(workload.HEAD_DIM, kind.causal, name, draws)
        return workload.their_kernel(kind, self.machine, draws)

    def _backward(self, provider: str, causal: bool, use_clc: bool) -> modelled.Attention:
        key = provider, causal, use_clc, BACKWARD
        if key not in self._kernels:
            self.note(f"replaying {provider}'s backward, {'causal' if causal else 'full'}")
            name, draws = self.machine.name, self.draws
            if provider == OURS:
                found = modelled.our_kernel(causal, name, draws, BACKWARD, use_clc=use_clc)
            else:
                found = modelled.their_kernel(workload.HEAD_DIM, causal, name, draws, BACKWARD)
            self._kernels[key] = found
        return self._kernels[key]

    def predict(self, provider: str, case: Case, direction: str) -> Predicted:
        """Ours by the scheduler that it takes by default. Raises ValueError for a case that
        `refuses` gives a reason for."""
        reason = self.refuses(provider, case, direction)
        if reason:
            raise ValueError(f"{provider}, {case}: {reason}")
        use_clc = provider == OURS and defaults_to_clc(case)
        if direction == BACKWARD:
            shape = modelled.Shape(
                case.batch, case.seqlen_q, case.heads, case.heads_kv, case.causal
            )
            backward = self._backward(provider, case.causal, use_clc)
            return Predicted(backward.seconds(shape), None, backward.paths_of(shape))
        kernel = self.kernel(provider, workload.Kind.of(case), use_clc)
        found = workload.run(case, kernel)
        seconds = np.array([s.seconds for s in found])
        unlimited = np.array([s.seconds_without("power") for s in found])
        return Predicted(seconds, found[0].bound, kernel.paths, unlimited)


def defaults_to_clc(case: Case) -> bool:
    """Whether a call of ours without `use_clc` and FA_CLC takes the dynamic scheduler."""
    rows, capacity = sum(q for q, _ in case.lengths), case.batch * case.seqlen_q
    return prefers_clc(case.bounds != (None, None), rows, capacity)


def _is_plain(case: Case) -> bool:
    return workload.Kind.of(case).is_dense and case.seqlen_q == case.seqlen_k
