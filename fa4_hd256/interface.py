"""The public functions. Eager calls go to their plan at once (`plans`), others through a torch
operator (`ops.operators`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from . import plans
from .call import process
from .call.autocast import autocast, is_autocasting
from .call.checks import are_differentiated, bounds_of, check_kinds, check_lists, check_mask_of
from .call.descales import refuse_gradients
from .call.forward_problem import (
    LONGEST,
    Call,
    bounded,
    check_differentiable,
    longest_of,
    resolve_call,
    usable_tiles,
)
from .call.memory import check_out, check_writable_again
from .call.mxfp8_scales import check_alone
from .call.operator_arguments import OTHERS, RAGGED, ForwardTensors
from .call.options import BY_RULE, NO_WINDOW, flags_of
from .call.packed_ds import BackwardMetadata, check_metadata
from .call.process import constant_in_graphs, is_intercepted, is_transformed, refuse_tangents
from .call.scheduler_metadata import marked
from .call.tile_mask import TileMask
from .call.tree_mask import check_apart as check_masks_apart
from .call.tree_mask import tree_words as words_of
from .gpus.family import architecture_of
from .kernels.kernel_set import kernels_of
from .kernels.mask.block_mask import MASK_BITS, MASK_BLOCKS, MASK_KEY_BITS, MASK_STEPS, MASK_TILE
from .kernels.problem_class import DESCALES
from .kernels.rows.sequences import DS_BEGINS, TREE_WORDS
from .mask_mods import MaskMod
from .masks import as_tile_mask
from .ops import mxfp8
from .ops.autograd import attend_with_gradients, listed_tiles_of
from .ops.functional import attend_under_transforms
from .ops.operators import OUT, forward, forward_max_logits, forward_out
from .packed_row import packed_row
from .quantize.mxfp8 import Mxfp8Gradients
from .run.forward import plan_call
from .score_mods import ScoreMod


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    num_splits: int = BY_RULE,
    batch_invariant: bool = False,
    config: Any = None,
    backward_config: Any = None,
    use_clc: bool | None = None,
    out: torch.Tensor | None = None,
    block_mask: Any = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    tree_mask: torch.Tensor | None = None,
    mask_mod: MaskMod | None = None,
    return_max_logits: bool = False,
    out_gate: torch.Tensor | None = None,
    mxfp8_gradients: Mxfp8Gradients | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(softmax_scale * q k^T) v at head_dim 256.

    All arguments behind v are keyword-only: other libraries have other arguments in these places
    (`fa4_hd256.compat` has their signatures). The result is one tensor unless return_lse is True;
    flash-attn-4 returns a pair always.

    q: (batch, seqlen_q, heads, 256); k, v: (batch, seqlen_k, heads_kv, 256), with heads a multiple
    of heads_kv; bfloat16 or float16, k and v also float8_e4m3fn, and with these q; any lengths from
    1 up. Layouts with the last stride 1 and the base address and other strides multiples of 16
    bytes are used in place, others copied once. CUDA tensors need a GPU of an architecture in
    `fa4_hd256.architectures`, whose kernels they get; for CPU tensors the compiled kernel of that
    which FA4_HD256_ARCH names runs in the simulator.

    softmax_scale: of either sign, up to 1e6, 1 / sqrt(256) if None.
    causal: bottom-right aligned: query i sees the keys j <= i + seqlen_k - seqlen_q.
    window_size: (left, right), query i sees the keys i + seqlen_k - seqlen_q - left to i + seqlen_k
        - seqlen_q + right; None and -1 mean unbounded, other negative numbers are bounds, which put
        the window before or behind the diagonal; causal sets the right one to 0.
    learnable_sink: (heads,) logits that take part in the softmax with a value of 0, or None. With
        +inf a head has out = 0, lse = +inf, and no gradients but that of lse for the sink.
    softcap: scores become softcap * tanh(score / softcap), up to 1e4; 0 for none.
    deterministic: accepted for compatibility; result and gradients are deterministic in any case.
    num_splits: KV splits of each query tile, for calls of few tiles;
        1 to 64, or 0 for the operator's choice (`call.division`).
        Results differ by rounding; the parts take num_splits times out in float32.
    batch_invariant: out and lse of a sequence have the same bits in every batch of the same
        seqlen_q and seqlen_k (of packed sequences max_seqlen_q and max_seqlen_k).
    config, backward_config: tile shapes, stages, exp2 mix of the forward and of the backward, of
        the architecture's own classes (on Blackwell `ForwardConfig` and `BackwardConfig`); if None
        the default one, whose exp2 mix in the forward is that of the tuning table.
    use_clc: whether the dynamic tile scheduler is used; None: what the environment variable
        FA_CLC says, else True in the backward, and in the forward a rule of mask and lengths, or
        True where the process is one of several ranks, whose communication may hold SMs meanwhile.
    out: a tensor like q to which the result is written, and which is returned; any layout that is
        read in place; with q in float8_e4m3fn bfloat16 or float16. Not with gradients.
    block_mask: which keys queries see, instead of causal and window_size: PyTorch's `BlockMask` or
        a mask of `fa4_hd256.masks`; tiles that nobody sees cost nothing (docs/masks.md).
    mask_mod: which keys queries see in its partial tiles, evaluated in the kernels instead of bits
        made before: a function of the user's (`fa4_hd256.mask_mods`).
    tree_mask: which of the last keys, as many as there are queries, each query sees, if causal and
        window_size let it; it sees all keys before those. bool (seqlen_q, seqlen_q) or (batch,
        seqlen_q, seqlen_q), True where seen, up to 64 queries; or the words of
        `fa4_hd256.masks.tree_words`. No gradients (docs/serving.md).
    q_descale, k_descale, v_descale: scales of q, of k and of v in float8_e4m3fn, float32: one
        value, or (batch, heads_kv), that of q too; or of blocks, in float8_e8m0fnu (mxfp8). All or
        none of those in this dtype. No gradients without mxfp8_gradients (docs/serving.md).
    mxfp8_gradients: operands of the gradients in mxfp8, of `quantize.quantize_mxfp8_training`.
        Gradients flow to the tensors that it quantized, and out has their dtype (docs/training.md).
    score_mod: changes scores, softmax_scale * q k, before the mask: ALiBi, or one of the
        user's (`fa4_hd256.score_mods`, docs/masks.md); lse is of what it returns.
    return_max_logits: also return the greatest logit of each head, for QK-clip (MuonClip): (heads,)
        float32, over all queries of the batch and the keys that they see. Logits are softmax_scale
        * q k after softcap and score_mod; a sink is none of them. Exact, deterministic, without a
        gradient; -inf where no query sees a key, NaN with a logit that is NaN. Not with out= or
        with float8.
    out_gate: out becomes out * sigmoid(out_gate), as gated attention has it (Qwen3-Next, Qwen3.5):
        shaped like q, or (batch, seqlen_q, heads), typed like out. Applied in float32 before out is
        rounded; lse does not change. Differentiated, too.

    Returns out, shaped and typed like q (bfloat16 for float8), or (out, lse) with return_lse;
    return_max_logits adds max_logits at the end. lse: (batch, heads, seqlen_q) float32, natural
    log, the sink included. A query that sees no key has out = 0 and lse = -inf (or the sink's
    logit). Autograd differentiates out and lse with respect to q, k, v, learnable_sink and
    out_gate, once.

    Raises TypeError or ValueError for arguments that are not accepted, and NotImplementedError
    where the architecture has no such kernel, before anything is compiled.
    """
    if is_autocasting():
        q, k, v, out_gate = autocast(q, k, v, out_gate, fixed=out)
    others, key, key_of_mask, listed_tiles = NO_TENSORS, None, None, 0
    inputs = q, k, v, learnable_sink, out_gate
    if block_mask is not None or mask_mod is not None:
        masked = _read_masks(inputs, block_mask, mask_mod, tree_mask)
        others, key_of_mask, listed_tiles = masked
    if not (tree_mask is score_mod is q_descale is k_descale is v_descale is None):
        read, key = read_options(tree_mask, score_mod, q_descale, k_descale, v_descale)
        others = {**others, **read}
    arguments = plans.call_fields(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        use_clc=use_clc, num_splits=num_splits, batch_invariant=batch_invariant, config=config,
        backward_config=backward_config, score_mod=key, mask_mod=key_of_mask,
        listed_tiles=listed_tiles,
    )  # fmt: skip
    tensors: tuple[Any, ...] = (*inputs, *_NO_OTHERS, out)
    if others:
        tensors = (*ForwardTensors(*inputs, **others), out)
    form = learnable_sink is None, out_gate is None, *others
    if mxfp8_gradients is not None:
        wanted = return_lse, return_max_logits
        return _attend_mxfp8(mxfp8_gradients, tensors, arguments, form, *wanted)
    return _find_and_run(tensors, arguments, form, return_lse, return_max_logits)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = BY_RULE,
    deterministic: bool = False,
    return_lse: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    batch_invariant: bool = False,
    config: Any = None,
    backward_config: Any = None,
    use_clc: bool | None = None,
    out: torch.Tensor | None = None,
    block_mask: Any = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    tree_mask: torch.Tensor | None = None,
    mask_mod: MaskMod | None = None,
    backward_metadata: BackwardMetadata | None = None,
    return_max_logits: bool = False,
    out_gate: torch.Tensor | None = None,
    mxfp8_gradients: Mxfp8Gradients | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`flash_attn_func` for sequences of different lengths.

    q: (total_q, heads, 256) with cu_seqlens_q, else (batch, seqlen_q, heads, 256); k, v likewise
    with cu_seqlens_k, or with page_table (pages, page_size, heads_kv, 256).

    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 offsets of packed sequences; lengths may be 0.
        Rows behind the last offset belong to no sequence: there out = 0, lse = -inf and gradients
        are 0. Offsets on a GPU that do not ascend from 0, that exceed the rows, or that make a
        sequence longer than max_seqlen_q (in a backward max_seqlen_k, too) give NaN in all rows
        that they describe; on the CPU, or with FA4_HD256_CHECK=1, they are a ValueError.
    max_seqlen_q: the longest query sequence, 0 if all are empty; required with cu_seqlens_q, since
        the grid follows it. max_seqlen_k: the longest key sequence, which the grid of dK and dV
        follows; if None max_seqlen_q where cu_seqlens_k is cu_seqlens_q itself, else the rows of k,
        and the operator's own choice is then one KV split. With page_table if None the rows of all
        pages of a row of it. Either may be a tensor of one integer, of any device: it is not read,
        so nothing waits and nothing is recompiled; max_seqlen_q is then the rows of q, and
        max_seqlen_k as if it were None (docs/serving.md). Sequences that are not packed accept
        both, and have the lengths of q and k.
    seqused_q, seqused_k: (batch,) int32, rows in use of each sequence; rows of k and v past them
        may hold anything, rows of q past them get out = 0 and lse = -inf. More than a sequence has
        is an error on the CPU; on a GPU, where nobody reads them, all its rows.
    page_table: (batch, pages) int32, any row stride: the pages of k and v that hold each sequence's
        keys, in order; all rows of them are in use without seqused_k. Refuses cu_seqlens_k.
        page_size: 1 or more; pages of any strides that TMA takes, never copied. No
        gradients. See docs/serving.md.
    scheduler_metadata: of `get_scheduler_metadata`, in place of num_splits. No gradients.
    backward_metadata: of `get_backward_metadata`, for sequences packed on both sides: their dS then
        takes the tiles that are visible, instead of what the longest sequence leaves room for.
    block_mask, mask_mod: as of `flash_attn_func`, of the packed row, total_q x total_k, in whose
        positions they count; sequences bound it: a query sees keys of its own one alone. With
        cu_seqlens_q and cu_seqlens_k, which may differ (docs/masks.md).
    tree_mask: as of `flash_attn_func`, of at least as many nodes as a sequence has queries; node i
        is query i of a sequence, its key that of the sequence's last keys with the same place.
    q_descale, k_descale, v_descale: as of `flash_attn_func`; with page_table and without q_descale
        also (pages, heads_kv).
    out_gate: as of `flash_attn_func`; shaped like q, or like q without its last dimension.
    mxfp8_gradients: as of `flash_attn_func`.
    The other arguments are those of `flash_attn_func`.

    Returns out like q, or (out, lse), and max_logits at the end as `flash_attn_func` does; lse:
    (heads, total_q) with cu_seqlens_q, else (batch, heads, seqlen_q).

    Raises TypeError or ValueError as `flash_attn_func` does, and NotImplementedError for gradients
    with page_table. Page numbers out of range: ValueError for CPU tensors, or where FA4_HD256_CHECK
    or FA4_HD256_CHECK_PAGES is 1; else undefined.
    """
    if is_autocasting():
        q, k, v, out_gate = autocast(q, k, v, out_gate, fixed=out)
    sequences: tuple[Any, ...]
    sequences = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, scheduler_metadata
    others, key, key_of_mask, listed_tiles = NO_TENSORS, None, None, 0
    result, row = out, None
    if block_mask is not None or mask_mod is not None:
        apart: dict[str, Any] = dict(zip(RAGGED[2:], sequences[2:]))
        apart |= {"tree_mask": tree_mask, "backward_metadata": backward_metadata}
        apart["mxfp8_gradients"] = mxfp8_gradients
        if out is not None:
            check_out(out, q)
            result = out.unsqueeze(0)
        functions = block_mask, mask_mod, score_mod
        row = packed_row((q, k, v), (cu_seqlens_q, cu_seqlens_k), apart, functions)
        q, k, v, score_mod = row.q, row.k, row.v, row.score_mod
        out_gate = out_gate.unsqueeze(0) if isinstance(out_gate, torch.Tensor) else out_gate
        if not (type(max_seqlen_q) in _BOUNDS and type(max_seqlen_k) in _BOUNDS):
            longest_of({}, *bounds_of((max_seqlen_q, max_seqlen_k), q, None, False))
        # Bounds of lengths say nothing of the row, whose one length is that of q.
        sequences, max_seqlen_q, max_seqlen_k = (None,) * 6, None, None
        inputs = q, k, v, learnable_sink, out_gate
        masked = _read_masks(inputs, row.block_mask, row.mask_mod, tree_mask)
        others, key_of_mask, listed_tiles = masked
    inputs = q, k, v, learnable_sink, out_gate
    if not (tree_mask is score_mod is q_descale is k_descale is v_descale is None):
        read, key = read_options(tree_mask, score_mod, q_descale, k_descale, v_descale)
        others = {**others, **read}
    if backward_metadata is not None:
        apart = {"seqused_q": seqused_q, "seqused_k": seqused_k, "page_table": page_table}
        apart["mxfp8_gradients"] = mxfp8_gradients
        check_metadata(backward_metadata, causal, window_size, apart)
        read, listed_tiles = _read_metadata(inputs, backward_metadata)
        others = {**others, **read}
    arguments = plans.call_fields(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        use_clc=use_clc, num_splits=num_splits, batch_invariant=batch_invariant,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, config=config,
        backward_config=backward_config, score_mod=key, mask_mod=key_of_mask,
        listed_tiles=listed_tiles,
    )  # fmt: skip
    found = attend_sequences(
        inputs, sequences, others, arguments, result, return_lse, return_max_logits,
        mxfp8_gradients,
    )  # fmt: skip
    return found if row is None else _without_batch(found, out, return_lse)


def attend_sequences(
    inputs: tuple[Any, ...],
    sequences: tuple[Any, ...],
    others: dict[str, torch.Tensor],
    arguments: tuple[Any, ...],
    out: torch.Tensor | None,
    return_lse: bool,
    return_max_logits: bool = False,
    mxfp8_gradients: Mxfp8Gradients | None = None,
) -> Any:
    """Return the results of `flash_attn_varlen_func`.

    inputs: q, k, v, the sink, the gate. sequences: cu_seqlens_q, cu_seqlens_k, seqused_q,
    seqused_k, page_table, scheduler_metadata. others: further tensors by name. arguments: fields
    of `Call`.
    """
    longest_q, longest_k = arguments[LONGEST]
    # `isinstance` takes five times as long for what is no tensor.
    if not (longest_q is longest_k is None) and (
        isinstance(longest_q, torch.Tensor) or isinstance(longest_k, torch.Tensor)
    ):
        arguments = bounded(arguments, inputs[0], others.get(TREE_WORDS))
    tensors: tuple[Any, ...] = (*inputs, *sequences, *_NO_OTHERS[len(sequences) :], out)
    if others:
        tensors = (*ForwardTensors(*inputs, *sequences, **others), out)
    offsets_q, offsets_k, *_, metadata = sequences
    # What the scheduler metadata is for. In graphs tensors have no marks.
    mark = None if metadata is None or is_intercepted() else marked(metadata)
    is_missing = [tensor is None for tensor in sequences]
    form = inputs[3] is None, inputs[4] is None, *is_missing, offsets_k is offsets_q, mark, *others
    if mxfp8_gradients is not None:
        wanted = return_lse, return_max_logits
        return _attend_mxfp8(mxfp8_gradients, tensors, arguments, form, *wanted)
    return _find_and_run(tensors, arguments, form, return_lse, return_max_logits)


def _without_batch(found: Any, out: torch.Tensor | None, return_lse: bool) -> Any:
    """Return the results of a `PackedRow` as those of its sequences. out: the user's, or None."""
    first, *others = found if isinstance(found, tuple) else (found,)
    if return_lse:
        others[0] = others[0].squeeze(0)
    first = first.squeeze(0) if out is None else out
    return (first, *others) if others else first


