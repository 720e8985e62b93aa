"""Attention of Hugging Face transformers models.

    from fa4_hd256.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4_hd256")

transformers asks two functions under the name of an implementation: one for the mask, once per
forward pass and kind of layer, and one for the attention of each layer. The attention function
knows causal and window from the layer; the mask function checks that the model asks for no other
pattern and describes padding. Without a registered mask function transformers builds no mask at
all and drops the padding in silence.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch

from fa4_hd256.call.checks import are_differentiated
from fa4_hd256.call.packed_ds import BackwardMetadata
from fa4_hd256.interface import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.masks import from_dense
from fa4_hd256.metadata import get_backward_metadata
from fa4_hd256.until_changed import UntilChanged

from .backward_memory import backward_config_of, check_ds_bytes

_log = logging.getLogger(__name__)

#: Without "flash" in it: transformers treats such names as releases of flash-attn.
NAME = "fa4_hd256"
#: With it: continuous batching takes no other names but those of its own two.
BATCHING_NAME = "fa4_hd256_flash"

#: transformers versions whose mask interface this file speaks: from, and before.
VERSIONS = ((5, 20), (6, 0))

#: What of transformers' call would change the result and is not offered.
REFUSED = {
    "dropout": "attention dropout; set config.attention_dropout to 0 or call model.eval()",
    "output_attentions": "attention weights; load the model with attn_implementation='eager'",
    "block_table": "block tables, which transformers keeps for flash-attn's own releases",
    "position_bias": "a position bias",
    "score_mod": "a score modification",
}

#: What describes packed sequences among the options of `attention`: all of them, or none.
PACKED = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"

#: Columns of the tensor that `mask` hands to `attention` where there is padding.
KEY_START, KEY_END, QUERY_START, QUERY_END = range(4)


def register(name: str = NAME, *, ds_bytes: int | None = None) -> str:
    """Make this attention available to transformers models as `attn_implementation=name`.

    ds_bytes: memory that dS of a backward may take at a time, as of `BackwardConfig`; None: what
    FA4_HD256_DS_BYTES says, or the default.

    Returns name. Raises ImportError where transformers is missing or of a version that this
    function does not know, ValueError for a name that transformers would take for flash-attn and
    ds_bytes below 0, TypeError for such that are no int.
    """
    check_ds_bytes(ds_bytes)
    check_version()
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if "flash" in name:
        raise ValueError(
            f"name is {name!r}; accepted: a name without 'flash', which transformers takes for a "
            "release of flash-attn"
        )
    bounded = attention if ds_bytes is None else functools.partial(attention, ds_bytes=ds_bytes)
    AttentionInterface.register(name, bounded)
    AttentionMaskInterface.register(name, mask)
    return name


def use_in_continuous_batching(model: Any) -> str:
    """Make this attention that of `model` in continuous batching (`model.generate_batch`), and in
    nothing else until another one is set. Returns its name, `BATCHING_NAME`.

    Written into the model's configuration: `set_attn_implementation` looks for names with "flash"
    among releases of flash-attn. Under this name transformers builds no masks, which continuous
    batching does not need; any other use of the model is refused by `batched_attention`.

    Raises ImportError as `register` does.
    """
    check_version()
    from transformers import AttentionInterface

    AttentionInterface.register(BATCHING_NAME, batched_attention)
    model.config._attn_implementation = BATCHING_NAME
    return BATCHING_NAME


def check_version() -> None:
    """Raise ImportError unless transformers is installed and has the interface used here."""
    low, high = (".".join(map(str, version)) for version in VERSIONS)
    wanted = f"fa4_hd256 needs transformers >={low},<{high}"
    try:
        import transformers
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        advice = f"pip install 'transformers>={low},<{high}'"
        raise ImportError(f"{wanted}: {error}; {advice}") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not VERSIONS[0] <= version < VERSIONS[1]:
        raise ImportError(f"{wanted}; transformers {transformers.__version__} is installed")
    missing = {*_positional(mask)} - {*_positional(sdpa_mask)}
    if missing:
        raise ImportError(
            f"{wanted}; the mask functions of transformers {transformers.__version__} do not take "
            f"{', '.join(sorted(missing))}"
        )


def _positional(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' AttentionInterface.

    query: (batch, heads, seqlen_q, 256); key, value: (batch, heads_kv, seqlen_k, 256), with the
    cached keys before the new ones. attention_mask: what `mask` returned, or a bool mask (1 or
    batch, 1 or heads, seqlen_q, seqlen_k) of the user's, which says all, causality too.
    options: scaling, sliding_window (keys visible to a query, itself included), softcap, s_aux
    (a sink logit per head), is_causal (the module's own, if it has one, else True); `PACKED`:
    offsets and longest sequence of the rows of all batch entries together, which are then packed
    sequences; cache: that of continuous batching, which has the cached keys and says where the
    sequences are; ds_bytes: of `register`. Others say nothing that matters here, except those in
    `REFUSED`.

    Returns (out, None), out: (batch, seqlen_q, heads, 256); rows of padding are 0.

    Raises NotImplementedError for what is not offered, TypeError and ValueError as
    `flash_attn_func` does.
    """
    for name, what in REFUSED.items():
        given = options.get(name)
        if given is not None and not (isinstance(given, (bool, float, int)) and not given):
            raise NotImplementedError(f"{name} is given; {NAME} does not offer {what}")
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    reach = options.get("sliding_window")
    window = (None, None) if reach is None else (reach - 1, 0 if causal else reach - 1)
    arguments: dict[str, Any] = {
        "softmax_scale": options.get("scaling"),
        "causal": bool(causal),
        "window_size": window,
        "softcap": options.get("softcap") or 0.0,
        "learnable_sink": options.get("s_aux"),
        "backward_config": backward_config_of(options.get("ds_bytes"), query.device),
    }
    if options.get("cache") is not None:
        key, value = _updated(module, key, value, options)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    lengths = _packed_lengths(attention_mask, options)
    if lengths is not None:
        # Offsets that are given may be other ones, and are nobody's to read.
        counted = attention_mask if options.get(PACKED[0]) is None else None
        if counted is not None and are_differentiated((q, k, v, options.get("s_aux"))):
            arguments["backward_metadata"] = _metadata_of(counted, lengths, arguments)
        return _packed(q, k, v, lengths, arguments), None
    if attention_mask is None:
        return cast(torch.Tensor, flash_attn_func(q, k, v, **arguments)), None
    if attention_mask.dtype == torch.bool and attention_mask.ndim == DIMENSIONS:
        return _masked(q, k, v, attention_mask, arguments), None
    return _padded(q, k, v, attention_mask, arguments), None


