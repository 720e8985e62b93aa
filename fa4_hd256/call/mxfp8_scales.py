"""Scales of blocks of q, k and v in mxfp8: which a call has, and how kernels read them.

Their layout: `fa4_hd256.quantize.mxfp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..kernels.block_scales import (
    ATOM_BLOCKS,
    ATOM_BYTES,
    ATOM_ROWS,
    ATOMS,
    SCALE_BLOCK,
    SCALE_DTYPES,
)
from ..kernels.limits import FLOAT_BYTES, HEAD_DIM
from ..kernels.problem_class import DESCALES, KV_DTYPES, OF_BLOCKS
from ..kernels.rows.sequences import (
    CACHE_BATCH_IDX,
    CACHE_LEFTPAD,
    PAGE_TABLE,
    SCHEDULER_METADATA,
    TREE_WORDS,
)
from .checks import said

#: Scales of v for the forward, and for gradients of q, k and dout, whose blocks are of rows.
OF_ROWS = (DESCALES[2], "q_rows_descale", "k_rows_descale", "dout_rows_descale")
#: Whose sequences scales of packed ones are of.
_SIDES = dict(zip(DESCALES, "qkk", strict=True))
_ROW_SCALES = HEAD_DIM // SCALE_BLOCK
#: Metadata are made for tiles that query heads share, which these kernels have none of.
_APART = (PAGE_TABLE, CACHE_BATCH_IDX, CACHE_LEFTPAD, TREE_WORDS, SCHEDULER_METADATA)


def check_blocks(q: torch.Tensor, k: torch.Tensor, given: Mapping[str, torch.Tensor]) -> None:
    """Check all three scales of blocks, which are given. Raises TypeError for another dtype,
    ValueError for another shape or device, NotImplementedError beside what such calls do not
    take."""
    beside = [said(name) for name in _APART if name in given]
    if beside:
        raise NotImplementedError(
            f"scales of blocks with {', '.join(beside)}: not offered; accepted: dense q, k and v, "
            "or packed ones with cu_seqlens_q and cu_seqlens_k"
        )
    if q.dtype not in KV_DTYPES:
        raise ValueError(f"scales of blocks with q of {q.dtype}; accepted: {KV_DTYPES[0]}")
    for name, rows_of in zip(DESCALES, (q, k, k), strict=True):
        scale = given[name]
        if scale.dtype not in SCALE_DTYPES:
            raise TypeError(
                f"{name} has dtype {scale.dtype} beside scales of blocks; accepted: "
                f"{' or '.join(map(str, SCALE_DTYPES))}, like those"
            )
        packed = f"cu_seqlens_{'q' if rows_of is q else 'k'}" in given
        check_shape(name, tuple(scale.shape), rows_of, packed)
        check_order(name, scale, packed)


def refuse_new_rows(descale: str) -> None:
    """Raise NotImplementedError for new rows beside scales of blocks, which they would change."""
    if descale == OF_BLOCKS:
        raise NotImplementedError(
            "new rows of a cache with scales of blocks: not offered; accepted: calls without new k "
            "and v, or float32 scales"
        )


def check_shape(name: str, shape: tuple[int, ...], tensor: torch.Tensor, packed: bool) -> None:
    """Raise ValueError for another shape than that of a tensor's scales: (batch, heads, rows,
    blocks), with whole atoms; packed sequences, each of whole atoms, have no batch."""
    batch, rows, heads, _ = tensor.shape
    tiles = -(-rows // ATOM_ROWS)
    outer, along = ((heads,), 1) if packed else ((batch, heads), 2)
    if name in OF_ROWS:
        accepted, found = (*outer, HEAD_DIM, ATOM_BLOCKS * tiles), shape[along + 1 :]
        wide = shape[:along] == outer and shape[along : along + 1] == (HEAD_DIM,)
    else:
        accepted, found = (*outer, ATOM_ROWS * tiles, _ROW_SCALES), shape[along : along + 1]
        wide = shape[:along] == outer and shape[along + 1 :] == (_ROW_SCALES,)
    unit = ATOM_BLOCKS if name in OF_ROWS else ATOM_ROWS
    more = packed and wide and len(shape) == 3 and found[0] % unit == 0
    if shape == accepted or more and found[0] >= unit * tiles:
        return
    also = ", or more where sequences end within an atom" if packed else ""
    raise ValueError(
        f"{name} has shape {shape}; accepted: {accepted}{also}, in atoms (docs/serving.md)"
    )


def check_order(name: str, scale: torch.Tensor, packed: bool) -> None:
    """Raise ValueError for a part of dense scales of rows, by batch or heads. Halves of the columns
    are outermost in memory (`quantize.mxfp8`, NOTE [atoms])."""
    if name in OF_ROWS and not packed and not scale.is_contiguous():
        raise ValueError(
            f"{name} has strides {scale.stride()}; accepted: a contiguous tensor, whose memory is "
            "in the order of atoms: quantize the sequences and heads of the call"
        )


def check_alone(name: str, scale: Any) -> None:
    """Raise ValueError for some sequences or heads of dense scales of rows, of several's tensor.

    Such a part may be contiguous, and has not the order of `quantize.mxfp8`, NOTE [atoms]. Neither
    shape nor strides tell, so each eager call asks the tensor that it is a view of, or where it has
    none its memory. A copy of a part cannot be told.
    """
    if not isinstance(scale, torch.Tensor) or scale.ndim != 4 or scale.dtype not in SCALE_DTYPES:
        return
    if not scale.is_contiguous():
        return  # `check_order` refuses it.
    base, form = scale._base, scale.shape
    if base is None:
        # Of views that change the dtype, detached ones and inference tensors PyTorch keeps no base.
        # Elements have one byte.
        of_head, memory = form[2] * form[3], scale.untyped_storage().nbytes()
        is_part = scale.numel() < memory and not (
            memory % of_head or scale.storage_offset() % of_head
        )
        what = f"a tensor with more memory, {memory} bytes"
    else:
        is_part = base.shape[-2:] == form[2:] and base.shape[-4:-2] != form[:2]
        what = f"a tensor of shape {tuple(base.shape)}"
    if is_part:
        raise ValueError(
            f"{name} is a part of {what}, whose sequences and heads do not lie one after the "
            "other; accepted: scales of these sequences alone: quantize these; of scales that "
            "were, a clone()"
        )


def check_packed(given: Mapping[str, torch.Tensor], sides: Mapping[str, str] = _SIDES) -> None:
    """Raise ValueError for scales of packed sequences with fewer tiles than these. sides: names of
    scales, and "q" or "k", whose sequences they are of. Waits for the device."""
    for name, side in sides.items():
        offsets = given.get(f"cu_seqlens_{side}")
        if offsets is None:
            continue
        tiles = int((-(-offsets.diff() // ATOM_ROWS)).sum())
        scale = given[name]
        found = scale.numel() // (max(1, scale.shape[0]) * ATOMS * ATOM_BYTES)
        if found < tiles:
            raise ValueError(
                f"{name} has {found} tiles of a head; accepted: {tiles}, ceil(length / "
                f"{ATOM_ROWS}) of each sequence of cu_seqlens_{side}"
            )


def words_of(view: Any, name: str) -> Any:
    """Return the view (batch, heads, tiles, 2, 128) of words of contiguous scales. name: of the
    argument that they are. The halves of the head's columns are outermost in dense calls where
    blocks are of rows: of v, and of what gradients reduce over rows."""
    *outer, rows, blocks = view.shape
    heads = outer[-1]
    batch, tiles = (outer[0] if len(outer) == 2 else 1), rows * blocks // (ATOMS * ATOM_BYTES)
    words = view.as_strided((view.numel(),), (1,)).view(torch.int32)
    atom = ATOM_BYTES // FLOAT_BYTES
    of_half, of_tile = atom, ATOMS * atom
    if name in OF_ROWS and len(outer) == 2:
        of_half, of_tile = batch * heads * tiles * atom, atom
    strides = heads * tiles * of_tile, tiles * of_tile, of_tile, of_half, 1
    return words.as_strided((batch, heads, tiles, ATOMS, atom), strides)
