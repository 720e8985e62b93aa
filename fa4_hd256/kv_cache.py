"""`flash_attn_with_kvcache`: attention over a cache of keys and values, with new rows of them
written to it first.

A call without new rows is one of the attention alone (`interface.attend_sequences`). One with new
rows is a single plan, `_plan`: the kernel that writes rows, then the attention. It is found by the
call's tensors in one tuple, in the order of `_NAMES`. Shapes, dtypes and options are checked when
it is made (`_resolved`), before anything is written; where tensors lie at every call
(`_check_memory`). Where something intercepts calls (`is_intercepted`) there is no such plan: the
operator `append_rows` is called, then the attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import environment, plans
from .call import cache_checks, checks, memory
from .call.autocast import autocast, is_autocasting
from .call.descales import descale_of
from .call.forward_problem import Call, bounded, check_operator
from .call.new_rows import NewRows
from .call.operator_arguments import ForwardTensors
from .call.options import BY_RULE, NO_WINDOW, Options
from .call.part_lists import marked
from .call.process import is_intercepted, refuse_tangents
from .call.tree_mask import tree_words
from .interface import NO_TENSORS, attend_sequences, read_options
from .kernels.functions.score_change import SCORE_MOD
from .kernels.problem_class import DESCALES
from .kernels.rows.sequences import CACHE_BATCH_IDX, CACHE_LEFTPAD, PART_LIST, TREE_WORDS
from .operators import append_rows
from .run.append import add_append
from .run.append_arguments import AppendOptions, AppendTensors
from .run.forward import ForwardWork, add_forward, work_of
from .run.plan import LaunchPlan, PlanBuilder
from .score_mods import ScoreMod

__all__ = ["flash_attn_with_kvcache"]

#: Arguments that may require gradients, which there are none of.
_DIFFERENTIABLE = (
    "q", "k_cache", "v_cache", "k", "v", "learnable_sink", "out", "rotary_cos", "rotary_sin",
    "k_descale", "v_descale",
)  # fmt: skip
#: In a page table, a number that no page has.
NO_PAGE = -1


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = BY_RULE,
    return_lse: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    batch_invariant: bool = False,
    config: Any = None,
    use_clc: bool | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over a cache, after k and v, if given, were written to it in place.

    All arguments behind v are keyword-only. The result is one tensor unless return_lse is True.

    q: (batch, seqlen_q, heads, 256), or (total_q, heads, 256) with cu_seqlens_q and max_seqlen_q,
        which may be a tensor as of `flash_attn_varlen_func`.
    k_cache, v_cache: (batch, rows, heads_kv, 256), or with page_table (pages, page_size, heads_kv,
        256), page_size a multiple of 16; any strides that `flash_attn_func` reads in place.
    k, v: (batch, seqlen_new, heads_kv, 256), or (total_new, heads_kv, 256) with cu_seqlens_k_new:
        rows written behind those in use, and attended to. The cache must have room for them, and no
        two sequences may be given the same rows. cache_seqlens stays as it is.
    cache_seqlens: rows in use before the call: an int, or (batch,) int32; None for all, which k and
        v do not allow. No more than the cache has: an int, or a tensor on the CPU, that says more
        is an error; one on a GPU, which is not read, is taken for all rows.
    cache_batch_idx: (batch,) int32, the entry of the cache of each sequence, or the row of
        page_table; the cache, or the table, then has any batch. Of an entry that there is not the
        nearest one is read, and none is written to.
    cache_leftpad: (batch,) int32, the first row of each sequence, with page_table too;
        cache_seqlens counts the rows before it, which may hold anything, NaN too.
    page_table: (batch, pages) int32 numbers of the pages of each sequence.
    cu_seqlens_k_new: (batch + 1,) int32 offsets of packed k and v; nothing without these.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), typed like q or float32: rotary embedding
        of the first rotary_dim elements of k, at the positions cache_seqlens + i, and of q: at
        cache_seqlens + i if causal or with a window, else at cache_seqlens. Only with k and v.
    rotary_interleaved: whether elements 2i and 2i + 1 are a pair, or i and i + rotary_dim / 2.
    rotary_seqlens: (batch,) int32, in the place of cache_seqlens in those positions.
    max_seqlen_k: a bound on the rows in use with page_table, new ones too, that num_splits follows
        from; None for as many as a row of page_table holds.
    k_descale, v_descale: as of `flash_attn_varlen_func`, with caches in float8_e4m3fn. Rows of k
        and v, typed like q, are then divided by the scales of where they go, rounded to nearest
        and kept within 448; rows in float8_e4m3fn are written as they are.
    score_mod: as of `flash_attn_varlen_func`, new rows among the keys.
    tree_mask: as of `flash_attn_varlen_func`; the last keys are the new rows where k and v are
        given. Not with rotary_cos, since rows have positions one after the other there.
    out: as of `flash_attn_varlen_func`; not where the caches lie.
    scheduler_metadata: of `get_scheduler_metadata`, for the rows in use with the new ones among
        them, in place of num_splits.
    qv: not offered; None.
    The other arguments are those of `flash_attn_varlen_func`, whose errors call the caches k and v.

    Nothing waits for the device, so that CUDA graphs can hold calls. On the CPU, and on a GPU where
    FA4_HD256_CHECK_PAGES is 1, a ValueError names an entry that there is not, a row of k and v that
    has no place in the cache (else it is not written), a position past rotary_cos (else NaN).

    Returns out like q, or (out, lse); lse: float32 (batch, heads, seqlen_q), or (heads, total_q)
    with cu_seqlens_q. There are no gradients.

    Raises TypeError or ValueError as `flash_attn_varlen_func` does, NotImplementedError for what
    is not offered; the cache is then as it was.
    """
    if is_autocasting():
        q, k, v = autocast(q, k, v, fixed=k_cache)
    words = None
    if tree_mask is not None:
        words = tree_words(tree_mask)
        cache_checks.check_beside_tree(rotary_cos)
    if qv is not None:
        cache_checks.refuse({"qv": qv})
    if torch.is_grad_enabled():
        cache_checks.check_no_gradients(
            _DIFFERENTIABLE, q, k_cache, v_cache, k, v, learnable_sink, out, rotary_cos, rotary_sin,
            k_descale, v_descale,
        )  # fmt: skip
    others, key = NO_TENSORS, None
    if not (words is score_mod is k_descale is v_descale is None):
        others, key = read_options(words, score_mod, k_descale, v_descale)
    asked = Call(
        softmax_scale, causal, window_size, softcap, use_clc, num_splits, batch_invariant,
        max_seqlen_q, max_seqlen_k, config, None, key, None, 0,
    )  # fmt: skip
    places = _Places(
        q, k_cache, v_cache, cu_seqlens_q, page_table, cache_seqlens, scheduler_metadata,
        cache_batch_idx, cache_leftpad,
    )  # fmt: skip
    attention = _RequestedAttention(learnable_sink, others, asked, out)
    # Engines write their caches themselves: such calls are those of the attention at once.
    is_attention = k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is None
    if not is_attention or not _are_plain(cache_seqlens):
        new_rows = _NewRows(
            k,
            v,
            cu_seqlens_k_new,
            rotary_cos,
            rotary_sin,
            rotary_interleaved,
            None if rotary_cos is rotary_sin is None else rotary_seqlens,
        )
        places, results = new_rows.write_and_attend(places, attention, return_lse)
        if results is not None:
            return results if return_lse else results[0]
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = attention.of(places, return_lse)
    return found


