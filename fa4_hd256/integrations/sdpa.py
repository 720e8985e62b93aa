"""torch.nn.functional.scaled_dot_product_attention on CUDA tensors.

    from fa4_hd256.integrations.sdpa import register
    register()
    torch.nn.attention.activate_flash_attention_impl("fa4_hd256")

PyTorch 2.13 replaces its flash-attention operators by an adapter over a module's `_flash_attn_fwd`
and `_flash_attn_bwd`, which it calls by keyword; this module has both. While it is active, every
SDPA call that PyTorch gives to flash attention comes here. Layers of another head_dim take SDPA's
other kernels. torch.nn.attention.restore_flash_attention_impl() ends that.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from ..call import named_configs
from ..call.options import Options
from ..interface import flash_attn_varlen_func
from ..until_changed import UntilChanged
from . import other_dims
from .backward_memory import backward_config_of, check_ds_bytes
from .given_out import written_to
from .given_results import gradients_of_results

NAME = "fa4_hd256"

#: The longest sequence of cu_seqlens of forward calls. The adapter hands the backward the tensor,
#: but not the number that its grids need; reading it from the device would synchronise.
_longest = UntilChanged()


class _Active:
    """Settings of the implementation that was activated last."""

    ds_bytes: int | None = None


def register(name: str = NAME, *, ds_bytes: int | None = None) -> str:
    """Make this attention available to torch.nn.attention.activate_flash_attention_impl(name).

    ds_bytes: memory that dS of a backward may take at a time while it is active, as of
    `BackwardConfig`; None: what FA4_HD256_DS_BYTES says, or the default.

    Returns name. Raises TypeError or ValueError for other ds_bytes, ImportError for a PyTorch
    without that registry or its adapter. Activation raises RuntimeError where there is no CUDA
    device: PyTorch dispatches CUDA tensors only.
    """
    check_ds_bytes(ds_bytes)
    try:
        from torch.nn.attention import register_flash_attention_impl
        from torch.nn.attention._fa4 import register_flash_attention_fa4
    except ImportError as error:
        raise ImportError(
            f"PyTorch {torch.__version__} cannot register flash-attention implementations "
            f"({error}); tested: 2.13"
        ) from error

    def activate() -> Any:
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"{name} cannot be activated for SDPA: PyTorch finds no CUDA device, and its "
                "flash-attention adapter takes CUDA tensors only; for CPU tensors call "
                "fa4_hd256.flash_attn_func"
            )
        _Active.ds_bytes = ds_bytes
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
    out: written to if given. options: other arguments of `flash_attn_varlen_func`; the adapter
    hands over num_splits=1, no KV splits, unless its caller requests another number. Adapters
    before PyTorch 2.13 do not say how long packed sequences are: grids then follow the number of
    rows.

    Returns (out, lse); lse: (batch, heads, seqlen_q) or (heads, total_q) float32, None without
    return_lse. Raises as `flash_attn_varlen_func` does.
    """
    for side in "qk":
        offsets, longest = (options.get(f"{name}_{side}") for name in ("cu_seqlens", "max_seqlen"))
        if offsets is not None and longest is not None:
            _longest[offsets] = longest
    if options.get("cu_seqlens_q") is not None and options.get("max_seqlen_q") is None:
        options["max_seqlen_q"] = q.shape[0]
    window = (window_size_left, window_size_right)
    if other_dims.has_other_dim(q, k, v):
        out, lse = _by_pytorch((q, k, v), out, window, options)
        return out, lse if return_lse else None
    attend = partial(flash_attn_varlen_func, q, k, v, window_size=window, **options)
    # PyTorch records gradients above its adapter, whose tensors may require them still.
    with contextlib.nullcontext() if out is None else torch.no_grad():
        result, lse = written_to(out, q, attend, True)
    return result, lse if return_lse else None


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward that PyTorch's adapter calls.

    Tensors as in `_flash_attn_fwd`, out and lse its results. options: softmax_scale, causal,
    window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k; the result is deterministic
    whatever `deterministic` says. Grids follow the longest sequence that the forward was told for
    the same cu_seqlens, the number of rows where it was told of none.

    Returns (dq, dk, dv). Raises as `flash_attn_varlen_func` does.
    """
    if other_dims.has_other_dim(q, k, v):
        return _gradients_by_pytorch((q, k, v), dout, options)
    options.pop("deterministic", None)
    ragged = (options.pop("cu_seqlens_q", None), options.pop("cu_seqlens_k", None))
    window = (options.pop("window_size_left", None), options.pop("window_size_right", None))
    checked = Options.check(
        options.pop("softmax_scale", None), options.pop("causal", False), window, 0.0
    )
    if options:
        raise NotImplementedError(f"{', '.join(options)} of the backward is not implemented")
    of_q, of_k = (_longest_of(t, offsets) for t, offsets in zip((q, k), ragged, strict=True))
    config = backward_config_of(_Active.ds_bytes, q.device)
    return gradients_of_results(
        (q, k, v, out, dout, lse),
        checked,
        ragged,
        (of_q, of_k),
        backward_config=named_configs.encode(config, type(config)),
    )


#: Options of the adapter that change nothing of PyTorch's own attention.
_NEUTRAL = {"deterministic", "max_seqlen_q", "max_seqlen_k", "num_splits", "pack_gqa"}


def _of_pytorch(window: tuple[Any, Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return (scale, window, offsets) of a call that PyTorch's SDPA computes. Raises
    NotImplementedError for options that it has not."""
    given = dict(options)
    offsets = given.pop("cu_seqlens_q", None), given.pop("cu_seqlens_k", None)
    scale, causal = given.pop("softmax_scale", None), given.pop("causal", False)
    named = [
        name
        for name, value in given.items()
        if name not in _NEUTRAL and (isinstance(value, torch.Tensor) or value)
    ]
    if named:
        raise NotImplementedError(
            f"{', '.join(named)} with a head_dim other than 256; accepted: none of these, as "
            "PyTorch's SDPA computes such calls"
        )
    left, right = (None if side in (None, -1) else side for side in window)
    return scale, (left, 0 if causal else right), offsets


def _by_pytorch(
    tensors: tuple[torch.Tensor, ...],
    out: torch.Tensor | None,
    window: tuple[Any, Any],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a call with another head_dim."""
    given = _of_pytorch(window, options)
    other_dims.say_once("SDPA", "SDPA's other kernels", *tensors)
    found, lse = other_dims.attend(tensors, *given)
    return (found if out is None else out.copy_(found)), lse


def _gradients_by_pytorch(
    tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) of a call with another head_dim."""
    window = options.pop("window_size_left", None), options.pop("window_size_right", None)
    dq, dk, dv = other_dims.gradients(tensors, dout, *_of_pytorch(window, options))
    return dq, dk, dv


def _longest_of(rows: torch.Tensor, offsets: torch.Tensor | None) -> int | None:
    """A bound on the sequences packed in `rows`; None where they are not packed."""
    if offsets is None:
        return None
    return _longest.get(offsets) or rows.shape[0]
