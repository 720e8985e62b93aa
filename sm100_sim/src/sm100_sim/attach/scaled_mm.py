"""torch._scaled_mm with a scale for each block of K, on CPU tensors.

PyTorch has it for CUDA alone, where cuBLAS computes it; scripts take it as their reference.
Formats: OCP Microscaling Formats (MX) 1.0, blocks of 32 elements with a scale in e8m0, and NVFP4,
blocks of 16 with a scale in e4m3. Layout of the scales: cuBLAS, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from typing import Any

import torch

#: Values of e2m1 by their four bits (OCP MX 1.0, FP4).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
#: Rows and columns of the tiles in which scales are stored.
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def unblocked(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """float32 (rows, columns) of scales as cuBLAS reads them.

    Tiles of 128 rows and 4 columns follow each other row by row; inside a tile the scale of row r
    and column c stands at 16 (r mod 32) + 4 (r div 32) + c. Rows and columns are padded to whole
    tiles. Raises ValueError if `scales` has another number of elements.
    """
    down, across = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    wanted = down * across * _TILE_ROWS * _TILE_COLUMNS
    if scales.numel() != wanted:
        raise ValueError(
            f"scales of {scales.numel()} elements; {rows} rows of {columns} blocks "
            f"take {wanted}, in tiles of 128 x 4"
        )
    tiles = scales.reshape(-1).float().view(down, across, 32, 4, _TILE_COLUMNS)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)
    return matrix[:rows, :columns]


def _values(matrix: torch.Tensor) -> torch.Tensor:
    """float32 (rows, K) of an operand (rows, K), or (rows, K / 2) with two e2m1 in a byte."""
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return matrix.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    packed = matrix.contiguous().view(torch.uint8).int()
    return table[torch.stack([packed & 15, packed >> 4], -1)].flatten(-2)


def _scaled(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values, block = _values(matrix), _BLOCK[scales.dtype]
    rows, k = values.shape
    if k % block:
        raise ValueError(
            f"K = {k}; with scales of type {scales.dtype} it must be a multiple of {block}"
        )
    return values * unblocked(scales, rows, k // block).repeat_interleave(block, 1)


def scaled_mm(original: Any) -> Any:
    """torch._scaled_mm that also takes block scales; anything else goes to `original`."""

    def call(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: Any = None,
        scale_result: Any = None,
        out_dtype: Any = None,
        use_fast_accum: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        if scale_a.dtype not in _BLOCK or scale_b.dtype != scale_a.dtype:
            return original(
                a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, **more
            )
        if scale_result is not None or more:
            raise NotImplementedError(
                "torch._scaled_mm with block scales: scale_result and out= are not simulated"
            )
        result = _scaled(a, scale_a) @ _scaled(b.t(), scale_b).t()
        if bias is not None:
            result = result + bias.float()
        return result.to(out_dtype or a.dtype)

    return call
