"""Predictions of the cases: few clusters are simulated and replayed, and many timed by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sm100_sim import devices, launch_cuda
from sm100_sim.timing.whole import Launch, WholeLaunches

from .case import Case, Extent
from .cuda_kernels import TEXTBOOK, Source, host_headers

GPU = "h200"
#: Sets of constants drawn beside the central ones.
DRAWS = 8


class Simulated:
    """The simulator as the world of a case. device: of the tensors."""

    def __init__(self, found: WholeLaunches, device: str) -> None:
        import torch

        self.found, self.device = found, device
        self._torch, self._random = torch, torch.Generator().manual_seed(0)

    def tensor(self, *shape: int, dtype: str, low: int | None = None) -> Any:
        kind = getattr(self._torch, dtype)
        if low is not None:
            made = self._torch.randint(low, shape, generator=self._random, dtype=kind)
        else:
            made = self._torch.randn(*shape, generator=self._random).to(kind)
        return made.to(self.device)

    def launch(
        self, kernel: str, grid: Extent, block: Extent, *arguments: Any, source: Source = TEXTBOOK
    ) -> None:
        folders = [*source.folders(), host_headers()] if source.package else []
        launch_cuda(
            source.text, kernel, arguments, grid=grid, block=block,
            flags=[f"--include-path={folder}" for folder in folders], options=self.found.options(),
        )  # fmt: skip


@contextlib.contextmanager
def _world(found: WholeLaunches, language: str) -> Iterator[Simulated]:
    if language == "CUDA C++":
        yield Simulated(found, "cpu")
        return
    from sm100_sim.attach import attached

    # Machine code as it would be on a GPU, without line information.
    with attached(clusters=1, trace=True, observe=found.observe, lines=False):
        yield Simulated(found, "cuda")


def launches(case: Case, draws: int = DRAWS) -> list[Launch]:
    """Return the launches of a case's few clusters, of the kernels that count."""
    with devices.default_device(GPU):
        found = WholeLaunches(GPU, draws)
        with _world(found, case.language) as world:
            case.prepare(world, **case.few)()
    return [one for one in found.launches if case.part in one.prediction.report.kernel]


def predict(case: Case, draws: int = DRAWS) -> dict[str, Any]:
    """Return the prediction of a case's launch on the GPU, as JSON has it."""
    (launch,) = launches(case, draws)
    whole = launch.whole(case.clusters, case.hbm_bytes)
    drawn = launch.seconds(case.clusters, case.hbm_bytes)
    prediction = launch.prediction
    return {
        "microseconds": whole.seconds * 1e6,
        "low": float(np.min(drawn)) * 1e6,
        "high": float(np.max(drawn)) * 1e6,
        "waves": whole.waves * 1e6,
        "memory": whole.memory * 1e6,
        "bound": whole.bound,
        "busy": round(whole.busy.get(whole.bound, 1.0), 3),
        "resident": whole.resident,
        "rounds": whole.rounds,
        "clocks": whole.clocks,
        "registers": launch.resources.registers,
        "shared": launch.resources.shared,
        "instructions": len(prediction.compiled.function.instructions),
        "unmatched": prediction.compiled.unmatched,
        "ambiguous": prediction.compiled.ambiguous,
    }
