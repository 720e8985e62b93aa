"""exp2 on the device: the special-function unit's instruction and a polynomial on the FMA pipe.

The polynomial path (Cody-Waite): x = n + f with n = floor(x), p(f) ~ 2^f by a minimax polynomial,
then n is added to the exponent field of p(f).  `reference_twin` computes the same bits in numpy.
Section numbers are those of the PTX ISA's instruction set chapter (9.7).
"""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .pattern import COEFFICIENTS

# 1.5 * 2^23: a float32 in [2^23, 2^24) has no fraction bits, so adding it with rounding towards
# minus infinity leaves floor(x) in the low mantissa bits, for |x| < 2^22.
FLOOR_MAGIC = 12582912.0

# Smaller arguments are raised to this one, for which the result is exactly +0: p(0) = 1 has the
# biased exponent 127, and 127 - 127 leaves an all-zero word.
SMALLEST_EXPONENT = -127.0

_MANTISSA_BITS = 23


def exp2_hardware(x: Float32) -> Float32:
    """ex2.approx.ftz.f32 (9.7.3, ex2): 2^x on the special-function unit; exp2(-inf) = +0."""
    return cute.math.exp2(x, approx=True, ftz=True)


def exp2_row_factor(x: Float32) -> Float32:
    """ex2.approx.f32 (9.7.3, ex2), without ftz: the same function for once-per-row factors. A
    different opcode on purpose: the executed count of ex2.approx.ftz.f32 is then exactly the number
    of score elements that took the hardware path, and of those a softcap bent."""
    return cute.math.exp2(x, approx=True)


@dsl_user_op
def maximum3(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """max.f32 with three inputs (9.7.3, max; sm_100 and newer); NaN inputs are ignored."""
    a, b, c = (Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b, c))
    return Float32(nvvm.fmax(a, b, c=c, loc=loc, ip=ip))


@dsl_user_op
def _float_bits(x: Float32, *, loc=None, ip=None) -> Int32:
    """mov.b32 (9.7.9, mov): the bits of a float as an integer."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _bits_float(x: Int32, *, loc=None, ip=None) -> Float32:
    """mov.b32 (9.7.9, mov): a float from its bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def _add_to_exponent(mantissa: Float32, shifted_floor: Float32) -> Float32:
    """mantissa * 2^n (9.7.8 shl, 9.7.1 add), n the integer in the low bits of `shifted_floor`."""
    exponent = _float_bits(shifted_floor) << _MANTISSA_BITS
    return _bits_float(_float_bits(mantissa) + exponent)


def exp2_polynomial_pair(x0: Float32, x1: Float32, degree: int) -> tuple[Float32, Float32]:
    """2^x0 and 2^x1 by a polynomial of `degree` (2 to 5) in packed f32x2 arithmetic.

    Arguments below -127, -inf and NaN give +0 (exactly); the largest admissible argument is just
    below 128.  Between -127 and -126 the result is subnormal, where the hardware flushes to 0.
    max.f32 (9.7.3), add.rm.f32x2, sub.rn.f32x2 and fma.rn.f32x2 (9.7.3, sm_100 and newer).
    """
    coefficients = COEFFICIENTS[degree]
    x = (cute.arch.fmax(x0, SMALLEST_EXPONENT), cute.arch.fmax(x1, SMALLEST_EXPONENT))
    magic = (Float32(FLOOR_MAGIC), Float32(FLOOR_MAGIC))
    shifted = cute.arch.add_packed_f32x2(x, magic, rnd="rm")
    floor = cute.arch.sub_packed_f32x2(shifted, magic)
    # Exact, except that f rounds up to 1 for arguments just below an integer; the coefficients
    # are fitted on [0, 1] with both ends.
    fraction = cute.arch.sub_packed_f32x2(x, floor)
    value = _splat(coefficients[degree])
    for power in reversed(range(degree)):
        value = cute.arch.fma_packed_f32x2(value, fraction, _splat(coefficients[power]))
    return _add_to_exponent(value[0], shifted[0]), _add_to_exponent(value[1], shifted[1])


def exp2_polynomial_scalars(x0: Float32, x1: Float32, degree: int) -> tuple[Float32, Float32]:
    """Compute `exp2_polynomial_pair`, bit for bit, by instructions that sm_90 has."""
    return _polynomial(x0, degree), _polynomial(x1, degree)


def _polynomial(x: Float32, degree: int) -> Float32:
    """add.rm.f32, sub.rn.f32 and fma.rn.f32 (9.7.3)."""
    coefficients = COEFFICIENTS[degree]
    x = cute.arch.fmax(x, SMALLEST_EXPONENT)
    shifted, fraction = cute.arch.inline_ptx(
        "{.reg .f32 floor;\n"
        f"add.rm.f32 {{$w0}}, {{$r0}}, 0f{_bits_of(FLOOR_MAGIC):08X};\n"
        f"sub.rn.f32 floor, {{$w0}}, 0f{_bits_of(FLOOR_MAGIC):08X};\n"
        "sub.rn.f32 {$w1}, {$r0}, floor;}",
        write_only_types=[Float32, Float32],
        read_only_args=[x],
    )
    value = Float32(coefficients[degree])
    for power in reversed(range(degree)):
        value = cute.math.fma(value, fraction, Float32(coefficients[power]))
    return _add_to_exponent(value, shifted)


def multiply_rounded(a: Float32, b: Float32) -> Float32:
    """mul.rn.f32 (9.7.3), which is never contracted into an fma."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[Float32(a), Float32(b)],
    )


def _bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _splat(value: float) -> tuple[Float32, Float32]:
    return cutlass.Float32(value), cutlass.Float32(value)
