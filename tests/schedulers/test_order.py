"""The tile order alone, on the host: a bijection, longest first, KV groups together."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4_hd256.schedulers import PackedBlocks, TileProblem, section_heads_for, tile_coordinates

# Small enough to enumerate; odd, even and prime counts, and sections wider than all pairs.
problems = st.builds(
    TileProblem,
    num_blocks=st.integers(1, 12),
    num_heads=st.integers(1, 13),
    num_batches=st.integers(1, 5),
    section_heads=st.integers(1, 70),
    later_blocks_first=st.booleans(),
    last_heads=st.integers(1, 70),
)


def _tiles(problem):
    order = problem.order()
    return [tile_coordinates(index, order) for index in range(problem.num_tiles)]


def _section(problem, head, batch):
    """Return the section of a pair: the last one takes in what is left over."""
    pairs = problem.num_heads * problem.num_batches
    width = min(problem.section_heads, pairs)
    last = (pairs - max(width, min(problem.last_heads, pairs))) // width
    return min((batch * problem.num_heads + head) // width, last)


def _lost(counts, clusters):
    """Return the time of tiles of so many steps, greedily placed in order, over the even share."""
    ends = [0] * clusters
    for count in counts:
        heapq.heapreplace(ends, ends[0] + count)
    return max(ends) / (sum(counts) / clusters) - 1


@given(problems)
def test_every_tile_comes_exactly_once(problem):
    tiles = _tiles(problem)
    assert sorted(tiles) == [
        (block, head, batch)
        for block in range(problem.num_blocks)
        for head in range(problem.num_heads)
        for batch in range(problem.num_batches)
    ]


@given(problems)
def test_longest_first_within_each_head(problem):
    blocks = {}
    for block, head, batch in _tiles(problem):
        blocks.setdefault((head, batch), []).append(block)
    ascending = list(range(problem.num_blocks))
    expected = ascending[::-1] if problem.later_blocks_first else ascending
    assert all(sequence == expected for sequence in blocks.values())


@given(problems)
def test_sections_are_done_one_after_the_other(problem):
    sections = [_section(problem, head, batch) for _, head, batch in _tiles(problem)]
    assert sections == sorted(sections)


@given(problems)
def test_a_section_is_done_block_by_block(problem):
    """Longest first over the whole section, and the heads of one block side by side."""
    ranks = {}
    for block, head, batch in _tiles(problem):
        pair = batch * problem.num_heads + head
        rank = problem.num_blocks - 1 - block if problem.later_blocks_first else block
        ranks.setdefault(_section(problem, head, batch), []).append((rank, pair))
    assert all(sequence == sorted(sequence) for sequence in ranks.values())


@given(
    group=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    kv_heads=st.integers(1, 4),
    batches=st.integers(1, 3),
    kv_bytes=st.integers(1, 10**9),
    unequal=st.booleans(),
    least=st.integers(1, 100),
)
def test_no_kv_group_is_torn_apart(group, kv_heads, batches, kv_bytes, unequal, least):
    section = section_heads_for(
        num_heads_per_kv=group,
        num_pairs=group * kv_heads * batches,
        kv_bytes_per_head=kv_bytes,
        l2_bytes=50 * 10**6,
        unequal_lengths=unequal,
        least=least,
    )
    assert section % group == 0
    assert group <= section <= group * kv_heads * batches
    # KV heads that fit, at least one.
    fitting = max(1, 50 * 10**6 // kv_bytes)
    wanted = max(fitting if unequal else 1, -(-least // group))
    assert section // group == min(wanted, kv_heads * batches)


@pytest.mark.parametrize(("least", "lost"), [(1, True), (16, False)])
def test_a_tile_that_all_see_begins_early(least, lost):
    """Greedy placement of 16 heads whose first tile has 128 steps and others 10, on 66 clusters; L2
    holds two heads: of what the steps take, evenly divided."""
    section = section_heads_for(
        num_heads_per_kv=1, num_pairs=16, kv_bytes_per_head=1, l2_bytes=2, unequal_lengths=True,
        least=least,
    )  # fmt: skip
    steps = [10 if block else 128 for block, _, _ in _tiles(TileProblem(64, 16, 1, section))]
    assert (_lost(steps, 66) > 0.4) is lost


@pytest.mark.parametrize(
    ("blocks", "heads", "width"), [(32, 12, 8), (16, 20, 16), (64, 10, 4), (128, 7, 2), (32, 25, 8)]
)
def test_no_few_heads_are_left_for_the_end(blocks, heads, width):
    """Causal tiles on 132 clusters: with the heads that are left over behind all others 14 to 50 %
    would be lost."""
    steps = [1 + block for block, _, _ in _tiles(TileProblem(blocks, heads, 1, width, True))]
    assert _lost(steps, 132) < 0.12


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20), rows=st.sampled_from([1, 4, 16]),
    heads=st.integers(1, 3), section=st.integers(1, 4), later_first=st.booleans(),
)  # fmt: skip
def test_packed_sequences(lengths, rows, heads, section, later_first):
    """Blocks are in a row where that is fewer: every block of every sequence once, and of each
    sequence one empty block at most; the order in a head is that of the numbers."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    longest = max(1, -(-max(lengths) // rows))
    whole = TileProblem(longest, heads, len(lengths), section, later_first)
    problem = whole.in_a_row(PackedBlocks(offsets, rows), offsets[-1])
    tiles = _tiles(problem)
    assert len(tiles) == len(set(tiles)) == problem.num_tiles <= whole.num_tiles
    in_a_row = offsets[-1] // rows + len(lengths)
    assert problem.num_tiles == heads * min(in_a_row, longest * len(lengths))
    blocks = [-(-length // rows) for length in lengths]
    full = [tile for tile in tiles if tile[0] < blocks[tile[2]]]
    assert sorted(full) == sorted(
        (block, head, batch)
        for batch, count in enumerate(blocks)
        for head in range(heads)
        for block in range(count)
    )
    if problem.packed.is_used:
        assert all(block <= blocks[batch] for block, _, batch in tiles)
        for head in range(heads):
            of_head = [(batch, block) for block, at, batch in tiles if at == head]
            assert of_head == sorted(of_head, reverse=later_first)


@pytest.mark.parametrize(
    "name", ["num_blocks", "num_heads", "num_batches", "section_heads", "last_heads"]
)
def test_empty_problems_are_refused(name):
    sizes = {"num_blocks": 1, "num_heads": 1, "num_batches": 1, "section_heads": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        TileProblem(**sizes)


def test_too_many_tiles_are_refused():
    with pytest.raises(ValueError, match="the limit is 2\\*\\*31 - 1"):
        TileProblem(2**20, 2**11, 1)
