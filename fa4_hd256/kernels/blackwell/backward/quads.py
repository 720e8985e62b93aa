"""Scores of the dV kernel in registers, by quads (`blackwell.tmem_quads`): what hides them, and dS
on its way to global memory (`backward.ds_tiles`).

Scores are transposed: rows are keys, columns queries.  Four threads share keys; each has 16 of its
warpgroup's 64 queries for each of four keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers.protocol import WorkTile
from ...backward.block_mask import WORD_PAIR
from ...backward.common import Step, heads_of_part
from ...backward.ds_tiles import DS_TILE, RUN, RUN_STRIDE, tile_of, tiles_of_head, within_head
from ...functions.kernel_functions import MaskFunction, ScorePlaces
from ...limits import WARP_SIZE
from ...mask.masking import Visibility, hide_unseen
from ...plan.edges import SharedByReference
from ..tmem_quads import quad_fragment
from .common import BlackwellBackwardContext as Context
from .common import warpgroup

STEP_QUERIES = DS_TILE
WARPGROUP_QUERIES = STEP_QUERIES // 2  # of a step, and those that a CTA loads for S
QUAD = 4  # threads that share keys
BEYOND = 1 << 30  # a query that no key sees
#: Queries of the scores that a thread has of a key, from the first of them on.
COLUMNS = tuple(RUN * k + i for k in range(WARPGROUP_QUERIES // RUN) for i in range(2))


def quad() -> tuple[Int32, Int32]:
    """Return (quad of the warp, thread of the quad) of this thread."""
    lane = cute.arch.lane_idx()
    return lane // QUAD, lane % QUAD


def first_key() -> Int32:
    """Return the first of this thread's four keys, among the CTA's 128."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    return warp * WARP_SIZE + quad()[0]


def first_query(query_tile: Int32) -> Int32:
    """Return the first of this thread's queries in a tile of queries."""
    return query_tile * STEP_QUERIES + warpgroup() * WARPGROUP_QUERIES + quad()[1] * 2


class TileStep(NamedTuple):
    work: WorkTile
    step: Step


class QuadRegisters(NamedTuple):
    """A step's registers: P times slopes in float32; P, and dS, in 16 bits, two in a register."""

    factors: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor


class QuadMask(NamedTuple):
    """Mask of a step by ranges.  key: the first; halves: which `quad_fragment`s are masked."""

    applies: Boolean
    visibility: Visibility
    key: Int32
    index: Int32
    halves: tuple[int, ...] = ()

    def hide(self, scores: cute.Tensor) -> None:
        """Scores of unseen queries := -inf; of keys past the end all: their dS has to be 0."""
        queries = first_query(self.index)
        for number, half in enumerate(self.halves):
            for group in range(2):
                key = self.key + (16 * half + 8 * group)
                first = cutlass.select_(key < self.visibility.seqlen_q, queries, Int32(BEYOND))
                row = quad_fragment(scores, number)[None, group, None]
                self.visibility.apply(row, key, first, COLUMNS)


class ListedMask(NamedTuple):
    """Mask of a step that a block mask names.  words: two for each of this thread's four keys,
    whose first bit is its first query's; halves: as of `QuadMask`."""

    applies: Boolean
    words: tuple[Int32, ...]
    halves: tuple[int, ...] = ()

    def hide(self, scores: cute.Tensor) -> None:
        """Scores of queries without a bit := -inf."""
        for number, half in enumerate(self.halves):
            for group in range(2):
                row = quad_fragment(scores, number)[None, group, None]
                first = WORD_PAIR * (2 * half + group)
                hide_unseen(row, self.words[first : first + WORD_PAIR], COLUMNS)


class ListedNumber(NamedTuple):
    """Mask of a listed step by a mask_mod's tile number; `FunctionMask` adds the scores' places."""

    applies: Boolean
    number: Int32


#: Mask of a step, before it is known for which of a thread's scores.
StepMask = QuadMask | ListedMask | ListedNumber


class FunctionMask(NamedTuple):
    applies: Boolean
    number: Int32
    function: MaskFunction
    places: ScorePlaces

    def hide(self, scores: cute.Tensor) -> None:
        """Scores that the mask_mod says are not seen := -inf."""
        self.function.hide(scores, self.places, self.number)


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
    #: Registers of a thread's dS of a step (`StepDs`).
    registers: ClassVar[int] = WARPGROUP_QUERIES // 2

    def number(self, context: Context, step: Step, row: Int32) -> Int32:
        ds = context.tensors.ds
        number = within_head(ds, row + step.index, context.sequences.tensors)
        return number + step.head * tiles_of_head(ds)

    def tile(self, context: Context, step: Step, row: Int32, number: Int32) -> cute.Tensor:
        if not self.counts_tiles:
            number = self.number(context, step, row)
        return self.tile_numbered(context.tensors.ds, number)

    def tile_numbered(self, ds: cute.Tensor, number: Int32) -> cute.Tensor:
        return tile_of(ds, number)

    @staticmethod
    def following_number(context: Context, step: Step, number: Int32) -> Int32:
        begin, end = step.span
        to_next_head = tiles_of_head(context.tensors.ds) - (end - begin)
        return number + 1 + cutlass.select_(step.index + 1 == end, to_next_head, Int32(0))

    def store(self, step: StepDs | None, half: int) -> None:
        """Store half of this thread's dS of a step: a warp's quads have 128 consecutive bytes."""
        if step is None:
            return
        runs = WARPGROUP_QUERIES // RUN
        first = step.tile[first_key() + half * 16, warpgroup() * runs, None]
        layout = cute.make_layout((2, 2, runs), stride=(1, 8 * RUN, RUN_STRIDE))
        target = cute.make_tensor((first.iterator + quad()[1] * 2).align(4), layout)
        cute.autovec_copy(quad_fragment(cute.recast_tensor(step.values, self.dtype), half), target)

    @cute.jit
    def complete_blocks(self, context: Context, work: WorkTile, step: Step, row: Int32):
        """Store zeros to tiles of dS beside those of the steps: NOTE [blocks of dS] in
        `backward.ds_tiles`.  row: see `number`."""
        begin, end = step.span
        nothing = cute.make_rmem_tensor(self.registers, Float32)
        nothing.fill(0.0)
        ds, tensors = context.tensors.ds, context.sequences.tensors
        before, behind = (within_head(ds, row + i, tensors) for i in (begin - 1, end))
        first = step.head * tiles_of_head(ds)
        for _ in cutlass.range(heads_of_part(context, work.head)[1], unroll=1):
            for half in cutlass.range_constexpr(2):
                if begin % 2 == 1:
                    self.store(StepDs(self.tile_numbered(ds, first + before), nothing), half)
                if end % 2 == 1:
                    self.store(StepDs(self.tile_numbered(ds, first + behind), nothing), half)
            first += tiles_of_head(ds)