#: Types of max_seqlen that need no check where it is not read.
_BOUNDS = (int, type(None))
#: Tensors by name, of calls that have none.
NO_TENSORS: dict[str, torch.Tensor] = {}
#: Fields of `ForwardTensors` behind the gate, of calls that have none of these.
_NO_OTHERS = (None,) * (len(OTHERS) - 1)
_Q_DESCALE, _K_DESCALE, _V_DESCALE = map(ForwardTensors._fields.index, DESCALES)


def _read_masks(
    tensors: tuple[Any, ...], block_mask: Any, mask_mod: Any, tree_mask: Any
) -> tuple[dict[str, torch.Tensor], str | None, int]:
    """Return (tensors by name, mask_mod's key, `listed_tiles`); tensors: q, k, v, sink, gate."""
    read, key = MaskMod.read_by(mask_mod)
    check_masks_apart(tree_mask, block_mask)
    q, k, *_ = tensors
    has_gradients = are_differentiated(tensors) or process.may_have_gradients(tensors)
    mask, masks = mask_tables(block_mask, q, k, has_gradients, mask_mod is None)
    return {**masks, **read}, key, listed_tiles_of(mask) if has_gradients else 0


def read_options(
    tree_mask: Any, score_mod: Any, *scales: Any
) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return (tensors by name, the key of score_mod) of a call with some of these."""
    words = None if tree_mask is None else words_of(tree_mask)
    named = dict(zip((TREE_WORDS, *DESCALES), (words, *scales), strict=True))
    read, key = ScoreMod.read_by(score_mod)
    return {**{name: t for name, t in named.items() if t is not None}, **read}, key


def _read_metadata(
    tensors: tuple[Any, ...], metadata: BackwardMetadata
) -> tuple[dict[str, torch.Tensor], int]:
    """Return (tensors by name, `listed_tiles`) of backward_metadata, which only gradients need."""
    if not are_differentiated(tensors):
        return NO_TENSORS, 0
    return {DS_BEGINS: metadata.ds_begins}, metadata.ds_tiles


def mask_tables(
    block_mask: Any, q: Any, k: Any, gradients: bool, with_bits: bool = True
) -> tuple[TileMask, dict[str, torch.Tensor]]:
    """A block mask, and what kernels get of it, by name; gradients: what those of the gradients
    get, too; with_bits: False where a mask_mod takes their place.

    Raises as `as_tile_mask`, and ValueError for one of other lengths or of another device.
    """
    check_lists(block_mask)
    check_kinds({"q": q, "k": k}, {}, BY_RULE)
    sizes = {"batch": q.shape[0], "heads": q.shape[2]} if q.ndim == 4 else {}
    mask = as_tile_mask(block_mask, with_bits=with_bits, **sizes)
    check_mask_of(mask.lengths, mask.device, q, k)
    found = {MASK_STEPS: mask.steps(_halves(q.device))}
    if gradients:
        found[MASK_BLOCKS] = mask.blocks
    bits = {MASK_BITS: mask.bits, MASK_KEY_BITS: mask.key_bits if gradients else None}
    return mask, found | {name: made for name, made in bits.items() if made is not None}


@constant_in_graphs
def _halves(device: torch.device) -> int:
    """Tiles of a mask that a tile of the forward's queries has."""
    architecture = architecture_of(device)
    known = kernels_of(architecture).forward_tiles(None)
    tiles, *_ = usable_tiles(known, architecture, (MASK_STEPS,))
    return tiles.rows // MASK_TILE


