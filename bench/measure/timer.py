"""Measured times: interleaved runs of several calls on one GPU, with clocks and power.

`triton.testing.do_bench` and its CUDA-graph form time one call after the other. Here the runs of
all calls of a row are interleaved, so that a change of clock or temperature meets all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from bench.suite import FLOP_PER_CLOCK

from .nvml import Nvml, NvmlError
from .settings import CLEAN, COLD, WARM, Sampling

#: Clocks of a GPU that waits while the host enqueues a graph and two events.
_PAUSE_CLOCKS = 60_000
#: Whatever tells calls apart.
_Name = TypeVar("_Name", bound=Hashable)
#: What `CudaTimer.prepare` returns: what to run, and how it runs.
Prepared = tuple[Callable[[], Any], str]


@dataclass(frozen=True)
class State:
    """State that the GPU reports after a run; None where it cannot be read."""

    clock_mhz: float | None = None
    power_watts: float | None = None


@dataclass
class Samples:
    """Runs of one call. seconds: of each; launch: how it runs, by `CudaTimer.prepare`."""

    launch: str
    seconds: list[float] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.seconds, share))

    def median_state(self) -> State:
        def median(name: str) -> float | None:
            known = [getattr(s, name) for s in self.states if getattr(s, name) is not None]
            return float(np.median(known)) if known else None

        return State(median("clock_mhz"), median("power_watts"))


def interleave(
    timer: CudaTimer, calls: dict[_Name, Callable[[], Any]], sampling: Sampling
) -> dict[_Name, Samples]:
    """Time calls interleaved, each prepared by the timer; see `interleave_prepared`."""
    ready = {name: timer.prepare(call) for name, call in calls.items()}
    return interleave_prepared(timer, ready, sampling)


def interleave_prepared(
    timer: CudaTimer, ready: dict[_Name, Prepared], sampling: Sampling
) -> dict[_Name, Samples]:
    """Time prepared calls. Each round begins with another call, and the order rotates: none always
    follows the same."""
    prepared = {name: call for name, (call, _) in ready.items()}
    if sampling.seconds is not None:
        sampling = sampling.limited(sum(timer.seconds(call) for call in prepared.values()))
    found = {name: Samples(launch) for name, (_, launch) in ready.items()}
    names = list(prepared)
    for turn in range(sampling.warmup + sampling.runs):
        backwards, shift = divmod(turn, max(len(names), 1))
        for name in (names[shift:] + names[:shift])[:: -1 if backwards % 2 else 1]:
            seconds = timer.seconds(prepared[name])
            if turn >= sampling.warmup:
                found[name].seconds.append(seconds)
                found[name].states.append(timer.state())
    return found


@dataclass(frozen=True)
class Gpu:
    """The GPU that measures. flop_per_clock: None for a GPU whose peak is not known here."""

    name: str
    sms: int
    flop_per_clock: int | None
    l2_bytes: int
    driver: str

    @property
    def text(self) -> str:
        """Return the name in tables."""
        return f"{self.name}, driver {self.driver}"

    def peak_tflops(self, clock_mhz: float | None) -> float | None:
        """Return the peak TFLOPS of dense bf16 MMAs at that clock."""
        if self.flop_per_clock is None or clock_mhz is None:
            return None
        return self.sms * self.flop_per_clock * clock_mhz * 1e6 / 1e12


def _replay(graph: torch.cuda.CUDAGraph, call: Callable[[], Any]) -> None:
    """Run what was captured of the call. It reads what the call holds, inputs and what a forward
    left for its backward: without the call PyTorch may give that memory back, and does so when the
    next graph is captured."""
    graph.replay()


class CudaTimer:
    """Times CUDA graphs by events, after L2 has been filled with something else or, with `WARM`,
    after a pause."""

    def __init__(self, device: int = 0, l2: str = COLD) -> None:
        """l2: one of `L2_STATES`. Raises ValueError if there is no such CUDA device."""
        if not torch.cuda.is_available():
            raise ValueError("no CUDA device to measure on: PyTorch finds none here")
        self.l2, self.device = l2, torch.device("cuda", device)
        properties = torch.cuda.get_device_properties(self.device)
        self._nvml, driver = None, "unknown"
        with contextlib.suppress(OSError, AttributeError, NvmlError):
            self._nvml = Nvml(f"GPU-{properties.uuid}")
            driver = self._nvml.driver_version()
        self.gpu = Gpu(
            properties.name, properties.multi_processor_count,
            FLOP_PER_CLOCK.get((properties.major, properties.minor)), properties.L2_cache_size,
            driver,
        )  # fmt: skip
        words = self.gpu.l2_bytes // 2
        self._eraser = torch.empty(words, dtype=torch.float32, device=self.device)
        self._read = torch.zeros(words if l2 == CLEAN else 1, device=self.device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._stream = torch.cuda.Stream(self.device)

    def prepare(self, call: Callable[[], Any]) -> Prepared:
        """Return a CUDA graph of the call and "graph"; where it cannot be captured, the call and
        the reason for a plain launch."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            return call, f"plain launch: {str(error).splitlines()[0]}"
        return partial(_replay, graph, call), "graph"

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Issue work on the stream of the captures: a backward runs on its forward's stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one run."""
        start, end = self._events
        with torch.cuda.stream(self._stream):
            # The GPU is busy with this while the host enqueues the call.
            if self.l2 == WARM:
                torch.cuda._sleep(_PAUSE_CLOCKS)
            else:
                self._eraser.zero_()
            if self.l2 == CLEAN:
                self._read.sum()
            start.record()
            call()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def state(self) -> State:
        """Read clock and power; None for what this GPU, or a virtual one, does not report."""
        if self._nvml is None:
            return State()
        return State(self._nvml.sm_clock_mhz(), self._nvml.power_watts())

    def release_memory(self) -> None:
        """Give back what no tensor uses any more."""
        torch.cuda.empty_cache()
