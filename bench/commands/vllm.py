"""`python -m bench vllm`: small random models served by vLLM, with our backend beside its own."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.options import EAGER, GRAPHS, VLLM_BACKENDS
from bench.serving.measured import Cache, Engine, Load, run


def engine_arguments(
    folder: Path, backend: str, mode: str, load: Load, cache: Cache
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`. Nothing is compiled by torch.compile, so that the
    backends differ in attention alone; with graphs, steps that decode are captured whole, padded to
    all requests: one graph, so that engines start sooner."""
    found = {
        "model": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
        "attention_backend": backend, "max_model_len": load.longest + 1,
        "max_num_seqs": load.requests, "max_num_batched_tokens": 16384,
        "kv_cache_memory_bytes": cache.nbytes, "gpu_memory_utilization": 0.25,
        "enable_prefix_caching": False, "additional_config": {"gdn_prefill_backend": "triton"},
    }  # fmt: skip
    if mode == GRAPHS:
        return found | {
            "compilation_config": {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [load.requests],
            }
        }  # fmt: skip
    return found | {"enforce_eager": True}


ENGINE = Engine(
    "vLLM", "vllm", "0.33.0", (sys.executable, "-m", "bench.serving.vllm_engine"), VLLM_BACKENDS,
    (EAGER, GRAPHS), engine_arguments,
)  # fmt: skip


main = partial(run, ENGINE)
