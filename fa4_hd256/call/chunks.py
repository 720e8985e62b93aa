"""Chunks of a backward, so that dS of each fits into the memory it may take.

dS of a whole call grows with the square of the length. So the kernels run on chunks, each a call of
its own: some key/value heads; else one or more sequences; else, except in windows, a range of
queries with the keys that any of them sees, or under a block mask some query heads of a group, and
of these a range of queries with all keys. What several chunks give to the same dK and dV is added
up in float32.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..gpus.devices import Gpu
from ..kernels.backward.ds_tiles import BLOCK_TILES, DS_BLOCK, count_blocks, count_tiles
from ..kernels.functions.kernel_functions import ScoreOrigin
from ..kernels.rows.sequences import DS_BEGINS, PADDING
from .backward_problem import BackwardProblem
from .forward_problem import is_masked
from .named_configs import spelled


@dataclass(frozen=True)
class Chunk:
    """Chunk: what goes through one launch of each kernel.

    problem: the chunk as a call of its own. heads, heads_kv, sequences, queries, keys: its range in
    the whole call; heads: of the queries. Some of the sequences and of the rows only where all
    sequences are dense; otherwise the rows are those of the tensors.
    """

    problem: BackwardProblem
    heads: range
    heads_kv: range
    sequences: range
    queries: range
    keys: range

    def lists_in(self, table: Any) -> Any:
        """The part of a block mask's table, (1 or batch, 1 or heads, ...) as `TileMask.blocks`,
        that is of the chunk's sequences and heads; a tensor or a view of one."""
        if table.shape[0] > 1:
            table = table.narrow(0, self.sequences.start, len(self.sequences))
        if table.shape[1] > 1:
            table = table.narrow(1, self.heads.start, len(self.heads))
        return table

    def has_all_lists(self, table: Any) -> bool:
        """Return True if a table lists the chunk's queries and no others. The chunk has all
        keys."""
        return table.shape[2] <= count_blocks(len(self.keys)) + count_blocks(len(self.queries))


@dataclass(frozen=True)
class BackwardDivision:
    """Chunks of a backward, in order. problem: the call, with the head_parts of every chunk."""

    problem: BackwardProblem
    chunks: tuple[Chunk, ...]