def _find_and_run(
    tensors: Sequence[Any],
    arguments: tuple[Any, ...],
    form: tuple[Any, ...],
    return_lse: bool,
    return_max_logits: bool,
) -> Any:
    """Return the results of a public function, all of whose arguments are as users give them.

    Nothing is checked here but gradients, out and which results are requested: `plans.find` has the
    arguments of a first call checked (`resolve_call`, then the plan), and those of a call like one
    before were checked then.
    tensors: fields of `ForwardTensors`, then out, to which the first result is written. arguments:
    fields of `Call`. form: as of `plans.facts_of`.
    """
    out, only_first = tensors[-1], return_lse is return_max_logits is False
    # No key holds these two, so each call checks them.
    if not only_first and (return_lse is not True or return_max_logits is not False):
        named = {"return_lse": return_lse, "return_max_logits": return_max_logits}
        return_lse, return_max_logits = flags_of(**named)
    # Of scales none are accepted without that of k.
    if tensors[_K_DESCALE] is not None or out is not None:
        _check_out_and_gradients(tensors, return_max_logits)
    found, kind = None, _EAGER_MAXIMA if return_max_logits else _EAGER_FORWARD
    if not is_intercepted():
        found = plans.find(plans.facts_of(kind, arguments, form), tensors)
    if found is None:
        results = _through_dispatcher(tensors, arguments, return_max_logits)
    else:
        execution, addresses = found
        q, k, v, sink, gate = tensors[:5]
        if out is not None:
            # Neither modes nor addresses are in a key, so each call checks them.
            check_writable_again(out, tensors[:-1])
            results = plans.run(kind, execution, tensors, addresses)
        # Plain tensors, or none would have been found. Written out: `any` takes three times as
        # long.
        elif torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sink is not None and sink.requires_grad)
            or (gate is not None and gate.requires_grad)
        ):
            if not execution.is_differentiable:
                # Keys lack requires_grad, so the plan may be of a call without gradients.
                check_differentiable(ForwardTensors(*tensors[:-1]), execution.values)
                execution.is_differentiable = True
            results = attend_with_gradients((kind, *found, tensors), q, k, v, sink, gate)
        else:
            results = plans.run(kind, execution, tensors, addresses, only_first)
    if return_max_logits:
        return results if return_lse else results[::2]
    return results if return_lse else results[0]


