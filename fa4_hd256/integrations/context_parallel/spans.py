"""Placement of a sequence's rows on ranks, and the queries of a rank that see given keys.

A rank's rows are some spans of the sequence, one behind the other in its tensors. What queries of
one rank see of another's keys is cut into `SpanPart`s, each one call of a kernel. Masks are given
by the distance of positions in the whole sequence, a kernel's are bottom-right aligned: rows and
keys that see nothing of each other are cut off until both mean the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ...words import shown

__all__ = [
    "ORDERS",
    "PositionMask",
    "Rows",
    "SpanPart",
    "Units",
    "local_rows",
    "own_parts",
    "parts_of",
    "placed",
    "unit",
]

#: Division of a sequence. contiguous: one span per rank, in order. zigzag: of twice as many spans
#: as ranks the rank's first and, from the end, its last, so that causal work is equal.
ORDERS = ("contiguous", "zigzag")

#: Rows of a rank, as positions in the whole sequence.
Rows = tuple[range, ...]


def placed(order: str, ranks: int, rows: int) -> tuple[Rows, ...]:
    """The rows of every rank, `rows` each. Raises ValueError for an order that there is not, or
    rows that do not divide."""
    if order == "contiguous":
        return tuple((range(rank * rows, (rank + 1) * rows),) for rank in range(ranks))
    if order != "zigzag":
        raise ValueError(f"order is {shown(order)}; accepted: {', '.join(map(repr, ORDERS))}")
    if rows % 2:
        raise ValueError(
            f"a rank has {rows} rows; order 'zigzag' gives it two spans of the same length: give "
            "an even number, padding the sequence to a multiple of twice the ranks"
        )
    half, spans = rows // 2, 2 * ranks
    return tuple(
        tuple(range(span * half, (span + 1) * half) for span in (rank, spans - 1 - rank))
        for rank in range(ranks)
    )


def unit(order: str, rows: int) -> int:
    """Rows of a span, where a rank has so many."""
    return rows // 2 if order == "zigzag" else rows


class Units(NamedTuple):
    """Coarse visibility of a mask by tiles: whether each `rows` queries see any of each `rows`
    keys."""

    rows: int
    seen: tuple[tuple[bool, ...], ...]


class PositionMask(NamedTuple):
    """Mask by positions in the whole sequence.

    left, right: keys before and behind the query's own position, None: all. documents: offsets of
    packed documents, which see nothing of one another; None: the sequence is one. by_place: whether
    scores depend on positions, so that those of a part must lie side by side. units: of a mask by
    tiles, with which there are neither bounds nor documents; spans are of whole units then.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] | None = None
    by_place: bool = False
    units: Units | None = None

    @property
    def has_places(self) -> bool:
        """Return True if a part must know its position."""
        return self.by_place or self.units is not None


class SpanPart(NamedTuple):
    """One call of a kernel.

    queries, keys: rows of a rank's tensors. window: (left, right), bottom-right aligned, as
    `flash_attn_func` takes it. documents: offsets of packed documents, which queries and keys have
    in common, from 0; None: one. first: positions of the first query and key where the mask
    `has_places`.
    """

    queries: range
    keys: range
    window: tuple[int | None, int | None]
    documents: tuple[int, ...] | None = None
    first: tuple[int, int] | None = None

    @property
    def positions(self) -> tuple[range, range]:
        """Return the positions of its queries and keys, where it has a `first`."""
        assert self.first is not None
        query, key = self.first
        return range(query, query + len(self.queries)), range(key, key + len(self.keys))


def local_rows(held: Rows, wanted: range) -> range:
    """Return the rows, in a tensor of all spans, of positions that are in one of the spans."""
    begin = 0
    for span in held:
        if span.start <= wanted.start and wanted.stop <= span.stop:
            return _moved(wanted, begin - span.start)
        begin += len(span)
    raise ValueError(f"positions {wanted} are not in one of the spans {held}")


@functools.lru_cache(maxsize=1024)
def parts_of(queries: Rows, keys: Rows, mask: PositionMask) -> tuple[SpanPart, ...]:
    """Return the parts of these keys that queries of these rows see; a pair is in one part at
    most."""
    found: list[SpanPart] = []
    first_query = 0
    for query_span in queries:
        first_key = 0
        for key_span in keys:
            for part in _pieces(query_span, key_span, mask):
                moved = part._replace(
                    queries=_moved(part.queries, first_query - query_span.start),
                    keys=_moved(part.keys, first_key - key_span.start),
                    first=(part.queries.start, part.keys.start) if mask.has_places else None,
                )
                found.append(moved)
            first_key += len(key_span)
        first_query += len(query_span)
    return tuple(found if mask.has_places else _joined(found))


