"""wgmma: asynchronous matrix products of a warpgroup (sm_90a).

PTX ISA 9.3, "Asynchronous Warpgroup Level Matrix Instructions". Each warp of the warpgroup issues
wgmma.mma_async. It takes effect behind its commit_group, when the schedule chooses, and only
wait_group tells of its completion: until then its registers and shared memory are read and its
accumulator is written (`warpgroup`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sm100_sim.errors import SimulationError
from sm100_sim.state.warp import ALL_LANES, predicate_reader, reader, vector_reader, vector_writer

from ..columns import Effect, Event, NativeForm, Recorded, Rule, Ties
from ..table import machine_op, split_modifiers, unknown
from .descriptors import decode_warpgroup_matrix
from .warpgroup import Form, Product, Site, warpgroup_of

_BYTE_FLOATS, _INTEGERS = ("e4m3", "e5m2"), ("s8", "u8")
#: Types of A -> (types of B that go with it, types of D).
_TYPES = {
    "f16": (("f16",), ("f16", "f32")),
    "bf16": (("bf16",), ("f32",)),
    "tf32": (("tf32",), ("f32",)),
    **dict.fromkeys(_BYTE_FLOATS, (_BYTE_FLOATS, ("f16", "f32"))),
    **dict.fromkeys(_INTEGERS, (_INTEGERS, ("s32",))),
}
#: N of integer products; all others take every multiple of 8.
_INTEGER_N = (8, 16, 24, *range(32, 257, 16))
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


def form_of(instruction) -> Form:
    """The form that modifiers and immediates name."""
    if "sp" in instruction.modifiers:
        raise unknown(instruction, "sparse products are not modelled")
    shape = instruction.modifiers[2:3]
    saturates = ("satfinite", "") if "s32" in instruction.modifiers else ("",)
    _, _, _, saturate, d_type, a_type, b_type = split_modifiers(
        instruction, ("sync",), ("aligned",), shape, saturates, ("f32", "f16", "s32"),
        tuple(_TYPES), (*_TYPES,)
    )  # fmt: skip
    b_types, d_types = _TYPES[a_type]
    if b_type not in b_types or d_type not in d_types:
        raise unknown(
            instruction,
            f"types {d_type}, {a_type}, {b_type}; with A of type {a_type}, "
            f"B is {' or '.join(b_types)}, D {' or '.join(d_types)}",
        )
    match = _SHAPE.fullmatch(shape[0])
    n, k = (int(match[1]), int(match[2])) if match else (0, 0)
    a_in_registers = instruction.operands[1].kind == "vec"
    signs, majors = _immediates(instruction, a_type, a_in_registers)
    form = Form(
        n, d_type, a_type, b_type, a_in_registers, signs[0], signs[1], majors[0], majors[1],
        bool(saturate),
    )  # fmt: skip
    allowed = _INTEGER_N if d_type == "s32" else range(8, 257, 8)
    if n not in allowed or k != form.k:
        raise unknown(
            instruction,
            f"shape {shape[0]}; for these types it is m64nNk{form.k} with N "
            f"in {', '.join(map(str, allowed))}",
        )
    return form


def _immediates(instruction, a_type: str, a_in_registers: bool) -> tuple[list[bool], list[bool]]:
    """Return (negate A and B), (transpose A and B) of the immediates behind scale-d."""
    rest = list(instruction.operands[4:])
    wide = a_type in ("f16", "bf16")
    expected = 0 if a_type in _INTEGERS else 2 + (2 - a_in_registers) * wide
    if len(rest) != expected or any(op.kind != "imm" for op in rest):
        raise unknown(
            instruction, f"{len(rest)} operands behind scale-d, expected {expected} immediates"
        )
    signs = [_one_of(instruction, op, {1: False, -1: True}, "imm-scale") for op in rest[:2]]
    majors = [_one_of(instruction, op, {0: False, 1: True}, "imm-trans") for op in rest[2:]]
    if a_in_registers and majors:
        majors.insert(0, False)
    return signs or [False] * 2, majors or [False] * 2


def _one_of(instruction, operand, accepted: dict[int, bool], what: str) -> bool:
    value = (operand.value + (1 << 31)) % (1 << 32) - (1 << 31)
    if value not in accepted:
        raise unknown(instruction, f"{what} {value}; accepted: {', '.join(map(str, accepted))}")
    return accepted[value]


def _descriptor(operand) -> Callable:
    """Accessor of a matrix descriptor, which all lanes of a warp must have in common."""
    read = reader(operand, 64)
    return lambda warp: _uniform(read(warp).tobytes())


@lru_cache(maxsize=1 << 13)
def _uniform(lanes: bytes) -> int:
    """The valid matrix descriptor that 32 lanes have."""
    first = int.from_bytes(lanes[:8], sys.byteorder)
    if lanes != 32 * lanes[:8]:
        raise SimulationError(
            f"wgmma: lanes of a warp have different matrix descriptors, the first {first:#x}"
        )
    decode_warpgroup_matrix(first)
    return first


def _whole_warp(instruction, lanes: int) -> None:
    if lanes != ALL_LANES:
        raise SimulationError(
            f"{instruction.opcode} executed by lanes {lanes:#010x} of a warp; all threads of a "
            "warpgroup execute it together"
        )


@machine_op(
    "wgmma.mma_async",
    aligned=True,
    rule=Rule.WARPGROUP_MMA,
    trace=Recorded.ENTRY,
    event=Event.WARPGROUP_MMA,
    effect=Effect.WARPGROUP_MMA,
    ties=Ties.NEVER,
    native=NativeForm.WARPGROUP_MMA,
)
def bind_mma(instruction, kernel):
    """wgmma.mma_async.sync.aligned.shape{.satfinite}.dtype.atype.btype d, a|a-desc, b-desc, scale-d
    {, imm-scale-a, imm-scale-b{, imm-trans-a}, imm-trans-b}."""
    if len(instruction.operands) < 4:
        raise unknown(instruction, "operands of wgmma.mma_async")
    form = form_of(instruction)
    d_op, a_op, b_op, scale_op = instruction.operands[:4]
    registers = tuple(item.register for item in d_op.items)
    if d_op.kind != "vec" or len(registers) != form.accumulator_registers or None in registers:
        raise unknown(
            instruction,
            f"D has {len(registers)} registers; n{form.n} of type "
            f"{form.d_type} takes {form.accumulator_registers}",
        )
    if len(set(registers)) != len(registers):
        raise unknown(instruction, "a register stands twice in D")
    if form.a_in_registers and len(a_op.items) != 4:
        raise unknown(instruction, f"A has {len(a_op.items)} registers, expected 4")
    site = Site(
        instruction, form, registers, vector_reader(a_op) if form.a_in_registers else None,
        vector_reader(d_op), vector_writer(d_op),
    )  # fmt: skip
    read_a = None if form.a_in_registers else _descriptor(a_op)
    read_b, scale = _descriptor(b_op), predicate_reader(scale_op)

    def execute(warp, lanes: int) -> None:
        _whole_warp(instruction, lanes)
        accumulate = scale(warp)
        if accumulate not in (0, ALL_LANES):
            raise SimulationError(
                f"wgmma.mma_async: scale-d holds in lanes {accumulate:#010x} of warp "
                f"{warp.index}; it is one for the whole warpgroup"
            )
        a = 0 if read_a is None else read_a(warp)
        product = Product(site, a, read_b(warp), accumulate != 0)
        warpgroup_of(warp).issue(warp, product)

    known: Any = execute
    known.site = site
    return execute


@machine_op(
    "wgmma.fence",
    aligned=True,
    rule=Rule.WARPGROUP_FENCE,
    trace=Recorded.ENTRY,
    event=Event.WARPGROUP_FENCE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.ORDER,
)
def bind_fence(instruction, kernel):
    """wgmma.fence.sync.aligned: an ordering rule of registers, without effect on the state."""
    split_modifiers(instruction, ("sync",), ("aligned",))
    return lambda warp, lanes: None


@machine_op(
    "wgmma.commit_group",
    aligned=True,
    rule=Rule.COMMIT_WARPGROUP,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
)
def bind_commit(instruction, kernel):
    """wgmma.commit_group.sync.aligned."""
    split_modifiers(instruction, ("sync",), ("aligned",))

    def execute(warp, lanes: int) -> None:
        _whole_warp(instruction, lanes)
        warpgroup_of(warp).commit(warp, instruction)

    return execute


@machine_op(
    "wgmma.wait_group",
    aligned=True,
    rule=Rule.WAIT_WARPGROUP,
    trace=Recorded.ENTRY,
    event=Event.WARPGROUP_WAIT,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
)
def bind_wait(instruction, kernel):
    """wgmma.wait_group.sync.aligned N."""
    split_modifiers(instruction, ("sync",), ("aligned",))
    (pending,) = instruction.operands
    if pending.kind != "imm" or pending.value < 0:
        raise unknown(instruction, "the number of groups is an immediate from 0 on")

    def execute(warp, lanes: int):
        _whole_warp(instruction, lanes)
        return warpgroup_of(warp).wait(warp, pending.value)

    return execute
