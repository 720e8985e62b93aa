"""torch.nn.functional.scaled_dot_product_attention on CUDA tensors.

    from fa4_hd256.integrations.sdpa import register
    register()
    torch.nn.attention.activate_flash_attention_impl("fa4_hd256")

PyTorch 2.13 replaces its flash-attention operators by an adapter that calls `_flash_attn_fwd` and
`_flash_attn_bwd` of a module by keyword. This is such a module. While it is active, it gets every
SDPA call that PyTorch gives to flash attention. Layers of another head_dim take SDPA's other
kernels. torch.nn.attention.restore_flash_attention_impl() deactivates it.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from ..call.forward_problem import backward_use_clc
from ..call.functions.until_changed import UntilChanged
from ..call.operator_arguments import BackwardTensors
from ..call.options import Options
from ..interface import flash_attn_varlen_func
from . import other_dims
from .given_results import backward_config_of, check_ds_bytes, gradients_of_results, written_to

NAME = "fa4_hd256"

#: The longest sequence by cu_seqlens, from forward calls. The backward's grids need the number, but
#: the adapter passes it cu_seqlens alone, and reading these would wait for the device.
_longest = UntilChanged()


class _Active:
    ds_bytes: int | None = None


def register(name: str = NAME, *, ds_bytes: int | None = None) -> str:
    """Make this attention available to torch.nn.attention.activate_flash_attention_impl(name).

    ds_bytes: most bytes of dS at a time in a backward, as in `BackwardConfig`; None: the value of
    FA4_HD256_DS_BYTES, or the default.

    Returns name. Raises TypeError or ValueError for other ds_bytes, ImportError for a PyTorch
    without the registry or its adapter. Activation raises RuntimeError without a CUDA device:
    PyTorch dispatches CUDA tensors only.
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
    """Compute the forward for PyTorch's adapter.

    q: (batch, seqlen_q, heads, 256), or (total_q, heads, 256) with cu_seqlens_q; k, v likewise.
    out: where the result is written, or None. options: other arguments of
    `flash_attn_varlen_func`. The adapter passes num_splits=1 unless its caller requests another
    number. Adapters before PyTorch 2.13 do not pass the longest packed sequence: grids then follow
    the number of rows.

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
        call = _of_pytorch(window, options)
        other_dims.say_once("SDPA", "SDPA's other kernels", q, k, v)
        result, lse = other_dims.attend((q, k, v), *call)
        return result if out is None else out.copy_(result), lse if return_lse else None
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
    """Compute (dq, dk, dv) for PyTorch's adapter.

    Tensors are those of `_flash_attn_fwd`, out and lse its results. options: those of
    `_OF_BACKWARD`. Results are always deterministic. Grids follow the longest sequence that the
    forward got for the same cu_seqlens, or the number of rows. Raises as `flash_attn_varlen_func`
    does.
    """
    if other_dims.has_other_dim(q, k, v):
        window = options.pop("window_size_left", None), options.pop("window_size_right", None)
        dq, dk, dv = other_dims.gradients((q, k, v), dout, *_of_pytorch(window, options))
        return dq, dk, dv
    options.setdefault("causal", False)
    scale, causal, left, right, of_q, of_k, _ = (options.pop(n, None) for n in _OF_BACKWARD)
    checked = Options.check(scale, causal, (left, right), 0.0, backward_use_clc(None))
    if options:
        raise NotImplementedError(
            f"{', '.join(options)} is given to the backward; accepted: {', '.join(_OF_BACKWARD)}"
        )
    dq, dk, dv, _ = gradients_of_results(
        BackwardTensors(dout, None, q, k, v, out, lse, cu_seqlens_q=of_q, cu_seqlens_k=of_k),
        checked,
        (_longest_of(q, of_q), _longest_of(k, of_k)),
        backward_config=backward_config_of(_Active.ds_bytes, q.device),
    )
    return dq, dk, dv


#: Options of the backward. The last one changes nothing.
_OF_BACKWARD = (
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "deterministic",
)


#: Options of the adapter that change nothing of PyTorch's own attention.
_NEUTRAL = {"deterministic", "max_seqlen_q", "max_seqlen_k", "num_splits", "pack_gqa"}


def _of_pytorch(window: tuple[Any, Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return (scale, window, offsets) for PyTorch's SDPA. Raises NotImplementedError."""
    others = dict(options)
    offsets = others.pop("cu_seqlens_q", None), others.pop("cu_seqlens_k", None)
    scale, causal = others.pop("softmax_scale", None), others.pop("causal", False)
    refused = [
        name
        for name, value in others.items()
        if name not in _NEUTRAL and (isinstance(value, torch.Tensor) or value)
    ]
    if refused:
        raise NotImplementedError(
            f"{', '.join(refused)} with a head_dim other than 256; accepted: calls without it, "
            "which PyTorch's SDPA computes"
        )
    left, right = (None if side in (None, -1) else side for side in window)
    return scale, (left, 0 if causal else right), offsets


def _longest_of(rows: torch.Tensor, offsets: torch.Tensor | None) -> int | None:
    if offsets is None:
        return None
    return _longest.get(offsets) or rows.shape[0]
