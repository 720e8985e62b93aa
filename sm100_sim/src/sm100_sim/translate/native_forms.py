"""Machine operations that native code does, and what its routines get of each instruction."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from sm100_sim.isa.columns import NativeForm, require_complete
from sm100_sim.isa.table import row_of
from sm100_sim.isa.tensor.tcgen05_data import (
    SHAPES,
    Form,
    form_of,
    fragment_record,
    items_of,
    load_form,
)
from sm100_sim.native.barriers import mbarrier_arrive, mbarrier_wait
from sm100_sim.native.copies import bulk_group, tile_load, tile_store
from sm100_sim.native.fragments import nothing, tensor_load, tensor_store
from sm100_sim.native.language import Native
from sm100_sim.native.layout import DIMENSIONS, Operand, Operation
from sm100_sim.native.loop import count_operation, run_cluster
from sm100_sim.native.operands import CONSTANT, LOW32, PREDICATE, REGISTER32, REGISTER64, SYMBOL
from sm100_sim.native.products import fence_before, tensor_commit, tensor_mma
from sm100_sim.native.warpgroups import warpgroup_mma
from sm100_sim.state.warp import SHARED_WINDOW

#: (routine, operands, form): what `Operation` is made of; then what the form has the address of.
Made = tuple
_FORMS: dict[NativeForm, Callable[[Any], Made | None]] = {}
_MASK64 = (1 << 64) - 1
_SHARED_SPACES = ("shared", "shared::cta", "shared::cluster")


def _form(name: NativeForm) -> Callable:
    def decorate(function: Callable) -> Callable:
        _FORMS[name] = function
        return function

    return decorate


def operation_of(instruction: Any, block: int) -> tuple[Native, Operation] | None:
    """The routine and its argument for the machine operation of a block; None if Python does it."""
    name = row_of(instruction).native
    form = _FORMS[name](instruction) if name is not None else None
    if form is None:
        return None
    routine, operands, numbers, *kept = form
    operation = Operation()
    operation.kept = kept
    for place, operand in enumerate(operands):
        operation.operands[place] = operand
    for place, number in enumerate(numbers):
        operation.form[place] = number
    operation.form[5] = block
    return routine, operation


def exported() -> tuple[Native, ...]:
    """All routines whose addresses are needed."""
    return (
        run_cluster, count_operation, mbarrier_arrive, mbarrier_wait, tensor_load,
        tensor_store, nothing, tensor_mma, tensor_commit, fence_before, tile_load, tile_store,
        bulk_group, warpgroup_mma,
    )  # fmt: skip


# ---------------------------------------------------------------- operands


def value_operand(operand: Any) -> Operand | None:
    """An operand that is a number or, as a bracket, base plus offset. None if native code cannot
    read it."""
    base, offset = operand, 0
    if operand.kind == "mem":
        if operand.items:
            return None
        base, offset = operand.base, operand.value
    if base.kind == "imm" and base.type != "f64":
        return Operand(CONSTANT, 0, base.value + offset & _MASK64)
    if base.kind == "reg" and base.slot >= 0:
        kind = REGISTER64 if base.register.file == "r64" else REGISTER32
        return Operand(kind, base.slot, offset & _MASK64)
    if base.kind == "pred":
        return Operand(PREDICATE, base.slot, 0xFFFFFFFF if base.negated else 0)
    if base.kind == "sym" and base.type == "shared":
        return Operand(SYMBOL, 0, base.value + offset)
    return None


def shared_operand(operand: Any, modifiers: tuple[str, ...]) -> Operand | None:
    """An address in shared memory; without a state space in the modifiers it is generic."""
    found = value_operand(operand)
    if found is not None and found.kind == REGISTER64:
        if any(modifier in _SHARED_SPACES for modifier in modifiers):
            found.kind = LOW32
        else:
            found.value = found.value - SHARED_WINDOW & _MASK64
    return found


def _complete(routine: Native, operands: list, numbers: list[int]) -> Made | None:
    return None if None in operands else (routine, operands, numbers)


# ---------------------------------------------------------------- instructions


@_form(NativeForm.ARRIVE)
def _arrive(instruction: Any) -> Made | None:
    operands, modifiers = list(instruction.operands), instruction.modifiers
    if "noComplete" in modifiers:
        return None
    state = 0
    if operands[0].kind == "reg":
        state = 1 + operands[0].slot
    if operands[0].kind in ("reg", "sink"):
        operands.pop(0)
    count = value_operand(operands[1]) if len(operands) > 1 else Operand(CONSTANT, 0, 1)
    address = shared_operand(operands[0], modifiers)
    own = int("shared" in modifiers or "shared::cta" in modifiers)
    return _complete(mbarrier_arrive, [address, count], [int("expect_tx" in modifiers), state, own])


@_form(NativeForm.WAIT)
def _wait(instruction: Any) -> Made | None:
    done, address, parity, *_ = instruction.operands
    if "parity" not in instruction.modifiers or done.kind != "pred":
        return None
    operands = [shared_operand(address, instruction.modifiers), value_operand(parity)]
    return _complete(mbarrier_wait, operands, [done.slot, int(instruction.spin)])


def _fragment(routine: Native, parsed: Form, address: Any, registers: Any) -> Made | None:
    if any(item.kind == "reg" and item.register.file != "r32" for item in items_of(registers)):
        return None
    record = fragment_record(parsed, registers)
    numbers = [ctypes.addressof(record), *_touched(parsed)]
    made = _complete(routine, [value_operand(address)], numbers)
    return made and (*made, record)


def _touched(parsed: Form) -> list[int]:
    """Return (columns, lanes, first column of a second run or 0) of an access to tensor memory."""
    _, *others = parsed.runs
    return [parsed.columns, SHAPES[parsed.shape].lanes, others[0][0] if others else 0]


def recorded_fragment(parsed: Form) -> Operation:
    """Return the record of an access to tensor memory, whether native code or Python makes it."""
    operation = Operation()
    for place, number in enumerate(_touched(parsed), 1):
        operation.form[place] = number
    return operation


@_form(NativeForm.TENSOR_LOAD)
def _load(instruction: Any) -> Made | None:
    parsed, address = load_form(instruction)
    return _fragment(tensor_load, parsed, address, instruction.operands[0])


@_form(NativeForm.TENSOR_STORE)
def _store(instruction: Any) -> Made | None:
    address, *split, source = instruction.operands
    parsed = form_of(instruction, "unpack::16b", split[0].value if split else None)
    return _fragment(tensor_store, parsed, address, source)


@_form(NativeForm.ORDER)
def _order(instruction: Any) -> Made | None:
    return nothing, [], []


@_form(NativeForm.FENCE_BEFORE)
def _fence_before(instruction: Any) -> Made | None:
    return fence_before, [], []


@_form(NativeForm.MMA)
def _mma(instruction: Any) -> Made | None:
    group, kind, *hints = instruction.modifiers
    if kind != "kind::f16" or len(instruction.operands) != 5:
        return None
    if not all(hint.startswith("collector::a::") for hint in hints):
        return None
    d, a, *rest = instruction.operands
    operands = [value_operand(operand) for operand in (d, a, *rest)]
    return _complete(tensor_mma, operands, [int(group[-1]), int(a.kind == "mem")])


@_form(NativeForm.WARPGROUP_MMA)
def _warpgroup_mma(instruction: Any) -> Made | None:
    _, a, b, scale = instruction.operands[:4]
    in_registers = a.kind == "vec"
    first = Operand(CONSTANT, 0, 0) if in_registers else value_operand(a)
    operands = [first, value_operand(b), value_operand(scale)]
    return _complete(warpgroup_mma, operands, [int(in_registers)])


@_form(NativeForm.COMMIT)
def _commit(instruction: Any) -> Made | None:
    address, *mask = instruction.operands
    operands = [shared_operand(address, instruction.modifiers), *map(value_operand, mask)]
    return _complete(tensor_commit, operands, [len(mask)])


def _window_operand(operand: Any) -> Operand | None:
    """A shared address, whatever the width of its register."""
    return shared_operand(operand, ("shared",))


def _tile_operands(operand: Any) -> list[Operand | None]:
    """[tensorMap, {coordinates}]: the descriptor's address and as many operands as dimensions."""
    if len(operand.items) != 1 or operand.items[0].kind != "vec":
        return [None]
    pointer = value_operand(operand.base)
    if pointer is not None:
        pointer.value = pointer.value + operand.value & _MASK64
    found = [pointer, *map(value_operand, operand.items[0].items)]
    return found + [Operand()] * (1 + DIMENSIONS - len(found))


