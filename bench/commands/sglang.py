"""`python -m bench sglang`: small random models served by SGLang, our backend beside its own."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.options import EAGER, GRAPHS, SGLANG_BACKENDS
from bench.serving.measured import Cache, Engine, Load, run

#: Tokens of a context that SGLang leaves free, and some more.
SPARE = 16


def engine_arguments(
    folder: Path, backend: str, mode: str, load: Load, cache: Cache
) -> dict[str, Any]:
    """Return the arguments of SGLang's `Engine`, which reads prompts without graphs; with graphs,
    it replays that of steps that decode, padded to all requests. Its sampler needs no other
    package."""
    found = {
        "model_path": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16",
        "random_seed": 0, "attention_backend": backend, "context_length": load.longest + SPARE,
        "max_running_requests": load.requests, "chunked_prefill_size": 16384,
        "max_prefill_tokens": 16384, "max_total_tokens": cache.tokens + 1024,
        "mem_fraction_static": 0.5, "disable_radix_cache": True, "sampling_backend": "pytorch",
        "grammar_backend": "none", "log_level": "warning",
    }  # fmt: skip
    if mode == GRAPHS:
        return found | {
            "disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [load.requests]
        }  # fmt: skip
    return found | {"disable_cuda_graph": True}


ENGINE = Engine(
    "SGLang", "sglang", "0.5.23", (sys.executable, "-m", "bench.serving.sglang_engine"),
    SGLANG_BACKENDS, (EAGER, GRAPHS), engine_arguments,
)  # fmt: skip


main = partial(run, ENGINE)