def _are_plain(cache_seqlens: Any) -> bool:
    """Return True if the attention takes lengths as they are; those on the CPU are checked first,
    which costs nothing there."""
    if cache_seqlens is None:
        return True
    return isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.device.type != "cpu"


class _Places(NamedTuple):
    """Queries, and where the keys of each sequence lie: arguments as users give them, or checked
    and brought into one form (`in_use`).

    lengths: cache_seqlens; in that form (batch,) int32 rows in use, None for all. entries:
    cache_batch_idx; None in that form with a page_table, which then has the chosen rows alone, one
    for each sequence. chosen: numbers of these rows as cache_batch_idx has them, and as they were
    taken, the nearest ones that the table has; None where nothing was chosen. leftpad:
    cache_leftpad.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    page_table: torch.Tensor | None
    lengths: Any
    scheduler_metadata: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def in_cache(self) -> dict[str, torch.Tensor]:
        """Return the tensors beside page_table and lengths that say where in a cache keys lie, by
        name."""
        if self.entries is self.leftpad is None:
            return NO_TENSORS
        given = {CACHE_BATCH_IDX: self.entries, CACHE_LEFTPAD: self.leftpad}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def table_of_rows(self) -> torch.Tensor | None:
        """Return the page table for the kernel that writes rows. With cache_batch_idx alone each
        entry of the cache counts as one page. A sequence whose cache_batch_idx chooses a row that
        the table has not gets no pages, so that none of its new rows is written."""
        if self.chosen is not None and self.page_table is not None:
            asked, there = self.chosen
            return self.page_table.masked_fill((asked != there)[:, None], NO_PAGE)
        return self.page_table if self.entries is None else self.entries[:, None]

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Rows that a sequence can have."""
        rows = self.k_cache.shape[1]
        return rows if self.page_table is None else rows * self.page_table.shape[1]

    @property
    def read_back(self) -> bool:
        """Return True if contents are checked: on the CPU, where that waits for nothing, and on a
        GPU where the user says so; a capture is then the attention's to refuse."""
        if is_intercepted():
            return False
        if self.q.device.type == "cpu":
            return True
        return environment.checks_pages() and not torch.cuda.is_current_stream_capturing()

    def in_use(self) -> _Places:
        """Return the places checked: lengths as a tensor, and of page_table the rows of the
        sequences. Unchanged if it is called again. Raises TypeError or ValueError for what is not
        accepted."""
        cache_checks.check_caches(
            self.q, self.k_cache, self.v_cache, self.page_table, self.cu_seqlens_q
        )
        device, places, cache_seqlens = self.q.device, self._of_entries(), self.lengths
        if self.leftpad is not None:
            before = cache_checks.of_batch("cache_leftpad", self.leftpad, self.batch, device)
            places = places._replace(leftpad=before.contiguous())
        if cache_seqlens is not None:
            found = cache_checks.lengths_of(cache_seqlens, self.batch, self.capacity, device)
            if self.read_back:
                cache_checks.check_lengths(found, self.capacity)
            places = places._replace(lengths=found)
        if self.read_back and places.leftpad is not None:
            checks.check_leftpad(places.leftpad, places.lengths, self.capacity)
        return places

    def _of_entries(self) -> _Places:
        """Return the places with the rows of page_table that cache_batch_idx chooses, where both
        are given."""
        if self.entries is None:
            return self
        device, table = self.q.device, self.page_table
        entries = cache_checks.of_batch("cache_batch_idx", self.entries, self.batch, device)
        of_what = "the entries of the cache" if table is None else "the rows of page_table"
        if self.read_back:
            count = len(self.k_cache) if table is None else len(table)
            cache_checks.check_within("cache_batch_idx holds", entries, count, of_what)
        if table is None:
            return self._replace(entries=entries.contiguous())
        cache_checks.check_rows(table)
        there = entries.clamp(0, table.shape[0] - 1)
        table = table.index_select(0, there)
        return self._replace(page_table=table, entries=None, chosen=(entries, there))

    @property
    def sequences(self) -> tuple[Any, ...]:
        """Return the arguments of `interface.attend_sequences`."""
        return (
            self.cu_seqlens_q,
            None,
            None,
            self.lengths,
            self.page_table,
            self.scheduler_metadata,
        )