@functools.lru_cache(maxsize=64)
def own_parts(own: Rows, mask: PositionMask) -> tuple[tuple[SpanPart, ...], tuple[SpanPart, ...]]:
    """`parts_of` a rank's own rows, in two: work for the start and for the end of a walk.

    One part is cut between its queries, but where documents are packed, each of whose pieces would
    be a call, or the mask is by units, which are not cut: then it is for the start.
    """
    parts = parts_of(own, own, mask)
    if len(parts) == 1 and mask.documents is None and mask.units is None:
        count = sum(map(len, own))
        parts = tuple(
            part._replace(queries=_moved(part.queries, rows.start))
            for rows in (range(count // 2), range(count // 2, count))
            for part in parts_of(_cut_out(own, rows), own, mask)
        )
    middle = (len(parts) + 1) // 2
    return parts[:middle], parts[middle:]


def _cut_out(held: Rows, rows: range) -> Rows:
    """The positions of some rows of a tensor of all spans."""
    found, begin = [], 0
    for span in held:
        common = _common(rows, range(begin, begin + len(span)))
        if common:
            found.append(_moved(common, span.start - begin))
        begin += len(span)
    return tuple(found)


def _pieces(queries: range, keys: range, mask: PositionMask) -> list[SpanPart]:
    """`parts_of` of two spans; rows are positions."""
    if mask.units is not None:
        return _of_units(queries, keys, mask.units)
    documents = mask.documents
    if documents is None:
        documents = (0, max(queries.stop, keys.stop))
    found: list[SpanPart] = []
    own: list[range] = []
    for begin, end in zip(documents, documents[1:]):
        document = range(begin, end)
        of_queries, of_keys = _common(queries, document), _common(keys, document)
        if not of_queries or not of_keys:
            continue
        if of_queries == of_keys:
            own.append(of_queries)
            continue
        part = _cut(of_queries, of_keys, mask)
        if part is not None:
            found.append(part)
    return found + _own_documents(own, mask)


def _of_units(queries: range, keys: range, units: Units) -> list[SpanPart]:
    """The least rows and keys that hold all units which see something."""
    pairs = [
        (row, column)
        for row in range(queries.start, queries.stop, units.rows)
        for column in range(keys.start, keys.stop, units.rows)
        if units.seen[row // units.rows][column // units.rows]
    ]
    if not pairs:
        return []
    rows, columns = (range(min(side), max(side) + units.rows) for side in zip(*pairs))
    return [SpanPart(rows, columns, (None, None))]


def _own_documents(documents: Sequence[range], mask: PositionMask) -> list[SpanPart]:
    """Documents, or pieces of one, whose queries and keys are the same positions: one call."""
    if not documents:
        return []
    if len(documents) == 1:
        part = _cut(documents[0], documents[0], mask)
        return [] if part is None else [part]
    begin = documents[0].start
    # Documents lie one behind the other, so that one's end is the next one's begin.
    offsets = (*(document.start - begin for document in documents), documents[-1].stop - begin)
    rows = range(begin, documents[-1].stop)
    longest = max(map(len, documents))
    window = _simplified(mask.left, longest), _simplified(mask.right, longest)
    return [SpanPart(rows, rows, window, offsets)]


def _simplified(side: int | None, longest: int) -> int | None:
    """Return the bound of a window, None where it leaves out nothing."""
    return None if side is None or side >= longest - 1 else side


def _cut(queries: range, keys: range, mask: PositionMask) -> SpanPart | None:
    """Two spans of one document, without rows that see no key, and keys that no row sees.

    Row i of n sees the keys i + low to i + high of m. Rows from -high to m - 1 - low see some;
    without the others a bound's distance from the bottom-right diagonal is never negative.
    """
    rows, columns, distance = len(queries), len(keys), queries.start - keys.start
    low = -rows if mask.left is None else distance - mask.left
    high = columns if mask.right is None else distance + mask.right
    first, last = max(0, -high), min(rows, columns - low)
    if first >= last:
        return None
    first_key, last_key = max(0, first + low), min(columns, last + high)
    rows, columns, shift = last - first, last_key - first_key, first - first_key
    # No bound where the last row sees all keys before it, or the first one all behind it.
    left_is_free, right_is_free = low + shift <= 1 - rows, high + shift >= columns - 1
    return SpanPart(
        range(queries.start + first, queries.start + last),
        range(keys.start + first_key, keys.start + last_key),
        (
            None if left_is_free else columns - rows - (low + shift),
            None if right_is_free else high + shift - (columns - rows),
        ),
    )


def _joined(parts: Sequence[SpanPart]) -> list[SpanPart]:
    """Parts that one call can do, where their rows lie side by side, as one."""
    done: list[SpanPart] = []
    for part in parts:
        for index, other in enumerate(done):
            both = _union(other, part)
            if both is not None:
                done[index] = both
                break
        else:
            done.append(part)
    return done if len(done) == len(parts) else _joined(done)


def _union(one: SpanPart, two: SpanPart) -> SpanPart | None:
    """Both as one, rows of `two` behind those of `one`; None where one call does not mean both."""
    if one.documents is not None or two.documents is not None:
        return None
    sees_all, is_causal = (None, None), (None, 0)
    if one.queries == two.queries and one.keys.stop == two.keys.start:
        # Keys before those of a mask without a bound on the left: all queries see them.
        if one.window == sees_all and two.window[0] is None:
            return two._replace(keys=range(one.keys.start, two.keys.stop))
    if one.queries.stop == two.queries.start:
        queries = range(one.queries.start, two.queries.stop)
        if one.keys == two.keys and one.window == two.window == sees_all:
            return one._replace(queries=queries)
        # Later queries that see all keys of the earlier ones, and as many more as they are.
        if (
            one.window == two.window == is_causal
            and one.keys.start == two.keys.start
            and two.keys.stop - one.keys.stop == len(two.queries)
        ):
            return two._replace(queries=queries)
    return None


def _common(one: range, two: range) -> range:
    return range(max(one.start, two.start), min(one.stop, two.stop))


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
