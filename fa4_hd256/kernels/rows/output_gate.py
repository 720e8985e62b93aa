"""Gate of the result: out * sigmoid(gate), in float32 before out is rounded.

A gate has a value of each element of out, or one of each query and head. Kernels that write parts
of a result leave the gate to the one that combines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..problem_class import GATE_OF_HEADS
from .sequences import by_sequence, columns_of

#: Columns of a load: 16 bytes of 16-bit elements.
LOADED = 8


class Columns(NamedTuple):
    """Neighbouring columns of a row that a thread has. first: place of the first one among the
    thread's values; column: its number in the row, a multiple of size; size: how many."""

    first: int
    column: Any
    size: int


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)); ex2.approx and rcp.approx (PTX ISA 9.7.3), 0 where exp(-x) is +inf."""
    power = cute.math.exp2(x * Float32(-math.log2(math.e)), approx=True)
    return cute.arch.rcp_approx(power + Float32(1.0))


def by_rows(form: str, gate: cute.Tensor) -> cute.Tensor:
    """View a gate (batch, seqlen, heads[, 256]) as (seqlen, [256,] heads, batch)."""
    if form != GATE_OF_HEADS:
        return by_sequence(gate)
    batch, rows, heads = gate.shape
    strides = gate.stride
    layout = cute.make_layout((rows, heads, batch), stride=(strides[1], strides[2], strides[0]))
    return cute.make_tensor(gate.iterator, layout)


def row_of_gate(form: str, gate: cute.Tensor, row: Int32, head: Int32, batch: Int32) -> Any:
    """Return the gate of a row: (256,), or of heads its one value."""
    if form == GATE_OF_HEADS:
        return gate[row, head, batch]
    return gate[row, None, head, batch]


def neighbours(begin: Any, count: int) -> list[Columns]:
    """Return `count` columns of a thread from `begin` on, by loads."""
    size = min(count, LOADED)
    return [Columns(first, begin + first, size) for first in range(0, count, size)]


def gated(value: Float32, of_row: Any, column: Int32) -> Float32:
    """value * sigmoid(gate) of one column. of_row: `row_of_gate`."""
    gate = of_row[column] if isinstance(of_row, cute.Tensor) else of_row
    return value * sigmoid(gate.to(Float32))


def multiply_by_gate(values: cute.Tensor, of_row: Any, columns: Sequence[Columns]) -> None:
    """values *= sigmoid(gate), float32 values of some columns of a row. of_row: `row_of_gate`."""
    if not isinstance(of_row, cute.Tensor):
        factor = sigmoid(of_row.to(Float32))
        for own in columns:
            for i in range(own.size):
                values[own.first + i] = values[own.first + i] * factor
        return
    # All loads before the first use: one round trip to memory.
    loaded = []
    for own in columns:
        part = cute.make_rmem_tensor(own.size, of_row.element_type)
        cute.autovec_copy(columns_of(of_row, own.column, own.size), part)
        loaded.append(part)
    for own, part in zip(columns, loaded, strict=True):
        for i in range(own.size):
            factor = sigmoid(part[i].to(Float32))
            values[own.first + i] = values[own.first + i] * factor
