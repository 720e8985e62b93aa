"""Sources of the decode kernel's loads; the roles are those of `PairProducers`."""

from __future__ import annotations

from typing import Any

from ...operands import LoadTarget, load_tile
from ...rows.sequences import TilePlace
from ..producers import PairProducers
from .config import BLOCK_KV
from .context import BlackwellDecodeContext

__all__ = ["DecodeProducers"]


class DecodeProducers(PairProducers):
    """Mixed into DecodeKernel; the shared state is its
    `BlackwellDecodeContext`.

    The position of a step is its KV tile.
    """

    def first_position(self, context: BlackwellDecodeContext, work: Any) -> Any:
        visibility = context.visibility(work, BLOCK_KV)
        return self.first_kv_tile(context, work, visibility, self.queries(work)[0])

    def next_position(self, position: Any) -> Any:
        return self.next_kv_tile(position)

    def places(
        self, context: BlackwellDecodeContext, content: str, work: Any, kv_tile: Any
    ) -> tuple[Any, ...]:
        """See `tma_tile`: the rows of Q; a half of the columns of K or V, or all of them, see
        `load_kv`."""
        if content == "Q":
            return (((context.query(work), self.queries(work)[0], 0, work.head),),)
        head = work.head // context.heads_per_kv
        keys, first_key = self.keys(context, work, kv_tile), self.first_key(kv_tile)
        return (((keys, first_key, int(content[1:] or 0), head),),)

    def copy(
        self, context: BlackwellDecodeContext, copy: Any, place: TilePlace, target: LoadTarget
    ) -> None:
        """One load.  place: see `places`.  target: (barrier, buffer)."""
        source, smem = getattr(context.tensors, copy.box[0]), context.smem[copy.memory]
        if copy.content == "Q":
            load_tile(source, smem, place, *target, self.of_query)
        else:
            self.load_kv(source, smem, place, target)
