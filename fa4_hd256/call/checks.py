"""Everything a user can get wrong, found before anything runs and said in the user's words: what
was given, what is accepted.

`Call.values` checks kinds of arguments, which an operator's schema could not carry (`check_kinds`).
`Problem.describe`, to which eager calls and operators in graphs come, checks ranges of options,
tensors and their contents. docs/architecture.md has what is checked later, or at every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import environment
from ..gpus.devices import is_captured
from ..kernels.backward.ds_tiles import DS_BLOCK
from ..kernels.forward.tiles import ForwardTiles
from ..kernels.functions.user_functions import FUNCTION_TENSORS
from ..kernels.limits import HEAD_DIM
from ..kernels.mask.block_mask import (
    BIT_WORDS,
    MASK_BITS,
    MASK_BLOCKS,
    MASK_GRADIENTS,
    MASK_KEY_BITS,
    MASK_STEPS,
    MASK_TABLES,
    MASK_TILE,
    STEP_WORDS,
)
from ..kernels.mask.windows import Reach, Window
from ..kernels.nvfp4_format import BLOCK_SCALES, CACHE_DTYPES, NVFP4
from ..kernels.problem_class import DESCALES, ELEMENT_TYPES, KV_DTYPES, OUT_GATE, result_dtypes
from ..kernels.rows.sequences import (
    CACHE_BATCH_IDX,
    CACHE_LEFTPAD,
    DS_BEGINS,
    PAGE_TABLE,
    SCHEDULER_METADATA,
    TREE_WORDS,
)
from ..words import shown
from .memory import check_device, check_tensor, require_dense
from .operator_arguments import wrong_rank
from .options import is_sure

DTYPES = tuple(ELEMENT_TYPES)

#: Beyond which an operator's schema carries no int, of 64 bits.
_CARRIED = 1 << 63
#: Of queries of a sequence: kernels count them, and round them up to tiles, in 32 bits.
LARGEST_QUERIES = 1 << 30


def check_kinds(tensors: dict[str, Any], others: dict[str, Any], num_splits: Any) -> None:
    """Tensors, which are not nested, and an int. tensors: None for one not given, which q, k and v
    are."""
    for name, tensor in tensors.items():
        if tensor is None and name not in ("q", "k", "v"):
            continue
        check_tensor(name, tensor)
        if tensor.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; accepted: a dense one; sequences of different lengths "
                "are those of flash_attn_varlen_func, its values and offsets as cu_seqlens"
            )
    for name, tensor in others.items():
        if not isinstance(tensor, torch.Tensor):
            if name in DESCALES:
                kind = type(tensor).__name__
                raise TypeError(f"{name} must be a float32 tensor or None, got {kind}")
            if name in BLOCK_SCALES:
                raise TypeError(
                    f"{name} must be a float8_e4m3fn tensor or None, got {shown(tensor)}"
                )
            if name == OUT_GATE:
                raise TypeError(f"{name} must be a torch.Tensor or None, got {shown(tensor)}")
            raise TypeError(_NOT_INT32.format(said(name), shown(tensor)))
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be an int, got {shown(num_splits)}")
    _carried("num_splits", num_splits)


def _carried(name: str, value: int | torch.SymInt) -> None:
    if is_sure(value < -_CARRIED) or is_sure(value >= _CARRIED):
        raise ValueError(f"{name} is {value}; accepted: a number that fits into 64 bits")


def are_differentiated(tensors: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


def check_functions(
    score_mod: Any, mask_mod: Any, softcap: float, k: torch.Tensor, others: Mapping[str, Any]
) -> None:
    """Refuse what does not go with functions of a call, None for none."""
    _check_mask_mod(mask_mod, others)
    if score_mod is None:
        return
    if softcap:
        raise ValueError(
            f"softcap is {softcap} with a score_mod; accepted: one of them, as a score_mod may cap"
        )
    if k.dtype in CACHE_DTYPES:
        raise NotImplementedError(
            f"k and v of {k.dtype} with a score_mod; accepted: q, k and v in "
            f"{' or '.join(map(str, DTYPES))}"
        )


def _check_mask_mod(mask_mod: Any, others: Mapping[str, Any]) -> None:
    """Tiles of a block mask have bits, or a mask_mod says what is seen of them, None for none."""
    lists = [name for name in (MASK_STEPS, MASK_BLOCKS) if name in others]
    bits = [name for name in (MASK_BITS, MASK_KEY_BITS) if name in others]
    if mask_mod is None:
        if len(bits) < len(lists):
            raise ValueError(
                f"{' and '.join(lists)} without bits; accepted: {MASK_BITS} and {MASK_KEY_BITS}, "
                "too, or the key of a mask_mod"
            )
    elif not lists:
        raise ValueError(
            f"the key of a mask_mod without {MASK_STEPS}, or {MASK_BLOCKS}; accepted: both, since "
            "these say in which tiles it is asked"
        )
    elif bits:
        raise ValueError(
            f"{' and '.join(bits)} beside the key of a mask_mod; accepted: bits, or a function "
            "that says the same"
        )


_NOT_INT32 = "{} must be an int32 tensor, got {}"


def said(name: str) -> str:
    """Return the name that users have for a ragged tensor."""
    return "tree_mask" if name == TREE_WORDS else name


def check_tensors(tensors: dict[str, torch.Tensor], packed: dict[str, bool]) -> None:
    """Each (batch, seqlen, heads, 256), all of one accepted dtype, or k and v of one of
    `CACHE_DTYPES`, in NVFP4 with two elements in a byte, and on one device. q of one of
    `KV_DTYPES` demands such k and v.

    packed: which of them are packed sequences with a batch of 1, which users pass without.
    """
    for name, tensor in tensors.items():
        require_dense(name, tensor)
        dtypes = (*DTYPES, *(KV_DTYPES if name == "q" else CACHE_DTYPES))
        if tensor.dtype not in dtypes:
            accepted = " or ".join(map(str, dtypes))
            accepted += " (NVFP4, two elements in a byte)" if name != "q" else ""
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {accepted}")
        if tensor.ndim != 4:
            raise ValueError(wrong_rank(name, tensor, 4, f"(batch, seqlen, heads, {HEAD_DIM})"))
        columns = row_columns(tensor.dtype)
        if tensor.shape[-1] != columns:
            shape = tensor.shape[1:] if packed[name] else tensor.shape
            of_codes = f" ({columns} bytes of two elements)" if columns < HEAD_DIM else ""
            raise ValueError(
                f"{name} has head_dim {tensor.shape[-1]}, shape {tuple(shape)}; "
                f"accepted: {columns} only{of_codes}"
            )
    if tensors["q"].dtype in KV_DTYPES and tensors["k"].dtype == NVFP4:
        raise TypeError(
            f"q has dtype {tensors['q'].dtype} with k and v in NVFP4 ({NVFP4}); accepted: "
            f"{' or '.join(map(str, DTYPES))}"
        )
    of_q = tensors["k"].dtype not in CACHE_DTYPES or tensors["q"].dtype in KV_DTYPES
    alike = {name: t.dtype for name, t in tensors.items() if name != "q" or of_q}
    _check_equal("dtype", alike, TypeError)
    _check_equal("device", {name: t.device for name, t in tensors.items()}, ValueError)


def row_columns(dtype: torch.dtype) -> int:
    return HEAD_DIM // 2 if dtype == NVFP4 else HEAD_DIM


def _check_equal(what: str, values: Mapping[str, object], error: type[Exception]) -> None:
    if len(set(values.values())) > 1:
        given = ", ".join(f"{name} {value}" for name, value in values.items())
        raise error(f"{', '.join(values)} must share one {what}; got {given}")


def check_shapes(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    packed_q: bool,
    packed_k: bool,
    paged: bool = False,
    chosen: bool = False,
) -> None:
    """Batch, lengths and heads of three shapes (b, s, h, 256). A batch of 0 is an empty result,
    and so are packed sequences without any row. paged: k and v are (pages, page_size, h, 256).
    chosen: cache_batch_idx chooses entries of k and v, which have a batch of their own."""
    if tuple(k) != tuple(v):
        raise ValueError(f"k and v must have the same shape; got k {tuple(k)}, v {tuple(v)}")
    if paged:
        check_pages(k)
    elif chosen:
        if k[0] < 1:
            raise ValueError(f"k and v have no entries, shape {tuple(k)}; accepted: 1 or more")
    elif q[0] != k[0] and packed_q == packed_k:
        raise ValueError(f"q, k and v must have the same batch; got q {q[0]}, k and v {k[0]}")
    for name, shape, packed in (("q", q, packed_q), ("k", k, packed_k)):
        if shape[1] < 1 and not packed:
            raise ValueError(f"{name} has seqlen 0, shape {tuple(shape)}; accepted: 1 or more")
        if shape[2] < 1:
            raise ValueError(f"{name} has no heads, shape {tuple(shape)}; accepted: 1 or more")
    if q[2] % k[2]:
        raise ValueError(
            f"{q[2]} query heads over {k[2]} key/value heads; accepted: a number of query heads "
            "that is a multiple of the number of key/value heads"
        )


def check_pages(k: Sequence[int]) -> None:
    pages, page_size = k[:2]
    if pages < 1:
        raise ValueError(f"k and v have no pages, shape {tuple(k)}; accepted: 1 or more")
    if page_size < 1:
        raise ValueError(
            f"k and v have pages of {page_size} rows, shape {tuple(k)}; accepted with page_table: "
            f"(pages, page_size, heads_kv, {HEAD_DIM}) with a page_size of 1 or more"
        )


def check_sink(sink: torch.Tensor, q: torch.Tensor) -> None:
    """One logit per query head."""
    require_dense("learnable_sink", sink)
    if sink.dtype not in (torch.float32, *DTYPES):
        accepted = ", ".join(map(str, (torch.float32, *DTYPES)))
        raise TypeError(f"learnable_sink has dtype {sink.dtype}; accepted: {accepted}")
    if tuple(sink.shape) != (q.shape[2],):
        raise ValueError(
            f"learnable_sink has shape {tuple(sink.shape)}; accepted: ({q.shape[2]},), one logit "
            "per query head"
        )
    _check_equal("device", {"q": q.device, "learnable_sink": sink.device}, ValueError)


def check_out_gate(gate: torch.Tensor, q: torch.Tensor) -> None:
    """One value of each element of q, or of each query and head."""
    require_dense(OUT_GATE, gate)
    dtypes = result_dtypes(q.dtype)
    if gate.dtype not in dtypes:
        accepted = " or ".join(map(str, dtypes))
        of = "out" if len(dtypes) > 1 else "q"
        raise TypeError(f"{OUT_GATE} has dtype {gate.dtype}; accepted: that of {of}, {accepted}")
    if gate.shape not in (q.shape, q.shape[:-1]):
        raise ValueError(
            f"{OUT_GATE} has shape {tuple(gate.shape)}; accepted: that of q, {tuple(q.shape)}, or "
            f"one value for each query and head, {tuple(q.shape[:-1])}"
        )
    _check_equal("device", {"q": q.device, OUT_GATE: gate.device}, ValueError)


_INTEGERS = (int, torch.SymInt)


def check_longest(side: str, longest: Any) -> None:
    """max_seqlen, an int; `bounds_of` has made one of a tensor. None: of packed sequences."""
    if longest is None or isinstance(longest, bool) or not isinstance(longest, _INTEGERS):
        where = f" with cu_seqlens_{side}" if longest is None else ""
        raise TypeError(
            f"max_seqlen_{side} must be an int{where}, or a tensor of one integer, which is not "
            f"read; got {shown(longest)}"
        )
    _carried(f"max_seqlen_{side}", longest)


def bounds_of(
    longest: tuple[Any, Any], q: torch.Tensor, words: torch.Tensor | None, fixed_parts: bool
) -> tuple[Any, Any]:
    """Return (max_seqlen_q, max_seqlen_k) without tensors, which are never read: that would
    synchronise with the device, and their contents would be in the key of a call. The rows of q,
    packed, then bound each sequence, and the nodes of a tree's words, where there are any; keys
    have no bound, which is None. fixed_parts: whether KV splits follow it.

    Raises TypeError for a tensor that is not one integer, ValueError with fixed_parts.
    """
    for side, given in zip("qk", longest, strict=True):
        if not isinstance(given, torch.Tensor):
            continue
        if given.numel() != 1 or given.is_floating_point() or given.dtype == torch.bool:
            raise TypeError(
                f"max_seqlen_{side} is a tensor of shape {tuple(given.shape)} and dtype "
                f"{given.dtype}; accepted: an int, or a tensor of one integer"
            )
        if fixed_parts:
            raise ValueError(
                f"max_seqlen_{side} is a tensor with batch_invariant=True; accepted: an int, the "
                "same for all batches, since KV splits follow it"
            )
    of_q, of_k = (isinstance(given, torch.Tensor) for given in longest)
    rows = q.shape[0] if words is None else min(q.shape[0], words.shape[1])
    return max(1, rows) if of_q else longest[0], None if of_k else longest[1]


def check_ragged(q: torch.Tensor, ragged: dict[str, torch.Tensor]) -> None:
    """Dtypes, dimensions and devices, and which go together."""
    for name, tensor in ragged.items():
        is_wide = name == TREE_WORDS and tensor.dtype == torch.int64
        if tensor.dtype != torch.int32 and not is_wide:
            raise TypeError(_NOT_INT32.format(said(name), shown(tensor)))
        require_dense(said(name), tensor)
        if name == PAGE_TABLE:
            _check_page_table(tensor)
        elif name in MASK_TABLES:
            _check_mask_table(name, tensor, ragged)
        elif name == TREE_WORDS:
            _check_tree_words(tensor)
        elif tensor.ndim != 1 or tensor.stride(0) != 1:
            raise ValueError(
                f"{said(name)} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
                "accepted: one dimension, contiguous"
            )
        _check_equal("device", {"q": q.device, said(name): tensor.device}, ValueError)
    if SCHEDULER_METADATA in ragged and "seqused_q" in ragged:
        raise ValueError(
            "seqused_q is given with scheduler_metadata; accepted: queries of one length, or "
            "packed by cu_seqlens_q"
        )
    if DS_BEGINS in ragged and {*ragged} != {"cu_seqlens_q", "cu_seqlens_k", DS_BEGINS}:
        raise ValueError(
            f"{DS_BEGINS} is given with {', '.join(ragged)}; accepted: cu_seqlens_q and "
            "cu_seqlens_k, and nothing else"
        )
    if PAGE_TABLE in ragged and "cu_seqlens_k" in ragged:
        raise ValueError(
            "page_table is given with cu_seqlens_k; accepted: seqused_k, the keys in use of each "
            "sequence, or neither: keys in pages have no offsets"
        )


def _check_page_table(table: torch.Tensor) -> None:
    rows = table.ndim == 2 and table.shape[1] > 0
    if not rows or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"page_table has shape {tuple(table.shape)} and strides {table.stride()}; accepted: "
            "(batch, pages of the longest sequence), at least one, with a last stride of 1"
        )


def _check_tree_words(words: torch.Tensor) -> None:
    most = torch.iinfo(words.dtype).bits
    if words.ndim != 2 or not 1 <= words.shape[1] <= most or words.stride(1) != 1:
        raise ValueError(
            f"{TREE_WORDS} has shape {tuple(words.shape)} and strides {words.stride()}; accepted: "
            f"(1 or batch, up to {most} nodes) with a last stride of 1, int32 up to 32 nodes, or "
            "int64"
        )


def _check_mask_table(name: str, tensor: torch.Tensor, ragged: dict[str, torch.Tensor]) -> None:
    """One of the tensors of a block mask, with those it goes with and nothing else."""
    # A mask_mod takes the place of bits: `_check_mask_mod`.
    lists, pair, given = {MASK_STEPS, MASK_BLOCKS}, {MASK_STEPS, MASK_BITS}, set(ragged)
    with_bits = given in (pair, {*pair, *MASK_GRADIENTS}, {*MASK_GRADIENTS})
    if not with_bits and not given <= lists:
        raise ValueError(
            f"{name} is given with {', '.join(ragged)}; accepted: {MASK_STEPS} and {MASK_BITS}, "
            f"{' and '.join(MASK_GRADIENTS)}, and nothing else: sequences of a call with a block "
            "mask have no lengths of their own"
        )
    is_list = name in (MASK_STEPS, MASK_BLOCKS)
    dimensions, rows = (5, (STEP_WORDS,)) if is_list else (3, (MASK_TILE, BIT_WORDS))
    form = tensor.ndim, tuple(tensor.shape[-len(rows) :]), tensor.is_contiguous()
    if form != (dimensions, rows, True):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; accepted: "
            f"{dimensions} dimensions, contiguous, the last ones {rows}"
        )


def check_lists(block_mask: Any) -> None:
    if block_mask is None:
        raise ValueError(
            "mask_mod is given without block_mask, whose lists say in which tiles it is asked; "
            "accepted: both, of packed sequences of the packed row, total_q x total_k. "
            "torch.nn.attention.flex_attention.create_block_mask makes a BlockMask of the same "
            "function in PyTorch, BlockMask.from_kv_blocks one of lists of blocks, "
            "fa4_hd256.masks named ones"
        )


def check_mask_of(
    lengths: tuple[int, int], device: torch.device, q: torch.Tensor, k: torch.Tensor
) -> None:
    """A block mask is of the lengths of q and k, where they have four dimensions, and beside
    them."""
    if q.ndim == k.ndim == 4 and lengths != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"block_mask is of {lengths[0]} queries and {lengths[1]} keys; accepted: {q.shape[1]} "
            f"and {k.shape[1]}, as q and k have"
        )
    check_device("block_mask", device, q.device, "q")


def check_mask_options(window: tuple[int | None, int | None], num_splits: int) -> None:
    """Refuse what does not go with a block mask."""
    if window != (None, None):
        raise ValueError(
            f"causal or window_size bound the keys, {window}, with block_mask; accepted: one of "
            "them: let the mask say both"
        )
    if num_splits > 1:
        raise ValueError(
            f"num_splits is {num_splits} with block_mask; accepted: 0 or 1, since its lists are "
            "not divided"
        )


def check_entries_of_mask(batch: int, heads: int, q: torch.Tensor) -> None:
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[2]):
        raise ValueError(
            f"block_mask is of batch {batch} and {heads} heads; accepted: 1 or {q.shape[0]}, and "
            f"1 or {q.shape[2]}, as q has"
        )


def check_mask(
    q: torch.Tensor, k: torch.Tensor, others: dict[str, torch.Tensor], tiles: ForwardTiles
) -> None:
    """The lists of a block mask are those of such tensors and tiles."""
    of_blocks = [-(-t.shape[1] // DS_BLOCK) for t in (q, k)]
    accepted = {
        MASK_STEPS: (-(-q.shape[1] // tiles.rows), 1 - (-k.shape[1] // MASK_TILE)),
        MASK_BLOCKS: (sum(of_blocks), 1 + max(of_blocks) * (DS_BLOCK // MASK_TILE)),
    }
    for name in accepted.keys() & others.keys():
        batch, heads, *found = others[name].shape[:4]
        check_entries_of_mask(batch, heads, q)
        if tuple(found) != accepted[name]:
            raise ValueError(
                f"{name} has {found[0]} lists of {found[1]} entries; accepted: "
                f"{accepted[name][0]} of {accepted[name][1]} for seqlen_q {q.shape[1]} and "
                f"seqlen_k {k.shape[1]}"
            )


#: Tensors of a call whose first dimension is not the batch.
_NOT_BY_SEQUENCE = {
    SCHEDULER_METADATA,
    *MASK_TABLES,
    TREE_WORDS,
    OUT_GATE,
    *DESCALES,
    *BLOCK_SCALES,
    *FUNCTION_TENSORS,
}


def count_sequences(q: torch.Tensor, k: torch.Tensor, others: dict[str, torch.Tensor]) -> int:
    """The batch size. Raises ValueError where that of the tensors differs."""
    sizes = {
        name: t.shape[0] - name.startswith("cu_")
        for name, t in others.items()
        if name not in _NOT_BY_SEQUENCE
    }
    if "cu_seqlens_q" not in others:
        sizes["q"] = q.shape[0]
    if not {"cu_seqlens_k", PAGE_TABLE, CACHE_BATCH_IDX} & {*others}:
        sizes["k"] = k.shape[0]
    if len(set(sizes.values())) > 1 or min(sizes.values()) < 0:
        raise ValueError(
            f"the batch sizes disagree: {sizes} (cu_seqlens hold batch + 1 offsets, seqused batch "
            "lengths, page_table batch rows)"
        )
    return next(iter(sizes.values()))


def reads_contents(device: torch.device) -> bool:
    """Return True if a call looks at what lengths and offsets hold: on the CPU, where nothing waits
    for it, and on a GPU by FA4_HD256_CHECK. Raises RuntimeError in the capture of a CUDA graph,
    which cannot read them."""
    if device.type == "cpu" or not environment.checks_contents():
        return device.type == "cpu"
    if is_captured(device):
        raise RuntimeError(
            f"{environment.CHECK.name} is set: lengths are read on the host, which a CUDA graph "
            "cannot capture; accepted: capture without it"
        )
    return True


def check_contents(q: torch.Tensor, k: torch.Tensor, others: dict[str, torch.Tensor]) -> None:
    """Check that offsets ascend from 0 to the total at most, and that lengths in use are not
    negative, nor more than there are rows (of keys in pages: `check_page_numbers`). For calls of
    `reads_contents`; in others kernels take what is beyond for all rows."""
    for side, tensor in (("q", q), ("k", k)):
        offsets = others.get(f"cu_seqlens_{side}")
        if offsets is not None and offsets.numel():
            steps = offsets.diff()
            if offsets[0] != 0 or offsets[-1] > tensor.shape[1] or (steps < 0).any():
                raise ValueError(
                    f"cu_seqlens_{side} is {offsets.tolist()}; accepted: offsets that ascend from "
                    f"0 to at most {tensor.shape[1]}, the number of rows of {side}"
                )
        used = others.get(f"seqused_{side}")
        if used is None:
            continue
        if (used < 0).any():
            raise ValueError(f"seqused_{side} is {used.tolist()}; accepted: 0 or more")
        if side == "k" and PAGE_TABLE in others:
            continue
        used = used.long()  # a bound may have more than 32 bits
        rows = torch.full_like(used, tensor.shape[1]) if offsets is None else offsets.diff()
        if (used > rows).any():
            raise ValueError(
                f"seqused_{side} is {used.tolist()}; accepted: up to {rows.tolist()}, the rows of "
                "each sequence"
            )
    _check_places(k, others)


def _check_places(k: torch.Tensor, others: dict[str, torch.Tensor]) -> None:
    """Raise ValueError for entries that a cache has not, and for padding beyond the rows in use."""
    entries, leftpad = others.get(CACHE_BATCH_IDX), others.get(CACHE_LEFTPAD)
    if entries is not None and ((entries < 0) | (entries >= k.shape[0])).any():
        raise ValueError(
            f"cache_batch_idx is {entries.tolist()}; accepted: 0 to {k.shape[0] - 1}, the entries "
            "of the cache"
        )
    if leftpad is not None:
        table = others.get(PAGE_TABLE)
        rows = k.shape[1] * (1 if table is None else table.shape[1])
        check_leftpad(leftpad, others.get("seqused_k"), rows)


def check_leftpad(leftpad: torch.Tensor, lengths: torch.Tensor | None, rows: int) -> None:
    """Raise ValueError for padding beyond the rows in use, None for all. Waits for the device."""
    used = torch.full_like(leftpad, rows) if lengths is None else lengths
    if ((leftpad < 0) | (leftpad > used)).any():
        raise ValueError(
            f"cache_leftpad is {leftpad.tolist()}; accepted: 0 to {used.tolist()}, the rows in use"
        )


def check_page_numbers(
    q: torch.Tensor, k: torch.Tensor, others: dict[str, torch.Tensor], window: Window
) -> torch.Tensor:
    """Return the page numbers that are read, those of pages with a key that some query sees. Raises
    ValueError for lengths that do not fit into a row of pages, and for a number that is read and is
    none of a page. Waits for the device."""
    table = others[PAGE_TABLE]
    (pages, page_size), columns = k.shape[:2], table.shape[1]
    used = others.get("seqused_k", table.new_full(table.shape[:1], columns * page_size)).long()
    if (used > columns * page_size).any():
        raise ValueError(
            f"seqused_k is {used.tolist()}; accepted: up to {columns * page_size}, the {columns} "
            f"pages of a row of page_table of {page_size} rows each"
        )
    left, reach = window[0], Reach.of(window)
    queries = _query_lengths(q, others)
    first = torch.zeros_like(used) if left is None else (used - queries - left).clamp(min=0)
    if CACHE_LEFTPAD in others:
        first = torch.maximum(first, others[CACHE_LEFTPAD].long())
    # A row without a query that sees something reads nothing, nor does one of padding alone.
    last = torch.where(queries > reach.queries, used - reach.keys, 0)
    last = torch.where(first < last, last, 0)
    starts = torch.arange(columns, device=table.device) * page_size
    is_read = (starts + page_size > first[:, None]) & (starts < last[:, None])
    wrong = is_read & ((table < 0) | (table >= pages))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"page_table[{row}, {column}] is {int(table[row, column])}; accepted: 0 to "
            f"{pages - 1}, the pages of k and v (entries of pages that no query sees may be "
            "anything)"
        )
    return table[is_read]


def check_pages_on_gpu(
    q: torch.Tensor, k: torch.Tensor, others: dict[str, torch.Tensor], window: Window
) -> None:
    """Check page numbers on a GPU if the user asks for it; those on the CPU, and all contents where
    these are read, were checked with all else. Raises ValueError as `check_page_numbers` does, and
    RuntimeError while a graph is captured."""
    if reads_contents(q.device) or PAGE_TABLE not in others or not environment.checks_pages():
        return
    if is_captured(q.device):
        raise RuntimeError(
            f"{environment.CHECK_PAGES.name} is set: page numbers are read on the host, which a "
            "CUDA graph cannot capture; accepted: capture without it"
        )
    check_page_numbers(q, k, others, window)


def _query_lengths(q: torch.Tensor, others: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return (batch,) int64 rows in use of each sequence."""
    offsets, used = others.get("cu_seqlens_q"), others.get("seqused_q")
    if offsets is None:
        lengths = torch.full((q.shape[0],), q.shape[1], device=q.device)
    else:
        lengths = offsets.long().diff()
    return lengths if used is None else torch.minimum(lengths, used.long())


