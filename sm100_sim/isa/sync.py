"""Synchronisation instructions: mbarrier, named barriers, the cluster barrier, fences.

PTX ISA 9.7.13 (parallel synchronization and communication) and 9.7.20 (miscellaneous).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sm100_sim.barriers import MBarrier
from sm100_sim.errors import BarrierError
from sm100_sim.events import Waiting
from sm100_sim.isa.shared import shared_address
from sm100_sim.isa.table import machine_op, unknown
from sm100_sim.warp import (
    Warp,
    lane_array,
    predicate_reader,
    predicate_writer,
    reader,
    uniform,
    writer,
)

_SHARED = {"shared", "shared::cta", "shared::cluster"}
_SEMANTICS = {"release", "acquire", "relaxed"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}
_MBARRIER_MODIFIERS = _SHARED | _SEMANTICS | _SCOPES | {"b64"}


def _check(instruction, allowed: set[str]) -> None:
    for modifier in instruction.modifiers:
        if modifier not in allowed:
            raise unknown(instruction, f"modifier .{modifier} is not modelled")


def _barrier_address(instruction, operand) -> Callable[[Warp, int], int]:
    names_space = any(modifier in _SHARED for modifier in instruction.modifiers)
    return shared_address(operand, generic=not names_space)


# ---------------------------------------------------------------- mbarrier


def _per_barrier(instruction, operand) -> Callable[[Warp, int], list[tuple[MBarrier, int]]]:
    """Accessor of the barriers the lanes name: (barrier, mask of lanes), usually one."""
    base = operand.base if operand.kind == "mem" else operand
    one = _barrier_address(instruction, operand)
    if base.kind != "reg":
        return lambda warp, lanes: [(warp.cta.cluster.mbarrier(one(warp, lanes)), lanes)]
    per_lane = reader(base, 64 if base.register.file == "r64" else 32)

    def barriers(warp: Warp, lanes: int) -> list[tuple[MBarrier, int]]:
        if lanes & (lanes - 1) == 0 or _same(per_lane(warp), lanes):
            return [(warp.cta.cluster.mbarrier(one(warp, lanes)), lanes)]
        groups: dict[int, int] = {}
        for lane in range(32):
            if lanes >> lane & 1:
                address = one(warp, 1 << lane)
                groups[address] = groups.get(address, 0) | 1 << lane
        return [(warp.cta.cluster.mbarrier(a), mask) for a, mask in groups.items()]

    return barriers


def _same(values: np.ndarray, lanes: int) -> bool:
    """Whether the lanes hold one value."""
    chosen = values if lanes == 0xFFFFFFFF else values[lane_array(lanes)]
    return bool((chosen == chosen[0]).all())


@machine_op("mbarrier.init")
def bind_init(instruction, kernel):
    """mbarrier.init{.shared{::cta}}.b64 [addr], count."""
    _check(instruction, {"shared", "shared::cta", "b64"})
    address = _barrier_address(instruction, instruction.operands[0])
    count = uniform(instruction.operands[1], 32)
    return lambda warp, lanes: warp.cta.init_mbarrier(address(warp, lanes), count(warp, lanes))


@machine_op("mbarrier.inval")
def bind_inval(instruction, kernel):
    """mbarrier.inval{.shared{::cta}}.b64 [addr]."""
    _check(instruction, {"shared", "shared::cta", "b64"})
    address = _barrier_address(instruction, instruction.operands[0])
    return lambda warp, lanes: warp.cta.invalidate_mbarrier(address(warp, lanes))


def _split_state(instruction):
    """(writer of the state or None, remaining operands)."""
    first, *rest = instruction.operands
    if first.kind == "mem":
        return None, instruction.operands
    return writer(first, 64), tuple(rest)


def _state_token(barrier: MBarrier, phase: int) -> int:
    """The opaque state: the phase number, marked so that a foreign value is noticed."""
    return 0x5A << 56 | phase & 0xFFFFFFFFFFFF


def _phase_of(token: int) -> int:
    if token >> 56 != 0x5A:
        raise BarrierError(f"{token:#x} is not a state that mbarrier.arrive returned")
    return token & 0xFFFFFFFFFFFF


@machine_op("mbarrier.arrive", "mbarrier.arrive_drop", defines=(0,))
def bind_arrive(instruction, kernel):
    """mbarrier.arrive{_drop}{.expect_tx}{.sem}{.scope}{.space}.b64 {state,} [addr]{, count}."""
    modifiers = instruction.modifiers
    expects = modifiers[:1] == ("expect_tx",)
    no_complete = modifiers[:1] == ("noComplete",)
    rest = modifiers[1:] if expects or no_complete else modifiers
    for modifier in rest:
        if modifier not in _MBARRIER_MODIFIERS:
            raise unknown(instruction, f"modifier .{modifier} is not modelled")
    write_state, operands = _split_state(instruction)
    barriers = _per_barrier(instruction, operands[0])
    value = uniform(operands[1], 32) if len(operands) > 1 else None
    if expects and value is None:
        raise unknown(instruction, "expect_tx needs a byte count")
    drop = instruction.opcode.endswith("_drop")

    def execute(warp: Warp, lanes: int) -> None:
        number = value(warp, lanes) if value else 1
        for barrier, mask in barriers(warp, lanes):
            threads = mask.bit_count()
            if expects:
                barrier.expect_tx(number * threads)
            count = threads if expects else number * threads
            if no_complete and barrier.pending - count <= 0:
                raise BarrierError(f"arrive.noComplete would complete; {barrier.describe()}")
            phase = barrier.arrive_drop(count) if drop else barrier.arrive(count)
            if write_state:
                write_state(warp, mask, _state_token(barrier, phase))

    return execute


@machine_op("mbarrier.expect_tx")
def bind_expect_tx(instruction, kernel):
    """mbarrier.expect_tx.relaxed{.scope}{.space}.b64 [addr], bytes."""
    _check(instruction, _MBARRIER_MODIFIERS)
    barriers = _per_barrier(instruction, instruction.operands[0])
    nbytes = uniform(instruction.operands[1], 32)

    def execute(warp: Warp, lanes: int) -> None:
        for barrier, mask in barriers(warp, lanes):
            barrier.expect_tx(nbytes(warp, mask) * mask.bit_count())

    return execute


@machine_op("mbarrier.complete_tx")
def bind_complete_tx(instruction, kernel):
    """mbarrier.complete_tx.relaxed{.scope}{.space}.b64 [addr], bytes."""
    _check(instruction, _MBARRIER_MODIFIERS)
    barriers = _per_barrier(instruction, instruction.operands[0])
    nbytes = uniform(instruction.operands[1], 32)

    def execute(warp: Warp, lanes: int) -> None:
        for barrier, mask in barriers(warp, lanes):
            barrier.complete_tx(nbytes(warp, mask) * mask.bit_count())

    return execute


@machine_op("mbarrier.pending_count", defines=(0,))
def bind_pending_count(instruction, kernel):
    """mbarrier.pending_count.b64 count, state: of the phase the state was taken in."""
    raise unknown(instruction, "the state's pending count is not modelled")


@machine_op("mbarrier.try_wait", "mbarrier.test_wait", defines=(0,))
def bind_wait(instruction, kernel):
    """mbarrier.{try,test}_wait{.parity}{.sem}{.scope}{.space}.b64 p, [addr], state|parity{, ns}.

    Lanes block only in a recognised spin loop (`Instruction.spin`); elsewhere, and in test_wait,
    the answer is given at once.
    """
    modifiers = instruction.modifiers
    by_parity = modifiers[:1] == ("parity",)
    for modifier in modifiers[1:] if by_parity else modifiers:
        if modifier not in _MBARRIER_MODIFIERS:
            raise unknown(instruction, f"modifier .{modifier} is not modelled")
    done_op, barrier_op, phase_op, *_ = instruction.operands
    write = predicate_writer(done_op)
    barriers = _per_barrier(instruction, barrier_op)
    per_lane = None
    if phase_op.kind == "reg":
        per_lane = reader(phase_op, 32 if by_parity else 64)
    phase = uniform(phase_op, 32 if by_parity else 64)
    may_block = instruction.spin and instruction.opcode == "mbarrier.try_wait"
    may_fail = instruction.opcode == "mbarrier.try_wait"

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        groups = barriers(warp, lanes)
        if per_lane is not None and not _same(per_lane(warp), lanes):
            groups = [(barrier, 1 << lane) for barrier, mask in groups for lane in range(32)
                      if mask >> lane & 1]
        done = 0
        for barrier, mask in groups:
            wanted = phase(warp, mask)
            if by_parity:
                complete = barrier.parity_complete(wanted)
            else:
                complete = barrier.phase_complete(_phase_of(wanted))
            if complete:
                done |= mask
            elif may_block and len(groups) == 1:
                text = f"parity {wanted & 1}" if by_parity else "its state's phase"
                return Waiting(f"{text} of {barrier.describe()}", barrier)
        if may_fail and done and warp.cta.cluster.machine.policy.spurious_failure():
            done = 0
        write(warp, lanes, done)
        return None

    return execute


# ---------------------------------------------------------------- named barriers


@machine_op("bar", "barrier", defines=())
def bind_barrier(instruction, kernel):
    """bar|barrier{.cta}.sync|arrive{.aligned} a{, b}: named barriers (9.7.13.1)."""
    modifiers = [m for m in instruction.modifiers if m != "cta"]
    kind = modifiers[0] if modifiers else ""
    if kind not in ("sync", "arrive", "red") or any(m != "aligned" for m in _tail(modifiers)):
        raise unknown(instruction, "modifiers of a named barrier")
    if kind == "red":
        return _bind_reduction(instruction, modifiers)
    number = uniform(instruction.operands[0], 32)
    count = uniform(instruction.operands[1], 32) if len(instruction.operands) > 1 else None
    if kind == "arrive" and count is None:
        raise unknown(instruction, "arrive needs a thread count")

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        barrier = warp.cta.named_barrier(number(warp, lanes))
        expected = count(warp, lanes) if count else warp.cta.threads
        if kind == "arrive":
            barrier.arrive(lanes.bit_count(), expected)
        elif not barrier.sync(warp.index, lanes, expected):
            return Waiting(barrier.describe(), barrier)
        return None

    return execute


def _tail(modifiers: list[str]) -> list[str]:
    """What follows the kind; a reduction's operation and type are parsed on their own."""
    return [] if modifiers[0] == "red" else modifiers[1:]


