"""The dQ kernel: dQ = softmax_scale dS K at head_dim 256, by CTA pairs.

One tile is 256 query rows of one head; one step multiplies it with 128 keys.  Each CTA owns 128
rows, with their Q, dO, S, dP and dQ.  K is needed in two halves that a pair cannot share: as B of
S = Q K^T a CTA holds 64 keys x 256, as B of dQ = dS K it holds 128 keys x 128 columns
(NOTE [two halves of K]).

Timeline of one CTA (the MMA warp is the leader's); last is the tile's last step, 0' the next
tile's first::

    load      K(1) Kc(0) V(1)  ..  | Q' K(0') Kc(last) dO' V(0') ...
    mma       S(1) dQ(0) dP(1) ..  | S(0')    dQ(last) dP(0') ...
    gradient  P(1) dS(1)       ..  | P(0')    dQ -> global, dS(0') ...

S(i+1) is issued as soon as S(i) is in registers, so the exp2 of a step has the time of two MMAs,
and the arithmetic of dS that of one.  dQ leaves straight from registers while dP(0') is computed.

NOTE [two halves of K].  The tensor core of a pair takes the same descriptor offsets in both CTAs,
half of B's N from each.  For S, N are the keys and the reduction runs over the columns: at one
offset the CTAs hold different keys and the same columns.  For dQ, N are the columns: the same keys
and different columns.  No byte of K can serve both, so each CTA loads 64 KiB of K a step.

NOTE [dS over dP].  dS(i) lies over dP(i); dP(i+1), which writes the same columns, is issued after
dQ(i), which reads them, by the same thread, and the MMAs of a pair execute in issue order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers.protocol import WorkTile
from ...backward.query_tiles import QueryTiles
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
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
    k_major_operand,
    mn_major_operand,
)
from ..pair_plan import BLOCK_KV, BLOCK_Q, TILE_Q
from ..tmem import multiply_rows, tmem_buffer, tmem_load, tmem_store
from .common import FRAGMENT, BlackwellBackward, RowMask, score_gradients, warpgroup
from .common import BlackwellBackwardContext as Context
from .config import DqPlan, GradientConfig
from .row_result import ResultPlace, RowResult, first_row, lane

#: Keys of a step that one warpgroup works on, and that a CTA loads for S.
WARPGROUP_KEYS = BLOCK_KV // 2


@dataclass(kw_only=True)
class DqLoadRings(RingRecord):
    q: RingState
    dout: RingState
    ring: RingState


@dataclass(kw_only=True)
class DqMmaRings(RingRecord):
    """Buffers that the MMA warp uses next: those of the load warp, S, dP with dS over it, dQ."""

    q: RingState
    dout: RingState
    ring: RingState
    s: RingState
    dp: RingState
    ds: RingState
    dq: RingState


@dataclass(frozen=True)
class DqTiles(QueryTiles):
    plan: DqPlan
    problem_class: ProblemClass


class DqKernel(BlackwellBackward):
    """The dQ kernel for one configuration; arguments of a call: `BackwardEntry.__call__`."""

    tiles: DqTiles
    load_rings, mma_rings = DqLoadRings, DqMmaRings
    mma_waits = {
        "q": "q_loaded",
        "dout": "dout_loaded",
        "ring": "ring_loaded",
        "s": "s_free",
        "dp": "dp_done",
        "ds": "ds_done",
        "dq": "dq_free",
    }
    mma_ends = "s", "dq"
    rows_of = "q"
    kept, passing = ("q", "dout"), "keys"
    boxes = {
        "q": (0, BLOCK_Q, HEAD_DIM),
        "k": (1, WARPGROUP_KEYS, HEAD_DIM),
        "k_columns": (1, BLOCK_KV, HEAD_DIM // 2),
        "v": (2, WARPGROUP_KEYS, HEAD_DIM),
        "dout": (3, BLOCK_Q, HEAD_DIM),
    }

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = DqTiles(self.plan, self.problem_class)
        self.result = RowResult("dQ", self.tmem_plan, is_scaled=True)
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        rows, keys = k_major_operand(BLOCK_Q), k_major_operand(WARPGROUP_KEYS)
        # dS of a warpgroup lies over the half of dP that it alone reads.
        half = TmemOperand.contiguous(WARPGROUP_KEYS).step_columns
        ds = TmemOperand((*half, *(WARPGROUP_KEYS + column for column in half)))
        s = MmaShape(TILE_Q, BLOCK_KV, is_bf16, negate_a=negate)
        self.mma_s = [Mma(s, rows, keys)]
        self.mma_dp = [Mma(MmaShape(TILE_Q, BLOCK_KV, is_bf16), rows, keys)]
        dq = MmaShape(TILE_Q, HEAD_DIM, is_bf16, b_mn_major=True)
        self.mma_dq = Mma(dq, ds, mn_major_operand(BLOCK_KV))

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        stages = self.plan.ring_stages
        return {
            "q": memory.operand("q", BLOCK_Q, HEAD_DIM, 1),
            "dout": memory.operand("dout", BLOCK_Q, HEAD_DIM, 1),
            "keys": memory.operand("ring", WARPGROUP_KEYS, HEAD_DIM, stages),
            "columns": memory.operand("ring", BLOCK_KV, HEAD_DIM // 2, stages),
        }

    def _result(self, context: Context, work: WorkTile) -> ResultPlace:
        result, queries = context.tensors.results[0], context.sequences.query(work.batch)
        return ResultPlace(result, queries, first_row(context, work), work.head)

    # ------------------------------------------------------------ load

    def first_step(self, context: Context, work: WorkTile) -> Int32:
        return self.tiles.first_position(context, work)

    def next_step(self, step: Int32) -> Int32:
        return self.tiles.next_position(step)

    def load_kept(
        self, context: Context, work: WorkTile, name: str, rings: DqLoadRings
    ) -> DqLoadRings:
        """Load this CTA's 128 rows of Q or dO, for the whole tile."""
        place = context.sequences.query(work.batch), first_row(context, work), 0, work.head
        self.load_box(context, name, place, (name, rings[name]))
        return rings

    def load_s(
        self, context: Context, work: WorkTile, step: Int32, rings: DqLoadRings
    ) -> DqLoadRings:
        return self._load_keys(context, work, "k", step, rings)

    def load_dp(
        self, context: Context, work: WorkTile, step: Int32, rings: DqLoadRings
    ) -> DqLoadRings:
        return self._load_keys(context, work, "v", step, rings)

    def _load_keys(
        self, context: Context, work: WorkTile, box: str, kv_tile: Int32, rings: DqLoadRings
    ) -> DqLoadRings:
        """Load this CTA's 64 keys of K or V, all columns: B of S, or of dP."""
        rank, row = context.cta_rank, kv_tile * BLOCK_KV
        head, keys = self._keys(context, work)
        place = keys, row + rank * WARPGROUP_KEYS, 0, head
        self.load_box(context, box, place, ("ring", rings.ring), "keys")
        return rings

    def load_sum(
        self, context: Context, work: WorkTile, step: Int32, rings: DqLoadRings
    ) -> DqLoadRings:
        """Load this CTA's half of the columns of K, all keys: B of dQ."""
        rank, row = context.cta_rank, step * BLOCK_KV
        head, keys = self._keys(context, work)
        self.load_box(
            context, "k_columns", (keys, row, rank, head), ("ring", rings.ring), "columns"
        )
        return rings

    @staticmethod
    def _keys(context: Context, work: WorkTile) -> tuple[Int32, Sequence]:
        head = work.head // context.heads_per_kv
        return head, context.sequences.key(work.batch)

    # ------------------------------------------------------------ mma

    @traced("dQ")
    @cute.jit
    def issue_sum(self, context: Context, number: Int32, is_last: bool, rings: DqMmaRings):
        """dQ += dS K of a step.  number: of the step, from 1 on; the first one waits until dQ of
        the tile before is in registers, and overwrites it."""
        barriers = context.barriers
        is_first, adds = number == 1, number > 1
        if is_first:
            barriers["dq_free"].wait(rings.dq)
            rings.dq.advance()
        barriers["ring_loaded"].wait(rings.ring)
        barriers["ds_done"].wait(rings.ds)
        fence_after_thread_sync()
        ds = tmem_buffer(context.tmem, self.tmem_plan, "dp", rings.ds)
        k = context.smem["columns"][None, None, rings.ring.index].iterator
        dq = tmem_buffer(context.tmem, self.tmem_plan, "dq", rings.dq)
        self.mma_dq.issue(dq, ds, k, adds)
        barriers["ring_free"].commit(rings.ring)
        rings.ring.advance()
        rings.ds.advance()
        if cutlass.const_expr(is_last):
            barriers["dq_done"].commit(rings.dq)
        return rings

    # ------------------------------------------------------------ gradient

    @cute.jit
    def gradient(self, context: Context):
        """S -> P and dP -> dS for this CTA's 128 rows: one row per thread, half of the keys."""
        states = RingRecord.waiting(self.edges, "s_done", "dp_done", "dq_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        factors = cute.make_rmem_tensor(WARPGROUP_KEYS, Float32)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                cta_row = first_row(context, work)
                row = cta_row + lane()
                stats_row = context.sequences.padded_query_offset(work.batch) + row
                negative_lse = context.tensors.stats[0, work.head, stats_row]
                negative_delta = context.tensors.stats[1, work.head, stats_row]
                visibility = context.visibility(work, BLOCK_KV)
                tiles = visibility.tile_range((work.block * TILE_Q, TILE_Q), (cta_row, BLOCK_Q))
                key = (tiles.end - 1) * BLOCK_KV + warpgroup() * WARPGROUP_KEYS
                mask = RowMask(Boolean(True), visibility, row, key)
                states = self._probabilities(context, factors, negative_lse, mask, states, work)
                if undrained.is_valid:
                    states = self.result.drain(context, self._result(context, undrained), states)
                masked_again = tiles.num_masked_first + tiles.num_unmasked
                for step in cutlass.range(1, num_steps, unroll=1):
                    states = self._score_gradients(context, factors, negative_delta, states)
                    key -= BLOCK_KV
                    is_masked = (step < tiles.num_masked_first) | (step >= masked_again)
                    mask = RowMask(is_masked, visibility, row, key)
                    states = self._probabilities(context, factors, negative_lse, mask, states, work)
                states = self._score_gradients(context, factors, negative_delta, states)
                undrained = work
            else:
                self.result.store_zeros(self._result(context, work))
            work = scheduler.advance_to_next_work()
        if undrained.is_valid:
            states = self.result.drain(context, self._result(context, undrained), states)

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: Context,
        factors: cute.Tensor,
        negative_lse: Float32,
        mask: RowMask,
        states: RingRecord,
        work: WorkTile,
    ):
        states = self.take_scores(context, factors, tmem_load, states)
        places = self.functions.score_places(
            context, work, lambda i: (work.head, mask.row, mask.column + i)
        )
        slopes = self.change_and_mask(context, factors, places, mask)
        self.exponentiate(context, factors, negative_lse, 0, WARPGROUP_KEYS)
        if cutlass.const_expr(slopes is not None):
            multiply_rows(factors, slopes)
        return states

    @traced("dS")
    @cute.jit
    def _score_gradients(
        self, context: Context, factors: cute.Tensor, negative_delta: Float32, states: RingRecord
    ):
        context.barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        address = self.warp_columns(context, "dp", WARPGROUP_KEYS)
        for start in cutlass.range_constexpr(0, WARPGROUP_KEYS, FRAGMENT):
            dp = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, dp)
            cute.arch.fence_view_async_tmem_load()
            score_gradients(dp, columns_of(factors, start, FRAGMENT), negative_delta)
            # Two 16-bit values per column, over the dP of this fragment or of one before.
            packed = cute.make_rmem_tensor(FRAGMENT // 2, Float32)
            cute.recast_tensor(packed, self.dtype).store(dp.load().to(self.dtype))
            tmem_store(packed, address + start // 2)
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        context.barriers["ds_done"].arrive(states["dp_done"], is_converged=True)
        states.advance("dp_done")
        return states
