"""A call with a KV cache: where the keys of each sequence lie, its new rows, and what a user can
get wrong of both, checked before anything is written; as `checks` otherwise.

Lengths, page numbers and positions lie on the device. On the CPU they are checked, on a GPU where
the user requests it (`environment.checks_pages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch

from .. import environment
from ..kernels.limits import HEAD_DIM
from ..kernels.nvfp4_format import BLOCK_SCALES, CACHE_DTYPES, NVFP4
from ..kernels.problem_class import KV_DTYPES, result_dtypes
from ..kernels.rows.sequences import CACHE_BATCH_IDX, CACHE_LEFTPAD, PAGE_TABLE
from ..words import shown
from . import checks, memory
from .forward_problem import Call
from .memory import check_device, check_tensor, memory_span
from .operator_arguments import CacheTensors, CacheValues
from .options import flags_of, is_sure, plain
from .process import is_intercepted

#: Sizes of tensors here are below: two of them and a row of 256 stay within 64 bits.
LARGEST_SIZE = 1 << 40

#: In a page table, a number that no page has.
NO_PAGE = -1

#: Rotary dimensions come in multiples of this, as in the field.
ROTARY_MULTIPLE = 16


# ---------------------------------------------------------------- the call


def _is_read(call: CacheTensors) -> bool:
    """Return True if contents are checked: on the CPU, and on a GPU where the user says so."""
    if is_intercepted():
        return False
    if call.q.device.type == "cpu":
        return True
    return environment.checks_pages() and not torch.cuda.is_current_stream_capturing()


def in_use(call: CacheTensors) -> CacheTensors:
    """Return the tensors of a call as a plan has them, checked: lengths as a tensor, and of
    page_table the rows of the sequences. Unchanged if it is called again.

    call: lengths, page_table, cache_batch_idx and cache_leftpad may be arguments of users. Raises
    TypeError or ValueError for what is not accepted."""
    check_caches(call.q, call.k_cache, call.v_cache, call.page_table, call.cu_seqlens_q)
    device, is_read, found = call.q.device, _is_read(call), _of_entries(call)
    if call.cache_leftpad is not None:
        leftpad = of_batch(CACHE_LEFTPAD, call.cache_leftpad, call.batch, device)
        found = found._replace(cache_leftpad=leftpad.contiguous())
    if call.lengths is not None:
        lengths = lengths_of(call.lengths, call.batch, call.capacity, device)
        if is_read:
            check_lengths(lengths, call.capacity)
        found = found._replace(lengths=lengths)
    if is_read and found.cache_leftpad is not None:
        checks.check_leftpad(found.cache_leftpad, found.lengths, call.capacity)
    return found


def _of_entries(call: CacheTensors) -> CacheTensors:
    """Return the tensors with the pages that cache_batch_idx chooses.

    With cache_batch_idx alone each entry of the cache counts as one page. A sequence for which it
    chooses a row that the page table has not reads the nearest one. It gets no pages to write to,
    so that none of its new rows is written."""
    entries, table = call.cache_batch_idx, call.page_table
    if entries is None:
        return call
    entries = of_batch(CACHE_BATCH_IDX, entries, call.batch, call.q.device)
    of_what = "the entries of the cache" if table is None else "the rows of page_table"
    if _is_read(call):
        count = len(call.k_cache) if table is None else len(table)
        check_within("cache_batch_idx holds", entries, count, of_what)
    if table is None:
        entries = entries.contiguous()
        return call._replace(cache_batch_idx=entries, new_page_table=entries[:, None])
    check_int32(PAGE_TABLE, table)
    if not table.shape[0]:
        raise ValueError(
            "page_table has no row for cache_batch_idx to choose; accepted: at least one row"
        )
    nearest = entries.clamp(0, table.shape[0] - 1)
    table, written = table.index_select(0, nearest), None
    if call.k is not None:
        written = table.masked_fill((entries != nearest)[:, None], NO_PAGE)
    return call._replace(page_table=table, new_page_table=written, cache_batch_idx=None)


def has_new_rows(call: CacheTensors, interleaved: Any) -> bool:
    """Return True if there are new rows in a call in use. Raises TypeError or ValueError."""
    k, q, offsets = call.k, call.q, call.cu_seqlens_k_new
    is_given = k is not None or call.v is not None
    if call.rotary_cos is not None or call.rotary_sin is not None:
        check_rotary(call.rotary_cos, call.rotary_sin, interleaved, q, is_given)
    elif call.rotary_seqlens is not None:
        raise ValueError(
            "rotary_seqlens is given without rotary_cos and rotary_sin; accepted: with them, since "
            "it holds positions in these tables"
        )
    if not is_given:
        if offsets is not None:
            raise ValueError(
                "cu_seqlens_k_new is given without k and v; accepted: with them, which it divides "
                "into sequences (cache_seqlens counts the rows in use)"
            )
        return False
    if call.lengths is None:
        raise ValueError(
            "cache_seqlens is None; accepted with k and v, which are written behind the rows in "
            "use: an int or a (batch,) int32 tensor"
        )
    check_new_rows({"k": k, "v": call.v}, call.k_cache, offsets, call.batch, q.dtype)
    if call.rotary_cos is not None:
        if k.dtype != q.dtype:
            raise TypeError(
                f"k is {k.dtype} with rotary_cos; accepted: {q.dtype}, like q (rows are rotated "
                "before they are rounded to the cache's dtype)"
            )
        if call.rotary_seqlens is not None:
            of_batch("rotary_seqlens", call.rotary_seqlens, call.batch, q.device)
    if offsets is not None and _is_read(call):
        check_offsets("cu_seqlens_k_new", offsets, k.shape[0])
    return True


def counted(lengths: torch.Tensor, k: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return the rows in use with new ones. offsets: cu_seqlens_k_new."""
    return lengths + (k.shape[1] if offsets is None else offsets.diff())


