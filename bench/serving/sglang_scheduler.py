"""SGLang's scheduler, watched: seconds of steps, kernels of a step, our kernels that became ready.

`run` takes the place of the function that SGLang runs in its scheduler's process.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bench.serving import orders

#: Of the names of methods that another process calls.
PREFIX = "bench_"


def run(*arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler until it is told to stop."""
    from sglang.srt.managers import scheduler

    from fa4_hd256.integrations.sglang import plugin

    plugin.register()
    original = scheduler.Scheduler

    class Watched(original):  # type: ignore[misc, valid-type, unused-ignore]
        """SGLang's, with a record of its steps."""

        def __init__(self, *given: Any, **options: Any) -> None:
            self._record = Record()
            super().__init__(*given, **options)

        def process_batch_result(self, batch: Any, result: Any) -> Any:
            found = super().process_batch_result(batch, result)
            self._record.add(batch)
            return found

        def bench_watch(self, requests: int, profiled: int) -> None:
            self._record = Record(requests, profiled)

        def bench_tell(self, path: str) -> None:
            told = {
                "backends": _backends(self), "readied": orders.readied(),
                "steps": self._record.steps, "kernels": self._record.kernels,
            }  # fmt: skip
            Path(path).write_text(json.dumps(told))

    scheduler.Scheduler = Watched
    try:
        scheduler.run_scheduler_process(*arguments, **named)
    finally:
        scheduler.Scheduler = original


class Record:
    """Steps in which so many requests decode. profiled: so many of them, behind the first, are
    those of a profile."""

    def __init__(self, requests: int = 0, profiled: int = 0) -> None:
        self.steps: list[float] = []
        self.kernels: dict[str, float] = {}
        self._requests, self._left = requests, profiled
        self._last: float | None = None
        self._profiler: Any = None

    def add(self, batch: Any) -> None:
        """Note that a batch's result is there. With SGLang's overlap the next step runs already:
        from one result to the next is the time of a step."""
        if not (batch.forward_mode.is_decode() and batch.batch_size() == self._requests):
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
            return
        if self._profiler is None:
            torch.cuda.synchronize()
            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.start()
        elif self._left > 1:
            self._left -= 1
        else:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.kernels = orders.of_a_step(self._profiler)
            self._profiler, self._left = None, 0


def _backends(scheduler: Any) -> list[str]:
    """Return the names of the backends of a model's attention. Raises RuntimeError if ours is
    named and SGLang runs another one, or the other way round."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    from fa4_hd256.integrations.sglang.plugin import NAME

    names = sorted(set(attention_backends_of(resolved_view(scheduler.server_args))))
    backend = scheduler.tp_worker.model_runner.attn_backend
    # A model with linear attention has one of each.
    kind = type(getattr(backend, "full_attn_backend", backend))
    if kind.__module__.startswith("fa4_hd256.") != (names == [NAME]):
        raise RuntimeError(f"SGLang runs {kind.__qualname__}, its arguments name {names}")
    return names
