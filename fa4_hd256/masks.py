"""Masks for `block_mask=`: by name, from a tensor, or from PyTorch's FlexAttention.

    mask = masks.prefix_lm(prefix_lengths, seqlen)
    out = flash_attn_func(q, k, v, block_mask=mask)

A mask is made once and serves every layer. Tiles of 128 queries x 128 keys that no query sees cost
nothing, full ones what they cost without a mask, and of the others the kernels read 2 KiB of bits.
Queries and keys are aligned at their ends, as everywhere here: query i is level with key
i + seqlen_k - seqlen_q.

`tree_words` packs another kind of mask, for `tree_mask=` of a step's layers.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .call.functions.state import FunctionState, TensorStates
from .call.mask_checks import LARGEST, check_integers, check_offsets, check_whole
from .call.memory import without_expansion
from .call.options import flags_of, plain
from .call.process import is_lasting
from .call.tile_mask import EMPTY, PARTIAL, WHOLE, Evaluate, TileMask, count_mask_tiles
from .call.tree_mask import tree_words
from .gpus.devices import is_captured
from .kernels.mask.block_mask import MASK_TILE
from .kernels.mask.masking import WORD_BITS

__all__ = [
    "TileMask",
    "as_tile_mask",
    "bidirectional_blocks",
    "documents",
    "from_block_mask",
    "from_dense",
    "from_words",
    "in_sequences",
    "keys_of_rows",
    "kinds_of_blocks",
    "prefix_lm",
    "sliding_window",
    "tree_words",
    "with_words",
]

#: Module of PyTorch's `BlockMask`.
_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


def prefix_lm(
    prefix: int | torch.Tensor,
    seqlen: int,
    seqlen_k: int | None = None,
    device: torch.device | str | None = None,
) -> TileMask:
    """Causal, but for the first `prefix` keys, which every query sees.

    prefix: an int, or (batch,) integers, whose device is the mask's; seqlen_k: `seqlen` if None.
    Raises TypeError for another kind, ValueError for a length below 1 and a prefix below 0, of
    tensors on the CPU, for no prefix, and for a device that is not the tensor's.
    """
    prefix = _lengths_of(prefix, device)
    levels = _levels(seqlen, seqlen_k, prefix.device)
    limit = torch.maximum(levels.level + 1, prefix[:, None])
    return levels.mask(torch.zeros_like(limit), limit)


def sliding_window(
    window: int,
    seqlen: int,
    seqlen_k: int | None = None,
    *,
    first_tokens: int = 0,
    device: torch.device | str | None = None,
) -> TileMask:
    """Causal, the key level with a query, `window` keys before it, and the first `first_tokens`.

    Raises TypeError for another kind, ValueError for a window or first_tokens below 0 and a length
    below 1.
    """
    check_whole("window", window)
    check_whole("first_tokens", first_tokens)
    levels = _levels(seqlen, seqlen_k, torch.device(device or "cpu"))
    level = levels.level[None]
    return levels.mask(level - window, level + 1, first_tokens)


def documents(ids: torch.Tensor, *, causal: bool = True, window: int | None = None) -> TileMask:
    """Documents packed into rows: a query sees keys of its own one.

    ids: (batch, seqlen) or (seqlen,) integers; neighbours with the same number are of one document.
    causal: it sees none behind itself. window: with causal, so many before itself.
    Raises TypeError for ids that are no integers and other kinds, ValueError for other dimensions,
    or a window without causal.
    """
    (causal,) = flags_of(causal=causal)
    if window is not None:
        check_whole("window", window)
        if not causal:
            raise ValueError(f"window is {window} with causal=False; accepted: causal=True")
    ids = _rows_of_ids("ids", ids)
    levels = _levels(ids.shape[1], None, ids.device)
    first, limit = _runs(ids)
    if causal:
        limit = torch.minimum(limit, levels.level + 1)
    if window is not None:
        first = torch.maximum(first, levels.level - window)
    return levels.mask(first, limit)


def bidirectional_blocks(blocks: torch.Tensor, *, window: int | None = None) -> TileMask:
    """Causal, but for blocks whose tokens see each other, such as an image's in Gemma 3.

    blocks: (batch, seqlen) or (seqlen,) integers; neighbours with the same number, 0 or more, are
    of one block, those below 0 of none. window: keys before a query that it sees, beside those of
    its block; None for all. Raises TypeError for blocks that are no integers, ValueError for other
    dimensions or a window below 0.
    """
    if window is not None:
        check_whole("window", window)
    blocks = _rows_of_ids("blocks", blocks)
    levels = _levels(blocks.shape[1], None, blocks.device)
    begin, end = _runs(blocks)
    alone = blocks < 0
    limit = torch.where(alone, levels.level + 1, torch.maximum(end, levels.level + 1))
    first = torch.zeros_like(limit)
    if window is not None:
        before = (levels.level - window).expand_as(begin)
        first = torch.where(alone, before, torch.minimum(begin, before))
    return levels.mask(first, limit)


def from_dense(mask: torch.Tensor) -> TileMask:
    """Make a mask from a bool tensor (seqlen_q, seqlen_k), or (1 or batch, 1 or heads, seqlen_q,
    seqlen_k): True where a query sees a key. Expanded dimensions are taken once.

    Raises TypeError for another dtype, ValueError for other dimensions.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"mask is {kind}; accepted: a bool tensor, True where a key is seen")
    if mask.layout == torch.strided and mask.ndim == 2:
        mask = mask[None, None]
    if mask.layout != torch.strided or mask.ndim != 4 or mask.numel() == 0:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and layout {mask.layout}; accepted: dense ones of "
            "(seqlen_q, seqlen_k) or (1 or batch, 1 or heads, seqlen_q, seqlen_k), none of them 0"
        )
    mask = without_expansion(mask)
    lengths = mask.shape[2], mask.shape[3]
    padding = (0, -lengths[1] % MASK_TILE, 0, -lengths[0] % MASK_TILE)
    by_tiles = torch.nn.functional.pad(mask, padding).unflatten(3, (-1, MASK_TILE))
    by_tiles = by_tiles.unflatten(2, (-1, MASK_TILE))
    some, whole = by_tiles.any(5).any(3), by_tiles.all(5).all(3)
    kinds = some.to(torch.int8) + whole
    return TileMask.of(lengths, kinds, lambda b, h, q, k: mask[b, h, q, k])