def check_cache_tensors(call: CacheTensors, interleaved: Any = True) -> None:
    """Raise TypeError or ValueError for tensors that are not accepted, whatever they hold."""
    has_new_rows(in_use(call), interleaved)
    if call.out is not None:
        memory.check_out(call.out, call.q)
    if not is_intercepted():
        caches = {"k_cache": call.k_cache, "v_cache": call.v_cache}
        if call.k_cache.dtype == NVFP4:
            caches |= {n: t for n in BLOCK_SCALES if (t := getattr(call, n)) is not None}
        for name, cache in caches.items():
            memory.check_not_overlapping(name, cache)
        memory.check_in_place(caches, "k and v, which are written in place")
        if call.out is not None:
            memory.check_writable(call.out, call[1:])


def resolve_cache_call(tensors: Sequence[Any], facts: tuple[Any, ...]) -> CacheValues:
    """Return the operator's values of a call, checked. tensors: the fields of `CacheTensors`.
    facts: begin with the fields of `Call`, the last one is rotary_interleaved."""
    call, interleaved = CacheTensors(*tensors), facts[-1]
    check_cache_tensors(call, interleaved)
    if not is_intercepted():
        # Each call checks this once its plan is found. A first call compiles that plan's kernels.
        check_memory(tensors)
    values = Call(*facts[: len(Call._fields)]).values(call.attention(call.lengths))
    return CacheValues(values, bool(interleaved))


def check_memory(tensors: Sequence[Any]) -> None:
    """Raise ValueError for caches and an out that PyTorch may not write to now, for caches that
    begin in one place, and for tensors of the call that lie in them. Block scales of caches in
    NVFP4 are written to like the caches. tensors: fields of `CacheTensors`.
    Each call checks this: neither modes nor addresses are part of the key of a plan."""
    out, k_cache, v_cache, q, k, v = tensors[:6]
    read = [("k", k), ("v", v)]
    if tensors[_ROTARY_COS] is not None:
        read.append(("q", q))
    begins, ends = zip(*[memory_span(rows) for _, rows in read], strict=True)
    first, last = min(begins), max(ends)
    written = [("k_cache", k_cache), ("v_cache", v_cache)]
    if k_cache.dtype == NVFP4:
        scales = zip(BLOCK_SCALES, tensors[_BLOCK_SCALES], strict=True)
        # The operator's body comes here before it refuses codes without scales.
        written += [(name, scale) for name, scale in scales if scale is not None]
    before: dict[int, str] = {}
    for name, cache in written:
        memory.check_changeable(name, cache)
        begin, end = memory_span(cache)
        if begin in before and end > begin:
            raise ValueError(
                f"{before[begin]} and {name} lie in one place; accepted: memory of its own for "
                "each, as both are written to"
            )
        before[begin] = name
        # Rows mostly lie all before a cache, or all behind it.
        if first < end and begin < last:
            for of_rows, rows in read:
                memory.check_apart(cache, [rows], f"{name} lies in the memory of {of_rows}")
    if out is not None:
        memory.check_writable_again(out, tensors[1:])


