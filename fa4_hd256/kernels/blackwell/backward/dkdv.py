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
    gradient  P(0)> dS(0) P(1) dS(0)>  ..  | P(last)> dS(last)  P(0') dS(last)> P(0')> dS(0'),
                                           | dK, dV -> global

where > is the write to shared memory.  P(u) and dS(u) share one buffer in alternation: P(u) is
written while S(u+1) is computed and read by dV(u), dS(u) while dP(u+1) is, and read by dK(u).  The
exp2 of a unit has the time of dV and dP before P is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers import WorkTile
from ...backward.common import Step, heads_of_part
from ...backward.key_tiles import KeyTiles
from ...limits import HEAD_DIM
from ...mask.masking import Visibility
from ...operands import LoadTarget
from ...ranges import traced
from ...rows.sequences import Sequence
from ...rows.views import columns_of
from ..instructions import (
    MmaShape,
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..operands import (
    k_major_operand,
    mn_major_operand,
)
from ..pair_plan import BLOCK_KV, BLOCK_Q, TILE_Q
from ..tmem import multiply, tmem_load
from .common import FRAGMENT, BlackwellBackward, multiply_by, score_gradients, store_row, zeros
from .context import BlackwellBackwardContext

__all__ = ["DkdvKernel"]

UNIT_Q = TILE_Q
OWN_KEYS = BLOCK_KV // 2  # keys of a CTA
OWN_QUERIES = UNIT_Q // 4  # queries of a unit that one thread works on


class DkdvKernel(KeyTiles, BlackwellBackward):
    """The dK/dV kernel for one configuration; arguments of a call: `BlackwellBackward.__call__`.

    A tile's head counts parts of KV heads: KV head * head_parts + part.
    """

    boxes = {
        "q": (0, BLOCK_Q, HEAD_DIM // 2),
        "k": (1, OWN_KEYS, HEAD_DIM),
        "v": (2, OWN_KEYS, HEAD_DIM),
        "dout": (3, BLOCK_Q, HEAD_DIM // 2),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        self.shapes = {
            "S": MmaShape(BLOCK_KV, UNIT_Q, is_bf16, negate_a=negate),
            "dP": MmaShape(BLOCK_KV, UNIT_Q, is_bf16),
            **dict.fromkeys(("dV", "dK"), MmaShape(BLOCK_KV, HEAD_DIM, is_bf16, b_mn_major=True)),
        }
        self.layouts = {
            **dict.fromkeys(("K", "V"), k_major_operand(OWN_KEYS)),
            **dict.fromkeys(("P", "dS"), k_major_operand(OWN_KEYS, UNIT_Q)),
            **dict.fromkeys(("Q", "dO"), k_major_operand(BLOCK_Q, HEAD_DIM // 2)),
            **dict.fromkeys(("Qc", "dOc"), mn_major_operand(BLOCK_Q)),
        }

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        stats = cute.make_layout(UNIT_Q)
        return {
            "k": memory.operand("k", OWN_KEYS, HEAD_DIM, 1),
            "v": memory.operand("v", OWN_KEYS, HEAD_DIM, 1),
            "weights": memory.operand("weights", OWN_KEYS, UNIT_Q, 1),
            "ring": memory.operand("ring", BLOCK_Q, HEAD_DIM // 2, self.plan.ring_stages),
            "lse": cute.make_tensor(memory.region("lse", Float32, 128), stats),
            "delta": cute.make_tensor(memory.region("delta", Float32, 128), stats),
        }

    def places(
        self, context: BlackwellBackwardContext, content: str, work: Any, unit: Step
    ) -> Iterable:
        """See `tma_tile`: this CTA's 64 keys of K and V; its 128 rows of Q and dO, in two halves of
        the columns; its 128 columns, in two halves of the rows.  (tile, unit) for LSE and delta."""
        rank = context.cta_rank
        if content in ("LSE", "delta"):
            return (((work, unit),),)
        if content in ("K", "V"):
            row = work.block * BLOCK_KV + rank * OWN_KEYS
            head = work.head // context.scalars.head_parts
            return (((context.sequences.key(work.batch), row, 0, head),),)
        sequence, row = context.sequences.query(work.batch), unit.index * UNIT_Q
        if content in ("Q", "dO"):
            row += rank * BLOCK_Q
            return (((sequence, row, half, unit.head),) for half in range(2))
        return (((sequence, row + half * BLOCK_Q, rank, unit.head),) for half in range(2))

    def copy(
        self,
        context: BlackwellBackwardContext,
        copy: Any,
        place: tuple[Any, ...],
        target: LoadTarget,
    ) -> None:
        if copy.content in ("LSE", "delta"):
            destination = context.smem[copy.memory]
            self.load_stats(context, copy.memory, place, (target[0], destination))
        else:
            super().copy(context, copy, place, target)

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: BlackwellBackwardContext):
        """S^T -> P and dP^T -> dS for this CTA's 64 keys: a key and 64 queries per thread."""
        names = ["s_done", "dp_done", "lse_loaded", "delta_loaded", "weights_free", "sums_done"]
        states = self.edges.waiter_states(*names)
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        factors = cute.make_rmem_tensor(OWN_QUERIES, Float32)
        # P, then dS, in 16 bits, two in a register.
        p, ds = (cute.make_rmem_tensor(OWN_QUERIES // 2, Float32) for _ in range(2))
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                key = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS
                visibility = self.transposed(context, work)
                tile = (work.block * BLOCK_KV, BLOCK_KV)
                tiles = visibility.tile_range(tile, (key, OWN_KEYS))
                row = key + self._own_key()
                index, head = tiles.begin, heads_of_part(context, work.head)[0]
                mask = (Boolean(True), visibility, row, index * UNIT_Q + self._first_query())
                where = work, head
                states = self._probabilities(context, (factors, p), mask, states, where)
                for step in cutlass.range(num_steps, unroll=1):
                    states = self._publish_p(context, p, states)
                    states = self._score_gradients(context, factors, ds, states)
                    if undrained.is_valid:
                        states = self._drain(context, undrained, states)
                        undrained = self.no_work()
                    if step + 1 < num_steps:
                        if cutlass.const_expr(self.change.by_place):
                            head += Int32(index + 1 == tiles.end)
                        index = cutlass.select_(index + 1 == tiles.end, tiles.begin, index + 1)
                        is_masked = (index < tiles.unmasked_begin) | (index >= tiles.unmasked_end)
                        query = index * UNIT_Q + self._first_query()
                        states = self._probabilities(
                            context,
                            (factors, p),
                            (is_masked, visibility, row, query),
                            states,
                            (work, head),
                        )
                    else:
                        # Known not to outlive the loop, they do not occupy registers in it.
                        factors.fill(0.0)
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

    def _own_key(self) -> Int32:
        """The key of this thread, among the CTA's 64."""
        return cute.arch.thread_idx()[0] % OWN_KEYS

    def _first_query(self) -> Int32:
        """The first of this thread's 64 queries, among the unit's 256."""
        return self._half() * BLOCK_Q + self.warpgroup() * OWN_QUERIES

    def _own_stats(self, context: BlackwellBackwardContext, name: str, start: int) -> cute.Tensor:
        """-LSE or -delta of a fragment of this thread's queries, in registers."""
        values = cute.make_rmem_tensor(FRAGMENT, Float32)
        column = self._first_query() + start
        cute.autovec_copy(columns_of(context.smem[name], column, FRAGMENT), values)
        return values

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: BlackwellBackwardContext,
        results: tuple[cute.Tensor, cute.Tensor],
        mask: tuple[Boolean, Visibility, Int32, Int32],
        states: Any,
        where: tuple[WorkTile, Int32],
    ):
        """P of one unit.  results: (P times the slope of its score in float32, P in 16 bits).
        where: (tile, query head)."""
        factors, p = results
        barriers = context.barriers
        states = self.take_scores(context, factors, tmem_load, states)
        barriers["lse_loaded"].wait(states["lse_loaded"])
        (work, head), (row, query) = where, mask[2:]
        places = self.score_places(context, work, lambda i: (head, query + i, row))
        slopes = self.change_and_mask(context, factors, places, mask)
        rounded = cute.recast_tensor(p, self.dtype)
        for start in cutlass.range_constexpr(0, OWN_QUERIES, FRAGMENT):
            part = columns_of(factors, start, FRAGMENT)
            negative_lse = self._own_stats(context, "lse", start)
            self.exponentiate(context, part, negative_lse, (start, OWN_QUERIES))
            columns_of(rounded, start, FRAGMENT).store(part.load().to(self.dtype))
        barriers["lse_free"].arrive(states["lse_loaded"])
        states.advance("lse_loaded")
        if cutlass.const_expr(slopes is not None):
            multiply_by(factors, slopes)
        return states

    @traced("dS")
    @cute.jit
    def _score_gradients(
        self, context: BlackwellBackwardContext, factors: cute.Tensor, ds: cute.Tensor, states: Any
    ):
        """Compute dS = factors (dP - delta) of one unit, in 16 bits."""
        barriers = context.barriers
        barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        barriers["delta_loaded"].wait(states["delta_loaded"])
        address = self.own_columns(context, "dp", OWN_QUERIES)
        rounded = cute.recast_tensor(ds, self.dtype)
        for start in cutlass.range_constexpr(0, OWN_QUERIES, FRAGMENT):
            dp = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, dp)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == OWN_QUERIES):
                fence_before_thread_sync()
                barriers["dp_free"].arrive(states["dp_done"], is_converged=True)
            delta = self._own_stats(context, "delta", start)
            score_gradients(dp, columns_of(factors, start, FRAGMENT), delta)
            columns_of(rounded, start, FRAGMENT).store(dp.load().to(self.dtype))
        barriers["delta_free"].arrive(states["delta_loaded"])
        states.advance("dp_done")
        states.advance("delta_loaded")
        return states

    @traced("write P")
    @cute.jit
    def _publish_p(self, context: BlackwellBackwardContext, p: cute.Tensor, states: Any):
        """P to shared memory."""
        return self._publish(context, p, states)

    @traced("write dS")
    @cute.jit
    def _publish_ds(self, context: BlackwellBackwardContext, ds: cute.Tensor, states: Any):
        """Store dS to shared memory."""
        return self._publish(context, ds, states)

    @cute.jit
    def _publish(self, context: BlackwellBackwardContext, values: cute.Tensor, states: Any):
        """P or dS of this thread to shared memory, when what is there has been read."""
        context.barriers["weights_free"].wait(states["weights_free"])
        block = self._first_query() // OWN_QUERIES
        weights = context.smem["weights"][None, None, 0]
        columns = cute.logical_divide(weights, (None, cute.make_layout(OWN_QUERIES)))
        cute.autovec_copy(
            cute.recast_tensor(values, self.dtype), columns[self._own_key(), (None, block)]
        )
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()
        context.barriers["weights_done"].arrive(states["weights_free"])
        states.advance("weights_free")
        return states

    @traced("drain dK and dV")
    @cute.jit
    def _drain(self, context: BlackwellBackwardContext, work: Any, states: Any):
        """Store dV (first warpgroup) and softmax_scale * dK (second) of a tile to global memory."""
        context.barriers["sums_done"].wait(states["sums_done"])
        fence_after_thread_sync()
        sequence = context.sequences.key(work.batch)
        row = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS + self._own_key()
        is_dk = self.warpgroup() == 1
        factor = cutlass.select_(is_dk, context.scalars.softmax_scale, Float32(1.0))
        address = self.own_columns(context, "dv", self.tmem_plan["dv"].columns)
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
                self._store(context, values, (sequence, row, work.head), start)
        states.advance("sums_done")
        return states

    @cute.jit
    def _store(
        self,
        context: BlackwellBackwardContext,
        values: cute.Tensor,
        place: tuple[Sequence, Int32, Int32],
        start: Any,
    ):
        """One fragment of dV or dK, by warpgroup.  place: (sequence, row, head)."""
        sequence, row, head = place
        column = self._half() * (HEAD_DIM // 2) + start
        for which in cutlass.range_constexpr(2):
            # The results are (dk, dv); the first warpgroup has dV.
            if self.warpgroup() == 1 - which:
                result = context.tensors.results[which]
                destination = result[sequence.offset + row, None, head, sequence.batch]
                store_row(values, columns_of(destination, column, FRAGMENT))

    @cute.jit
    def _store_zeros(self, context: BlackwellBackwardContext, work: Any):
        """Store dK = dV = 0 for the keys of a tile that no query sees."""
        row = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS + self._own_key()
        sequence = context.sequences.key(work.batch)
        if row < sequence.length:
            for start in cutlass.range(0, HEAD_DIM // 2, FRAGMENT, unroll=1):
                self._store(context, zeros(FRAGMENT), (sequence, row, work.head), start)
