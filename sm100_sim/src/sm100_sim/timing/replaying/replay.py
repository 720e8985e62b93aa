"""Replays of a program on a machine: sets up the tables of `engine` and reads its results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..machine_code.resources import Latency, Pipe
from ..machine_constants import Values, l2_share
from ..program import NAMED_BARRIERS, Compiled
from ..stored import StoredProgram
from . import engine, products, state
from .shared_port import PORT_COLUMNS, USED
from .signals import SIGNAL_COLUMNS, SIGNALS, compile_once
from .state import BUSY, PIPES, REASONS, SLOTS, Model

#: Clocks after which a replay is given up.
LIMIT = 200_000_000


class ReplayError(RuntimeError):
    """A replay in which nothing can go on, or that takes too long."""


@dataclass(frozen=True)
class Replay:
    """One replay.

    clocks: until the last warp exits. issued, reason: int64, clock of each element of the paths and
    main reason (index in REASONS) for the clocks before it. started, done, cause: int64, by event
    (see `state.Model`). stalls: int64 (warps, REASONS), clocks. busy: int64 (SMs, BUSY), clocks.
    pipes: int64 (SMs * 4, pipes), clocks. slots: int64 (SMs * 4,), instructions issued.
    """

    clocks: int
    issued: np.ndarray
    reason: np.ndarray
    started: np.ndarray
    done: np.ndarray
    cause: np.ndarray
    stalls: np.ndarray
    busy: np.ndarray
    pipes: np.ndarray
    slots: np.ndarray

    def utilisation(self) -> dict[str, float]:
        """Busy share of every resource over the whole replay, the busiest SM or slot of each."""
        total = max(self.clocks, 1)
        found = {name: self.busy[:, i].max() / total for i, name in enumerate(BUSY)}
        # A port of tensor memory belongs to an issue slot; an SM has four.
        for name in ("tensor memory read", "tensor memory write"):
            found[name] /= SLOTS
        for pipe in Pipe:
            if pipe != Pipe.NONE:
                found[f"{pipe.name} pipe"] = self.pipes[:, pipe].max() / total
        found["issue slots"] = self.slots.max() / total
        return {name: float(value) for name, value in found.items()}


def clock_vector(values: Values) -> np.ndarray:
    """int64 (state.CLOCKS,): latencies by class and the other clocks of a machine."""
    latency = {
        Latency.MUFU: values.mufu_latency,
        Latency.CONSTANT_LOAD: values.constant_load,
        Latency.SPECIAL: values.special_register,
        Latency.SHARED: values.shared_load,
        Latency.GLOBAL_LOAD: values.global_load,
        Latency.TMEM_LOAD: values.tmem_load,
        Latency.TMEM_STORE: values.tmem_store,
        Latency.BARRIER_TEST: values.barrier_test,
        Latency.FENCE_CTA: values.fence_cta,
        Latency.FENCE_GPU: values.fence_gpu,
        Latency.ASYNC_FENCE: values.async_fence,
        Latency.ALLOCATION: values.allocation,
        Latency.OPERAND_READ: values.operand_read,
        Latency.SHUFFLE: values.shuffle,
        Latency.DOUBLE: values.double_precision,
    }
    others = (
        values.mufu_interval, values.branch_taken, values.barrier_arrive, values.barrier_wake,
        values.remote_arrive, values.named_barrier, values.cluster_barrier, values.mma_issue,
        values.mma_extra_latency, values.operand_prefetch, values.tma_issue, values.tma_load_l2,
        values.tma_store, values.clc_query, values.named_barrier_warp, values.fence_sys,
        values.fence_behind_loads, values.store_depth, values.store_ack,
    )  # fmt: skip
    found = [latency.get(kind, 0.0) for kind in Latency] + list(others)
    return np.rint(found).astype(np.int64)


def rate_vector(values: Values, sms_running: float | None = None) -> np.ndarray:
    """float64 (state.RATES,): units a clock.

    sms_running: SMs that load from L2 at the same time, which share its bandwidth; all by default.
    """
    return np.array(
        [
            values.tmem_columns_per_clock,
            l2_share(values, sms_running),
            values.store_bytes_per_clock,
            values.tma_in_order,
        ]
    )


def _warpgroup(warp: tuple[int, int]) -> tuple[int, int]:
    """Return (CTA rank, warpgroup) of a (CTA rank, warp)."""
    return warp[0], warp[1] // products.WARPS


def _tables(compiled: Compiled | StoredProgram, values: Values) -> Model:
    program, code = compiled.program, compiled.instructions
    warps, sms = len(program.sm), program.sms
    slots_of = np.array([warp % SLOTS for _, warp in compiled.warps], np.int64)
    slot_of = program.sm.astype(np.int64) * SLOTS + slots_of
    member = np.argsort(slot_of, kind="stable").astype(np.int64)
    bounds = np.searchsorted(slot_of[member], np.arange(sms * SLOTS + 1))
    warp = np.zeros((warps, state.WARP_COLUMNS), np.int64)
    warp[:, state.FIRST], warp[:, state.LAST] = program.first, program.last
    warp[:, state.SM], warp[:, state.SLOT_OF] = program.sm, slots_of
    warp[:, state._POSITION], warp[:, state._WAIT_BAR] = program.first, -1
    slot = np.zeros((sms * SLOTS, state.SLOT_COLUMNS), np.int64)
    slot[:, state.START], slot[:, state.STOP] = bounds[:-1], bounds[1:]
    counts = np.zeros(state.COUNTS, np.int64)
    counts[state.RUNNING] = warps
    warpgroups = {name: n for n, name in enumerate(dict.fromkeys(map(_warpgroup, compiled.warps)))}
    crew = np.zeros((warps, products.CREW_COLUMNS), np.int64)
    crew[:, products.WARPGROUP] = [warpgroups[_warpgroup(name)] for name in compiled.warps]
    return Model(
        path=np.stack([program.numbers, program.event], axis=1).astype(np.int64),
        code=np.stack(code, axis=1).astype(np.int64),
        action=program.action,
        targets=program.targets,
        clock=clock_vector(values),
        rate=rate_vector(values),
        warp=warp,
        slot=slot,
        unit=np.zeros((sms, state.UNIT_COLUMNS), np.int64),
        member=member,
        barrier=np.zeros((max(program.barriers, 1), 5), np.int64),
        signal=np.zeros((SIGNALS, SIGNAL_COLUMNS), np.int64),
        port=np.zeros((sms, PORT_COLUMNS), np.int64),
        groups=np.zeros((warps, state.BULK_GROUPS, 2), np.int64),
        named=np.zeros(sms * NAMED_BARRIERS, np.int64),
        queue=np.zeros((sms, state.QUEUE, 2), np.int64),
        crew=crew,
        warpgroup=np.zeros((len(warpgroups), products.WARPGROUP_COLUMNS), np.int64),
        lined_up=np.zeros((sms, products.WAITING, products.LINED_UP_COLUMNS), np.int64),
        taken=np.zeros((sms, products.TAKEN_COLUMNS), np.int64),
        counts=counts,
        issued=np.full((len(program.numbers), 2), -1, np.int64),
        event=np.full((max(len(program.action), 1), 3), -1, np.int64),
        stalls=np.zeros((warps, len(REASONS)), np.int64),
    )


def replay(compiled: Compiled | StoredProgram, values: Values, limit: int = LIMIT) -> Replay:
    """Replay a program. Raises ReplayError if it hangs or takes over `limit` clocks."""
    model = _tables(compiled, values)
    compile_once(engine.run, model, limit)
    clocks = engine.run(model, limit)
    if clocks < 0:
        why = "takes too long" if clocks == -2 else "hangs"
        raise ReplayError(f"the replay {why}; not finished: {'; '.join(_stuck(compiled, model))}")
    busy = model.unit[:, state.USED_UNIT : state.USED_UNIT + len(BUSY)]
    busy[:, BUSY.index("shared memory port")] = model.port[:, USED]
    busy[:, BUSY.index("tensor core")] += model.taken[:, products.USED]
    pipes = slice(state.USED_PIPE, state.USED_PIPE + PIPES)
    issued, reason = model.issued.T.copy()
    started, done, cause = model.event.T.copy()
    return Replay(
        int(clocks), issued, reason, started, done, cause, model.stalls, busy,
        model.slot[:, pipes], model.slot[:, state.ISSUED],
    )  # fmt: skip


def clocks_measured(compiled: Compiled, run: Replay) -> int:
    """Clocks between a warp's first and last reading of the clock, as a kernel that times itself
    has them; the slowest warp's, 0 if none reads it."""
    program = compiled.program
    reads = np.array(["SR_CLOCK" in i.operands for i in compiled.function.instructions])
    slowest = 0
    for first, last in zip(program.first, program.last):
        clocks = run.issued[first:last][reads[program.numbers[first:last]]]
        if len(clocks):
            slowest = max(slowest, int(clocks[-1] - clocks[0]))
    return slowest


def _stuck(compiled: Compiled | StoredProgram, model: Model) -> list[str]:
    found = []
    for name, row in zip(compiled.warps, model.warp):
        if row[state._POSITION] < row[state.LAST]:
            number = model.path[row[state._POSITION], 0]
            text = compiled.text_of(number)
            found.append(f"CTA {name[0]} warp {name[1]} at `{text}`")
    return found
