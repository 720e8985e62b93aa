"""dS from the registers of the dV kernel to global memory (`backward.ds_tiles`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers.protocol import WorkTile
from ...backward.common import Step, heads_of_part
from ...backward.ds_tiles import RUN, RUN_STRIDE, tile_of, tiles_of_head, within_head
from ...plan.edges import SharedByReference
from ..tmem import quad_fragment
from .common import warpgroup
from .context import BlackwellBackwardContext
from .quads import OWN_QUERIES, first_key, quad

__all__ = ["DsStore", "StepDs"]


class StepDs(NamedTuple):
    """dS of a step: its tile in global memory, and this thread's values in 16 bits, two in a
    register."""

    tile: cute.Tensor
    values: cute.Tensor


@dataclass(frozen=True)
class DsStore(SharedByReference):
    """The stores of dS of a kernel.

    dtype: of dS.  counts_tiles: the number of a step's tile is counted on from the step before,
    which leaves no use of the head and so a register more.  With what changes scores, whose slopes
    or places are in the way, or sequences of unequal lengths it takes more instead.  A list names
    any tile.
    """

    dtype: Any
    counts_tiles: bool

    def number(self, context: BlackwellBackwardContext, step: Step, row: Int32) -> Int32:
        """Return the number of this CTA's tile of dS of a step.  row: `KeyTiles.row_of_ds`."""
        ds = context.tensors.ds
        number = within_head(ds, row + step.index, context.sequences.tensors)
        return number + step.head * tiles_of_head(ds)

    def tile(
        self, context: BlackwellBackwardContext, step: Step, row: Int32, number: Int32
    ) -> cute.Tensor:
        """Return this CTA's tile of dS of a step.  number: of the tile, if it is counted."""
        if not self.counts_tiles:
            number = self.number(context, step, row)
        return tile_of(context.tensors.ds, number)

    @staticmethod
    def following_number(context: BlackwellBackwardContext, step: Step, number: Int32) -> Int32:
        """Return the number of the tile behind that of a step."""
        begin, end = step.span
        to_next_head = tiles_of_head(context.tensors.ds) - (end - begin)
        return number + 1 + cutlass.select_(step.index + 1 == end, to_next_head, Int32(0))

    def store(self, step: StepDs | None, half: int) -> None:
        """Store half of this thread's dS of a step, if there is any: a quad has 16 bytes, the quads
        of a warp 128 consecutive ones."""
        if step is None:
            return
        runs = OWN_QUERIES // RUN
        first = step.tile[first_key() + half * 16, warpgroup() * runs, None]
        layout = cute.make_layout((2, 2, runs), stride=(1, 8 * RUN, RUN_STRIDE))
        target = cute.make_tensor((first.iterator + quad()[1] * 2).align(4), layout)
        cute.autovec_copy(quad_fragment(cute.recast_tensor(step.values, self.dtype), half), target)

    @cute.jit
    def complete_blocks(
        self, context: BlackwellBackwardContext, work: WorkTile, step: Step, row: Int32
    ):
        """Store zeros to tiles of dS beside those of the steps: NOTE [blocks of dS] in
        `backward.ds_tiles`.  row: see `number`."""
        begin, end = step.span
        nothing = cute.make_rmem_tensor(OWN_QUERIES // 2, Float32)
        nothing.fill(0.0)
        ds, tensors = context.tensors.ds, context.sequences.tensors
        before, behind = (within_head(ds, row + i, tensors) for i in (begin - 1, end))
        first = step.head * tiles_of_head(ds)
        for _ in cutlass.range(heads_of_part(context, work.head)[1], unroll=1):
            for half in cutlass.range_constexpr(2):
                if begin % 2 == 1:
                    self.store(StepDs(tile_of(ds, first + before), nothing), half)
                if end % 2 == 1:
                    self.store(StepDs(tile_of(ds, first + behind), nothing), half)
            first += tiles_of_head(ds)
