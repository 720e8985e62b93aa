"""FLOPs of the torch operators, for `torch.utils.flop_counter.FlopCounterMode`.

A pair of a query and a key that it sees costs 2 * 256 FLOPs in each GEMM: two GEMMs in the forward;
in the backward two for S and dP, one for dQ, two for dK and dV.  Pairs are counted under causal
masks, windows, lengths of sequences and block masks.  A partial tile of a mask_mod, and the last
keys under a tree mask, count whole.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any

import numpy as np
import torch

from ..call.cache_checks import counted
from ..call.operator_arguments import (
    ForwardTensors,
    backward_arguments,
    cache_arguments,
    forward_arguments,
)
from ..call.options import UNBOUNDED
from ..call.process import without_modes
from ..kernels.backward.ds_tiles import count_blocks
from ..kernels.mask.block_mask import FULL, MASK_TILE, NOTHING
from ..package_name import NAMESPACE

#: FLOPs of a pair in a GEMM.
_OF_PAIR = 2 * 256
_COUNTER = "torch.utils.flop_counter"


def _forward_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    tensors, values = forward_arguments(arguments)
    return 2 * _OF_PAIR * _pairs(tensors, values, tensors.mask_steps, tensors.mask_bits)


def _forward_out_flops(_out: Any, *arguments: Any, **options: Any) -> int:
    return _forward_flops(*arguments, **options)


def _kvcache_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    tensors, values = cache_arguments(arguments)
    with without_modes():
        after = counted(tensors.lengths, tensors.k, tensors.cu_seqlens_k_new)
    attention = tensors.attention(after).with_batches()
    return 2 * _OF_PAIR * _pairs(attention, values.attention, None, None)


def _backward_flops(*arguments: Any, out_val: Any = None, **_options: Any) -> int:
    tensors, values = backward_arguments(arguments)
    needs_dq, needs_dkdv = map(int, values.wanted[:2])
    gemms = 2 * (needs_dq or needs_dkdv) + needs_dq + 2 * needs_dkdv
    blocks = tensors.mask_blocks
    if blocks is not None:
        blocks = blocks[:, :, : count_blocks(tensors.k.shape[1])]
    return gemms * _OF_PAIR * _pairs(tensors, values.forward, blocks, tensors.mask_key_bits)


def _pairs(tensors: Any, values: Any, lists: Any, bits: Any) -> int:
    """Return the pairs of queries and visible keys of a call, over all sequences and query heads.
    lists, bits: of a block mask, by queries in the forward, by keys in the backward."""
    batch, seqlen_q, heads, _ = tensors.q.shape
    if lists is not None:
        by_queries = isinstance(tensors, ForwardTensors)
        found = _listed_pairs(_numbers(lists), _numbers(bits), seqlen_q, by_queries)
        repeats = batch // lists.shape[0] * (heads // lists.shape[1])
        return int(found) * repeats
    queries = _lengths(tensors.cu_seqlens_q, tensors.seqused_q, batch, seqlen_q)
    page_table = getattr(tensors, "page_table", None)
    rows = tensors.k.shape[1] * (1 if page_table is None else page_table.shape[1])
    keys = _lengths(tensors.cu_seqlens_k, tensors.seqused_k, len(queries), rows)
    unseen = _numbers(getattr(tensors, "cache_leftpad", None))
    if unseen is not None:
        keys = [max(0, length - int(pad)) for length, pad in zip(keys, unseen)]
    window = values.window_left, values.window_right
    return heads * sum(_seen(q, k, *window) for q, k in zip(queries, keys, strict=True))


def _seen(queries: int, keys: int, left: int, right: int) -> int:
    """Return the visible pairs of a sequence; `UNBOUNDED` for a side without bound."""
    level = np.arange(queries, dtype=np.int64) + (keys - queries)
    ends = np.full_like(level, keys - 1)
    last = ends if right == UNBOUNDED else np.minimum(level + right, ends)
    first = np.zeros_like(level) if left == UNBOUNDED else np.maximum(level - left, 0)
    return int(np.maximum(last - first + 1, 0).sum())


def _lengths(offsets: Any, used: Any, batch: int, rows: int) -> list[int]:
    """Return the lengths of sequences, all rows where they cannot be read (fake tensors)."""
    if offsets is not None:
        read = _numbers(offsets)
        lengths = [rows] if read is None else np.diff(read).tolist()
    else:
        lengths = [rows] * batch
    read = None if used is None else _numbers(used)
    if read is not None and len(read) == len(lengths):
        lengths = [min(all_rows, int(some)) for all_rows, some in zip(lengths, read)]
    return lengths


def _numbers(tensor: Any) -> Any:
    """Return what a tensor holds, None where nothing is to be read."""
    if tensor is None or type(tensor) is not torch.Tensor or tensor.is_meta:
        return None
    with without_modes():
        return tensor.detach().cpu().numpy()


def _listed_pairs(lists: Any, bits: Any, seqlen_q: int, by_queries: bool) -> int:
    """Return the visible pairs of listed tiles (`kernels.mask.block_mask`, or the backward's)."""
    if lists is None:
        return 0
    tiles = -(-seqlen_q // MASK_TILE)
    entries, numbers = lists[:, :, :, 1:], lists[:, :, :, 1:, 1:3].astype(np.int64)
    if by_queries:
        # Each tile of the kernel has one or two tiles of the mask.
        halves = 1 if lists.shape[2] == tiles else 2
        tile = np.arange(lists.shape[2])[:, None, None] * halves + np.arange(2)
    else:
        tile = entries[..., :1]
    tile = np.broadcast_to(tile, numbers.shape)
    rows = np.clip(seqlen_q - tile * MASK_TILE, 0, MASK_TILE)
    whole = numbers == FULL
    found = int((rows * whole).sum()) * MASK_TILE
    is_partial = ~whole & (numbers != NOTHING)
    if bits is None:
        return found + int((rows * is_partial).sum()) * MASK_TILE
    # Pairs of the first queries of each tile of bits.
    unpacked = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=-1, bitorder="little")
    of_queries = unpacked.sum(-1 if by_queries else -2, dtype=np.int64)
    upto = np.concatenate([np.zeros_like(of_queries[:, :1]), of_queries.cumsum(1)], axis=1)
    return found + int(upto[numbers[is_partial], rows[is_partial]].sum())


def register_when_counted() -> None:
    """Register the formulas once PyTorch's counter is imported, which takes long (Triton)."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    from torch.utils import flop_counter

    operators = getattr(torch.ops, NAMESPACE)
    for operator, formula in (
        (operators.forward, _forward_flops),
        (operators.forward_max_logits, _forward_flops),
        (operators.forward_out, _forward_out_flops),
        (operators.forward_kvcache, _kvcache_flops),
        (operators.backward, _backward_flops),
    ):
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator, get_raw=True)(formula)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds PyTorch's counter as others do, and registers the formulas once it is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