def _bind_reduction(instruction, modifiers: list[str]):
    """bar.red{.aligned}.op.type d, a{, b}, {!}c (op: and, or on predicates; popc gives u32)."""
    rest = [m for m in modifiers[1:] if m != "aligned"]
    if rest not in (["and", "pred"], ["or", "pred"], ["popc", "u32"]):
        raise unknown(instruction, "modifiers of a barrier reduction")
    target, number_op, *middle, vote_op = instruction.operands
    number, vote = uniform(number_op, 32), predicate_reader(vote_op)
    count = uniform(middle[0], 32) if middle else None
    write = writer(target, 32) if rest[0] == "popc" else predicate_writer(target)

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        barrier = warp.cta.named_barrier(number(warp, lanes))
        expected = count(warp, lanes) if count else warp.cta.threads
        votes = (vote(warp) & lanes).bit_count()
        if not barrier.sync(warp.index, lanes, expected, (votes, lanes.bit_count())):
            return Waiting(barrier.describe(), barrier)
        yes, voters = barrier.results[barrier.generation - 1]
        if rest[0] == "popc":
            write(warp, lanes, yes)
        else:
            holds = yes == voters if rest[0] == "and" else yes > 0
            write(warp, lanes, lanes if holds else 0)
        return None

    return execute


