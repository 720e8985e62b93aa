"""flash-attn-4's SM90 forward and backward on the timing model.

Its backward, at head_dim 256, has 48 keys of a head stay in a CTA, goes through the queries by 64,
and adds 64 x 256 of dQ in float32 to global memory in each step, by bulk reductions. All SMs
together add no faster than L2 does while they load as many bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.suite import BACKWARD, Case
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
from .calls import Portion
from .forward import Kernel
from .hopper_attention import MOST_GHZ, SM_CLOCKS, WORK_FLOP
from .machines import gpu_of, memory_seconds, simulating
from .replays import SEED, Traced, fitted, kept, programs
from .tiles import PARTIAL_ROW, ROW, BackwardTiling, ForwardTiling, key_steps

#: Keys of a step of its forward; rows of a tile.
FORWARD_KEYS, FORWARD_ROWS = {256: 80, 128: 128}, 128
#: Keys of a tile of its backward at head_dim 256, queries of a step, and its work.
KEYS, QUERIES = 48, 64
STEP = 5 * 2.0 * KEYS * QUERIES * HEAD_DIM / WORK_FLOP
#: Bytes that all SMs add to float32 in L2 while they load as many, by `ADDED`'s row, and the clock
#: of an SM there.
ADDED = Path(__file__).parents[1] / "measure" / "bulk_reductions_measured.json"
_ADDED_ROW, _ADDED_GHZ = "add beside loads, 132 SMs, 8 MiB, a part each", 1.98
#: Steps of the longest tiles of the backward's samples.
_SAMPLE_STEPS = (4, 8, 16)
_NAMES = ("flashattentionbackwardsm90",)


def forward(causal: bool, machine: Machine, draws: int = 0, head_dim: int = HEAD_DIM) -> Kernel:
    """Its forward: one tile a CTA, of a causal call the longest first."""
    keys = FORWARD_KEYS[head_dim]
    samples = tuple((FORWARD_ROWS, 1, None, keys * steps) for steps in (4, 12, 24))
    problems = [
        traces.Problem(
            queries, n, (1, 1), head_dim, (("causal", causal), ("num_splits", 1))
        )
        for queries, _, _, n in samples
    ]  # fmt: skip

    def trace() -> list[Traced]:
        with simulating(machine), _asked_again():
            return [Traced(program, 1) for program in traces.forward(problems, False)]

    versions = traces.flash_attn_4.versions()
    rows = kept((versions, "sm_90a", causal, head_dim, samples), trace, machine, draws)
    rows = [replace(row, work=row.work / SM_CLOCKS) for row in rows]
    tiling = ForwardTiling(
        "single", head_dim, FORWARD_ROWS, 1, keys=keys, ordered=causal, packs_heads=True,
        exact_grid=True, gpu=gpu_of(machine),
    )  # fmt: skip
    return Kernel("flash-attn-4", tiling, machine.sampled(draws), fitted(rows, "single"))


def backward(causal: bool, machine: Machine, draws: int = 0) -> Backward:
    """Its backward, of as many key/value heads as query heads."""
    # Of its tiles the longest is replayed.
    problems = tuple(
        traces.Problem(
            QUERIES * steps, QUERIES * steps, (1, 1), HEAD_DIM,
            (("causal", causal), ("num_splits", 1)),
        )
        for steps in _SAMPLE_STEPS
    )  # fmt: skip

    def trace() -> list[Traced]:
        with simulating(machine), _asked_again():
            return [Traced(one, 1) for (one,) in traces.backward(problems, _NAMES)]

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        what = (traces.flash_attn_4.versions(), "sm_90a", BACKWARD, problems, SEED)
        rows = [
            replace(row, work=row.work / SM_CLOCKS) for row in kept(what, trace, machine, draws)
        ]
        few, *_, many = programs(what, trace)
        added = _added_of_work(few.program, many.program)
        return [
            replace(one, rate=max(one.rate, _l2_clocks(drawn, added)))
            for one, drawn in zip(fitted(rows, "single"), machine.sampled(draws))
        ]

    tiling = BackwardTiling("single", False, False, QUERIES, gpu=gpu_of(machine))
    return OneKernel(traces.flash_attn_4.PACKAGE, tiling, machine.sampled(draws), costs)


@dataclass(frozen=True)
class OneKernel(Backward):
    """Its launches: the kernel, "all", and those around it that read and write."""

    def plan(self, case: Case) -> list[Portion]:
        return [Portion(case, 1, False)]

    def run(self, portion: Portion, room: Room = ALONE) -> dict[str, list[Schedule]]:
        tiles = tiles_of(portion.case)
        return {
            "all": [
                schedule(tiles, costs, values, 1, self.tiling.policy, room)
                for costs, values in zip(self.costs("all"), self.values)
            ]
        }

    def _beside(self, case: Case, portions: Sequence[Portion], values: Values) -> float:
        rows = sum(length for length, _ in case.lengths) * case.heads
        return sum(memory_seconds(n, values) for n in around_summed_dq(rows))


@functools.lru_cache(maxsize=64)
def tiles_of(case: Case) -> Tiles:
    """The backward's tiles in order: 48 keys each, ascending, one query head after the other.

    Raises ValueError for query heads that share keys.
    """
    if case.heads != case.heads_kv:
        raise ValueError(f"heads {case.heads_text}: accepted are as many of keys as of queries")
    found = []
    for batch, (seqlen_q, seqlen_k) in enumerate(case.lengths):
        # Q and dO, and dQ in float32, read and written.
        shared = seqlen_q * (2 * ROW + 2 * PARTIAL_ROW)
        left, right = case.bounds
        for head in range(case.heads):
            for begin in range(0, seqlen_k, KEYS):
                rows = min(seqlen_k - begin, KEYS)
                # The mask of the transposed scores is the same one with its sides exchanged.
                steps, _ = key_steps(
                    begin, begin + rows, (seqlen_k, seqlen_q), (right, left), QUERIES
                )
                own = 2 * ROW * rows
                found.append(Tile(
                    STEP * steps, own_bytes=2 * own, reads=own, writes=own,
                    group=batch * case.heads + head, shared_bytes=shared,
                ))  # fmt: skip
    return Tiles.of(found)


def added_terabytes() -> float:
    """Of all SMs a second, measured; L2's time does not follow the SMs' clock."""
    return json.loads(ADDED.read_text())[_ADDED_ROW]["all"] * _ADDED_GHZ / 1e3


def _added_of_work(few: StoredProgram, many: StoredProgram) -> float:
    """Bytes that a CTA adds for each of its work, by what one program has more than the other."""

    def added(program: StoredProgram) -> float:
        action = program.program.action
        return float(action[action[:, 0] == Action.TMA_STORE, 1].sum())

    return (added(many) - added(few)) / ((many.work - few.work) / SM_CLOCKS)


def _l2_clocks(values: Values, added: float) -> float:
    """Clocks of a tile for each of its work where L2 decides, all SMs at work; of the clock that
    they have then, as their tensor cores are busy for a third of the time."""
    return added * values.sms / (added_terabytes() * 1e3 / MOST_GHZ)


@contextlib.contextmanager
def _asked_again() -> Iterator[None]:
    """flash-attn-4 remembers which device it has asked; inside and behind it asks anew."""
    from flash_attn.cute import cute_dsl_utils, interface

    asked = interface._get_device_arch, cute_dsl_utils._get_device_arch_and_num_sms
    for function in asked:
        function.cache_clear()
    try:
        yield
    finally:
        for function in asked:
            function.cache_clear()
