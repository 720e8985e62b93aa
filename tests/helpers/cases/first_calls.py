"""Started as a script, each call the first of its kind in the process and in a memory pool of its
own: prints, a line per call, how many blocks of its pool are in use once its results are gone.

With `planted` as argument what is cached for later calls is allocated wherever it is first needed.
"""

from __future__ import annotations

import gc
import sys

import torch
from cuda_cases import CASES

from fa4_hd256 import flash_attn_with_kvcache
from fa4_hd256.run import execute, tile_counter

DEVICE = "cuda"


def cached(tensors: dict[str, torch.Tensor], use_clc: bool) -> torch.Tensor:
    """New rows of a cache, and the attention."""
    return flash_attn_with_kvcache(**tensors, causal=True, use_clc=use_clc)


def calls() -> dict:
    """Return the calls by name, and their tensors."""
    caches = [torch.zeros(9, 64, 2, 256, device=DEVICE).bfloat16() for _ in "kv"]
    rows = [torch.ones(2, 3, heads, 256, device=DEVICE).bfloat16() for heads in (8, 2, 2)]
    given = dict(zip(("k_cache", "v_cache", "q", "k", "v"), (*caches, *rows)))
    for name, values in {"page_table": [[0, 1], [2, 3]], "cache_seqlens": [63, 90]}.items():
        given[name] = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    of_e4m3 = dict(given)
    for name in "kv":
        of_e4m3[f"{name}_cache"] = given[f"{name}_cache"].to(torch.float8_e4m3fn)
        of_e4m3[f"{name}_descale"] = torch.ones(2, 2, device=DEVICE)
    found = {name: (case.run, case.tensors(DEVICE)) for name, case in CASES.items()}
    return found | {"rows": (cached, given), "e4m3": (cached, of_e4m3)}


def main() -> None:
    if sys.argv[1:] == ["planted"]:
        for module in (execute, tile_counter):
            module.made_to_keep = lambda make, device: make()
    for name, (call, tensors) in calls().items():
        for use_clc in (False, True):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                found = call(tensors, use_clc)
            torch.cuda.synchronize()
            assert pool.snapshot(), "results are of the pool"
            del found
            gc.collect()
            blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
            in_use = sum(block["state"] != "inactive" for block in blocks)
            print(name, "dynamic" if use_clc else "static", in_use, flush=True)


if __name__ == "__main__":
    main()
