"""`flash_attn_with_kvcache`: attention over a cache of keys and values, with new rows of them
written to it first.

A call without new rows is one of the attention alone (`interface.attend_sequences`). One with new
rows is a single plan (`run.append.plan_cache`): the kernel that writes rows, then the attention. An
eager call finds it by its tensors, in one tuple in the order of `CacheTensors`. Where something
intercepts calls (`is_intercepted`) it is the operator `forward_kvcache`, whose body finds the same
kind of plan. A first call is checked by `resolve_cache_call` and when its plan is made. Without new
rows, `in_use` checks lengths and entries that are on the CPU before the plan is found.
`check_memory` checks at every call where tensors lie, before anything is written.
"""

from __future__ import annotations

from typing import Any

import torch

from . import plans
from .call import cache_checks
from .call.autocast import autocast, is_autocasting
from .call.cache_checks import check_memory, resolve_cache_call
from .call.forward_problem import bounded
from .call.operator_arguments import CacheTensors, flat
from .call.options import BY_RULE, NO_WINDOW, flags_of
from .call.process import is_intercepted, refuse_tangents
from .call.scheduler_metadata import marked
from .call.tree_mask import tree_words
from .interface import NO_TENSORS, attend_sequences, read_options
from .kernels.functions.user_functions import SCORE_MOD
from .kernels.nvfp4_format import BLOCK_SCALES
from .kernels.problem_class import DESCALES, result_dtypes
from .kernels.rows.sequences import CACHE_BATCH_IDX, CACHE_LEFTPAD, SCHEDULER_METADATA, TREE_WORDS
from .ops.operators import WRITTEN_PLACES, forward_kvcache
from .run.append import plan_cache
from .score_mods import ScoreMod

