"""torch._scaled_mm and scaled_grouped_mm with a scale for each block of K, on CPU tensors.

PyTorch has them for CUDA alone, where libraries compute them; scripts take them as their reference.
Formats: OCP Microscaling Formats (MX) 1.0, blocks of 32 elements with a scale in e8m0, and NVFP4,
blocks of 16 with a scale in e4m3. Layout of the scales: cuBLAS, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import ScalingType, SwizzleType

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
    packed = matrix.view(torch.uint8).contiguous().int()
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


#: Recipe of the scales by their type: one for each block, in tiles of 128 x 4; with NVFP4 one more
#: for each group and operand.
_RECIPES = {
    torch.float8_e8m0fnu: [ScalingType.BlockWise1x32.value],
    torch.float8_e4m3fn: [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value],
}


def _group(matrix: torch.Tensor, scales: torch.Tensor, at: int) -> tuple[torch.Tensor, int]:
    """Return float32 (rows, K) of one group's operand and where the scales of the next begin."""
    rows, k = matrix.shape
    k *= 1 + (matrix.dtype == torch.float4_e2m1fn_x2)
    tiles = -(-rows // _TILE_ROWS) * -(-k // _BLOCK[scales.dtype] // _TILE_COLUMNS)
    end = at + tiles * _TILE_ROWS * _TILE_COLUMNS
    return _scaled(matrix, scales.reshape(-1)[at:end]), end


def _grouped(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, ends: list[int]
) -> list[torch.Tensor]:
    """float32 products of all groups, which divide the rows of A, or with a 2D B its K."""
    products, first, at_a, at_b = [], 0, 0, 0
    packed = 1 + (a.dtype == torch.float4_e2m1fn_x2)
    for group, end in enumerate(ends):
        if b.dim() == 3:
            part, other = a[first:end], b[group].t()
        else:
            along = slice(first // packed, end // packed)
            part, other = a[:, along], b[along].t()
        left, at_a = _group(part, scale_a, at_a)
        right, at_b = _group(other, scale_b, at_b)
        products.append(left @ right.t())
        first = end
    return products


def scaled_grouped_mm(original: Any) -> Any:
    """torch._scaled_grouped_mm_v2 that also takes a 2D A with MX and NVFP4 scales; anything else
    goes to `original`. Arguments are positional, as torch.nn.functional.scaled_grouped_mm passes
    them."""

    def call(a: torch.Tensor, b: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, *rest = arguments
        offs, bias, out_dtype, *_ = (*rest, None, None, None)
        recipe, swizzle = _RECIPES.get(scale_a[0].dtype), SwizzleType.SWIZZLE_32_4_4.value
        known = (
            [*recipe_a] == [*recipe_b] == recipe
            and swizzle_a[:1] == swizzle_b[:1] == [swizzle]
            and scale_a[0].dtype == scale_b[0].dtype
        )
        if not known or a.dim() != 2 or offs is None or bias is not None or more:
            return original(a, b, *arguments, **more)
        products = _grouped(a, b, scale_a[0], scale_b[0], offs.tolist())
        if len(recipe_a) == 2:
            factors = (scale_a[1] * scale_b[1]).reshape(-1)
            products = [p * factor for p, factor in zip(products, factors, strict=True)]
        joined = torch.cat(products) if b.dim() == 3 else torch.stack(products)
        return joined.to(out_dtype or torch.bfloat16)

    return call
