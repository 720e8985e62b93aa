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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.paths import Paths
from fa4_hd256.kernels.limits import HEAD_DIM
from sm100_sim.timing import (
    ALONE,
    Action,
    Machine,
    Room,
    Schedule,
    StoredProgram,
    Tile,
    TileCosts,
    Tiles,
    Values,
    schedule,
)

from . import flash_attn_4_traces as traces
from .backward import Backward, around_summed_dq
from .calls import Kind, Portion
from .flash_attn_4 import FlashAttention4, Variant
from .flash_attn_4_traces import Problem
from .machines import memory_seconds
from .replays import SEED, Source, Traced, fitted, kept, programs
from .samples import BACKWARD_SINGLE_SAMPLES
from .tiles import KEYS, PARTIAL_ROW, ROW, BackwardTiling, key_steps

#: Queries of a step, and tensor-core clocks of its five products in a CTA of the pair.
QUERIES, STEP = 128, 5 * 512.0
#: Bytes that take as long to store to L2 as one that is added to float32 there, by all SMs:
#: measured on an H200 (`bench.measure.bulk_reductions`), 2,120 bytes a clock added, 2,690 stored.
#: Nobody has measured it on Blackwell.
ADD_BYTES = 1.27
_NAMES = ("flashattentionbackwardsm100",)


class FlashAttention4FiveProducts(FlashAttention4):
    """As `predictor.Provider`; dense attention alone, and no forward of its own."""

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
        """Raises ValueError for divided keys."""
        if divided:
            raise ValueError(f"{self.name} has no divided keys")
        return Variant(Kind.of(case))

    def backward(self, variant: Variant, machine: Machine, draws: int) -> Backward:
        """Raises RuntimeError if it is not installed."""
        self._require()
        values, paths = machine.sampled(draws), {}

        @functools.cache
        def costs(which: str) -> list[TileCosts]:
            source = _source(variant.kind.causal, which == "partial")
            rows = kept(*source, machine, draws)
            paths[which] = Paths.of(rows)
            moved = _bytes_of_work(programs(*source)[-1].program)
            return [
                replace(one, rate=max(one.rate, _l2_clocks(drawn, moved)))
                for one, drawn in zip(fitted(rows, "single"), values)
            ]

        tiling = BackwardTiling("single", False, False, QUERIES)
        return FiveProducts(self.name, tiling, values, costs, paths=paths)


@dataclass(frozen=True)
class FiveProducts(Backward):
    """Its launches. Kernels: "whole", and "partial" where dK and dV are added up, too."""

    def plan(self, case: Case) -> list[Portion]:
        return [Portion(case, 1, False)]

    def run(self, portion: Portion, room: Room = ALONE) -> dict[str, list[Schedule]]:
        which, tiles = _which(portion.case), five_product_tiles(portion.case)
        return {
            which: [
                schedule(tiles, costs, values, 2, self.tiling.policy, room)
                for costs, values in zip(self.costs(which), self.values)
            ]
        }

    def paths_of(self, case: Case) -> Paths:
        return self.paths.get(_which(case), Paths())

    def _beside(self, case: Case, portions: Sequence[Portion], values: Values) -> float:
        rows, keys = (sum(side) for side in zip(*case.lengths))
        nbytes = [*around_summed_dq(rows * case.heads)]
        if _which(case) == "partial":
            # Zeros, and both converted.
            nbytes += [keys * case.heads_kv * PARTIAL_ROW * times for times in (1, 1, 1.5, 1.5)]
        return sum(memory_seconds(n, values) for n in nbytes)


def _which(case: Case) -> str:
    return "whole" if case.heads == case.heads_kv else "partial"


@functools.lru_cache(maxsize=64)
def five_product_tiles(case: Case) -> Tiles:
    """Its tiles in order: 128 keys each, ascending, one query head after the other."""
    ratio, added = case.heads // case.heads_kv, _which(case) == "partial"

    @functools.cache
    def of(block: int, lengths: tuple[int, int]) -> Tile:
        begin, (seqlen_q, seqlen_k), (left, right) = block * KEYS, lengths, case.bounds
        rows = min(seqlen_k - begin, KEYS)
        if rows <= 0:
            return Tile(0.0)
        # The mask of the transposed scores is the same one with its sides exchanged.
        sides = (right, left)
        steps, _ = key_steps(begin, begin + rows, (seqlen_k, seqlen_q), sides, QUERIES)
        reads, writes = 2 * ROW * rows, 2 * (PARTIAL_ROW / ratio if added else ROW) * rows
        return Tile(STEP * steps, own_bytes=reads + writes, reads=reads, writes=writes)

    found = []
    for batch, lengths in enumerate(case.lengths):
        # Q and dO, and dQ in float32, read and written.
        shared = lengths[0] * (2 * ROW + 2 * PARTIAL_ROW)
        for head in range(case.heads):
            group = batch * case.heads + head
            found += [
                replace(of(block, lengths), group=group, shared_bytes=shared)
                for block in range(-(-case.seqlen_k // KEYS))
            ]
    return Tiles.of(found)


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

    what = flash_attn_4.versions(), BACKWARD, flash_attn_4.FIVE_PRODUCTS, problems, SEED
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