def _attend_mxfp8(
    given: Mxfp8Gradients,
    tensors: Sequence[Any],
    arguments: tuple[Any, ...],
    form: tuple[Any, ...],
    return_lse: bool,
    return_max_logits: bool,
) -> Any:
    """Return a public function's results in mxfp8. The others: as of `_find_and_run`."""
    named = {"return_lse": return_lse, "return_max_logits": return_max_logits}
    return_lse, return_max_logits = flags_of(**named)
    *inputs, given_out = tensors
    beside = {"out": given_out is not None, "return_max_logits": return_max_logits}
    refused = [name for name, is_given in beside.items() if is_given]
    call = Call(*arguments)

    def run(out: torch.Tensor) -> Any:
        of_forward = tuple(call._replace(backward_config=None))
        return _find_and_run((*inputs, out), of_forward, form, True, False)[1]

    out, lse = mxfp8.attend(given, ForwardTensors(*inputs), call, run, refused)
    return (out, lse) if return_lse else out


def _check_out_and_gradients(tensors: Sequence[Any], return_max_logits: bool) -> None:
    """Raise NotImplementedError for gradients of descales, and of calls with out; ValueError for
    out beside return_max_logits, and as `check_alone`."""
    *inputs, out = tensors
    if out is not None and return_max_logits:
        raise ValueError(
            "out is given with return_max_logits=True; accepted: a call without out=, whose result "
            "is a new tensor"
        )
    refuse_gradients(*inputs[_Q_DESCALE : _V_DESCALE + 1])
    if not is_intercepted():
        check_alone(DESCALES[2], inputs[_V_DESCALE])
    if out is not None and are_differentiated((*inputs[:5], out)):
        raise NotImplementedError(
            "out= has no gradients, but one of q, k, v, learnable_sink, out_gate and out requires "
            "them; call "
            "without out=, or inside torch.no_grad()"
        )