def check_max_seqlen(
    side: str, tensor: torch.Tensor, others: dict[str, torch.Tensor], longest: int | None
) -> int:
    """The longest sequence of a side, "q" or "k", or 1 where all are empty; given by the caller for
    packed sequences, and for keys in pages if not all of a row of page_table may be in use."""
    offsets, lengths = others.get(f"cu_seqlens_{side}"), tensor.new_empty(0)
    if side == "k" and PAGE_TABLE in others:
        table, used = others[PAGE_TABLE], others.get("seqused_k")
        most = table.shape[1] * tensor.shape[1]
        longest = most if longest is None else min(longest, most)
        if used is None and longest < most:
            raise ValueError(
                f"max_seqlen_k is {longest} with page_table and without seqused_k; accepted: "
                f"{most}, all rows of a row of page_table, or None; or give seqused_k, the keys in "
                "use of each sequence"
            )
        lengths = lengths if used is None else used
    elif offsets is None:
        return tensor.shape[1]
    if longest is None or longest < 0:
        raise ValueError(f"max_seqlen_{side} is {longest}; accepted: 0 or more")
    if side == "q" and longest > LARGEST_QUERIES:
        raise ValueError(f"max_seqlen_q is {longest}; accepted: up to {LARGEST_QUERIES}")
    if reads_contents(tensor.device):
        if offsets is not None:
            lengths = offsets.diff()
        found = int(lengths.max()) if lengths.numel() else 0
        if found > longest:
            rows = {"q": "query", "k": "key"}[side]
            raise ValueError(
                f"max_seqlen_{side} is {longest}, but a sequence has {found} {rows} rows"
            )
    return max(1, longest)


def check_gradients(
    named: dict[str, torch.Tensor | None], q: torch.Tensor, lse_shape: tuple[int, ...]
) -> None:
    """out and its gradient like q; lse and its gradient (batch, heads, seqlen_q) float32. named:
    out, dout, lse, dlse; None for one not given. Raises TypeError for another dtype, ValueError for
    another shape or device."""
    for name, tensor in named.items():
        if tensor is None:
            continue
        of_rows = name in ("lse", "dlse")
        shape, dtype = (lse_shape, torch.float32) if of_rows else (q.shape, q.dtype)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {dtype}")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {tuple(shape)}")
        check_device(name, tensor.device, q.device, "q")
