"""`flash_attn_with_kvcache`: attention over a cache of keys and values, with new rows of them
written to it first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from . import environment
from .call import cache_checks, checks, memory_checks
from .call.autocast import autocast, is_autocasting
from .call.descales import descale_of, scales_among
from .call.forward_problem import ForwardCall, Options, check_call
from .call.function_tensors import functions_of_keys
from .call.interception import is_intercepted, refuse_tangents
from .call.new_rows import NewRows
from .call.part_lists import marked
from .call.splits import (
    BY_RULE,
    FIXED_PARTS,
    asked_splits,
    check_beside_list,
    check_num_splits,
)
from .call.tree_mask import tree_words
from .eager import OperatorCalls, repeats
from .interface import (
    attend_sequences,
    config_names,
    facts_of,
    flash_attn_varlen_func,
    longest_of,
    read_options,
)
from .kernels.problem_class import DESCALES
from .kernels.sequences import CACHE_BATCH_IDX, CACHE_LEFTPAD, PART_LIST, TREE_WORDS
from .operators import append_rows
from .run.append import ready_to_append
from .run.append_arguments import AppendOptions, AppendTensors
from .run.forward import get_ready
from .score_mods import ScoreMod, read_by

__all__ = ["flash_attn_with_kvcache"]

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
    window_size: tuple[int | None, int | None] = (None, None),
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
    if tree_mask is not None:
        tree_mask = tree_words(tree_mask)
        cache_checks.check_beside_tree(rotary_cos)
    cache_checks.refuse({"qv": qv})
    if torch.is_grad_enabled():
        tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
        tensors |= {"learnable_sink": learnable_sink, "out": out, "rotary_cos": rotary_cos}
        tensors |= {"k_descale": k_descale, "v_descale": v_descale, "rotary_sin": rotary_sin}
        cache_checks.check_no_gradients(tensors)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "softcap": softcap,
    }  # fmt: skip
    others: dict[str, Any] = {
        "learnable_sink": learnable_sink, "num_splits": num_splits,
        "batch_invariant": batch_invariant, "k_descale": k_descale, "v_descale": v_descale,
        "tree_mask": tree_mask, "score_mod": score_mod, "out": out, "config": config,
        "use_clc": use_clc,
    }  # fmt: skip
    # Engines write their caches themselves: a call without new rows is one of the attention.
    given = k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad
    if not _are_plain(cache_seqlens) or any(tensor is not None for tensor in given):
        places = _Places(
            q, k_cache, v_cache, cu_seqlens_q, page_table, cache_seqlens, max_seqlen_q,
            max_seqlen_k, scheduler_metadata, cache_batch_idx, cache_leftpad,
        )  # fmt: skip
        new_rows = _NewRows(
            k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved,
            None if rotary_cos is rotary_sin is None else rotary_seqlens,
        )  # fmt: skip
        places = new_rows.written(places, options, others)
        if places.in_cache:
            return places.attend({**options, **others}, return_lse)
        q, cache_seqlens, page_table = places.q, places.lengths, places.page_table
    found = flash_attn_varlen_func(
        q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, seqused_k=cast("torch.Tensor | None", cache_seqlens),
        page_table=page_table, **options, **others, return_lse=return_lse,
        scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    return cast("torch.Tensor | tuple[torch.Tensor, torch.Tensor]", found)


def _are_plain(cache_seqlens: Any) -> bool:
    """Return True if the attention takes lengths as they are; those on the CPU are checked first,
    which costs nothing there."""
    if cache_seqlens is None:
        return True
    return isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.device.type != "cpu"


class _Places(NamedTuple):
    """Queries, and where the keys of each sequence are; lengths: (batch,) int32 rows in use, None
    for all, and before `in_use` as users give them, like the others. entries: cache_batch_idx, None
    where page_table says where rows are; leftpad: cache_leftpad. chosen: the rows of a page_table
    that cache_batch_idx asks for, and the nearest ones that there are, of which this one is."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    page_table: torch.Tensor | None
    lengths: Any
    max_seqlen_q: int | torch.Tensor | None
    max_seqlen_k: int | torch.Tensor | None
    scheduler_metadata: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def in_cache(self) -> dict[str, torch.Tensor]:
        """Tensors beside page_table that say where in a cache keys lie, by name."""
        given = {CACHE_BATCH_IDX: self.entries, CACHE_LEFTPAD: self.leftpad}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def table_of_rows(self) -> torch.Tensor | None:
        """page_table; with cache_batch_idx alone that of pages of all rows of an entry. A sequence
        whose entry there is not has no pages, so that no new row of it is written."""
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

    def attend(self, options: dict[str, Any], return_lse: bool) -> Any:
        """Return what `flash_attn_varlen_func` would if it took `in_cache`. options: its other
        arguments by name."""
        read = (options[name] for name in ("tree_mask", "score_mod", *DESCALES))
        others, key = read_options(*read)
        asked = (options[name] for name in _OPTIONS)
        splits = asked_splits(options["num_splits"], options["batch_invariant"])
        given = (
            *asked, options["use_clc"], splits, self.max_seqlen_q, self.max_seqlen_k,
            options["config"], None, key, None, 0,
        )  # fmt: skip
        return attend_sequences(
            (self.q, self.k_cache, self.v_cache, options["learnable_sink"]),
            (self.cu_seqlens_q, None, None, self.lengths, self.page_table, self.scheduler_metadata),
            {**others, **self.in_cache}, given, (options["out"], return_lse, False),
        )  # fmt: skip

    def in_use(self) -> _Places:
        """Return the places with lengths, and with the rows of page_table that the sequences have.
        Raises TypeError or ValueError for what is not accepted."""
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
            cache_checks.check_before(places.leftpad, places.lengths, self.capacity)
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

    def ragged(self) -> dict[str, Any]:
        """Tensors of `flash_attn_varlen_func` that say where rows are."""
        given = {
            "cu_seqlens_q": self.cu_seqlens_q, "seqused_k": self.lengths,
            "page_table": self.page_table, PART_LIST: self.scheduler_metadata, **self.in_cache,
        }  # fmt: skip
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def longest(self, words: torch.Tensor | None, splits: Any) -> tuple[Any, Any]:
        """(max_seqlen_q, max_seqlen_k) without tensors. words: of a tree, or None; splits: the
        operator's number of parts."""
        given = self.max_seqlen_q, self.max_seqlen_k
        if any(isinstance(longest, torch.Tensor) for longest in given):
            return checks.bounds_of(given, self.q, words, splits == FIXED_PARTS)
        return given

    def check(self, options: dict[str, Any], others: dict[str, Any]) -> str:
        """Raise what the attention would, a kernel that is missing among it, so that nothing is
        written before; whose scales keys and values have."""
        ragged, sink, q = self.ragged() | scales_among(others), others["learnable_sink"], self.q
        if others["tree_mask"] is not None:
            ragged[TREE_WORDS] = others["tree_mask"]
        splits = asked_splits(others["num_splits"], others["batch_invariant"])
        checks.check_kinds({"learnable_sink": sink}, ragged, splits)
        check_num_splits(splits)
        if PART_LIST in ragged:
            check_beside_list(splits)
        checked = Options.check(**options)
        if others["score_mod"] is not None:
            tensors, key = read_by(others["score_mod"])
            ragged |= tensors
            own, _ = functions_of_keys((key, None), ragged, q)
            checked = replace(checked, score_mod=own)
        self._check_out(others["out"], (others["k"], others["v"], sink, *ragged.values()))
        longest = longest_of(ragged, *self.longest(others["tree_mask"], splits))
        if self.cu_seqlens_q is not None:
            q = checks.with_batch("q", q)
        config_names(q, others["config"], None)
        rows = 1 if self.cu_seqlens_q is None else q.shape[1]
        checked = checked.scheduled(others["use_clc"], rows, self.cu_seqlens_q, longest[0])
        if is_intercepted():
            check_call(q, self.k_cache, self.v_cache, sink, ragged)
            return descale_of(ragged, self.k_cache, self.batch, self.page_table is not None)
        call = ForwardCall(q, self.k_cache, self.v_cache, sink, ragged)
        problem = call.describe(checked, *longest, others["config"])
        get_ready(call, problem, splits, others["config"])
        return problem.descale

    def _check_out(self, out: Any, tensors: Iterable[Any]) -> None:
        """tensors: that the attention reads beside q and the caches."""
        if out is None:
            return
        memory_checks.check_out(out, self.q)
        if not is_intercepted():
            memory_checks.check_writable(out, (self.q, self.k_cache, self.v_cache, *tensors))


