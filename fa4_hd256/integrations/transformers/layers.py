"""The attention function of transformers' AttentionInterface."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from ...call.autocast import autocast
from ...call.checks import are_differentiated
from ...call.functions.until_changed import UntilChanged
from ...call.packed_ds import BackwardMetadata
from ...interface import flash_attn_func, flash_attn_varlen_func
from ...kernels.limits import HEAD_DIM
from ...metadata import get_backward_metadata
from .. import other_dims
from ..given_results import backward_config_of
from ..warnings_once import warn_once
from . import graphs, restarts
from .chosen_keys import INDICES, joined
from .descriptions import (
    KEY_END,
    KEY_START,
    QUERY_END,
    QUERY_START,
    Description,
    Window,
    described,
    of_last_queries,
    packed_seen,
    seen_by,
)

#: It has no "flash" in it: transformers treats such names as releases of flash-attn.
NAME = "fa4_hd256"
#: It has "flash" in it: continuous batching takes such names only, besides two of its own.
BATCHING_NAME = "fa4_hd256_flash"

#: Options of transformers that change the result and are not supported.
REFUSED = {
    "dropout": "attention dropout; set config.attention_dropout to 0 or call model.eval()",
    "output_attentions": "attention weights; load the model with attn_implementation='eager'",
    "block_table": "block tables, which transformers keeps for flash-attn's own releases",
    "position_bias": "a position bias",
    "score_mod": "a score modification",
    "sinks": "a sink for each query; s_aux has one for each head",
    "block_indices": "blocks of keys that a layer chooses",
}

#: Options that are supported in layers of another head_dim, which PyTorch computes.
OF_FALLBACK = "dropout", "position_bias"

#: Options of `attention` that describe packed sequences: all or none are passed.
PACKED = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"

#: Option of `attention`, which layers of `gates` pass.
OUT_GATE = "out_gate"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention, as transformers' AttentionInterface calls it.

    query: (batch, heads, seqlen_q, 256); key, value: (batch, heads_kv, seqlen_k, 256), with the
    cached keys before the new ones.
    attention_mask: the result of `mask`, which describes causality, windows and padding; or a
    user's mask (1 or batch, 1 or heads, seqlen_q, seqlen_k): bool, True where a key is seen, or
    float, 0 where a key is seen and the lowest number elsewhere. Without a mask the layer's own
    settings count: see `_window_of_layer`.
    options: scaling, softcap, s_aux (a sink logit per head), is_causal and sliding_window of the
    layer. `PACKED`: offsets and longest sequence; the rows of all batch entries together are then
    packed sequences. cache: the cache of continuous batching before transformers 5.24. ds_bytes: as
    for `register`. out_gate: (batch, seqlen_q, heads, 256), as of `flash_attn_func`. indices: as of
    `chosen_keys`. position_ids: those of packed sequences are refused without a mask of packed
    sequences (`restarts`). Options in `REFUSED` are refused; any other has no effect.

    Returns (out, None); out: (batch, seqlen_q, heads, 256), with 0 in rows of padding.

    Raises NotImplementedError for options that are not supported, TypeError and ValueError as
    `flash_attn_func` does.
    """
    if options.get("cache") is not None:
        key, value = _updated(module, key, value, options)
    query, key, value, gate = autocast(query, key, value, options.pop(OUT_GATE, None))
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    is_other = other_dims.has_other_dim(q, k, v)
    _check_offered(options, OF_FALLBACK if is_other else ())
    _check_not_chosen_and_packed(options)
    dense, description = _read_mask(module, q, k, attention_mask, options)
    if description is not None and not _is_packed(description, options):
        restarts.check(options.get("position_ids"), description, (q.shape[1], k.shape[1]))
    if options.get(INDICES) is not None:
        dense = _seen_of_chosen((dense, description), q, k, options)
        attention_mask = description = None
    packed = None if description is None else _packed_lengths(description, options)
    if is_other and packed is not None and description is not None:
        out = _packed_fallback((query, key, value), description.window, packed, options)
        return _gated(out, gate), None
    if is_other:
        seen, causal = _seen_and_causal((dense, description), attention_mask, q, k)
        return _gated(attend_by_pytorch(query, key, value, seen, causal, options), gate), None
    _check_dtypes(q, k, v)
    read, options = (dense, description, packed), {**options, OUT_GATE: gate}
    return _by_kernels((q, k, v), read, attention_mask, options), None


