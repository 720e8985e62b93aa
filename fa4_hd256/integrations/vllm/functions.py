"""The function that vLLM's flash-attention backend calls.

The call sites are those of `vllm.v1.attention.backends.flash_attn` in vLLM 0.33.0. vLLM writes its
cache itself, before the call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ... import interface
from ...compat.arguments import Library, honoured, neutral, refused
from ...score_mods import alibi
from ..engines import METADATA, our_options
from ..given_results import written_to

_HONOURED = (
    "softmax_scale", "causal", "window_size", "softcap", "num_splits", "deterministic", "q_descale",
    "k_descale", "v_descale", METADATA,
)  # fmt: skip
_MLA = refused("The second part of a query (MLA) is not offered")
_RANKS = "Keys that are dealt out to ranks one by one are not offered"
_MASKS = refused("Masks given as code are not offered")
_GATHERED = refused("Keys chosen one by one are not offered")

OPTIONS = Library(
    "vLLM",
    "vllm.v1.attention.backends.flash_attn",
    {
        **dict.fromkeys(_HONOURED, honoured()),
        "s_aux": honoured(ours="learnable_sink"),
        "block_table": honoured(ours="page_table"),
        "alibi_slopes": honoured(ours="score_mod"),
        "fa_version": neutral("chooses among vLLM's own kernels"),
        "q_v": _MLA,
        "dropout_p": refused("Dropout is not offered", 0.0),
        "return_attn_probs": refused("Probabilities are not offered", False),
        "output_scale": refused("Results in float8 are not offered"),
        "cp_world_size": refused(_RANKS, 1),
        "cp_rank": refused(_RANKS, 0),
        "cp_tot_seqused_k": refused(_RANKS),
        "mask_mod": _MASKS,
        "block_sparse_tensors": _MASKS,
        "aux_tensors": _MASKS,
        "aux_tensor_leading_dims": _MASKS,
        "dynamic_causal": refused("Causality that each sequence chooses is not offered"),
        "gather_kv_indices": _GATHERED,
        "gather_kv_valid_length": _GATHERED,
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
    """Compute attention over pages of vLLM's cache, or over packed keys.

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
    ours = our_options(OPTIONS, "flash_attn_varlen_func", options, q, k)
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
    """Return None: the operator splits keys. vLLM's memory is too small for metadata of ours."""
    return None
