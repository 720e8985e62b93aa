"""flash-attn-4's backward with five products (`FLASH_ATTENTION_HD256_GENERIC_BWD=1`) on the model.

One kernel of CTA pairs: a tile has 128 keys of one query head and goes through the queries by 128.
Each step adds 128 x 256 of dQ in float32 to global memory, by bulk reductions; where a KV head has
several query heads dK and dV are added up, too. Kernels around it set sums to zero before and
convert them after.

The sums are charged three times: in the replay each SM's bulk reductions leave it like stores; all
SMs together move no more through L2 than it delivers, a byte added as `ADD_BYTES` bytes stored; and
a head's dQ in float32 lies in L2 beside its Q and dO, or travels to HBM and back with them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.backward import Backward
from lab.model.calls import Kind
from lab.model.peers import flash_attn_4_code
from lab.model.peers import flash_attn_4_traces as traces
from lab.model.peers.flash_attn_4 import FlashAttention4, Variant
from lab.model.peers.flash_attn_4_traces import Problem
from lab.model.replays import SEED, Source, Traced, fitted, kept, programs
from lab.model.samples import BACKWARD_SINGLE_SAMPLES
from lab.model.summed_dq import PARTIAL, Step, SummedDq
from lab.model.tiles import KEYS, BackwardTiling
from lab.paths import Paths
from lab.whole.problem import TileCosts
from sm100_sim.timing import Action, Machine, StoredProgram, Values

#: A CTA pair has 128 keys, a step 128 queries and 512 clocks of the tensor core a product.
STEP = Step(KEYS, 128, 5 * 512.0, 2)
#: Bytes that take as long to store to L2 as one that is added to float32 there, by all SMs:
#: measured on an H200 (sm100_sim/docs/facts.md), 2,120 bytes per clock added, 2,690 stored.
#: Nobody has measured it on Blackwell.
ADD_BYTES = 1.27
_NAMES = ("flashattentionbackwardsm100",)


class FlashAttention4FiveProducts(FlashAttention4):
    """flash-attn-4's backward with five GEMMs, as `predictor.Provider`; dense attention alone, and
    no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.name = flash_attn_4.FIVE_PRODUCTS

    def replays(self, build: Any) -> bool:
        return False

    def refuses(self, case: Case, direction: str) -> str | None:
        if direction == FORWARD:
            return f"its forward is that of {flash_attn_4.PACKAGE}"
        if not Kind.of(case).is_dense:
            return "only dense attention is modelled"
        return super().refuses(case, direction)

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Variant:
        """Raises ValueError for KV splits."""
        if divided:
            raise ValueError(f"{self.name} has no KV splits")
        return Variant(Kind.of(case))

    def backward(self, variant: Variant, machine: Machine, draws: int) -> Backward:
        """Raises RuntimeError if it is not installed."""
        self._require()
        values, paths = machine.sampled(draws), {}

        @functools.cache
        def costs(which: str) -> list[TileCosts]:
            source = _source(variant.kind.causal, which == PARTIAL)
            rows = kept(*source, machine, draws)
            paths[which] = Paths.of(rows)
            moved = _bytes_of_work(programs(*source)[-1].program)
            return [
                replace(one, rate=max(one.rate, _l2_clocks(drawn, moved)))
                for one, drawn in zip(fitted(rows, "single"), values)
            ]

        tiling = BackwardTiling("single", False, False, STEP.queries)
        return SummedDq(self.name, tiling, values, costs, paths=paths, step=STEP)


def _source(causal: bool, partial: bool) -> Source:
    heads = (2, 1) if partial else (1, 1)
    problems = tuple(
        Problem(seqlen, seqlen, heads, HEAD_DIM, (("causal", causal), ("num_splits", 1)))
        for seqlen, _ in BACKWARD_SINGLE_SAMPLES
    )

    def trace() -> list[Traced]:
        with flash_attn_4.five_products():
            found = traces.backward(problems, _NAMES)
        return [Traced(one, 1) for (one,) in found]

    what = flash_attn_4_code.versions(), BACKWARD, flash_attn_4.FIVE_PRODUCTS, problems, SEED
    return what, trace


def _bytes_of_work(program: StoredProgram) -> float:
    """Bytes through L2 of a CTA pair for each clock of the tensor core of a CTA: read, and added in
    bytes stored. The longest sample's, whose epilogue is the least part of it."""
    action = program.program.action
    loaded = action[action[:, 0] == Action.TMA_LOAD, 3].sum()
    left = action[action[:, 0] == Action.TMA_STORE, 1].sum()
    return float(loaded + ADD_BYTES * left) / program.work


def _l2_clocks(values: Values, moved: float) -> float:
    """Clocks of a tile for each of its work where L2 decides, all SMs at work."""
    delivered = values.l2_terabytes * 1e3 / values.clock_ghz
    return moved * (values.sms / 2) / delivered
