"""Graphs that a timer prepares, with all that they read."""

import contextlib
import gc
import weakref

import pytest
import torch

from bench.measure.timer import CudaTimer


class Held:
    """Stands for the tensors that a call holds."""


@pytest.fixture
def timer(monkeypatch):
    """A timer of a GPU whose graphs count their replays; `captures` is whether they can be made."""

    class Graph:
        def __init__(self):
            self.count = 0

        def replay(self):
            self.count += 1

    class Stream:
        def wait_stream(self, other):
            pass

    found = object.__new__(CudaTimer)
    found._stream, found.captures = Stream(), True

    @contextlib.contextmanager
    def capturing(graph, stream):
        yield
        if not found.captures:
            raise RuntimeError("operation not permitted")

    for name, value in {
        "CUDAGraph": Graph, "graph": capturing, "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(), "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return found


@pytest.mark.parametrize("captures", [True, False])
def test_what_a_call_holds_lives_as_long_as_what_was_prepared(timer, captures):
    timer.captures = captures
    held = Held()
    alive = weakref.ref(held)
    prepared, launch = timer.prepare(lambda held=held: held)
    del held
    gc.collect()
    assert alive() is not None
    assert launch.startswith("graph" if captures else "plain launch: operation not permitted")
    prepared()
    del prepared
    gc.collect()
    assert alive() is None