class _RequestedAttention(NamedTuple):
    """Attention of a call: its arguments but for queries and caches, which are in `_Places`.
    others: tensors by name."""

    sink: Any
    others: dict[str, torch.Tensor]
    asked: Call
    out: Any

    def of(self, places: _Places, return_lse: bool) -> Any:
        """Call the attention and return its results: `flash_attn_varlen_func`, with tensors that
        its signature lacks (`_Places.in_cache`)."""
        in_cache = places.in_cache
        return attend_sequences(
            (places.q, places.k_cache, places.v_cache, self.sink),
            places.sequences,
            {**self.others, **in_cache} if in_cache else self.others,
            self.asked,
            (self.out, return_lse, False),
        )

    def bounded(self, q: torch.Tensor) -> _RequestedAttention:
        """Return it with numbers for max_seqlen_q and max_seqlen_k."""
        longest = self.asked.max_seqlen_q, self.asked.max_seqlen_k
        if not isinstance(longest[0], torch.Tensor) and not isinstance(longest[1], torch.Tensor):
            return self
        return self._replace(asked=Call(*bounded(self.asked, q, self.others.get(TREE_WORDS))))

    def described(self, places: _Places, read: Iterable[Any]) -> tuple[str, ForwardWork | None]:
        """Describe the attention, which raises all that it refuses before anything is written.
        Return (whose scales keys and values have, the described attention, None in graphs).

        read: tensors that the call reads beside q, the caches and those of this attention."""
        inputs = places.q, places.k_cache, places.v_cache, self.sink, *places.sequences
        tensors = ForwardTensors(*inputs, **{**places.in_cache, **self.others})
        values, ragged = self.asked.values(tensors), tensors.others()
        self._check_out(places, (*read, self.sink, *ragged.values()))
        batched = tensors.with_batches()
        if is_intercepted():
            check_operator(batched, values)
            paged = places.page_table is not None
            return descale_of(ragged, places.k_cache, places.batch, paged), None
        work = work_of(batched, values)
        return work.problem.descale, work

    def _check_out(self, places: _Places, read: tuple[Any, ...]) -> None:
        """read: tensors that the attention reads beside q and the caches."""
        if self.out is None:
            return
        memory.check_out(self.out, places.q)
        if not is_intercepted():
            inputs = places.q, places.k_cache, places.v_cache, *read
            memory.check_writable(self.out, inputs)


