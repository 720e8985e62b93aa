"""How a backward is divided so that dS of a portion fits into the memory it may take.

dS of a whole call grows with the square of the length. So dK/dV and dQ run on portions, each a call
of its own: some key/value heads; else one or more sequences; else a range of queries with the keys
that any of them sees. What ranges of queries give to the same dK and dV is added up in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .backward_problem import BackwardProblem
from .sequences import PADDING

__all__ = ["Division", "Portion", "divide"]

@dataclass(frozen=True)
class Portion:
    """What goes through dK/dV and then dQ, in one launch of each.

    problem: the portion as a call of its own. heads_kv, batch, queries, keys: where it lies in the
    tensors of the whole call; packed sequences are one batch entry with all rows.
    """

    problem: BackwardProblem
    heads_kv: range
    batch: range
    queries: range
    keys: range


@dataclass(frozen=True)
class Division:
    """problem: the whole call, with the splits of every portion's dK and dV."""

    problem: BackwardProblem
    portions: tuple[Portion, ...]


def divide(problem: BackwardProblem, ds_bytes: int, clusters: int) -> Division:
    """Portions whose dS takes at most `ds_bytes`; one that keeps no dS if none is small enough.

    clusters: CTA pairs that the device holds at once.
    """
    heads_kv, sequences = problem.k_shape[2], problem.forward.sequences
    of_head = problem.ds_bytes_of_head
    if not of_head:
        return _undivided(problem)
    if ds_bytes >= of_head:
        return _by_heads(problem, min(ds_bytes // of_head, heads_kv), sequences, clusters)
    if problem.forward.ragged:
        return _undivided(problem)
    fitting = ds_bytes // (of_head // sequences)
    if fitting:
        heads = min(fitting, heads_kv)
        return _by_heads(problem, heads, fitting // heads, clusters)
    return _by_queries(problem, ds_bytes, clusters)


def _undivided(problem: BackwardProblem) -> Division:
    everything = (range(length) for length in _lengths(problem))
    return Division(problem, (Portion(problem, *everything),))


def _lengths(problem: BackwardProblem) -> tuple[int, int, int, int]:
    """Key/value heads, batch entries, rows of q, and rows of k."""
    batch, seqlen_q, _, _ = problem.forward.q_shape
    return problem.k_shape[2], batch, seqlen_q, problem.k_shape[1]


def _by_heads(
    problem: BackwardProblem, heads_kv: int, sequences: int, clusters: int
) -> Division:
    """So many key/value heads of so many sequences at a time; all sequences if there are any but
    dense ones."""
    some = heads_kv < problem.k_shape[2] or sequences < problem.forward.sequences
    # Each launch has the tiles of these only.
    splits = problem.splits_for(heads_kv, sequences, clusters) if some else problem.splits
    whole = replace(problem, keeps_ds=True, splits=splits)
    all_heads, all_batch, *rows = _lengths(problem)
    entries = sequences if sequences < problem.forward.sequences else all_batch
    portions = [
        _portion(whole, heads, batch, *map(range, rows))
        for batch in _chunks(all_batch, entries)
        for heads in _chunks(all_heads, heads_kv)
    ]
    return Division(whole, tuple(portions))


def _by_queries(problem: BackwardProblem, ds_bytes: int, clusters: int) -> Division:
    """One range of queries of one key/value head of one sequence at a time."""
    ranges = _query_ranges(problem, ds_bytes)
    if not ranges:
        return _undivided(problem)
    longest = max(len(queries) for queries, _ in ranges)
    of_range = replace(problem.forward, max_seqlen_q=longest)
    splits = replace(problem, forward=of_range).splits_for(1, 1, clusters)
    whole = replace(problem, keeps_ds=True, splits=splits, adds=True)
    heads_kv, batch, *_ = _lengths(problem)
    portions = [
        _portion(whole, heads, sequence, queries, keys)
        for sequence in _chunks(batch, 1)
        for heads in _chunks(heads_kv, 1)
        for queries, keys in ranges
    ]
    return Division(whole, tuple(portions))


def _query_ranges(problem: BackwardProblem, ds_bytes: int) -> list[tuple[range, range]]:
    """Ranges of queries, as few as dS of a head group allows, and the keys they see.

    Empty if dS of a single unit of queries does not fit.
    """
    _, _, seqlen_q, _ = _lengths(problem)
    row_bytes = problem.group * problem.forward.dtype.itemsize
    ends = [0]
    while ends[-1] < seqlen_q:
        begin = end = ends[-1]
        while end < seqlen_q:
            longer = end + PADDING
            keys = _visible_keys(problem, begin, min(longer, seqlen_q))
            if row_bytes * (longer - begin) * len(keys) > ds_bytes:
                break
            end = longer
        if end == begin:
            return []
        ends.append(min(end, seqlen_q))
    if problem.forward.options.window == (None, None):
        # All see all keys, so the last range need not be a rest.
        count = len(ends) - 1
        rows = -(-seqlen_q // (count * PADDING)) * PADDING
        ends = [min(i * rows, seqlen_q) for i in range(count + 1)]
    spans = [range(begin, end) for begin, end in itertools.pairwise(ends) if begin < end]
    return [(span, _visible_keys(problem, span.start, span.stop)) for span in spans]


def _visible_keys(problem: BackwardProblem, begin: int, end: int) -> range:
    """The keys that any of the queries [begin, end) may see; the mask is aligned to the end of
    both sequences."""
    left, right = problem.forward.options.window
    _, _, seqlen_q, seqlen_k = _lengths(problem)
    diagonal = seqlen_k - seqlen_q
    first = 0 if left is None else max(0, begin + diagonal - left)
    limit = seqlen_k if right is None else max(0, min(seqlen_k, end + diagonal + right))
    return range(min(first, limit), limit)


def _chunks(length: int, size: int) -> Iterator[range]:
    return (range(begin, min(begin + size, length)) for begin in range(0, length, size))


def _portion(
    whole: BackwardProblem, heads_kv: range, batch: range, queries: range, keys: range
) -> Portion:
    """These heads, batch entries and rows as a call of their own."""
    forward = whole.forward
    _, all_batch, seqlen_q, seqlen_k = _lengths(whole)
    *_, columns = whole.k_shape
    changes = {"q_shape": (len(batch), len(queries), len(heads_kv) * whole.group, columns)}
    if len(batch) < all_batch:
        changes["sequences"] = len(batch)
    if len(queries) < seqlen_q or len(keys) < seqlen_k:
        # The mask is aligned to the ends of the ranges, too; how far these lie from the whole
        # call's diagonal goes to the bounds.
        beyond = (keys.stop - queries.stop) - (seqlen_k - seqlen_q)
        left, right = forward.options.window
        window = left if left is None else left + beyond, right if right is None else right - beyond
        options = replace(forward.options, window=window)
        changes |= {"options": options, "max_seqlen_q": len(queries), "max_seqlen_k": len(keys)}
    k_shape = len(batch), len(keys), len(heads_kv), columns
    problem = replace(whole, forward=replace(forward, **changes), k_shape=k_shape)
    return Portion(problem, heads_kv, batch, queries, keys)