def batched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`attention` of continuous batching: options have its cache. Raises ValueError where they
    have none, since then masks, of which this name has none, would be missing."""
    if options.get("cache") is None:
        raise ValueError(
            f"the model's attention is {BATCHING_NAME!r}, that of continuous batching "
            f"(generate_batch); for all else call model.set_attn_implementation({NAME!r})"
        )
    return attention(module, query, key, value, attention_mask, **options)


def _updated(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """key and value with the cached ones, which options then describe: continuous batching."""
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


def _packed_lengths(
    attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> dict[str, Any] | None:
    """Arguments of `flash_attn_varlen_func` for packed sequences; None where they are not."""
    of_mask = _offsets_of(attention_mask)
    given: list[Any] = [options.get(name) for name in PACKED]
    if all(value is None for value in given):
        if of_mask is None:
            return None
        offsets, longest = of_mask
        given = [offsets, offsets, longest, longest]
    elif any(value is None for value in given):
        missing = ", ".join(name for name, value in zip(PACKED, given) if value is None)
        raise ValueError(f"{missing} is missing; accepted: {', '.join(PACKED)} all, or none")
    elif attention_mask is not None and of_mask is None:
        raise ValueError(
            f"attention_mask describes padding and {PACKED[0]} packed sequences; accepted: one of "
            "them"
        )
    offsets_q, offsets_k, longest_q, longest_k = given
    # The same tensor stays the same: lengths of keys are then those of queries.
    packed_q = offsets_q.int()
    packed_k = packed_q if offsets_k is offsets_q else offsets_k.int()
    return {
        "cu_seqlens_q": packed_q, "cu_seqlens_k": packed_k, "max_seqlen_q": int(longest_q),
        "max_seqlen_k": int(longest_k),
    }  # fmt: skip


#: What `get_backward_metadata` made of masks, by window.
_metadata = UntilChanged()


def _metadata_of(
    attention_mask: torch.Tensor, lengths: dict[str, Any], arguments: dict[str, Any]
) -> BackwardMetadata:
    """Of the sequences that `mask` has counted, which all layers of a pass share."""
    known = _metadata.get(attention_mask) or {}
    asked = arguments["causal"], arguments["window_size"]
    if asked not in known:
        known[asked] = get_backward_metadata(lengths["cu_seqlens_q"], None, *asked)
        _metadata[attention_mask] = known
    return known[asked]


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: dict[str, Any],
    arguments: dict[str, Any],
) -> torch.Tensor:
    """Attention of packed sequences, the rows of all batch entries one after the other."""
    rows_q, rows_k, rows_v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out = flash_attn_varlen_func(rows_q, rows_k, rows_v, **lengths, **arguments)
    return cast(torch.Tensor, out).view(q.shape)


#: Of a mask that says for each query and key whether it is seen.
DIMENSIONS = 4
#: What `masks.from_dense` made of masks.
_tiles = UntilChanged()


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dense: torch.Tensor,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """Attention with a mask of four dimensions, whose tiles all layers of a pass share."""
    tiles = _tiles.get(dense)
    if tiles is None:
        tiles = _tiles[dense] = from_dense(dense)
    arguments = {**arguments, "causal": False, "window_size": (None, None), "block_mask": tiles}
    return cast(torch.Tensor, flash_attn_func(q, k, v, **arguments))


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """Attention of the rows in use: they are moved to the front, their numbers being `seqused`.

    Nothing is read back from the device, and all shapes are those of the padded tensors.
    """
    if ranges.dtype != torch.int32 or tuple(ranges.shape) != (q.shape[0], 1, 1, 4):
        raise ValueError(
            f"attention_mask is a {ranges.dtype} tensor of shape {tuple(ranges.shape)}; accepted: "
            "a mask of shape (batch, seqlen) given to the model, 0 for padding, or a bool one of "
            "four dimensions, True where a key is seen"
        )
    ranges = ranges[:, 0, 0]
    first_key, first_query = ranges[:, KEY_START], ranges[:, QUERY_START]
    out = flash_attn_varlen_func(
        _rolled(q, first_query), _rolled(k, first_key), _rolled(v, first_key),
        seqused_q=(ranges[:, QUERY_END] - first_query).contiguous(),
        seqused_k=(ranges[:, KEY_END] - first_key).contiguous(),
        **arguments,
    )  # fmt: skip
    return _rolled(cast(torch.Tensor, out), -first_query)


def _rolled(tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, ...), each sequence rolled so that its row `first` becomes row 0."""
    rows = torch.arange(tensor.shape[1], device=tensor.device)
    rows = (rows + first[:, None]) % tensor.shape[1]
    return tensor[torch.arange(tensor.shape[0], device=tensor.device)[:, None], rows]


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The mask function of transformers' AttentionMaskInterface.

    Queries sit at positions q_offset + [0, q_length), keys at kv_offset + [0, kv_length).
    mask_function: the pattern; full, causal and sliding windows are what kernels compute, any other
    is evaluated, which takes memory for batch * q_length * kv_length booleans. attention_mask:
    (batch, positions) bool, False for padding, or None.

    Returns None where every row is in use, else (batch, 1, 1, 4) int32: the first key in use, the
    end of the keys, the first query, the end of the queries. Of packed sequences, which
    transformers finds where position_ids begin anew: `_packed_mask`. Of other patterns and padding
    between tokens: `_dense`. Four dimensions, because transformers hands such masks on as they are.

    Raises ValueError for other patterns under torch.compile, which cannot evaluate them.
    """
    device, window = options.get("device", "cpu"), options.get("local_size")
    tracing = torch.compiler.is_compiling()
    given = mask_function
    mask_function, sequences = _without_packing(mask_function)
    # A static cache counts on the device; reading it once per pass tells whether it is full.
    if isinstance(q_offset, torch.Tensor) and not tracing:
        q_offset = int(q_offset)
    lengths = (batch_size, q_length, kv_length, q_offset, kv_offset)
    options = {**options, "device": device}
    is_full = _is_full(mask_function, window, lengths, options)
    if is_full is None:
        return _dense(f"mask {_name_of(mask_function)}", given, lengths, attention_mask, options)
    if sequences is not None:
        return _packed_mask(sequences)
    # Cross-attention: keys are another sequence, so their padding says nothing about queries.
    unaligned = is_full and window is None
    used = kv_length if unaligned else q_offset + q_length - kv_offset
    if not tracing and used > kv_length:
        raise ValueError(
            f"the last query is at position {used + kv_offset - 1}, the last key at "
            f"{kv_length + kv_offset - 1}; accepted: keys up to the last query's position at least"
        )
    keys = slice(kv_offset, kv_offset + kv_length)
    padding = None if attention_mask is None else attention_mask[:, keys]
    is_whole = padding is None or (not tracing and bool(padding.all()))
    if is_whole and isinstance(used, int) and used == kv_length:
        if padding is None or padding.shape[1] == kv_length:
            return None
    in_use = (torch.arange(kv_length, device=device) < used).expand(batch_size, -1)
    if padding is not None:
        missing = kv_length - padding.shape[1]
        in_use = in_use & torch.nn.functional.pad(padding, (0, missing))
    ranges = _ranges(in_use, None if unaligned else used - q_length, q_length)
    if not tracing and not _are_contiguous(in_use, ranges):
        return _dense("padding between tokens", given, lengths, attention_mask, options)
    return ranges[:, None, None]


def _dense(
    reason: str,
    mask_function: Callable | None,
    lengths: tuple[int, int, int, Any, int],
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """(batch, 1, q_length, kv_length) bool, True where a key is seen, for patterns that no kernel
    computes, for this reason, which the log says; queries that are padding see nothing."""
    from transformers import masking_utils as known

    _warn_once(reason)
    batch_size, q_length, kv_length, q_offset, kv_offset = lengths
    seen = _evaluated(mask_function or known.causal_mask_function, lengths, options)
    if attention_mask is not None:
        end = max(q_offset + q_length, kv_offset + kv_length)
        padded = torch.nn.functional.pad(attention_mask, (0, max(0, end - attention_mask.shape[1])))
        keys = padded[:, kv_offset : kv_offset + kv_length].bool()
        queries = padded[:, q_offset : q_offset + q_length].bool()
        seen = seen & keys[:, None, None] & queries[:, None, :, None]
    seen = _counted(seen).expand(batch_size, 1, q_length, kv_length)
    return seen


@functools.cache
def _warn_once(reason: str) -> None:
    """A line in the log, at the level that is shown where nobody has set one, that a pass evaluates
    its mask."""
    _log.warning(
        "%s: keys that queries see are no interval (%s); their mask is evaluated in every pass, "
        "for each query and key, and goes to the kernels by tiles (block_mask)", NAME, reason,
    )  # fmt: skip


def _counted(seen: torch.Tensor) -> torch.Tensor:
    """A mask with a batch of 1 where it is expanded, whose changes PyTorch counts in inference
    mode, too: layers share what is made of such ones."""
    if seen.stride(0) == 0:
        seen = seen[:1]
    if not seen.is_inference():
        return seen
    with torch.inference_mode(False):
        return seen.clone()


def _without_packing(
    mask_function: Callable | None,
) -> tuple[Callable | None, torch.Tensor | None]:
    """(the pattern of each sequence, of each row which sequence it is of) where transformers has
    found packed sequences, else (mask_function, None)."""
    from transformers import masking_utils as known

    try:
        same_sequence, remapped = _captured(mask_function)["mask_functions"]
        sequences = _captured(same_sequence)["packed_sequence_mask"]
        inner, positions = (_captured(remapped)[n] for n in ("mask_function", "position_ids"))
        wanted = known.packed_sequence_compatibility_function(inner, positions, sequences)
    except (AttributeError, KeyError, TypeError, ValueError):
        return mask_function, None
    if not _same(mask_function, wanted):
        return mask_function, None
    return inner, sequences


def _captured(function: Any) -> dict[str, Any]:
    """Values that a function has of the one around it, by name."""
    cells = function.__closure__ or ()
    return {n: cell.cell_contents for n, cell in zip(function.__code__.co_freevars, cells)}


def _packed_mask(sequences: torch.Tensor) -> torch.Tensor:
    """Offsets of packed sequences, (1, 1, longest, sequences + 1) int32: the rows are one row
    repeated, as many times as the longest sequence is long, and twice at least. So the length,
    which grids follow, is known without waiting for the device in each layer. sequences: (batch,
    rows), numbers that never descend."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "position_ids may hold packed sequences, which cannot be counted while tracing; "
            f"accepted under torch.compile: {', '.join(PACKED)}, or an attention_mask"
        )
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences.diff(dim=1) != 0
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.cat((starts, starts.new_tensor([sequences.numel()]))).int()
    longest = max(2, int(offsets.diff().max()))
    return offsets.expand(1, 1, longest, -1)


