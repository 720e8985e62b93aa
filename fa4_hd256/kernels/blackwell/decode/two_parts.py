"""float32 values as two parts in e4m3: x = hi + lo / 16.

An e4m3 has four bits of significand, so that the two of them have as many as a bf16: hi is x
rounded to nearest, and lo what is left of it, times 16, rounded.  From 2^-6 up hi is a normal
number; below, where both are multiples of 2^-9, the error is 2^-14 at most.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...e4m3_codes import WORD_CODES, codes_of

__all__ = ["LOW_PART", "store_parts"]

#: Weight of lo.
LOW_PART = 2.0**-4


def _split(values: list[Float32]) -> tuple[Int32, Int32]:
    """Return (hi, lo) of four values, each as `codes_of`; cvt.rn.f16x2.e4m3x2 (PTX ISA 9.7.9.22)
    says what hi is."""
    codes = codes_of(values)
    rounded = cute.arch.inline_ptx(
        "{.reg .b16 low, high, a, b, c, d;\n"
        ".reg .b32 first, second;\n"
        "mov.b32 {low, high}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 first, low;\n"
        "cvt.rn.f16x2.e4m3x2 second, high;\n"
        "mov.b32 {a, b}, first;\n"
        "mov.b32 {c, d}, second;\n"
        "cvt.f32.f16 {$w0}, a;\n"
        "cvt.f32.f16 {$w1}, b;\n"
        "cvt.f32.f16 {$w2}, c;\n"
        "cvt.f32.f16 {$w3}, d;}",
        write_only_types=[Float32] * WORD_CODES,
        read_only_args=[codes],
    )
    left: list[Float32] = []
    for first in range(0, WORD_CODES, 2):
        pair, of_high = values[first : first + 2], rounded[first : first + 2]
        less = cute.arch.sub_packed_f32x2(tuple(pair), tuple(of_high))
        left += cute.arch.mul_packed_f32x2(less, (Float32(1 / LOW_PART),) * 2)
    return codes, codes_of(left)


def store_parts(values: list[Float32], targets: tuple[cute.Tensor, cute.Tensor]) -> None:
    """Both parts of some values to memory.  targets: of hi and of lo, a 16-bit type, half as many
    elements as values, whose number is a multiple of 4."""
    words = [cute.make_rmem_tensor(len(values) // WORD_CODES, Int32) for _ in targets]
    for number in range(0, len(values), WORD_CODES):
        for part, codes in zip(words, _split(values[number : number + WORD_CODES]), strict=True):
            part[number // WORD_CODES] = codes
    for part, target in zip(words, targets, strict=True):
        cute.autovec_copy(cute.recast_tensor(part, target.element_type), target)
