"""The kernel of dV and dS: dV = P^T dO at head_dim 256, and dS^T for `products`, by CTA pairs.

One tile is 256 keys of one KV head; one step multiplies it with 128 query rows of one of the query
heads that share the KV head.  Scores are transposed, S^T = K Q^T: each CTA owns 128 keys, with
their K, V, S^T, dP^T and dV, a key per lane.  It is the dQ kernel with queries and keys exchanged,
and each CTA loads dO twice: 64 rows x 256 columns for dP, 128 rows x 128 columns for dV, as in
NOTE [two halves of K] in dq.py.

Timeline of one CTA (the MMA warp is the leader's); last is the tile's last step, 0' the next
tile's first; Q, dO are the rows for S and dP, dOc the columns for dV::

    load      Q(1) dOc(0) dO(1)  ..  | K' Q(0') dOc(last) V' dO(0') ...
    mma       S(1) dV(0) dP(1)   ..  | S(0')    dV(last)  dP(0') ...
    gradient  P(1)> dS(1)> ..        | P(0')    dV out, >, dV out, dS(0')> ...

where the first > is the write of P to tensor memory, and the second one that of dS to global
memory, straight from registers. LSE and delta of a step are loaded behind its Q.  The exp2 of a
step has the time of two MMAs, S(i) done to dP(i) done; the move of P to tensor memory has that of
one; dS, for which nobody waits, follows, and leaves store by store during the next step's exp2, so
that no warp waits for the SM's queue of stores. dV leaves in two halves, the first one while dP(0')
is computed.

LSE and delta belong to columns here.  Scores therefore come to registers by quads
(`blackwell.tmem_quads`): a thread has 16 of its warpgroup's 64 queries for each of four keys, and
reads 16 values of each instead of 64: of the shared memory's port, which the MMAs leave little of,
128 clocks per step instead of 512.

NOTE [P over dP].  P(i) lies over dP(i): each warpgroup stores P over the 64 columns of dP that it
alone reads, when each of its warps has read its lanes of them (tcgen05.wait::ld). dP(i+1), which
writes the same columns, is issued after dV(i), which reads them, by the same thread, and the MMAs
of a pair execute in issue order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers.protocol import WorkTile
from ...backward.common import BackwardContext, Step
from ...backward.ds_tiles import DS_BLOCK, RUN
from ...backward.key_tiles import KeyTiles, ListedStep
from ...context import KernelParts
from ...functions.kernel_functions import Locate, ScorePlaces
from ...limits import HEAD_DIM
from ...mask.block_mask import FULL
from ...mask.masking import WORD_BITS
from ...operands import SharedMemory
from ...plan.edges import RingRecord, RingState
from ...problem_class import GradientClass, ProblemClass
from ...ranges import traced
from ...rows.sequences import columns_of
from ..instructions import (
    Mma,
    MmaShape,
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
    k_major_operand,
    mn_major_operand,
)
from ..pair_kernel import await_buffer
from ..tmem import multiply_rows, tmem_buffer
from ..tmem_quads import tmem_load_quads, tmem_store_quads
from .common import FRAGMENT, BlackwellBackward, RowsOfStep, ScoreMask, score_gradients, warpgroup
from .common import BlackwellBackwardContext as Context
from .config import DvPlan, GradientConfig
from .quads import (
    COLUMNS,
    QUAD,
    STEP_QUERIES,
    WARPGROUP_QUERIES,
    DsStore,
    FunctionMask,
    ListedMask,
    ListedNumber,
    QuadMask,
    QuadRegisters,
    StepDs,
    StepMask,
    TileStep,
    first_key,
    first_query,
    quad,
)
from .row_result import CTA_ROWS, WARPGROUP_COLUMNS, ResultPlace, RowResult, first_row

TILE_KEYS = DS_BLOCK


@dataclass(kw_only=True)
class DvLoadRings(RingRecord):
    k: RingState
    v: RingState
    ring: RingState
    stats: RingState


@dataclass(kw_only=True)
class DvMmaRings(RingRecord):
    """Buffers that the MMA warp uses next: of K, V, Q and dO, S, dP with P over it, dV."""

    k: RingState
    v: RingState
    ring: RingState
    s: RingState
    dp: RingState
    p: RingState
    dv: RingState


@dataclass(frozen=True)
class DvTiles(KeyTiles):
    plan: DvPlan
    problem_class: ProblemClass

    def first_step(self, context: BackwardContext, work: WorkTile) -> Step:
        """Return the first step of a tile, with what the list says where a block mask names it."""
        step = self.first_position(context, work)
        if not self.problem_class.lists_steps:
            return step
        return ListedStep.first(step, self.block_list(context, work))


class DvKernel(BlackwellBackward):
    """The kernel for one configuration; arguments of a call: `BackwardEntry.__call__`. results:
    (dv,). ds: see `backward.ds_tiles`. A tile's head counts parts of KV heads: KV head * head_parts
    + part."""

    # Looking up the sequence of a block in a row takes registers that are not there.
    rows_of = None
    #: Of the fields of `QuadRegisters`.
    register_sizes = WARPGROUP_QUERIES, WARPGROUP_QUERIES // 2, WARPGROUP_QUERIES // 2
    tiles: DvTiles
    load_rings, mma_rings = DvLoadRings, DvMmaRings
    mma_waits = {
        "k": "k_loaded",
        "v": "v_loaded",
        "ring": "ring_loaded",
        "s": "s_free",
        "dp": "dp_done",
        "p": "p_done",
        "dv": "dv_free",
    }
    mma_ends = "s", "dv"
    kept, passing = ("k", "v"), "ring"
    boxes = {
        "q": (0, WARPGROUP_QUERIES, HEAD_DIM // 2),
        "k": (1, CTA_ROWS, HEAD_DIM),
        "v": (2, CTA_ROWS, HEAD_DIM),
        "dout": (3, WARPGROUP_QUERIES, HEAD_DIM // 2),
    }

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = DvTiles(self.plan, self.problem_class)
        self.result = RowResult("dV", self.tmem_plan, is_scaled=False)
        counts_tiles = not (self.problem_class.ragged or self.functions.change.exists)
        self.ds_store = DsStore(self.dtype, counts_tiles)
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        # A warpgroup's columns of dV from here on leave when the next tile's first P is stored;
        # with slopes or places of scores, which take the registers, all leave before.
        is_plain = not self.functions.change.exists and not self.functions.mask_function.exists
        self.later_columns = WARPGROUP_COLUMNS // 2 if is_plain else WARPGROUP_COLUMNS
        keys, queries = k_major_operand(CTA_ROWS), k_major_operand(WARPGROUP_QUERIES, HEAD_DIM // 2)
        # P of a warpgroup lies over the half of dP that it alone reads, NOTE [P over dP].
        half = TmemOperand.contiguous(WARPGROUP_QUERIES).step_columns
        p = TmemOperand((*half, *(WARPGROUP_QUERIES + column for column in half)))
        dv = MmaShape(TILE_KEYS, HEAD_DIM, is_bf16, b_mn_major=True)
        s = MmaShape(TILE_KEYS, STEP_QUERIES, is_bf16, negate_a=negate)
        dp = MmaShape(TILE_KEYS, STEP_QUERIES, is_bf16)
        # Each by halves of what is reduced over, as Q and dO come.
        self.mma_s = [Mma(s, keys.part(half, 2), queries) for half in range(2)]
        self.mma_dp = [Mma(dp, keys.part(half, 2), queries) for half in range(2)]
        columns = mn_major_operand(WARPGROUP_QUERIES)
        self.mma_dv = [Mma(dv, p.part(half, 2), columns) for half in range(2)]

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        stages = self.plan.ring_stages
        stats = cute.make_layout((STEP_QUERIES, self.plan.stats_stages))
        return {
            "k": memory.operand("k", CTA_ROWS, HEAD_DIM, 1),
            "v": memory.operand("v", CTA_ROWS, HEAD_DIM, 1),
            "ring": memory.operand("ring", WARPGROUP_QUERIES, HEAD_DIM // 2, stages),
            "lse": cute.make_tensor(memory.region("lse", Float32, 128), stats),
            "delta": cute.make_tensor(memory.region("delta", Float32, 128), stats),
        }

    def _result(self, context: Context, work: WorkTile) -> ResultPlace:
        result, keys = context.tensors.results[0], context.sequences.key(work.batch)
        return ResultPlace(result, keys, first_row(context, work), work.head)

    # ------------------------------------------------------------ load

    def first_step(self, context: Context, work: WorkTile) -> Step:
        return self.tiles.first_step(context, work)

    def load_kept(
        self, context: Context, work: WorkTile, name: str, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load this CTA's 128 keys of K or V, for the whole tile."""
        head = work.head // context.scalars.head_parts
        place = context.sequences.key(work.batch), first_row(context, work), 0, head
        self.load_box(context, name, place, (name, rings[name]))
        return rings

    def _queries(self, context: Context, work: WorkTile, step: Step) -> RowsOfStep:
        sequence = context.sequences.query(work.batch)
        first = self.tiles.query_tile(context, work, step) * STEP_QUERIES
        return RowsOfStep(sequence, first, step.head)

    def load_s(
        self, context: Context, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load this CTA's 64 rows of Q, half of the columns after the other, then LSE and delta of
        all rows of the step."""
        self.load_rows(context, "q", self._queries(context, work, step), rings.ring)
        return self._load_row_stats(context, work, step, rings)

    def load_dp(
        self, context: Context, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load this CTA's 64 rows of dO."""
        self.load_rows(context, "dout", self._queries(context, work, step), rings.ring)
        return rings

    def load_sum(
        self, context: Context, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load this CTA's half of the columns of dO: B of dV."""
        self.load_columns(context, "dout", self._queries(context, work, step), rings.ring)
        return rings

    @traced("load")
    def _load_row_stats(
        self, context: Context, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load LSE and delta of a step's rows, whose bytes complete on one barrier."""
        barrier, buffer = await_buffer(context, "stats", rings.stats)
        for name in ("lse", "delta"):
            target = barrier, context.smem[name][None, buffer]
            self.tiles.load_stats(context, name, (work, step), target)
        rings.stats.advance()
        return rings

    # ------------------------------------------------------------ mma

    @traced("dV")
    @cute.jit
    def issue_sum(self, context: Context, number: Int32, is_last: bool, rings: DvMmaRings):
        """dV += P^T dO of a step.  number: of the step, from 1 on; the first one waits until dV of
        the tile before is in registers, and overwrites it."""
        barriers = context.barriers
        is_first, adds = number == 1, number > 1
        if is_first:
            barriers["dv_free"].wait(rings.dv)
            rings.dv.advance()
        for half in cutlass.range_constexpr(2):
            barriers["ring_loaded"].wait(rings.ring)
            if cutlass.const_expr(half == 0):
                barriers["p_done"].wait(rings.p)
            fence_after_thread_sync()
            p = tmem_buffer(context.tmem, self.tmem_plan, "dp", rings.p)
            dout = context.smem["ring"][None, None, rings.ring.index].iterator
            dv = tmem_buffer(context.tmem, self.tmem_plan, "dv", rings.dv)
            self.mma_dv[half].issue(dv, p, dout, adds if half == 0 else True)
            barriers["ring_free"].commit(rings.ring)
            rings.ring.advance()
        rings.p.advance()
        if cutlass.const_expr(is_last):
            barriers["dv_done"].commit(rings.dv)
        return rings

    # ------------------------------------------------------------ gradient

    @cute.jit
    def gradient(self, context: Context):
        """S^T -> P and dP^T -> dS for this CTA's 128 keys: half of the queries per warpgroup."""
        states = RingRecord.waiting(self.edges, "s_done", "dp_done", "stats_loaded", "dv_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        sizes = self.register_sizes
        registers = QuadRegisters(*(cute.make_rmem_tensor(size, Float32) for size in sizes))
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                cta_key = first_row(context, work)
                visibility = self.tiles.transposed(context, work)
                tile = (work.block * TILE_KEYS, TILE_KEYS)
                tiles = visibility.tile_range(tile, (cta_key, CTA_ROWS))
                has_rest = cta_key + CTA_ROWS > visibility.seqlen_q
                # Without what the list says, for which there are no registers.
                step = self.tiles.first_position(context, work)
                row = self.tiles.row_of_ds(context, work)
                number = self.ds_store.number(context, step, row)
                if cutlass.const_expr(not self.problem_class.lists_steps):
                    self.ds_store.complete_blocks(context, work, step, row)
                key = cta_key + first_key()
                if cutlass.const_expr(self.problem_class.lists_steps):
                    mask = self._listed_mask(context, work, step)
                else:
                    mask = QuadMask(Boolean(True), visibility, key, step.index)
                place = TileStep(work, step)
                states = self._probabilities(context, registers, mask, None, states, place)
                if undrained.is_valid:
                    part = 0, self.later_columns
                    result = self._result(context, undrained)
                    states = self.result.drain(context, result, states, part)
                for _ in cutlass.range(1, num_steps, unroll=1):
                    if cutlass.const_expr(self.problem_class.lists_steps):
                        # Two loads, the second where the first says, beside dS of this step.
                        mask = self._listed_mask(context, work, step.following())
                    states = self._publish(context, registers, undrained, states)
                    if cutlass.const_expr(self.later_columns < WARPGROUP_COLUMNS):
                        undrained = self.no_work()
                    tile_of_ds = self.ds_store.tile(context, step, row, number)
                    if cutlass.const_expr(self.ds_store.counts_tiles):
                        number = self.ds_store.following_number(context, step, number)
                    step = step.following()
                    if cutlass.const_expr(not self.problem_class.lists_steps):
                        index = step.index
                        is_masked = (index < tiles.unmasked_begin) | (index >= tiles.unmasked_end)
                        mask = QuadMask(is_masked | has_rest, visibility, key, index)
                    before, place = StepDs(tile_of_ds, registers.ds), TileStep(work, step)
                    states = self._probabilities(context, registers, mask, before, states, place)
                states = self._publish(context, registers, undrained, states)
                tile_of_ds = self.ds_store.tile(context, step, row, number)
                for half in cutlass.range_constexpr(2):
                    self.ds_store.store(StepDs(tile_of_ds, registers.ds), half)
                undrained = work
            else:
                self.result.store_zeros(self._result(context, work))
            work = scheduler.advance_to_next_work()
        if undrained.is_valid:
            states = self.result.drain(context, self._result(context, undrained), states)

    def _thread_stats(self, context: Context, name: str, buffer: Int32) -> cute.Tensor:
        """-LSE or -delta of this thread's 16 queries, for each of 32 scores of `quad_fragment`."""
        flat = context.smem[name]
        shape = (2, QUAD, WARPGROUP_QUERIES // RUN, 2, self.plan.stats_stages)
        by_thread = cute.make_tensor(flat.iterator, cute.make_layout(shape))
        thread_values = by_thread[None, quad()[1], None, warpgroup(), buffer]
        values = cute.make_rmem_tensor((2, WARPGROUP_QUERIES // RUN), Float32)
        cute.autovec_copy(thread_values, values)
        layout = cute.make_layout((2, 2, WARPGROUP_QUERIES // RUN), stride=(1, 0, 2))
        return cute.make_tensor(values.iterator, layout)

    def _listed_mask(self, context: Context, work: WorkTile, step: Step) -> StepMask:
        listed, place = self.tiles.block_list(context, work), (step.head, step.index)
        if self.functions.mask_function.exists:
            number = listed.bit_tile(place, context.cta_rank)
            return ListedNumber(number != FULL, number)
        keys = [first_key() + 8 * i for i in range(4)]
        words = warpgroup() * (WARPGROUP_QUERIES // WORD_BITS), quad()[1] * 2
        return ListedMask(*listed.key_bits(place, context.cta_rank, keys, words))

    def _mask(
        self, context: Context, place: TileStep, mask: StepMask, halves: tuple[int, ...]
    ) -> ScoreMask:
        if not isinstance(mask, ListedNumber):
            return mask._replace(halves=halves)
        places = self.functions.mask_places(
            context, place.work, self._locator(context, place, halves[0])
        )
        return FunctionMask(*mask, self.functions.mask_function, places)

    def _places(self, context: Context, place: TileStep, half: int = 0) -> ScorePlaces | None:
        """Return the places of this thread's scores of a step, from a half of its keys on."""
        if not self.functions.change.by_place:
            return None
        return self.functions.score_places(context, place.work, self._locator(context, place, half))

    def _locator(self, context: Context, place: TileStep, half: int) -> Locate:
        """Return (query head, query, key) of scores by number, from a half of this thread's keys
        on."""
        work, step = place
        query = first_query(self.tiles.query_tile(context, work, step))
        key = first_row(context, work) + first_key()

        def locate(number: int) -> tuple[Int32, Int32, Int32]:
            group = number // FRAGMENT + half
            column = COLUMNS[number % FRAGMENT // 4 * 2 + number % 2]
            return step.head, query + column, key + (16 * group + 8 * (number // 2 % 2))

        return locate

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: Context,
        registers: QuadRegisters,
        mask: StepMask,
        before: StepDs | None,
        states: RingRecord,
        place: TileStep,
    ):
        """P of one step, times the slope of each score, and in 16 bits.  before: dS of the step
        before, which leaves meanwhile."""
        factors, p, _ = registers
        states = self.take_scores(context, factors, tmem_load_quads, states)
        context.barriers["stats_loaded"].wait(states["stats_loaded"])
        negative_lse = self._thread_stats(context, "lse", states["stats_loaded"].index)
        rounded = cute.recast_tensor(p, self.dtype)
        for half in cutlass.range_constexpr(2):
            part = columns_of(factors, half * FRAGMENT, FRAGMENT)
            if cutlass.const_expr(self.functions.change.has_slopes):
                # Halves are done separately, or the slopes of all take the registers.
                places = self._places(context, place, half)
                step_mask = self._mask(context, place, mask, (half,))
                slopes = self.change_and_mask(context, part, places, step_mask)
            elif cutlass.const_expr(half == 0):
                places = self._places(context, place)
                step_mask = self._mask(context, place, mask, (0, 1))
                slopes = self.change_and_mask(context, factors, places, step_mask)
            self.ds_store.store(before, half)
            self.exponentiate(context, part, negative_lse, half * FRAGMENT, WARPGROUP_QUERIES)
            columns_of(rounded, half * FRAGMENT, FRAGMENT).store(part.load().to(self.dtype))
            if cutlass.const_expr(slopes is not None):
                multiply_rows(part, slopes)
        return states

    @traced("dS")
    @cute.jit
    def _publish(
        self, context: Context, registers: QuadRegisters, undrained: WorkTile, states: RingRecord
    ):
        """P to tensor memory, over dP, then dS = factors (dP - delta) in 16 bits. undrained: the
        tile before, in its successor's first step, where the next MMA waits for both P and the
        other half of its dV."""
        factors, p, ds = registers
        context.barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        address = self.warp_columns(context, "dp", WARPGROUP_QUERIES)
        dp = cute.make_rmem_tensor(WARPGROUP_QUERIES, Float32)
        tmem_load_quads(address, dp)
        cute.arch.fence_view_async_tmem_load()
        tmem_store_quads(p, address)
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        context.barriers["p_done"].arrive(states["dp_done"], is_converged=True)
        states.advance("dp_done")
        if cutlass.const_expr(self.later_columns < WARPGROUP_COLUMNS):
            if undrained.is_valid:
                part = self.later_columns, WARPGROUP_COLUMNS
                result = self._result(context, undrained)
                states = self.result.drain(context, result, states, part)
        delta = self._thread_stats(context, "delta", states["stats_loaded"].index)
        rounded = cute.recast_tensor(ds, self.dtype)
        for start in cutlass.range_constexpr(0, WARPGROUP_QUERIES, FRAGMENT):
            part = columns_of(dp, start, FRAGMENT)
            score_gradients(part, columns_of(factors, start, FRAGMENT), delta)
            columns_of(rounded, start, FRAGMENT).store(part.load().to(self.dtype))
        context.barriers["stats_free"].arrive(states["stats_loaded"])
        states.advance("stats_loaded")
        return states
