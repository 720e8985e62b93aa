"""The dQ kernel where dS is stored: dQ = softmax_scale dS K, a plain product by CTA pairs.

One tile is 256 query rows of one head; one step takes 128 keys.  The dK/dV kernel has stored dS^T,
(keys, queries): each CTA loads 128 keys x its own 128 queries as A, and 128 keys x half of the
columns as B.  Only what some row of the tile sees is read; the rest of dS was never written.

Timeline of one CTA (the MMA warp is the leader's); 0' is the next tile's first step::

    load      dS(0) K(0) dS(1) K(1) ..   | dS(0') K(0') ..
    mma       dQ(0) dQ(1) ..             | dQ(0') ..
    gradient                             | dQ -> global

Accumulators alternate between tiles, so a tile's dQ leaves while the next one is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from fa4_hd256.kernels.blackwell.instructions import MmaShape
from fa4_hd256.kernels.blackwell.operands import mn_major_operand
from fa4_hd256.kernels.blackwell.pair_plan import BLOCK_KV, BLOCK_Q, CTAS, TILE_Q
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.sequences import Sequence

from .common import DS
from .dq import DqKernel

__all__ = ["DqProductKernel"]


class DqProductKernel(DqKernel):
    """The product for one configuration; arguments of a call: `BackwardKernel.__call__`.

    Tiles, their steps and how dQ leaves are the dQ kernel's.
    """

    boxes = {
        "ds": (DS, BLOCK_KV, BLOCK_Q),
        "k": (1, BLOCK_KV, HEAD_DIM // 2),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape = MmaShape(TILE_Q, HEAD_DIM, self.is_bf16, a_mn_major=True, b_mn_major=True)
        self.shapes = {"dQ": shape}
        self.layouts = dict.fromkeys(("dS", "K"), mn_major_operand(BLOCK_KV))

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        return {
            "ds": memory.operand("ds", BLOCK_KV, BLOCK_Q, self.plan.stages),
            "k": memory.operand("k", BLOCK_KV, HEAD_DIM // 2, self.plan.stages),
        }

    def places(self, context: Any, content: str, work: Any, kv_tile: Int32) -> tuple:
        """See `tma_tile`: this CTA's 128 queries of dS, its half of the columns of K."""
        return (self._places(context, content.split(), work, kv_tile),)

    @staticmethod
    def _places(context: Any, contents: list[str], work: Any, kv_tile: Int32) -> Iterator:
        """Of dS and K, in the order of the copies; worked out when the buffer is free."""
        row, rank = kv_tile * BLOCK_KV, context.cta_rank
        keys = context.sequences.key(work.batch)
        # Every sequence has a plane of dS to itself, from its first key and query on.  What TMA
        # finds beyond its last key is 0, as in K: what the dK/dV kernel has there is no number.
        plane = Sequence(Int32(0), keys.length, work.batch)
        for copied in contents:
            if copied == "dS":
                yield plane, row, work.block * CTAS + rank, work.head
            else:
                yield keys, row, rank, work.head // context.heads_per_kv

    @cute.jit
    def gradient(self, context: Any):
        """dQ of every tile to global memory."""
        states = self.edges.waiter_states("dq_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                states = self.drain(context, work, states)
            else:
                self.store_zeros(context, work)
            work = scheduler.advance_to_next_work()