#: Arguments that may require gradients, which there are none of.
_DIFFERENTIABLE = (
    "q", "k_cache", "v_cache", "k", "v", "learnable_sink", "out", "rotary_cos", "rotary_sin",
    "q_descale", "k_descale", "v_descale", "out_gate", *BLOCK_SCALES,
)  # fmt: skip


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
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    out: torch.Tensor | None = None,
    out_gate: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over a cache, after k and v, if given, were written to it in place.

    All arguments behind v are keyword-only. The result is one tensor unless return_lse is True.

    q: (batch, seqlen_q, heads, 256), or (total_q, heads, 256) with cu_seqlens_q and max_seqlen_q,
        which may be a tensor as of `flash_attn_varlen_func`.
    k_cache, v_cache: (batch, rows, heads_kv, 256), or with page_table (pages, page_size, heads_kv,
        256), page_size 1 or more; any strides that `flash_attn_func` reads in place.
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
    cu_seqlens_k_new: (batch + 1,) int32 offsets of packed k and v. Only with these.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), both typed like q or both float32: rotary
        embedding of the first rotary_dim elements of k, at the positions cache_seqlens + i, and of
        q: there if causal or with a window, else at cache_seqlens. Only with k and v.
    rotary_interleaved: whether elements 2i and 2i + 1 are a pair, or i and i + rotary_dim / 2.
    rotary_seqlens: (batch,) int32, in place of cache_seqlens in those positions. Only with tables.
    max_seqlen_k: a bound on the rows in use with page_table, new ones too, that num_splits follows
        from; None for as many as a row of page_table holds.
    q_descale, k_descale, v_descale: as of `flash_attn_varlen_func`, with caches in float8_e4m3fn.
        Rows of k and v, typed like q or, where that is float8_e4m3fn, like out, are then divided by
        the scales of where they go, rounded to nearest
        and kept within 448; rows in float8_e4m3fn are written as they are.
    k_block_scale, v_block_scale: float8_e4m3fn like the caches but for the last dimension of 16,
        with caches in NVFP4: uint8 with a last dimension of 128, two e2m1 in a byte
        (`fa4_hd256.quantize`). k_descale and v_descale are then the global scales. Rows of k and v,
        typed like q, are quantized as `quantize_nvfp4` does, and their scales are written, too.
    score_mod: as of `flash_attn_varlen_func`, new rows among the keys.
    tree_mask: as of `flash_attn_varlen_func`; the last keys are the new rows where k and v are
        given. Not with rotary_cos, since rows have positions one after the other there.
    out: as of `flash_attn_varlen_func`; not where the caches lie.
    out_gate: as of `flash_attn_varlen_func`.
    scheduler_metadata: of `get_scheduler_metadata`, for the rows in use with the new ones among
        them, in place of num_splits.
    qv: not offered; None.
    The other arguments are those of `flash_attn_varlen_func`, whose errors call the caches k and v.

    Nothing waits for the device, so that CUDA graphs can hold calls. On the CPU, and on a GPU where
    FA4_HD256_CHECK_PAGES is 1, a ValueError names an entry that there is not, a new row without a
    place of its own in the cache (not written if it has none), a position past rotary_cos (NaN).

    Returns out like q, or (out, lse); lse: float32 (batch, heads, seqlen_q), or (heads, total_q)
    with cu_seqlens_q. There are no gradients.

    Raises TypeError or ValueError as `flash_attn_varlen_func` does, NotImplementedError for what
    is not offered; the cache is then as it was.
    """
    if is_autocasting():
        q, k, v, out_gate = autocast(q, k, v, out_gate, fixed=k_cache)
    words = None if tree_mask is None else tree_words(tree_mask)
    if words is not None:
        cache_checks.check_beside_tree(rotary_cos)
    if qv is not None:
        cache_checks.refuse_second_parts()
    if torch.is_grad_enabled():
        cache_checks.check_no_gradients(
            _DIFFERENTIABLE, q, k_cache, v_cache, k, v, learnable_sink, out, rotary_cos, rotary_sin,
            q_descale, k_descale, v_descale, out_gate, k_block_scale, v_block_scale,
        )  # fmt: skip
    others, key = NO_TENSORS, None
    if not (words is score_mod is q_descale is k_descale is v_descale is None):
        others, key = read_options(words, score_mod, q_descale, k_descale, v_descale)
    if not (k_block_scale is v_block_scale is None):
        scales = zip(BLOCK_SCALES, (k_block_scale, v_block_scale), strict=True)
        others = others | {name: scale for name, scale in scales if scale is not None}
    arguments = plans.call_fields(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        use_clc=use_clc, num_splits=num_splits, batch_invariant=batch_invariant,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, config=config, score_mod=key,
    )  # fmt: skip
    # Engines write their caches themselves: such calls are those of the attention at once.
    is_attention = k is v is cu_seqlens_k_new is cache_batch_idx is cache_leftpad is None
    is_attention = is_attention and rotary_cos is rotary_sin is rotary_seqlens is None
    if is_attention and _are_read_as_given(cache_seqlens):
        inputs = q, k_cache, v_cache, learnable_sink, out_gate
        sequences = cu_seqlens_q, None, None, cache_seqlens, page_table, scheduler_metadata
        return attend_sequences(inputs, sequences, others, arguments, out, return_lse)
    named = [others.get(name) for name in _OTHERS] if others else _NO_OTHERS
    tensors: tuple[Any, ...] = (  # fields of `CacheTensors`, whose class takes twice the time
        out, k_cache, v_cache, q, k, v, cache_seqlens, learnable_sink, out_gate, cu_seqlens_q,
        page_table, scheduler_metadata, cache_batch_idx, cache_leftpad, *named, cu_seqlens_k_new,
        None, rotary_cos, rotary_sin, rotary_seqlens,
    )  # fmt: skip
    # Plain calls are checked with their plan. Others become like them first.
    is_plain = cache_batch_idx is cache_leftpad is None and isinstance(cache_seqlens, torch.Tensor)
    if k is v is None or not is_plain:
        call = cache_checks.in_use(CacheTensors(*tensors))
        if not cache_checks.has_new_rows(call, rotary_interleaved):
            return _attend_without_new_rows(call, others, arguments, return_lse)
        tensors = call
    if isinstance(max_seqlen_q, torch.Tensor) or isinstance(max_seqlen_k, torch.Tensor):
        arguments = bounded(arguments, q, words)
    return _write_and_attend(tensors, arguments, (*others, rotary_interleaved), return_lse)


def _are_read_as_given(cache_seqlens: Any) -> bool:
    """Return True if the attention takes lengths as they are; on the CPU they are checked."""
    if cache_seqlens is None:
        return True
    return isinstance(cache_seqlens, torch.Tensor) and not cache_seqlens.is_cpu


def _attend_without_new_rows(
    call: CacheTensors,
    others: dict[str, torch.Tensor],
    arguments: tuple[Any, ...],
    return_lse: bool,
) -> Any:
    """Call the attention alone. others, arguments: as of `attend_sequences`."""
    in_cache = {CACHE_BATCH_IDX: call.cache_batch_idx, CACHE_LEFTPAD: call.cache_leftpad}
    return attend_sequences(
        (call.q, call.k_cache, call.v_cache, call.sink, call.out_gate),
        (call.cu_seqlens_q, None, None, call.lengths, call.page_table, call.scheduler_metadata),
        others | {name: tensor for name, tensor in in_cache.items() if tensor is not None},
        arguments,
        call.out,
        return_lse,
    )


def _write_and_attend(
    tensors: tuple[Any, ...], arguments: tuple[Any, ...], form: tuple[Any, ...], return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Write new rows and attend to all; return out, or (out, lse) with return_lse. tensors: fields
    of `CacheTensors`. arguments: fields of `Call`. form: the names of tensors by name, then
    rotary_interleaved. Raises TypeError or ValueError for what is not accepted, before anything is
    written."""
    # No key holds return_lse, so each call checks it.
    if return_lse is not False and return_lse is not True:
        (return_lse,) = flags_of(return_lse=return_lse)
    if not is_intercepted():
        metadata = tensors[_SCHEDULER_METADATA]
        mark = None if metadata is None else marked(metadata)
        optional = (tensors[0], *tensors[_BEFORE_OTHERS], *tensors[_BEHIND_OTHERS])
        is_missing = [tensor is None for tensor in optional]
        facts = plans.facts_of(_EAGER_KVCACHE, arguments, (mark, *is_missing, *form))
        found = plans.find(facts, tensors)
        if found is not None:
            execution, addresses = found
            check_memory(tensors)
            out, lse = plans.run(_EAGER_KVCACHE, execution, tensors, addresses, not return_lse)
            return (out, lse) if return_lse else out
    refuse_tangents(tensors)
    values = resolve_cache_call(tensors, (*arguments, form[-1]))
    out, _, _, q, *_ = tensors
    if out is None:
        dtype = result_dtypes(q.dtype)[0]
        out = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    lse = forward_kvcache(out, *tensors[1:], *flat(values))
    return (out, lse) if return_lse else out


#: Fields of `CacheTensors` that come by name.
_OTHERS = (TREE_WORDS, *DESCALES, *BLOCK_SCALES, *SCORE_MOD.tensors)
_NO_OTHERS = [None] * len(_OTHERS)
_AT_OTHERS = CacheTensors._fields.index(_OTHERS[0])
assert CacheTensors._fields[_AT_OTHERS : _AT_OTHERS + len(_OTHERS)] == _OTHERS
#: Fields that calls with new rows may have or lack, beside out and those.
_BEFORE_OTHERS = slice(CacheTensors._fields.index("sink"), _AT_OTHERS)
_BEHIND_OTHERS = slice(_AT_OTHERS + len(_OTHERS), None)

_SCHEDULER_METADATA = CacheTensors._fields.index(SCHEDULER_METADATA)
#: Eager calls; `operators` has the kind of the same operator's body.
_EAGER_KVCACHE = plans.Kind("forward_kvcache", resolve_cache_call, plan_cache, WRITTEN_PLACES)