class _NewRows(NamedTuple):
    """Rows to be written, and their rotary embedding; as users give them."""

    k: Any
    v: Any
    cu_seqlens: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    interleaved: Any = True
    rotary_seqlens: Any = None

    def written(
        self, places: _Places, options: dict[str, Any], others: dict[str, Any]
    ) -> _Places:
        """Attention with the new rows, if there are any, its queries rotated. options, others:
        arguments of the attention. Raises TypeError or ValueError for what is not accepted, before
        anything is written."""
        are_given = self.k is not None or self.v is not None
        counted = isinstance(places.lengths, torch.Tensor)
        if not are_given or places.in_cache or not counted:
            places = places.in_use()
            if not self.check(places):
                return places
        return self._appended(places, options, others)

    def _appended(
        self, places: _Places, options: dict[str, Any], others: dict[str, Any]
    ) -> _Places:
        """Write them; the attention with them among the rows in use, and its queries rotated."""
        words, metadata = others["tree_mask"], places.scheduler_metadata
        longest = places.longest(
            words, asked_splits(others["num_splits"], others["batch_invariant"])
        )
        tensors = _CallTensors(
            self.k, self.v, places.k_cache, places.v_cache, places.lengths, places.table_of_rows,
            self.cu_seqlens, others["k_descale"], others["v_descale"], self.rotary_cos,
            self.rotary_sin, self.rotary_seqlens, places.q, places.cu_seqlens_q,
            others["learnable_sink"], metadata, words, places.entries, places.leftpad,
            others["out"],
        )  # fmt: skip
        of_others = [others[name] for name in _OTHERS]
        asked = _Asked(*[*options.values(), *of_others, *longest, self.interleaved])
        found = None
        if _is_repeated(places, others):
            form = (marked(metadata), *[tensor is None for tensor in tensors])
            found = append_calls.find(facts_of(asked, asked.window_size, form), tensors)
        if found is None:
            refuse_tangents(tensors)
            after, *rotated = _append(tensors, _resolve(tensors, asked))
        else:
            # Addresses and modes are no part of a key.
            _check_memory(tensors)
            if others["out"] is not None:
                memory_checks.check_writable_again(others["out"], tensors[:-1])
            after, *rotated = append_calls.run(found[0], tensors, found[1])
        places = places._replace(lengths=after)
        return places._replace(q=rotated[0]) if rotated else places

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
            {"k": self.k, "v": self.v}, places.k_cache, self.cu_seqlens, places.batch,
            places.q.dtype,
        )  # fmt: skip
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
                "a new row belongs to page or batch entry", entries, len(places.k_cache),
                "those of the cache",
            )  # fmt: skip

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
                "a row to be rotated is at position", positions, len(self.rotary_cos),
                "the positions of rotary_cos",
            )  # fmt: skip


