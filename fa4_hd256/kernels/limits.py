"""Sizes that kernels of every architecture share: of a head and its elements, of a CTA, of TMA."""

from __future__ import annotations

#: Columns of a row of Q, K, V, O and their gradients.
HEAD_DIM = 256
ELEMENT_BYTES = 2  # of bfloat16 and float16
FLOAT_BYTES = 4

#: Pages of a multiple of so many rows are loaded by boxes: whole atoms of the 128-byte swizzle (8
#: rows), few boxes per tile.  Rows of other pages are gathered (`forward.gathered`).
PAGE_MULTIPLE = 16

WARP_SIZE = 32

#: Dynamic shared memory one CTA can have on SM90 and SM100: 228 KiB less the 1 KiB the system
#: reserves (CUDA programming guide, compute capabilities 9.0 and 10.0).
SMEM_CAPACITY = 232_448
#: Alignment of a buffer with the 128-byte swizzle: 8 rows of 128 bytes.
SWIZZLE_ALIGNMENT = 1024

#: The least of a line that L2 takes by itself. Where every lane stores a row of its own, half
#: sectors leave an H200's SM at 8 bytes per clock, whole ones at 31 (measured).
SECTOR_BYTES = 32

#: Requirements of TMA on a tensor in global memory: base address and every stride but the innermost
#: a multiple of 16 bytes, strides below 2**40 bytes, innermost stride one element (CUDA driver API,
#: cuTensorMapEncodeTiled).
TMA_ALIGNMENT = 16
TMA_STRIDE_LIMIT = 1 << 40
