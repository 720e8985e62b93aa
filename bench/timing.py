"""`python -m bench timing`: predicted clocks of a forward step, ours and flash-attn-4's."""

from __future__ import annotations

from typing import Any

import torch

from fa4_hd256.backends import empty_results
from fa4_hd256.calling import CallTensors, call_arguments
from fa4_hd256.compile import compile_forward
from fa4_hd256.config import HEAD_DIM, ForwardConfig
from fa4_hd256.problem import Options, Problem
from sm100_sim import timing

from . import flash_attn_4


def our_forward(
    seqlen: int, causal: bool, machine: str = "b200", config: ForwardConfig | None = None
) -> timing.Prediction:
    """Our forward, two heads sharing one of keys and values, on one CTA pair."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, seqlen, heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (2, 1, 1)
    )
    problem = Problem.describe((q, k, v), Options.check(None, causal, (None, None), 0.0, False))
    compiled = compile_forward(config or ForwardConfig(), problem.problem_class)
    tensors = CallTensors(q, k, v, *empty_results(problem))
    return timing.predict(compiled, *call_arguments(tensors, problem, 1, 0), machine=machine)[-1]


def their_forward(seqlen: int, causal: bool, machine: str = "b200") -> timing.Prediction:
    """flash-attn-4's forward, as it tunes it, on the first CTA pair of its grid."""
    import cuda.bindings.driver as cuda

    compiled = flash_attn_4.compile_forward(causal, flash_attn_4.tuned_pattern(causal))
    arguments: tuple[Any, ...] = flash_attn_4.arguments(seqlen)
    return timing.predict(compiled, *arguments, stream=cuda.CUstream(0), machine=machine)[-1]


def as_text(seqlen: int, causal: bool, machine: str) -> str:
    """Both predictions in words; flash-attn-4's only where it is installed."""
    parts = ["Modelled, not measured. Ours:", our_forward(seqlen, causal, machine).as_text()]
    missing = flash_attn_4.unavailable()
    if missing:
        parts.append(f"Without the other project to compare with: {missing}.")
    else:
        theirs = their_forward(seqlen, causal, machine)
        parts += ["", f"{flash_attn_4.PACKAGE}:", theirs.as_text()]
    return "\n".join(parts)