class _NewRows(NamedTuple):
    """New rows of a call, and their rotary embedding, as users give them; k and v None for none."""

    k: Any
    v: Any
    cu_seqlens: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    interleaved: Any = True
    rotary_seqlens: Any = None

    def write_and_attend(
        self, places: _Places, attention: _RequestedAttention, wants_lse: bool
    ) -> tuple[_Places, tuple[torch.Tensor, torch.Tensor] | None]:
        """Write the rows and attend to all; return (places, (out, lse)).

        Results are None, and the caller calls the attention with the places returned, in two cases:
        there are no rows to be written; and in graphs, where they are written by an operator.

        Raises TypeError or ValueError for what is not accepted, before anything is written."""
        are_given = self.k is not None or self.v is not None
        is_plain = places.entries is places.leftpad is None
        # Plain calls are checked with their plan. Others become tensors like theirs first: a plan
        # has (batch,) lengths, and pages of the sequences alone.
        if not (are_given and is_plain and isinstance(places.lengths, torch.Tensor)):
            places = places.in_use()
            if not self.check(places):
                return places, None
        attention = attention.bounded(places.q)
        tensors = _tensors_of(places, self, attention)
        if not is_intercepted():
            metadata = places.scheduler_metadata
            mark = None if metadata is None else marked(metadata)
            form = (mark, self.interleaved, bytes([tensor is None for tensor in tensors]))
            asked = attention.asked
            found = plans.find((_CACHE, *plans.facts_of(asked, form)), tensors)
            if found is not None:
                if found[0].execution is not None:
                    # Addresses and modes are no part of a key.
                    _check_memory(tensors)
                    if attention.out is not None:
                        memory.check_writable_again(attention.out, tensors[:-1])
                out, lse = plans.run(found[0], tensors, found[1], not wants_lse)
                return places, (out, lse)
        refuse_tangents(tensors)
        options, _ = _resolved(tensors, attention.asked, self.interleaved)
        after, rotated = append_rows(*_append_tensors(tensors), *options)
        places = places._replace(lengths=after)
        return places if self.rotary_cos is None else places._replace(q=rotated), None

    def check(self, places: _Places) -> bool:
        """Return True if there are any new rows. Raises TypeError or ValueError for what is not
        accepted."""
        given = self.k is not None or self.v is not None
        if self.rotary_cos is not None or self.rotary_sin is not None:
            cache_checks.check_rotary(
                self.rotary_cos, self.rotary_sin, self.interleaved, places.q, given
            )
        if not given:
            return False
        if places.lengths is None:
            raise ValueError(
                "cache_seqlens is None; accepted with k and v, which are written behind the rows "
                "in use: an int or a (batch,) int32 tensor"
            )
        cache_checks.check_new_rows(
            {"k": self.k, "v": self.v},
            places.k_cache,
            self.cu_seqlens,
            places.batch,
            places.q.dtype,
        )
        if self.rotary_cos is not None:
            cache_checks.check_rotated(self.k, places.q)
            if self.rotary_seqlens is not None:
                cache_checks.of_batch(
                    "rotary_seqlens", self.rotary_seqlens, places.batch, places.q.device
                )
        if self.cu_seqlens is not None and places.read_back:
            cache_checks.check_offsets("cu_seqlens_k_new", self.cu_seqlens, self.k.shape[0])
        return True

    def check_room(self, places: _Places) -> None:
        """Raise ValueError for rows that the cache has no room for, or no such entry. Waits for the
        device."""
        if places.page_table is not None:
            cache_checks.check_entries(places.page_table, places.batch, places.q.device)
        table = places.table_of_rows
        rows = NewRows.of(self.k, self.cu_seqlens)
        positions = rows.positions(places.lengths)
        cache_checks.check_within(
            "a new row would be row", positions, places.capacity, "the rows of the cache"
        )
        if table is not None:
            entries = table[rows.sequence, positions // places.k_cache.shape[1]]
            cache_checks.check_within(
                "a new row belongs to page or batch entry",
                entries,
                len(places.k_cache),
                "those of the cache",
            )

    def counted(self, lengths: torch.Tensor) -> torch.Tensor:
        """Rows in use with them."""
        added = self.k.shape[1] if self.cu_seqlens is None else self.cu_seqlens.diff()
        return lengths + added

    def check_angles(self, places: _Places, ordered: bool) -> None:
        """Raise ValueError for positions that rotary_cos has not. ordered: whether queries have
        positions one after the other, as with a mask that has an order of them; else all have that
        of the first new row, as in the field. Waits for the device."""
        first = places.lengths if self.rotary_seqlens is None else self.rotary_seqlens
        rows = NewRows.of(self.k, self.cu_seqlens)
        queries = NewRows.of(places.q, places.cu_seqlens_q)
        if not ordered:
            queries = replace(queries, index=torch.zeros_like(queries.index))
        for positions in (rows.positions(first), queries.positions(first)):
            cache_checks.check_within(
                "a row to be rotated is at position",
                positions,
                len(self.rotary_cos),
                "the positions of rotary_cos",
            )


#: Tensors of a call with new rows, in the order of `_tensors_of`: fields of `AppendTensors`, whose
#: page_table is `_Places.table_of_rows`, then what the attention takes beside them, by its names.
#: `_READ_PAGES` is the attention's page table where cache_batch_idx chose its rows; else it reads
#: page_table, or with cache_batch_idx alone none.
_READ_PAGES = "read_pages"
_NAMES = (
    *AppendTensors._fields, "sink", PART_LIST, CACHE_BATCH_IDX, CACHE_LEFTPAD, _READ_PAGES,
    TREE_WORDS, *SCORE_MOD.tensors, "out",
)  # fmt: skip
_APPENDED = len(AppendTensors._fields)
_place_of = {name: place for place, name in enumerate(_NAMES)}


def _tensors_of(places: _Places, rows: _NewRows, attention: _RequestedAttention) -> tuple[Any, ...]:
    """Return the tensors of a call in the order of `_NAMES`, None where not given."""
    others = attention.others
    k_descale = v_descale = None
    more: Sequence[Any] = _NO_MORE
    if others:
        k_descale, v_descale = (others.get(name) for name in DESCALES)
        more = [others.get(name) for name in (TREE_WORDS, *SCORE_MOD.tensors)]
    return (
        rows.k, rows.v, places.k_cache, places.v_cache, places.lengths, places.table_of_rows,
        rows.cu_seqlens, k_descale, v_descale, rows.rotary_cos, rows.rotary_sin,
        rows.rotary_seqlens, places.q, places.cu_seqlens_q, attention.sink,
        places.scheduler_metadata, places.entries, places.leftpad,
        None if places.chosen is None else places.page_table, *more, attention.out,
    )  # fmt: skip


_NO_MORE = [None] * (1 + len(SCORE_MOD.tensors))


def _append_tensors(tensors: Sequence[Any]) -> AppendTensors:
    """Return the tensors of the kernel that writes rows: queries for their rotary embedding
    alone."""
    found = AppendTensors(*tensors[:_APPENDED])
    return found if found.rotary_cos is not None else found._replace(q=None, cu_seqlens_q=None)


def _resolved(
    tensors: Sequence[Any], asked: Call, interleaved: Any
) -> tuple[AppendOptions, ForwardWork | None]:
    """Return (options of the kernel that writes rows, the described attention, None in graphs).
    tensors: by `_tensors_of`.

    Checks all of a call, so that what it raises comes before anything is written. From the tensors
    it makes `_Places`, `_NewRows` and `_RequestedAttention` again, since an entry keeps no tensor.
    """
    call, given = AppendTensors(*tensors[:_APPENDED]), dict(zip(_NAMES, tensors, strict=True))
    rows = _NewRows(
        call.k,
        call.v,
        call.cu_seqlens_k_new,
        call.rotary_cos,
        call.rotary_sin,
        interleaved,
        call.rotary_seqlens,
    )
    entries, table = given[CACHE_BATCH_IDX], given[_READ_PAGES]
    if table is None and entries is None:
        table = call.page_table
    places = _Places(
        call.q, call.k_cache, call.v_cache, call.cu_seqlens_q, table, call.lengths,
        given[PART_LIST], entries, given[CACHE_LEFTPAD],
    ).in_use()  # fmt: skip
    rows.check(places)
    if not is_intercepted():
        cache_checks.check_in_place({"k_cache": call.k_cache, "v_cache": call.v_cache})
        _check_memory(tensors)
    with_rows = places
    if places.read_back:
        rows.check_room(places)
        with_rows = places._replace(lengths=rows.counted(places.lengths))
    names = TREE_WORDS, *DESCALES, *SCORE_MOD.tensors
    others = {name: given[name] for name in names if given[name] is not None}
    attention = _RequestedAttention(given["sink"], others, asked, given["out"])
    descale, work = attention.described(with_rows, (call.k, call.v))
    window = Options.check(
        asked.softmax_scale, asked.causal, asked.window_size, asked.softcap
    ).window
    ordered = window != (None, None)
    if places.read_back and rows.rotary_cos is not None:
        rows.check_angles(places, ordered)
    return AppendOptions(descale, bool(interleaved), ordered), work


def _check_memory(tensors: Sequence[Any]) -> None:
    """Raise ValueError for caches that PyTorch may not write to now, and for new rows or queries to
    be rotated that lie in them."""
    k, v, k_cache, v_cache = tensors[:4]
    caches, read = {"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v}
    if tensors[_place_of["rotary_cos"]] is not None:
        read["q"] = tensors[_place_of["q"]]
    cache_checks.check_written(caches, read)


def _plan(tensors: Sequence[Any], values: tuple[Call, Any]) -> LaunchPlan:
    """Return the plan of new rows and of the attention behind them, whose results are (out, lse).
    values: arguments of the attention, and rotary_interleaved. Raises as `_resolved` does."""
    options, work = _resolved(tensors, *values)
    assert work is not None, "a plan is made in a graph"
    builder = PlanBuilder.for_tensors(work.problem.device, _NAMES, tensors)
    appended, views = _append_tensors(tensors), dict(builder.inputs)
    after, rotated = add_append(builder, (appended, options, work.problem.architecture), views)
    # Under the names that the attention has for them.
    views |= {"k": views["k_cache"], "v": views["v_cache"], "seqused_k": after}
    if _READ_PAGES in views:
        views["page_table"] = views[_READ_PAGES]
    queries = views["q"] if rotated is None else rotated
    has_batch = queries.ndim == work.tensors.q.ndim
    views["q"] = queries if has_batch else queries.unsqueeze(0)
    if "out" in views and not has_batch:
        views["out"] = views["out"].unsqueeze(0)
    return builder.plan(*add_forward(builder, work, views, has_batch))


def _values(tensors: Sequence[Any], facts: tuple[Any, ...]) -> tuple[Call, Any]:
    """Return the arguments of the attention and rotary_interleaved, without a check: `_plan` has
    all. facts: fields of `Call`, what `plans.facts_of` adds, then the form of `write_and_attend`:
    a mark, rotary_interleaved, which tensors are given."""
    added = len(Call._fields)
    _mark, interleaved, _given = facts[added + _ADDED :]
    return Call(*facts[:added]), interleaved


#: How many facts `plans.facts_of` adds behind those given.
_ADDED = 2
#: Named as the operator of its first launch; its plan has the attention, too.
_CACHE = plans.Kind(
    "append_rows",
    _values,
    _plan,
    tuple(_place_of[name] for name in ("k_cache", "v_cache", "out")),
)
