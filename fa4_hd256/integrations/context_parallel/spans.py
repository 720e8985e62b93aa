"""Division of a sequence's rows among ranks, and of a mask into kernel calls.

A rank's rows are one or two spans of the sequence, concatenated in its tensors. The pairs that one
rank's queries see of another rank's keys are cut into `SpanPart`s; each is one kernel call.

A mask is given by distances of positions in the whole sequence. A kernel's window is bottom-right
aligned. Rows and keys that see nothing are cut off until both describe the same pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ...words import shown

#: Ways to divide a sequence. contiguous: one span per rank, in order. zigzag: twice as many spans
#: as ranks; rank r has spans r and -1 - r, so that all ranks have equal work under a causal mask.
ORDERS = ("contiguous", "zigzag")

#: Rows of a rank, as positions in the whole sequence.
Rows = tuple[range, ...]


def spans_by_rank(order: str, ranks: int, rows: int) -> tuple[Rows, ...]:
    """Return the spans of every rank, `rows` rows each. Raises ValueError for an unknown order, or
    an odd number of rows in order "zigzag"."""
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
    return rows // 2 if order == "zigzag" else rows


class Units(NamedTuple):
    """Coarse visibility of a mask by tiles: whether each `rows` queries see any of each `rows`
    keys."""

    rows: int
    seen: tuple[tuple[bool, ...], ...]


class PositionMask(NamedTuple):
    """Mask by positions in the whole sequence.

    left, right: keys before and behind the query's position; None: all. documents: offsets of
    packed documents, which do not see one another; None: the sequence is one document. by_place:
    scores depend on positions, so the positions of a part must be contiguous. units: of a mask by
    tiles, which has neither bounds nor documents. Spans then consist of whole units.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] | None = None
    by_place: bool = False
    units: Units | None = None

    @property
    def has_places(self) -> bool:
        return self.by_place or self.units is not None


class SpanPart(NamedTuple):
    """One call of a kernel.

    queries, keys: rows of a rank's tensors. window: (left, right), bottom-right aligned, as
    `flash_attn_func` takes it. documents: offsets of packed documents from 0, the same for queries
    and keys; None: one document. first: positions of the first query and key if the mask
    `has_places`.
    """

    queries: range
    keys: range
    window: tuple[int | None, int | None]
    documents: tuple[int, ...] | None = None
    first: tuple[int, int] | None = None

    @property
    def positions(self) -> tuple[range, range]:
        assert self.first is not None
        query, key = self.first
        return range(query, query + len(self.queries)), range(key, key + len(self.keys))


def local_rows(held: Rows, wanted: range) -> range:
    begin = 0
    for span in held:
        if span.start <= wanted.start and wanted.stop <= span.stop:
            return _moved(wanted, begin - span.start)
        begin += len(span)
    raise ValueError(f"positions {wanted} are not in one of the spans {held}")


@functools.lru_cache(maxsize=1024)
def parts_of(queries: Rows, keys: Rows, mask: PositionMask) -> tuple[SpanPart, ...]:
    """Return the parts of these keys that these queries see. No pair is in two parts."""
    parts: list[SpanPart] = []
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
                parts.append(moved)
            first_key += len(key_span)
        first_query += len(query_span)
    return tuple(parts if mask.has_places else _joined(parts))


@functools.lru_cache(maxsize=64)
def local_parts(
    rows: Rows, mask: PositionMask
) -> tuple[tuple[SpanPart, ...], tuple[SpanPart, ...]]:
    """Return `parts_of` local rows in two halves, for the start and the end of the work. A single
    part is cut between queries, but not one of packed documents, or with a mask by units."""
    parts = parts_of(rows, rows, mask)
    if len(parts) == 1 and mask.documents is None and mask.units is None:
        count = sum(map(len, rows))
        parts = tuple(
            part._replace(queries=_moved(part.queries, half.start))
            for half in (range(count // 2), range(count // 2, count))
            for part in parts_of(_cut_out(rows, half), rows, mask)
        )
    middle = (len(parts) + 1) // 2
    return parts[:middle], parts[middle:]


def _cut_out(held: Rows, rows: range) -> Rows:
    """Return the positions of some rows of a tensor that holds all spans."""
    positions, begin = [], 0
    for span in held:
        common = _common(rows, range(begin, begin + len(span)))
        if common:
            positions.append(_moved(common, span.start - begin))
        begin += len(span)
    return tuple(positions)


def _pieces(queries: range, keys: range, mask: PositionMask) -> list[SpanPart]:
    """Return the parts of two spans; their queries and keys are positions."""
    if mask.units is not None:
        return _of_units(queries, keys, mask.units)
    documents = mask.documents
    if documents is None:
        documents = (0, max(queries.stop, keys.stop))
    parts: list[SpanPart] = []
    diagonal: list[range] = []
    for begin, end in zip(documents, documents[1:]):
        document = range(begin, end)
        of_queries, of_keys = _common(queries, document), _common(keys, document)
        if not of_queries or not of_keys:
            continue
        if of_queries == of_keys:
            diagonal.append(of_queries)
            continue
        part = _cut(of_queries, of_keys, mask)
        if part is not None:
            parts.append(part)
    return parts + _on_diagonal(diagonal, mask)


def _of_units(queries: range, keys: range, units: Units) -> list[SpanPart]:
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


def _on_diagonal(documents: Sequence[range], mask: PositionMask) -> list[SpanPart]:
    """Return one call for all documents, or pieces of one, of the same positions."""
    if not documents:
        return []
    if len(documents) == 1:
        part = _cut(documents[0], documents[0], mask)
        return [] if part is None else [part]
    begin = documents[0].start
    # Documents are adjacent: the end of one is the start of the next.
    offsets = (*(document.start - begin for document in documents), documents[-1].stop - begin)
    rows = range(begin, documents[-1].stop)
    longest = max(map(len, documents))
    window = _simplified(mask.left, longest), _simplified(mask.right, longest)
    return [SpanPart(rows, rows, window, offsets)]


def _simplified(side: int | None, longest: int) -> int | None:
    return None if side is None or side >= longest - 1 else side


def _cut(queries: range, keys: range, mask: PositionMask) -> SpanPart | None:
    """Return the part of two spans of one document, without rows and keys that see nothing. Row i
    of n sees keys i + low to i + high of m. Rows -high to m - 1 - low see at least one key. Without
    the other rows no bound is behind the bottom-right diagonal."""
    rows, columns, distance = len(queries), len(keys), queries.start - keys.start
    low = -rows if mask.left is None else distance - mask.left
    high = columns if mask.right is None else distance + mask.right
    first, last = max(0, -high), min(rows, columns - low)
    if first >= last:
        return None
    first_key, last_key = max(0, first + low), min(columns, last + high)
    rows, columns, shift = last - first, last_key - first_key, first - first_key
    # The left bound is free if the last row sees all keys, the right one if the first row does.
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
    """Return one part for both, None if no call covers exactly both. Rows of `two` follow those of
    `one`."""
    if one.documents is not None or two.documents is not None:
        return None
    sees_all, is_causal = (None, None), (None, 0)
    if one.queries == two.queries and one.keys.stop == two.keys.start:
        # All queries see the earlier keys, and the later part has no bound on its left.
        if one.window == sees_all and two.window[0] is None:
            return two._replace(keys=range(one.keys.start, two.keys.stop))
    if one.queries.stop == two.queries.start:
        queries = range(one.queries.start, two.queries.stop)
        if one.keys == two.keys and one.window == two.window == sees_all:
            return one._replace(queries=queries)
        # The later queries see all keys of the earlier ones, and one more key per row.
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
