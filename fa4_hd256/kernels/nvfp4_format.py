"""The format NVFP4 of KV caches: its dtypes and sizes, and the names of its scales."""

from __future__ import annotations

import torch

#: Dtype of the codes of k and v, two e2m1 in a byte: of KV caches alone.
NVFP4 = torch.uint8
#: Dtypes of k and v whose bytes kernels take in twos.
CACHE_DTYPES = (torch.float8_e4m3fn, NVFP4)
#: Scales in e4m3 of k and v, (.., 16); the descales are then the global ones.
BLOCK_SCALES = ("k_block_scale", "v_block_scale")

#: Elements that share a scale, and the largest absolute values of e2m1 and of e4m3.
NVFP4_BLOCK = 16
E2M1_LARGEST, E4M3_LARGEST = 6.0, 448.0
#: Between two neighbours of e2m1: the midpoint, and whether it goes to the upper one, whose code is
#: even.
E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False),
                  (3.5, True), (5.0, False))  # fmt: skip


def block_scales_of(kv_dtype: torch.dtype | None) -> tuple[str, ...]:
    """Return the names of NVFP4's scales that a kernel gets, behind other tensors."""
    return BLOCK_SCALES if kv_dtype == NVFP4 else ()


def block_scales_shape(codes: torch.Tensor) -> tuple[int, ...]:
    return *codes.shape[:-1], 2 * codes.shape[-1] // NVFP4_BLOCK
