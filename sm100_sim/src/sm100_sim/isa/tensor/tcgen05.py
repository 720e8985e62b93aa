"""tcgen05: TMEM allocation, fences, commit and mma.

PTX ISA 9.3, "TensorCore 5th generation instructions". mma and commit of one CTA (cta_group::1) or
CTA pair (cta_group::2) go to one in-order queue of the machine. Consecutive instructions of one
accumulator chain are collected at issue and submitted as one operation, when the chain ends: at an
mma that does not continue it, a commit or a fence::before_thread_sync of the same warp. So what is
joined depends on program order only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sm100_sim.errors import (
    MemoryFault,
    Misaligned,
    SimulationError,
    TmemError,
    UnknownInstruction,
)
from sm100_sim.state.events import Waiting
from sm100_sim.state.tmem import LANES
from sm100_sim.state.warp import predicate_reader, uniform
from sm100_sim.targets import limits_of

from ..columns import Effect, Event, NativeForm, Recorded, Rule, Ties
from ..shared import shared_address, submit
from ..table import effect_of, machine_op, unknown
from . import tensor_core
from .descriptors import (
    KINDS,
    LONG_K_BYTES,
    InstructionDescriptor,
    check_operand,
    decode_instruction,
    decode_matrix,
    issued_matrix,
)
from .tensor_core import Mma
from .zero_columns import source_columns

_GROUPS = {"cta_group::1": 1, "cta_group::2": 2}


def _group(instruction, *rest: str) -> int:
    """The .cta_group of an instruction whose modifiers are cta_group and then exactly `rest`."""
    modifiers = instruction.modifiers
    if not modifiers or modifiers[0] not in _GROUPS or modifiers[1:] != rest:
        raise unknown(instruction, f"expected .cta_group::1 or ::2{''.join('.' + r for r in rest)}")
    return _GROUPS[modifiers[0]]


def groups(instruction) -> tuple[int, list[str]]:
    """Return (.cta_group, the other modifiers) of an instruction; their order is free."""
    given = [m for m in instruction.modifiers if m in _GROUPS]
    if len(given) != 1:
        raise unknown(instruction, "expected .cta_group::1 or ::2")
    return _GROUPS[given[0]], [m for m in instruction.modifiers if m not in _GROUPS]


def _allocation(instruction) -> tuple[bool, int]:
    """Return (.exclusive, .cta_group) of tcgen05.alloc or tcgen05.dealloc."""
    modifiers = [m for m in instruction.modifiers if m != "shared::cta"]
    exclusive = modifiers[:1] == ["exclusive"]
    group, *rest = modifiers[exclusive:] or [""]
    if group not in _GROUPS or rest != ["sync", "aligned", "b32"]:
        raise unknown(instruction, "expected {.exclusive}.cta_group.sync.aligned{.shared::cta}.b32")
    return exclusive, _GROUPS[group]


def matrix_reader(instruction, operand, kernel) -> Callable[[Any, int], int]:
    """Return reader(warp, lanes) of a SMEM matrix descriptor, as `decode_matrix` takes it.

    One whose version cuts an address is a finding of the machine: a GPU reads what lies there,
    without a fault (`descriptors`, NOTE [descriptor version]).
    """
    read, bits = uniform(operand, 64), limits_of(kernel.target).address_bits
    source = f", {instruction.source[0]}:{instruction.source[1]}" if instruction.source else ""

    def reader(warp, lanes: int) -> int:
        raw = read(warp, lanes)
        issued, is_cut = issued_matrix(raw, bits)
        if is_cut:
            warp.cta.cluster.machine.finding(
                f"{instruction.opcode} (PTX line {instruction.line}{source}): SMEM matrix "
                f"descriptor {raw:#018x} has version 0 (bits 46-48), whose addresses have 14 bits: "
                "what lies beyond 256 KiB of shared memory is read 256 KiB below; make it with "
                "version 1"
            )
        return issued

    return reader


def check_groups(kernel) -> None:
    """Raise TmemError for a kernel with instructions of both values of .cta_group.

    PTX ISA 9.7.16.5: all tcgen05 instructions of a kernel have the same one; ptxas refuses others.
    """
    first: dict[str, Any] = {}
    for instruction in kernel.instructions:
        if instruction.opcode.startswith("tcgen05."):
            for modifier in _GROUPS.keys() & instruction.modifiers:
                first.setdefault(modifier, instruction)
    if len(first) > 1:
        (one, here), (other, there) = first.items()
        raise TmemError(
            f"kernel {kernel.name} has {one} ({here.name}, line {here.line}) and {other} "
            f"({there.name}, line {there.line}); accepted: one cta_group in all tcgen05 "
            "instructions of a kernel",
            instruction=there,
        )


def participants(cta, group: int) -> tuple:
    """The CTAs that an instruction of `group` works on, the even one of a pair first."""
    if group == 1:
        return (cta,)
    if cta.peer is None:
        raise SimulationError(
            f"cta_group::2 in a cluster of {len(cta.cluster.ctas)} CTAs: CTA rank {cta.rank} has "
            "no peer"
        )
    return (cta, cta.peer) if cta.rank % 2 == 0 else (cta.peer, cta)


def operands_of(cta, group: int) -> tuple:
    """Return the operands of an instruction that reaches into the memory of each CTA; none may have
    exited."""
    ctas = participants(cta, group)
    for each in ctas:
        each.require_present("an instruction with cta_group::2 reaches into it")
    return ctas


def queue_of(ctas: tuple) -> tuple:
    """Key of the in-order queue of a CTA or pair; both groups of one CTA pair share it."""
    return ("tcgen05", ctas[0].cluster.id, ctas[0].rank // 2)


# ---------------------------------------------------------------- allocation and fences


@machine_op(
    "tcgen05.alloc",
    aligned=True,
    rule=Rule.ALLOCATE,
    trace=Recorded.ENTRY,
    event=Event.TMEM_ALLOC,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_alloc(instruction, kernel):
    """tcgen05.alloc{.exclusive}.cta_group.sync.aligned{.shared::cta}.b32 [dst], nCols."""
    wide = "shared::cta" not in instruction.modifiers
    exclusive, group = _allocation(instruction)
    target = shared_address(instruction.operands[0], wide)
    columns = uniform(instruction.operands[1], 32)

    def execute(warp, lanes: int):
        cta = warp.cta
        count = columns(warp, lanes)
        first = cta.tmem.allocate(count, group, exclusive)
        if first is None:
            return Waiting(f"{count} free columns of TMEM", cta.tmem)
        _store_address(cta, target(warp, lanes), first)
        return None

    return execute


def _store_address(cta, shared: int, value: int) -> None:
    """The 32-bit store of tcgen05.alloc to the CTA's own shared memory."""
    rank, offset = shared >> 24, shared & 0xFFFFFF
    if rank != cta.rank or offset + 4 > cta.smem.size:
        raise MemoryFault(
            f"tcgen05.alloc stores its result at offset {offset} of CTA rank {rank}; it must lie "
            f"in the {cta.smem.size} bytes of its own CTA, rank {cta.rank}"
        )
    if offset % 4:
        raise Misaligned(f"tcgen05.alloc stores its result at offset {offset}, not 4-byte aligned")
    cta.smem[offset : offset + 4].view(np.uint32)[0] = value


