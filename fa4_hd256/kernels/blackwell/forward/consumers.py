"""The forward kernel's roles that follow the tensor core: softmax, correction, epilogue."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ....schedulers import WorkTile
from ....softmax_emu.pattern import FRAGMENT_COLUMNS
from ...functions.mask_function import times_asked
from ...limits import HEAD_DIM
from ...mask.masking import Visibility
from ...plan.edges import RingState
from ...ranges import traced
from ...rows.sequences import tma_tile
from ..instructions import (
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..tmem import multiply, tmem_load, tmem_store
from .context import BlackwellForwardContext
from .steps import MMA_K

__all__ = ["ForwardConsumers"]

# Columns that one tcgen05.ld moves: many, since each load of O shows its latency, and of several
# loads of S ptxas may move the last ones behind first uses.
LOAD_COLUMNS = 64

#: State of a softmax warp: (of the next S, of the next buffer for a factor).
SoftmaxStates = tuple[RingState, RingState]
#: Place of a step's scores: (tile, (query, head) of this thread's row, first key).
ScorePlace = tuple[WorkTile, tuple[Int32, Int32], Int32]


class ForwardConsumers:
    """Mixed into ForwardKernel; the shared state is its
    `BlackwellForwardContext`."""

    @cute.jit
    def softmax(self, context: BlackwellForwardContext):
        """S -> P for this CTA's 128 rows, one row per thread; LSE at the tile's end."""
        edges = self.edges
        states = (
            edges["s_done"].waiter_state(),
            edges["scale_free"].waiter_state(),
        )
        softmax = self.create_softmax(context)
        row_in_block = cute.arch.thread_idx()[0]
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            row, head = self.query_and_head(context, work, row_in_block)
            visibility = context.visibility(work, self.config.block_kv)
            steps = self._listed_steps if self.lists_steps else self._range_of_steps
            which = work, (row, head), visibility
            num_tiles, softmax, states = steps(context, which, softmax, states)
            inverse, lse = softmax.finish(self.sink_log2(context, work, head))
            if num_tiles > 0:
                s_done, scale_free = states
                scale_free = self._send_scale(context, inverse, scale_free)
                states = s_done, scale_free
            # Rows that a negative bound hides are stored, too.
            if row < context.query(work).length:
                self.store_lse(context, work, (row, head), softmax, lse)
            work = scheduler.advance_to_next_work()
        # The correction warps' last releases arrive on this CTA's barriers.
        _, scale_free = states
        for _ in cutlass.range_constexpr(self.config.scale_stages):
            context.barriers["scale_free"].wait(scale_free)
            scale_free.advance()

    @cute.jit
    def _range_of_steps(
        self,
        context: BlackwellForwardContext,
        which: tuple[WorkTile, tuple[Int32, Int32], Visibility],
        softmax: Any,
        states: SoftmaxStates,
    ):
        """All steps of a tile, those with masks first and last; returns their number, too.

        which: (tile, (row, head), Visibility).
        """
        work, row, visibility = which
        config, by_place = self.config, self.change.by_place
        tile = (work.block * self.tile_queries, self.tile_queries)
        num_tiles = visibility.num_tiles(*tile)
        part = (self.first_row(context, work), self.block_queries)
        tiles = visibility.tile_range(tile, part)
        softmax.reset()
        if num_tiles > 0:
            # For the first factor; for those that follow, and 1/sum, in the step before.
            context.barriers["scale_free"].wait(states[1])
            # `row` is (query, head).
            key, nodes = (tiles.end - 1) * config.block_kv, context.nodes(work, row[0])
            for _ in cutlass.range(tiles.num_masked_first, unroll=1):
                place = work, row, key
                softmax, states = self._softmax_step(context, softmax, states, place, (nodes,))
                key -= config.block_kv
            for _ in cutlass.range(tiles.num_unmasked, unroll=1):
                place = work, row, key
                softmax, states = self._softmax_step(context, softmax, states, place, None)
                if cutlass.const_expr(by_place):
                    key -= config.block_kv
            if cutlass.const_expr(self.problem_class.mask.hides_first):
                if cutlass.const_expr(not by_place):
                    key -= tiles.num_unmasked * config.block_kv
                for _ in cutlass.range(tiles.num_masked_last, unroll=1):
                    place = work, row, key
                    softmax, states = self._softmax_step(context, softmax, states, place, (None,))
                    key -= config.block_kv
        return num_tiles, softmax, states

    @cute.jit
    def _listed_steps(
        self,
        context: BlackwellForwardContext,
        which: tuple[WorkTile, tuple[Int32, Int32], Any],
        softmax: Any,
        states: SoftmaxStates,
    ):
        """Run the softmax of the tiles that a block mask lists; see `_range_of_steps`."""
        work, row, _ = which
        steps = self.step_list(context, work)
        num_tiles = steps.count
        softmax.reset()
        if num_tiles > 0:
            context.barriers["scale_free"].wait(states[1])
            bits = steps.row(context.cta_rank, cute.arch.thread_idx()[0])
            for _ in cutlass.range(num_tiles, unroll=1):
                key = Int32(0)
                if cutlass.const_expr(self.asks_places):
                    key = bits.kv_tile * self.config.block_kv
                place = work, row, key
                softmax, states, bits = self._listed_step(context, softmax, states, place, bits)
        return num_tiles, softmax, states

    @property
    def p_handovers(self) -> dict[int, str]:
        """Return the edges by which parts of P are handed over, by the number of complete fragments
        of a row: as the MMAs read it.  Raises ValueError for a part that ends inside a fragment."""
        found = {}
        for product in self.steps.products:
            if product.a.memory == "p":
                part = product.a.part
                end = part.stop * MMA_K if part else self.config.block_kv
                if end % FRAGMENT_COLUMNS:
                    raise ValueError(
                        f"{product.name} reads P up to column {end}; the softmax makes fragments "
                        f"of {FRAGMENT_COLUMNS} columns, so let parts of P end at one of them"
                    )
                found[end // FRAGMENT_COLUMNS] = self.steps.ring(product.a.ring).full
        return found

    @traced("softmax")
    @cute.jit
    def _softmax_step(
        self,
        context: BlackwellForwardContext,
        softmax: Any,
        states: SoftmaxStates,
        place: ScorePlace,
        mask: Any,
    ):
        """One score tile: mask, maximum, exp2, P to tensor memory, row sum.

        place: (tile, (row, head), first key).  mask: (the row's word or None,) where some key may
        be invisible, None in interior tiles.
        """
        scores = self._masked_scores(context, states[0], place, mask)
        softmax, states, _ = self._probabilities(context, softmax, states, scores)
        return softmax, states

    @traced("softmax")
    @cute.jit
    def _listed_step(
        self,
        context: BlackwellForwardContext,
        softmax: Any,
        states: SoftmaxStates,
        place: ScorePlace,
        bits: Any,
    ):
        """Run a step that a block mask lists, with its `RowBits`; return those of the next step,
        too."""
        scores = self._masked_scores(context, states[0], place, bits)
        return self._probabilities(context, softmax, states, scores, bits)

    def _score_address(self, context: BlackwellForwardContext, s_done: Any) -> Int32:
        """Return the address, in tensor memory, of a step's S in the rows of a warp, and of its
        P."""
        return context.own_lanes + (
            self.tmem_plan["s0"].start + s_done.index * self.config.block_kv
        )

    @cute.jit
    def _masked_scores(
        self, context: BlackwellForwardContext, s_done: Any, place: ScorePlace, mask: Any
    ):
        """The row's scores of a step once they are there, -inf where it does not see the key.

        place, mask: as `_softmax_step`'s, or `RowBits`.
        """
        columns = self.config.block_kv
        context.barriers["s_done"].wait(s_done)
        fence_after_thread_sync()
        address = self._score_address(context, s_done)
        scores = cute.make_rmem_tensor(columns, Float32)
        tmem_load(address, scores, LOAD_COLUMNS)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(self.change.exists):
            places = self._places(context, place, mask is None)
            self.change.apply(scores, context.scalars.cap_scale, places)
        if cutlass.const_expr(self.mask_function.exists):
            self._hide_unseen(context, scores, place, mask.number)
        elif cutlass.const_expr(self.lists_steps):
            mask.apply(scores)
        elif cutlass.const_expr(mask is not None):
            work, (row, _), key = place
            context.visibility(work, columns).apply(scores, row, key, nodes=mask[0])
        return scores

    @cute.jit
    def _probabilities(
        self,
        context: BlackwellForwardContext,
        softmax: Any,
        states: SoftmaxStates,
        scores: cute.Tensor,
        bits: Any = None,
    ):
        """P of a step's scores, to tensor memory: maximum, exp2, row sum.

        bits: of a listed step; those of the next one are returned behind the others.
        """
        s_done, scale_free = states
        barriers, columns = context.barriers, self.config.block_kv
        address = self._score_address(context, s_done)
        factor = softmax.update_max(scores)
        scale_free = self._send_scale(context, factor, scale_free)
        num_fragments = columns // FRAGMENT_COLUMNS
        fragments = cute.logical_divide(scores, cute.make_layout(FRAGMENT_COLUMNS))
        handovers = self.p_handovers
        for fragment in cutlass.range_constexpr(num_fragments):
            probabilities = cute.make_rmem_tensor(FRAGMENT_COLUMNS // 2, Float32)
            softmax.exponentiate(fragments[None, fragment], probabilities, fragment, num_fragments)
            if cutlass.const_expr(fragment == 1 and bits is not None):
                # Loaded where registers of scores are free, and there by the end of the step: ptxas
                # copies what comes earlier, and waits for it to do so.
                bits = bits.next()
            if cutlass.const_expr(fragment == num_fragments // 2):
                # For what is sent next; NOTE [stores hidden by exponentials].
                barriers["scale_free"].wait(scale_free)
            if cutlass.const_expr(fragment in handovers):
                self._hand_over(context, handovers[fragment], s_done)
                # Or ptxas moves the arrival behind the stores that follow.
                cute.arch.sync_warp()
            # Two 16-bit values per column, over the S they came from.
            tmem_store(probabilities, address + fragment * (FRAGMENT_COLUMNS // 2))
        self._hand_over(context, handovers[num_fragments], s_done)
        # Off the critical path: the tensor core already works on P.
        softmax.accumulate_sum(scores)
        s_done.advance()
        return softmax, (s_done, scale_free), bits

    def _places(self, context: BlackwellForwardContext, place: ScorePlace, keys_exist: bool) -> Any:
        """Return the places of the scores of a step; place: see `_softmax_step`."""
        work, (row, head), key = place
        return self.score_places(context, work, lambda i: (head, row, key + i), keys_exist)

    @cute.jit
    def _hide_unseen(
        self,
        context: BlackwellForwardContext,
        scores: cute.Tensor,
        place: ScorePlace,
        number: Int32,
    ):
        """Scores of a listed step that a function says are not seen := -inf.  place: see
        `_softmax_step`; number: see `MaskFunction.hide`."""
        work, (row, head), key = place
        for _ in cutlass.range(times_asked(number), unroll=1):
            places = self.mask_places(context, work, lambda i: (head, row, key + i))
            self.mask_function.hide(scores, places, number)

    def _hand_over(self, context: BlackwellForwardContext, edge: str, state: Any) -> None:
        """The parts of P that this warp has stored so far, to the tensor core."""
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        context.barriers[edge].arrive(state, is_converged=True)

    @cute.jit
    def _send_scale(self, context: BlackwellForwardContext, value: Float32, scale_free: Any):
        """Hand a value per row to the correction thread of the same row."""
        context.smem["scale"][cute.arch.thread_idx()[0], scale_free.index] = value
        context.barriers["scale_done"].arrive(scale_free)
        scale_free.advance()
        return scale_free

    @cute.jit
    def correction(self, context: BlackwellForwardContext):
        """Rescale O when a row maximum grew; at the tile's end scale it by 1/sum and stage it.

        O may be touched from o_done of one step until o_free lets PV of the next begin.
        """
        edges = self.edges
        scale_done = edges["scale_done"].waiter_state()
        o_done = edges["o_done"].waiter_state()
        o_staged = edges["o_staged"].producer_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            num_tiles = self.num_steps(context, work)
            if num_tiles > 0:
                # The first step's factor has no O to apply to.
                _, scale_done = self._receive_scale(context, scale_done)
                for _ in cutlass.range(1, num_tiles, unroll=1):
                    factor, scale_done = self._receive_scale(context, scale_done)
                    context.barriers["o_done"].wait(o_done)
                    if cute.arch.vote_any_sync(factor < Float32(1.0)):
                        self._rescale(context, factor)
                    context.barriers["o_free"].arrive(o_done)
                    o_done.advance()
                inverse, scale_done = self._receive_scale(context, scale_done)
                context.barriers["o_done"].wait(o_done)
                if cutlass.const_expr(self.problem_class.split):
                    o_staged = self._drain_part(context, work, inverse, (o_done, o_staged))
                else:
                    o_staged = self._drain(context, inverse, o_done, o_staged)
                o_done.advance()
            else:
                self._store_zeros(context, work)
            work = scheduler.advance_to_next_work()

    @cute.jit
    def _receive_scale(self, context: BlackwellForwardContext, scale_done: Any):
        """The value the softmax thread of the same row sent."""
        context.barriers["scale_done"].wait(scale_done)
        value = context.smem["scale"][self._row_in_block(), scale_done.index]
        context.barriers["scale_free"].arrive(scale_done)
        scale_done.advance()
        return value, scale_done

    def _row_in_block(self) -> Int32:
        """The row of a correction thread: the lane of tensor memory it can reach."""
        return cute.arch.thread_idx()[0] % self.config.block_q

    @traced("rescale O")
    @cute.jit
    def _rescale(self, context: BlackwellForwardContext, factor: Float32):
        """O *= factor, row by row, in slices of columns."""
        fence_after_thread_sync()
        for start in cutlass.range_constexpr(0, HEAD_DIM, LOAD_COLUMNS):
            address = context.own_lanes + (self.tmem_plan["o"].start + start)
            values = cute.make_rmem_tensor(LOAD_COLUMNS, Float32)
            tmem_load(address, values, LOAD_COLUMNS)
            cute.arch.fence_view_async_tmem_load()
            multiply(values, factor)
            tmem_store(values, address)
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()

    @traced("drain O")
    @cute.jit
    def _drain(
        self, context: BlackwellForwardContext, inverse: Float32, o_done: Any, o_staged: Any
    ):
        """O / sum to the tile's own Q buffer; o_free as soon as O has left tensor memory."""
        fence_after_thread_sync()
        config = self.config
        row = self._row_in_block()
        buffer = o_staged.index // config.o_slices
        slices = cute.logical_divide(
            context.smem["q"][None, None, buffer], (None, cute.make_layout(config.o_slice))
        )
        for piece in cutlass.range_constexpr(config.o_slices):
            values = self._take_slice(context, piece, inverse, o_done)
            rounded = cute.make_rmem_tensor(config.o_slice, self.dtype)
            rounded.store(values.load().to(self.dtype))
            cute.autovec_copy(rounded, slices[row, (None, piece)])
            # The TMA store reads through the async proxy what was written here.
            cute.arch.fence_view_async_shared()
            context.barriers["o_staged"].arrive(o_staged)
            o_staged.advance()
        return o_staged

    @traced("drain O")
    @cute.jit
    def _drain_part(
        self,
        context: BlackwellForwardContext,
        work: Any,
        inverse: Float32,
        states: tuple[RingState, RingState],
    ):
        """Store O / sum of a KV split, float32, to global memory; o_free as in `_drain`.

        A row is stored by its own thread: shared memory has no room for float32, and where keys are
        split few rows of tiles may exist.  The Q buffer is given back all the same.
        """
        o_done, o_staged = states
        fence_after_thread_sync()
        row, head = self.query_and_head(context, work, self._row_in_block())
        is_row = row < context.query(work).length
        out = self.result_row(context, work, row, head)
        slices = cute.logical_divide(out, cute.make_layout(self.config.o_slice))
        for piece in cutlass.range_constexpr(self.config.o_slices):
            values = self._take_slice(context, piece, inverse, o_done)
            if is_row:
                cute.autovec_copy(values, slices[None, piece])
            context.barriers["o_staged"].arrive(o_staged)
            o_staged.advance()
        return o_staged

    @cute.jit
    def _take_slice(
        self, context: BlackwellForwardContext, piece: int, inverse: Float32, o_done: Any
    ):
        """A slice of O / sum in registers; o_free with the last one."""
        columns = self.config.o_slice
        values = cute.make_rmem_tensor(columns, Float32)
        address = context.own_lanes + (self.tmem_plan["o"].start + piece * columns)
        tmem_load(address, values, LOAD_COLUMNS)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(piece == self.config.o_slices - 1):
            fence_before_thread_sync()
            context.barriers["o_free"].arrive(o_done)
        multiply(values, inverse)
        return values

    @cute.jit
    def _store_zeros(self, context: BlackwellForwardContext, work: Any):
        """Store out = 0 for the rows of a tile that sees no key."""
        row, head = self.query_and_head(context, work, self._row_in_block())
        if row < context.query(work).length:
            out = self.result_row(context, work, row, head)
            zeros = cute.make_rmem_tensor(8, out.element_type)
            zeros.fill(0.0)
            chunks = cute.logical_divide(out, cute.make_layout(8))
            for chunk in cutlass.range(HEAD_DIM // 8, unroll=1):
                cute.autovec_copy(zeros, chunks[None, chunk])

    @cute.jit
    def epilogue(self, context: BlackwellForwardContext):
        """Store the staged O with TMA, slice by slice; then give the Q buffer back."""
        o_staged = self.edges["o_staged"].waiter_state()
        q_free = self.edges["q_free"].producer_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                if cutlass.const_expr(self.problem_class.split):
                    # Stored by the correction; nothing is staged.
                    for _ in cutlass.range_constexpr(self.config.o_slices):
                        context.barriers["o_staged"].wait(o_staged)
                        o_staged.advance()
                else:
                    o_staged = self._store_staged(context, work, q_free.index, o_staged)
                context.barriers["q_free"].arrive(q_free)
                q_free.advance()
            work = scheduler.advance_to_next_work()
        # Shared memory must not go away, nor the grid be reported done, under a store in flight.
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def _store_staged(
        self, context: BlackwellForwardContext, work: Any, buffer: Int32, o_staged: Any
    ):
        """TMA stores of a tile's O out of its Q buffer, until the last has read it."""
        config, o = self.config, context.tensors.o
        place = (context.query(work), self.first_row(context, work), None, work.head)
        shape = (config.block_q, config.o_slice)
        tiles = tma_tile(o.tensor, shape, place, self.problem_class.packed_heads)
        slices = cute.local_tile(context.smem["q"][None, None, buffer], shape, (0, None))
        from_smem, to_global = cpasync.tma_partition(
            o.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(slices, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        for piece in cutlass.range_constexpr(config.o_slices):
            context.barriers["o_staged"].wait(o_staged)
            cute.copy(o.atom, from_smem[None, piece], to_global[None, piece])
            cute.arch.cp_async_bulk_commit_group()
            o_staged.advance()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        return o_staged
