"""Steps that a block mask lists: what the simulator sees."""

from __future__ import annotations

import pytest
import torch

import sm100_sim
from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.check import reference

pytestmark = pytest.mark.simulator


def mask_of():
    """Return a mask of 300 queries and 600 keys: full and partial tiles and none, other lists for
    the two tiles of queries, steps that one half of the rows does not see."""
    dense = torch.rand(1, 1, 300, 600) > 0.5
    dense[..., :128, 256:384] = True
    dense[..., 128:256, 256:384] = False
    dense[..., :256, :128] = False
    dense[..., :128, 512:] = False
    dense[..., 256:, 128:512] = False
    return masks.from_dense(dense)


def attend(use_clc=False, batch=1):
    q = torch.randn(batch, 300, 2, 256).bfloat16()
    k, v = (torch.randn(batch, 600, 1, 256).bfloat16() for _ in range(2))
    mask = mask_of()
    out, lse = flash_attn_func(q, k, v, block_mask=mask, use_clc=use_clc, return_lse=True)
    found = reference.compare(out, lse, (q, k, v), mask=mask.dense())
    assert found.max_error <= found.tolerance, found
    assert found.lse_max_error <= 1e-3, found


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled("None-static", "1-static")
def test_no_findings(use_clc, seed, sanitize):
    sanitize(seed, clusters=2)
    attend(use_clc, batch=2)
    report = sm100_sim.last_reports()[-1]
    assert report.seed == seed and report.findings == []


def loads(mask):
    """TMA loads of a call with this mask of 512 queries and keys."""
    tensors = [torch.randn(1, 512, 1, 256).bfloat16() for _ in "qkv"]
    flash_attn_func(*tensors, block_mask=masks.from_dense(mask), use_clc=False)
    return sm100_sim.last_reports()[-1].tma


def test_empty_tiles_are_not_loaded(architecture):
    """A tile of keys of four for each tile of queries: all of Q, a quarter of K and V."""
    sparse = torch.zeros(512, 512, dtype=torch.bool)
    sparse[:256, 128:256] = sparse[256:, 300] = True
    some, whole = loads(sparse), loads(torch.ones(512, 512, dtype=torch.bool))
    of_q = 512 * 256 * 2
    tiles = 2 if architecture == "sm_100a" else 4
    of_kv = tiles * 512 * 2 * 256 * 2
    assert (whole["load_bytes"] - of_q) == 4 * (some["load_bytes"] - of_q) == of_kv
