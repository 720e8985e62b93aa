"""Packed sequences under a block mask: one row of all of them, whose mask lets a query see keys of
its own sequence alone.

Positions of the block mask are those of the packed tensors. Tiles of the kernels begin at multiples
of 128 of these, as its blocks do, not where sequences begin: so the call is one of dense tensors
with a batch of 1.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .call.checks import (
    check_contents,
    check_kinds,
    check_lists,
    check_mask_of,
    check_ragged,
    count_sequences,
)
from .call.functions.tensors import check_slopes
from .call.functions.until_changed import UntilChanged
from .call.operator_arguments import with_batch
from .call.options import BY_RULE
from .call.tile_mask import TileMask
from .gpus.devices import is_captured
from .kernels.functions.kernel_functions import Functions
from .kernels.functions.row_places import SequenceOfQuery, key_in_row
from .kernels.functions.user_functions import ALIBI, MASK_MOD, SCORE_MOD
from .mask_mods import MaskMod
from .masks import as_tile_mask, in_sequences, keys_of_rows
from .score_mods import ScoreMod


class PackedRow(NamedTuple):
    """Arguments of `flash_attn_func` for the row: tensors with a batch of 1, mask and functions."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_mask: TileMask
    mask_mod: MaskMod | None
    score_mod: ScoreMod | None


def packed_row(
    tensors: tuple[Any, Any, Any],
    offsets: tuple[Any, Any],
    refused: dict[str, Any],
    functions: tuple[Any, Any, Any],
) -> PackedRow:
    """tensors: q, k, v, (total, heads, 256). offsets: cu_seqlens_q and cu_seqlens_k. refused: by
    name, what may not be given. functions: block_mask, mask_mod, score_mod.

    Raises ValueError for other arguments than cu_seqlens_q and cu_seqlens_k, and for these as the
    operator does; else as `flash_attn_func`.
    """
    block_mask, mask_mod, score_mod = functions
    ragged = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
    _check(ragged, refused, block_mask)
    check_kinds(dict(zip("qkv", tensors)), ragged, BY_RULE)
    q, k, v = (with_batch(name, t) for name, t in zip("qkv", tensors))
    check_ragged(q, ragged)
    if not count_sequences(q, k, ragged):
        raise ValueError("cu_seqlens_q and cu_seqlens_k hold no sequence; accepted: 1 or more")
    if q.device.type == "cpu":
        check_contents(q, k, ragged)
    mask = as_tile_mask(block_mask, with_bits=mask_mod is None, batch=1, heads=q.shape[2])
    check_mask_of(mask.lengths, mask.device, q, k)
    joined, table = _joined(mask, offsets)
    # `flash_attn_func` refuses other kinds.
    if isinstance(mask_mod, MaskMod):
        mask_mod = _with_table(mask_mod, MASK_MOD.functions_of(key_in_row(mask_mod.key)), table)
    if isinstance(score_mod, ScoreMod):
        if score_mod.key == ALIBI:
            check_slopes(score_mod.tensors, q.shape[-2], count_sequences(q, k, ragged))
        score_mod = _with_table(score_mod, SCORE_MOD.functions_of(key_in_row(score_mod.key)), table)
    return PackedRow(q, k, v, joined, mask_mod, score_mod)


def _check(offsets: dict[str, Any], refused: dict[str, Any], block_mask: Any) -> None:
    check_lists(block_mask)
    named = ", ".join(name for name, given in refused.items() if given is not None)
    if named or any(given is None for given in offsets.values()):
        raise ValueError(
            f"flash_attn_varlen_func with block_mask{' and ' if named else ''}{named}; accepted: "
            "sequences packed by cu_seqlens_q and cu_seqlens_k, without any of "
            f"{', '.join(refused)}. Padded sequences have flash_attn_func and "
            "fa4_hd256.masks.from_dense"
        )
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "flash_attn_varlen_func with block_mask inside torch.compile; accepted: a mask of "
            "fa4_hd256.masks.in_sequences(block_mask, cu_seqlens_q, cu_seqlens_k), made outside, "
            "for flash_attn_func of q[None], k[None] and v[None]"
        )


#: Joined masks that are kept of a mask, for so many cu_seqlens_q and as many cu_seqlens_k of each:
#: those of a data set may all be alive, and a joined mask of 16,384 tokens takes up to 32 MiB.
MOST_JOINED = 8

#: Rows by masks that are alive, then cu_seqlens_q, then cu_seqlens_k.
_known: weakref.WeakKeyDictionary[TileMask, UntilChanged] = weakref.WeakKeyDictionary()


def _joined(
    mask: TileMask, offsets: tuple[torch.Tensor, torch.Tensor]
) -> tuple[TileMask, torch.Tensor]:
    """Return (the mask with sequences, of each query what functions read of its own), made once for
    calls with the same tensors, unless somebody writes to these (`UntilChanged`); in a CUDA graph
    at each replay."""
    if is_captured(mask.device):
        return _made(mask, offsets)
    of_mask = _known.setdefault(mask, UntilChanged(MOST_JOINED))
    of_queries = of_mask.get(offsets[0]) or UntilChanged(MOST_JOINED)
    found = of_queries.get(offsets[1])
    if found is None:
        found = _made(mask, offsets)
        of_queries[offsets[1]] = found
        of_mask[offsets[0]] = of_queries
    made: tuple[TileMask, torch.Tensor] = found
    return made


def _made(
    mask: TileMask, offsets: tuple[torch.Tensor, torch.Tensor]
) -> tuple[TileMask, torch.Tensor]:
    """Make what `_joined` caches; no inference tensors, which a later training could not save."""
    with torch.inference_mode(False):
        joined = in_sequences(mask, *offsets, with_bits=mask.bits is not None)
        return joined, _table(mask.lengths[0], *offsets)


def _table(total_q: int, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> torch.Tensor:
    """Return (total_q, 5) int32: the `SequenceOfQuery` of each."""
    numbers, begin_k, seqlen_k = keys_of_rows(cu_seqlens_q, cu_seqlens_k, total_q)
    begin_q, seqlen_q = (of_all[numbers] for of_all in (cu_seqlens_q, cu_seqlens_q.diff()))
    found = SequenceOfQuery(numbers, begin_q, begin_k, seqlen_q, seqlen_k)
    return torch.stack([column.int() for column in found], dim=1)


def _with_table(given: Any, functions: Functions, table: torch.Tensor) -> Any:
    """A score_mod or mask_mod of the row; functions: of its new key."""
    fields = {"function": functions.function, "tensors": (*given.tensors, table)}
    if isinstance(given, ScoreMod):
        fields["slope"] = functions.slope
    return replace(given, key=key_in_row(given.key), **fields)
