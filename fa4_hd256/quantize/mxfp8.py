"""mxfp8: e4m3 codes, and an E8M0 scale for each block of 32 elements, a power of two.

Q and K have their blocks along the head's columns, V along the sequence: the dimensions that the
MMAs reduce.  The scale of a block is the least power of two that brings its largest magnitude to
448 at most, as cuDNN's and Transformer Engine's quantizers choose it; OCP MX (v1.0, 6.3) would
take 2^floor(log2 amax) / 2^8, and saturate the largest elements of some blocks.  So no finite
element saturates.  An element that is NaN or infinite becomes NaN, and does not count for the
scale.  A block of zeros has the least scale, 2^-127, and padding has it, too.  Codes are rounded to
nearest, ties to even.

NOTE [atoms].  Scales lie in atoms of 128 rows x 4 blocks, 512 bytes: the layout F8_128x4.  Inside
an atom the scale of row r and block c is byte ``(r % 32) * 16 + r // 32 * 4 + c``.  Rows are those
of the matrix that is multiplied: tokens of Q and K, with 8 blocks, and columns of V, whose blocks
are of 32 keys.  With h a head, b a batch entry, T = ceil(seqlen / 128) and l = b * heads + h, the
atom of a token s and a column d of the head is number ::

    Q, K               (l * T + s // 128) * 2 + d // 128
    V                  d // 128 * batch * heads * T + l * T + s // 128
    V, packed          (h * T + s // 128) * 2 + d // 128

For gradients Q, K and dO are quantized a second time with blocks along the sequence, and V with
blocks along the columns. Scales lie as those of V in the first case, as those of Q in the second.

Packed sequences have atoms of their own: T is the sum of ceil(length / 128) over all of them, and
s counts from 128 times that sum over the sequences before.  The shapes of scales are (batch,
heads, 128 T, 8) and for V (batch, heads, 256, 4 T), without batch where packed; they say how many
there are, not where: memory is in the order of the atoms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..call.memory import check_tensor
from ..kernels.block_scales import ATOM_BLOCKS, ATOM_ROWS, SCALE_BLOCK, SCALE_DTYPES
from ..kernels.limits import HEAD_DIM

#: Dtypes of tensors that gradients flow to.
_HALVES = torch.bfloat16, torch.float16
#: The largest e4m3 is 448 = 0.875 * 2^9; E8M0 is an exponent with this bias.
LARGEST, SIGNIFICAND, EXPONENT, BIAS = 448.0, 0.875, 9, 127


class Mxfp8(NamedTuple):
    """Operands of `fa4_hd256.flash_attn_func`, by the names of its arguments."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor


class Mxfp8Gradients(NamedTuple):
    """Operands of the gradients of a call in mxfp8, beside its own. q, k, v: the tensors of 16 bits
    that were quantized, to which gradients flow. v_columns: v with blocks along the head's columns;
    q_rows, k_rows: q and k with blocks along the sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    v_columns: torch.Tensor
    q_rows: torch.Tensor
    k_rows: torch.Tensor
    v_columns_descale: torch.Tensor
    q_rows_descale: torch.Tensor
    k_rows_descale: torch.Tensor


class Mxfp8Training(NamedTuple):
    """`Mxfp8`, with what gradients take."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    mxfp8_gradients: Mxfp8Gradients


def quantize_mxfp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> Mxfp8:
    """Quantize q, k and v to mxfp8: codes in torch.float8_e4m3fn, shaped like them, and scales in
    torch.float8_e8m0fnu, in atoms (docs/serving.md).

    q, k, v: (batch, seqlen, heads, 256), or packed (total, heads, 256) with cu_seqlens, on any
    device. With cu_seqlens it waits for the device: the number of atoms follows the lengths.

    Raises ValueError for another shape and for offsets that are none of the rows, TypeError for a
    dtype that is not floating.
    """
    found = [
        quantized(name, tensor, offsets, along_rows=name == "v")
        for name, tensor, offsets in (
            ("q", q, cu_seqlens_q),
            ("k", k, cu_seqlens_k),
            ("v", v, cu_seqlens_k),
        )
    ]
    codes, scales = zip(*found, strict=True)
    return Mxfp8(*codes, *scales)


