"""The kernel of dV and dS: dV = P^T dO at head_dim 256, and dS^T for `products`, by CTA pairs.

One tile is 256 keys of one KV head; one step multiplies it with 128 query rows of one of the query
heads that share the KV head.  Scores are transposed, S^T = K Q^T: each CTA owns 128 keys, with
their K, V, S^T, dP^T and dV, a key per lane.  It is the dQ kernel with queries and keys exchanged,
and dO is needed in two halves that a pair cannot share, as in NOTE [two halves of K] in dq.py.

Timeline of one CTA (the MMA warp is the leader's); last is the tile's last step, 0' the next
tile's first; Q, dO are the rows for S and dP, dOc the columns for dV::

    load      Q(1) dOc(0) dO(1)  ..  | K' Q(0') dOc(last) V' dO(0') ...
    mma       S(1) dV(0) dP(1)   ..  | S(0')    dV(last)  dP(0') ...
    gradient  P(1)> dS(1)> ..        | P(0')    dV ->, >, dV ->, dS(0')> ...

where the first > is the write of P to tensor memory, and the second one that of dS to global
memory, straight from registers.  The exp2 of a step has the time of two MMAs, S(i) done to dP(i)
done; the move of P to tensor memory has that of one; dS, for which nobody waits, follows, and
leaves in pieces during the next step's exp2, so that no warp waits for the SM's queue of stores. dV
leaves in two halves, the first one while dP(0') is computed.

LSE and delta belong to columns here.  Scores therefore come to registers by quads
(`blackwell.tmem`): a thread has 16 of its warpgroup's 64 queries for each of four keys, and reads
16 values of each instead of 64: of the shared memory's port, which the MMAs leave little of, 128
clocks per step instead of 512.

NOTE [P over dP].  P(i) lies over dP(i), from where a thread has read its own columns before.
dP(i+1), which writes the same columns, is issued after dV(i), which reads them, by the same thread,
and the MMAs of a pair execute in issue order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers import WorkTile
from ...backward.block_mask import WORD_PAIR
from ...backward.common import Step, heads_of_part
from ...backward.ds_tiles import (
    DS_BLOCK,
    DS_TILE,
    RUN,
    RUN_STRIDE,
    tile_of,
    tiles_of_head,
    within_head,
)
from ...backward.key_tiles import KeyTiles, ListedStep
from ...limits import HEAD_DIM, WARP_SIZE
from ...mask.block_mask import FULL
from ...mask.masking import WORD_BITS, hide_unseen
from ...operands import LoadTarget
from ...ranges import traced
from ...rows.views import columns_of
from ..instructions import (
    MmaShape,
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..operands import k_major_operand, mn_major_operand
from ..tmem import (
    quad_fragment,
    tmem_load_quads,
    tmem_store_quads,
)
from .common import FRAGMENT, multiply_by, score_gradients
from .context import BlackwellBackwardContext
from .row_result import OWN_COLUMNS, OWN_ROWS, RowResult

__all__ = ["DvKernel"]

TILE_KEYS = DS_BLOCK
STEP_QUERIES = DS_TILE
OWN_QUERIES = STEP_QUERIES // 2  # of a step: those of a warpgroup, and those a CTA loads for S
BEYOND = 1 << 30  # a query that no key sees
QUAD = 4  # threads that share keys
#: Queries of the scores that a thread has of a key, from the first of them on.
COLUMNS = tuple(RUN * k + i for k in range(OWN_QUERIES // RUN) for i in range(2))


class DvKernel(KeyTiles, RowResult):
    """The kernel for one configuration; arguments of a call: `BlackwellBackward.__call__`.

    results: (dv,).  ds: see `backward.ds_tiles`.  A tile's head counts parts of KV heads:
    KV head * head_parts + part.
    """

    result = "dV"
    # Looking up the sequence of a block in a row takes registers that are not there.
    rows_of = None
    is_scaled = False
    boxes = {
        "q": (0, OWN_QUERIES, HEAD_DIM // 2),
        "k": (1, OWN_ROWS, HEAD_DIM),
        "v": (2, OWN_ROWS, HEAD_DIM),
        "dout": (3, OWN_QUERIES, HEAD_DIM // 2),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        # A warpgroup's columns of dV from here on leave when the next tile's first P is stored;
        # with slopes or places of scores, which take the registers, all leave before.
        is_plain = not self.change.exists and not self.mask_function.exists
        self.later_columns = OWN_COLUMNS // 2 if is_plain else OWN_COLUMNS
        self.shapes = {
            "S": MmaShape(TILE_KEYS, STEP_QUERIES, is_bf16, negate_a=negate),
            "dP": MmaShape(TILE_KEYS, STEP_QUERIES, is_bf16),
            "dV": MmaShape(TILE_KEYS, HEAD_DIM, is_bf16, b_mn_major=True),
        }
        # P of the two warpgroups lies at either half of dP.
        half = TmemOperand.contiguous(OWN_QUERIES).step_columns
        self.layouts = {
            **dict.fromkeys(("K", "V"), k_major_operand(OWN_ROWS)),
            **dict.fromkeys(("Q", "dO"), k_major_operand(OWN_QUERIES, HEAD_DIM // 2)),
            "dOc": mn_major_operand(OWN_QUERIES),
            "P": TmemOperand((*half, *(OWN_QUERIES + column for column in half))),
        }

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        stages = self.plan.ring_stages
        stats = cute.make_layout((STEP_QUERIES, self.plan.stats_stages))
        return {
            "k": memory.operand("k", OWN_ROWS, HEAD_DIM, 1),
            "v": memory.operand("v", OWN_ROWS, HEAD_DIM, 1),
            "ring": memory.operand("ring", OWN_QUERIES, HEAD_DIM // 2, stages),
            "lse": cute.make_tensor(memory.region("lse", Float32, 128), stats),
            "delta": cute.make_tensor(memory.region("delta", Float32, 128), stats),
        }

    def result_rows(self, context: BlackwellBackwardContext, work: Any) -> Any:
        return context.sequences.key(work.batch)

    def first_position(self, context: BlackwellBackwardContext, work: Any) -> Step:
        step = super().first_position(context, work)
        if not self.problem_class.lists_steps:
            return step
        return ListedStep.first(step, self.block_list(context, work))

    def places(
        self, context: BlackwellBackwardContext, content: str, work: Any, step: Step
    ) -> tuple[Any, ...]:
        """See `tma_tile`: this CTA's 128 keys of K and V; its 64 rows of Q and dO; its half of the
        columns of dO.  (tile, step) for LSE and delta."""
        rank = context.cta_rank
        if content == "LSE delta":
            return (((work, step), (work, step)),)
        if content in ("K", "V"):
            head = work.head // context.scalars.head_parts
            keys = context.sequences.key(work.batch)
            return (((keys, self.first_row(context, work), 0, head),),)
        queries = context.sequences.query(work.batch)
        row = self.query_tile(context, work, step) * STEP_QUERIES
        if content == "dOc":
            return (((queries, row + half * OWN_QUERIES, rank, step.head),) for half in range(2))
        row += rank * OWN_QUERIES
        return (((queries, row, half, step.head),) for half in range(2))

    def copy(
        self,
        context: BlackwellBackwardContext,
        copy: Any,
        place: tuple[Any, ...],
        target: LoadTarget,
    ) -> None:
        if copy.content in ("LSE", "delta"):
            barrier, index = target
            destination = context.smem[copy.memory][None, index]
            self.load_stats(context, copy.memory, place, (barrier, destination))
        else:
            super().copy(context, copy, place, target)

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: BlackwellBackwardContext):
        """S^T -> P and dP^T -> dS for this CTA's 128 keys: half of the queries per warpgroup."""
        states = self.edges.waiter_states("s_done", "dp_done", "stats_loaded", "dv_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        factors = cute.make_rmem_tensor(OWN_QUERIES, Float32)
        # P and dS in 16 bits, two in a register.
        p, ds = (cute.make_rmem_tensor(OWN_QUERIES // 2, Float32) for _ in range(2))
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                first_key = self.first_row(context, work)
                visibility = self.transposed(context, work)
                tile = (work.block * TILE_KEYS, TILE_KEYS)
                tiles = visibility.tile_range(tile, (first_key, OWN_ROWS))
                has_rest = first_key + OWN_ROWS > visibility.seqlen_q
                # Without what the list says, for which there are no registers.
                step = super().first_position(context, work)
                row = self.row_of_ds(context, work)
                number = self._number_of_ds(context, step, row)
                if cutlass.const_expr(not self.problem_class.lists_steps):
                    self._complete_blocks(context, work, step, row)
                key = first_key + self._first_key()
                if cutlass.const_expr(self.problem_class.lists_steps):
                    mask = self._listed_mask(context, work, step)
                else:
                    mask = (Boolean(True), visibility, key, step.index)
                where = work, step
                states = self._probabilities(context, (factors, p), mask, None, states, where)
                if undrained.is_valid:
                    states = self.drain(context, undrained, states, (0, self.later_columns))
                for _ in cutlass.range(1, num_steps, unroll=1):
                    if cutlass.const_expr(self.problem_class.lists_steps):
                        # Two loads, the second where the first says, beside dS of this step.
                        mask = self._listed_mask(context, work, step.following())
                    states = self._publish(context, (factors, p, ds), undrained, states)
                    if cutlass.const_expr(self.later_columns < OWN_COLUMNS):
                        undrained = self.no_work()
                    tile_of_ds = self._tile_of_step(context, step, (row, number))
                    if cutlass.const_expr(self.counts_tiles):
                        number = self._following_number(context, step, number)
                    step = step.following()
                    if cutlass.const_expr(not self.problem_class.lists_steps):
                        index = step.index
                        is_masked = (index < tiles.unmasked_begin) | (index >= tiles.unmasked_end)
                        mask = (is_masked | has_rest, visibility, key, index)
                    states = self._probabilities(
                        context, (factors, p), mask, (tile_of_ds, ds), states, (work, step)
                    )
                states = self._publish(context, (factors, p, ds), undrained, states)
                tile_of_ds = self._tile_of_step(context, step, (row, number))
                for half in cutlass.range_constexpr(2):
                    self._store_ds(tile_of_ds, ds, half)
                undrained = work
            else:
                self.store_zeros(context, work)
            work = scheduler.advance_to_next_work()
        if undrained.is_valid:
            states = self.drain(context, undrained, states)

    @staticmethod
    def _quad() -> tuple[Int32, Int32]:
        """Return (quad of the warp, thread of the quad) of this thread."""
        lane = cute.arch.lane_idx()
        return lane // QUAD, lane % QUAD

    def _first_key(self) -> Int32:
        """The first of this thread's four keys, among the CTA's 128."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        return warp * WARP_SIZE + self._quad()[0]

    def _own_stats(self, context: BlackwellBackwardContext, name: str, buffer: Any) -> cute.Tensor:
        """-LSE or -delta of this thread's 16 queries, for each of 32 scores of `quad_fragment`."""
        flat = context.smem[name]
        shape = (2, QUAD, OWN_QUERIES // RUN, 2, self.plan.stats_stages)
        by_thread = cute.make_tensor(flat.iterator, cute.make_layout(shape))
        own = by_thread[None, self._quad()[1], None, self.warpgroup(), buffer]
        values = cute.make_rmem_tensor((2, OWN_QUERIES // RUN), Float32)
        cute.autovec_copy(own, values)
        layout = cute.make_layout((2, 2, OWN_QUERIES // RUN), stride=(1, 0, 2))
        return cute.make_tensor(values.iterator, layout)

    def _listed_mask(
        self, context: BlackwellBackwardContext, work: Any, step: Step
    ) -> tuple[Boolean, Any]:
        """Return what `change_and_mask` takes for a step that a block mask names: (whether to apply
        it, two words for each of this thread's four keys, whose first bit is its first query's), or
        the number of a tile of which a function says what is seen."""
        if self.mask_function.exists:
            place = step.head, step.index
            number = self.block_list(context, work).bit_tile(place, context.cta_rank)
            return number != FULL, number
        keys = [self._first_key() + 8 * i for i in range(4)]
        words = self.warpgroup() * (OWN_QUERIES // WORD_BITS), self._quad()[1] * 2
        listed = self.block_list(context, work)
        return listed.key_bits((step.head, step.index), context.cta_rank, keys, words)

    def _hide(self, scores: cute.Tensor, words: tuple[Any, ...], halves: tuple[int, ...]) -> None:
        """Scores of queries without a bit := -inf."""
        for number, half in enumerate(halves):
            for group in range(2):
                own = quad_fragment(scores, number)[None, group, None]
                first = WORD_PAIR * (2 * half + group)
                hide_unseen(own, words[first : first + WORD_PAIR], COLUMNS)

    @cute.jit
    def mask_scores(self, scores: cute.Tensor, mask: tuple[Any, ...]):
        """Scores of queries that a key does not see := -inf; of keys beyond the sequence's end all,
        for their dS has to be 0.  mask: (Visibility, first key, step, which `quad_fragment`s), or
        for a step that a block mask names its words and which, or (number of its tile, places)."""
        if cutlass.const_expr(self.mask_function.exists):
            number, places = mask
            self.mask_function.hide(scores, places, number)
        elif cutlass.const_expr(self.problem_class.lists_steps):
            self._hide(scores, *mask)
        else:
            visibility, first_key, index, halves = mask
            queries = index * STEP_QUERIES + self.warpgroup() * OWN_QUERIES + self._quad()[1] * 2
            for number, half in enumerate(halves):
                for group in cutlass.range_constexpr(2):
                    key = first_key + (16 * half + 8 * group)
                    first = cutlass.select_(key < visibility.seqlen_q, queries, Int32(BEYOND))
                    own = quad_fragment(scores, number)[None, group, None]
                    visibility.apply(own, key, first, COLUMNS)

    def _places(
        self, context: BlackwellBackwardContext, where: tuple[WorkTile, Step], half: int = 0
    ) -> Any:
        """Return the places of this thread's scores of a step, from a half of its keys on.  where:
        (tile, step)."""
        if not self.change.by_place:
            return None
        return self.score_places(context, where[0], self._locator(context, where, half))

    def _mask(
        self,
        context: BlackwellBackwardContext,
        where: tuple[WorkTile, Step],
        mask: tuple[Any, ...],
        halves: tuple[int, ...],
    ) -> tuple[Any, ...]:
        """Return what `change_and_mask` takes for some halves of this thread's keys.  mask: but for
        these. where: (tile, step)."""
        if not self.mask_function.exists:
            return *mask, halves
        locate = self._locator(context, where, halves[0])
        return *mask, self.mask_places(context, where[0], locate)

    def _locator(
        self, context: BlackwellBackwardContext, where: tuple[WorkTile, Step], half: int
    ) -> Any:
        """Return (query head, query, key) of scores by number, from a half of this thread's keys
        on. where: (tile, step)."""
        work, step = where
        query = self.query_tile(context, work, step) * STEP_QUERIES
        query += self.warpgroup() * OWN_QUERIES + self._quad()[1] * 2
        key = self.first_row(context, work) + self._first_key()

        def locate(number: int) -> tuple[Int32, Int32, Int32]:
            group = number // FRAGMENT + half
            column = COLUMNS[number % FRAGMENT // 4 * 2 + number % 2]
            return step.head, query + column, key + (16 * group + 8 * (number // 2 % 2))

        return locate

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: BlackwellBackwardContext,
        results: tuple[cute.Tensor, cute.Tensor],
        mask: tuple[Any, ...],
        before: tuple[WorkTile, cute.Tensor] | None,
        states: Any,
        where: tuple[WorkTile, Step],
    ):
        """P of one step.  results: (P times the slope of its score in float32, P in 16 bits).
        before: (tile, values) of the step before, whose dS leaves meanwhile.  where: (tile, step).
        """
        factors, p = results
        states = self.take_scores(context, factors, tmem_load_quads, states)
        context.barriers["stats_loaded"].wait(states["stats_loaded"])
        negative_lse = self._own_stats(context, "lse", states["stats_loaded"].index)
        rounded = cute.recast_tensor(p, self.dtype)
        for half in cutlass.range_constexpr(2):
            part = columns_of(factors, half * FRAGMENT, FRAGMENT)
            if cutlass.const_expr(self.change.has_slopes):
                # Halves are done separately, or the slopes of all take the registers.
                places = self._places(context, where, half)
                own = self._mask(context, where, mask, (half,))
                slopes = self.change_and_mask(context, part, places, own)
            elif cutlass.const_expr(half == 0):
                places = self._places(context, where)
                own = self._mask(context, where, mask, (0, 1))
                slopes = self.change_and_mask(context, factors, places, own)
            if cutlass.const_expr(before is not None):
                self._store_ds(*before, half)
            self.exponentiate(context, part, negative_lse, (half * FRAGMENT, OWN_QUERIES))
            columns_of(rounded, half * FRAGMENT, FRAGMENT).store(part.load().to(self.dtype))
            if cutlass.const_expr(slopes is not None):
                multiply_by(part, slopes)
        return states

    @traced("dS")
    @cute.jit
    def _publish(
        self,
        context: BlackwellBackwardContext,
        results: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        undrained: WorkTile,
        states: Any,
    ):
        """P to tensor memory, over dP, then ds := factors (dP - delta) in 16 bits.

        results: (P times the slope of its score in float32, P in 16 bits, ds).  undrained: the tile
        before, in its successor's first step, where the next MMA waits for both P and the other
        half of its dV.
        """
        factors, p, ds = results
        context.barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        address = self.own_columns(context, "dp", OWN_QUERIES)
        dp = cute.make_rmem_tensor(OWN_QUERIES, Float32)
        tmem_load_quads(address, dp)
        cute.arch.fence_view_async_tmem_load()
        tmem_store_quads(p, address)
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        context.barriers["p_done"].arrive(states["dp_done"], is_converged=True)
        states.advance("dp_done")
        if cutlass.const_expr(self.later_columns < OWN_COLUMNS):
            if undrained.is_valid:
                part = self.later_columns, OWN_COLUMNS
                states = self.drain(context, undrained, states, part)
        delta = self._own_stats(context, "delta", states["stats_loaded"].index)
        rounded = cute.recast_tensor(ds, self.dtype)
        for start in cutlass.range_constexpr(0, OWN_QUERIES, FRAGMENT):
            part = columns_of(dp, start, FRAGMENT)
            score_gradients(part, columns_of(factors, start, FRAGMENT), delta)
            columns_of(rounded, start, FRAGMENT).store(part.load().to(self.dtype))
        context.barriers["stats_free"].arrive(states["stats_loaded"])
        states.advance("stats_loaded")
        return states

    def _number_of_ds(self, context: BlackwellBackwardContext, step: Step, row: Int32) -> Int32:
        """The number of this CTA's tile of dS of a step."""
        ds = context.tensors.ds
        number = within_head(ds, row + step.index, context.sequences.tensors)
        return number + step.head * tiles_of_head(ds)

    @property
    def counts_tiles(self) -> bool:
        """Return True if the number of a step's tile is counted on from the step before, which
        leaves no use of the head and so a register more.  With what changes scores, whose slopes or
        places are in the way, or sequences of unequal lengths it takes more instead.  A list names
        any tile."""
        return not (self.problem_class.ragged or self.change.exists)

    def _tile_of_step(
        self, context: BlackwellBackwardContext, step: Step, places: tuple[Int32, Any]
    ) -> cute.Tensor:
        """Return this CTA's tile of dS of a step.  places: (row, number of the tile if it is
        counted)."""
        row, number = places
        if not self.counts_tiles:
            number = self._number_of_ds(context, step, row)
        return tile_of(context.tensors.ds, number)

    @staticmethod
    def _following_number(context: BlackwellBackwardContext, step: Step, number: Int32) -> Int32:
        """The number of the tile behind that of a step."""
        begin, end = step.span
        to_next_head = tiles_of_head(context.tensors.ds) - (end - begin)
        return number + 1 + cutlass.select_(step.index + 1 == end, to_next_head, Int32(0))

    def _store_ds(self, tile: cute.Tensor, ds: cute.Tensor, half: int) -> None:
        """Half of this thread's dS of a step to global memory: a quad has 16 bytes, the quads of a
        warp 128 consecutive ones."""
        runs = OWN_QUERIES // RUN
        first = tile[self._first_key() + half * 16, self.warpgroup() * runs, None]
        layout = cute.make_layout((2, 2, runs), stride=(1, 8 * RUN, RUN_STRIDE))
        target = cute.make_tensor((first.iterator + self._quad()[1] * 2).align(4), layout)
        cute.autovec_copy(quad_fragment(cute.recast_tensor(ds, self.dtype), half), target)

    @cute.jit
    def _complete_blocks(
        self, context: BlackwellBackwardContext, work: Any, step: Step, row: Int32
    ):
        """Zeros to tiles of dS beside those of the steps: NOTE [blocks of dS] in
        `backward.ds_tiles`.  row: see `_number_of_ds`."""
        begin, end = step.span
        nothing = cute.make_rmem_tensor(OWN_QUERIES // 2, Float32)
        nothing.fill(0.0)
        ds, tensors = context.tensors.ds, context.sequences.tensors
        before, behind = (within_head(ds, row + i, tensors) for i in (begin - 1, end))
        first = step.head * tiles_of_head(ds)
        for _ in cutlass.range(heads_of_part(context, work.head)[1], unroll=1):
            for half in cutlass.range_constexpr(2):
                if begin % 2 == 1:
                    self._store_ds(tile_of(ds, first + before), nothing, half)
                if end % 2 == 1:
                    self._store_ds(tile_of(ds, first + behind), nothing, half)
            first += tiles_of_head(ds)
