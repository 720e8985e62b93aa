"""cp.async: copies of 4, 8 or 16 bytes per lane from global to shared memory.

PTX ISA 9.3, "Non-bulk copy" and "cp.async.mbarrier.arrive". The copies of one warp take effect in
the order of their issue and at any time after it; only wait_group, wait_all or an mbarrier that
tracks them make them visible.
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from sm100_sim.errors import MemoryFault, Misaligned
from sm100_sim.state.events import Waiting
from sm100_sim.state.warp import SHARED_WINDOW, Warp, lane_array, predicate_reader, reader

from ..columns import Effect, Event, Recorded, Rule, Ties
from ..shared import submit
from ..sync import barrier_groups
from ..table import effect_of, machine_op, split_modifiers, unknown
from .tma import thread_groups

_PREFETCH = ("L2::64B", "L2::128B", "L2::256B", "")
_TABLE = "cp.async"


def _queue(warp: Warp):
    return "cp.async", warp.cta, warp.index


def shared_targets(operand, named: bool):
    """Accessor of the shared addresses of all lanes, int64 (32,)."""
    base = operand.base
    wide = base.kind == "reg" and base.register.file == "r64"
    read = reader(operand, 64 if wide else 32)
    window = SHARED_WINDOW if wide and not named else 0
    return lambda warp: read(warp).astype(np.int64) - window


def _source_bytes(instruction, extra: list, size: int):
    """Accessor of the bytes that each lane reads, int64 (32,), from src-size or ignore-src.

    extra: operands behind the size, without a cache policy.
    """
    if len(extra) > 1 or extra and extra[0].kind not in ("reg", "imm", "pred"):
        raise unknown(instruction, "operands of cp.async")
    if not extra:
        return lambda warp: np.full(32, size)
    if extra[0].kind == "pred":
        ignored = predicate_reader(extra[0])
        return lambda warp: np.where(lane_array(ignored(warp)), 0, size)
    read = reader(extra[0], 32)
    return lambda warp: read(warp).astype(np.int64)


@machine_op(
    "cp.async.ca",
    "cp.async.cg",
    statistics="cp.async",
    rule=Rule.COPY,
    trace=Recorded.ENTRY,
    event=Event.COPY,
    effect=Effect.COPY,
    ties=Ties.NEVER,
)
def bind_copy(instruction, kernel):
    """cp.async.{ca,cg}.shared{::cta}.global{.L2::cache_hint}{.L2::prefetch} [dst], [src], size
    {, src-size | ignore-src}{, policy}: bytes beyond src-size are zeros."""
    space, _, hint, _ = split_modifiers(
        instruction, ("shared", "shared::cta"), ("global",), ("L2::cache_hint", ""), _PREFETCH
    )
    # The instruction stays as it is: it is bound once for each variant of the kernel.
    operands = instruction.operands[:-1] if hint else instruction.operands
    to, origin, size, *extra = operands
    size = size.value
    if size not in ((16,) if instruction.opcode == "cp.async.cg" else (4, 8, 16)):
        raise unknown(instruction, "cp-size is 4, 8 or 16, with .cg 16")
    target = shared_targets(to, bool(space))
    source, given = reader(origin, 64), _source_bytes(instruction, extra, size)
    effect = effect_of(instruction)

    def execute(warp: Warp, lanes: int) -> None:
        active = [lane for lane in range(32) if lanes >> lane & 1]
        places = target(warp)[active].tolist()
        starts, counts = source(warp)[active].tolist(), given(warp)[active].tolist()
        cta = warp.cta
        copies = []
        for place, start, count in zip(places, starts, counts, strict=True):
            copies.append((_offset(cta, place, size), start, _read_bytes(cta, start, count, size)))

        def perform() -> None:
            smem = cta.smem
            base = smem.__array_interface__["data"][0]
            for offset, start, count in copies:
                if count:
                    ctypes.memmove(base + offset, start, count)
                if count < size:
                    smem[offset + count : offset + size] = 0

        operation = submit(warp, instruction, effect, perform, _queue(warp))
        for groups in thread_groups(warp, lanes, _TABLE):
            groups.open.append(operation)

    return execute


def _offset(cta, place: int, size: int) -> int:
    rank, offset = place >> 24, place & 0xFFFFFF
    if place % size:
        raise Misaligned(f"cp.async of {size} bytes to shared address {place:#x}")
    if rank != cta.rank or offset + size > cta.smem.size:
        raise MemoryFault(
            f"cp.async of {size} bytes to shared address {place:#x}, outside the {cta.smem.size} "
            f"bytes of CTA rank {cta.rank}"
        )
    return offset


def _read_bytes(cta, start: int, count: int, size: int) -> int:
    """Checked number of bytes to read: none of them need be readable if it is 0."""
    if not 0 <= count <= size:
        raise MemoryFault(f"cp.async with src-size {count}; accepted are 0 to {size}")
    if count:
        if start % size:
            raise Misaligned(f"cp.async of {size} bytes from global address {start:#x}")
        cta.cluster.machine.memory.check(start, count, False, "cp.async")
    return count


@machine_op(
    "cp.async.commit_group",
    rule=Rule.COMMIT_COPIES,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
)
def bind_commit(instruction, kernel):
    """cp.async.commit_group: close the group of each executing thread."""
    split_modifiers(instruction)

    def execute(warp: Warp, lanes: int) -> None:
        for groups in thread_groups(warp, lanes, _TABLE):
            groups.committed.append(groups.open)
            groups.open = []

    return execute


@machine_op(
    "cp.async.wait_group",
    rule=Rule.WAIT_COPIES,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
)
@machine_op(
    "cp.async.wait_all",
    rule=Rule.WAIT_ALL_COPIES,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
)
def bind_wait(instruction, kernel):
    """cp.async.wait_group N: at most the N latest groups pend; wait_all: nothing pends."""
    split_modifiers(instruction)
    everything = instruction.opcode == "cp.async.wait_all"
    allowed = 0 if everything else instruction.operands[0].value

    def execute(warp: Warp, lanes: int):
        for groups in thread_groups(warp, lanes, _TABLE):
            while len(groups.committed) > allowed:
                pending = [op for op in groups.committed[0] if not op.performed]
                if pending:
                    return Waiting(f"cp.async group of {len(pending)} copies", pending[-1])
                groups.committed.pop(0)
            pending = [op for op in groups.open if not op.performed] if everything else []
            if pending:
                return Waiting(f"{len(pending)} copies of cp.async", pending[-1])
        return None

    return execute


@machine_op(
    "cp.async.mbarrier.arrive",
    rule=Rule.ARRIVE_COPIES,
    trace=Recorded.ENTRY,
    event=Event.COPY_ARRIVE,
    effect=Effect.ARRIVE_COPIES,
    ties=Ties.NEVER,
    synchronises=True,
)
def bind_arrive(instruction, kernel):
    """cp.async.mbarrier.arrive{.noinc}{.shared{::cta}}.b64 [addr]: each lane arrives when all its
    earlier copies have completed; without .noinc the pending count first grows by that arrival."""
    fixed, space, _ = split_modifiers(
        instruction, ("noinc", ""), ("shared", "shared::cta", ""), ("b64",)
    )
    groups, effect = barrier_groups(instruction.operands[0], space), effect_of(instruction)

    def execute(warp: Warp, lanes: int) -> None:
        for barrier, some in groups(warp, lanes):
            count = some.bit_count()
            if not fixed:
                barrier.expect_arrivals(count)
            arrive = partial(barrier.arrive, count)
            submit(warp, instruction, effect, arrive, _queue(warp))

    return execute
