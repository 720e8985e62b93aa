"""Orders of an engine in a process of its own, and its answers.

Orders come on stdin, a line of JSON each, and each is answered with a line on stdout. The first
order has the engine's arguments. An answer has `readied`, the number of our kernels that became
ready meanwhile: compiled, or loaded from a cache or a folder. What the engine itself writes goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from bench.processes import answers

#: Steps of a profile.
PROFILED = 16

#: Tokens of each text.
Texts = list[list[int]]


class Served(Protocol):
    """An engine that serves one model."""

    def backends(self) -> list[str]:
        """Return the names of the backends that layers of attention have."""

    def readied(self) -> int:
        """Return how many of our kernels have become ready since the engine's process began."""

    def time(self, texts: Texts, tokens: int) -> dict[str, Any]:
        """Generate. seconds: of all; steps: of each step in which all requests decoded."""

    def profile(self, texts: Texts, tokens: int) -> dict[str, Any]:
        """Return what a step of decoding takes the GPU. kernels: microseconds of a step, by name;
        none without a GPU."""

    def decode(self, texts: Texts, tokens: int) -> dict[str, Any]:
        """Return generated tokens, and the log-probability of each."""

    def score(self, texts: Texts) -> dict[str, Any]:
        """Return the log-probability of each token behind the first, and the likeliest one
        there."""


def main(environment: Mapping[str, str], make: Callable[[dict[str, Any]], Served]) -> int:
    """Serve orders until stdin ends. environment: settings unless the user has others."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    _serve(sys.stdin, answers(), make)
    # Threads of the engine would keep the process.
    os._exit(0)


def readied() -> int:
    """Return how many of our kernels have become ready in this process."""
    from fa4_hd256.run.compile import counters

    return sum(count for how, count in counters.items() if how != "memory")


class Record:
    """Steps in which all requests decode. steps: seconds from the result of one to that of the
    next. kernels: microseconds of each kernel in a step, by name, of so many steps behind the first
    if they are profiled and there is a GPU."""

    def __init__(self, profiled: int = 0) -> None:
        self.steps: list[float] = []
        self.kernels: dict[str, float] = {}
        self._left = profiled
        self._last: float | None = None
        self._profiler: Any = None

    def add(self, decoding: bool) -> None:
        """Note that a step's result is there. decoding: in it all requests decoded."""
        if not decoding:
            self._last = None
            return
        now = time.perf_counter()
        if self._last is not None:
            self.steps.append(now - self._last)
        self._last = now
        if self._left or self._profiler is not None:
            self._profile()

    def _profile(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if not torch.cuda.is_available():
            self._left = 0
        elif self._profiler is None:
            torch.cuda.synchronize()
            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.start()
        elif self._left > 1:
            self._left -= 1
        else:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.kernels = {
                event.key: event.self_device_time_total / PROFILED
                for event in self._profiler.key_averages()
                if event.self_device_time_total
            }
            self._profiler, self._left = None, 0


def _serve(orders: TextIO, said: TextIO, make: Callable[[dict[str, Any]], Served]) -> None:
    engine: Served | None = None
    before = 0
    for line in orders:
        order, begin = json.loads(line), time.perf_counter()
        if engine is None:
            engine = make(order)
            answer: dict[str, Any] = {"backends": engine.backends()}
        else:
            kind = order.pop("do")
            known: dict[str, Callable[..., dict[str, Any]]] = {
                "time": engine.time, "profile": engine.profile, "decode": engine.decode,
                "score": engine.score,
            }  # fmt: skip
            answer = known[kind](**order)
        answer.setdefault("seconds", time.perf_counter() - begin)
        now = engine.readied()
        print(json.dumps({**answer, "readied": now - before}), file=said, flush=True)
        before = now