def batched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute `attention` in continuous batching.

    options: with the cache, or from transformers 5.24 on, where layers update it, with the offsets
    of the sequences. Raises ValueError if they have neither: transformers builds no masks under
    this name, so any other call would lack its mask.
    """
    if options.get("cache") is None and options.get(PACKED[1]) is None:
        raise ValueError(
            f"the model's attention is {BATCHING_NAME!r}, that of continuous batching "
            f"(generate_batch); for all else call model.set_attn_implementation({NAME!r})"
        )
    return attention(module, query, key, value, attention_mask, **options)


def _check_offered(options: dict[str, Any], allowed: tuple[str, ...]) -> None:
    for name, what in REFUSED.items():
        value = options.get(name)
        is_neutral = value is None or (isinstance(value, (bool, float, int)) and not value)
        if not is_neutral and name not in allowed:
            raise NotImplementedError(f"{name} is given; {NAME} does not offer {what}")


def _check_dtypes(*tensors: torch.Tensor) -> None:
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if torch.float32 in dtypes or torch.float64 in dtypes:
        given = " and ".join(map(str, dtypes))
        raise TypeError(
            f"queries, keys and values of a layer have dtype {given}; accepted: all torch.bfloat16 "
            "or all torch.float16: load the model with dtype=torch.bfloat16, or run it under "
            "torch.autocast(device_type, torch.bfloat16), which casts float32"
        )


def _read_mask(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[Any, Description | None]:
    """Return (a bool mask of four dimensions, None) or (None, the description of the mask)."""
    is_packed = options.get(PACKED[0]) is not None
    if attention_mask is None:
        window = _window_of_layer(module, options)
        if not is_packed:
            _check_alignment(window, q, k)
        return None, Description(window)
    description = described(attention_mask)
    if description is not None:
        _check_keys(description, k)
        _check_not_cut(description, q, k)
        return None, of_last_queries(description, q.shape[1])
    if is_packed:
        raise ValueError(
            f"attention_mask has four dimensions and {PACKED[0]} is given; accepted: one of them. "
            "Layers that choose keys need a mask: pass packed sequences by position_ids alone, "
            "with use_cache=False"
        )
    is_additive = attention_mask.is_floating_point()
    if not (is_additive or attention_mask.dtype == torch.bool) or attention_mask.ndim != 4:
        raise ValueError(
            f"attention_mask is a {attention_mask.dtype} tensor of shape "
            f"{tuple(attention_mask.shape)}; accepted: a mask of shape (batch, seqlen) given to "
            "the model, 0 for padding; a bool one of four dimensions, True where a key is seen; or "
            "a float one of four dimensions, 0 where a key is seen"
        )
    return (_seen_of_additive(attention_mask) if is_additive else attention_mask), None


def _check_not_chosen_and_packed(options: dict[str, Any]) -> None:
    """Raise NotImplementedError for packed sequences by their offsets in a layer whose indexer
    chooses keys."""
    given = [name for name in PACKED if options.get(name) is not None]
    if options.get(INDICES) is not None and given:
        raise NotImplementedError(
            f"{INDICES} is given with {', '.join(given)}; accepted: sequences of a batch, or "
            "packed ones by position_ids alone, with use_cache=False"
        )


def _seen_of_chosen(
    read: tuple[Any, Description | None],
    q: torch.Tensor,
    k: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return the bool mask, of four dimensions, of a layer whose indexer chooses keys. read: of
    `_read_mask`."""
    dense, description = read
    if description is not None:
        dense = seen_by(description, q.shape[:2], k.shape[1], q.device)
    return joined(options[INDICES], dense, k.shape[1])


def _is_packed(description: Description, options: dict[str, Any]) -> bool:
    is_described = description.offsets is not None or description.begins is not None
    return is_described or any(options.get(name) is not None for name in PACKED)


def _check_keys(description: Description, k: torch.Tensor) -> None:
    """Raise ValueError for a mask of another length than the layer's keys."""
    if description.keys is None or description.keys == k.shape[1]:
        return
    raise ValueError(
        f"attention_mask was made for {description.keys} keys in a layer with {k.shape[1]}; "
        "accepted: an attention_mask with an entry for each key. generate(prefill_chunk_size=..) "
        "cuts the encoder's mask: leave it out for encoder-decoder models with padding"
    )


