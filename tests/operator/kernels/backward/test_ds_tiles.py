"""dS in tiles: where an element lies, which tiles a call has, what their numbers are, and the order
in which the products read them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4_hd256.kernels.backward.ds_tiles import (
    DS_TILE_ELEMENTS,
    DsTiles,
    count_blocks,
    count_tiles,
    ds_units,
    first_unit,
    tile_strides,
)
from fa4_hd256.kernels.backward.gemm_tiles import GemmOrder, PackedTiles
from fa4_hd256.kernels.mask.masking import MaskKind
from fa4_hd256.kernels.mask.windows import Reach

#: Around the ends of tiles and of blocks, and more blocks than any bound of `SIDES` has.
LENGTHS = (1, 255, 256, 257, 512, 700, 1281, 1792)
#: Bounds: none, only the own key, a part of a block, a block and around, beyond some lengths,
#: beyond all; negative bounds that hide a key, a block, more than some lengths.
SIDES = (None, 0, 1, 255, 256, 600, 5000, -1, -256, -300)


def test_an_element_of_a_tile():
    """The module's rule gives bytes; every place is taken once."""
    (keys, runs, run), strides = tile_strides()
    places = {
        key * strides[0] + query // run * strides[1] + query % run * strides[2]: (key, query)
        for key in range(keys)
        for query in range(runs * run)
    }
    assert sorted(places) == list(range(DS_TILE_ELEMENTS))
    for place, (key, query) in places.items():
        assert 2 * place == query // 8 * 2048 + key * 16 + query % 8 * 2


def test_blocks():
    assert [count_blocks(length) for length in (0, 1, 128, 256, 257, 512)] == [0, 1, 1, 1, 2, 2]


