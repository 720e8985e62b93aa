"""The gate of the result in the order of a fragment of O: words of two elements, for the kernels
whose epilogue is short of time.

NOTE [one reciprocal for four].  The special functions take 8 clocks of a warp each, and a sigmoid
two of them. Four values of a = 1 + exp(-x) take one reciprocal: with r = 1 / (a b c d), 1 / a is r
(c d) b. No product overflows from x = LEAST on; a thread with a lesser gate, or NaN, takes the
reciprocal of each, so that no element depends on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32

from ...softmax_emu.exp2 import exp2_hardware
from ..rows.output_gate import sigmoid

#: The least gate of NOTE [one reciprocal for four]: (1 + exp(20))^4 is 5.5e34.
LEAST, FOUR = -20.0, 4


@cute.jit
def multiply_by_words(
    values: cute.Tensor, words: list, order: Sequence[int], element_type: cutlass.Constexpr
) -> None:
    """values *= sigmoid(gate).  words: two elements each; order: numbers of their values."""
    if all_from_least(words, element_type):
        _multiply_by_fours(values, unpacked(words, element_type), order)
    else:
        _multiply_by_each(values, unpacked(words, element_type), order)


def _multiply_by_fours(values: cute.Tensor, gates: list[Float32], order: Sequence[int]) -> None:
    """NOTE [one reciprocal for four]; of the last two, where they are no more."""
    for first in range(0, len(order), FOUR):
        own = slice(first, first + FOUR)
        factors = reciprocals([inverse_sigmoid(gate) for gate in gates[own]])
        for number, factor in zip(order[own], factors, strict=True):
            values[number] = values[number] * factor


def _multiply_by_each(values: cute.Tensor, gates: list[Float32], order: Sequence[int]) -> None:
    for number, gate in zip(order, gates, strict=True):
        values[number] = values[number] * sigmoid(gate)


def inverse_sigmoid(x: Float32) -> Float32:
    """1 + exp(-x)."""
    return exp2_hardware(x * Float32(-math.log2(math.e))) + Float32(1.0)


def unpacked(words: Sequence[Uint32], element_type: Any) -> list[Float32]:
    if element_type is cutlass.BFloat16:
        # An element is the upper half of a float32: one instruction each.
        bits = cute.make_rmem_tensor(2 * len(words), Uint32)
        for i, word in enumerate(words):
            bits[2 * i], bits[2 * i + 1] = word << 16, word & Uint32(0xFFFF0000)
        values = cute.recast_tensor(bits, Float32)
        return [values[i] for i in range(2 * len(words))]
    packed = cute.make_rmem_tensor(len(words), Uint32)
    for i, word in enumerate(words):
        packed[i] = word
    elements = cute.recast_tensor(packed, element_type)
    return [elements[i].to(Float32) for i in range(2 * len(words))]


def reciprocals(values: Sequence[Float32]) -> list[Float32]:
    """1 / value of some values whose product neither overflows nor vanishes, by one rcp.approx."""
    if len(values) == 1:
        return [cute.arch.rcp_approx(values[0])]
    half = len(values) // 2
    first, second = (_product(part) for part in (values[:half], values[half:]))
    inverse = cute.arch.rcp_approx(first * second)
    return [
        one
        for part, other in ((values[:half], second), (values[half:], first))
        for one in _without_each(part, inverse * other)
    ]


def _product(values: Sequence[Float32]) -> Float32:
    found = values[0]
    for value in values[1:]:
        found = found * value
    return found


def _without_each(values: Sequence[Float32], inverse: Float32) -> list[Float32]:
    return [inverse] if len(values) == 1 else [inverse * values[1], inverse * values[0]]


def all_from_least(words: Sequence[Uint32], element_type: Any) -> Boolean:
    """Return True if all elements are LEAST or more, none NaN: min.NaN.bf16x2 (PTX ISA 9.7.4)."""
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[element_type]
    smallest = words[0]
    for word in words[1:]:
        smallest = cute.arch.inline_ptx(
            f"min.NaN.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Uint32],
            read_only_args=[smallest, word],
        )
    low, high = unpacked([smallest], element_type)
    return (low >= Float32(LEAST)) & (high >= Float32(LEAST))