def quantize_mxfp8_training(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> Mxfp8Training:
    """Quantize q, k and v to mxfp8 for a call whose gradients flow to them (docs/training.md). q,
    k, v: as of `quantize_mxfp8`, all bfloat16 or all float16. The gradient of the result is
    quantized in the backward. Raises as `quantize_mxfp8` does, and TypeError for other dtypes."""
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, tensor)
    if q.dtype not in _HALVES or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; accepted: all "
            "torch.bfloat16 or all torch.float16, which their gradients have, too"
        )
    with torch.no_grad():
        forward = quantize_mxfp8(q, k, v, cu_seqlens_q, cu_seqlens_k)
        found = [
            quantized("v", v, cu_seqlens_k),
            quantized("q", q, cu_seqlens_q, along_rows=True),
            quantized("k", k, cu_seqlens_k, along_rows=True),
        ]
    codes, scales = zip(*found, strict=True)
    return Mxfp8Training(*forward, Mxfp8Gradients(q, k, v, *codes, *scales))


def dequantize_mxfp8(
    codes: torch.Tensor,
    descale: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    along_keys: bool = False,
) -> torch.Tensor:
    """Return what codes stand for, in float64. codes, descale: one tensor of `quantize_mxfp8` and
    its scales; cu_seqlens: its offsets, where it is packed; along_keys: it is V, whose blocks are
    of keys. Raises TypeError for other dtypes, ValueError for other shapes and offsets."""
    check_tensor("codes", codes)
    _check_rows("codes", codes, cu_seqlens)
    check_tensor("descale", descale)
    if codes.dtype != torch.float8_e4m3fn or descale.dtype not in SCALE_DTYPES:
        raise TypeError(
            f"codes are {codes.dtype}, descale {descale.dtype}; accepted: torch.float8_e4m3fn and "
            f"{' or '.join(map(str, SCALE_DTYPES))}"
        )
    padded, rows = _padded(codes.to(torch.float64), cu_seqlens)
    _check_scales(descale, padded, cu_seqlens is not None, along_keys)
    exponents = _from_atoms(descale, along_keys).view(torch.uint8).to(torch.float64) - BIAS
    scales = torch.exp2(exponents).masked_fill_(exponents == 255 - BIAS, float("nan"))
    if along_keys:
        scales = scales.transpose(-1, -2)
    # (batch, heads, rows, blocks) of either -> (batch, rows, heads, columns).
    scales = scales.repeat_interleave(SCALE_BLOCK, -2 if along_keys else -1).transpose(1, 2)
    scaled: torch.Tensor = padded * scales
    return _unpadded(scaled, rows, codes)


def quantized(
    name: str, tensor: torch.Tensor, offsets: torch.Tensor | None, along_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales in atoms) of one tensor.  along_rows: blocks are of 32 rows, not of 32
    columns. Raises as `quantize_mxfp8` does."""
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: a floating one")
    _check_rows(name, tensor, offsets)
    padded, rows = _padded(tensor.float(), offsets)
    # Blocks last.
    along = padded.transpose(1, 2)
    along = along.transpose(2, 3) if along_rows else along
    blocks = along.unflatten(-1, (-1, SCALE_BLOCK))
    exponents = _exponents(blocks)
    # 2^-(exponent) in two steps: one of 2^127 and more is beyond float32.
    halves = exponents // 2
    scaled = torch.ldexp(torch.ldexp(blocks, -halves[..., None]), (halves - exponents)[..., None])
    scaled = scaled.masked_fill(~blocks.isfinite(), float("nan"))
    codes = scaled.to(torch.float8_e4m3fn).flatten(-2)
    codes = (codes.transpose(2, 3) if along_rows else codes).transpose(1, 2)
    scales = (exponents + BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    return _unpadded(codes, rows, tensor).contiguous(), _to_atoms(scales, along_rows, offsets)


def _check_rows(name: str, tensor: torch.Tensor, offsets: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError for another shape than that of q, and for offsets that are none
    of its rows. Waits for the device of offsets."""
    dimensions = 4 if offsets is None else 3
    if tensor.ndim != dimensions or tensor.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; accepted: (batch, seqlen, heads, 256), or "
            "(total, heads, 256) with cu_seqlens"
        )
    if offsets is None:
        return
    check_tensor(f"cu_seqlens of {name}", offsets)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens of {name} has dtype {offsets.dtype}; accepted: torch.int32")
    if offsets.ndim != 1 or not len(offsets) or offsets.device != tensor.device:
        raise ValueError(
            f"cu_seqlens of {name} has shape {tuple(offsets.shape)} on {offsets.device}; accepted: "
            f"(sequences + 1,) on {tensor.device}"
        )
    found, rows = offsets.tolist(), tensor.shape[0]
    if found[0] != 0 or found != sorted(found) or found[-1] > rows:
        raise ValueError(
            f"cu_seqlens of {name} is {found}; accepted: offsets that ascend from 0 to at most "
            f"{rows}, the number of its rows"
        )


