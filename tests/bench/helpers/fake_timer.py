"""A timer for the measuring loop that needs no GPU."""

import contextlib

import torch

from bench.measure.timer import Gpu, State


class FakeTimer:
    """Every run of a call takes what the call says, one microsecond longer each time."""

    device = torch.device("cpu")
    gpu = Gpu("a GPU", 100, 8192, 1 << 20, "1.0")

    def __init__(self) -> None:
        self.order = []

    def prepare(self, call):
        return call, "graph"

    def on_stream(self):
        return contextlib.nullcontext()

    def seconds(self, call):
        self.order.append(call)
        return 1e-3 + 1e-6 * self.order.count(call)

    def state(self):
        return State(2000.0, 600.0)

    def release_memory(self):
        pass


class CountingTimer(FakeTimer):
    """A call takes a microsecond more than the one prepared before it; the first, one."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared = []

    def prepare(self, call):
        self.prepared.append(call)
        return super().prepare(call)

    def seconds(self, call):
        return (1 + self.prepared.index(call)) * 1e-6