class _CallTensors(NamedTuple):
    """Tensors of a call with new rows, None where not given: those of `AppendTensors`, then what
    the attention needs with them. With cache_batch_idx, page_table says the same: an entry of the
    cache is a page of all its rows."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    lengths: Any
    page_table: Any
    cu_seqlens_k_new: Any
    k_descale: Any
    v_descale: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_seqlens: Any
    q: Any
    cu_seqlens_q: Any
    learnable_sink: Any
    scheduler_metadata: Any
    tree_mask: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    out: Any

    def of_operator(self) -> AppendTensors:
        """Return the tensors that the kernel takes: queries for their rotary embedding alone."""
        found = AppendTensors(*self[: len(AppendTensors._fields)])
        return found if self.rotary_cos is not None else found._replace(q=None, cu_seqlens_q=None)


class _Asked(NamedTuple):
    """Arguments of the attention that are no tensors, as users give them."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    num_splits: Any
    batch_invariant: Any
    score_mod: Any
    config: Any
    use_clc: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    rotary_interleaved: Any


#: Fields of a call's options, and of its other arguments.
_OPTIONS, _OTHERS = _Asked._fields[:4], _Asked._fields[4:9]


def _is_repeated(places: _Places, others: dict[str, Any]) -> bool:
    """Return True if an earlier call has checked all that there is to check; a function's contents
    are in no key."""
    if others["score_mod"] is not None or is_intercepted() or environment.checks_pages():
        return False
    return isinstance(places.q, torch.Tensor) and repeats((places.q,))


