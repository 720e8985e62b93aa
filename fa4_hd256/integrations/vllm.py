"""The function that vLLM's flash-attention backend calls.

    import vllm.v1.attention.backends.flash_attn as backend
    from fa4_hd256.integrations.vllm import flash_attn_varlen_func
    backend.flash_attn_varlen_func = flash_attn_varlen_func

before models are loaded, for models all of whose layers have head_dim 256. The call sites are those
of that module in vLLM 0.33.0. vLLM writes its cache itself, before the call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .. import interface
from ..score_mods import alibi
from .engine_options import METADATA, EngineOptions, scaled_alone
from .given_out import written_to

__all__ = ["OPTIONS", "flash_attn_varlen_func", "get_scheduler_metadata"]

_SCALES = "scales queries in float8, which are refused: they are bfloat16 or float16"
_MASKS = "masks given as code"

OPTIONS = EngineOptions(
    "vLLM's flash_attn_varlen_func",
    honoured={
        "softmax_scale": "softmax_scale",
        "causal": "causal",
        "window_size": "window_size",
        "softcap": "softcap",
        "num_splits": "num_splits",
        "s_aux": "learnable_sink",
        "block_table": "page_table",
        "deterministic": "deterministic",
        "k_descale": "k_descale",
        "v_descale": "v_descale",
        "alibi_slopes": "score_mod",
        METADATA: METADATA,
    },
    unused={
        "fa_version": "chooses among vLLM's own kernels",
        "q_descale": _SCALES,
    },
    neutral={
        "q_v": ((None,), "the second part of a query (MLA)"),
        "dropout_p": ((0.0,), "dropout"),
        "return_attn_probs": ((False,), "probabilities"),
        "output_scale": ((None,), "float8 results"),
        "cp_world_size": ((1,), "masks of keys dealt out to ranks one by one"),
        "cp_rank": ((0,), "masks of keys dealt out to ranks one by one"),
        "cp_tot_seqused_k": ((None,), "masks of keys dealt out to ranks one by one"),
        "mask_mod": ((None,), _MASKS),
        "block_sparse_tensors": ((None,), _MASKS),
        "aux_tensors": ((None,), _MASKS),
        "aux_tensor_leading_dims": ((None,), _MASKS),
        "dynamic_causal": ((None,), "causality that each sequence chooses"),
        "gather_kv_indices": ((None,), "keys chosen one by one"),
        "gather_kv_valid_length": ((None,), "keys chosen one by one"),
    },
)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over pages of vLLM's cache, or over packed keys.

    q: (total_q, heads, 256). k, v: (blocks, block_size, heads_kv, 256) with block_table and
    seqused_k, in any strides that `flash_attn_varlen_func` reads in place; else (total_k, heads_kv,
    256) with cu_seqlens_k. options: seqused_k, out (written to, like q), return_softmax_lse, and
    those of `OPTIONS`, among them alibi_slopes, (heads,) or (batch, heads) float32.

    Returns out, or (out, lse), lse (heads, total_q) float32. Raises NotImplementedError for an
    option that requests what is not offered, TypeError for an unknown one, else as
    `fa4_hd256.flash_attn_varlen_func` does.
    """
    seqused_k, out = options.pop("seqused_k", None), options.pop("out", None)
    wants_lse = options.pop("return_softmax_lse", False)
    ours = OPTIONS.translated(scaled_alone(options, k))
    if ours.get("window_size", ()) is None:
        del ours["window_size"]
    if ours.get("score_mod") is not None:
        ours["score_mod"] = alibi(ours["score_mod"])
    attend = partial(
        interface.flash_attn_varlen_func,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
        **ours,
    )
    return written_to(out, q, attend, wants_lse)


def get_scheduler_metadata(*args: Any, **options: Any) -> None:
    """Return None: the operator's own rule splits the keys. vLLM copies a plan into memory that is
    too small for that of `fa4_hd256.get_scheduler_metadata`."""
    return None
