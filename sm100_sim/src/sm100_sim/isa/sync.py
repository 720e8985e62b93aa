"""Synchronisation between threads: mbarriers, named barriers, the cluster barrier, registers.

PTX ISA 9.3, "Parallel Synchronization and Communication Instructions" and "Miscellaneous
Instructions: setmaxnreg". The state and its rules are in `barriers`; here are operands, lanes and
waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from sm100_sim.errors import MemoryFault
from sm100_sim.state import barriers
from sm100_sim.state.barriers import MBarrier
from sm100_sim.state.events import YIELD, Waiting
from sm100_sim.state.warp import (
    SHARED_WINDOW,
    Warp,
    predicate_reader,
    predicate_writer,
    reader,
    uniform,
    writer,
)

from .columns import Effect, Event, NativeForm, Recorded, Rule, Ties
from .shared import require_own, shared_address
from .table import machine_op, split_modifiers, unknown

_SPACE = ("shared", "shared::cta", "shared::cluster", "")
_OWN_SPACE = ("shared", "shared::cta", "")
_SCOPE = ("cta", "cluster", "gpu", "sys", "")

Groups = list[tuple[MBarrier, int]]


# ---------------------------------------------------------------- operands


def _common(operand, bits: int) -> Callable[[Warp, int], int | None]:
    """Accessor of the value that all executing lanes share, None if they differ."""
    one = uniform(operand, bits)
    base = operand.base if operand.kind == "mem" else operand
    if base.kind != "reg":
        return one
    slot, wide = base.slot, base.register.file == "r64"
    offset, mask = operand.value if operand.kind == "mem" else 0, (1 << bits) - 1

    def common(warp: Warp, lanes: int) -> int | None:
        if not lanes & lanes - 1:
            return one(warp, lanes)
        values = (warp.r64 if wide else warp.r32)[slot].tolist()
        first = values[(lanes & -lanes).bit_length() - 1]
        if values.count(first) < 32 and any(
            value != first and lanes >> lane & 1 for lane, value in enumerate(values)
        ):
            return None
        return first + offset & mask

    return common


def _grouped(operand, bits: int) -> Callable[[Warp, int], list[tuple[int, int]]]:
    """Accessor of (value, mask of the lanes that hold it)."""
    common = _common(operand, bits)
    base = operand.base if operand.kind == "mem" else operand
    rows: Any = reader(operand, bits) if base.kind == "reg" else None

    def groups(warp: Warp, lanes: int) -> list[tuple[int, int]]:
        shared = common(warp, lanes)
        if shared is not None:
            return [(shared, lanes)]
        found: dict[int, int] = {}
        for lane, value in enumerate(rows(warp).tolist()):
            if lanes >> lane & 1:
                found[value] = found.get(value, 0) | 1 << lane
        return list(found.items())

    return groups


def barrier_groups(operand, space: str, own: bool = False) -> Callable[[Warp, int], Any]:
    """Accessor of the mbarriers that the lanes name, each with the mask of its lanes.

    own: whether they must be the CTA's own, as those in .shared and .shared::cta.
    """
    own = own or space in ("shared", "shared::cta")
    base = operand.base if operand.kind == "mem" else operand
    wide = base.kind == "reg" and base.register.file == "r64"
    common = _common(operand, 64 if wide else 32)
    groups = _grouped(operand, 64 if wide else 32)
    generic = wide and not space

    def resolve(warp: Warp, value: int) -> MBarrier:
        address = value - SHARED_WINDOW if generic else value & 0xFFFFFFFF
        if not 0 <= address < 1 << 32:
            raise MemoryFault(f"generic address {value:#x} of an mbarrier is not shared memory")
        if own:
            require_own(warp, address, "an mbarrier")
        cluster = warp.cta.cluster
        return cluster.mbarriers.get(address) or cluster.mbarrier(address)

    def found(warp: Warp, lanes: int) -> Groups:
        value = common(warp, lanes)
        if value is not None:
            return [(resolve(warp, value), lanes)]
        return [(resolve(warp, value), some) for value, some in groups(warp, lanes)]

    return found


def _sum_of(operand) -> Callable[[Warp, int], int]:
    """Accessor of the sum of an operand over the lanes."""
    common, groups = _common(operand, 32), _grouped(operand, 32)

    def total(warp: Warp, lanes: int) -> int:
        value = common(warp, lanes)
        if value is not None:
            return value * lanes.bit_count()
        return sum(value * some.bit_count() for value, some in groups(warp, lanes))

    return total


# ---------------------------------------------------------------- mbarrier


@machine_op(
    "mbarrier.init",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.INIT,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
@machine_op(
    "mbarrier.inval",
    rule=Rule.INVALIDATE,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_lifetime(instruction, kernel):
    """mbarrier.init{.space}.b64 [addr], count and mbarrier.inval{.space}.b64 [addr]."""
    space, _ = split_modifiers(instruction, _OWN_SPACE, ("b64",))
    address = shared_address(instruction.operands[0], not space)
    if instruction.opcode == "mbarrier.inval":
        return lambda warp, lanes: warp.cta.invalidate_mbarrier(address(warp, lanes))
    count = uniform(instruction.operands[1], 32)

    def execute(warp: Warp, lanes: int) -> None:
        for lane in range(32):
            if lanes >> lane & 1:
                warp.cta.init_mbarrier(address(warp, 1 << lane), count(warp, 1 << lane))

    return execute


def _arrive_form(instruction) -> tuple[str, str]:
    """Return (variant, state space) of an arrive: variant is "", "expect_tx" or "noComplete"."""
    variant, _, _, space, _ = split_modifiers(
        instruction, ("expect_tx", "noComplete", ""), ("release", "relaxed", ""), _SCOPE, _SPACE,
        ("b64",),
    )  # fmt: skip
    return variant, space


@machine_op(
    "mbarrier.arrive",
    defines=(0,),
    rule=Rule.ARRIVE,
    trace=Recorded.LANES,
    event=Event.ARRIVE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.ARRIVE,
)
@machine_op(
    "mbarrier.arrive_drop",
    defines=(0,),
    rule=Rule.ARRIVE,
    trace=Recorded.LANES,
    event=Event.ARRIVE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
)
def bind_arrive(instruction, kernel):
    """mbarrier.arrive{_drop}{.expect_tx|.noComplete}{.sem}{.scope}{.space}.b64 {state,} [addr]
    {, count}; every executing lane arrives at the barrier it names."""
    variant, space = _arrive_form(instruction)
    operands = list(instruction.operands)
    first = operands[0].kind
    write_state = writer(operands.pop(0), 64) if first in ("reg", "sink") else None
    groups = barrier_groups(operands.pop(0), space)
    if len(operands) > 1 or (not operands and variant):
        raise unknown(instruction, "operands of an arrive")
    total = _sum_of(operands[0]) if operands else None
    drop = instruction.opcode == "mbarrier.arrive_drop"
    if drop and variant == "noComplete":
        raise unknown(instruction, "arrive_drop.noComplete is not modelled")
    if first == "sink":
        write_state = None

    def execute(warp: Warp, lanes: int) -> None:
        for barrier, some in groups(warp, lanes):
            number = total(warp, some) if total else some.bit_count()
            if variant == "expect_tx":
                barrier.expect_tx(number)
                number = some.bit_count()
            if drop:
                state = barrier.arrive_drop(number)
            elif variant == "noComplete":
                state = barrier.arrive_no_complete(number)
            else:
                state = barrier.arrive(number)
            if write_state is not None:
                write_state(warp, some, state)

    return execute


@machine_op(
    "mbarrier.expect_tx",
    "mbarrier.complete_tx",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.ARRIVE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
)
def bind_tx(instruction, kernel):
    """mbarrier.{expect,complete}_tx{.relaxed}{.scope}{.space}.b64 [addr], bytes."""
    _, _, space, _ = split_modifiers(instruction, ("relaxed", ""), _SCOPE, _SPACE, ("b64",))
    groups = barrier_groups(instruction.operands[0], space)
    total = _sum_of(instruction.operands[1])
    sign = 1 if instruction.opcode == "mbarrier.expect_tx" else -1

    def execute(warp: Warp, lanes: int) -> None:
        for barrier, some in groups(warp, lanes):
            barrier.expect_tx(sign * total(warp, some))

    return execute


@machine_op(
    "mbarrier.pending_count",
    defines=(0,),
    rule=Rule.COMPUTES,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_pending_count(instruction, kernel):
    """mbarrier.pending_count.b64 count, state."""
    split_modifiers(instruction, ("b64",))
    write, states = writer(instruction.operands[0], 32), _grouped(instruction.operands[1], 64)

    def execute(warp: Warp, lanes: int) -> None:
        for state, some in states(warp, lanes):
            write(warp, some, barriers.pending_count(state))

    return execute


@machine_op(
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    defines=(0,),
    rule=Rule.WAIT,
    trace=Recorded.RESULT,
    event=Event.WAIT,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.WAIT,
)
def bind_wait(instruction, kernel):
    """mbarrier.{try,test}_wait{.parity}{.sem}{.scope}{.space}.b64 p, [addr], state|parity{, ns}.

    In a recognised spin loop (`Instruction.spin`) lanes sleep until a phase completes, which no
    program can tell from spinning. Elsewhere the answer comes at once, and a negative one gives
    other warps a turn.
    """
    by_parity, _, _, space, _ = split_modifiers(
        instruction, ("parity", ""), ("acquire", "relaxed", ""), _SCOPE, _SPACE, ("b64",)
    )
    done_op, barrier_op, phase_op, *hint = instruction.operands
    if len(hint) > 1:
        raise unknown(instruction, "operands of a wait")
    write = predicate_writer(done_op)
    groups = barrier_groups(barrier_op, space, own=True)
    bits = 32 if by_parity else 64
    common, phases = _common(phase_op, bits), _grouped(phase_op, bits)
    complete = MBarrier.parity_complete if by_parity else MBarrier.state_complete
    spins = instruction.spin
    may_fail = instruction.opcode == "mbarrier.try_wait"

    def execute(warp: Warp, lanes: int):
        done, asleep = 0, None
        for barrier, some in groups(warp, lanes):
            phase = common(warp, some)
            for value, these in phases(warp, some) if phase is None else ((phase, some),):
                if complete(barrier, value):
                    done |= these
                elif spins:
                    what = ("parity 0", "parity 1")[value & 1] if by_parity else "its state's phase"
                    asleep = (asleep or []) + [Waiting(what, barrier, these)]
        adversary = warp.cta.cluster.adversary
        if adversary is not None and may_fail and done and adversary.spurious_failure():
            done = 0
        write(warp, lanes, done)
        if asleep is not None:
            return asleep[0] if len(asleep) == 1 else tuple(asleep)
        return None if done else YIELD

    return execute


# ---------------------------------------------------------------- named barriers


def _named_barrier_op(kind: str, event: Event, aligned: bool) -> Callable:
    """Decorator: the rows of {bar,barrier}{.cta}.kind, for all lanes together or one by one."""
    prefixes, suffixes = ["barrier", "barrier.cta"], [""]
    if aligned:
        operations = ("", ".and", ".or", ".popc") if kind == "red" else ("",)
        suffixes = [f"{operation}.aligned" for operation in operations]
    names = [f"{prefix}.{kind}{suffix}" for prefix in prefixes for suffix in suffixes]
    if aligned:
        names += [f"bar.{kind}", f"bar.cta.{kind}"]
    return machine_op(
        *names, statistics="barrier", aligned=aligned, defines=(0,) if kind == "red" else (),
        rule=Rule.NAMED_ARRIVE if kind == "arrive" else Rule.NAMED_BARRIER,
        trace=Recorded.ENTRY, event=event, effect=Effect.NONE, ties=Ties.NEVER, synchronises=True,
    )  # fmt: skip


@_named_barrier_op("sync", Event.BAR_SYNC, aligned=True)
@_named_barrier_op("arrive", Event.BAR_ARRIVE, aligned=True)
@_named_barrier_op("red", Event.BAR_REDUCE, aligned=True)
def bind_aligned_barrier(instruction, kernel):
    """bar{.cta}.{sync,arrive,red}..., barrier....aligned: all lanes of the warp together."""
    parts = [p for p in instruction.name.split(".") if p not in ("bar", "barrier", "cta")]
    return _bind_barrier(instruction, [part for part in parts if part != "aligned"])


@_named_barrier_op("sync", Event.BAR_SYNC, aligned=False)
@_named_barrier_op("arrive", Event.BAR_ARRIVE, aligned=False)
@_named_barrier_op("red", Event.BAR_REDUCE, aligned=False)
def bind_barrier(instruction, kernel):
    """barrier{.cta}.{sync,arrive,red}...: lanes may come one by one."""
    parts = [p for p in instruction.name.split(".") if p not in ("barrier", "cta")]
    return _bind_barrier(instruction, parts)


def _bind_barrier(instruction, parts: list[str]):
    kind = parts[0]
    if kind == "red":
        return _bind_reduction(instruction, parts[1:])
    if parts[1:]:
        raise unknown(instruction, f"modifier .{parts[1]} of a named barrier")
    number_op, *counts = instruction.operands
    if len(counts) > 1 or (kind == "arrive" and not counts):
        raise unknown(instruction, "operands of a named barrier")
    number = uniform(number_op, 32)
    count = uniform(counts[0], 32) if counts else None
    waits = kind == "sync"

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        barrier = _named_barrier(warp, lanes, number(warp, lanes))
        if barrier.come(warp, lanes, count(warp, lanes) if count else None):
            return None
        return Waiting("the other threads", barrier, retry=False) if waits else None

    return execute


def _named_barrier(warp: Warp, lanes: int, number: int) -> barriers.NamedBarrier:
    """The barrier to which lanes of a warp come; BarrierError where others are at another one."""
    barrier = warp.cta.named_barrier(number)
    if lanes != warp.live:
        warp.cta.check_partial(barrier, warp)
    return barrier


def _bind_reduction(instruction, parts: list[str]):
    """red.{and,or}.pred p, a{, b}, {!}c and red.popc.u32 d, a{, b}, {!}c."""
    own, write = _votes(instruction, parts)
    _, number_op, *counts, _ = instruction.operands
    number = uniform(number_op, 32)
    count = uniform(counts[0], 32) if counts else None

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        barrier = _named_barrier(warp, lanes, number(warp, lanes))
        result = functools.partial(write, warp, lanes)
        barrier.vote(own(warp, lanes), lanes.bit_count(), result)
        if barrier.come(warp, lanes, count(warp, lanes) if count else None):
            return None
        return Waiting("the other threads", barrier, retry=False)

    return execute


def _votes(instruction, parts: list[str]) -> tuple[Callable, Callable]:
    """Return (counter of a warp's lanes that vote for it, writer of the result of a vote)."""
    if parts not in (["and", "pred"], ["or", "pred"], ["popc", "u32"]):
        raise unknown(instruction, "a barrier reduces with .and.pred, .or.pred or .popc.u32")
    target, vote, operation = instruction.operands[0], instruction.operands[-1], parts[0]
    holds = predicate_reader(vote)
    write = writer(target, 32) if operation == "popc" else predicate_writer(target)

    def result(warp: Warp, lanes: int, ayes: int, votes: int) -> None:
        if operation == "popc":
            write(warp, lanes, ayes)
        else:
            agreed = ayes == votes if operation == "and" else ayes > 0
            write(warp, lanes, lanes if agreed else 0)

    return lambda warp, lanes: (holds(warp) & lanes).bit_count(), result


def own_vote(instruction) -> Callable[[Warp, int], None] | None:
    """Return the writer that leaves a warp with the result of its own lanes, for a reduction; else
    None."""
    name, *parts = [p for p in instruction.name.split(".") if p not in ("cta", "aligned")]
    if name not in ("bar", "barrier") or parts[0] != "red":
        return None
    own, write = _votes(instruction, parts[1:])
    return lambda warp, lanes: write(warp, lanes, own(warp, lanes), lanes.bit_count())


# ---------------------------------------------------------------- cluster barrier


def _cluster_op(kind: str, suffixes: tuple[str, ...], aligned: bool = False) -> Callable:
    """Decorator: the rows of barrier.cluster.kind with these suffixes."""
    arrives = kind == "arrive"
    return machine_op(
        *(f"barrier.cluster.{kind}{suffix}" for suffix in suffixes), statistics="barrier.cluster",
        aligned=aligned, rule=Rule.CLUSTER_ARRIVE if arrives else Rule.CLUSTER_WAIT,
        trace=Recorded.ENTRY, event=Event.CLUSTER_ARRIVE if arrives else Event.CLUSTER_WAIT,
        effect=Effect.NONE, ties=Ties.NEVER, synchronises=True,
    )  # fmt: skip


def _cluster_arrive(instruction, aligned: tuple[str, ...]):
    split_modifiers(instruction, ("release", "relaxed", ""), aligned)
    return lambda warp, lanes: warp.cta.cluster.barrier.arrive(warp, lanes)


def _cluster_wait(instruction, aligned: tuple[str, ...]):
    split_modifiers(instruction, ("acquire", ""), aligned)

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        barrier = warp.cta.cluster.barrier
        left = barrier.wait(warp, lanes)
        return Waiting("the threads of the cluster", barrier, left) if left else None

    return execute


@_cluster_op("arrive", ("", ".release", ".relaxed"))
def bind_cluster_arrive(instruction, kernel):
    """barrier.cluster.arrive{.release|.relaxed}: lanes may come one by one."""
    return _cluster_arrive(_resplit(instruction, "barrier.cluster.arrive"), ("",))


@_cluster_op("arrive", (".aligned", ".release.aligned", ".relaxed.aligned"), aligned=True)
def bind_cluster_arrive_aligned(instruction, kernel):
    """barrier.cluster.arrive{.release|.relaxed}.aligned: all lanes of the warp together."""
    return _cluster_arrive(_resplit(instruction, "barrier.cluster.arrive"), ("aligned",))


@_cluster_op("wait", ("", ".acquire"))
def bind_cluster_wait(instruction, kernel):
    """barrier.cluster.wait{.acquire}."""
    return _cluster_wait(_resplit(instruction, "barrier.cluster.wait"), ("",))


@_cluster_op("wait", (".aligned", ".acquire.aligned"), aligned=True)
def bind_cluster_wait_aligned(instruction, kernel):
    """barrier.cluster.wait{.acquire}.aligned."""
    return _cluster_wait(_resplit(instruction, "barrier.cluster.wait"), ("aligned",))


def _resplit(instruction, opcode: str):
    """Split the dotted name behind `opcode`, where the table has a longer entry."""
    name = instruction.name
    instruction.opcode = opcode
    instruction.modifiers = tuple(name.removeprefix(opcode).split(".")[1:])
    return instruction


# ---------------------------------------------------------------- registers


@machine_op(
    "setmaxnreg",
    aligned=True,
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.ENTRY,
    event=Event.SETMAXNREG,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_setmaxnreg(instruction, kernel):
    """setmaxnreg.{inc,dec}.sync.aligned.u32 n: moves registers through the CTA's pool.

    Without effect where it is missing in the machine code (`cubin.moving_registers`).
    """
    kind, *_ = split_modifiers(instruction, ("inc", "dec"), ("sync",), ("aligned",), ("u32",))
    count = instruction.operands[0].value
    if count % 8 or not 24 <= count <= 256:
        raise unknown(instruction, "the register count must be a multiple of 8 from 24 to 256")

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        cta = warp.cta
        pool = cta.registers
        if not cta.cluster.machine.config.moves_registers:
            return None
        if kind == "dec":
            pool.decrease(warp.index, count)
            return None
        if pool.increase(warp.index, count):
            return None
        return Waiting(f"setmaxnreg.inc to {count} registers a thread", pool)

    return execute


def most_asked(instructions: Iterable) -> int:
    """The most registers that a setmaxnreg.inc of a kernel requests, 0 without one."""
    return max((
        i.operands[0].value for i in instructions if i.name.startswith("setmaxnreg.inc.")
    ), default=0)  # fmt: skip
