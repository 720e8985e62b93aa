"""The consumers of the Hopper forward: MMAs, softmax and results of 64 query rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....schedulers import WorkTile
from ....softmax_emu.online import OnlineSoftmax
from ...limits import HEAD_DIM
from ...mask.block_mask import FULL
from ...mask.masking import TileRange, hide_unseen
from ...plan.edges import RingState, SharedByReference
from ...ranges import traced
from ..instructions import (
    QUAD,
    commit,
    fence,
    fragment_columns,
    multiply,
    pack,
    row_of_fragment,
    rows_of,
    transpose_quad,
    transposed,
    wait,
)
from .context import HopperForwardContext
from .plan import WARPGROUP_ROWS

__all__ = ["ForwardConsumer"]

ROWS = 2  # of a thread
NO_NODES = (None,) * ROWS


@dataclass(frozen=True)
class Fragments(SharedByReference):
    """Registers and descriptors that a thread of a warpgroup works on, tile after tile.

    p, o: P and O in registers.  q, k, v: descriptors of the operands.
    """

    p: cute.Tensor
    o: cute.Tensor
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


#: Softmax of both rows of a thread.
RowSoftmax = tuple[OnlineSoftmax, OnlineSoftmax]
#: State of the next buffer of K, and of V.
LoadStates = tuple[RingState, RingState]
#: State of a tile that its steps carry on.
Running = tuple[Fragments, RowSoftmax, LoadStates]
#: Place of a fragment of scores: ((tile, first row of this warpgroup), first key).
FragmentPlace = tuple[tuple[WorkTile, Int32], Int32]
#: The same, and what hides scores: see `_exponentiate`.
MaskedPlace = tuple[FragmentPlace, Any]


class ForwardConsumer:
    """Mixed into ForwardKernel; the shared state is its
    `HopperForwardContext`."""

    @cute.jit
    def consume(self, context: HopperForwardContext):
        """Q K^T, softmax and P V of the 64 rows of this warpgroup; O and LSE at the tile's end."""
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        # Q of this warpgroup has one buffer, whose number is the warpgroup's.
        q_loaded = RingState(1, warpgroup, Int32(0))
        edges = self.edges
        states = edges["k_loaded"].waiter_state(), edges["v_loaded"].waiter_state()
        softmax = self.create_softmax(context), self.create_softmax(context)
        fragments = self._fragments(context, warpgroup)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            running = fragments, softmax, states
            tile = self._listed_tile if self.lists_steps else self._range_tile
            softmax, states, q_loaded, first_row = tile(
                context, running, (work, warpgroup), q_loaded
            )
            self._finish(context, fragments, softmax, (work, first_row))
            work = scheduler.advance_to_next_work()

    @cute.jit
    def _range_tile(
        self,
        context: HopperForwardContext,
        running: Running,
        which: tuple[WorkTile, Int32],
        q_loaded: Any,
    ):
        """All steps of a tile; this warpgroup takes part in its own.

        running: see `_steps`.  which: (tile, this warpgroup).
        """
        fragments, softmax, states = running
        work, warpgroup = which
        visibility = context.visibility(work, self.config.block_kv)
        num_steps = visibility.num_tiles(work.block * self.tile_queries, self.tile_queries)
        first_row = self.first_row(context, work, warpgroup)
        tiles, own_steps = self._own_tiles(visibility, work, first_row)
        softmax[0].reset()
        softmax[1].reset()
        fragments.o.fill(0.0)
        if num_steps > 0:
            last_tile = visibility.last_tile(work.block * self.tile_queries, self.tile_queries)
            skipped_first = last_tile + 1 - tiles.end
            skipped_last = num_steps - own_steps - skipped_first
            context.barriers["q_loaded"].wait(q_loaded)
            states = self._skip(context, states, skipped_first)
            if own_steps > 0:
                softmax, states = self._steps(
                    context, (fragments, softmax, states), (work, first_row, tiles), q_loaded
                )
            else:
                context.barriers["q_free"].arrive(q_loaded)
            states = self._skip(context, states, skipped_last)
            q_loaded.advance()
        return softmax, states, q_loaded, first_row

    @cute.jit
    def _listed_tile(
        self,
        context: HopperForwardContext,
        running: Running,
        which: tuple[WorkTile, Int32],
        q_loaded: Any,
    ):
        """Run a tile's steps that a block mask lists; both warpgroups take part in all of them."""
        fragments, softmax, states = running
        work, warpgroup = which
        steps = self.step_list(context, work)
        num_steps = steps.count
        softmax[0].reset()
        softmax[1].reset()
        fragments.o.fill(0.0)
        if num_steps > 0:
            context.barriers["q_loaded"].wait(q_loaded)
            left = num_steps - 1
            first_row = self.first_row(context, work, warpgroup)
            where = self._listed_place(steps, Int32(0), (work, first_row), warpgroup)
            running = fragments, softmax, states
            softmax, states = self._first_step(context, running, where, (q_loaded, left))
            for step in cutlass.range(1, num_steps, unroll=1):
                left -= 1
                where = self._listed_place(steps, step, (work, first_row), warpgroup)
                running = fragments, softmax, states
                softmax, states = self._step(context, running, where, (q_loaded, left))
            states = self._last_product(context, fragments, states)
            q_loaded.advance()
        return softmax, states, q_loaded, self.first_row(context, work, warpgroup)

    def _listed_place(
        self, steps: Any, step: Int32, which: tuple[WorkTile, Int32], warpgroup: Int32
    ) -> MaskedPlace:
        """Return what `_exponentiate` takes of a listed step: its place and bits."""
        key = Int32(0)
        if self.asks_places:
            key = steps.kv_tile(step) * self.config.block_kv
        if self.mask_function.exists:
            return (which, key), steps.bit_tile(step, Int32(0))
        return (which, key), self._bits(steps, step, warpgroup)

    def _bits(self, steps: Any, step: Int32, warpgroup: Int32) -> tuple[Boolean, tuple[Any, ...]]:
        """Return (whether there may be keys that a row does not see, for each row of the thread two
        words of bits, whose first one is of the thread's first key)."""
        number, part = steps.bit_tile(step, Int32(0)), steps.part(step)
        lane, found = cute.arch.thread_idx()[0] % QUAD, []
        for row in range(ROWS):
            words = steps.words(number, warpgroup * WARPGROUP_ROWS + row_of_fragment(row))
            own = (cutlass.select_(part == 0, words[i], words[i + 2]) for i in range(2))
            found.append(tuple(word >> 2 * lane for word in own))
        return number != FULL, tuple(found)

    @cute.jit
    def _hide(self, row: cute.Tensor, is_partial: Any, words: tuple[Any, Any]):
        """Scores of keys without a bit := -inf."""
        if is_partial:
            hide_unseen(row, words, fragment_columns(self.config.block_kv))

    def _fragments(self, context: HopperForwardContext, warpgroup: Int32) -> Fragments:
        qk, pv = self.qk, self.pv
        return Fragments(
            p=pv.a_fragment(self.config.block_kv),
            o=pv.accumulator(),
            q=qk.a_operand(context.smem["q"])[None, None, None, warpgroup],
            k=qk.b_operand(context.smem["k_tiles"]),
            v=pv.b_operand(transposed(context.smem["v_tiles"])),
        )

    def _own_tiles(self, visibility: Any, work: Any, first_row: Int32) -> tuple[TileRange, Int32]:
        """Return (KV tiles, their number) that the rows of a warpgroup take part in."""
        part = (first_row, self.part_queries)
        if cutlass.const_expr(self.config.skips and not self.problem_class.split):
            tiles, count = visibility.tile_range(part, part), visibility.num_tiles(*part)
            # Without rows or keys of its own it skips all of the tile's.
            last = visibility.last_tile(work.block * self.tile_queries, self.tile_queries)
            end = cutlass.select_(count > 0, tiles.end, last + 1)
            return TileRange(tiles.begin, end, tiles.unmasked_begin, tiles.unmasked_end), count
        tile = (work.block * self.tile_queries, self.tile_queries)
        return visibility.tile_range(tile, part), visibility.num_tiles(*tile)

    @cute.jit
    def _skip(self, context: HopperForwardContext, states: LoadStates, count: Int32):
        """Give back K and V of steps that this warpgroup takes no part in."""
        k_loaded, v_loaded = states
        for _ in cutlass.range(count, unroll=1):
            context.barriers["k_loaded"].wait(k_loaded)
            context.barriers["k_free"].arrive(k_loaded)
            k_loaded.advance()
            context.barriers["v_loaded"].wait(v_loaded)
            context.barriers["v_free"].arrive(v_loaded)
            v_loaded.advance()
        return k_loaded, v_loaded

    @cute.jit
    def _steps(
        self,
        context: HopperForwardContext,
        running: Running,
        which: tuple[WorkTile, Int32, TileRange],
        q_loaded: Any,
    ):
        """All steps of a tile: QK of a step is issued before PV of the one before it, and runs
        while the softmax of that one does.

        running: (fragments, softmax of both rows, states of K and V).  which: (tile, first row of
        this warpgroup, its KV tiles).
        """
        fragments, softmax, states = running
        work, first_row, tiles = which
        block, by_place = self.config.block_kv, self.change.by_place
        which = work, first_row
        key, nodes = (tiles.end - 1) * block, self._nodes(context, work, first_row)
        masked, unmasked = tiles.num_masked_first, tiles.num_unmasked
        # Steps behind this one.
        left = masked + unmasked + tiles.num_masked_last - 1
        running = fragments, softmax, states
        softmax, states = self._first_step(
            context, running, ((which, key), nodes), (q_loaded, left)
        )
        key -= block
        # The kind of the first step.
        was_masked = cutlass.min(masked, 1)
        was_unmasked = (1 - was_masked) * cutlass.min(unmasked, 1)
        was_last = 1 - was_masked - was_unmasked
        for _ in cutlass.range(masked - was_masked, unroll=1):
            left -= 1
            running, place = (fragments, softmax, states), (which, key)
            softmax, states = self._step(context, running, (place, nodes), (q_loaded, left))
            key -= block
        for _ in cutlass.range(unmasked - was_unmasked, unroll=1):
            left -= 1
            running, place = (fragments, softmax, states), (which, key)
            softmax, states = self._step(context, running, (place, None), (q_loaded, left))
            if cutlass.const_expr(by_place):
                key -= block
        if cutlass.const_expr(self.problem_class.mask.hides_first):
            if cutlass.const_expr(not by_place):
                key -= (unmasked - was_unmasked) * block
            for _ in cutlass.range(tiles.num_masked_last - was_last, unroll=1):
                left -= 1
                running, place = (fragments, softmax, states), (which, key)
                softmax, states = self._step(context, running, (place, NO_NODES), (q_loaded, left))
                key -= block
        return softmax, self._last_product(context, fragments, states)

    def _nodes(self, context: HopperForwardContext, work: Any, first_row: Int32) -> tuple[Any, ...]:
        """The words of both rows of a thread, `NO_NODES` where rows have none."""
        rows = (first_row + row_of_fragment(number) // self.query_rows for number in range(ROWS))
        return tuple(context.nodes(work, row) for row in rows) if context.mask.tree else NO_NODES

    def _last_product(
        self, context: HopperForwardContext, fragments: Fragments, states: LoadStates
    ) -> LoadStates:
        """PV of a tile's last step."""
        k_loaded, v_loaded = states
        fence()
        self._multiply_pv(fragments, v_loaded)
        wait(0)
        context.barriers["v_free"].arrive(v_loaded)
        v_loaded.advance()
        return k_loaded, v_loaded

    @cute.jit
    def _give_back_k(
        self, context: HopperForwardContext, k_loaded: Any, q: tuple[RingState, Int32]
    ):
        """QK of a step is done: K is free, and Q with the tile's last.  q: (state of Q, steps
        left)."""
        q_loaded, left = q
        context.barriers["k_free"].arrive(k_loaded)
        if left == 0:
            context.barriers["q_free"].arrive(q_loaded)

    @traced("first step")
    @cute.jit
    def _first_step(
        self,
        context: HopperForwardContext,
        running: Running,
        where: MaskedPlace,
        q: tuple[RingState, Int32],
    ):
        """QK and softmax of the first step; O is empty yet."""
        fragments, softmax, states = running
        k_loaded, v_loaded = states
        context.barriers["k_loaded"].wait(k_loaded)
        fence()
        scores = self._multiply_qk(fragments, k_loaded)
        wait(0)
        self._give_back_k(context, k_loaded, q)
        k_loaded.advance()
        self._exponentiate(context, scores, softmax, where)
        context.barriers["v_loaded"].wait(v_loaded)
        pack(scores, fragments.p)
        return softmax, (k_loaded, v_loaded)

    @traced("step")
    @cute.jit
    def _step(
        self,
        context: HopperForwardContext,
        running: Running,
        where: MaskedPlace,
        q: tuple[RingState, Int32],
    ):
        """QK of a step, PV of the one before, softmax, O rescaled.

        where: see `_exponentiate`.  q: see `_give_back_k`.
        V of a step is waited for at the end of its softmax: NOTE [exponentials before the wait].
        """
        fragments, softmax, states = running
        k_loaded, v_loaded = states
        context.barriers["k_loaded"].wait(k_loaded)
        fence()
        scores = self._multiply_qk(fragments, k_loaded)
        self._multiply_pv(fragments, v_loaded)
        wait(1)
        self._give_back_k(context, k_loaded, q)
        k_loaded.advance()
        factors = self._exponentiate(context, scores, softmax, where)
        following = v_loaded.copy()
        following.advance()
        context.barriers["v_loaded"].wait(following)
        wait(0)
        context.barriers["v_free"].arrive(v_loaded)
        # P is free now that PV is done.
        pack(scores, fragments.p)
        self._rescale(fragments.o, factors)
        return softmax, (k_loaded, following)

    def _multiply_qk(self, fragments: Fragments, k_loaded: Any) -> cute.Tensor:
        """Issue S = Q K^T, a group of its own; S."""
        scores = self.qk.accumulator()
        k = fragments.k[None, None, None, k_loaded.index]
        multiply(self.qk, scores, fragments.q, k, False)
        commit()
        return scores

    def _multiply_pv(self, fragments: Fragments, v_loaded: Any) -> None:
        """Issue O += P V, a group of its own."""
        v = fragments.v[None, None, None, v_loaded.index]
        multiply(self.pv, fragments.o, fragments.p, v, True)
        commit()

    @traced("softmax")
    def _exponentiate(
        self,
        context: HopperForwardContext,
        scores: cute.Tensor,
        softmax: RowSoftmax,
        where: MaskedPlace,
    ) -> tuple[Float32, Float32]:
        """S -> P, float32 in place, for both rows of a thread; the factors for O.

        where: (((tile, first row), first key), mask), the mask being `_nodes` where some key may be
        invisible, None in interior steps; of a listed step its `_bits`, or the number of its tile
        where a function says what is seen.
        """
        problem, block = self.problem_class, self.config.block_kv
        ((work, first_row), key), mask = where
        if cutlass.const_expr(problem.negative_scale):
            scores.store(-scores.load())
        if cutlass.const_expr(self.change.exists):
            places = self._places(context, where[0], mask is None)
            scale = context.scalars.cap_scale
            self.change.apply(scores, scale, places, packed=False)
        if cutlass.const_expr(self.mask_function.exists):
            self._hide_unseen(context, scores, where[0], mask)
        factors = []
        for number, row in enumerate(rows_of(scores)):
            if cutlass.const_expr(self.mask_function.exists):
                pass
            elif cutlass.const_expr(self.lists_steps):
                is_partial, words = mask
                self._hide(row, is_partial, words[number])
            elif cutlass.const_expr(mask is not None):
                query = first_row + row_of_fragment(number) // self.query_rows
                first_key = key + cute.arch.thread_idx()[0] % QUAD * 2
                context.visibility(work, block).apply(
                    row, query, first_key, fragment_columns(block), mask[number]
                )
            factors.append(softmax[number].update_max(row))
            softmax[number].exponentiate(row, None, 0, 1)
            softmax[number].accumulate_sum(row)
        return tuple(factors)

    def _places(self, context: HopperForwardContext, place: FragmentPlace, keys_exist: bool) -> Any:
        """Return the places of the scores of a fragment.  place: see `_exponentiate`."""
        return self.score_places(context, place[0][0], self._locator(place), keys_exist)

    @cute.jit
    def _hide_unseen(
        self,
        context: HopperForwardContext,
        scores: cute.Tensor,
        place: FragmentPlace,
        number: Int32,
    ):
        """Scores of a listed step that a function says are not seen := -inf.  place: see
        `_exponentiate`; number: see `MaskFunction.hide`."""
        if number != FULL:
            places = self.mask_places(context, place[0][0], self._locator(place))
            self.mask_function.hide(scores, places, number)

    def _locator(self, place: FragmentPlace) -> Any:
        """Return (query head, query, key) of the scores of a fragment, by number.  place: see
        `_exponentiate`."""
        ((work, first_row), key), packed = place, self.problem_class.packed_heads
        columns, own = fragment_columns(self.config.block_kv), cute.arch.thread_idx()[0] % QUAD * 2

        def locate(number: int) -> tuple[Int32, Int32, Int32]:
            in_part = row_of_fragment(number // 2 % ROWS)
            in_group = cutlass.min(in_part % self.query_rows, packed - 1)
            column = columns[number // 4 * 2 + number % 2]
            query = first_row + in_part // self.query_rows
            return work.head * packed + in_group, query, key + (own + column)

        return locate

    @cute.jit
    def _rescale(self, o: cute.Tensor, factors: tuple[Float32, Float32]):
        """O *= factor, row by row, where any of the warp's maxima moved."""
        if cute.arch.vote_any_sync((factors[0] < Float32(1.0)) | (factors[1] < Float32(1.0))):
            for row, factor in zip(rows_of(o), factors, strict=True):
                row.store(row.load() * factor)

    @cute.jit
    def _finish(
        self,
        context: HopperForwardContext,
        fragments: Fragments,
        softmax: RowSoftmax,
        which: tuple[WorkTile, Int32],
    ):
        """O / sum and LSE of both rows of a thread to global memory."""
        work, first_row = which
        query_rows = context.query(work)
        packed, of_query = self.problem_class.packed_heads, self.query_rows
        rows = rows_of(fragments.o)
        for number in cutlass.range_constexpr(2):
            in_part = row_of_fragment(number)
            row = first_row + in_part // of_query
            in_group = in_part % of_query
            if cutlass.const_expr(of_query > packed):
                # Rows past the heads are padding.
                in_group = cutlass.min(in_group, packed - 1)
            head = work.head * packed + in_group
            inverse, lse = softmax[number].finish(self.sink_log2(context, work, head))
            values = rows[number]
            values.store(values.load() * inverse)
            is_row = row < query_rows.length
            if cutlass.const_expr(of_query > packed):
                is_row = is_row & (in_part % of_query < packed)
            if is_row:
                if cute.arch.thread_idx()[0] % QUAD == 0:
                    self.store_lse(context, work, (row, head), softmax[number], lse)
            if cutlass.const_expr(self.problem_class.split):
                if is_row:
                    self._store_float32(values, self.result_row(context, work, row, head))
            else:
                words = self._words(values)
                if is_row:
                    self._store_words(words, self.result_row(context, work, row, head))

    def _store_float32(self, values: cute.Tensor, out: cute.Tensor) -> None:
        """A quad stores eight columns of a row, 32 bytes, at a time."""
        lane = cute.arch.thread_idx()[0] % QUAD
        pairs = cute.logical_divide(out, cute.make_layout(2))
        for group in range(HEAD_DIM // 8):
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = values[2 * group], values[2 * group + 1]
            cute.autovec_copy(pair, pairs[None, group * QUAD + lane])

    def _words(self, values: cute.Tensor) -> list[cute.Tensor]:
        """A row's elements rounded, eight neighbouring columns per lane of the quad.

        The lanes hold two columns each of every eight; they exchange words so that lane l has all
        of the eight with number 4 g + l, for each g.
        """
        rounded = cute.make_rmem_tensor(cute.size(values), self.dtype)
        rounded.store(values.load().to(self.dtype))
        words = cute.recast_tensor(rounded, Uint32)
        lane, found = cute.arch.thread_idx()[0] % QUAD, []
        for start in range(0, HEAD_DIM // 8, QUAD):
            group = cute.make_rmem_tensor(QUAD, Uint32)
            exchanged = transpose_quad([words[start + i] for i in range(QUAD)], lane)
            for i, word in enumerate(exchanged):
                group[i] = word
            found.append(group)
        return found

    def _store_words(self, words: list, out: cute.Tensor) -> None:
        """A quad stores 32 columns of a row, 64 bytes, at a time."""
        lane = cute.arch.thread_idx()[0] % QUAD
        groups = cute.logical_divide(out, cute.make_layout(8))
        for number, group in enumerate(words):
            cute.autovec_copy(
                cute.recast_tensor(group, self.dtype), groups[None, number * QUAD + lane]
            )

    def create_softmax(self, context: HopperForwardContext) -> OnlineSoftmax:
        """The online softmax of one row, which the lanes of a quad share."""
        config = self.config
        return OnlineSoftmax.create(
            context.scalars.scale_log2,
            config.ex2_pattern,
            config.rescale_threshold,
            self.dtype,
            "scalar",
            QUAD,
            self.problem_class.max_logits,
        )
