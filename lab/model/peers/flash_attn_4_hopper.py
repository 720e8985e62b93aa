"""flash-attn-4's SM90 forward and backward on the timing model.

Its backward, at head_dim 256, has 48 keys of a head stay in a CTA, goes through the queries by 64,
and adds 64 x 256 of dQ in float32 to global memory in each step, by bulk reductions. All SMs
together add no faster than L2 does while they load as many bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.suite import BACKWARD, Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.calls import Chunk
from lab.model.forward import Kernel
from lab.model.hopper.attention import SM_CLOCKS, WORK_FLOP
from lab.model.hopper.clocks import MOST_GHZ
from lab.model.machines import gpu_of, simulating
from lab.model.peers import flash_attn_4_code
from lab.model.peers import flash_attn_4_traces as traces
from lab.model.replays import SEED, Traced, fitted, kept, programs
from lab.model.summed_dq import WHOLE, Step, SummedDq, kernel_of
from lab.model.tiles import BackwardTiling, ForwardTiling
from lab.whole.problem import TileCosts
from sm100_sim.timing import Action, Machine, StoredProgram, Values

#: Keys of a step of its forward; rows of a tile.
FORWARD_KEYS, FORWARD_ROWS = {256: 80, 128: 128}, 128
#: Step of its backward at head_dim 256: five GEMMs of 48 keys and 64 queries.
STEP = Step(48, 64, 5 * 2.0 * 48 * 64 * HEAD_DIM / WORK_FLOP, 1)
#: Bytes that all SMs add to float32 in L2 while they load as many, by `ADDED`'s row, and the clock
#: of an SM there.
ADDED = Path(__file__).parents[2] / "micro" / "bulk_reductions_measured.json"
_ADDED_ROW, _ADDED_GHZ = "add beside loads, 132 SMs, 8 MiB, a part each", 1.98
#: Steps of the longest tiles of the backward's samples.
_SAMPLE_STEPS = (4, 8, 16)
_NAMES = ("flashattentionbackwardsm90",)


def forward(causal: bool, machine: Machine, draws: int = 0, head_dim: int = HEAD_DIM) -> Kernel:
    """Return its forward: one tile per CTA, of a causal call the longest first."""
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

    versions = flash_attn_4_code.versions()
    rows = kept((versions, "sm_90a", causal, head_dim, samples), trace, machine, draws)
    rows = [replace(row, work=row.work / SM_CLOCKS) for row in rows]
    tiling = ForwardTiling(
        "single", head_dim, FORWARD_ROWS, 1, keys=keys, ordered=causal, packs_heads=True,
        exact_grid=True, gpu=gpu_of(machine),
    )  # fmt: skip
    return Kernel("flash-attn-4", tiling, machine.sampled(draws), fitted(rows, "single"))


class _OfWholeHeads(SummedDq):
    """Launches of its backward where a key/value head has one query head."""

    def plan(self, case: Case) -> list[Chunk]:
        """Raises ValueError for query heads that share keys."""
        if kernel_of(case) != WHOLE:
            raise ValueError(f"heads {case.heads_text}: accepted are as many of keys as of queries")
        return super().plan(case)


def backward(causal: bool, machine: Machine, draws: int = 0) -> SummedDq:
    """Return its backward, of as many key/value heads as query heads."""
    # The longest of its tiles is replayed.
    problems = tuple(
        traces.Problem(
            STEP.queries * steps, STEP.queries * steps, (1, 1), HEAD_DIM,
            (("causal", causal), ("num_splits", 1)),
        )
        for steps in _SAMPLE_STEPS
    )  # fmt: skip

    def trace() -> list[Traced]:
        with simulating(machine), _asked_again():
            return [Traced(one, 1) for (one,) in traces.backward(problems, _NAMES)]

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        what = (flash_attn_4_code.versions(), "sm_90a", BACKWARD, problems, SEED)
        rows = [
            replace(row, work=row.work / SM_CLOCKS) for row in kept(what, trace, machine, draws)
        ]
        few, *_, many = programs(what, trace)
        added = _added_of_work(few.program, many.program)
        return [
            replace(one, rate=max(one.rate, _l2_clocks(drawn, added)))
            for one, drawn in zip(fitted(rows, "single"), machine.sampled(draws))
        ]

    tiling = BackwardTiling("single", False, False, STEP.queries, gpu=gpu_of(machine))
    name, values = traces.flash_attn_4.PACKAGE, machine.sampled(draws)
    return _OfWholeHeads(name, tiling, values, costs, step=STEP)


def added_terabytes() -> float:
    """Return the terabytes per second that all SMs add, measured; L2's time does not follow the
    SMs' clock."""
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
    """flash-attn-4 remembers which device it has queried; inside and behind it queries again."""
    from flash_attn.cute import cute_dsl_utils, interface

    asked = interface._get_device_arch, cute_dsl_utils._get_device_arch_and_num_sms
    for function in asked:
        function.cache_clear()
    try:
        yield
    finally:
        for function in asked:
            function.cache_clear()
