"""The dK/dV kernel: dV = P^T dO and dK = softmax_scale dS^T Q at head_dim 256, by CTA pairs.

One tile is 128 keys of one KV head; one step, a unit, multiplies it with 256 query rows of one
of the query heads that share the KV head.  Scores are transposed, S^T = K Q^T: each CTA owns 64
keys, and the tensor core splits the columns of a result between the lanes 0..63 and 64..127
(PTX ISA 9.7.16.10.5, M = 128 over a pair), so every accumulator takes 128 columns.  Q and dO are
needed in two halves that a pair cannot share, as in NOTE [two halves of K] in dq.py.

Timeline of one CTA (the MMA warp is the leader's); u counts units, last is the tile's last, 0'
the next tile's first; Q, dO are the rows for S and dP, Qc, dOc the columns for dK and dV::

    load      Q(1) dOc(0) dO(1) Qc(0)  ..  | K' Q(0') dOc(last) V' dO(0') Qc(last) ..
    mma       S(1) dV(0)  dP(1) dK(0)  ..  | S(0')    dV(last)  dP(0')    dK(last) S(1') ..
    gradient  P(0)> dS(0) P(1) dS(0)>  ..  | P(last)> dS(last) dS(last)> P(0') P(0')> dS(0'),
                                           | dK, dV -> global, P(1') dS(0')>

where > is the write to shared memory.  P(u) and dS(u) share one buffer in alternation: P(u) is
written while S(u+1) is computed and read by dV(u), dS(u) while dP(u+1) is, and read by dK(u).  The
exp2 of a unit has the time of dV and dP before P is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers.protocol import WorkTile
from ...backward.common import Step, heads_of_part
from ...backward.key_tiles import KeyTiles
from ...context import KernelParts
from ...limits import HEAD_DIM
from ...operands import SharedMemory
from ...plan.edges import RingRecord, RingState
from ...problem_class import GradientClass, ProblemClass
from ...ranges import traced
from ...rows.sequences import Sequence, columns_of
from ..instructions import (
    Mma,
    MmaShape,
    fence_after_thread_sync,
    fence_before_thread_sync,
    k_major_operand,
    mn_major_operand,
)
from ..pair_kernel import await_buffer
from ..pair_plan import BLOCK_KV, BLOCK_Q, TILE_Q
from ..tmem import multiply, multiply_rows, tmem_load
from .common import (
    FRAGMENT,
    BlackwellBackward,
    RowMask,
    RowsOfStep,
    score_gradients,
    store_row,
    warpgroup,
    zeros,
)
from .common import BlackwellBackwardContext as Context
from .config import DkdvPlan, GradientConfig

UNIT_Q = TILE_Q  # queries of a unit, as many as a tile of the forward has; a tile here is of keys
CTA_KEYS = BLOCK_KV // 2  # keys of a CTA
THREAD_QUERIES = UNIT_Q // 4  # queries of a unit that one thread works on


@dataclass(kw_only=True)
class DkdvLoadRings(RingRecord):
    k: RingState
    v: RingState
    ring: RingState
    lse: RingState
    delta: RingState


@dataclass(kw_only=True)
class DkdvMmaRings(RingRecord):
    """Buffers that the MMA warp uses next: of K, V, Q and dO, S, dP, P or dS, dV with dK."""

    k: RingState
    v: RingState
    ring: RingState
    s: RingState
    dp: RingState
    weights: RingState
    sums: RingState


@dataclass(frozen=True)
class DkdvTiles(KeyTiles):
    plan: DkdvPlan
    problem_class: ProblemClass


class DkdvKernel(BlackwellBackward):
    """The dK/dV kernel for one configuration; arguments of a call: `BackwardEntry.__call__`. A
    tile's head counts parts of KV heads: KV head * head_parts + part."""

    tiles: DkdvTiles
    load_rings, mma_rings = DkdvLoadRings, DkdvMmaRings
    mma_waits = {
        "k": "k_loaded",
        "v": "v_loaded",
        "ring": "ring_loaded",
        "s": "s_free",
        "dp": "dp_free",
        "weights": "weights_done",
        "sums": "sums_free",
    }
    mma_ends = "s", "dp", "sums"
    kept, passing = ("k", "v"), "ring"
    rows_of = "k"
    boxes = {
        "q": (0, BLOCK_Q, HEAD_DIM // 2),
        "k": (1, CTA_KEYS, HEAD_DIM),
        "v": (2, CTA_KEYS, HEAD_DIM),
        "dout": (3, BLOCK_Q, HEAD_DIM // 2),
    }

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = DkdvTiles(self.plan, self.problem_class)
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        keys, weights = k_major_operand(CTA_KEYS), k_major_operand(CTA_KEYS, UNIT_Q)
        queries, columns = k_major_operand(BLOCK_Q, HEAD_DIM // 2), mn_major_operand(BLOCK_Q)
        s = MmaShape(BLOCK_KV, UNIT_Q, is_bf16, negate_a=negate)
        dp = MmaShape(BLOCK_KV, UNIT_Q, is_bf16)
        sum_of_keys = MmaShape(BLOCK_KV, HEAD_DIM, is_bf16, b_mn_major=True)
        # Each by halves of what is reduced over, as Q and dO come.
        self.mma_s = [Mma(s, keys.part(half, 2), queries) for half in range(2)]
        self.mma_dp = [Mma(dp, keys.part(half, 2), queries) for half in range(2)]
        self.mma_sum = [Mma(sum_of_keys, weights.part(half, 2), columns) for half in range(2)]

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        stats = cute.make_layout(UNIT_Q)
        return {
            "k": memory.operand("k", CTA_KEYS, HEAD_DIM, 1),
            "v": memory.operand("v", CTA_KEYS, HEAD_DIM, 1),
            "weights": memory.operand("weights", CTA_KEYS, UNIT_Q, 1),
            "ring": memory.operand("ring", BLOCK_Q, HEAD_DIM // 2, self.plan.ring_stages),
            "lse": cute.make_tensor(memory.region("lse", Float32, 128), stats),
            "delta": cute.make_tensor(memory.region("delta", Float32, 128), stats),
        }

    # ------------------------------------------------------------ load

    def first_step(self, context: Context, work: WorkTile) -> Step:
        return self.tiles.first_position(context, work)

    def load_kept(
        self, context: Context, work: WorkTile, name: str, rings: DkdvLoadRings
    ) -> DkdvLoadRings:
        """Load this CTA's 64 keys of K or V, for the whole tile."""
        row = work.block * BLOCK_KV + context.cta_rank * CTA_KEYS
        head = work.head // context.scalars.head_parts
        place = context.sequences.key(work.batch), row, 0, head
        self.load_box(context, name, place, (name, rings[name]))
        return rings

    @staticmethod
    def _queries(context: Context, work: WorkTile, unit: Step) -> RowsOfStep:
        return RowsOfStep(context.sequences.query(work.batch), unit.index * UNIT_Q, unit.head)

    def load_s(
        self, context: Context, work: WorkTile, step: Step, rings: DkdvLoadRings
    ) -> DkdvLoadRings:
        """Load LSE of a unit, then this CTA's 128 rows of Q: B of S."""
        self._load_row_stats(context, "lse", work, step, rings.lse)
        self.load_rows(context, "q", self._queries(context, work, step), rings.ring)
        return rings

    def load_dp(
        self, context: Context, work: WorkTile, step: Step, rings: DkdvLoadRings
    ) -> DkdvLoadRings:
        """Load delta of a unit, then this CTA's 128 rows of dO: B of dP."""
        self._load_row_stats(context, "delta", work, step, rings.delta)
        self.load_rows(context, "dout", self._queries(context, work, step), rings.ring)
        return rings

    def load_second_sum(
        self, context: Context, work: WorkTile, step: Step, rings: DkdvLoadRings
    ) -> DkdvLoadRings:
        """Load this CTA's half of the columns of Q: B of dK."""
        self.load_columns(context, "q", self._queries(context, work, step), rings.ring)
        return rings

    def load_sum(
        self, context: Context, work: WorkTile, step: Step, rings: DkdvLoadRings
    ) -> DkdvLoadRings:
        """Load this CTA's half of the columns of dO: B of dV."""
        self.load_columns(context, "dout", self._queries(context, work, step), rings.ring)
        return rings

    @traced("load")
    def _load_row_stats(
        self, context: Context, name: str, work: WorkTile, unit: Step, ring: RingState
    ) -> None:
        barrier, _ = await_buffer(context, name, ring)
        self.tiles.load_stats(context, name, (work, unit), (barrier, context.smem[name]))
        ring.advance()

    # ------------------------------------------------------------ mma

    @traced("dV")
    @cute.jit
    def issue_sum(self, context: Context, number: Int32, is_last: bool, rings: DkdvMmaRings):
        """dV += P^T dO of a unit.  number: of the unit, from 1 on; the first one waits until dK and
        dV of the tile before are in registers, and overwrites dV."""
        is_first, adds = number == 1, number > 1
        if is_first:
            context.barriers["sums_free"].wait(rings.sums)
            rings.sums.advance()
        return self._add_weighted(context, "dv", adds, rings)

    @traced("dK")
    def issue_second_sum(
        self, context: Context, number: Int32, is_last: bool, rings: DkdvMmaRings
    ) -> DkdvMmaRings:
        """dK += dS^T Q of a unit.  number: of the unit, from 1 on; the first one overwrites dK."""
        rings = self._add_weighted(context, "dk", number > 1, rings)
        if is_last:
            context.barriers["sums_done"].commit(rings.sums)
        return rings

    def _add_weighted(
        self, context: Context, name: str, adds: Boolean, rings: DkdvMmaRings
    ) -> DkdvMmaRings:
        barriers, result = context.barriers, (name, rings.sums)
        barriers["weights_done"].wait(rings.weights)
        operands = "weights", "ring"
        self.issue_from_ring(context, self.mma_sum, operands, result, rings.ring, adds)
        barriers["weights_free"].commit(rings.weights)
        rings.weights.advance()
        return rings

    # ------------------------------------------------------------ gradient

    @cute.jit
    def gradient(self, context: Context):
        """S^T -> P and dP^T -> dS for this CTA's 64 keys: a key and 64 queries per thread."""
        names = ["s_done", "dp_done", "lse_loaded", "delta_loaded", "weights_free", "sums_done"]
        states = RingRecord.waiting(self.edges, *names)
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        p_slopes = cute.make_rmem_tensor(THREAD_QUERIES, Float32)
        # P, then dS, in 16 bits, two in a register.
        p, ds = (cute.make_rmem_tensor(THREAD_QUERIES // 2, Float32) for _ in range(2))
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                key = work.block * BLOCK_KV + context.cta_rank * CTA_KEYS
                visibility = self.tiles.transposed(context, work)
                tile = (work.block * BLOCK_KV, BLOCK_KV)
                tiles = visibility.tile_range(tile, (key, CTA_KEYS))
                row = key + self._thread_key()
                index, head = tiles.begin, heads_of_part(context, work.head)[0]
                query = index * UNIT_Q + self._first_query()
                mask = RowMask(Boolean(True), visibility, row, query)
                states = self._probabilities(context, p_slopes, p, mask, states, work, head)
                for step in cutlass.range(num_steps, unroll=1):
                    states = self._publish_p(context, p, states)
                    states = self._score_gradients(context, p_slopes, ds, states)
                    if undrained.is_valid:
                        states = self._drain(context, undrained, states)
                        undrained = self.no_work()
                    if step + 1 < num_steps:
                        if cutlass.const_expr(self.functions.change.by_place):
                            head += Int32(index + 1 == tiles.end)
                        index = cutlass.select_(index + 1 == tiles.end, tiles.begin, index + 1)
                        is_masked = (index < tiles.unmasked_begin) | (index >= tiles.unmasked_end)
                        query = index * UNIT_Q + self._first_query()
                        states = self._probabilities(
                            context,
                            p_slopes,
                            p,
                            RowMask(is_masked, visibility, row, query),
                            states,
                            work,
                            head,
                        )
                    else:
                        # Known not to outlive the loop, they do not occupy registers in it.
                        p_slopes.fill(0.0)
                        p.fill(0.0)
                    states = self._publish_ds(context, ds, states)
                undrained = work
            else:
                self._store_zeros(context, work)
            work = scheduler.advance_to_next_work()
        if undrained.is_valid:
            states = self._drain(context, undrained, states)

    def _half(self) -> Int32:
        """Return which half of a result's columns this warp's lanes hold."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 // 2

    def _thread_key(self) -> Int32:
        return cute.arch.thread_idx()[0] % CTA_KEYS

    def _first_query(self) -> Int32:
        """The first of this thread's 64 queries, among the unit's 256."""
        return self._half() * BLOCK_Q + warpgroup() * THREAD_QUERIES

    def _thread_stats(self, context: Context, name: str, start: int) -> cute.Tensor:
        """-LSE or -delta of a fragment of this thread's queries, in registers."""
        values = cute.make_rmem_tensor(FRAGMENT, Float32)
        column = self._first_query() + start
        cute.autovec_copy(columns_of(context.smem[name], column, FRAGMENT), values)
        return values

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: Context,
        p_slopes: cute.Tensor,
        p: cute.Tensor,
        mask: RowMask,
        states: RingRecord,
        work: WorkTile,
        head: Int32,
    ):
        """P of one unit.  p_slopes: P times the slope of its score in float32.  p: P in 16 bits.
        head: of the queries."""
        barriers = context.barriers
        states = self.take_scores(context, p_slopes, tmem_load, states)
        barriers["lse_loaded"].wait(states["lse_loaded"])
        places = self.functions.score_places(
            context, work, lambda i: (head, mask.column + i, mask.row)
        )
        slopes = self.change_and_mask(context, p_slopes, places, mask)
        rounded = cute.recast_tensor(p, self.dtype)
        for start in cutlass.range_constexpr(0, THREAD_QUERIES, FRAGMENT):
            part = columns_of(p_slopes, start, FRAGMENT)
            negative_lse = self._thread_stats(context, "lse", start)
            self.exponentiate(context, part, negative_lse, start, THREAD_QUERIES)
            columns_of(rounded, start, FRAGMENT).store(part.load().to(self.dtype))
        barriers["lse_free"].arrive(states["lse_loaded"])
        states.advance("lse_loaded")
        if cutlass.const_expr(slopes is not None):
            multiply_rows(p_slopes, slopes)
        return states

    @traced("dS")
    @cute.jit
    def _score_gradients(
        self, context: Context, p_slopes: cute.Tensor, ds: cute.Tensor, states: RingRecord
    ):
        barriers = context.barriers
        barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        barriers["delta_loaded"].wait(states["delta_loaded"])
        address = self.warp_columns(context, "dp", THREAD_QUERIES)
        rounded = cute.recast_tensor(ds, self.dtype)
        for start in cutlass.range_constexpr(0, THREAD_QUERIES, FRAGMENT):
            dp = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, dp)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == THREAD_QUERIES):
                fence_before_thread_sync()
                barriers["dp_free"].arrive(states["dp_done"], is_converged=True)
            delta = self._thread_stats(context, "delta", start)
            score_gradients(dp, columns_of(p_slopes, start, FRAGMENT), delta)
            columns_of(rounded, start, FRAGMENT).store(dp.load().to(self.dtype))
        barriers["delta_free"].arrive(states["delta_loaded"])
        states.advance("dp_done")
        states.advance("delta_loaded")
        return states

    @traced("write P")
    @cute.jit
    def _publish_p(self, context: Context, p: cute.Tensor, states: RingRecord):
        return self._publish(context, p, states)

    @traced("write dS")
    @cute.jit
    def _publish_ds(self, context: Context, ds: cute.Tensor, states: RingRecord):
        return self._publish(context, ds, states)

    @cute.jit
    def _publish(self, context: Context, values: cute.Tensor, states: RingRecord):
        """P or dS of this thread to shared memory, when what is there has been read."""
        context.barriers["weights_free"].wait(states["weights_free"])
        block = self._first_query() // THREAD_QUERIES
        weights = context.smem["weights"][None, None, 0]
        columns = cute.logical_divide(weights, (None, cute.make_layout(THREAD_QUERIES)))
        cute.autovec_copy(
            cute.recast_tensor(values, self.dtype), columns[self._thread_key(), (None, block)]
        )
        # The tensor core reads through the async proxy what was written here; the arrival fences.
        context.barriers["weights_done"].arrive(states["weights_free"])
        states.advance("weights_free")
        return states

    @traced("drain dK and dV")
    @cute.jit
    def _drain(self, context: Context, work: WorkTile, states: RingRecord):
        """Store dV (first warpgroup) and softmax_scale * dK (second) of a tile to global memory."""
        context.barriers["sums_done"].wait(states["sums_done"])
        fence_after_thread_sync()
        sequence = context.sequences.key(work.batch)
        row = work.block * BLOCK_KV + context.cta_rank * CTA_KEYS + self._thread_key()
        is_dk = warpgroup() == 1
        factor = cutlass.select_(is_dk, context.scalars.softmax_scale, Float32(1.0))
        # Columns of one region for each warpgroup: those of dK lie behind those of dV.
        address = self.warp_columns(context, "dv", self.tmem_plan["dv"].columns)
        columns = HEAD_DIM // 2
        for start in cutlass.range_constexpr(0, columns, FRAGMENT):
            values = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, values)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == columns):
                fence_before_thread_sync()
                context.barriers["sums_free"].arrive(states["sums_done"], is_converged=True)
            multiply(values, factor)
            if row < sequence.length:
                self._store(context, values, sequence, row, work.head, start)
        states.advance("sums_done")
        return states

    @cute.jit
    def _store(
        self,
        context: Context,
        values: cute.Tensor,
        sequence: Sequence,
        row: Int32,
        head: Int32,
        start: int | Int32,
    ):
        """One fragment of dV or dK, by warpgroup."""
        column = self._half() * (HEAD_DIM // 2) + start
        for which in cutlass.range_constexpr(2):
            # The results are (dk, dv); the first warpgroup has dV.
            if warpgroup() == 1 - which:
                result = context.tensors.results[which]
                destination = result[sequence.offset + row, None, head, sequence.batch]
                store_row(values, columns_of(destination, column, FRAGMENT))

    @cute.jit
    def _store_zeros(self, context: Context, work: WorkTile):
        """Store dK = dV = 0 for the keys of a tile that no query sees."""
        row = work.block * BLOCK_KV + context.cta_rank * CTA_KEYS + self._thread_key()
        sequence = context.sequences.key(work.batch)
        if row < sequence.length:
            for start in cutlass.range(0, HEAD_DIM // 2, FRAGMENT, unroll=1):
                self._store(context, zeros(FRAGMENT), sequence, row, work.head, start)
