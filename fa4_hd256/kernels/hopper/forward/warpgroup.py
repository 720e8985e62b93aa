"""Base of Hopper's forward kernels: how a warpgroup goes through the steps of its tiles.

A warpgroup issues QK(i + 1) and PV(i) together and makes P(i + 1) while PV(i) runs; nothing ties
the warpgroups together but the buffers, so that one multiplies while the other rounds or stores.

NOTE [exponentials before the wait].  A warp that waits for its MMAs does nothing else, and ptxas
moves arithmetic across such a wait: half of the exponentials would come after PV, which is there to
hide them.  It does not move them across the loop of an mbarrier wait: that for the next V, which is
there by then, stands between the two.

NOTE [gate behind Q].  A gate of the result has the shape of Q.  Its rows come into the buffer of Q
when a tile's last QK is done, and arrive during the last softmax and PV; the load warp has them
prefetched into L2 at the tile's begin.  The next Q follows as soon as they are in registers, and
arrives while O is gated and stored.

O leaves from registers (`fragments` NOTE [results leave from registers]), so that Q of the next
tile arrives while the last P of this one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from ....schedulers.order import TileOrder
from ....schedulers.protocol import WorkTile
from ...context import KernelParts, shared_fields
from ...forward.context import ForwardKernelTensors
from ...limits import HEAD_DIM
from ...mask.masking import TileRange, Visibility
from ...operands import SharedMemory, load_tile, prefetch_tile
from ...plan.edges import RingState
from ...problem_class import CallScalars, ProblemClass, query_rows
from ...ranges import traced
from ...rows.output_gate import multiply_by_gate
from ..forward_common import HopperForward
from ..fragments import fragment_words, rescale
from ..gate_words import multiply_by_words
from ..instructions import QUAD, WgmmaShape, commit, fence, multiply, row_of_fragment, rows_of, wait
from .config import WARPGROUP_ROWS
from .context import Fragments, RowSoftmax, Running, StepKeys, WarpgroupTile
from .context import HopperForwardContext as Context

ROWS = 2  # of a thread
#: `StepKeys.mask` of a step that is masked by range alone.
MASKED_WITHOUT_TREE = (None,) * ROWS


class ResultRow(NamedTuple):
    """Functions by which a thread's part of a row of O is ordered, and leaves. ordered: brings its
    values into the order of `columns`. store_float32: stores those of a KV split. exchanged: rounds
    them, and exchanges words within a quad; store: stores these."""

    ordered: Callable[[cute.Tensor], cute.Tensor]
    columns: Callable[[], Any]
    store_float32: Callable[[cute.Tensor, cute.Tensor], None]
    exchanged: Callable[[cute.Tensor, Any], list[cute.Tensor]]
    store: Callable[[list[cute.Tensor], cute.Tensor, Any], None]


class WarpgroupForward(HopperForward):
    """Base of a kernel whose warpgroups work on 64 query rows each.

    config: tile shapes, stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    parts: see `KernelParts`.

    A kernel adds its operands, `qk` and `pv`, `_exponentiate`, and `run_other_role(context, warp)`,
    the role of a warp that does not multiply.  v_loaded, v_free: edges of V as it is multiplied.
    loads_gate: NOTE [gate behind Q].  pack: rounds P to the fragment that is multiplied.
    """

    v_loaded, v_free = "v_loaded", "v_free"
    loads_gate = False
    pack: Callable[[cute.Tensor, cute.Tensor], None]
    result_row: ResultRow
    qk: WgmmaShape
    pv: WgmmaShape
    _operands: Callable[[SharedMemory], dict[str, cute.Tensor]]
    consume: Callable
    run_other_role: Callable
    _exponentiate: Callable[..., tuple[Float32, Float32]]

    def __init__(self, config: Any, problem_class: ProblemClass, parts: KernelParts) -> None:
        self.config, self.problem_class = config, problem_class
        self.dtype = problem_class.element_type
        self.parts, self.scheduler = parts, parts.scheduler
        self.warps, self.edges, self.smem_plan = config.warps, config.edges, config.smem
        # Rows of a query.
        of_query = self.query_rows = query_rows(problem_class.packed_heads, WARPGROUP_ROWS)
        # Queries of a cluster's tile, of a CTA and of a warpgroup.
        self.tile_queries = config.tile_q // of_query
        self.block_queries = config.block_q // of_query
        self.warpgroup_queries = WARPGROUP_ROWS // of_query
        self.load_keys = config.block_kv

    @cute.kernel
    def kernel(
        self,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ):
        self.allow_next()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.warps.load:
            self.prefetch_descriptors(tensors)
        context = self.set_up(SmemAllocator(), tensors, sizes, scalars, order)
        cute.arch.mbarrier_init_fence()
        self._synchronise()
        if warp < self.warps.load:
            cute.arch.setmaxregister_increase(self.warps.registers_consumers)
            self.consume(context)
        else:
            cute.arch.setmaxregister_decrease(self.warps.registers_other)
            self.run_other_role(context, warp)
        # Nobody may leave while the peer still signals it.
        if cutlass.const_expr(self.config.ctas > 1):
            self._synchronise()

    def _synchronise(self) -> None:
        if self.config.ctas > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> Context:
        memory = SharedMemory(allocator, self.smem_plan, self.dtype)
        rank = Int32(0)
        if self.config.ctas > 1:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return Context(
            **shared_fields(self, allocator, memory, tensors, sizes, scalars, order),
            cta_rank=rank,
            smem=self._operands(memory),
            **self.context_fields(tensors, sizes),
        )

    @property
    def scheduled_warps(self) -> int:
        return self.config.ctas * self.warps.scheduled_warps

    def first_row(self, context: Context, work: WorkTile, warpgroup: Int32 | int) -> Int32:
        first = work.block * self.tile_queries + context.cta_rank * self.block_queries
        return first + warpgroup * self.warpgroup_queries

    def _load_q(self, context: Context, work: WorkTile, q_free: RingState) -> None:
        """The rows of each warpgroup, once its last MMA with those before is done."""
        tensors = context.tensors
        if cutlass.const_expr(self.loads_gate):
            # The buffer waits for a gate to leave it: what then comes is near.
            self._prefetch_rows(context, tensors.q, work)
        self._load_rows(context, tensors.q, work, q_free)
        if cutlass.const_expr(self.loads_gate):
            self._prefetch_rows(context, tensors.gate, work)

    def _load_rows(self, context: Context, source: Any, work: WorkTile, q_free: RingState) -> None:
        """Rows of each warpgroup into its buffer, as soon as that is free."""
        loaded = context.barriers["q_loaded"]
        for warpgroup in range(self.config.warpgroups):
            buffer = RingState(1, Int32(warpgroup), q_free.phase)
            context.barriers["q_free"].wait(buffer)
            loaded.expect_bytes(buffer)
            load_tile(
                source,
                context.smem["q"],
                self._rows_of(context, work, warpgroup),
                loaded.pointer(buffer),
                warpgroup,
                self.query_rows,
            )

    def _prefetch_rows(self, context: Context, source: Any, work: WorkTile) -> None:
        for warpgroup in range(self.config.warpgroups):
            place = self._rows_of(context, work, warpgroup)
            prefetch_tile(source, context.smem["q"], place, self.query_rows)

    def _rows_of(self, context: Context, work: WorkTile, warpgroup: int) -> tuple[Any, ...]:
        return context.query(work), self.first_row(context, work, warpgroup), 0, work.head

    def _take_gate(self, context: Context, loaded: RingState) -> tuple[list[Uint32], ...]:
        """The gate of both rows of a thread: words of two elements each, in the order of O.  Then
        its buffer is free for the next Q.  loaded: state of the buffer."""
        context.barriers["q_loaded"].wait(loaded)
        tile = context.smem["q"][None, None, loaded.index]
        words = tuple(fragment_words(tile, number) for number in range(ROWS))
        context.barriers["q_free"].arrive(loaded)
        return words

    # ------------------------------------------------------------------------------------ tiles

    @cute.jit
    def _range_tile(
        self,
        context: Context,
        fragments: Fragments,
        running: Running,
        work: WorkTile,
        q_loaded: RingState,
    ):
        """Run a tile's steps, this warpgroup its own. Returns (running, Q's state) for the next."""
        visibility = context.visibility(work, self.config.block_kv)
        first_query = work.block * self.tile_queries
        num_steps = visibility.num_tiles(first_query, self.tile_queries)
        tile = WarpgroupTile(work, self.first_row(context, work, q_loaded.index), q_loaded)
        tiles, warpgroup_steps = self._warpgroup_tiles(visibility, tile)
        self._clear(fragments, running)
        if num_steps > 0:
            last_tile = visibility.last_tile(first_query, self.tile_queries)
            skipped_first = last_tile + 1 - tiles.end
            skipped_last = num_steps - warpgroup_steps - skipped_first
            context.barriers["q_loaded"].wait(q_loaded)
            running = self._skip(context, running, skipped_first)
            if warpgroup_steps > 0:
                running = self._steps(context, fragments, running, tile, tiles)
            else:
                context.barriers["q_free"].arrive(q_loaded)
            running = self._skip(context, running, skipped_last)
            q_loaded.advance()
        return running, q_loaded

    def _clear(self, fragments: Fragments, running: Running) -> None:
        """Maxima, sums and O of a tile's rows before its first step."""
        for softmax in running.softmax:
            softmax.reset()
        fragments.o.fill(0.0)

    def _warpgroup_tiles(
        self, visibility: Visibility, tile: WarpgroupTile
    ) -> tuple[TileRange, Int32]:
        first_query = tile.work.block * self.tile_queries
        part = (tile.first_row, self.warpgroup_queries)
        if cutlass.const_expr(self.config.skips and not self.problem_class.split):
            tiles, count = visibility.tile_range(part, part), visibility.num_tiles(*part)
            # Without rows or keys of its own it skips all of the tile's.
            last = visibility.last_tile(first_query, self.tile_queries)
            end = cutlass.select_(count > 0, tiles.end, last + 1)
            return TileRange(tiles.begin, end, tiles.unmasked_begin, tiles.unmasked_end), count
        of_tile = (first_query, self.tile_queries)
        return visibility.tile_range(of_tile, part), visibility.num_tiles(*of_tile)

    @cute.jit
    def _skip(self, context: Context, running: Running, count: Int32):
        """Give back K and V of steps that this warpgroup takes no part in."""
        softmax, k_loaded, v_loaded = running
        for _ in cutlass.range(count, unroll=1):
            context.barriers["k_loaded"].wait(k_loaded)
            context.barriers["k_free"].arrive(k_loaded)
            k_loaded.advance()
            context.barriers[self.v_loaded].wait(v_loaded)
            context.barriers[self.v_free].arrive(v_loaded)
            v_loaded.advance()
        return Running(softmax, k_loaded, v_loaded)

    @cute.jit
    def _steps(
        self,
        context: Context,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        tiles: TileRange,
    ):
        """All steps of a tile: QK before PV of the step before, which hides the softmax."""
        block, by_place = self.config.block_kv, self.functions.change.by_place
        key, nodes = (tiles.end - 1) * block, self._nodes(context, tile)
        # Tiles go from the last keys down: a mask's right edge comes first, its left edge last.
        masked, unmasked = tiles.num_masked_first, tiles.num_unmasked
        # Steps behind this one.
        left = masked + unmasked + tiles.num_masked_last - 1
        running = self._first_step(context, fragments, running, tile, StepKeys(key, nodes, left))
        key -= block
        # The kind of the first step.
        was_masked = cutlass.min(masked, 1)
        was_unmasked = (1 - was_masked) * cutlass.min(unmasked, 1)
        was_last = 1 - was_masked - was_unmasked
        for _ in cutlass.range(masked - was_masked, unroll=1):
            left -= 1
            running = self._step(context, fragments, running, tile, StepKeys(key, nodes, left))
            key -= block
        for _ in cutlass.range(unmasked - was_unmasked, unroll=1):
            left -= 1
            running = self._step(context, fragments, running, tile, StepKeys(key, None, left))
            if cutlass.const_expr(by_place):
                key -= block
        if cutlass.const_expr(self.problem_class.mask.hides_first):
            if cutlass.const_expr(not by_place):
                key -= (unmasked - was_unmasked) * block
            for _ in cutlass.range(tiles.num_masked_last - was_last, unroll=1):
                left -= 1
                keys = StepKeys(key, MASKED_WITHOUT_TREE, left)
                running = self._step(context, fragments, running, tile, keys)
                key -= block
        return self._last_pv(context, fragments, running)

    # ------------------------------------------------------------------------------------ steps

    @traced("first step")
    @cute.jit
    def _first_step(
        self,
        context: Context,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        keys: StepKeys,
    ):
        """QK and softmax of the first step; O is empty yet."""
        softmax, k_loaded, v_loaded = running
        self._wait_for(context, "k_loaded", k_loaded)
        fence()
        scores = self._issue_qk(fragments, k_loaded)
        wait(0)
        self._give_back_k_and_q(context, k_loaded, tile.q_loaded, keys.left)
        k_loaded.advance()
        self._exponentiate(context, scores, softmax, tile, keys)
        self._wait_for(context, self.v_loaded, v_loaded)
        self.pack(scores, fragments.p)
        return Running(softmax, k_loaded, v_loaded)

    @traced("step")
    @cute.jit
    def _step(
        self,
        context: Context,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        keys: StepKeys,
    ):
        """QK of a step, PV of the one before, softmax, O rescaled.

        V of a step is waited for at the end of its softmax: NOTE [exponentials before the wait].
        """
        softmax, k_loaded, v_loaded = running
        self._wait_for(context, "k_loaded", k_loaded)
        fence()
        scores = self._issue_qk(fragments, k_loaded)
        self._issue_pv(fragments, v_loaded)
        wait(1)
        self._give_back_k_and_q(context, k_loaded, tile.q_loaded, keys.left)
        k_loaded.advance()
        factors = self._exponentiate(context, scores, softmax, tile, keys)
        following = v_loaded.copy()
        following.advance()
        self._wait_for(context, self.v_loaded, following)
        wait(0)
        context.barriers[self.v_free].arrive(v_loaded)
        # P is free now that PV is done.
        self.pack(scores, fragments.p)
        rescale(fragments.o, factors)
        return Running(softmax, k_loaded, following)

    def _last_pv(self, context: Context, fragments: Fragments, running: Running) -> Running:
        """PV of a tile's last step."""
        fence()
        self._issue_pv(fragments, running.v)
        wait(0)
        context.barriers[self.v_free].arrive(running.v)
        running.v.advance()
        return running

    def _wait_for(self, context: Context, loaded: str, state: RingState) -> None:
        """Wait for a tile that MMAs read through the async proxy, which cp.async does not write."""
        context.barriers[loaded].wait(state)
        if self.gathers:
            cute.arch.fence_view_async_shared()

    def _issue_qk(self, fragments: Fragments, k_loaded: RingState) -> cute.Tensor:
        """Issue S = Q K^T, a group of its own; S."""
        scores = self.qk.accumulator()
        k = fragments.k[None, None, None, k_loaded.index]
        multiply(self.qk, scores, fragments.q, k, False)
        commit()
        return scores

    def _issue_pv(self, fragments: Fragments, v_loaded: RingState) -> None:
        """Issue O += P V, a group of its own."""
        v = fragments.v[None, None, None, v_loaded.index]
        multiply(self.pv, fragments.o, fragments.p, v, True)
        commit()

    @cute.jit
    def _give_back_k_and_q(
        self, context: Context, k_loaded: RingState, q_loaded: RingState, left: Int32
    ):
        """Give back K of a step, and Q behind the tile's last. left: steps behind this one."""
        context.barriers["k_free"].arrive(k_loaded)
        if left == 0:
            context.barriers["q_free"].arrive(q_loaded)

    def _nodes(self, context: Context, tile: WarpgroupTile) -> tuple[Any, ...]:
        if not context.mask.tree:
            return MASKED_WITHOUT_TREE
        rows = (tile.first_row + row_of_fragment(i) // self.query_rows for i in range(ROWS))
        return tuple(context.nodes(tile.work, row) for row in rows)

    # ---------------------------------------------------------------------------------- results

    @cute.jit
    def _finish(
        self,
        context: Context,
        fragments: Fragments,
        softmax: RowSoftmax,
        work: WorkTile,
        first_row: Int32,
        gate: Any = None,
    ):
        """O / sum and LSE of both rows of a thread to global memory.  gate: of `_take_gate`; None
        where it is read from global memory, or there is none."""
        query_rows, v_scale = context.query(work), context.value_descale(work)
        # Once: with KV splits it is a division, which the branches below would repeat.
        batch = context.result_batch(work)
        packed, of_query = self.problem_class.packed_heads, self.query_rows
        rows = rows_of(fragments.o)
        for number in cutlass.range_constexpr(ROWS):
            in_part = row_of_fragment(number)
            row = first_row + in_part // of_query
            in_group = in_part % of_query
            if cutlass.const_expr(of_query > packed):
                # Rows past the heads are padding.
                in_group = cutlass.min(in_group, packed - 1)
            head = work.head * packed + in_group
            inverse, lse = softmax[number].finish(self.sink_log2(context, work, head))
            if cutlass.const_expr(v_scale is not None):
                inverse = inverse * v_scale
            values = self.result_row.ordered(rows[number])
            values.store(values.load() * inverse)
            is_row = row < query_rows.length
            if cutlass.const_expr(of_query > packed):
                is_row = is_row & (in_part % of_query < packed)
            if cutlass.const_expr(gate is not None):
                multiply_by_words(values, gate[number], range(HEAD_DIM // QUAD), self.dtype)
            elif cutlass.const_expr(context.out_gate is not None):
                if is_row:
                    multiply_by_gate(
                        values, context.gate_row(work, row, head), self.result_row.columns()
                    )
            if is_row:
                if cute.arch.thread_idx()[0] % QUAD == 0:
                    self.store_lse(context, work, (row, head), softmax[number], lse, batch)
            if cutlass.const_expr(self.problem_class.split):
                if is_row:
                    self.result_row.store_float32(values, context.result_row(work, row, head))
            else:
                words = self.result_row.exchanged(values, self.dtype)
                if is_row:
                    out = context.result_row(work, row, head)
                    self.result_row.store(words, out, self.dtype)
