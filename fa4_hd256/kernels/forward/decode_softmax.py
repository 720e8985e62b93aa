"""Softmax of kernels of a few query rows against many keys: S^T = K Q^T has keys as rows, so that a
thread has keys of a step, each for the tile's rows or for some of them.

A row's maximum and sum go over all threads of the softmax, and each knows the offsets of its rows
(`fa4_hd256.softmax_emu.by_key`); one thread per row makes its LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..limits import WARP_SIZE
from ..plan.edges import SharedByReference
from ..ranges import traced
from .context import ForwardContext

__all__ = ["BARRIER", "DecodeSoftmax", "NoState", "any_of_softmax", "synchronise"]

BARRIER = 1  # the softmax's named barrier


class NoState(SharedByReference):
    """Empty state of a kernel that waits for nothing at a tile's start."""


def any_of_softmax(value: Boolean, threads: int, barrier: Any = BARRIER) -> Boolean:
    """Return True if the value holds in some of the threads that meet; barrier.cta.red (PTX ISA
    9.7.13.1).  barrier: that they meet at, an int or Int32."""
    named, given = ("{$r1}", [barrier]) if isinstance(barrier, Int32) else (barrier, [])
    found = cute.arch.inline_ptx(
        "{.reg .pred own, any;\n"
        "setp.ne.b32 own, {$r0}, 0;\n"
        f"barrier.cta.red.or.pred any, {named}, {threads}, own;\n"
        "selp.b32 {$w0}, 1, 0, any;}",
        write_only_types=[Int32],
        read_only_args=[Int32(value), *given],
    )
    return found != 0


