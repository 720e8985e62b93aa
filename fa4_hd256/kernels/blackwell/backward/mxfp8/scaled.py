"""Shared by the backward's kernels in mxfp8: operands with scales, and a context.

Operands are those of `MXFP8_GRADIENT_OPERANDS`: the codes of each, then the scales of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32

from .....schedulers.protocol import WorkTile
from ....block_scales import MXFP8_GRADIENT_OPERANDS
from ....limits import ELEMENT_BYTES, HEAD_DIM
from ....operands import LoadTarget, TmaTensor
from ....rows.sequences import Sequence, by_sequence
from ...scale_tiles import ScaleTiles, load_scales, scale_tensor
from ..common import BlackwellBackwardContext

#: Elements of 16 bits that a head's row of codes takes.
ROW_ELEMENTS = HEAD_DIM // ELEMENT_BYTES
COUNT = len(MXFP8_GRADIENT_OPERANDS)


@dataclass(frozen=True)
class Mxfp8BackwardContext(ScaleTiles, BlackwellBackwardContext):
    """State that every warp role of one CTA shares.  first_tiles: see `ScaleTiles`."""

    first_tiles: tuple[Int32, Int32] | None = None

    def of_tile(self, work: WorkTile) -> Mxfp8BackwardContext:
        return replace(super().of_tile(work), first_tiles=self.counted(work))


def operand_views(operands: tuple[cute.Tensor, ...]) -> tuple[cute.Tensor, ...]:
    codes = tuple(by_sequence(tensor, columns=ROW_ELEMENTS) for tensor in operands[:COUNT])
    return *codes, *operands[COUNT:]


def scale_tensors(
    boxes: dict[str, tuple[int, int, int]], operands: tuple[cute.Tensor, ...]
) -> tuple[TmaTensor, ...]:
    return tuple(scale_tensor(operands[COUNT + box[0]]) for box in boxes.values())


def load_scales_of(
    context: Mxfp8BackwardContext,
    boxes: dict[str, tuple[int, int, int]],
    box: str,
    place: tuple[Sequence, Int32, Int32],
    work: WorkTile,
    buffers: tuple[cute.Tensor, LoadTarget],
) -> None:
    """Load the scales of 128 rows of an operand.  boxes: of the kernel, whose TMA tensors stand
    before those of their scales.  place: (sequence, first row, head).  buffers: those of scales,
    and the target."""
    names, (sequence, row, head) = list(boxes), place
    source = context.tensors.loads[len(names) + names.index(box)]
    tile = context.scale_tile("k" if box[0] in "kv" else "q", work, row)
    load_scales(source, buffers[0], (sequence.batch, head, tile), buffers[1])
