"""NVFP4: a reference quantizer and dequantizer for KV caches, in PyTorch, on any device.

NOTE [NVFP4].  A row of 256 elements becomes 128 bytes of codes and 16 scales:

    codes         (.., 128) uint8, two e2m1 each; the even element is the low four bits
    block_scales  (.., 16) float8_e4m3fn, one for each 16 consecutive elements
    global_scale  float32, one for a tensor, or one for each KV head

    element = e2m1 * block scale * global scale

e2m1 is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6.  A block's scale is its largest absolute value
over 6 and over the global scale, rounded to the nearest e4m3.  An element is divided by both scales
and rounded to the nearest e2m1, of two equally near ones to that with an even code; all in float32.

- What exceeds the range saturates: a scale at 448, an element at 6, infinities too.
- A block whose scale rounds to 0 (its elements are below the global scale times 0.0059) is 0.
- A NaN makes the scale of its block NaN, and so all 16 elements of it: e2m1 has no NaN.
"""

from __future__ import annotations

import torch

from ..kernels.nvfp4_format import (
    E2M1_LARGEST,
    E2M1_MIDPOINTS,
    E4M3_LARGEST,
    NVFP4_BLOCK,
    block_scales_shape,
)

#: Absolute values of e2m1, by code.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4_global_scale(tensor: torch.Tensor) -> torch.Tensor:
    """Return the float32 scalar that makes the largest block scale of finite elements 448; or 1."""
    absolute = tensor.detach().float().abs()
    finite = absolute.masked_fill_(~absolute.isfinite(), 0.0)
    largest = finite.amax() if finite.numel() else finite.new_zeros(())
    scale = largest / (E2M1_LARGEST * E4M3_LARGEST)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize_nvfp4(
    tensor: torch.Tensor, global_scale: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, block_scales) of a tensor, NOTE [NVFP4].

    tensor: (.., dim), dim a multiple of 16, of a floating-point dtype. global_scale: one value, or
    a tensor that broadcasts against all dimensions but the last one: (heads_kv,) for a scale for
    each head of (batch, rows, heads_kv, 256).

    Raises TypeError for another dtype, ValueError for another dim or a scale that is not positive.
    """
    if not tensor.is_floating_point():
        raise TypeError(f"tensor has dtype {tensor.dtype}; accepted: a floating-point dtype")
    if not tensor.ndim or tensor.shape[-1] % NVFP4_BLOCK:
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)}; accepted: a last dimension that is a "
            f"multiple of {NVFP4_BLOCK}, the elements that share a scale"
        )
    scale = _checked(global_scale, tensor)
    blocks = tensor.detach().float().unflatten(-1, (-1, NVFP4_BLOCK))
    largest = blocks.abs().amax(-1)
    wanted = (largest / (E2M1_LARGEST * scale)).clamp(max=E4M3_LARGEST)
    block_scales = wanted.to(torch.float8_e4m3fn)
    step = (block_scales.float() * scale)[..., None]
    values = torch.where(step == 0, torch.zeros_like(blocks), blocks / step)
    return e2m1_codes(values.flatten(-2)), block_scales


def dequantize_nvfp4(
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor | float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the elements of codes and scales as `quantize_nvfp4` returns them; float64 is exact.
    Raises TypeError or ValueError for other dtypes or shapes."""
    if codes.dtype != torch.uint8 or block_scales.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"codes are {codes.dtype}, block_scales {block_scales.dtype}; accepted: torch.uint8 "
            "and torch.float8_e4m3fn"
        )
    wanted = block_scales_shape(codes)
    if tuple(block_scales.shape) != wanted or not codes.shape[-1]:
        raise ValueError(
            f"block_scales have shape {tuple(block_scales.shape)} for codes of "
            f"{tuple(codes.shape)}; accepted: {wanted}, one for each {NVFP4_BLOCK} elements"
        )
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=codes.device)
    values = torch.cat((values, -values))
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    blocks = values[nibbles.long()].unflatten(-1, (-1, NVFP4_BLOCK))
    scale = _checked(global_scale, codes).double() * block_scales.double()
    return (blocks * scale[..., None]).flatten(-2).to(dtype)


def _checked(global_scale: torch.Tensor | float, tensor: torch.Tensor) -> torch.Tensor:
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=tensor.device)
    if not ((scale > 0) & scale.isfinite()).all():
        raise ValueError("global_scale is not positive; accepted: finite numbers greater than 0")
    if scale.numel() == 1:
        return scale.reshape(())
    outer = tensor.shape[:-1]
    fits = scale.ndim <= len(outer) and all(
        own in (1, size) for own, size in zip(reversed(scale.shape), reversed(outer))
    )
    if not fits:
        raise ValueError(
            f"global_scale has shape {tuple(scale.shape)}; accepted: one value, or what broadcasts "
            f"against {tuple(outer)}, all dimensions but the last one"
        )
    return scale[..., None]


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Return uint8 of two codes each, rounded to nearest even, at most 6; NaN as 0."""
    absolute, codes = values.abs(), torch.zeros_like(values, dtype=torch.uint8)
    for midpoint, goes_up in E2M1_MIDPOINTS:
        codes += absolute >= midpoint if goes_up else absolute > midpoint
    codes |= (values.signbit() & ~values.isnan()).to(torch.uint8) << 3
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4