def _check_scales(
    descale: torch.Tensor, padded: torch.Tensor, is_packed: bool, along_keys: bool
) -> None:
    batch, rows, heads, columns = padded.shape
    plane = (columns, rows // SCALE_BLOCK) if along_keys else (rows, columns // SCALE_BLOCK)
    accepted = (heads, *plane) if is_packed else (batch, heads, *plane)
    if tuple(descale.shape) != accepted:
        raise ValueError(
            f"descale has shape {tuple(descale.shape)}; accepted: {accepted}, of such codes"
            f"{' with' if along_keys else ' without'} along_keys"
        )


def _exponents(blocks: torch.Tensor) -> torch.Tensor:
    largest = blocks.abs().masked_fill(~blocks.isfinite(), 0.0).amax(-1)
    significand, exponent = torch.frexp(largest)
    found = exponent - EXPONENT + (significand > SIGNIFICAND).int()
    return found.masked_fill(largest == 0, -BIAS).clamp(-BIAS, BIAS)


def _to_atoms(scales: torch.Tensor, is_v: bool, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return (batch, heads, rows, blocks) in the order of NOTE [atoms]."""
    batch, heads, rows, blocks = scales.shape
    form = batch, heads, rows // ATOM_ROWS, 4, 32, blocks // ATOM_BLOCKS, ATOM_BLOCKS
    # (batch, heads, row atom, 32-row quarter, row, block atom, block) -> inside an atom last.
    bytes_of = scales.view(torch.uint8).reshape(form).permute(0, 1, 2, 5, 4, 3, 6)
    if is_v:
        # Halves of the columns before everything else; packed ones behind the tiles of keys.
        order = (2, 0, 1, 3, 4, 5, 6) if offsets is None else (0, 1, 3, 2, 4, 5, 6)
        bytes_of = bytes_of.permute(order)
    shape = scales.shape if offsets is None else scales.shape[1:]
    return bytes_of.contiguous().view(shape).view(torch.float8_e8m0fnu)


def _from_atoms(descale: torch.Tensor, is_v: bool) -> torch.Tensor:
    """Return (batch, heads, rows, blocks), the inverse of `_to_atoms`."""
    packed = descale.ndim == 3
    batch, heads, rows, blocks = (1, *descale.shape) if packed else descale.shape
    row_atoms, block_atoms = rows // ATOM_ROWS, blocks // ATOM_BLOCKS
    inside = (32, 4, ATOM_BLOCKS)
    memory = descale.contiguous().view(torch.uint8).flatten()
    if not is_v:
        found = memory.view(batch, heads, row_atoms, block_atoms, *inside)
    elif packed:
        found = memory.view(batch, heads, block_atoms, row_atoms, *inside).transpose(2, 3)
    else:
        found = memory.view(row_atoms, batch, heads, block_atoms, *inside).permute(
            1, 2, 0, 3, 4, 5, 6
        )
    plain = found.permute(0, 1, 2, 5, 4, 3, 6).reshape(batch, heads, rows, blocks)
    return plain.view(torch.float8_e8m0fnu)


def _padded(
    tensor: torch.Tensor, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (batch, rows, heads, 256) in whole atoms, and where rows of packed sequences lie."""
    if offsets is None:
        more = -tensor.shape[1] % ATOM_ROWS
        return torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, more)), None
    lengths = offsets.diff().long()
    tiles = -(-lengths // ATOM_ROWS)
    begins = (tiles.cumsum(0) - tiles) * ATOM_ROWS
    total, used = int(tiles.sum()) * ATOM_ROWS, int(offsets[-1])
    count = max(total, -(-tensor.shape[0] // ATOM_ROWS) * ATOM_ROWS)
    places = torch.arange(used, device=tensor.device)
    places += (begins - offsets[:-1].long()).repeat_interleave(lengths, output_size=used)
    padded = tensor.new_zeros(1, count, *tensor.shape[1:])
    padded[0, places] = tensor[:used]
    return padded, places


def _unpadded(
    padded: torch.Tensor, places: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """Return the rows that `_padded` has of a tensor; rows behind the last sequence are 0."""
    if places is None:
        return padded[:, : like.shape[1]]
    found = padded.new_zeros(like.shape)
    found[: len(places)] = padded[0, places]
    return found
