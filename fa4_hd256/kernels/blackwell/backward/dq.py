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

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...backward.query_tiles import QueryTiles
from ...limits import HEAD_DIM
from ...mask.masking import Visibility
from ...ranges import traced
from ...rows.views import columns_of
from ..instructions import (
    MmaShape,
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..operands import k_major_operand, mn_major_operand
from ..pair_plan import BLOCK_KV, BLOCK_Q, TILE_Q
from ..tmem import tmem_load, tmem_store
from .common import FRAGMENT, multiply_by, score_gradients
from .context import BlackwellBackwardContext
from .row_result import RowResult

__all__ = ["DqKernel"]

OWN_KEYS = BLOCK_KV // 2  # keys of a step that one warpgroup works on, and that a CTA loads for S


class DqKernel(QueryTiles, RowResult):
    """The dQ kernel for one configuration; arguments of a call: `BlackwellBackward.__call__`."""

    result = "dQ"
    is_scaled = True
    boxes = {
        "q": (0, BLOCK_Q, HEAD_DIM),
        "k": (1, OWN_KEYS, HEAD_DIM),
        "k_columns": (1, BLOCK_KV, HEAD_DIM // 2),
        "v": (2, OWN_KEYS, HEAD_DIM),
        "dout": (3, BLOCK_Q, HEAD_DIM),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        self.shapes = {
            "S": MmaShape(TILE_Q, BLOCK_KV, is_bf16, negate_a=negate),
            "dP": MmaShape(TILE_Q, BLOCK_KV, is_bf16),
            "dQ": MmaShape(TILE_Q, HEAD_DIM, is_bf16, b_mn_major=True),
        }
        rows, keys = k_major_operand(BLOCK_Q), k_major_operand(OWN_KEYS)
        # dS of the two warpgroups lies at either half of dP.
        half = TmemOperand.contiguous(OWN_KEYS).step_columns
        ds = TmemOperand((*half, *(OWN_KEYS + column for column in half)))
        columns = mn_major_operand(BLOCK_KV)
        self.layouts = {"Q": rows, "dO": rows, "K": keys, "V": keys, "Kc": columns, "dS": ds}

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        stages = self.plan.ring_stages
        return {
            "q": memory.operand("q", BLOCK_Q, HEAD_DIM, 1),
            "dout": memory.operand("dout", BLOCK_Q, HEAD_DIM, 1),
            "keys": memory.operand("ring", OWN_KEYS, HEAD_DIM, stages),
            "columns": memory.operand("ring", BLOCK_KV, HEAD_DIM // 2, stages),
        }

    def places(
        self, context: BlackwellBackwardContext, content: str, work: Any, kv_tile: Int32
    ) -> tuple[Any, ...]:
        """See `tma_tile`: this CTA's rows of Q and dO, its 64 keys of K and V, its half of the
        columns of K."""
        if content in ("Q", "dO"):
            sequence = context.sequences.query(work.batch)
            return (((sequence, self.first_row(context, work), 0, work.head),),)
        rank, row = context.cta_rank, kv_tile * BLOCK_KV
        head = work.head // context.heads_per_kv
        keys = context.sequences.key(work.batch)
        if content == "Kc":
            return (((keys, row, rank, head),),)
        return (((keys, row + rank * OWN_KEYS, 0, head),),)

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: BlackwellBackwardContext):
        """S -> P and dP -> dS for this CTA's 128 rows: one row per thread, half of the keys."""
        states = self.edges.waiter_states("s_done", "dp_done", "dq_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        factors = cute.make_rmem_tensor(OWN_KEYS, Float32)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                first_row = self.first_row(context, work)
                row = first_row + self.lane()
                stats_row = context.sequences.padded_query_offset(work.batch) + row
                negative_lse = context.tensors.stats[0, work.head, stats_row]
                negative_delta = context.tensors.stats[1, work.head, stats_row]
                visibility = context.visibility(work, BLOCK_KV)
                tiles = visibility.tile_range((work.block * TILE_Q, TILE_Q), (first_row, BLOCK_Q))
                key = (tiles.end - 1) * BLOCK_KV + self.warpgroup() * OWN_KEYS
                mask = (Boolean(True), visibility, row, key)
                states = self._probabilities(context, factors, negative_lse, mask, states, work)
                if undrained.is_valid:
                    states = self.drain(context, undrained, states)
                masked_again = tiles.num_masked_first + tiles.num_unmasked
                for step in cutlass.range(1, num_steps, unroll=1):
                    states = self._score_gradients(context, factors, negative_delta, states)
                    key -= BLOCK_KV
                    is_masked = (step < tiles.num_masked_first) | (step >= masked_again)
                    mask = (is_masked, visibility, row, key)
                    states = self._probabilities(context, factors, negative_lse, mask, states, work)
                states = self._score_gradients(context, factors, negative_delta, states)
                undrained = work
            else:
                self.store_zeros(context, work)
            work = scheduler.advance_to_next_work()
        if undrained.is_valid:
            states = self.drain(context, undrained, states)

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: BlackwellBackwardContext,
        factors: cute.Tensor,
        negative_lse: Float32,
        mask: tuple[Boolean, Visibility, Int32, Int32],
        states: Any,
        work: Any,
    ):
        """factors := P of one step, times the slope of each score."""
        states = self.take_scores(context, factors, tmem_load, states)
        row, key = mask[2:]
        places = self.score_places(context, work, lambda i: (work.head, row, key + i))
        slopes = self.change_and_mask(context, factors, places, mask)
        self.exponentiate(context, factors, negative_lse, (0, OWN_KEYS))
        if cutlass.const_expr(slopes is not None):
            multiply_by(factors, slopes)
        return states

    @traced("dS")
    @cute.jit
    def _score_gradients(
        self,
        context: BlackwellBackwardContext,
        factors: cute.Tensor,
        negative_delta: Float32,
        states: Any,
    ):
        """Compute dS = factors (dP - delta) of one step, to tensor memory over dP."""
        context.barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        address = self.own_columns(context, "dp", OWN_KEYS)
        for start in cutlass.range_constexpr(0, OWN_KEYS, FRAGMENT):
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
