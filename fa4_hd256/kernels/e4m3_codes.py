"""float32 values rounded to e4m3."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

#: e4m3 in 32 bits.
WORD_CODES = 4


def codes_of(values: list[Float32]) -> Int32:
    """Four values rounded to e4m3, the first one lowest: cvt.rn.satfinite.e4m3x2.f32 (PTX ISA
    9.7.9.22); NaN stays NaN, and what is larger than 448 becomes 448."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\n"
        "mov.b32 {$w0}, {low, high};}",
        write_only_types=[Int32],
        read_only_args=values,
    )
