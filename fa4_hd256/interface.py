"""The public functions, and the torch operator behind them."""

from __future__ import annotations

import torch

from schedulers.choice import clc_requested

from .config import ForwardConfig
from .problem import Problem, check_causal, check_scale, check_shapes, check_tensors

#: Configurations named in operator calls. An operator's schema admits no Python object, so a
#: configuration travels as its repr, which names all its fields.
_configs: dict[str, ForwardConfig] = {}


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    config: ForwardConfig | None = None,
    use_clc: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * q k^T) v at head_dim 256.

    q: (batch, seqlen_q, heads, 256); k, v: (batch, seqlen_k, heads_kv, 256), with heads a multiple
    of heads_kv; bfloat16 or float16, any lengths from 1 up. Layouts with the last stride 1 and
    the base address and other strides multiples of 16 bytes are used in place, others copied once.
    CUDA tensors need an SM100 GPU; CPU tensors run the same compiled kernel in the simulator.

    softmax_scale: any finite number, 1 / sqrt(256) if None.
    causal: bottom-right aligned: query i sees the keys j <= i + seqlen_k - seqlen_q.
    window_size: (left, right); None and -1 mean unbounded.
    deterministic: accepted for compatibility; the result is deterministic in any case.
    config: tile shapes, stages, exp2 mix; the default configuration if None.
    use_clc: the dynamic tile scheduler; None reads the environment variable FA_CLC.

    Returns out, shaped and typed like q, or (out, lse) with return_lse; lse: (batch, heads,
    seqlen_q) float32, natural log. A query that sees no key has out = 0 and lse = -inf.

    Raises TypeError or ValueError for arguments that are not accepted, before anything is
    compiled, and NotImplementedError for a window, a sink, a softcap or use_clc.
    """
    _check_options(window_size, learnable_sink, softcap, use_clc)
    if config is not None and not isinstance(config, ForwardConfig):
        raise TypeError(f"config must be a ForwardConfig or None, got {type(config).__name__}")
    check_tensors({"q": q, "k": k, "v": v})
    check_causal(causal)
    scale = check_scale(softmax_scale)
    out, lse = forward(q, k, v, scale, causal, _named(config))
    return (out, lse) if return_lse else out


@torch.library.custom_op("fa4_hd256::forward", mutates_args=())
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `flash_attn_func`; `config` names one in use, "" the default."""
    from .backends import empty_results, run_forward
    from .compile import compile_forward

    problem = Problem.describe(q, k, v, softmax_scale, causal)
    if problem.batch == 0:
        return empty_results(problem)
    compiled = compile_forward(_configs[config], problem.problem_class)
    return run_forward(compiled, problem, (q, k, v))


@forward.register_fake
def _(q, k, v, softmax_scale, causal, config):
    check_tensors({"q": q, "k": k, "v": v})
    check_shapes(q.shape, k.shape, v.shape)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _refuse_backward(context, *gradients):
    raise NotImplementedError(
        "flash_attn_func offers no backward; call it under torch.no_grad() or detach q, k and v"
    )


forward.register_autograd(_refuse_backward)


def _named(config: ForwardConfig | None) -> str:
    name = "" if config is None else repr(config)
    if name not in _configs:
        _configs[name] = config or ForwardConfig()
    return name


def _check_options(window_size, learnable_sink, softcap, use_clc) -> None:
    """NotImplementedError for what the kernel does not offer, in the field's own names."""
    if len(window_size) != 2:
        raise ValueError(f"window_size is {window_size}; accepted: a pair (left, right)")
    if any(side not in (None, -1) for side in window_size):
        raise NotImplementedError(
            f"window_size={tuple(window_size)} is not implemented; accepted: (None, None), "
            "where -1 means the same as None"
        )
    if learnable_sink is not None:
        raise NotImplementedError("learnable_sink is not implemented; accepted: None")
    if softcap != 0.0:
        raise NotImplementedError(f"softcap={softcap} is not implemented; accepted: 0.0")
    if clc_requested(use_clc):
        asked = "use_clc=True" if use_clc else "use_clc, asked for by FA_CLC=1,"
        raise NotImplementedError(f"{asked} is not implemented; accepted: the static scheduler")