def _resolve(tensors: Sequence[Any], facts: Sequence[Any]) -> AppendOptions:
    """The operator's. facts: the fields of `_Asked` first. Raises what the call would, so that
    nothing is written before."""
    call, asked = _CallTensors(*tensors), _Asked(*facts[: len(_Asked._fields)])
    rows = _NewRows(
        call.k, call.v, call.cu_seqlens_k_new, call.rotary_cos, call.rotary_sin,
        asked.rotary_interleaved, call.rotary_seqlens,
    )  # fmt: skip
    places = _Places(
        call.q, call.k_cache, call.v_cache, call.cu_seqlens_q,
        call.page_table if call.cache_batch_idx is None else None, call.lengths,
        asked.max_seqlen_q, asked.max_seqlen_k, call.scheduler_metadata, call.cache_batch_idx,
        call.cache_leftpad,
    ).in_use()  # fmt: skip
    rows.check(places)
    caches = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    if not is_intercepted():
        cache_checks.check_in_place(caches)
        _check_memory(tensors)
    named = asked._asdict() | call._asdict()
    given = {name: named[name] for name in _OPTIONS}
    ordered = Options.check(**given).window != (None, None)
    with_rows = places
    if places.read_back:
        rows.check_room(places)
        with_rows = places._replace(lengths=rows.counted(places.lengths))
    descale = with_rows.check(given, named)
    if places.read_back and rows.rotary_cos is not None:
        rows.check_angles(places, ordered)
    options = AppendOptions(descale, bool(asked.rotary_interleaved), ordered)
    if not is_intercepted():
        ready_to_append(call.of_operator(), options)
    return options


def _check_memory(tensors: Sequence[Any]) -> None:
    """Raise ValueError for caches that nothing is written to now, and for what lies in them."""
    call = _CallTensors(*tensors)
    caches, read = {"k_cache": call.k_cache, "v_cache": call.v_cache}, {"k": call.k, "v": call.v}
    if call.rotary_cos is not None:
        read["q"] = call.q
    cache_checks.check_written(caches, read)


def _append(tensors: Sequence[Any], options: AppendOptions) -> Sequence[torch.Tensor]:
    """The operator's results. tensors: fields of `_CallTensors`."""
    given = _CallTensors(*tensors).of_operator()
    return append_rows(*given, *options)[: 1 if given.rotary_cos is None else 2]


append_calls = OperatorCalls(
    "append_rows", _append, _resolve, _CallTensors._fields, ("k_cache", "v_cache")
)
