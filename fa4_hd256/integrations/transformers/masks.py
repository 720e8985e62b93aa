"""The mask function of transformers' AttentionMaskInterface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..warnings_once import warn_once
from .descriptions import Window, offsets_of, packed, padded, unbounded, uncounted, whole
from .patterns import Band, band_of


class _Lengths(NamedTuple):
    """Queries at positions q_offset + [0, q_length), keys at kv_offset + [0, kv_length)."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any
    kv_offset: int

    @property
    def used(self) -> Any:
        """Number of keys up to the position of the last query."""
        return self.q_offset + self.q_length - self.kv_offset


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the mask of a forward pass, as transformers' AttentionMaskInterface requests it.

    Queries have positions q_offset + [0, q_length), keys kv_offset + [0, kv_length).

    mask_function: the pattern, causal if None. `band_of` recognises full and causal patterns and
    windows on one or both sides. Any other pattern is evaluated, which takes memory for batch *
    q_length * kv_length booleans. attention_mask: (batch, positions) bool, False for padding, or
    None.

    Returns a tensor of `descriptions`, in which padded queries see nothing. For patterns that are
    no band, and for padding between tokens, returns a bool tensor (batch, 1, q_length, kv_length),
    True where a key is seen.
    """
    device = options.get("device", "cpu")
    is_static = isinstance(q_offset, torch.Tensor)
    # A static cache counts on the device. One read per pass finds out if it is full.
    if isinstance(q_offset, torch.Tensor) and not torch.compiler.is_compiling():
        q_offset = int(q_offset)
    lengths = _Lengths(batch_size, q_length, kv_length, q_offset, kv_offset)
    pattern = _causal if mask_function is None else mask_function
    request = _Request(pattern, lengths, attention_mask, device, options.get("use_vmap", False))
    band = band_of(request.function)
    if band is None:
        seen = _evaluated(request._replace(attention_mask=None))
        band = None if torch.compiler.is_compiling() else _band_of_seen(seen, lengths)
        if band is None:
            return _dense(f"mask {_name_of(mask_function)}", request, seen)
    elif _is_to_be_combined(options, band, q_length == 1 and (is_static or _is_local(options))):
        return _evaluated(request)
    if band.sequences is not None:
        return _packed(band, request)
    window = _window_of(band)
    if window is None or not _is_aligned(window, lengths):
        return _dense(f"mask {_name_of(mask_function)}", request)
    return _described(window, request)


class _Request(NamedTuple):
    """Request of transformers for a mask. attention_mask: (batch, positions) bool or None."""

    function: Callable
    lengths: _Lengths
    attention_mask: torch.Tensor | None
    device: Any
    use_vmap: bool


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def _is_to_be_combined(options: dict[str, Any], band: Band, is_static_step: bool) -> bool:
    """Return True if the model combines booleans with masks of its own, and forbids skipping. So do
    packed sequences, use_vmap and static single-token steps, which need none by themselves."""
    kinds = "allow_is_causal_skip", "allow_is_bidirectional_skip"
    may_skip = any(options.get(kind, kind == kinds[0]) for kind in kinds)
    if may_skip or options.get("use_vmap"):
        return False
    if band.sequences is None and (not is_static_step or kinds[1] in options):
        return True
    return _combines_masks(options.get("config"))


def _is_local(options: dict[str, Any]) -> bool:
    """Return True for a mask of layers with a window, whose static caches count in an int."""
    return options.get("local_size") is not None


def _combines_masks(config: Any) -> bool:
    """Return True for models that join masks in every step (T5Gemma 2, Doge), or index visible
    keys."""
    kind, layers = (getattr(config, name, None) or "" for name in ("model_type", "layer_types"))
    has_index = hasattr(config, "index_topk") or "indexed_attention" in layers
    return kind.startswith(("t5gemma2", "doge")) or has_index


def _window_of(band: Band) -> Window | None:
    """Return the keys visible on each side of a query; None if its own position is not visible."""
    if band.is_empty or band.positions is not None:
        return None
    left, right = band.high, None if band.low is None else -band.low
    if any(side is not None and side < 0 for side in (left, right)):
        return None
    return left, right


def _is_aligned(window: Window, lengths: _Lengths) -> bool:
    """Return True if last queries aligned with last keys see the same: without bounds always; with
    one behind a query there may be no keys behind the last query."""
    if window == (None, None):
        return True
    if window[1] == 0:
        # A static cache always has room for its queries; its count is on the device.
        return isinstance(lengths.q_offset, torch.Tensor) or lengths.used <= lengths.kv_length
    return not isinstance(lengths.q_offset, torch.Tensor) and lengths.used == lengths.kv_length


def _described(window: Window, request: _Request) -> torch.Tensor:
    lengths, device = request.lengths, request.device
    tracing = torch.compiler.is_compiling()
    # Without bounds keys may be of another sequence, with padding of its own.
    is_full = window == (None, None)
    used = lengths.kv_length if is_full else lengths.used
    first, count = lengths.kv_offset, lengths.kv_length
    padding = request.attention_mask
    padding = None if padding is None else padding[:, first : first + count]
    if not is_full:
        _check_entries(request)
    is_in_use = padding is None or (
        not tracing and padding.shape[1] == count and bool(padding.all())
    )
    if is_in_use and not isinstance(used, torch.Tensor) and used == count:
        return whole(window, device)
    in_use = (torch.arange(count, device=device) < used).expand(lengths.batch_size, -1)
    if padding is not None:
        in_use = in_use & torch.nn.functional.pad(padding, (0, count - padding.shape[1]))
    ranges = _ranges(in_use, None if is_full else used - lengths.q_length, lengths.q_length)
    rows = torch.arange(count, device=device)
    inside = (rows >= ranges[:, 0, None]) & (rows < ranges[:, 1, None])
    is_contiguous = (inside == in_use).all()
    if tracing:
        torch._assert_async(is_contiguous, _HOLES)
    elif not is_contiguous:
        return _dense("padding between tokens", request)
    return unbounded(ranges, count) if is_full else padded(window, ranges)


def _check_entries(request: _Request) -> None:
    """Raise ValueError if queries have no entry in attention_mask. A count on the device is not
    read."""
    padding, end = request.attention_mask, request.lengths.q_offset + request.lengths.q_length
    if padding is None or isinstance(end, torch.Tensor) or padding.shape[1] >= end:
        return
    raise ValueError(
        f"attention_mask has {padding.shape[1]} entries a sequence, and queries up to row "
        f"{end - 1} follow a cache; accepted: an entry for each row up to the last query"
    )


_HOLES = (
    "attention_mask has padding between tokens; under torch.compile fa4_hd256 accepts padding "
    "before and behind them, or a bool mask (batch, 1, seqlen_q, seqlen_k)"
)


_UNORDERED = (
    "position_ids hold packed sequences whose positions do not count up by one; under "
    "torch.compile fa4_hd256 accepts such as do"
)


def _ranges(in_use: torch.Tensor, first_query: Any, q_length: int) -> torch.Tensor:
    """Return the rows in use and the queries, (batch, 5). first_query: its key; None in another
    sequence."""
    start = in_use.int().argmax(dim=-1)
    end = start + in_use.sum(dim=-1)
    if first_query is None:
        queries = [torch.zeros_like(start), torch.full_like(start, q_length)]
    else:
        queries = [(side - first_query).clamp(0, q_length) for side in (start, end)]
    return torch.stack([start, end, *queries, torch.full_like(start, q_length)], dim=-1)


def _packed(band: Band, request: _Request) -> torch.Tensor:
    """Return the packed form of a band, or a dense mask if ids recur; under torch.compile, which
    cannot count, the uncounted form for ids of position_ids."""
    tracing = torch.compiler.is_compiling()
    lengths, ids, positions = request.lengths, band.sequences, band.positions
    window = _window_of(Band(band.low, band.high))
    shape = lengths.batch_size, lengths.q_length
    is_square = lengths[1:] == (lengths.kv_length, lengths.kv_length, 0, 0)
    tables = [table for table in (ids, positions) if table is not None]
    if (
        window is None
        or not is_square
        or request.attention_mask is not None
        or ids is None
        or any(table.shape != shape for table in tables)
        # The user's own ids may occur again later, which a graph cannot find out.
        or (tracing and positions is None)
    ):
        return _dense("packed sequences", request)
    begins = torch.ones_like(ids, dtype=torch.bool)
    steps = ids.diff(dim=1)
    begins[:, 1:] = steps != 0
    counts_up = (steps >= 0).all()
    if positions is not None:
        counts_up &= (begins[:, 1:] | (positions.diff(dim=1) == 1)).all()
    if tracing:
        torch._assert_async(counts_up, _UNORDERED)
        return uncounted(window, begins) if lengths.q_length > 1 else whole(window, request.device)
    if not counts_up:
        return _dense("packed sequences", request)
    return packed(window, *offsets_of(begins))


def _band_of_seen(seen: torch.Tensor, lengths: _Lengths) -> Band | None:
    queries = lengths.q_offset + torch.arange(lengths.q_length, device=seen.device)
    keys = lengths.kv_offset + torch.arange(lengths.kv_length, device=seen.device)
    distances = (queries[:, None] - keys).expand(seen.shape)
    visible = distances[seen]
    if not visible.numel():
        return None
    low, high = int(visible.min()), int(visible.max())
    if not torch.equal(seen, (distances >= low) & (distances <= high)):
        return None
    is_low, is_high = low > int(distances.min()), high < int(distances.max())
    return Band(low if is_low else None, high if is_high else None)


def _dense(reason: str, request: _Request, pattern: torch.Tensor | None = None) -> torch.Tensor:
    """Evaluate the mask, and log the reason once. pattern: the mask without padding, if it has been
    evaluated."""
    lengths, padding = request.lengths, request.attention_mask
    if pattern is None:
        seen = _evaluated(request)
    elif padding is None:
        seen = pattern
    else:
        missing = lengths.kv_offset + lengths.kv_length - padding.shape[1]
        padding = torch.nn.functional.pad(padding, (0, max(0, missing)))
        keys = padding[:, lengths.kv_offset : lengths.kv_offset + lengths.kv_length]
        seen = pattern & keys[:, None, None]
    warn_once(
        f"the keys that a query sees are no interval ({reason}); every pass evaluates the mask for "
        "each query and key, and gives it to the kernels by tiles (block_mask)"
    )
    if not torch.compiler.is_compiling():
        seen = _counted(seen)
    return seen.expand(lengths.batch_size, 1, lengths.q_length, lengths.kv_length)


def _evaluated(request: _Request) -> torch.Tensor:
    from transformers.masking_utils import sdpa_mask

    seen: Any = sdpa_mask(
        *request.lengths,
        request.function,
        request.attention_mask,
        allow_is_causal_skip=False,
        use_vmap=request.use_vmap,
        device=request.device,
    )
    return seen


def _counted(seen: torch.Tensor) -> torch.Tensor:
    """Return the mask as a tensor whose version PyTorch counts, with a batch of 1 if expanded.
    Layers share what is made from a mask while its version stays. Inference tensors have none."""
    if seen.stride(0) == 0:
        seen = seen[:1]
    if not seen.is_inference():
        return seen
    with torch.inference_mode(False):
        return seen.clone()


def _name_of(mask_function: Callable | None) -> str:
    return getattr(mask_function, "__qualname__", type(mask_function).__name__)
