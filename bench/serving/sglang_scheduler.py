"""SGLang's scheduler, watched: seconds of steps, kernels of a step, our kernels that became ready.

`run` takes the place of the function that SGLang runs in its scheduler's process.
"""

from __future__ import annotations

import json
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
            self.bench_watch(0, 0)
            super().__init__(*given, **options)

        def process_batch_result(self, batch: Any, result: Any) -> Any:
            found = super().process_batch_result(batch, result)
            # With SGLang's overlap the next step runs already.
            decoding = batch.forward_mode.is_decode() and batch.batch_size() == self._requests
            self._record.add(decoding)
            return found

        def bench_watch(self, requests: int, profiled: int) -> None:
            self._requests, self._record = requests, orders.Record(profiled)

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
