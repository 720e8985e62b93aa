"""Providers that the timing model predicts on a Hopper GPU, as `predictor.Provider`: our kernels
for sm_90a and flash-attn-4's for SM90."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, Case
from lab.model.backward import Backward
from lab.model.calls import Kind
from lab.model.forward import Kernel
from lab.model.hopper import attention as model
from lab.model.hopper.attention import Variant
from lab.model.ours import OurProvider
from lab.model.peers import flash_attn_4_code
from lab.model.peers import flash_attn_4_hopper as theirs
from lab.published.rows import Build
from lab.whole.conditions import Call
from sm100_sim.timing import Machine, Values

#: Text for kernels without a replay.
_NO_REPLAY = "the timing model has no replay of Hopper's kernels for {}"


class HopperOurs(OurProvider):
    """Our kernels for sm_90a."""

    def refuses(self, case: Case, direction: str) -> str | None:
        if case.packed or case.softcap:
            return _NO_REPLAY.format("packed sequences" if case.packed else "a softcap")
        if direction == BACKWARD and case.window != (None, None):
            return _NO_REPLAY.format("windows, backward")
        return None

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Variant:
        if direction == BACKWARD:
            return Variant(Kind.of(case), use_clc, BACKWARD, case.seqlen_k)
        return model.forward_variant(case, model.hopper(), 1 + divided, use_clc)

    def forward(self, variant: Variant, machine: Machine, draws: int) -> Kernel:
        return model.forward(variant, machine, draws)

    def backward(self, variant: Variant, machine: Machine, draws: int) -> Backward:
        return model.backward(variant.kind, variant.use_clc, machine, variant.keys, draws)


class HopperFlashAttention4:
    """flash-attn-4's kernels for SM90: dense attention as long as there are tiles for all SMs,
    backward without groups of heads."""

    name = flash_attn_4.PACKAGE

    def version(self) -> str:
        return flash_attn_4_code.versions()[0]

    def replays(self, build: Build) -> bool:
        return False

    def refuses(self, case: Case, direction: str) -> str | None:
        if flash_attn_4.unavailable():
            return flash_attn_4.unavailable()
        if case.packed or case.softcap or case.window != (None, None):
            return _NO_REPLAY.format("other than dense attention")
        if direction == BACKWARD:
            grouped = case.heads != case.heads_kv
            return _NO_REPLAY.format("its backward of groups of heads") if grouped else None
        if len(forward_tiles_of(case)) < model.hopper().values().sms:
            return _NO_REPLAY.format("calls that divide keys")
        return None

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        return False, 1

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Kind:
        return Kind.of(case)

    def forward(self, variant: Kind, machine: Machine, draws: int) -> Kernel:
        return theirs.forward(variant.causal, machine, draws)

    def backward(self, variant: Kind, machine: Machine, draws: int) -> Backward:
        return theirs.backward(variant.causal, machine, draws)


def forward_tiles_of(case: Case) -> range:
    """Numbers of flash-attn-4's query tiles."""
    blocks = -(-case.seqlen_q // theirs.FORWARD_ROWS)
    return range(blocks * case.heads * case.batch)


def seconds(calls: Sequence[Call], values: Sequence[Values]) -> tuple[np.ndarray, np.ndarray]:
    """Return (seconds of a burst, sustained seconds) of a call for each of the drawn machines."""
    found = [model.times_of(one, drawn) for one, drawn in zip(calls, values)]
    return np.array([t.seconds for t in found]), np.array([t.for_good for t in found])


PROVIDERS = {one.name: one for one in (HopperOurs(), HopperFlashAttention4())}
