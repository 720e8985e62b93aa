"""torch.nn.functional.scaled_dot_product_attention on CUDA tensors.

    from fa4_hd256.integrations.sdpa import register
    register()
    torch.nn.attention.activate_flash_attention_impl("fa4_hd256")

PyTorch 2.13 replaces its flash-attention operators by an adapter over a module's `_flash_attn_fwd`
and `_flash_attn_bwd`, which it calls by keyword; this module has both. While it is active, every
SDPA call that PyTorch gives to flash attention comes here, also with a head_dim other than 256,
which is an error; torch.nn.attention.restore_flash_attention_impl() ends that.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interface import flash_attn_varlen_func

NAME = "fa4_hd256"


def register(name: str = NAME) -> str:
    """Make this attention available to torch.nn.attention.activate_flash_attention_impl(name).

    Returns name. Raises ImportError for a PyTorch without that registry or its adapter. Activation
    raises RuntimeError where there is no CUDA device: PyTorch dispatches CUDA tensors only.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
        from torch.nn.attention._fa4 import register_flash_attention_fa4
    except ImportError as error:
        raise ImportError(
            f"PyTorch {torch.__version__} cannot register flash-attention implementations "
            f"({error}); tested: 2.13"
        ) from error

    def activate():
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"{name} cannot be activated for SDPA: PyTorch finds no CUDA device, and its "
                "flash-attention adapter takes CUDA tensors only; for CPU tensors call "
                "fa4_hd256.flash_attn_func"
            )
        return register_flash_attention_fa4(module_path=__name__)

    register_flash_attention_impl(name, register_fn=activate)
    return name


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    return_lse: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward that PyTorch's adapter calls.

    q: (batch, seqlen_q, heads, 256), or (total_q, heads, 256) with cu_seqlens_q; k, v likewise.
    out: written to if given. options: other arguments of `flash_attn_varlen_func`.

    Returns (out, lse); lse: (batch, heads, seqlen_q) or (heads, total_q) float32, None without
    return_lse. Raises as `flash_attn_varlen_func` does.
    """
    window = (window_size_left, window_size_right)
    result, lse = flash_attn_varlen_func(
        q, k, v, window_size=window, return_lse=True, **options
    )
    if out is not None:
        result = out.copy_(result)
    return result, lse if return_lse else None


def _flash_attn_bwd(*tensors: torch.Tensor, **options: Any) -> None:
    """The backward that PyTorch's adapter asks for; not offered."""
    raise NotImplementedError(
        "fa4_hd256 offers no backward; call SDPA under torch.no_grad() or restore PyTorch's own "
        "with torch.nn.attention.restore_flash_attention_impl()"
    )