_ROTARY_COS = CacheTensors._fields.index("rotary_cos")
_FIRST_SCALE = CacheTensors._fields.index(BLOCK_SCALES[0])
_BLOCK_SCALES = slice(_FIRST_SCALE, _FIRST_SCALE + len(BLOCK_SCALES))
assert CacheTensors._fields[_BLOCK_SCALES] == BLOCK_SCALES


def check_contents(call: CacheTensors, ordered: bool) -> torch.Tensor:
    """Raise ValueError for lengths, numbers of pages and positions that are not accepted, where
    contents are checked. Return the rows in use with the new ones there, else before the call.

    ordered: whether queries have positions one after the other, as with a mask that has an order of
    them; else all have that of the first new row, as in the field."""
    if not _is_read(call):
        return call.lengths
    table = call.page_table if call.new_page_table is None else call.new_page_table
    if call.page_table is not None:
        check_entries(call.page_table, call.batch, call.q.device)
    new = _Positions.of(call.k, call.cu_seqlens_k_new)
    written = new.behind(call.lengths)
    check_within("a new row would be row", written, call.capacity, "the rows of the cache")
    if table is not None:
        rows = call.k_cache.shape[1]
        entries = table[new.sequence, written // rows].long()
        check_within(
            "a new row belongs to page or batch entry",
            entries,
            len(call.k_cache),
            "those of the cache",
        )
        kind = "batch entry" if call.page_table is None else "page"
        _check_places_apart(entries * rows + written % rows, rows, kind)
    if call.rotary_cos is not None:
        queries = _Positions.of(call.q, call.cu_seqlens_q)
        if not ordered:
            queries = queries._replace(offset=torch.zeros_like(queries.offset))
        first = call.lengths if call.rotary_seqlens is None else call.rotary_seqlens
        for positions in (new.behind(first), queries.behind(first)):
            check_within(
                "a row to be rotated is at position",
                positions,
                len(call.rotary_cos),
                "the positions of rotary_cos",
            )
    return counted(call.lengths, call.k, call.cu_seqlens_k_new)


def _check_places_apart(places: torch.Tensor, rows: int, kind: str) -> None:
    """Raise ValueError for two new rows with one place in the cache. places: integers, entry * rows
    + row. rows: of an entry. kind: of the entries. Waits for the device."""
    found, counts = places.unique(return_counts=True)
    twice = found[counts > 1]
    if twice.numel():
        entry, row = divmod(int(twice[0]), rows)
        raise ValueError(
            f"two new rows would be row {row} of {kind} {entry} of the cache; accepted: a place of "
            "its own for each"
        )


class _Positions(NamedTuple):
    """Sequence of each row of a tensor, and its number there: int64 of its leading dimensions."""

    sequence: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, offsets: torch.Tensor | None) -> _Positions:
        """rows: (batch, length, heads, 256), or (total, heads, 256) with offsets, (batch + 1,)
        int32 that ascend from 0 to the total."""
        count = torch.arange(rows.shape[0], device=rows.device)
        if offsets is None:
            offset = torch.arange(rows.shape[1], device=rows.device)
            shape = rows.shape[:2]
            return cls(count[:, None].expand(shape), offset.expand(shape))
        # Of equal offsets, those of empty sequences, the last one begins the sequence of the row.
        sequence = torch.searchsorted(offsets, count.int(), right=True) - 1
        return cls(sequence, count - offsets[sequence])

    def behind(self, first: torch.Tensor) -> torch.Tensor:
        """Return the position of each row in its sequence; first: (batch,) of the first rows."""
        return first[self.sequence] + self.offset


# ---------------------------------------------------------------- its arguments


def refuse_second_parts() -> NoReturn:
    raise NotImplementedError(
        "qv is given; accepted: None. Not offered: the second part of a query (MLA): queries, keys "
        "and values have head_dim 256 alike"
    )


def check_beside_tree(rotary_cos: Any) -> None:
    """Raise ValueError for what does not go with tree_mask."""
    if rotary_cos is not None:
        raise ValueError(
            "rotary_cos is given with tree_mask; accepted: None, since it rotates rows by "
            "positions one after the other, and a node's is its depth: rotate q and k before the "
            "call"
        )


