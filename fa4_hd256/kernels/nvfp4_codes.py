"""float32 values quantized to NVFP4 (`fa4_hd256.quantize.nvfp4` NOTE [NVFP4]): two lanes share the
16 elements of a block."""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .e4m3_codes import codes_of
from .nvfp4_format import E2M1_LARGEST, E2M1_MIDPOINTS

CODE_BITS = 4


def quantized(values: list[Float32], scale: Float32) -> tuple[Int32, Int32]:
    """Return (codes, the block's scale in e4m3) of a lane's 8 values and those of its neighbour.
    scale: the global one. For a whole warp."""
    largest = functools.reduce(_larger, values, Float32(0.0))
    largest = _larger(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
    zero = Float32(0.0)
    # Saturates at 448; NaN stays NaN.
    block_scale = codes_of([largest / (Float32(E2M1_LARGEST) * scale), zero, zero, zero])
    step = _float_of(block_scale) * scale
    codes = Int32(0)
    for number, value in enumerate(values):
        quotient = cutlass.select_(step == zero, zero, value / step)
        codes = codes | (_code(quotient) << (CODE_BITS * number))
    return codes, block_scale


def _larger(first: Float32, second: Any) -> Float32:
    """The larger of a value and an absolute value, NaN if either is: max.NaN.f32 (PTX ISA
    9.7.3.13)."""
    return cute.arch.inline_ptx(
        "{.reg .f32 absolute;\nabs.f32 absolute, {$r1};\nmax.NaN.f32 {$w0}, {$r0}, absolute;}",
        write_only_types=[Float32],
        read_only_args=[first, Float32(second)],
    )


def _float_of(code: Int32) -> Float32:
    """The value of an e4m3 in the low byte of a word."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high, value, other;\n"
        ".reg .b32 pair;\n"
        "mov.b32 {low, high}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 pair, low;\n"
        "mov.b32 {value, other}, pair;\n"
        "cvt.f32.f16 {$w0}, value;}",
        write_only_types=[Float32],
        read_only_args=[code],
    )


def _code(value: Float32) -> Int32:
    """The nearest e2m1, of NaN that of 0."""
    absolute, code = cute.math.absf(value), Int32(0)
    for midpoint, goes_up in E2M1_MIDPOINTS:
        exceeds = absolute >= midpoint if goes_up else absolute > midpoint
        code = code + cutlass.select_(exceeds, Int32(1), Int32(0))
    bits = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )
    sign = cutlass.select_((value == value) & (bits < 0), Int32(1 << (CODE_BITS - 1)), Int32(0))
    return code | sign
