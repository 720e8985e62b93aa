"""Scores of the dV kernel in registers, by quads (`blackwell.tmem`), and what hides them.

Scores are transposed: rows are keys, columns queries.  Four threads share keys; each has 16 of its
warpgroup's 64 queries for each of four keys.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ....schedulers.protocol import WorkTile
from ...backward.block_mask import WORD_PAIR
from ...backward.common import Step
from ...backward.ds_tiles import DS_TILE, RUN
from ...functions.kernel_functions import MaskFunction, ScorePlaces
from ...limits import WARP_SIZE
from ...mask.masking import Visibility, hide_unseen
from ..tmem import quad_fragment
from .common import warpgroup

__all__ = [
    "COLUMNS",
    "OWN_QUERIES",
    "QUAD",
    "STEP_QUERIES",
    "FunctionMask",
    "ListedMask",
    "ListedNumber",
    "QuadMask",
    "QuadRegisters",
    "StepMask",
    "TileStep",
    "first_key",
    "first_query",
    "quad",
]

STEP_QUERIES = DS_TILE
OWN_QUERIES = STEP_QUERIES // 2  # of a step: those of a warpgroup, and those a CTA loads for S
QUAD = 4  # threads that share keys
BEYOND = 1 << 30  # a query that no key sees
#: Queries of the scores that a thread has of a key, from the first of them on.
COLUMNS = tuple(RUN * k + i for k in range(OWN_QUERIES // RUN) for i in range(2))


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
    return query_tile * STEP_QUERIES + warpgroup() * OWN_QUERIES + quad()[1] * 2


class TileStep(NamedTuple):
    """A step, and the tile that it is of."""

    work: WorkTile
    step: Step


class QuadRegisters(NamedTuple):
    """This thread's registers for a step: P times the slope of its score in float32; P, and dS, in
    16 bits, two in a register."""

    factors: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor


class QuadMask(NamedTuple):
    """Mask of a step by ranges.  key: this thread's first one; index: of the step; halves: which
    `quad_fragment`s of its keys are masked."""

    applies: Boolean
    visibility: Visibility
    key: Int32
    index: Int32
    halves: tuple[int, ...] = ()

    def hide(self, scores: cute.Tensor) -> None:
        """Scores of queries that a key does not see := -inf; of keys beyond the sequence's end all,
        for their dS has to be 0."""
        queries = first_query(self.index)
        for number, half in enumerate(self.halves):
            for group in range(2):
                key = self.key + (16 * half + 8 * group)
                first = cutlass.select_(key < self.visibility.seqlen_q, queries, Int32(BEYOND))
                own = quad_fragment(scores, number)[None, group, None]
                self.visibility.apply(own, key, first, COLUMNS)


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
                own = quad_fragment(scores, number)[None, group, None]
                first = WORD_PAIR * (2 * half + group)
                hide_unseen(own, self.words[first : first + WORD_PAIR], COLUMNS)


class ListedNumber(NamedTuple):
    """Mask of a step that a block mask names, by the number of a tile of which a mask_mod says what
    is seen; `FunctionMask` adds the places of scores."""

    applies: Boolean
    number: Int32


#: Mask of a step, before it is known for which of a thread's scores.
StepMask = QuadMask | ListedMask | ListedNumber


class FunctionMask(NamedTuple):
    """Mask of some scores of a step by a mask_mod."""

    applies: Boolean
    number: Int32
    function: MaskFunction
    places: ScorePlaces

    def hide(self, scores: cute.Tensor) -> None:
        """Scores that the mask_mod says are not seen := -inf."""
        self.function.hide(scores, self.places, self.number)