def check_no_gradients(names: Sequence[str], *given: Any) -> None:
    """Raise NotImplementedError if gradients would be recorded. given: arguments of these names."""
    # Written out, since each call comes here. What is no tensor is refused with the plan.
    for index, tensor in enumerate(given):
        if tensor is not None and getattr(tensor, "requires_grad", False):
            raise NotImplementedError(
                f"{names[index]} requires gradients, and flash_attn_with_kvcache has none; "
                "accepted: a call under torch.no_grad(), or flash_attn_varlen_func"
            )


def lengths_of(cache_seqlens: Any, batch: int, capacity: int, device: torch.device) -> torch.Tensor:
    """Return (batch,) int32 rows in use. cache_seqlens: that, or an int for all; capacity: rows
    that a sequence of the cache has."""
    if isinstance(cache_seqlens, torch.Tensor):
        return of_batch("cache_seqlens", cache_seqlens, batch, device)
    cache_seqlens = plain(cache_seqlens)
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (int, torch.SymInt)):
        raise TypeError(
            f"cache_seqlens must be an int or a (batch,) int32 tensor, got {shown(cache_seqlens)}"
        )
    if is_sure(cache_seqlens < 0) or is_sure(cache_seqlens > capacity):
        raise _beyond(cache_seqlens, capacity, "the rows of the cache")
    # torch.full takes a SymInt, which its signature does not say.
    rows = cast(int, cache_seqlens)
    return torch.full((batch,), rows, dtype=torch.int32, device=device)


def check_whole(given: dict[str, Any]) -> None:
    """Raise TypeError for what is no int, ValueError for less than 1 or what no shape can have."""
    for name, number in given.items():
        number = plain(number)
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {shown(number)}")
        if is_sure(number < 1) or is_sure(number >= LARGEST_SIZE):
            raise ValueError(f"{name} is {number}; accepted: 1 to {LARGEST_SIZE - 1}")


def check_lengths(lengths: torch.Tensor, capacity: int, of: str = "the rows of the cache") -> None:
    """Rows in use are no more than `of` says. Waits for the device."""
    if ((lengths < 0) | (lengths.long() > capacity)).any():
        raise _beyond(lengths.tolist(), capacity, of)


def _beyond(given: int | torch.SymInt | list[int], capacity: int, of: str) -> ValueError:
    return ValueError(f"cache_seqlens is {given}; accepted: 0 to {capacity}, {of}")


def check_int32(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor, got {shown(tensor)}")


def of_batch(name: str, tensor: Any, batch: int, device: torch.device) -> torch.Tensor:
    """Return the tensor; raise ValueError unless it is (batch,) int32."""
    check_int32(name, tensor)
    if tuple(tensor.shape) != (batch,) or tensor.device != device:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; accepted: ({batch},), one "
            f"number a sequence, on {device} like q"
        )
    return tensor


def check_caches(q: Any, k_cache: Any, v_cache: Any, page_table: Any, offsets: Any) -> None:
    """Kinds and dimensions that what follows relies on. offsets: cu_seqlens_q."""
    for name, cache in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache)
        memory.require_dense(name, cache)
        if name == "q" and not cache.ndim:
            raise ValueError("q has no dimension; accepted: (batch, seqlen_q, heads, 256)")
        if name != "q" and cache.ndim != 4:
            raise ValueError(
                f"{name} has {cache.ndim} dimensions, shape {tuple(cache.shape)}; accepted: 4, "
                f"(batch, rows, heads_kv, {HEAD_DIM}), or (pages, page_size, heads_kv, {HEAD_DIM}) "
                "with page_table"
            )
    if page_table is not None and getattr(page_table, "ndim", None) != 2:
        raise ValueError(
            f"page_table is {shown(page_table)}; accepted: a (batch, pages of a sequence) int32 "
            "tensor"
        )
    if page_table is not None:
        checks.check_pages(k_cache.shape)
    if offsets is not None and (getattr(offsets, "ndim", None) != 1 or not offsets.numel()):
        raise ValueError(f"cu_seqlens_q is {shown(offsets)}; accepted: a (batch + 1,) int32 tensor")


def check_entries(table: torch.Tensor, batch: int, device: torch.device) -> None:
    check_int32("page_table", table)
    if table.shape[0] != batch or not table.shape[1] or table.device != device:
        raise ValueError(
            f"page_table has shape {tuple(table.shape)} on {table.device}; accepted: ({batch}, "
            f"pages of the longest sequence), at least one, on {device} like q"
        )


