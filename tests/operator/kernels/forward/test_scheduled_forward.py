"""Every scheduler runs the forward: each tile once, the same bits."""

from __future__ import annotations

import pytest
import torch
from paged_cases import offsets

import sm100_sim
from fa4_hd256 import flash_attn_varlen_func

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

LENGTHS_Q, LENGTHS_K = (300, 0, 5, 700, 1, 64), (200, 9, 0, 700, 300, 64)


def attend(lengths_q, lengths_k, use_clc):
    """Return (out, lse, report) of a ragged causal batch: two KV heads, each with two of q."""
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(sum(n), heads, 256, generator=generator).bfloat16()
        for n, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    ]
    out, lse = flash_attn_varlen_func(
        *tensors, cu_seqlens_q=offsets(lengths_q), cu_seqlens_k=offsets(lengths_k),
        max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), causal=True, num_splits=1,
        return_lse=True, use_clc=use_clc,
    )  # fmt: skip
    reports = [r for r in sm100_sim.last_reports() if "ForwardKernel" in r.kernel]
    return out, lse, reports[-1]


@pytest.fixture(scope="module")
def expected():
    """Results under the static scheduler on a whole GPU."""
    return attend(LENGTHS_Q, LENGTHS_K, False)


# One cluster does everything; fewer than tiles; more than tiles exist (28: in a row, of 128 queries
# of both heads each, where each sequence as many as the longest has would be 72). Seeds:
# adversarial.
@pytest.mark.parametrize(
    ("clusters", "seed"), [(1, None), (5, None), (60, None), (3, 1), (4, 2)], ids=str
)
@pytest.mark.sampled("clc-3-1")
def test_the_same_bits_under_every_scheduler(use_clc, clusters, seed, expected, monkeypatch):
    monkeypatch.setenv("SM100_SIM_CLUSTERS", str(clusters))
    if seed is not None:
        monkeypatch.setenv("SM100_SIM_SEED", str(seed))
    out, lse, report = attend(LENGTHS_Q, LENGTHS_K, use_clc)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    tiles = 2 * (sum(LENGTHS_Q) // 128 + len(LENGTHS_Q))
    stolen = max(0, tiles - clusters) if use_clc else 0
    # For each request that a seed refuses, a cluster is launched that would have been stolen.
    refused = report.clc["refused"]
    assert (refused > 0) == (seed is not None and stolen > 0)
    assert stolen - refused <= report.clc["stolen"] <= stolen
    assert report.clc["try_cancel"] == (tiles if use_clc else 0)


def test_one_tile():
    """The smallest grid of a head, from which nothing can be stolen."""
    _, _, report = attend((100,), (100,), True)
    assert report.grid == (4, 1, 1) and report.clc["stolen"] == 0
