"""Keys and values in e4m3 for tests, and what attention over them is compared with."""

from __future__ import annotations

import torch

from fa4_hd256.check import reference

E4M3 = torch.float8_e4m3fn
LSE_TOLERANCE = 1e-3


def codes(*shape):
    """Normal numbers in e4m3."""
    return torch.randn(*shape).to(E4M3)


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