def check_new_rows(
    new: dict[str, Any],
    cache: torch.Tensor,
    offsets: torch.Tensor | None,
    batch: int,
    dtype: torch.dtype,
) -> None:
    """k and v, to be written to a cache like `cache`. offsets: cu_seqlens_k_new; dtype: of q, whose
    results' dtypes they may have where the cache is in one of `CACHE_DTYPES`."""
    for name, tensor in new.items():
        if not isinstance(tensor, torch.Tensor):
            kind = "None" if tensor is None else type(tensor).__name__
            raise TypeError(f"{name} is {kind}; accepted: k and v, both tensors or both None")
        memory.require_dense(name, tensor)
    wanted: tuple[int | None, ...] = (batch, None)
    if offsets is not None:
        wanted = (None,)
        check_int32("cu_seqlens_k_new", offsets)
        checks.check_ragged(cache, {"cu_seqlens_k_new": offsets})
        if offsets.numel() != batch + 1:
            raise ValueError(
                f"cu_seqlens_k_new has {offsets.numel()} entries; accepted: {batch + 1}, offsets "
                f"of {batch} sequences and the total"
            )
    wanted = (*wanted, cache.shape[2], HEAD_DIM)
    for name, tensor in new.items():
        shape = tuple(tensor.shape)
        fits = len(shape) == len(wanted) and all(
            most is None or size == most for size, most in zip(shape, wanted)
        )
        if not fits or shape != tuple(new["k"].shape):
            form = ", ".join("any" if size is None else str(size) for size in wanted)
            raise ValueError(
                f"{name} has shape {shape}; accepted: ({form}), heads like the cache's, k and v of "
                "one shape (packed with cu_seqlens_k_new, else with a batch)"
            )
        dtypes = result_dtypes(dtype) if cache.dtype in CACHE_DTYPES else (cache.dtype,)
        if cache.dtype in KV_DTYPES:
            dtypes = (cache.dtype, *dtypes)
        if tensor.dtype not in dtypes or tensor.device != cache.device:
            accepted = " or ".join(map(str, dtypes))
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device}; accepted: {accepted} on "
                f"{cache.device}, like the cache"
            )
    if new["k"].dtype != new["v"].dtype:
        raise TypeError(f"k is {new['k'].dtype}, v {new['v'].dtype}; accepted: one dtype of both")


def check_rotary(cos: Any, sin: Any, interleaved: Any, q: torch.Tensor, appends: bool) -> None:
    """Tables of rotary embedding, which goes with new rows only."""
    if not appends:
        raise ValueError(
            "rotary_cos and rotary_sin are given without k and v; accepted: with them (queries "
            "alone can be rotated before the call)"
        )
    if q.dtype in KV_DTYPES:
        raise TypeError(
            f"q is {q.dtype} with rotary_cos; accepted: None, since rows are rotated before they "
            f"are rounded to {q.dtype}"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, torch.Tensor):
            kind = "None" if table is None else type(table).__name__
            raise TypeError(f"{name} is {kind}; accepted: both tables, or neither")
        if table.dtype not in (q.dtype, torch.float32):
            raise TypeError(f"{name} has dtype {table.dtype}; accepted: {q.dtype} or torch.float32")
        check_device(name, table.device, q.device, "q")
    if cos.dtype != sin.dtype:
        raise TypeError(
            f"rotary_cos is {cos.dtype}, rotary_sin {sin.dtype}; accepted: one dtype of both"
        )
    rotated = 2 * cos.shape[-1] if cos.ndim == 2 and len(cos) else 0
    if cos.shape != sin.shape or not 0 < rotated <= HEAD_DIM or rotated % ROTARY_MULTIPLE:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)}, rotary_sin {tuple(sin.shape)}; accepted: "
            f"(positions, rotary_dim / 2) both, at least one position, rotary_dim a multiple of "
            f"{ROTARY_MULTIPLE} up to {HEAD_DIM}"
        )
    flags_of(rotary_interleaved=interleaved)


def check_offsets(name: str, offsets: torch.Tensor, total: int) -> None:
    """Offsets ascend from 0 to total. Waits for the device."""
    if offsets[0] != 0 or offsets[-1] != total or (offsets.diff() < 0).any():
        raise ValueError(
            f"{name} is {offsets.tolist()}; accepted: offsets that ascend from 0 to {total}"
        )


def check_within(what: str, found: torch.Tensor, most: int, of: str) -> None:
    """All of found are in [0, most). Waits for the device."""
    wrong = found[(found < 0) | (found >= most)]
    if wrong.numel():
        raise ValueError(f"{what} {int(wrong[0])}; accepted: 0 to {most - 1}, {of}")