# ---------------------------------------------------------------- cluster barrier


@machine_op("barrier.cluster.arrive")
def bind_cluster_arrive(instruction, kernel):
    """barrier.cluster.arrive{.release|.relaxed}{.aligned}."""
    _check(instruction, {"release", "relaxed", "aligned"})
    return lambda warp, lanes: warp.cta.cluster.barrier.arrive(warp.cta.rank, warp.index, lanes)


@machine_op("barrier.cluster.wait")
def bind_cluster_wait(instruction, kernel):
    """barrier.cluster.wait{.acquire}{.aligned}."""
    _check(instruction, {"acquire", "aligned"})

    def execute(warp: Warp, lanes: int) -> Waiting | None:
        barrier = warp.cta.cluster.barrier
        if barrier.wait(warp.cta.rank, warp.index, lanes):
            return None
        return Waiting(barrier.describe(), barrier)

    return execute


# ---------------------------------------------------------------- fences and the like


_FENCE_MODIFIERS = _SEMANTICS | _SCOPES | _SHARED | {
    "sc", "acq_rel", "proxy", "alias", "async", "async.global", "async.shared", "global",
    "tensormap::generic", "mbarrier_init", "sync_restrict::shared::cta",
    "sync_restrict::shared::cluster", "async::generic", "generic",
}


@machine_op("fence", "membar")
def bind_fence(instruction, kernel):
    """fence, fence.proxy, fence.mbarrier_init, membar: memory is sequentially consistent here,
    so a fence changes no state; which fences were executed matters to the sanitizer alone."""
    _check(instruction, _FENCE_MODIFIERS | {"gl"})
    return lambda warp, lanes: None


@machine_op("setmaxnreg", aligned=True)
def bind_setmaxnreg(instruction, kernel):
    """setmaxnreg.{inc,dec}.sync.aligned.u32 n (9.7.20.5): validated; registers are not scarce."""
    if instruction.modifiers[1:] != ("sync", "aligned", "u32") or instruction.modifiers[
        0
    ] not in ("inc", "dec"):
        raise unknown(instruction, "expected .inc or .dec.sync.aligned.u32")
    count = instruction.operands[0].value
    if count % 8 or not 24 <= count <= 256:
        raise unknown(instruction, "the register count must be a multiple of 8 from 24 to 256")
    return lambda warp, lanes: None


@machine_op("nanosleep")
def bind_nanosleep(instruction, kernel):
    """nanosleep.u32 t: no time passes in a functional simulation."""
    _check(instruction, {"u32"})
    return lambda warp, lanes: None


@machine_op("griddepcontrol")
def bind_griddepcontrol(instruction, kernel):
    """griddepcontrol.{wait,launch_dependents}: earlier launches have always completed here."""
    if instruction.modifiers not in (("wait",), ("launch_dependents",)):
        raise unknown(instruction, "expected .wait or .launch_dependents")
    return lambda warp, lanes: None
