"""Rows of ranks, and the parts of what they see, against dense masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4_hd256.check.reference import visible
from fa4_hd256.integrations.context_parallel.ring import routes
from fa4_hd256.integrations.context_parallel.spans import (
    PositionMask,
    SpanPart,
    Units,
    local_parts,
    local_rows,
    parts_of,
    spans_by_rank,
    unit,
)

RANKS = 4
WINDOWS = ((None, None), (None, 0), (0, 0), (5, 0), (5, 3), (None, 2), (30, None), (100, 100))


def dense(length, mask):
    """Return (length, length) bool."""
    seen = visible((length, length), (mask.left, mask.right))
    if mask.documents is not None:
        lengths = torch.tensor(mask.documents).diff()
        number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        seen &= number[:, None] == number
    return seen


def counted(parts, rows, keys):
    """Return (rows, keys): how many parts have a pair, as a kernel understands them."""
    count = torch.zeros(rows, keys, dtype=torch.int64)
    for part in parts:
        documents = part.documents or (0, len(part.queries))
        of_keys = part.documents or (0, len(part.keys))
        for begin, end, first, last in zip(documents, documents[1:], of_keys, of_keys[1:]):
            seen = visible((end - begin, last - first), part.window)
            # No call has rows that see nothing, whose LSE would be for nothing, except where
            # negative bounds cut documents.
            is_cut = part.documents and min(side or 0 for side in part.window) < 0
            assert is_cut or seen.any(dim=1).all()
            top, left = part.queries.start, part.keys.start
            count[top + begin : top + end, left + first : left + last] += seen.long()
    return count


def positions(rows):
    return [position for span in rows for position in span]


sides = st.none() | st.integers(-12, 40)
masks = st.builds(
    PositionMask,
    sides,
    sides,
    st.none() | st.lists(st.integers(1, 31), max_size=5).map(lambda d: (0, *sorted(d), 32)),
    st.booleans(),
    st.none(),
).filter(lambda mask: is_upright(mask) or None in mask[:2] or mask.left + mask.right >= 0)


def is_upright(mask):
    """Return True if every query sees its own key, as far as bounds say."""
    return all(side is None or side >= 0 for side in (mask.left, mask.right))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@given(mask=masks)
def test_parts_are_the_mask(order, mask):
    """Parts cover every rank's queries with every rank's keys, and all keys in their order."""
    places = spans_by_rank(order, RANKS, 8)
    seen = dense(32, mask)
    for queries in places:
        for keys in (*places, (range(32),)):
            expected = seen[positions(queries)][:, positions(keys)].long()
            found = counted(parts_of(queries, keys, mask), *expected.shape)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@given(mask=masks)
def test_own_parts_are_the_mask(order, mask):
    """Both halves together; there is work for the end but in packed documents of a single call."""
    seen = dense(32, mask)
    for own in spans_by_rank(order, RANKS, 8):
        at_begin, at_end = local_parts(own, mask)
        found = counted((*at_begin, *at_end), 8, 8)
        assert torch.equal(found, seen[positions(own)][:, positions(own)].long())
        assert at_end or len(at_begin) < 2
        assert at_end or mask.documents or not is_upright(mask)


def test_own_parts_of_units_are_not_cut():
    """A part of one unit has nothing for the end."""
    one = PositionMask(units=Units(8, ((True,) * RANKS,) * RANKS))
    own = spans_by_rank("contiguous", RANKS, 8)[1]
    assert local_parts(own, one) == (parts_of(own, own, one), ())


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@given(bits=st.integers(0, (1 << 16) - 1))
def test_parts_of_units_hold_what_is_seen(order, bits):
    """Parts hold each pair once, and know where they lie; spans that see nothing have none. Rows
    that ring attention sends are whole units, so that the same holds of them."""
    numbers = range(32 // unit(order, 8))
    seen = tuple(tuple(bool(bits >> i * 5 % 16 + j & 1) for j in numbers) for i in numbers)
    mask = PositionMask(units=Units(unit(order, 8), seen))
    places = spans_by_rank(order, RANKS, 8)
    for queries in places:
        for keys in (*places, (range(32),), places[1][-1:]):
            count = torch.zeros(32, 32, dtype=torch.int64)
            for part in parts_of(queries, keys, mask):
                rows = positions(queries)[part.queries.start : part.queries.stop]
                columns = positions(keys)[part.keys.start : part.keys.stop]
                assert part.first == (rows[0], columns[0]) and part.window == (None, None)
                assert rows == [*range(rows[0], rows[0] + len(rows))]
                assert columns == [*range(columns[0], columns[0] + len(columns))]
                count[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += 1
            assert count.max() <= 1
            for row in positions(queries):
                for column in positions(keys):
                    is_seen = seen[row // mask.units.rows][column // mask.units.rows]
                    assert count[row, column] or not is_seen


@pytest.mark.parametrize("window", WINDOWS)
def test_a_mask_without_documents_is_that_of_one(window):
    for queries in spans_by_rank("zigzag", 2, 8):
        one = parts_of(queries, (range(16),), PositionMask(*window))
        assert one == parts_of(queries, (range(16),), PositionMask(*window, (0, 16)))


def test_causal_parts_of_a_zigzag_are_one_call_a_hop():
    """All queries see the first span of keys of an earlier rank; the second span of queries sees
    all keys of a later one."""
    places = spans_by_rank("zigzag", RANKS, 8)
    causal = PositionMask(None, 0)
    assert parts_of(places[2], places[1], causal) == (SpanPart(range(8), range(4), (None, None)),)
    assert parts_of(places[1], places[2], causal) == (
        SpanPart(range(4, 8), range(8), (None, None)),
    )
    assert parts_of(places[1], places[1], causal) == (SpanPart(range(8), range(8), (None, 0)),)


def test_zigzag_divides_causal_work_evenly():
    seen = dense(64, PositionMask(None, 0))
    work = [int(seen[positions(rows)].sum()) for rows in spans_by_rank("zigzag", RANKS, 16)]
    assert max(work) == min(work)
    uneven = [int(seen[positions(rows)].sum()) for rows in spans_by_rank("contiguous", RANKS, 16)]
    assert max(uneven) > 6 * min(uneven)


def test_placed_refuses():
    with pytest.raises(ValueError, match=r"order is 'striped'; accepted: 'contiguous', 'zigzag'"):
        spans_by_rank("striped", 2, 8)
    with pytest.raises(ValueError, match=r"7 rows; order 'zigzag' gives it two spans"):
        spans_by_rank("zigzag", 2, 7)


def test_local_rows():
    held = (range(4, 8), range(20, 24))
    assert local_rows(held, range(21, 24)) == range(5, 8)
    with pytest.raises(ValueError, match="are not in one of the spans"):
        local_rows(held, range(7, 21))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@given(mask=masks)
def test_routes_bring_every_key_to_whom_it_is_seen_by(order, mask):
    """Keys go no further than the last rank that sees them; nobody gets a key twice."""
    places = spans_by_rank(order, RANKS, 8)
    seen = dense(32, mask)
    for owner, both in enumerate(routes(places, mask)):
        reached: dict[int, set[int]] = {}
        for route in both:
            assert set(positions(route.rows)) <= set(positions(places[owner]))
            for hop in range(1, route.hops + 1):
                rank = (owner + route.step * hop) % RANKS
                assert rank != owner and rank not in reached
                reached[rank] = set(positions(route.rows))
            if route.hops:
                last = positions(places[(owner + route.step * route.hops) % RANKS])
                assert seen[last][:, positions(route.rows)].any()
        for rank, rows in enumerate(places):
            if rank != owner:
                own = positions(places[owner])
                needed = {p for p in own if seen[positions(rows), p].any()}
                assert needed <= reached.get(rank, set())


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_under_a_window_only_neighbours_exchange(order):
    places = spans_by_rank(order, RANKS, 32)
    for both in routes(places, PositionMask(4, 4)):
        for route in both:
            assert route.hops <= 1
            assert sum(map(len, route.rows)) <= 8


def test_everybody_sees_everything_in_one_direction():
    for forward, backward in routes(spans_by_rank("contiguous", RANKS, 8), PositionMask()):
        assert (forward.hops, backward.hops) == (RANKS - 1, 0)
