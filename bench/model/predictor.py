"""Predicted times of the suite's cases, for ours and for flash-attn-4."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from bench.measure.providers import OURS
from bench.peers import flash_attn_4
from bench.suite import BACKWARD, Case
from schedulers.choice import backward_prefers_clc, prefers_clc
from sm100_sim.timing.machine_constants import Machine, load

from . import backward as modelled_backward
from . import forward as modelled
from . import workload
from .replays import Paths

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
        if provider == flash_attn_4.PACKAGE:
            kind, reason = workload.Kind.of(case), flash_attn_4.unavailable()
            if reason is None and direction == BACKWARD:
                return flash_attn_4.backward_refusal(kind.window, kind.softcap)
            return reason
        return None

    def kernel(
        self, provider: str, kind: workload.Kind, use_clc: bool = False,
        split_rows: int | None = None,
    ) -> modelled.Kernel:
        """The forward kernel of a kind, replayed at the first call; use_clc, split_rows: of ours,
        see `workload.Variant`."""
        key = provider, kind, use_clc, split_rows
        if key not in self._kernels:
            divided = f", keys of {split_rows} rows divided" if split_rows else ""
            self.note(f"replaying {provider}, {kind}{', CLC' if use_clc else ''}{divided}")
            self._kernels[key] = self._replayed(*key)
        return self._kernels[key]

    def _replayed(
        self, provider: str, kind: workload.Kind, use_clc: bool, split_rows: int | None
    ) -> modelled.Kernel:
        name, draws = self.machine.name, self.draws
        if provider == OURS:
            variant = workload.Variant(kind, use_clc, split_rows=split_rows)
            return workload.our_kernel(variant, self.machine, draws)
        if kind.is_dense:
            return modelled.their_kernel(workload.HEAD_DIM, kind.causal, name, draws)
        return workload.their_kernel(kind, self.machine, draws)

    def backward(
        self, provider: str, kind: workload.Kind, use_clc: bool = False
    ) -> modelled_backward.Backward:
        """The backward of a kind, each of its kernels replayed where a case first needs it."""
        key = provider, kind, use_clc, BACKWARD
        if key not in self._kernels:
            self.note(f"replaying {provider}'s backward, {kind}{', CLC' if use_clc else ''}")
            if provider == OURS:
                variant = modelled_backward.Variant(kind, use_clc)
                found = modelled_backward.our_backward(variant, self.machine, self.draws)
            else:
                found = modelled_backward.their_backward(kind, self.machine, self.draws)
            self._kernels[key] = found
        return self._kernels[key]

    def predict(self, provider: str, case: Case, direction: str) -> Predicted:
        """Ours by the scheduler and with the division of keys that it takes by default. Raises
        ValueError for a case that `refuses` gives a reason for."""
        reason = self.refuses(provider, case, direction)
        if reason:
            raise ValueError(f"{provider}, {case}: {reason}")
        kind = workload.Kind.of(case)
        use_clc = provider == OURS and defaults_to_clc(case, direction)
        if direction == BACKWARD:
            backward = self.backward(provider, kind, use_clc)
            return Predicted(backward.seconds(case), None, backward.paths_of(case))
        splits = 1
        if provider == OURS:
            splits = workload.default_splits(case, modelled.gpu_of(self.machine))
        return self.predict_forward(provider, case, use_clc, splits)

    def predict_forward(
        self, provider: str, case: Case, use_clc: bool = False, splits: int = 1
    ) -> Predicted:
        """A forward; use_clc, splits: of ours."""
        kind = workload.Kind.of(case)
        if splits == 1:
            kernel = self.kernel(provider, kind, use_clc)
        else:
            # Costs follow how many rows a tile has, which store their O; windowed samples have all.
            rows = workload.ROWS
            if not kind.window:
                rows = min(case.seqlen_q * workload.problem_of(case).packed_heads, rows)
            kernel = replace(self.kernel(provider, kind, use_clc, rows), num_splits=splits)
        found = workload.run(case, kernel)
        seconds = np.array([s.seconds for s in found])
        unlimited = np.array([s.seconds_without("power") for s in found])
        if splits > 1:
            beside = [workload.combine_seconds(case, splits, v) for v in kernel.values]
            seconds, unlimited = seconds + beside, unlimited + beside
        return Predicted(seconds, found[0].bound, kernel.paths, unlimited)


def printing_predictor(machine: str, draws: int) -> Predictor:
    """A predictor for the machine of that name that says on stderr what it replays."""

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return Predictor(load(machine), draws, note)


def add_model_options(parser: argparse.ArgumentParser, draws: int = 4) -> None:
    """Whether the model is used where there is a GPU, and its settings. draws: the default."""
    parser.add_argument("--modelled", action="store_true", help="model, even with a GPU")
    parser.add_argument(
        "--machine", default="b200",
        help="of the model: b200, b300, or a file such as the report of a bringup",
    )
    parser.add_argument(
        "--draws", type=int, default=draws, help="draws of its uncertain constants"
    )


def defaults_to_clc(case: Case, direction: str) -> bool:
    """Whether a call of ours without `use_clc` and FA_CLC takes the dynamic scheduler."""
    bounded = case.bounds != (None, None)
    if direction == BACKWARD:
        return backward_prefers_clc(bounded, case.packed)
    rows, capacity = sum(q for q, _ in case.lengths), case.batch * case.seqlen_q
    return prefers_clc(bounded, rows, capacity)
