"""flash-attn-4: which version is known here, what it refuses, and how it is called.

`attention` is its public function, on a GPU or where `sm100_sim` stands in for one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import warnings
from typing import Any
from unittest import mock

import torch

PACKAGE = "flash-attn-4"
#: Names in tables of its backward with five GEMMs, and of its forward with KV splits by its rule.
FIVE_PRODUCTS, DIVIDED = f"{PACKAGE}, five products", f"{PACKAGE}, num_splits=0"
#: Variable of flash-attn-4 that selects that backward; read at each call.
FIVE_PRODUCTS_ENVIRONMENT = {"FLASH_ATTENTION_HD256_GENERIC_BWD": "1"}

#: The version whose private interface this file knows.
KNOWN_VERSION = "4.0.0b36"

_MODULE = "flash_attn.cute.flash_fwd_sm100"

#: Multiples of queries and of keys up to which its kernels may ask a mask_mod past the end.
MASK_PADDING = (256, 512)


def unavailable() -> str | None:
    """Return why it cannot be compiled here, None if it can."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install {PACKAGE}=={KNOWN_VERSION}"
    if version != KNOWN_VERSION:
        return f"{PACKAGE} {version} is installed; known here is {KNOWN_VERSION} only"
    try:
        forward_module()
    except ImportError as error:
        return f"{PACKAGE} {version} cannot be imported: {error}"
    return None


def backward_refusal(window: bool, softcap: bool) -> str | None:
    """Return the reason for which its backward at head_dim 256 refuses a call, None if it takes it.
    window: bounded on the left, beside a causal mask or not."""
    if softcap:
        return "SM100 backward with head_dim=256 does not support softcap"
    if window:
        return "SM100 backward with head_dim=256 does not support local attention"
    return None


def five_products() -> contextlib.AbstractContextManager[Any]:
    """Select its backward with five GEMMs at head_dim 256, for the body only."""
    return mock.patch.dict(os.environ, FIVE_PRODUCTS_ENVIRONMENT)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: tuple[tuple[torch.Tensor, int], tuple[torch.Tensor, int]] | None = None,
    **options: Any,
) -> torch.Tensor:
    """out of its public functions, shaped like q.

    q, k, v: (batch, seqlen, heads, head_dim), or without the batch where sequences are packed;
    packed: (cu_seqlens, longest length) of queries and of keys then. options: causal, window_size,
    softcap, num_splits and those of `masked_by`, handed on as they are.
    """
    from flash_attn.cute import interface

    if packed is None:
        result = interface.flash_attn_func(q, k, v, **options)
    else:
        (offsets_q, longest_q), (offsets_k, longest_k) = packed
        result = interface.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, max_seqlen_q=longest_q,
            max_seqlen_k=longest_k, **options,
        )  # fmt: skip
    return _out_of(result)


def masked_by(words: torch.Tensor) -> dict[str, Any]:
    """Return options of `attention` under a mask of packed bits. words: (sequences, queries, words)
    int32, padded as `MASK_PADDING` says; bit j of word w is key 32 w + j. With a mask_mod its
    forward has no other bounds, so the bits say causal, too."""
    return {"mask_mod": _bit_of_word(), "aux_tensors": [words]}


@functools.cache
def _bit_of_word() -> Any:
    """Return a mask_mod that reads a key's bit. (Its SM90 kernels ask for one key at a time.)"""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def bit_of_word(  # type: ignore[no-untyped-def]
        batch, head, query, key, seqlen_info, aux_tensors
    ):
        b, q, k = (utils.ssa_to_scalar(index) for index in (batch, query, key))
        word = aux_tensors[0][b, q, k >> 5]
        seen = cutlass.Boolean(((word >> (k & 31)) & 1) != 0)
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    return bit_of_word


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """out, shaped like q, (batch, seqlen_q, heads, head_dim), over keys in pages. k, v: (pages,
    page_size, heads_kv, head_dim); options: page_table, seqused_k and what `attention` takes,
    handed on as they are."""
    from flash_attn.cute import interface

    return _out_of(interface.flash_attn_varlen_func(q, k, v, max_seqlen_q=q.shape[1], **options))


def _out_of(result: Any) -> torch.Tensor:
    """Return out from the result of its functions, with LSE or without."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def forward_module() -> Any:
    """Return the module of its SM100 forward. Raises ImportError without it."""
    with warnings.catch_warnings():
        # flash-attn-4 is older than the DSL it runs on here.
        warnings.simplefilter("ignore")
        return importlib.import_module(_MODULE)
