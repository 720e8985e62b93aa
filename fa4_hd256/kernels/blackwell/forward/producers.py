"""Sources of the forward kernel's loads; the roles are those of `PairProducers`."""

from __future__ import annotations

from typing import Any

from ...operands import LoadTarget, load_tile
from ...rows.sequences import TilePlace
from ..producers import PairProducers
from .context import BlackwellForwardContext

__all__ = ["ForwardProducers"]


class ForwardProducers(PairProducers):
    """Mixed into ForwardKernel; the shared state is its
    `BlackwellForwardContext`.

    The position of a step is its KV tile.
    """

    def first_position(self, context: BlackwellForwardContext, work: Any) -> Any:
        visibility = context.visibility(work, self.config.block_kv)
        return self.first_kv_tile(context, work, visibility, work.block * self.tile_queries)

    def next_position(self, position: Any) -> Any:
        return self.next_kv_tile(position)

    def places(
        self, context: BlackwellForwardContext, content: str, work: Any, kv_tile: Any
    ) -> tuple[Any, ...]:
        """See `tma_tile`: this CTA's rows of Q, its 64 keys of K, its half of V's columns; of K and
        V `load_kv`."""
        if content == "Q":
            place = context.query(work), self.first_row(context, work), 0, work.head
            return ((place,),)
        rank, row = context.cta_rank, self.first_key(kv_tile)
        head = work.head // context.heads_per_kv
        if content == "K":
            place = self.keys(context, work, kv_tile), row + rank * self.load_keys, 0, head
        else:
            place = self.keys(context, work, kv_tile), row, rank, head
        return ((place,),)

    def copy(
        self, context: BlackwellForwardContext, copy: Any, place: TilePlace, target: LoadTarget
    ) -> None:
        """Load a tile: rows of packed heads in Q, boxes of K and V in pages."""
        source, smem = getattr(context.tensors, copy.box), context.smem[copy.memory]
        if copy.content == "Q":
            load_tile(source, smem, place, *target, self.problem_class.packed_heads)
        else:
            self.load_kv(source, smem, place, target)