def _check_not_cut(description: Description, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise NotImplementedError for a mask of packed sequences that the model has cut to the last
    queries: `descriptions`, NOTE [last queries]. Such masks are of as many queries as keys."""
    if _is_packed(description, {}) and q.shape[1] != k.shape[1]:
        raise NotImplementedError(
            f"attention_mask describes packed sequences of {k.shape[1]} rows in a layer with "
            f"{q.shape[1]} queries; accepted: as many queries as keys (logits_to_keep=0)"
        )


#: Results of `_seen_of_additive` by mask.
_additive = UntilChanged()


def _seen_of_additive(mask: torch.Tensor) -> torch.Tensor:
    """Return the bool mask for a float mask that is added to scores; all layers of a pass share it.
    Raises ValueError unless each entry is 0, or -inf or the dtype's lowest number: other numbers
    are a bias. Under torch.compile the graph raises RuntimeError instead."""
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "attention_mask is a float tensor that requires gradients; accepted: a constant one, "
            f"0 where a key is seen. {NAME} has no gradients of a bias"
        )
    lowest = torch.finfo(mask.dtype).min
    if torch.compiler.is_compiling():
        seen = mask == 0
        torch._assert_async((seen | (mask <= lowest)).all(), _BIAS)
        return seen

    def make() -> torch.Tensor:
        seen = mask == 0
        if not (seen | (mask <= lowest)).all():
            raise ValueError(_BIAS)
        return seen

    made: torch.Tensor = _additive.made(mask, make)
    return made


_BIAS = (
    "attention_mask is a float tensor with other numbers than 0 and the lowest one of its dtype, a "
    "bias; accepted: 0 where a key is seen, torch.finfo(dtype).min or -inf where not"
)


def _by_kernels(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    read: tuple[torch.Tensor | None, Description | None, dict[str, Any] | None],
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    (q, k, v), (dense, description, packed) = tensors, read
    arguments: dict[str, Any] = {
        "softmax_scale": options.get("scaling"),
        "softcap": options.get("softcap") or 0.0,
        "learnable_sink": options.get("s_aux"),
    }
    begins = None if description is None or packed is not None else description.begins
    mask = begins if dense is None else dense
    if mask is not None and (begins is not None or torch.compiler.is_compiling()):
        window = (None, None) if description is None else description.window
        out = graphs.attend(q, k, v, mask, window, arguments, options.get("ds_bytes"))
        return _gated(out, options[OUT_GATE])
    arguments[OUT_GATE] = options[OUT_GATE]
    arguments["backward_config"] = backward_config_of(options.get("ds_bytes"), q.device)
    if description is None:
        assert dense is not None
        arguments["block_mask"] = graphs.tiles_of(dense)
        return cast(torch.Tensor, flash_attn_func(q, k, v, **arguments))
    arguments["window_size"] = description.window
    if packed is not None:
        # The user's own offsets may change between calls, and are not read.
        counted = attention_mask if options.get(PACKED[0]) is None else None
        if counted is not None and are_differentiated((q, k, v, options.get("s_aux"))):
            offsets = packed["cu_seqlens_q"]
            arguments["backward_metadata"] = _metadata_of(counted, offsets, description.window)
        return _packed(q, k, v, packed | arguments)
    if description.ranges is not None:
        return _padded(q, k, v, description.ranges, arguments)
    return cast(torch.Tensor, flash_attn_func(q, k, v, **arguments))


def _gated(out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Apply a gate by PyTorch, where no kernel does. Both: (batch, seqlen_q, heads, dim)."""
    return out if gate is None else (out.float() * torch.sigmoid(gate.float())).to(out.dtype)


def _packed_fallback(
    heads_first: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: Window,
    packed: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    rows = [tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in heads_first]
    offsets = packed["cu_seqlens_q"], packed["cu_seqlens_k"]
    seen = packed_seen(window, offsets, (rows[0].shape[2], rows[1].shape[2]))
    out = attend_by_pytorch(rows[0], rows[1], rows[2], seen[None, None], False, options)
    batch, _, length, _ = heads_first[0].shape
    return out.view(batch, length, *out.shape[2:])


#: Results of `seen_by` by mask, each by lengths.
_seen = UntilChanged()


def _seen_and_causal(
    read: tuple[torch.Tensor | None, Description | None],
    attention_mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
) -> tuple[torch.Tensor | None, bool]:
    """Return (mask of `attend_by_pytorch`, shared by all layers, causal). read: of `_read_mask`."""
    dense, description = read
    if description is None:
        return dense, False
    if description.ranges is None and description.begins is None:
        if description.window == (None, None):
            return None, False
        if description.window == (None, 0) and q.shape[1] == k.shape[1]:
            return None, True
    lengths = q.shape[:2], k.shape[1]
    make = partial(seen_by, description, *lengths, q.device)
    if attention_mask is None or torch.compiler.is_compiling():
        return make(), False
    return _seen.made(attention_mask, make, lengths), False


def _window_of_layer(module: torch.nn.Module, options: dict[str, Any]) -> Window:
    """Return the window by the layer's settings, for a model that built no mask.

    is_causal is an option of the call, else the module's attribute. sliding_window includes the
    query itself. DiffusionGemma's decoder sees all keys: its sliding layers have a short cache and
    no window.

    Raises ValueError for a window without causality: transformers' masks include the key at that
    distance, its flash attention does not.
    """
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    reach = options.get("sliding_window")
    kind = getattr(getattr(module, "config", None), "model_type", "")
    if reach is None or (not causal and kind.startswith("diffusion_gemma")):
        return None, 0 if causal else None
    if not causal:
        raise ValueError(
            f"sliding_window is {reach} in a layer that is not causal, and attention_mask is None; "
            "accepted: a mask of transformers' create_bidirectional_sliding_window_mask, or "
            "sliding_window=None"
        )
    return reach - 1, 0


def _check_alignment(window: Window, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise ValueError for a causal layer without a mask whose lengths differ: transformers' SDPA
    aligns the first rows, its flash attention the last rows."""
    if window[1] is None or q.shape[1] == 1 or q.shape[1] == k.shape[1]:
        return
    raise ValueError(
        f"attention_mask is None in a causal layer with {q.shape[1]} queries and {k.shape[1]} "
        "keys; accepted: a mask that transformers makes for the model, equal numbers, or 1 query"
    )


def _updated(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add key and value to the cache of continuous batching, and return all of its keys and values.
    The cache writes the offsets of its sequences into options."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    cache = options["cache"]
    if not isinstance(cache, PagedAttentionCache):
        raise NotImplementedError(
            f"cache is a {type(cache).__name__}; accepted: the PagedAttentionCache of continuous "
            "batching"
        )
    return cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options
    )


def _packed_lengths(description: Description, options: dict[str, Any]) -> dict[str, Any] | None:
    lengths: list[Any] = [options.get(name) for name in PACKED]
    missing = [name for name, value in zip(PACKED, lengths) if value is None]
    if len(missing) == len(PACKED):
        if description.offsets is None:
            return None
        offsets, longest = description.offsets, description.longest
        lengths = [offsets, offsets, longest, longest]
    elif missing:
        raise ValueError(
            f"{', '.join(missing)} is missing; accepted: {', '.join(PACKED)} all, or none"
        )
    elif description.ranges is not None:
        raise ValueError(
            f"attention_mask describes padding and {PACKED[0]} packed sequences; accepted: one of "
            "them"
        )
    offsets_q, offsets_k, longest_q, longest_k = lengths
    # If both offsets are one tensor, the kernels know that the lengths are equal.
    packed_q = offsets_q.int()
    packed_k = packed_q if offsets_k is offsets_q else offsets_k.int()
    return {
        "cu_seqlens_q": packed_q,
        "cu_seqlens_k": packed_k,
        "max_seqlen_q": int(longest_q),
        "max_seqlen_k": int(longest_k),
    }


#: Results of `get_backward_metadata` by mask, each by window.
_metadata = UntilChanged()


def _metadata_of(
    attention_mask: torch.Tensor, offsets: torch.Tensor, window: Window
) -> BackwardMetadata:
    """Return the metadata of sequences that `mask` has counted. All layers of a pass share it."""
    make = partial(get_backward_metadata, offsets, None, False, window)
    metadata: BackwardMetadata = _metadata.made(attention_mask, make, window)
    return metadata


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    if arguments[OUT_GATE] is not None:
        arguments = {**arguments, OUT_GATE: arguments[OUT_GATE].flatten(0, 1)}
    out = flash_attn_varlen_func(*(tensor.flatten(0, 1) for tensor in (q, k, v)), **arguments)
    return cast(torch.Tensor, out).view(q.shape)


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """Attend to the rows in use, moved to the front and counted by seqused, without waiting."""
    first_key, first_query = ranges[:, KEY_START], ranges[:, QUERY_START]
    if arguments[OUT_GATE] is not None:
        arguments = {**arguments, OUT_GATE: _rolled(arguments[OUT_GATE], first_query)}
    out = flash_attn_varlen_func(
        _rolled(q, first_query),
        _rolled(k, first_key),
        _rolled(v, first_key),
        seqused_q=(ranges[:, QUERY_END] - first_query).int(),
        seqused_k=(ranges[:, KEY_END] - first_key).int(),
        **arguments,
    )
    return _rolled(cast(torch.Tensor, out), -first_query)


def _rolled(tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return (batch, seqlen, ...), each sequence rolled so that its row `first` becomes row 0."""
    rows = torch.arange(tensor.shape[1], device=tensor.device)
    rows = (rows + first[:, None]) % tensor.shape[1]
    return tensor[torch.arange(tensor.shape[0], device=tensor.device)[:, None], rows]


# ---------------------------------------------------------------- another head_dim


class _Layer(NamedTuple):
    num_key_value_groups: int


def attend_by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    causal: bool,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Compute attention as transformers' SDPA does, with a softcap or a sink by single operations.

    query: (batch, heads, seqlen_q, dim); key, value: (batch, heads_kv, seqlen_k, dim), value of any
    dim. seen: bool, (1 or batch, 1 or heads, seqlen_q, seqlen_k), or None for all keys. causal:
    replaces `seen` where lengths are equal. options: those of the layer: scaling, softcap, s_aux,
    dropout, position_bias, a bias of (1 or batch, 1 or heads, seqlen_q, seqlen_k). The first call
    for each head_dim is logged.

    Returns (batch, seqlen_q, heads, dim of value). Raises NotImplementedError for dropout beside a
    softcap or a sink.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    by_sdpa = not options.get("softcap") and options.get("s_aux") is None
    dims = "/".join(map(str, dict.fromkeys((query.shape[-1], value.shape[-1]))))
    how = "scaled_dot_product_attention" if by_sdpa else "single operations (softcap or sink)"
    warn_once(f"layers of head_dim {dims} run in PyTorch's {how}; kernels here take {HEAD_DIM}")
    bias = options.get("position_bias")
    if causal and (bias is not None or not by_sdpa):
        lengths = query.shape[2], key.shape[2]
        seen = torch.ones(lengths, dtype=torch.bool, device=query.device).tril()[None, None]
    groups = query.shape[1] // key.shape[1]
    if not by_sdpa:
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return _by_operations(query, key, value, seen, options).transpose(1, 2).contiguous()
    mask = seen
    if bias is not None:
        # In the mask: a release of transformers whose SDPA takes no bias would drop it in silence.
        lowest = torch.finfo(query.dtype).min
        mask = bias if seen is None else torch.where(seen, bias, lowest)
    layer: Any = _Layer(groups)
    out, _ = sdpa_attention_forward(
        layer,
        query,
        key,
        value,
        mask,
        dropout=options.get("dropout") or 0.0,
        scaling=options.get("scaling"),
        is_causal=causal,
    )
    return out


def _by_operations(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    if options.get("dropout"):
        raise NotImplementedError(
            f"dropout is {options['dropout']} in a layer with a softcap or a sink; accepted: 0 "
            "(config.attention_dropout=0, or model.eval())"
        )
    scale, softcap, sink = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    logits = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if options.get("position_bias") is not None:
        logits = logits + options["position_bias"]
    if seen is not None:
        logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    if sink is not None:
        logits = torch.cat(
            (logits, sink.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)), -1
        )
    weights = logits.softmax(-1)[..., : key.shape[2]]
    if seen is not None:
        # A query that sees no key has weights of 0.
        weights = weights * seen
    return weights.to(value.dtype) @ value