def _offsets_of(attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    """(offsets, longest) of what `_packed_mask` returned; None of anything else."""
    if attention_mask is None or attention_mask.ndim != 4 or attention_mask.dtype != torch.int32:
        return None
    if attention_mask.shape[2] < 2:
        return None
    return attention_mask[0, 0, 0], attention_mask.shape[2]


def _ranges(in_use: torch.Tensor, first_query: Any, q_length: int) -> torch.Tensor:
    """(batch, 4) int32 of in_use (batch, keys); first_query: the key beside the first query, None
    where queries and keys are different sequences."""
    start = in_use.int().argmax(dim=-1)
    end = start + in_use.sum(dim=-1)
    if first_query is None:
        queries = [torch.zeros_like(start), torch.full_like(start, q_length)]
    else:
        queries = [(side - first_query).clamp(0, q_length) for side in (start, end)]
    return torch.stack([start, end, *queries], dim=-1).int()


def _are_contiguous(in_use: torch.Tensor, ranges: torch.Tensor) -> bool:
    """Whether padding lies before or after all tokens alone."""
    rows = torch.arange(in_use.shape[1], device=in_use.device)
    inside = (rows >= ranges[:, KEY_START, None]) & (rows < ranges[:, KEY_END, None])
    return bool((inside == in_use).all())


def _is_full(
    mask_function: Callable | None,
    window: int | None,
    lengths: tuple[int, int, int, Any, int],
    options: dict[str, Any],
) -> bool | None:
    """Whether the pattern is full; None unless it is that, causal, or a window.

    Known functions of transformers are recognised as such. Any other is evaluated once and
    compared with what the layers will compute for this config; that takes memory for
    batch * seqlen_q * seqlen_k booleans. Raises ValueError where that cannot be done.
    """
    from transformers import masking_utils as known

    if mask_function is None or _same(mask_function, known.causal_mask_function):
        return False
    if _same(mask_function, known.bidirectional_mask_function):
        return True
    if window is not None and any(
        _same(mask_function, make(window))
        for make in (
            known.sliding_window_causal_mask_function,
            known.sliding_window_bidirectional_mask_function,
        )
    ):
        return False
    if torch.compiler.is_compiling():
        raise ValueError(_unknown_pattern(mask_function) + "; it cannot be evaluated while tracing")
    _, q_length, kv_length, q_offset, kv_offset = lengths
    wanted = _evaluated(mask_function, lengths, options)
    keys = kv_offset + torch.arange(kv_length, device=wanted.device)
    queries = q_offset + torch.arange(q_length, device=wanted.device)
    distance = keys - queries[:, None]
    is_bidirectional = _is_bidirectional(options.get("config"))
    computed = torch.ones_like(distance, dtype=torch.bool) if is_bidirectional else distance <= 0
    if window is not None:
        computed &= distance.abs() < window
    return is_bidirectional if (wanted == computed).all() else None


def _evaluated(
    mask_function: Callable, lengths: tuple[int, int, int, Any, int], options: dict[str, Any]
) -> torch.Tensor:
    """A pattern as a bool tensor (batch, 1, q_length, kv_length)."""
    from transformers import masking_utils as known

    found: Any = known.sdpa_mask(
        *lengths, mask_function, allow_is_causal_skip=False,
        use_vmap=options.get("use_vmap", False), device=options["device"],
    )  # fmt: skip
    return found


def _is_bidirectional(config: Any) -> bool:
    """Whether the layers of a model are bidirectional although its class is that of a decoder."""
    asked = getattr(config, "use_bidirectional_attention", False)
    return asked is True or asked == "all" or not getattr(config, "is_causal", True)


def _name_of(mask_function: Callable | None) -> str:
    """The same for all of one kind, so without an address."""
    return getattr(mask_function, "__qualname__", type(mask_function).__name__)


def _unknown_pattern(mask_function: Callable) -> str:
    return (
        f"the model asks for a mask that {NAME} does not offer ({_name_of(mask_function)}); "
        "accepted under torch.compile: full, causal, sliding window, each with padding or of "
        "packed sequences"
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two functions have the same code over the same captured values."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        captured = [
            tuple(cell.cell_contents for cell in function.__closure__ or ())
            for function in (one, other)
        ]
        return one.__code__ is other.__code__ and _same(*captured)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return one is other