@machine_op(
    "tcgen05.dealloc",
    aligned=True,
    rule=Rule.DEALLOCATE,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_dealloc(instruction, kernel):
    """tcgen05.dealloc{.exclusive}.cta_group.sync.aligned.b32 taddr, nCols."""
    exclusive, group = _allocation(instruction)
    address, columns = (uniform(operand, 32) for operand in instruction.operands)

    def execute(warp, lanes: int) -> None:
        cta = warp.cta
        cta.tmem.deallocate(address(warp, lanes), columns(warp, lanes), group, exclusive)
        cta.cluster.machine.wake(cta.tmem)

    return execute


@machine_op(
    "tcgen05.relinquish_alloc_permit",
    aligned=True,
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_relinquish(instruction, kernel):
    """tcgen05.relinquish_alloc_permit.cta_group.sync.aligned."""
    group = _group(instruction, "sync", "aligned")
    return lambda warp, lanes: warp.cta.tmem.relinquish(group)


@machine_op(
    "tcgen05.fence::before_thread_sync",
    rule=Rule.FENCE_BEFORE,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    chain=True,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.FENCE_BEFORE,
)
def bind_fence_before(instruction, kernel):
    """tcgen05.fence::before_thread_sync: the accumulator chain of this warp ends here."""
    if instruction.modifiers:
        raise unknown(instruction, "no modifier is accepted")
    return lambda warp, lanes: end_chain(warp)


@machine_op(
    "tcgen05.fence::after_thread_sync",
    rule=Rule.FENCE_AFTER,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.ORDER,
)
def bind_fence_after(instruction, kernel):
    """tcgen05.fence::after_thread_sync: an ordering rule, without effect on the state."""
    if instruction.modifiers:
        raise unknown(instruction, "no modifier is accepted")
    return lambda warp, lanes: None


# ---------------------------------------------------------------- commit


@machine_op(
    "tcgen05.commit",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.COMMIT,
    effect=Effect.COMMIT,
    chain=True,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.COMMIT,
)
def bind_commit(instruction, kernel):
    """tcgen05.commit.cta_group.mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64."""
    parts = list(instruction.modifiers)
    if len(parts) < 3 or parts[0] not in _GROUPS or parts[1] != "mbarrier::arrive::one":
        raise unknown(instruction, "expected .cta_group.mbarrier::arrive::one...b64")
    group, rest = _GROUPS[parts[0]], parts[2:]
    shared = rest[0] == "shared::cluster"
    multicast = "multicast::cluster" in rest
    expected = ["shared::cluster"] * shared + ["multicast::cluster"] * multicast + ["b64"]
    if rest != expected or len(instruction.operands) != 1 + multicast:
        raise unknown(instruction, "modifiers or operands of tcgen05.commit")
    barrier = shared_address(instruction.operands[0], not shared)
    mask = uniform(instruction.operands[1], 32) if multicast else None
    effect = effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        single_thread(instruction, lanes)
        end_chain(warp)
        cluster = warp.cta.cluster
        address = barrier(warp, lanes)
        ranks = mask(warp, lanes) & 0xFFFF if mask else 1 << (address >> 24)
        if not ranks or ranks >> len(cluster.ctas):
            raise SimulationError(
                f"tcgen05.commit multicasts to CTA mask {ranks:#06x}; the cluster has "
                f"{len(cluster.ctas)} CTAs"
            )
        offset = address & 0xFFFFFF
        targets = [rank << 24 | offset for rank in range(len(cluster.ctas)) if ranks >> rank & 1]

        def perform() -> None:
            for target in targets:
                cluster.mbarrier(target).arrive(1)

        queue = queue_of(participants(warp.cta, group))
        submit(warp, instruction, effect, perform, queue, commits=targets)

    return execute


def single_thread(instruction, lanes: int) -> None:
    """Refuse an instruction that several lanes of a warp execute at once."""
    if lanes & lanes - 1:
        raise SimulationError(
            f"{instruction.opcode} executed by {lanes.bit_count()} lanes of a warp: one thread "
            "issues it; elect one"
        )


# ---------------------------------------------------------------- mma


def end_chain(warp) -> None:
    """Submit the accumulator chain that `warp` has been issuing, if there is one."""
    chain = warp.cta.tmem.open_chains.pop(warp.index, None)
    if chain:
        instruction, run = chain
        queue = queue_of(run[0].ctas)
        submit(
            warp,
            instruction,
            effect_of(instruction),
            lambda: tensor_core.execute(run),
            queue,
            mmas=run,
        )


def _issue(warp, instruction, mma: Mma) -> None:
    chains = warp.cta.tmem.open_chains
    chain = chains.get(warp.index)
    if chain and mma.continues(chain[1][-1]):
        chain[1].append(mma)
        return
    end_chain(warp)
    chains[warp.index] = (instruction, [mma])


@dataclass(frozen=True, eq=False)
class _Form:
    """The static part of a tcgen05.mma."""

    group: int
    kind: str
    block: int = 0
    ws: bool = False
    #: The scale vector size is named by its block, .block16 or .block32.
    by_block: bool = False


#: Scale factors for each row and instruction, by modifier; block sizes follow from K.
_SCALE_VECTORS = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}


_HINTS = {f"collector::{which}::{use}" for which in ("a", "b0", "b1", "b2", "b3")
          for use in ("fill", "use", "lastuse", "discard")}  # fmt: skip


def _mma_form(instruction) -> _Form:
    """Parse `{.ws}.cta_group.kind{.block_scale{.scale_vec}}{.collector::a::use}`; collector hints
    have no functional effect."""
    modifiers = list(instruction.modifiers)
    if "sp" in modifiers:
        raise unknown(instruction, "sparse MMAs are not modelled")
    ws = modifiers[:1] == ["ws"]
    rest = modifiers[ws:]
    if len(rest) < 2 or rest[0] not in _GROUPS:
        raise unknown(instruction, "expected tcgen05.mma.cta_group.kind")
    group, kind = _GROUPS[rest[0]], rest[1].removeprefix("kind::")
    if kind not in KINDS or kind == rest[1]:
        raise unknown(instruction, f"modelled kinds are {', '.join('kind::' + k for k in KINDS)}")
    if ws and (group == 2 or KINDS[kind].block_scaled):
        raise unknown(instruction, "tcgen05.mma.ws exists for cta_group::1 without .block_scale")
    rest, block, by_block = rest[2:], 0, False
    if KINDS[kind].block_scaled:
        if rest[:1] != ["block_scale"]:
            raise unknown(instruction, f"kind::{kind} needs .block_scale")
        counts = _SCALE_VECTORS[kind]
        vector = rest.pop(1) if rest[1:] and rest[1] in counts else ""
        if vector not in counts:
            raise unknown(instruction, f"scale vector size; accepted: {', '.join(counts)}")
        block, by_block = KINDS[kind].k // counts[vector], vector.startswith("block")
        rest.pop(0)
    if "ashift" in rest:
        raise unknown(instruction, "shifted rows of A (.ashift) are not modelled")
    if not set(rest) <= _HINTS:
        raise unknown(instruction, "modifier of tcgen05.mma")
    return _Form(group, kind, block, ws, by_block)


def _lane_mask(words: list[int], group: int) -> tuple[tuple[np.ndarray, ...] | None, int]:
    """disable-output-lane registers (lowest lanes first) as bool (128,) per CTA, and as one int."""
    bits = sum(word << 32 * i for i, word in enumerate(words))
    if not bits:
        return None, 0
    lanes = np.array([bits >> i & 1 for i in range(LANES * group)], bool)
    return tuple(lanes.reshape(group, LANES)), bits


@machine_op(
    "tcgen05.mma",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.MMA,
    effect=Effect.MMA,
    chain=True,
    ties=Ties.NEVER,
    native=NativeForm.MMA,
)
def bind_mma(instruction, kernel):
    """tcgen05.mma{.ws}.cta_group.kind [d], a|[a], b, idesc{, {mask...}}, enable_d{, scale_d}; with
    .ws: enable_d{, zero-column mask}; of a block-scaled kind: [d], a|[a], b, idesc, [scales of A],
    [scales of B], enable_d."""
    form = _mma_form(instruction)
    d_op, a_op, b_op, idesc_op, *rest = instruction.operands
    if form.ws and len(rest) > 2:
        raise unknown(instruction, "operands of tcgen05.mma.ws")
    zeros = uniform(rest.pop(), 64) if form.ws and len(rest) == 2 else None
    scales = [uniform(rest.pop(0), 32) for _ in range(2)] if form.block else []
    masks = [uniform(word, 32) for word in rest.pop(0).items] if rest[0].kind == "vec" else []
    if len(masks) not in (0, 4 * form.group) or len(rest) not in (1, 2):
        raise unknown(instruction, "operands of tcgen05.mma")
    a_in_tmem = a_op.kind == "mem"
    d, idesc = uniform(d_op, 32), uniform(idesc_op, 32)
    b = matrix_reader(instruction, b_op, kernel)
    a = uniform(a_op, 32) if a_in_tmem else matrix_reader(instruction, a_op, kernel)
    by_lane = rest[0].kind == "pred"
    enable: Any = predicate_reader(rest[0]) if by_lane else uniform(rest[0], 32)
    scale = rest[1].value if len(rest) == 2 else 0
    if not 0 <= scale <= 15:
        raise unknown(instruction, "scale-input-d must be 0 to 15")

    def execute(warp, lanes: int) -> None:
        single_thread(instruction, lanes)
        descriptor = _checked_descriptor(idesc(warp, lanes), form, a_in_tmem)
        a_value, b_value = a(warp, lanes), b(warp, lanes)
        check_operand(decode_matrix(b_value), descriptor.k_bytes)
        if not a_in_tmem:
            check_operand(decode_matrix(a_value), descriptor.k_bytes)
        disabled, bits = None, 0
        if masks:
            disabled, bits = _lane_mask([word(warp, lanes) for word in masks], form.group)
        accumulate = (enable(warp) & lanes if by_lane else enable(warp, lanes)) != 0
        ctas = operands_of(warp.cta, form.group)
        d_value = d(warp, lanes)
        mma = Mma(
            ctas,
            descriptor,
            d_value,
            a_value,
            b_value,
            a_in_tmem,
            accumulate,
            scale,
            disabled,
            bits,
            *(read(warp, lanes) for read in scales),
        )
        if zeros:
            mma.mask = zeros(warp, lanes)
            source_columns(mma.mask, descriptor.m, descriptor.n, descriptor.raw >> 30)
        _issue(warp, instruction, mma)

    return execute


@lru_cache(maxsize=1024)
def _checked_descriptor(raw: int, form: _Form, a_in_tmem: bool) -> InstructionDescriptor:
    """The decoded instruction descriptor; refuses what can be refused at issue."""
    descriptor = decode_instruction(raw, form.kind, form.group, form.ws, form.block)
    if descriptor.k_bytes == LONG_K_BYTES and (a_in_tmem or not form.by_block):
        raise UnknownInstruction(
            f"tcgen05.mma.kind::{form.kind} with K 96; modelled are .block16 and .block32, with A "
            "in shared memory"
        )
    if a_in_tmem and descriptor.a_mn_major:
        raise TmemError("tcgen05.mma with A in TMEM and transpose-A set: A from TMEM is K-major")
    if a_in_tmem and form.group == 2 and descriptor.n % 32:
        raise TmemError(
            f"tcgen05.mma.cta_group::2 with A in TMEM: N {descriptor.n}, accepted 32..256 in steps "
            "of 32; with A in shared memory N goes in steps of 16"
        )
    return descriptor