@_form(NativeForm.TILE)
def _tile(instruction: Any) -> Made | None:
    rank, target, source, *rest = instruction.modifiers
    hint = "L2::cache_hint" in rest
    if (target, source) == ("global", "shared::cta"):
        if not set(rest) <= {"tile", "bulk_group", "L2::cache_hint"}:
            return None
        tensor, data, *_ = instruction.operands
        operands = [_window_operand(data), *_tile_operands(tensor)]
        return _complete(tile_store, operands, [int(rank[0])])
    known = {
        "tile",
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
        "cta_group::1",
        "cta_group::2",
        "L2::cache_hint",
    }
    data, tensor, barrier, *extra = instruction.operands
    multicast = "multicast::cluster" in rest
    if source != "global" or not set(rest) <= known or len(extra) != multicast + hint:
        return None
    operands = [_window_operand(data), _window_operand(barrier), *_tile_operands(tensor)]
    if multicast:
        operands.append(value_operand(extra[0]))
    group = 2 if "cta_group::2" in rest else 0
    return _complete(tile_load, operands, [int(rank[0]), int(multicast), group])


@_form(NativeForm.BULK_GROUP)
def _bulk_group(instruction: Any) -> Made | None:
    return bulk_group, [], []


require_complete("translate.native_forms", NativeForm, _FORMS)
