"""Errors of attention by the format of the cache: bf16, e4m3 and NVFP4.

`python -m lab.measure.nvfp4` prints relative L2 errors against float64 attention over the values
before they were rounded, for keys of three kinds.  Only K and V are rounded: products and sums are
in float64, so that the format's own error shows.
"""

from __future__ import annotations

import torch

from fa4_hd256.check import reference
from fa4_hd256.quantize import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4

KINDS = ("normal", "heavy-tailed", "outlier channels")
FORMATS = ("bf16", "e4m3", "NVFP4")
KEYS, HEADS, HEADS_KV, QUERIES = 8192, 8, 2, 4


def values(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V in float32.

    heavy-tailed: Student's t with 4 degrees of freedom. outlier channels: as keys of language
    models have them, 3 % of the channels eight times as large, 5 % with a mean of their own, and
    values whose size differs by token.
    """
    k, v = torch.randn(2, 1, KEYS, HEADS_KV, 256).unbind(0)
    if kind == "heavy-tailed":
        k, v = (t / (torch.distributions.Chi2(4.0).sample(t.shape) / 4).sqrt() for t in (k, v))
    if kind == "outlier channels":
        spread = torch.where(torch.rand(256) < 0.03, 8.0, 1.0) * (0.5 + torch.rand(256))
        k = k * spread + 2 * torch.randn(256) * (torch.rand(256) < 0.05)
        v = v * (0.3 + torch.rand(1, KEYS, HEADS_KV, 1))
    return k, v


def rounded(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """Return K or V in float64 as a cache of a format holds it: e4m3 and NVFP4 with one scale for
    the tensor."""
    if form == "bf16":
        return tensor.bfloat16().double()
    if form == "e4m3":
        scale = tensor.abs().amax() / 448
        return (tensor / scale).to(torch.float8_e4m3fn).double() * scale
    scale = nvfp4_global_scale(tensor)
    return dequantize_nvfp4(*quantize_nvfp4(tensor, scale), scale, torch.float64)


def errors(kind: str) -> dict[str, tuple[float, float]]:
    """Return (relative L2 error of the result, that of K) by format."""
    torch.manual_seed(0)
    both = values(kind)
    q = torch.randn(1, QUERIES, HEADS, 256).double()
    exact, _ = reference.attention(q, *(t.double() for t in both))
    found = {}
    for form in FORMATS:
        k, v = (rounded(t, form) for t in both)
        out, _ = reference.attention(q, k, v)
        found[form] = _relative(out, exact), _relative(k, both[0].double())
    return found


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    for name in KINDS:
        told = (f"{form} {out:.1e} (K {k:.1e})" for form, (out, k) in errors(name).items())
        print(f"{name}: {', '.join(told)}")
