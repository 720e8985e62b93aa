"""Rows of a tile of the decode kernels.

S^T = K Q^T has keys as rows, so that a thread has keys of a step, each for the tile's rows or for
some of them.

A row's maximum and sum go over all threads of the softmax, and each knows the offsets of its rows
(`fa4_hd256.softmax_emu.by_key`); one thread per row makes its LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...schedulers.protocol import WorkTile
from ..plan.edges import SharedByReference
from ..problem_class import query_rows
from .context import ForwardContext as Context

BARRIER = 1  # the softmax's named barrier


def any_of_softmax(value: Boolean, threads: int, barrier: Any = BARRIER) -> Boolean:
    """Return True if the value holds in some thread; barrier.cta.red (PTX ISA 9.7.13.1)."""
    named, registers = ("{$r1}", [barrier]) if isinstance(barrier, Int32) else (barrier, [])
    holds = cute.arch.inline_ptx(
        "{.reg .pred own, any;\n"
        "setp.ne.b32 own, {$r0}, 0;\n"
        f"barrier.cta.red.or.pred any, {named}, {threads}, own;\n"
        "selp.b32 {$w0}, 1, 0, any;}",
        write_only_types=[Int32],
        read_only_args=[Int32(value), *registers],
    )
    return holds != 0


def synchronise(threads: int, barrier: Any = BARRIER) -> None:
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def combine_warps(
    read: Callable[[int], cute.Tensor], warps: int, operation: Callable[[Float32, Float32], Float32]
) -> cute.Tensor:
    """Return a thread's rows of what the warps share, combined in order. read: a warp's values."""
    values = read(0)
    for warp in range(1, warps):
        others = read(warp)
        for row in range(cute.size(values)):
            values[row] = operation(values[row], others[row])
    return values


@cute.jit
def sum_of_row(context: Context, row: Int32, warps: int) -> Float32:
    """Return the sum of a row over all keys, which the warps have shared."""
    total = Float32(0.0)
    for warp in range(warps):
        total = total + context.smem["sums"][row, warp]
    return total


class RowPlace(NamedTuple):
    """Query and query head of a row of a tile; exists: False for rows of padding."""

    query: Int32
    head: Int32
    exists: Boolean


@dataclass(frozen=True)
class TileRows(SharedByReference):
    """Rows of a tile: of query heads that share a KV head, and of a few queries."""

    count: int
    packed: int
    block_kv: int

    @property
    def of_query(self) -> int:
        """Return the rows of a query, padding included."""
        return query_rows(self.packed, self.count)

    @property
    def queries(self) -> int:
        return self.count // self.of_query

    def first_query(self, work: WorkTile) -> Int32:
        return work.block * self.queries

    def num_steps(self, context: Context, work: WorkTile) -> Int32:
        visibility = context.visibility(work, self.block_kv)
        return visibility.num_tiles(self.first_query(work), self.queries)

    def place(self, context: Context, work: WorkTile, row: Int32) -> RowPlace:
        query = self.first_query(work) + row // self.of_query
        in_group = row % self.of_query
        exists = query < context.query(work).length
        if cutlass.const_expr(self.of_query > self.packed):
            # Rows past the heads are padding.
            exists = exists & (in_group < self.packed)
            in_group = cutlass.min(in_group, self.packed - 1)
        return RowPlace(query, work.head * self.packed + in_group, exists)