def seen_blocks(lengths, window) -> list[range]:
    """Return, for each block of keys, the blocks of queries that see any of it, from the definition
    of the mask: query i sees key j if -left <= j - i - (keys - queries) <= right."""
    (queries, keys), (left, right) = lengths, window
    key = np.arange(keys)
    level = key - (keys - queries)  # the query that a key is level with
    first = np.maximum(level - right, 0) if right is not None else np.zeros_like(key)
    last = np.minimum(level + left, queries - 1) if left is not None else 0 * key + queries - 1
    found = []
    for block in range(0, keys, 256):
        own = slice(block, block + 256)
        seen = last[own] >= first[own]
        if seen.any():
            found.append(range(first[own][seen].min() // 256, last[own][seen].max() // 256 + 1))
        else:
            found.append(range(0))
    return found


def is_wrong(lengths, window) -> bool:
    """Return True if tiles of a case are not numbered one by one, by tiles of keys, then of
    queries, or are not counted."""
    kind, reach = MaskKind(*(side is not None for side in window)), Reach.of(window)
    tiles, before = DsTiles.of(reach.lengths(*lengths), kind, reach.window), 0
    for block, columns in enumerate(seen_blocks(lengths, window)):
        for half in range(2) if columns else ():
            if tiles.row(2 * block + half) + 2 * columns.start != before:
                return True
            before += 2 * len(columns)
    return count_tiles(lengths, window) != before


CASES = [
    (lengths, window)
    for lengths in itertools.product(LENGTHS, LENGTHS)
    for window in itertools.product(SIDES, SIDES)
]


def test_tiles_are_numbered_one_by_one():
    """Numbers begin at 0 and have no gap, so that no two tiles share one."""
    assert not any(itertools.starmap(is_wrong, CASES))


def test_random_lengths_and_windows():
    draw = random.Random(0)
    sides = (None, 0, *range(1, 4000, 37), *range(-4000, 0, 97))
    for _ in range(1000):
        lengths = draw.randint(1, 4000), draw.randint(1, 4000)
        assert not is_wrong(lengths, (draw.choice(sides), draw.choice(sides)))


# ------------------------------------------------------------------------- unequal lengths


def places(lengths, longest, window, packed) -> tuple[list[range], int]:
    """Return (the tiles of each sequence in a query head's, how many these are)."""
    offsets = list(itertools.accumulate((keys for _, keys in lengths), initial=0))
    units, of_unit = ds_units(longest, window, len(lengths), offsets[-1] if packed else None)
    begins = [
        of_unit * first_unit(number, count_blocks(longest[1]), offsets[number] if packed else None)
        for number in range(len(lengths))
    ]
    counts = [count_tiles(one, window) if 0 not in one else 0 for one in lengths]
    return [range(begin, begin + n) for begin, n in zip(begins, counts)], units * of_unit


def drawn(draw):
    """Return (lengths of queries and keys, the longest said): many short ones, or any; some
    empty."""
    most = draw.choice((300, 1000, 3000))
    count, own = draw.randint(1, 8), draw.random() < 0.5
    keys = [draw.choice((0, draw.randint(1, most), most)) for _ in range(count)]
    queries = keys if own else [draw.choice((0, draw.randint(1, most))) for _ in range(count)]
    longest = max(queries) + draw.choice((0, 100)), max(keys) + draw.choice((0, 300))
    return list(zip(queries, keys)), longest


def overlaps() -> int:
    """Count the batches, of many, in which some tile has another's place, or none."""
    draw, found = random.Random(1), 0
    for _ in range(2000):
        lengths, longest = drawn(draw)
        window, packed = (draw.choice(SIDES), draw.choice(SIDES)), draw.random() < 0.7
        spans, total = places(lengths, longest, window, packed)
        spans = [span for span in spans if span]
        ends = [*(span.start for span in spans[1:]), total]
        found += any(span.stop > end for span, end in zip(spans, ends))
    return found


def test_sequences_of_any_lengths_have_room():
    """Packed and padded: none begins before the one before ends, and the last ends within."""
    assert overlaps() == 0


@pytest.mark.parametrize(
    ("longest", "window", "sequences", "packed", "expected"),
    [
        # Blocks of keys, each with all blocks of queries: 4 tiles per block.
        ((1024, 2048), (None, None), 3, None, (24, 16)),
        # Packed: a unit for 256 keys and one for each sequence, unless all are long.
        ((4096, 4096), (None, None), 8, 8192, (40, 64)),
        ((4096, 4096), (None, None), 2, 8192, (32, 64)),
        # Causal: 19 halves of blocks, for 17 of equal lengths.
        ((4096, 4096), (None, 0), 8, 8192, (40, 38)),
        # A window of five blocks, with one more begun on either side.
        ((4096, 4096), (1279, 0), 8, 8192, (40, 28)),
        # No more than there are.
        ((256, 4096), (1279, 0), 8, 8192, (40, 4)),
    ],
)
def test_units(longest, window, sequences, packed, expected):
    assert ds_units(longest, window, sequences, packed) == expected


@pytest.mark.parametrize("blocks", [1, 4, 16, 33, 34, 64])
@pytest.mark.parametrize("heads", [1, 8])
def test_tiles_that_share_ds_are_at_work_at_once(blocks, heads):
    """One more part would begin when others of it are done."""
    order = GemmOrder.of(256 * blocks, 256 * blocks, heads, MaskKind(False, False))
    take_turns = {number for number in range(order.num_tiles) if order.tile(number)[2] == 0}
    parts = order.parts_at_once(66)
    assert parts == 1 or parts * len(take_turns) <= 66
    assert (parts + 1) * len(take_turns) > 66 or heads == 1
    assert order.parts_at_last(66) * len(take_turns) >= 66


@given(
    lengths=st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 1100)), min_size=1, max_size=9),
    heads=st.integers(1, 3),
    mask=st.sampled_from([MaskKind(False, False), MaskKind(False, True), MaskKind(True, True)]),
)
def test_tiles_in_a_row(lengths, heads, mask):
    """Every block of keys of a sequence, and of queries for each head, is one tile; beside these
    there is at most one empty block of either."""
    offsets = [[0, *itertools.accumulate(side)] for side in zip(*lengths, strict=True)]
    queries, keys = offsets
    packed = PackedTiles(keys, 256, offsets_q=queries, heads=heads, is_used=True)
    count = packed.count((keys[-1], queries[-1]), len(lengths))
    found: dict[int, list] = {}
    for number in range(count):
        in_sequence, sequence = packed.locate(number)
        order = GemmOrder(*packed.blocks(sequence), heads, mask)
        assert 0 <= in_sequence < order.num_tiles
        found.setdefault(sequence, []).append(order.tile(in_sequence))
    for sequence, (seqlen_q, seqlen_k) in enumerate(lengths):
        blocks_k, blocks_q = packed.blocks(sequence)
        assert blocks_k - -(-seqlen_k // 256) in (0, 1) and blocks_q - -(-seqlen_q // 256) in (0, 1)
        tiles = [
            (of_keys, block, 0 if of_keys else head) for of_keys, block, head in found[sequence]
        ]
        of_queries = itertools.product([False], range(blocks_q), range(heads))
        assert sorted(tiles) == sorted(
            [*((True, block, 0) for block in range(blocks_k)), *of_queries]
        )


def test_offsets_that_do_not_ascend_leave_blocks():
    packed = PackedTiles([0, 900, 300], 256, offsets_q=[0, 900, 300], heads=2, is_used=True)
    assert packed.blocks(1) == (1, 1)
