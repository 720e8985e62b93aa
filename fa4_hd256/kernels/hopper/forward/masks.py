"""Scores of a fragment: where each lies, and what hides some: ranges, and bits of a block mask."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...forward.context import ForwardContext
from ...functions.kernel_functions import Locate
from ...mask.block_mask import FULL, StepList
from ...mask.masking import hide_unseen
from ..instructions import QUAD, fragment_columns, row_of_fragment
from .config import WARPGROUP_ROWS
from .context import StepKeys, WarpgroupTile

#: Words of a row's bits that a step of 64 keys has.
STEP_WORDS = 2
ROWS = 2  # of a thread


class ListedBits(NamedTuple):
    """Bits of a listed step of a block mask. is_partial: there may be keys that a row does not see.
    words: for each row of the thread the bits of the step, whose first one is of the thread's first
    key."""

    is_partial: Boolean
    words: tuple[tuple[Int32, ...], ...]


def listed_bits(steps: StepList, step: Int32, warpgroup: Int32) -> ListedBits:
    """Return the bits of a listed step of 64 keys, half of a listed tile."""
    number, part = steps.bit_tile(step, Int32(0)), steps.part(step)
    lane, bits = cute.arch.thread_idx()[0] % QUAD, []
    for row in range(ROWS):
        words = steps.words(number, warpgroup * WARPGROUP_ROWS + row_of_fragment(row))
        step_words = (
            cutlass.select_(part == 0, words[i], words[i + STEP_WORDS]) for i in range(STEP_WORDS)
        )
        bits.append(tuple(word >> 2 * lane for word in step_words))
    return ListedBits(number != FULL, tuple(bits))


def hide_by_range(
    context: ForwardContext,
    row: cute.Tensor,
    number: int,
    tile: WarpgroupTile,
    keys: StepKeys,
    sizes: tuple[int, int],
) -> None:
    """Set scores outside a row's range to -inf.  sizes: rows of a query, keys of a step."""
    query_rows, block = sizes
    query = tile.first_row + row_of_fragment(number) // query_rows
    first_key = keys.first + cute.arch.thread_idx()[0] % QUAD * 2
    context.visibility(tile.work, block).apply(
        row, query, first_key, fragment_columns(block), keys.mask[number]
    )


@cute.jit
def hide_by_bits(row: cute.Tensor, number: int, bits: ListedBits, columns: int):
    """Scores of keys without a bit := -inf.  columns: of the fragment."""
    if bits.is_partial:
        hide_unseen(row, bits.words[number], fragment_columns(columns))


def locator(tile: WarpgroupTile, key: Int32, block: int, query_rows: int, packed: int) -> Locate:
    """Return (query head, query, key) of the scores of a fragment, by number. key: first key of the
    step, of `block` keys. query_rows: rows of a query, those of padding among them; packed: heads
    that share query tiles."""
    work, first_row, _ = tile
    columns, first_column = fragment_columns(block), cute.arch.thread_idx()[0] % QUAD * 2

    def locate(number: int) -> tuple[Int32, Int32, Int32]:
        in_part = row_of_fragment(number // 2 % ROWS)
        in_group = cutlass.min(in_part % query_rows, packed - 1)
        column = columns[number // 4 * 2 + number % 2]
        query = first_row + in_part // query_rows
        return work.head * packed + in_group, query, key + (first_column + column)

    return locate
