"""Queries, keys and values in e4m3 for tests, and what attention over them is compared with."""

from __future__ import annotations

import torch

from fa4_hd256.architectures import named
from fa4_hd256.check import reference
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.problem_class import DESCALES

E4M3 = torch.float8_e4m3fn
LSE_TOLERANCE = 1e-3


def codes(*shape, device="cpu"):
    """Normal numbers in e4m3."""
    return torch.randn(*shape).to(E4M3).to(device)


def scales(*shape):
    """Return scales of k and of v: neither powers of two nor alike."""
    return 0.3 + torch.rand(*shape), 0.05 + 0.2 * torch.rand(*shape)


def exact(keys, given):
    """k and v in float64. keys: (k, v) in e4m3; given: their scales, None for 1."""
    return tuple(map(reference.dequantised, keys, given or (None, None)))


def accurate(found, q, values, **options):
    """found: (out, lse); values: k and v in float64."""
    comparison = reference.Expected.of((q, *values), **options).compare(*found)
    assert comparison.max_error <= comparison.tolerance, comparison
    assert comparison.lse_max_error <= LSE_TOLERANCE, comparison


# ---------------------------------------------------------------- q in e4m3, too


def takes_queries(architecture):
    """Return True if a forward kernel of the architecture takes q in e4m3."""
    return any(tiles.q_dtype == E4M3 for tiles in kernels_of(named(architecture)).forwards)


def triple(lengths, heads, batch=1, device="cpu"):
    """q, k and v of (queries, keys) and (query heads, KV heads)."""
    rows = zip((lengths[0], lengths[1], lengths[1]), (heads[0], heads[1], heads[1]))
    return [codes(batch, length, count, 256, device=device) for length, count in rows]


def all_scales(*shape, device="cpu"):
    """Return scales of q, k and v by the names of the arguments."""
    found = 0.5 + torch.rand(*shape), *scales(*shape)
    return {name: scale.to(device) for name, scale in zip(DESCALES, found)}


def dequantised(tensors, given=None):
    """q, k and v in float64. given: of `all_scales`, or of some of these; None for 1."""
    named_scales = ((given or {}).get(name) for name in DESCALES)
    return tuple(map(reference.dequantised, tensors, named_scales))


def accurate_e4m3(found, tensors, given=None, **options):
    """found: (out, lse) of q, k and v; given: their scales, None for 1. options: of the
    reference."""
    judged(found, dequantised(tensors, given), **options)


def judged(found, values, **options):
    """found: (out, lse); values: q, k and v in float64."""
    out, lse = found
    comparison = reference.Expected.of_e4m3(values, out.dtype, **options).compare(out, lse)
    assert comparison.max_error <= comparison.tolerance, comparison
    assert comparison.lse_max_error <= LSE_TOLERANCE, comparison