def synchronise(threads: int, barrier: Any = BARRIER) -> None:
    """All threads that meet at a barrier, an int or Int32."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


class DecodeSoftmax:
    """Mixed into a decode kernel, whose tiles have `of_query` rows per query, those of padding
    among them, and `tile_queries` queries.

    A kernel has `softmax_warps`, which have the keys of a step, and adds `_create(context)`, the
    state; `_step_states()`, what its steps wait by; `_own_key()`, the first of this thread's keys
    in a step; `_step(context, running, place, is_masked)`; `_share(context, name, values,
    operation)`, each warp's values to shared memory; and `_store_sums` and `_store_zeros`, see
    `softmax`.

    Where several groups of warps have all keys of a step, each for some rows of the tile, what is
    said of the softmax holds for each: `softmax_rows` to `_synchronise`.
    """

    tile_queries: int
    of_query: int
    config: Any
    problem_class: Any
    change: Any
    scheduler: Any
    sink_log2: Any
    softmax_warps: int
    _share: Any

    @property
    def softmax_rows(self) -> int:
        """Rows of a tile that a group of warps has: all, where there is one."""
        return self.config.rows

    def _first_row(self, context: ForwardContext) -> Any:
        """Return the first of these rows."""
        return 0

    def _own_number(self) -> Int32:
        """Return this thread's number in its group."""
        return cute.arch.thread_idx()[0]

    def _synchronise(self, context: ForwardContext) -> None:
        """All threads of a group."""
        synchronise(self.softmax_threads)

    def queries(self, work: Any) -> tuple[Int32, int]:
        """Return (first query, their number) of a tile."""
        return work.block * self.tile_queries, self.tile_queries

    def num_steps(self, context: ForwardContext, work: Any) -> Int32:
        """Steps of a tile; the same in all roles."""
        return context.visibility(work, self.config.block_kv).num_tiles(*self.queries(work))

    @property
    def softmax_threads(self) -> int:
        return self.softmax_warps * WARP_SIZE

    def _tile_state(self) -> Any:
        """Return the state that `_begin_tile` waits by."""
        return NoState()

    def _begin_tile(
        self, context: ForwardContext, softmax: Any, work: Any, key: Int32, state: Any
    ) -> Any:
        """Start a tile with steps; return its state for the next one.  key: this thread's."""
        return state

    @cute.jit
    def softmax(self, context: ForwardContext):
        """S -> P, and all else that a step does, by its threads; O and LSE at the tile's end."""
        block = self.config.block_kv
        states = self._step_states()
        tile_state = self._tile_state()
        softmax = self._create(context)
        thread = self._own_key()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            visibility = context.visibility(work, block)
            num_steps = self.num_steps(context, work)
            tile = self.queries(work)
            tiles = visibility.tile_range(tile, tile)
            softmax.reset()
            if num_steps > 0:
                step = Int32(0)
                key = (tiles.end - 1) * block + thread
                tile_state = self._begin_tile(context, softmax, work, key, tile_state)
                for _ in cutlass.range(tiles.num_masked_first, unroll=1):
                    states = self._step(context, (softmax, states, step), (work, key), True)
                    step += 1
                    key -= block
                for _ in cutlass.range(tiles.num_unmasked, unroll=1):
                    states = self._step(context, (softmax, states, step), (work, key), False)
                    step += 1
                    if cutlass.const_expr(self.functions.change.by_place):
                        key -= block
                if cutlass.const_expr(self.problem_class.mask.hides_first):
                    if cutlass.const_expr(not self.functions.change.by_place):
                        key -= tiles.num_unmasked * block
                    for _ in cutlass.range(tiles.num_masked_last, unroll=1):
                        states = self._step(context, (softmax, states, step), (work, key), True)
                        step += 1
                        key -= block
            inverses = self._finish(context, softmax, work)
            if num_steps > 0:
                self._store_sums(context, (softmax, states), work, inverses)
            else:
                self._store_zeros(context, work)
            work = scheduler.advance_to_next_work()

    def _share_sums(self, context: ForwardContext, softmax: Any) -> None:
        """Each warp's sums to shared memory."""
        self._share(context, "sums", softmax.sums, lambda a, b: a + b)

    def _offset_of(self, context: ForwardContext, softmax: Any, row: Int32) -> Float32:
        """The offset of a row, by one thread of it."""
        return softmax.offset_in(row)

    def _inverse(self, softmax: Any, inverse: Float32) -> Float32:
        """Return the factor of a row of O; inverse: of its sum."""
        return inverse

    @traced("sums")
    @cute.jit
    def _finish(self, context: ForwardContext, softmax: Any, work: Any):
        """LSE of each row to global memory; 1/sum of this thread's rows."""
        self._share_sums(context, softmax)
        row = self._own_number()
        if row < self.softmax_rows:
            total = Float32(0.0)
            for warp in range(self.softmax_warps):
                total = total + context.smem["sums"][row, warp]
            in_tile = self._first_row(context) + row
            query = self.queries(work)[0] + in_tile // self.of_query
            in_group = in_tile % self.of_query
            packed = self.problem_class.packed_heads
            is_row = query < context.query(work).length
            if cutlass.const_expr(self.of_query > packed):
                # Rows past the heads are padding.
                is_row = is_row & (in_group < packed)
                in_group = cutlass.min(in_group, packed - 1)
            head = work.head * packed + in_group
            inverse, lse = softmax.finish(
                total, self._offset_of(context, softmax, row), self.sink_log2(context, work, head)
            )
            context.smem["inverses"][row, 0] = self._inverse(softmax, inverse)
            if is_row:
                place = context.result_offset(context.query(work)) + query
                context.tensors.lse[context.result_batch(work), head, place] = lse
        self._synchronise(context)
        return self._read(context.smem["inverses"], 0)

    def _combined(
        self, shared: cute.Tensor, operation: Callable[[Float32, Float32], Float32]
    ) -> cute.Tensor:
        """The values that the warps have shared, combined in their order.  shared: of rows and
        warps."""
        found = self._read(shared, 0)
        for warp in range(1, self.softmax_warps):
            others = self._read(shared, warp)
            for row in range(cute.size(found)):
                found[row] = operation(found[row], others[row])
        return found

    def _read(self, shared: cute.Tensor, column: int) -> cute.Tensor:
        """A value of each of a thread's rows.  shared: (rows, columns) of shared memory."""
        found = cute.make_rmem_tensor(cute.size(shared, mode=[0]), Float32)
        cute.autovec_copy(shared[None, column], found)
        return found