def from_words(words: torch.Tensor, seqlen_k: int) -> TileMask:
    """Make a mask from packed bits, as indexers that choose keys of each query have them: bit j of
    word w is set where a query sees key 32 w + j.

    words: int32, (seqlen_q, ceil(seqlen_k / 32)) or (1 or batch, 1 or heads, seqlen_q, that). Bits
    behind the last key count for nothing. Tiles are copied, so this takes a fraction of what
    `from_dense` does; for packed sequences it is a mask of the packed row, which has no bits of
    other sequences' keys.

    Raises TypeError for another dtype, ValueError for other dimensions.
    """
    words = _checked_words(words, seqlen_k)
    return TileMask.of_words((words.shape[2], plain(seqlen_k)), words)


def with_words(block_mask: TileMask, words: torch.Tensor) -> TileMask:
    """Make a mask of the keys of another one whose bits are set: those that a layer chooses.

    block_mask: a mask with bits, such as `documents`, made once for all layers. words: as of
    `from_words`, of its lengths; batch and heads are 1 or those of the mask. The lists of tiles are
    made once for block_mask, so a layer's own words cost one copy of the tiles that are listed.

    Raises as `from_words`, TypeError for another kind of mask, ValueError for one without bits, and
    for words of other lengths, batch or heads.
    """
    if not isinstance(block_mask, TileMask):
        raise TypeError(
            f"block_mask is {type(block_mask).__name__}; accepted: a mask of fa4_hd256.masks"
        )
    mask = as_tile_mask(block_mask)
    words = _checked_words(words, mask.lengths[1])
    accepted = [(1, size) for size in mask.tiles.shape[:2]]
    fits = all(size in sizes for size, sizes in zip(words.shape[:2], accepted, strict=True))
    if not fits or words.shape[2] != mask.lengths[0] or words.device != mask.device:
        raise ValueError(
            f"words has shape {tuple(words.shape)} on {words.device}, and block_mask is {mask}; "
            "accepted: words of its queries and keys, with a batch and heads of 1 or of the "
            "mask's, on its device"
        )
    return mask.with_words(words)


