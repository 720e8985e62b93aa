"""The gate of the result that follows Q into its buffer, in kernels of the Hopper forward that load
or list their steps in other ways."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256 import flash_attn_func, flash_attn_with_kvcache
from fa4_hd256.check import reference
from fa4_hd256.kernels.hopper.forward.config import ForwardConfig

pytestmark = pytest.mark.architecture("sm_90a")


def tensors(device, queries, keys, heads=(2, 1)):
    """Return (q, k, v), gate: standard normal in bf16, the gate times three."""
    torch.manual_seed(0)
    q = torch.randn(1, queries, heads[0], 256)
    k, v = (torch.randn(1, keys, heads[1], 256) for _ in "kv")
    gate = 3 * torch.randn(q.shape)
    q, k, v, gate = (tensor.bfloat16().to(device) for tensor in (q, k, v, gate))
    return (q, k, v), gate


def accurate(results, inputs, **options):
    found = reference.compare(*results, inputs, **options)
    assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-4, found


# Rows, and tiles, that see no key; a cluster of two; a scheduler that counts.
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((300, 100), {}),
        ((300, 420), {"config": ForwardConfig(ctas=2)}),
        ((400, 420), {"use_clc": True}),
    ],
    ids=["no keys", "cluster", "dynamic"],
)
@pytest.mark.sampled
def test_tiles(sizes, options, device):
    inputs, gate = tensors(device, *sizes)
    results = flash_attn_func(*inputs, causal=True, out_gate=gate, return_lse=True, **options)
    accurate(results, inputs, causal=True, out_gate=gate)


@pytest.mark.sampled
def test_gathered_rows(device):
    """The warp that loads Q alone loads the gate, too."""
    (q, k, v), gate = tensors(device, 40, 200)
    places = torch.randperm(200)
    pages = [torch.empty(200, 1, 1, 256, dtype=k.dtype, device=device) for _ in "kv"]
    for stored, rows in zip(pages, (k, v), strict=True):
        stored[places, 0] = rows[0]
    table = places.int()[None].to(device)
    lengths = torch.tensor([200], dtype=torch.int32, device=device)
    results = flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, page_table=table, causal=True, out_gate=gate,
        return_lse=True, num_splits=1,
    )  # fmt: skip
    accurate(results, (q, k, v), causal=True, out_gate=gate)


@pytest.mark.simulator
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sampled
def test_no_findings(seed, sanitize):
    """Under the sanitizer: the buffer of Q is read before it is written again."""
    sanitize(seed, clusters=2)
    inputs, gate = tensors("cpu", 300, 200)
    results = flash_attn_func(*inputs, causal=True, out_gate=gate, return_lse=True)
    accurate(results, inputs, causal=True, out_gate=gate)
