"""Block masks, under both schedulers, against the float64 reference with the dense mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.check import reference

LSE_TOLERANCE = 1e-3


def inputs(seqlen_q, seqlen_k, heads=(2, 1), batch=1, dtype=torch.bfloat16, device="cpu"):
    shapes = ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]))
    return tuple(torch.randn(batch, s, h, 256).to(device, dtype) for s, h in shapes)


def check(tensors, mask, **options):
    """Return (out, lse) for a mask, against its dense form."""
    out, lse = flash_attn_func(*tensors, block_mask=mask, return_lse=True, **options)
    options.pop("use_clc", None)
    found = reference.compare(
        out, lse, tensors, mask=masks.as_tile_mask(mask).dense().cpu(), **options
    )
    assert found.max_error <= found.tolerance, found
    assert found.lse_max_error <= LSE_TOLERANCE, found
    return out, lse


def holes(seqlen_q, seqlen_k, batch=1, heads=1, device="cpu"):
    """Full, partial and empty tiles in every order, rows and tiles of queries that see nothing."""
    kinds = torch.randint(0, 3, (batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)))
    kinds[..., -1, :] = 0
    wide = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q, :seqlen_k]
    dense = (wide == 2) | ((wide == 1) & (torch.rand(batch, heads, seqlen_q, seqlen_k) > 0.5))
    return masks.from_dense(dense.to(device))


# One tile, and one row of it; a pair whose second half sees nothing; several tiles of queries whose
# lists differ, the last one's empty; keys that end inside a tile; a mask for each head and entry.
@pytest.mark.parametrize(
    ("lengths", "batch", "heads", "own_heads"),
    [((1, 1), 1, (1, 1), 1), ((256, 256), 1, (1, 1), 1), ((600, 500), 1, (2, 1), 2),
     ((515, 900), 2, (2, 2), 1), ((130, 257), 2, (3, 1), 3)],
)  # fmt: skip
@pytest.mark.sampled(
    "static-lengths0-1-heads0-1", "static-lengths1-1-heads1-1", "static-lengths3-2-heads3-1",
)  # fmt: skip
def test_holes(lengths, batch, heads, own_heads, use_clc, device):
    tensors = inputs(*lengths, heads, batch, device=device)
    mask = holes(*lengths, batch, own_heads, device)
    _, lse = check(tensors, mask, use_clc=use_clc)
    assert (lse[:, :, (lengths[0] - 1) // 128 * 128 :] == -math.inf).all()


@pytest.mark.sampled
def test_dtypes_and_kinds_of_scores(use_clc, device):
    """float16, a softcap, a sink, a scale below 0: rows that see nothing have the sink alone."""
    tensors = inputs(300, 400, (4, 2), 2, torch.float16, device)
    options = {
        "softcap": 20.0, "softmax_scale": -0.1, "learnable_sink": torch.randn(4, device=device),
    }  # fmt: skip
    check(tensors, holes(300, 400, 2, 1, device), use_clc=use_clc, **options)


#: Masks by name, of 400 x 400 and one sequence or two, on a device.
NAMED = {
    "prefix": lambda device: masks.prefix_lm(torch.tensor([5, 300], device=device), 400),
    "window": lambda device: masks.sliding_window(100, 400, first_tokens=4, device=device),
    "documents": lambda device: masks.documents(two_documents(device)),
    "documents, all keys of each": lambda device: masks.documents(
        two_documents(device), causal=False
    ),
    "images": lambda device: masks.bidirectional_blocks(
        torch.tensor([-1] * 100 + [0] * 60 + [-1] * 240, device=device), window=150
    ),
}


def two_documents(device):
    return torch.tensor([0] * 130 + [1] * 270, device=device)


@pytest.mark.parametrize("name", NAMED)
def test_named_masks(name, device):
    check(inputs(400, 400, batch=2, device=device), NAMED[name](device), use_clc=False)


def test_a_mask_of_flex_attention(device):
    bias = torch.tensor([0, 40], device=device)

    def mod(b, h, q, k):
        return (q + bias[b] >= k) & ((q - k < 200) | (k < 3))

    mask = create_block_mask(mod, 2, None, 500, 500, device=device)
    dense = create_mask(mod, 2, 1, 500, 500, device=device)
    assert torch.equal(masks.as_tile_mask(mask).dense(), dense)
    check(inputs(500, 500, batch=2, device=device), mask, use_clc=False)


@pytest.mark.sampled("static")
def test_the_bits_of_a_causal_call(use_clc, device):
    """Steps equal those of causal=True where heads share no tiles."""
    tensors = inputs(400, 500, (2, 2), device=device)
    level = torch.arange(400, device=device)[:, None] + 100
    mask = masks.from_dense(torch.arange(500, device=device) <= level)
    options = {"return_lse": True, "use_clc": use_clc}
    found = flash_attn_func(*tensors, block_mask=mask, **options)
    expected = flash_attn_func(*tensors, causal=True, num_splits=1, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_batch_invariant_and_given_results(device):
    q, k, v = inputs(200, 300, batch=2, device=device)
    mask, out = holes(200, 300, device=device), torch.empty_like(q)
    options = {"block_mask": mask, "use_clc": False, "batch_invariant": True}
    flash_attn_func(q, k, v, out=out, **options)
    alone = flash_attn_func(q[:1], k[:1], v[:1], **options)
    assert torch.equal(out[:1], alone)
