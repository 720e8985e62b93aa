"""Queries, keys and values in mxfp8 for tests, and what attention over them is compared with."""

from __future__ import annotations

import torch
from e4m3_cases import judged

from fa4_hd256.architectures import named
from fa4_hd256.kernels.kernel_set import MXFP8, kernels_of
from fa4_hd256.quantize import Mxfp8, dequantize_mxfp8, quantize_mxfp8


def takes_blocks(architecture):
    """Return True if a forward kernel of the architecture takes scales of blocks."""
    return any(tiles.kind == MXFP8 for tiles in kernels_of(named(architecture)).forwards)


def uneven(*shape):
    """Normal numbers, times a power of two for each 32 columns, row and head: sums of products stay
    like those of normal numbers, and no block has the scale of its neighbours."""
    exponents = torch.randint(-3, 3, (*shape[:-1], shape[-1] // 32)).repeat_interleave(32, -1)
    return torch.randn(*shape) * torch.exp2(exponents)


def operands(lengths, heads, batch=1, device="cpu"):
    """Dense operands of (queries, keys) and (query heads, KV heads)."""
    rows = zip((lengths[0], lengths[1], lengths[1]), (heads[0], heads[1], heads[1]))
    q, k, v = (uneven(batch, length, count, 256) for length, count in rows)
    # V has its blocks along the keys.
    keys = torch.exp2(torch.randint(-3, 3, (1, lengths[1] // 32 + 1, 1, 1)))
    v = v * keys.repeat_interleave(32, 1)[:, : lengths[1]]
    return Mxfp8(*(t.to(device) for t in quantize_mxfp8(q, k, v)))


def exact(given, offsets=(None, None)):
    """Return q, k and v that operands stand for, in float64. offsets: of packed q and k."""
    q = dequantize_mxfp8(given.q, given.q_descale, offsets[0])
    k = dequantize_mxfp8(given.k, given.k_descale, offsets[1])
    return q, k, dequantize_mxfp8(given.v, given.v_descale, offsets[1], along_keys=True)


def accurate_mxfp8(found, given, **options):
    """found: (out, lse) of dense operands; options: of the reference."""
    judged([t.cpu() for t in found], [t.cpu() for t in exact(given)], **options)
