"""Scales of what queries, keys and values in e4m3 or NVFP4 hold: which there are, and how kernels
read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..kernels.block_scales import SCALE_DTYPES
from ..kernels.nvfp4_format import (
    BLOCK_SCALES,
    CACHE_DTYPES,
    NVFP4,
    NVFP4_BLOCK,
    block_scales_shape,
)
from ..kernels.problem_class import (
    DESCALES,
    E4M3,
    KV_DESCALES,
    KV_DTYPES,
    OF_BLOCKS,
    OF_PAGES,
    OF_SEQUENCES,
    Q_DESCALE,
)
from .checks import are_differentiated
from .memory import check_device, require_dense, without_expansion
from .mxfp8_scales import check_blocks, check_packed


def refuse_gradients(*scales: Any) -> None:
    """Raise NotImplementedError for requested gradients; every call checks: keys do not say."""
    if are_differentiated(scales):
        raise NotImplementedError(
            f"{', '.join(DESCALES[:-1])} or {DESCALES[-1]} requires gradients, and there are none "
            "to them; accepted: tensors that do not (tensor.detach()), or a call under "
            "torch.no_grad()"
        )


def scales_among(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in DESCALES if given.get(name) is not None}


def are_of_blocks(given: dict[str, Any]) -> bool:
    return any(given[name].dtype in SCALE_DTYPES for name in DESCALES if name in given)


def check_given(q: torch.Tensor, k: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
    """All or none of the scales that such q, k and v have, of float32, on their device. given:
    those that are. Raises TypeError for another dtype or layout, ValueError for all else."""
    scales = scales_among(given)
    if not scales:
        return
    names = " and ".join(scales)
    accepted = " or ".join(map(str, KV_DTYPES))
    if k.dtype not in CACHE_DTYPES:
        raise ValueError(
            f"{names} given with k and v of {k.dtype}; accepted: with {accepted}, or NVFP4, alone, "
            "whose values they multiply"
        )
    wanted = DESCALES if q.dtype in KV_DTYPES else KV_DESCALES
    if Q_DESCALE in scales and Q_DESCALE not in wanted:
        raise ValueError(
            f"{Q_DESCALE} given with q of {q.dtype}; accepted: with {accepted} alone, whose values "
            "it multiplies"
        )
    if len(scales) < len(wanted):
        several = ", ".join(wanted[:-1])
        raise ValueError(
            f"{names} given alone; accepted: {several} and {wanted[-1]}, or "
            f"{'neither' if len(wanted) == 2 else 'none of them'}"
        )
    of_blocks = are_of_blocks(scales)
    for name, tensor in scales.items():
        require_dense(name, tensor)
        if tensor.dtype != torch.float32 and not of_blocks:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; accepted: torch.float32, or with q in e4m3 "
                "scales of blocks in torch.float8_e8m0fnu"
            )
        check_device(name, tensor.device, k.device, "k")
    if of_blocks:
        check_blocks(q, k, given)


def check_block_scales(k: torch.Tensor, v: torch.Tensor, given: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError or ValueError unless NVFP4's k and v, and no others, have block scales."""
    scales = {name: given.get(name) for name in BLOCK_SCALES}
    for (name, tensor), codes in zip(scales.items(), (k, v), strict=True):
        if codes.dtype != NVFP4 and tensor is not None:
            raise ValueError(
                f"{name} given with k and v of {codes.dtype}; accepted: with caches in NVFP4 "
                f"({NVFP4}, two elements in a byte) alone"
            )
        if codes.dtype != NVFP4:
            continue
        shape = block_scales_shape(codes)
        form = f"{E4M3} of shape {shape}, one for each {NVFP4_BLOCK} elements"
        if tensor is None:
            raise ValueError(
                f"k and v of {NVFP4} are NVFP4, without {name}; accepted: flash_attn_with_kvcache "
                f"with {' and '.join(BLOCK_SCALES)}, {form} (fa4_hd256.quantize)"
            )
        require_dense(name, tensor)
        if tensor.dtype != E4M3:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {form}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {form}")
        check_device(name, tensor.device, codes.device, "k")


def check_values(given: dict[str, torch.Tensor], descale: str, pages: torch.Tensor | None) -> None:
    """Raise ValueError for a factor that is no positive finite number, or for too few scales of
    blocks. Waits for the device. descale: as of `descale_of`. pages: numbers of those that are
    read, whose factors alone count where they are of pages."""
    if descale == OF_BLOCKS:
        return check_packed(given)
    for name, tensor in scales_among(given).items():
        values = tensor if pages is None or descale != OF_PAGES else tensor[pages]
        wrong = values[~((values > 0) & values.isfinite())]
        if wrong.numel():
            raise ValueError(
                f"{name} has a factor of {float(wrong[0])}; accepted: finite numbers greater "
                "than 0 (of pages that no query sees, anything)"
            )


def descale_of(given: dict[str, torch.Tensor], k: torch.Tensor, sequences: int, paged: bool) -> str:
    """Return the form of the scales, `OF_SEQUENCES`, `OF_PAGES` or `OF_BLOCKS`; empty where none
    are given.

    k: (.., .., heads_kv, 256), with pages first where `paged`. Raises ValueError for another shape,
    where k and v have them of different ones, and of pages where q has a scale, too.
    """
    scales = scales_among(given)
    if are_of_blocks(scales):
        return OF_BLOCKS
    # P then has the bits of e4m3 alone, which a scale of V that differs between keys would shift.
    paged = paged and Q_DESCALE not in scales
    found = {name: _form(name, tensor, k, sequences, paged) for name, tensor in scales.items()}
    if len(set(found.values())) > 1:
        forms = ", ".join(f"{name} of {form}" for name, form in found.items())
        raise ValueError(f"{forms}; accepted: both of sequences, or both of pages")
    return next(iter(found.values()), "")


def _form(name: str, tensor: torch.Tensor, k: torch.Tensor, sequences: int, paged: bool) -> str:
    shape, heads, pages = tuple(tensor.shape), k.shape[2], k.shape[0]
    of_sequences = shape in ((sequences, heads), (sequences, heads, 1), (1, sequences, heads, 1))
    of_pages = paged and shape in ((pages, heads), (pages, 1, heads), (pages, 1, heads, 1))
    if tensor.numel() == 1 or of_sequences and tensor.stride(0) == 0:
        return OF_SEQUENCES
    if of_sequences and of_pages and pages > 1:
        raise ValueError(
            f"{name} has shape {shape}, where there are as many sequences as pages; accepted here: "
            f"(1, {sequences}, {heads}, 1) for scales of sequences, ({pages}, 1, {heads}, 1) for "
            "scales of pages"
        )
    if of_sequences:
        return OF_SEQUENCES
    if of_pages:
        return OF_PAGES
    also = f", or ({pages}, {heads}) or ({pages}, 1, {heads}), of pages and KV heads"
    raise ValueError(
        f"{name} has shape {shape}; accepted: one value, or ({sequences}, {heads}), of sequences "
        f"and KV heads{also if paged else ''}"
    )


def scale_layout(tensor: Any, descale: str) -> Any:
    """Return a view of shape (entries, heads_kv): one entry, or one head, where all have the same.
    tensor: of a form that `descale_of` accepts, or a `run.plan.View` of one; descale: that form."""
    if tensor.numel() == 1:
        return tensor.as_strided((1, 1), (1, 1))
    if tensor.ndim == 4:
        tensor = tensor.squeeze(3).squeeze(1 if descale == OF_PAGES else 0)
    elif tensor.ndim == 3:
        tensor = tensor.squeeze(1 if descale == OF_PAGES else 2)
    return without_expansion(tensor)
