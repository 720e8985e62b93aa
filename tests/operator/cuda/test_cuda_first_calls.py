"""The first calls of a process, inside a memory pool: of what they make for all later calls,
nothing is the pool's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_cases import CASES

pytestmark = pytest.mark.cuda

HELPERS = Path(__file__).parents[2] / "helpers"

#: Prints how many blocks of each case's pool are in use after its call.
IN_POOLS = """
import gc, torch
from cuda_cases import CASES
from fa4_hd256.run import forward, new_tensors, tile_counter
{plant}
for name, case in CASES.items():
    for use_clc in (False, True):
        tensors, pool = case.tensors("cuda"), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            found = case.run(tensors, use_clc)
        torch.cuda.synchronize()
        assert pool.snapshot(), "results are the pool's"
        del found
        gc.collect()
        blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
        print(name, use_clc, sum(block["state"] != "inactive" for block in blocks), flush=True)
"""
#: What is kept, made where it is asked for.
PLANT = "forward.made_to_keep = new_tensors.made_to_keep = tile_counter.made_to_keep = " \
        "lambda make, device: make()"  # fmt: skip

COMPILED = Path(__file__).with_name("test_cuda_compile.py")


def in_a_fresh_process(*arguments: str, **environment: str) -> str:
    """What Python prints there."""
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def in_use(plant: str) -> dict[str, int]:
    code = f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n" + IN_POOLS.format(plant=plant)
    lines = (line.rsplit(maxsplit=1) for line in in_a_fresh_process("-c", code).splitlines())
    return {case: int(blocks) for case, blocks in lines}


def test_of_a_pool_nothing_is_kept():
    found = in_use("")
    assert len(found) == 2 * len(CASES) and not any(found.values()), found


def test_what_would_be_is_found():
    found = in_use(PLANT)
    assert found["dense False"] > 0 and found["dense True"] > 0, found


@pytest.mark.parametrize("use_clc", ["0", "1"], ids=["static", "dynamic"])
@pytest.mark.parametrize("test", ["test_a_layer", "test_packed_sequences", "test_divided_keys"])
def test_compiled_first(test, use_clc):
    """PyTorch's graphs refuse what stays alive in their pool."""
    node = f"{COMPILED}::{test}[reduce-overhead]"
    options = "--device=cuda", "-p", "no:cacheprovider", "--tb=short"
    assert "1 passed" in in_a_fresh_process("-m", "pytest", node, *options, FA_CLC=use_clc)
