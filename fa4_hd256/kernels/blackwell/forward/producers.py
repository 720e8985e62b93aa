"""Where the forward kernel's loads come from; the roles are those of `PairProducers`."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from fa4_hd256.kernels.blackwell.producers import PairProducers
from fa4_hd256.kernels.operands import load_tile

__all__ = ["ForwardProducers"]


class ForwardProducers(PairProducers):
    """Mixed into ForwardKernel; the shared state is its `Context`.

    The position of a step is its KV tile.
    """

    def first_position(self, context: Any, work: Any) -> Int32:
        """The KV tile that is worked on first, the last one of those that are seen."""
        visibility = context.visibility(work, self.config.block_kv)
        return visibility.last_tile(work.block * self.tile_queries, self.tile_queries)

    def next_position(self, kv_tile: Int32) -> Int32:
        return kv_tile - 1

    def places(self, context: Any, content: str, work: Any, kv_tile: Any) -> tuple:
        """See `tma_tile`: this CTA's rows of Q, its 64 keys of K, its half of V's columns."""
        if content == "Q":
            place = context.query(work), self.first_row(context, work), 0, work.head
            return ((place,),)
        rank, row = context.cta_rank, kv_tile * self.config.block_kv
        head = work.head // context.heads_per_kv
        if content == "K":
            place = context.key(work), row + rank * (self.config.block_kv // 2), 0, head
        else:
            place = context.key(work), row, rank, head
        return ((place,),)

    def copy(self, context: Any, copy: Any, place: tuple, target: tuple) -> None:
        """As the base; rows of packed heads in Q."""
        barrier, index = target
        packed = self.problem_class.packed_heads if copy.content == "Q" else 1
        source, smem = getattr(context.tensors, copy.box), context.smem[copy.memory]
        load_tile(source, smem, place, barrier, index, packed)
