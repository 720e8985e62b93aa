"""Helpers of the tests of kernels for a few query rows: random inputs, and the accuracy check."""

from __future__ import annotations

import torch

from fa4_hd256.check import reference


def tensors(queries, keys, heads, batch=2, dtype=torch.bfloat16):
    """q, k, v; heads: of the queries and of the keys."""
    q = torch.randn(batch, queries, heads[0], 256).to(dtype)
    return q, *(torch.randn(batch, keys, heads[1], 256).to(dtype) for _ in range(2))


def accurate(found, given, **options):
    """found: (out, lse); given: q, k, v."""
    comparison = reference.compare(*found, given, **options)
    assert comparison.max_error <= 2 * comparison.pytorch_max_error, comparison
    assert comparison.lse_max_error < 1e-3, comparison