def _through_dispatcher(
    tensors: Sequence[Any], arguments: tuple[Any, ...], return_max_logits: bool
) -> tuple[torch.Tensor, ...]:
    """Return (out, lse), with return_max_logits also max_logits, by way of PyTorch's dispatcher:
    the operator's body finds or makes the plan. Raises as `refuse_tangents` and `Call.values`."""
    *inputs, out = tensors
    refuse_tangents(tensors)
    named = ForwardTensors(*inputs)
    values, is_packed = Call(*arguments).values(named), named.cu_seqlens_q is not None
    if out is not None:
        check_out(out, named.q)
    batched = named.with_batches()
    if out is not None:
        lse = forward_out(out.unsqueeze(0) if is_packed else out, *batched, *values)
        return out, lse.squeeze(0) if is_packed else lse
    if return_max_logits:
        results = forward_max_logits(*batched, *values)
    elif is_transformed():
        results = attend_under_transforms(batched, values)
    else:
        results = forward(*batched, *values)
    result, lse, *max_logits = results
    if is_packed:
        result, lse = result.squeeze(0), lse.squeeze(0)
    return result, lse, *max_logits


#: Kinds of eager calls; `operators` has those of the same operators' bodies.
_EAGER_FORWARD = plans.Kind("forward", resolve_call, partial(plan_call, has_batch=False), (OUT,))
_EAGER_MAXIMA = plans.Kind(
    "forward_max_logits", resolve_call, partial(plan_call, has_batch=False, max_logits=True)
)