def divide(problem: BackwardProblem, ds_bytes: int, gpu: Gpu) -> BackwardDivision:
    """Chunks whose dS takes at most `ds_bytes`; one without dS if none is small enough."""
    heads_kv, sequences = problem.k_shape[2], problem.forward.sequences
    of_head = problem.ds_bytes_of_head
    if is_masked(problem.forward.ragged):
        return _of_block_mask(problem, ds_bytes, gpu)
    if not of_head or not ds_bytes:
        return _undivided(problem, gpu)
    if ds_bytes >= of_head:
        return _by_heads(problem, min(ds_bytes // of_head, heads_kv), sequences, gpu)
    if problem.forward.ragged:
        return _undivided(problem, gpu)
    division = _by_sequences(problem, ds_bytes, gpu)
    if division is not None:
        return division
    if None not in problem.forward.options.window:
        # A band that does not fit is a wide one. Keys of its ranges would be those of several, and
        # what these add to them soon takes more than to recompute dS.
        return _undivided(problem, gpu)
    return _by_queries(problem, ds_bytes, gpu)


def least_ds_bytes(problem: BackwardProblem) -> int:
    """Return the least ds_bytes with which `divide` raises nothing."""
    is_needed = is_masked(problem.forward.ragged) and problem.ds_bytes_of_head
    return _least_of_group(problem)[1] if is_needed else 0


def _of_block_mask(problem: BackwardProblem, ds_bytes: int, gpu: Gpu) -> BackwardDivision:
    """Split by heads and sequences, else in a group; NotImplementedError if one block exceeds."""
    heads_kv, sequences, *_ = _lengths(problem)
    if not problem.ds_bytes_of_head:
        return _by_heads(problem, heads_kv, sequences, gpu)
    division = _by_sequences(problem, ds_bytes, gpu) or _of_group(problem, ds_bytes, gpu)
    if division is None:
        heads, least = _least_of_group(problem)
        config = spelled(problem.forward.kernels.config("backward"))
        raise NotImplementedError(
            f"gradients with block_mask keep dS of at least {DS_BLOCK} queries of {heads} query "
            f"head(s) of a sequence with all its keys, {least} bytes here; ds_bytes allows "
            f"{ds_bytes}. Accepted: backward_config={config}(ds_bytes={least}) or more"
        )
    return division


def _by_sequences(problem: BackwardProblem, ds_bytes: int, gpu: Gpu) -> BackwardDivision | None:
    """Split into as many key/value heads of a sequence as fit, and of all of them as many
    sequences; None where not one fits. dS is not empty."""
    heads_kv, sequences, *_ = _lengths(problem)
    fitting = ds_bytes // (problem.ds_bytes_of_head // sequences)
    if not fitting:
        return None
    heads = min(fitting, heads_kv)
    return _by_heads(problem, heads, min(fitting // heads, sequences), gpu)


def _of_group(problem: BackwardProblem, ds_bytes: int, gpu: Gpu) -> BackwardDivision | None:
    """Some query heads of a group of one sequence at a time, as many as fit with all queries; where
    none does, as many as fit with a block of queries, and as many of these. None where not even a
    block fits.

    Which tiles of dS a range has is known on the device alone, so there is room for all of them, or
    as many as the whole mask lists, and every range of queries has all keys.
    """
    heads_kv, sequences, seqlen_q, seqlen_k = _lengths(problem)
    heads, of_block = _least_of_group(problem)
    of_heads = heads * problem.ds_bytes_of_head // (sequences * problem.group)
    fitting, blocks = ds_bytes // of_block, count_blocks(seqlen_q)
    if not fitting:
        return None
    if ds_bytes >= of_heads:
        each, rows = _even(problem.group, ds_bytes // of_heads * heads), blocks * DS_BLOCK
    else:
        each = _even(problem.group, fitting * heads)
        # Blocks of queries that fit with so many heads.
        rows = _even(blocks, fitting * heads // each) * DS_BLOCK
    whole = replace(problem, keeps_ds=True, adds=True)
    q_shape = whole.forward.q_shape
    of_part = replace(
        whole.forward,
        q_shape=(*q_shape[:2], each * heads_kv, q_shape[3]),
        max_seqlen_q=min(rows, seqlen_q),
    )
    parts = replace(whole, forward=of_part).head_parts_for(1, 1, gpu)
    whole = replace(whole, head_parts=parts)
    chunks = [
        _chunk(whole, range(head, head + 1), sequence, queries, range(seqlen_k), of_group)
        for sequence in _ranges(sequences, 1)
        for head in range(heads_kv)
        for of_group in _ranges(problem.group, each)
        for queries in _ranges(seqlen_q, rows)
    ]
    return BackwardDivision(whole, tuple(chunks))


def _least_of_group(problem: BackwardProblem) -> tuple[int, int]:
    """Return (query heads of a group that may be by themselves, bytes of dS of a block of their
    queries in one sequence): one, but copies of an expanded head have gradients of their own, and
    their heads stay together."""
    heads = problem.group if problem.copies > 1 else 1
    tiles = problem.of_listed(count_tiles((DS_BLOCK, problem.k_shape[1]), (None, None)))
    return heads, heads * tiles * problem.tile_elements * problem.forward.dtype.itemsize


def _undivided(problem: BackwardProblem, gpu: Gpu) -> BackwardDivision:
    heads_kv, sequences, *_ = _lengths(problem)
    problem = replace(problem, head_parts=problem.head_parts_for(heads_kv, sequences, gpu))
    # Kernels that store no dS do not ask where it lies.
    ragged = tuple(name for name in problem.forward.ragged if name != DS_BEGINS)
    problem = replace(problem, forward=replace(problem.forward, ragged=ragged))
    everything = heads_kv * problem.group, *_lengths(problem)
    return BackwardDivision(problem, (Chunk(problem, *map(range, everything)),))


def _lengths(problem: BackwardProblem) -> tuple[int, int, int, int]:
    """Key/value heads, sequences, rows of q, and rows of k."""
    forward = problem.forward
    return problem.k_shape[2], forward.sequences, forward.q_shape[1], problem.k_shape[1]


def _by_heads(
    problem: BackwardProblem, heads_kv: int, sequences: int, gpu: Gpu
) -> BackwardDivision:
    """Split into at most so many key/value heads of so many sequences at a time; all sequences if
    there are any but dense ones."""
    whole = replace(problem, keeps_ds=True)
    all_heads, all_sequences, *rows = _lengths(problem)
    heads_kv, sequences = _even(all_heads, heads_kv), _even(all_sequences, sequences)
    # Each launch has the tiles of these only.
    whole = replace(whole, head_parts=whole.head_parts_for(heads_kv, sequences, gpu))
    chunks = [
        _chunk(whole, heads, some_sequences, *map(range, rows))
        for some_sequences in _ranges(all_sequences, sequences)
        for heads in _ranges(all_heads, heads_kv)
    ]
    return BackwardDivision(whole, tuple(chunks))


def _by_queries(problem: BackwardProblem, ds_bytes: int, gpu: Gpu) -> BackwardDivision:
    """One range of queries of one key/value head of one sequence at a time."""
    ranges = _query_ranges(problem, ds_bytes)
    if not ranges:
        return _undivided(problem, gpu)
    whole = replace(problem, keeps_ds=True, adds=True)
    longest = max(len(queries) for queries, _ in ranges)
    of_range = replace(whole, forward=replace(problem.forward, max_seqlen_q=longest))
    whole = replace(whole, head_parts=of_range.head_parts_for(1, 1, gpu))
    heads_kv, sequences, *_ = _lengths(problem)
    chunks = [
        _chunk(whole, heads, sequence, queries, keys)
        for sequence in _ranges(sequences, 1)
        for heads in _ranges(heads_kv, 1)
        for queries, keys in ranges
    ]
    return BackwardDivision(whole, tuple(chunks))


def _query_ranges(problem: BackwardProblem, ds_bytes: int) -> list[tuple[range, range]]:
    """Ranges of queries, as few as dS of a head group allows, and the keys they see. Every range
    has some: queries that see none take no memory, so they are in that of the first ones that do.
    Empty if dS of a single unit of queries does not fit."""
    _, _, seqlen_q, seqlen_k = _lengths(problem)
    mask = (seqlen_q, seqlen_k), problem.forward.options.window
    count = len(_ends_of_ranges(problem, ds_bytes))
    if not count:
        return []
    # As many of the least memory, so that none is a rest.
    each = problem.group * BLOCK_TILES**2 * problem.tile_elements * problem.forward.dtype.itemsize
    bounds = range(each, ds_bytes + 1, each)
    least = bisect.bisect_left(
        bounds, True, key=lambda bound: 0 < len(_ends_of_ranges(problem, bound)) <= count
    )
    ends = _ends_of_ranges(problem, bounds[least])
    spans = itertools.starmap(range, itertools.pairwise([0, *ends]))
    return [(span, visible_keys(span.start, span.stop, *mask)) for span in spans]


def _ends_of_ranges(problem: BackwardProblem, ds_bytes: int) -> list[int]:
    """Return the ends of the longest ranges of queries that fit; none if no single unit does."""
    seqlen_q, ends_of_ranges = problem.forward.q_shape[1], [0]
    while ends_of_ranges[-1] < seqlen_q:
        begin = ends_of_ranges[-1]

        def taken(end: int, begin: int = begin) -> int:
            return _bytes_of_range(problem, range(begin, min(end, seqlen_q)))

        ends = range(begin + PADDING, seqlen_q + PADDING, PADDING)
        fitting = bisect.bisect_right(ends, ds_bytes, key=taken)
        if not fitting:
            return []
        ends_of_ranges.append(min(ends[fitting - 1], seqlen_q))
    return ends_of_ranges[1:]


def _bytes_of_range(problem: BackwardProblem, queries: range) -> int:
    """Memory that dS of a range of queries takes, of one key/value head of one sequence."""
    _, _, seqlen_q, seqlen_k = _lengths(problem)
    window = problem.forward.options.window
    keys = visible_keys(queries.start, queries.stop, (seqlen_q, seqlen_k), window)
    if not keys:
        return 0
    tiles = count_tiles((len(queries), len(keys)), _window_of(problem, queries, keys))
    return problem.group * tiles * problem.tile_elements * problem.forward.dtype.itemsize


def _window_of(
    problem: BackwardProblem, queries: range, keys: range
) -> tuple[int | None, int | None]:
    """Return the window of a call of these ranges.  The mask is aligned to their ends, too; how far
    these lie from the whole call's diagonal goes to the bounds."""
    _, _, seqlen_q, seqlen_k = _lengths(problem)
    beyond = (keys.stop - queries.stop) - (seqlen_k - seqlen_q)
    left, right = problem.forward.options.window
    return left if left is None else left + beyond, right if right is None else right - beyond


def visible_keys(
    begin: int, end: int, lengths: tuple[int, int], window: tuple[int | None, int | None]
) -> range:
    """The keys that any of the queries [begin, end) may see; the mask is aligned to the end of
    both sequences. lengths: of queries and keys. window: (left, right), None for unbounded."""
    (seqlen_q, seqlen_k), (left, right) = lengths, window
    diagonal = seqlen_k - seqlen_q
    first = 0 if left is None else max(0, begin + diagonal - left)
    limit = seqlen_k if right is None else max(0, min(seqlen_k, end + diagonal + right))
    return range(min(first, limit), limit)


def _even(length: int, most: int) -> int:
    """Return how many at a time, so that none of as few chunks as can be is a rest."""
    return -(-length // -(-length // most)) if length else most


def _ranges(length: int, size: int) -> Iterator[range]:
    return (range(begin, min(begin + size, length)) for begin in range(0, length, size))


def _chunk(
    whole: BackwardProblem,
    heads_kv: range,
    sequences: range,
    queries: range,
    keys: range,
    of_group: range | None = None,
) -> Chunk:
    """Return these heads, sequences and rows as a call of their own. of_group: query heads of the
    group of the only key/value head, all if None."""
    forward, group = whole.forward, whole.group
    heads = range(heads_kv.start * group, heads_kv.stop * group)
    if of_group is not None:
        heads = heads[of_group.start : of_group.stop]
    (batch_q, seqlen_q, *_), (batch_k, seqlen_k, _, columns) = forward.q_shape, whole.k_shape
    changes: dict[str, Any] = {}
    if len(sequences) < forward.sequences:
        batch_q = batch_k = changes["sequences"] = len(sequences)
    if len(queries) < seqlen_q or len(keys) < seqlen_k:
        options = replace(forward.options, window=_window_of(whole, queries, keys))
        changes |= {"options": options, "max_seqlen_q": len(queries), "max_seqlen_k": len(keys)}
    changes["q_shape"] = batch_q, len(queries), len(heads), columns
    k_shape = batch_k, len(keys), len(heads_kv), columns
    origin = ScoreOrigin(
        sequences.start,
        heads.start,
        queries.start,
        keys.start,
        seqlen_q - len(queries),
        seqlen_k - len(keys),
    )
    problem = replace(whole, forward=replace(forward, **changes), k_shape=k_shape, origin=origin)
    return Chunk(problem, heads, heads_kv, sequences, queries, keys)