def _checked_words(words: Any, seqlen_k: int) -> torch.Tensor:
    """Return words of `from_words` with four dimensions. Raises as that."""
    check_whole("seqlen_k", seqlen_k, 1)
    if not isinstance(words, torch.Tensor) or words.dtype != torch.int32:
        kind = words.dtype if isinstance(words, torch.Tensor) else type(words).__name__
        raise TypeError(f"words is {kind}; accepted: an int32 tensor, a bit for each key")
    count = -(-seqlen_k // WORD_BITS)
    is_dense = words.layout == torch.strided and not words.is_nested
    if not is_dense or words.ndim not in (2, 4) or words.numel() == 0 or words.shape[-1] != count:
        raise ValueError(
            f"words has shape {tuple(words.shape)} and layout {words.layout}, and seqlen_k is "
            f"{seqlen_k}; accepted: dense ones of (seqlen_q, {count}) or (1 or batch, 1 or heads, "
            f"seqlen_q, {count}), none of them 0"
        )
    return without_expansion(words if words.ndim == 4 else words[None, None])


def from_block_mask(
    block_mask: Any, *, with_bits: bool = True, batch: int | None = None, heads: int | None = None
) -> TileMask:
    """Make a mask from PyTorch's `BlockMask`, of blocks that are multiples of 128. Its partial
    blocks are evaluated by its own mask_mod, on its device; the result is of what that reads now.
    with_bits: False where they are not, for calls with `mask_mod=`. batch, heads: of the calls,
    which have bits for each where the `BlockMask` has 1 and its mask_mod reads which one it is;
    with None these are of the first one, and calls of more refuse them.

    Raises TypeError for anything else, ValueError for other blocks.
    """
    if not _is_block_mask(block_mask):
        raise TypeError(
            f"block_mask is {type(block_mask).__name__}; accepted: a BlockMask of "
            f"{_FLEX_ATTENTION} or a mask of fa4_hd256.masks"
        )
    apart = _apart(block_mask) if with_bits else None
    return _from_block_mask(block_mask, batch, heads, apart)


def _from_block_mask(
    block_mask: Any, batch: int | None, heads: int | None, apart: tuple[bool, bool] | None
) -> TileMask:
    """`from_block_mask`. apart: of `_apart`, None for a mask without bits."""
    sizes = tuple(block_mask.BLOCK_SIZE)
    if any(size % MASK_TILE for size in sizes):
        raise ValueError(
            f"block_mask has BLOCK_SIZE {sizes}; accepted: multiples of {MASK_TILE}, which is the "
            "default of create_block_mask"
        )
    lengths = tuple(block_mask.seq_lengths)
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    kinds = kinds_of_blocks(
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        None if full[0] is None else full,
        sizes,
        lengths,
    )
    if apart is None:
        return TileMask.of_kinds(lengths, kinds)
    own_of = [
        size if is_apart and size is not None else -1
        for is_apart, size in zip(apart, (batch, heads), strict=True)
    ]
    of_first = apart[0] and batch is None, apart[1] and heads is None
    kinds = kinds.expand(*own_of, -1, -1).contiguous()
    return TileMask.of(lengths, kinds, _evaluator(block_mask.mask_mod), of_first)


def kinds_of_blocks(
    partial: tuple[torch.Tensor, torch.Tensor],
    full: tuple[torch.Tensor, torch.Tensor] | None,
    sizes: tuple[int, ...],
    lengths: tuple[int, ...],
) -> torch.Tensor:
    """Return the kinds of tiles, (1 or batch, 1 or heads, tiles of queries, tiles of keys) int8.

    partial, full: (counts, indices) of blocks of keys for each block of queries, as a `BlockMask`
    has them. sizes: (queries, keys) of a block, multiples of 128. lengths: (seqlen_q, seqlen_k).
    """
    of_blocks = tuple(-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    kinds = _kinds(*partial, of_blocks, PARTIAL)
    if full is not None:
        kinds = torch.maximum(kinds, _kinds(*full, of_blocks, WHOLE))
    for dimension, size in ((2, sizes[0]), (3, sizes[1])):
        kinds = kinds.repeat_interleave(size // MASK_TILE, dimension)
    tiles = [count_mask_tiles(length) for length in lengths]
    return kinds[:, :, : tiles[0], : tiles[1]].contiguous()


def in_sequences(
    block_mask: Any,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    with_bits: bool = True,
) -> TileMask:
    """A mask of packed rows, total_q x total_k, whose queries see keys of their own sequence alone;
    what `flash_attn_varlen_func` makes of its block_mask.

    cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets, on the mask's device. Rows behind the last
    offset are of no sequence, and see nothing. with_bits: as of `from_block_mask`.
    Raises as `as_tile_mask`, TypeError for offsets of another kind, ValueError for others than
    these; contents are checked on the CPU alone.
    """
    mask = as_tile_mask(block_mask, with_bits=with_bits)
    check_offsets((cu_seqlens_q, cu_seqlens_k), mask.lengths, mask.device)
    _, begins, counts = keys_of_rows(cu_seqlens_q, cu_seqlens_k, mask.lengths[0])
    is_any = counts > 0
    first = torch.where(is_any, begins, mask.lengths[1])
    limit = torch.where(is_any, begins + counts, 0)
    kinds, inside = _Levels(mask.lengths, mask.device).intervals(first[None], limit[None])
    kinds = torch.minimum(kinds, mask.kinds)
    if not with_bits:
        return TileMask.of_kinds(mask.lengths, kinds)

    def evaluate(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return mask.sees(batch, head, query, key) & inside(batch * 0, head, query, key)

    return TileMask.of(mask.lengths, kinds, evaluate, mask.of_first)


def keys_of_rows(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each packed query, (its sequence, first key of that, number of its keys),
    (total,) int64. Rows behind the last offset count as the last sequence's, without keys.
    cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets, on one device. Raises as `in_sequences` for
    others."""
    check_whole("total", total, 1)
    device = getattr(cu_seqlens_q, "device", torch.device("cpu"))
    check_offsets((cu_seqlens_q, cu_seqlens_k), (total, LARGEST), device)
    rows, ends = torch.arange(total, device=cu_seqlens_q.device), cu_seqlens_q[1:].long()
    numbers = torch.searchsorted(ends.contiguous(), rows, right=True)
    numbers = numbers.clamp(max=ends.numel() - 1)
    counts = torch.where(rows < ends[-1], cu_seqlens_k.long().diff()[numbers], 0)
    return numbers, cu_seqlens_k.long()[numbers], counts


def as_tile_mask(
    block_mask: Any, *, with_bits: bool = True, batch: int | None = None, heads: int | None = None
) -> TileMask:
    """Return the mask of a call's `block_mask=`; a `BlockMask` goes through `from_block_mask`
    first. with_bits: False beside `mask_mod=`. batch, heads: of the call, None where they are not
    known. Raises as that does, and ValueError for bits of a mask that has none, or has those of the
    first batch entry or head alone."""
    if isinstance(block_mask, TileMask):
        if not with_bits:
            return block_mask.lists
        if block_mask.bits is None:
            raise ValueError(
                "block_mask has no bits; accepted: one made with_bits, or mask_mod, too, which "
                "takes their place"
            )
        if any(block_mask.of_first):
            _check_first(block_mask, batch, heads)
        return block_mask
    if not _is_block_mask(block_mask):
        return from_block_mask(block_mask)  # which says what is accepted
    if torch.compiler.is_compiling() or is_captured(block_mask.kv_num_blocks.device):
        # Each run of a graph reads tables and tensors of the function again.
        return from_block_mask(block_mask, with_bits=with_bits, batch=batch, heads=heads)
    tables = _tables_of(block_mask)
    if not with_bits:
        return _lists_of(block_mask, tables)
    cached = _with_bits.get(block_mask)
    if cached is None or not cached.is_of(block_mask, tables):
        cached = _CachedMasks(block_mask, tables)
        if cached.lasts:
            _with_bits[block_mask] = cached
    sizes = batch, heads
    if sizes in cached.masks:
        return cached.masks[sizes]
    of_batch, of_heads = cached.apart
    needed = batch if of_batch else None, heads if of_heads else None
    mask = cached.masks.get(needed)
    if mask is None:
        mask = _from_block_mask(block_mask, *needed, cached.apart)
    if is_lasting(mask.tiles):
        cached.masks[needed] = cached.masks[sizes] = mask
    return mask


class _CachedMasks:
    """Masks with bits made of a `BlockMask`, by (batch, heads) of calls. apart: what `_apart` says
    of it. lasts: False where later changes could not be noticed."""

    def __init__(self, block_mask: Any, tables: tuple[Any, ...]) -> None:
        self._tables = TensorStates(tables)
        self._function = FunctionState.of(block_mask.mask_mod)
        self._sizes = _sizes_of(block_mask)
        self.apart = _apart(block_mask)
        self.masks: dict[tuple[int | None, int | None], TileMask] = {}
        self.lasts = self._function is not None

    def is_of(self, block_mask: Any, tables: tuple[Any, ...]) -> bool:
        assert self._function is not None
        return (
            self._sizes == _sizes_of(block_mask)
            and self._tables.are_of(tables)
            and self._function.is_of(block_mask.mask_mod)
        )


#: Masks with bits, by masks of PyTorch's that are alive.
_with_bits: weakref.WeakKeyDictionary[Any, _CachedMasks] = weakref.WeakKeyDictionary()
#: Masks without bits, by the same: (states of the tables, sizes, mask).
_lists: weakref.WeakKeyDictionary[Any, tuple[TensorStates, Any, TileMask]]
_lists = weakref.WeakKeyDictionary()


def _lists_of(block_mask: Any, tables: tuple[Any, ...]) -> TileMask:
    cached = _lists.get(block_mask)
    if cached is not None and cached[1] == _sizes_of(block_mask) and cached[0].are_of(tables):
        return cached[2]
    mask = from_block_mask(block_mask, with_bits=False)
    if is_lasting(mask.tiles):
        _lists[block_mask] = TensorStates(tables), _sizes_of(block_mask), mask
    return mask


def _tables_of(block_mask: Any) -> tuple[torch.Tensor | None, ...]:
    return (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )


def _sizes_of(block_mask: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)


def _check_first(mask: TileMask, batch: int | None, heads: int | None) -> None:
    """A call of more than the first batch entry or head may not read bits of that alone."""
    of_call = {"batch": batch, "heads": heads}
    for is_first, (name, size) in zip(mask.of_first, of_call.items(), strict=True):
        if is_first and size is not None and size > 1:
            raise ValueError(
                f"block_mask is of {name}=1, whose mask_mod sees something else in others, and q "
                f"has {size}; accepted: the BlockMask itself, or masks.from_block_mask of it with "
                f"{name}={size}"
            )


def _is_block_mask(mask: Any) -> bool:
    """Recognise a BlockMask without an import, which takes long: its maker has imported it."""
    module = sys.modules.get(_FLEX_ATTENTION)
    return module is not None and isinstance(mask, module.BlockMask)


def _kinds(
    counts: torch.Tensor, indices: torch.Tensor, of_blocks: tuple[int, ...], kind: int
) -> torch.Tensor:
    """Return (1 or batch, 1 or heads, *of_blocks) int8: `kind` for those that are listed, else
    `EMPTY`."""
    while indices.ndim < 4:
        counts, indices = counts[None], indices[None]
    columns = of_blocks[1]
    numbers = torch.arange(indices.shape[3], device=indices.device)
    # Entries behind a row's count go into a column past the others.
    places = torch.where(numbers < counts[..., None], indices, columns)[:, :, : of_blocks[0]]
    kinds = torch.full(
        (*places.shape[:3], columns + 1), EMPTY, dtype=torch.int8, device=places.device
    )
    return kinds.scatter_(3, places.long().clamp(max=columns), kind)[..., :columns]


def _evaluator(mask_mod: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mask_mod, which is of single numbers, for tiles."""
    # PyTorch itself wraps them in this, so that they may index tensors by these numbers.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    by_key = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    of_tile = torch.vmap(by_key, in_dims=(None, None, 0, None))
    of_tiles = torch.vmap(of_tile)

    def evaluate(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        with TransformGetItemToIndex():
            return of_tiles(batch[:, 0, 0], head[:, 0, 0], query[:, :, 0], key[:, 0])

    return evaluate


def _apart(block_mask: Any) -> tuple[bool, bool]:
    """Return (whether a `BlockMask` has one batch entry, whether one head, for all, of which its
    mask_mod may see each otherwise). The mask_mod is evaluated once for each."""
    tables = block_mask.kv_num_blocks
    sizes = [*(1,) * (3 - tables.ndim), *tables.shape[:-1]]
    batch, head = (
        size == 1 and _reads(block_mask.mask_mod, number, tables.device)
        for number, size in enumerate(sizes)
    )
    return batch, head


def _reads(mask_mod: Callable[..., torch.Tensor], number: int, device: torch.device) -> bool:
    """Return True if the result of a mask_mod may depend on its argument of this number. It is
    evaluated once, with that one alone mapped over by vmap, which knows of each value whether it
    depends on what is mapped, and refuses to return one that does in the place of a common one."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    place = torch.zeros((), dtype=torch.int64, device=device)
    numbers = [place] * number + [place[None]] + [place] * (3 - number)
    in_dims = tuple(0 if i == number else None for i in range(4))
    try:
        with TransformGetItemToIndex(), _KindAlone():
            torch.vmap(mask_mod, in_dims=in_dims, out_dims=None)(*numbers)
    # Also where a mask_mod cannot be evaluated so: then it is evaluated for each, which is always
    # right.
    except Exception:
        return True
    return False


class _KindAlone(TorchFunctionMode):
    """Makes tensors created from another one's shape and type independent of its values: PyTorch's
    `and_masks` begins with `b.new_ones`."""

    _FUNCTIONS = (
        torch.Tensor.new_ones,
        torch.Tensor.new_zeros,
        torch.Tensor.new_full,
        torch.Tensor.new_empty,
        torch.Tensor.new_tensor,
        torch.ones_like,
        torch.zeros_like,
        torch.full_like,
        torch.empty_like,
    )

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if function in self._FUNCTIONS and args:
            like = args[0]
            args = (torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:])
        return function(*args, **(kwargs or {}))


class _Levels:
    """Rows of a mask. level: (seqlen_q,) int64, the key that each query is level with."""

    def __init__(self, lengths: tuple[int, int], device: torch.device) -> None:
        self.lengths = lengths
        queries = torch.arange(lengths[0], device=device)
        self.level = queries + (lengths[1] - lengths[0])

    def mask(self, first: torch.Tensor, limit: torch.Tensor, first_tokens: int = 0) -> TileMask:
        """The mask whose query i sees the keys first[i] .. limit[i] - 1, and of the first tokens
        those below limit[i]. first, limit: (1 or batch, seqlen_q)."""
        return TileMask.of(self.lengths, *self.intervals(first, limit, first_tokens))

    def intervals(
        self, first: torch.Tensor, limit: torch.Tensor, first_tokens: int = 0
    ) -> tuple[torch.Tensor, Evaluate]:
        tokens = limit.clamp(max=first_tokens)
        begin, end = (
            torch.arange(count_mask_tiles(self.lengths[1]), device=first.device) * MASK_TILE + more
            for more in (0, MASK_TILE)
        )
        (first_least, first_most), (limit_least, limit_most), (_, tokens_most) = (
            _extremes(rows)[..., None] for rows in (first, limit, tokens)
        )
        some = ((limit_most > begin) & (first_least < end)) | (tokens_most > begin)
        whole = (limit_least >= end) & (first_most <= begin)
        kinds = (some.to(torch.int8) + whole)[:, None]

        def evaluate(
            batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            of_rows = (rows[batch, query] for rows in (first, limit, tokens))
            begins, ends, before = of_rows
            return ((key >= begins) & (key < ends)) | (key < before)

        return kinds, evaluate


def _levels(seqlen: int, seqlen_k: int | None, device: torch.device) -> _Levels:
    lengths = seqlen, seqlen if seqlen_k is None else seqlen_k
    for name, length in zip(("seqlen", "seqlen_k"), lengths, strict=True):
        check_whole(name, length, 1)
    return _Levels(lengths, device)


def _extremes(rows: torch.Tensor) -> torch.Tensor:
    """Return (2, 1 or batch, tiles): the least and the greatest of each tile's rows."""
    missing = -rows.shape[1] % MASK_TILE
    padded = torch.cat((rows, rows[:, -1:].expand(-1, missing)), dim=1)
    return torch.stack(padded.unflatten(1, (-1, MASK_TILE)).aminmax(dim=2))


def _runs(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (first, behind the last) of each one's run of equal numbers."""
    places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    differs = numbers[:, 1:] != numbers[:, :-1]
    edge = differs.new_ones(len(numbers), 1)
    begins, ends = torch.cat((edge, differs), dim=1), torch.cat((differs, edge), dim=1)
    first = torch.where(begins, places, 0).cummax(dim=1).values
    last = torch.where(ends, places, numbers.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return first, last + 1


def _rows_of_ids(name: str, ids: Any) -> torch.Tensor:
    check_integers(name, ids, (1, 2), "(batch, seqlen) or (seqlen,)")
    return ids if ids.ndim == 2 else ids[None]


def _lengths_of(prefix: Any, device: Any) -> torch.Tensor:
    """Return (1 or batch,) int64."""
    if not isinstance(prefix, torch.Tensor):
        check_whole("prefix", prefix, accepted="an int of 0 or more, or (batch,) integers")
        return torch.tensor([prefix], device=device)
    check_integers("prefix", prefix, (1,), "an int, or (batch,) integers")
    if device is not None and torch.device(device).type != prefix.device.type:
        raise ValueError(f"device is {device}; accepted: {prefix.device}, like prefix, or None")
    if prefix.device.type == "cpu" and (prefix < 0).any():
        raise ValueError(f"prefix is {prefix.tolist()}; accepted: 0 or more")
    return prefix.long()
