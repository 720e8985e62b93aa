"""One forward step on one CTA pair: ours and flash-attn-4's, replayed."""

from __future__ import annotations

from typing import Any

from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.model import ours
from lab.model.calls import Kind
from lab.model.peers import flash_attn_4_code
from sm100_sim import timing


def our_forward(
    seqlen: int, causal: bool, machine: str = "b200", config: ForwardConfig | None = None
) -> timing.Prediction:
    """Our forward, two heads sharing one of keys and values, on one CTA pair."""
    found, variant = timing.load(machine), ours.Variant(Kind(causal), config=config)
    compiled, arguments = ours.call_on(found, variant, (seqlen, 2))
    return timing.predict(compiled, *arguments, machine=found)[-1]


def their_forward(
    seqlen: int, causal: bool, machine: str = "b200", mix: Ex2Pattern | None = None
) -> timing.Prediction:
    """flash-attn-4's forward on the first CTA pair of its grid. mix: of exp2, None as it tunes
    it."""
    import cuda.bindings.driver as cuda

    mix = mix or flash_attn_4_code.tuned_pattern(causal)
    compiled = flash_attn_4_code.compile_forward(causal, mix)
    arguments: tuple[Any, ...] = flash_attn_4_code.arguments(seqlen)
    return timing.predict(compiled, *arguments, stream=cuda.CUstream(0), machine=machine)[-1]
