"""TMA: tensor copies, bulk copies, their reductions, prefetches and bulk groups.

PTX ISA 9.3, "Non-tensor copies", "Tensor copies", "cp.async.bulk.commit_group / wait_group". A copy
reads its operands at issue and becomes an AsyncOp; performing it moves the data and then signals:
the bytes of the whole box (clipped or not) on an mbarrier, or the bulk group of the thread.

A warp that executes a copy without electing a thread issues it once if the operands are the same in
all lanes, as the hardware does (its TMA instructions take uniform registers), else once per lane.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sm100_sim.errors import BarrierError, MemoryFault, Misaligned, SimulationError
from sm100_sim.state.events import AsyncOp, Waiting
from sm100_sim.state.tensormap import PADDED, TENSORMAP_BYTES, TensorMap, decode
from sm100_sim.state.warp import address, reader, uniform

from ..columns import ByModifier, Effect, Event, NativeForm, Recorded, Rule, Ties
from ..shared import require_cluster, shared_address, submit
from ..table import effect_of, machine_op, unknown
from . import tiles

_HINTS = {"L2::cache_hint"}
#: Mode of loads of rows that need not follow each other, and how many.
_GATHER, _GATHERED_ROWS = "tile::gather4", 4
_OFFSET = 0xFFFFFF
#: Elements of a dimension (measured on an H200).
MAX_SIZE = 1 << 31


# ---------------------------------------------------------------- operands


def _registers(operands) -> Iterator[Any]:
    for operand in operands:
        if operand.kind == "reg":
            yield operand
        if operand.base is not None:
            yield from _registers((operand.base,))
        yield from _registers(operand.items)


def _issues(instruction) -> Callable[[Any, int], list[int]]:
    """(warp, lanes) -> one-lane masks, one for each copy that the warp issues."""
    reads = [
        reader(operand, 64 if operand.register.file == "r64" else 32)
        for operand in _registers(instruction.operands)
    ]

    def split(warp, lanes: int) -> list[int]:
        lowest = lanes & -lanes
        if lowest == lanes:
            return [lanes]
        active = [lane for lane in range(32) if lanes >> lane & 1]
        if all(
            (row := read(warp)[active]).tobytes() == row[:1].tobytes() * len(active)
            for read in reads
        ):
            return [lowest]
        return [1 << lane for lane in active]

    return split


def read_descriptor(machine, pointer: int) -> TensorMap:
    """The TMA descriptor at a generic address: kernel parameter or global memory."""
    if pointer % 64:
        raise Misaligned(f"TMA descriptor at {pointer:#x}, which is not 64-byte aligned")
    machine.memory.check(pointer, TENSORMAP_BYTES, False, "TMA descriptor")
    return decode(ctypes.string_at(pointer, TENSORMAP_BYTES))


def _tensor_operand(instruction, operand) -> Callable[[Any, int], tuple[int, tuple[int, ...]]]:
    """[tensorMap, {coordinates}] -> (descriptor address, signed coordinates, dimension 0 first).

    With .tile::gather4 these are a column and four rows.
    """
    rank = instruction.modifiers[0]
    count = rank[:-1]
    if _GATHER in instruction.modifiers:
        count = str(1 + _GATHERED_ROWS) if rank == "2d" else ""
    pointer = address(operand, 64)
    coordinates = operand.items[0] if operand.items else None
    values = coordinates.items if coordinates is not None and coordinates.kind == "vec" else ()
    if len(rank) != 2 or rank[1] != "d" or rank[0] not in "12345" or str(len(values)) != count:
        raise unknown(instruction, "dimension and number of coordinates of a tensor copy")
    reads = [uniform(value, 32) for value in values]

    def evaluate(warp, lanes: int) -> tuple[int, tuple[int, ...]]:
        unsigned = (read(warp, lanes) for read in reads)
        return pointer(warp, lanes), tuple((v ^ 1 << 31) - (1 << 31) for v in unsigned)

    return evaluate


def _tensor_map(
    machine, pointer: int, coordinates: tuple[int, ...]
) -> tuple[TensorMap, tuple[int, ...]]:
    """Descriptor and coordinates of a copy; packed elements are counted in bytes."""
    tensor_map = read_descriptor(machine, pointer)
    if tensor_map.rank != len(coordinates):
        raise SimulationError(
            f"a {len(coordinates)}d copy with a descriptor of rank {tensor_map.rank}"
        )
    if max(tensor_map.sizes) > MAX_SIZE:
        raise SimulationError(
            f"a tensor copy of a tensor of sizes {tensor_map.sizes}; accepted are up to {MAX_SIZE} "
            "(the driver encodes more; the hardware ends the kernel with an illegal instruction)"
        )
    if coordinates[0] * tensor_map.element_bits % 128:
        raise Misaligned(
            f"a tensor copy starts at coordinate {coordinates[0]} of rows of "
            f"{tensor_map.element_bits}-bit elements; it must start at a multiple of 16 bytes "
            "(the hardware ends the kernel with an illegal instruction)"
        )
    if tensor_map.dtype == "b4x16":
        return tensor_map.packed, (coordinates[0] // 2, *coordinates[1:])
    return tensor_map, coordinates


@dataclass(slots=True)
class _Completion:
    """Modifiers of a copy that completes on an mbarrier."""

    group: int = 0
    multicast: bool = False
    hint: bool = False


def _completion(instruction, modifiers) -> _Completion:
    """Parse `.mbarrier::complete_tx::bytes`, multicast, cta_group and cache hint in any order."""
    rest = list(modifiers)
    found = _Completion()
    if "mbarrier::complete_tx::bytes" not in rest:
        raise unknown(instruction, "expected .mbarrier::complete_tx::bytes")
    rest.remove("mbarrier::complete_tx::bytes")
    for modifier in rest:
        if modifier in ("cta_group::1", "cta_group::2"):
            found.group = int(modifier[-1])
        elif modifier == "multicast::cluster":
            found.multicast = True
        elif modifier in _HINTS:
            found.hint = True
        else:
            raise unknown(instruction, f"modifier .{modifier} of a bulk copy")
    return found


def _destinations(
    cluster, target: int, barrier: int, mask: int | None, group: int
) -> list[tuple[Any, int, int]]:
    """Return (CTA, SMEM offset, barrier address) of each destination of a load.

    Without multicast the barrier is in the destination CTA, or with cta_group::2 also in its peer.
    With multicast each destination's signal goes to the same barrier offset in that CTA, or with
    cta_group::2 in the member of its pair that the named barrier's rank has.
    """
    ctas = cluster.ctas
    rank, named = target >> 24, barrier >> 24
    if mask is None:
        if rank >= len(ctas):
            raise MemoryFault(f"destination in CTA rank {rank} of a cluster of {len(ctas)}")
        same = rank == named or (group == 2 and rank ^ 1 == named)
        if not same:
            raise BarrierError(
                f"copy to CTA rank {rank} signals a barrier in CTA rank {named}; the barrier must "
                f"be in the destination CTA{' or its peer' if group == 2 else ''}"
            )
        return [(_present(ctas[rank], target), target & _OFFSET, barrier)]
    if not mask or mask >> len(ctas):
        raise SimulationError(
            f"multicast to CTA mask {mask:#06x}; the cluster has {len(ctas)} CTAs"
        )
    found = []
    for destination in range(len(ctas)):
        if mask >> destination & 1:
            holder = destination & ~1 | named & 1 if group == 2 else destination
            place = holder << 24 | barrier & _OFFSET
            found.append((_present(ctas[destination], target), target & _OFFSET, place))
    return found


def _present(cta, target: int):
    """The destination CTA of a copy, which must not have exited."""
    cta.require_present(f"a copy to its shared offset {target & _OFFSET:#x}")
    return cta


# ---------------------------------------------------------------- tensor copies


def _by_target(to_shared: Any, to_global: Any, otherwise: Any) -> ByModifier:
    """A column of copies: the first state space among the modifiers is that of the target."""
    return ByModifier(
        {"shared::cluster": to_shared, "shared::cta": to_shared, "global": to_global}, otherwise
    )


@machine_op(
    "cp.async.bulk.tensor",
    statistics=lambda i: f"{effect_of(i)}",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    ties=Ties.NEVER,
    native=NativeForm.TILE,
    event=_by_target(Event.TMA_LOAD, Event.TMA_STORE, Event.NONE),
    effect=_by_target(Effect.TMA_LOAD, Effect.TMA_STORE, Effect.NONE),
)
def bind_tensor_copy(instruction, kernel):
    """cp.async.bulk.tensor.dim.dst.src{.tile}... : loads and stores in tile mode, and loads of four
    rows (.tile::gather4)."""
    direction = instruction.modifiers[1:3]
    modes = [m for m in instruction.modifiers if m.startswith(("tile", "im2col"))]
    is_store = direction == ("global", "shared::cta")
    if any(mode != "tile" and (is_store or mode != _GATHER) for mode in modes):
        raise unknown(instruction, f"TMA load mode .{modes[0]} is not modelled")
    if is_store:
        return _bind_tensor_store(instruction, 3, None)
    if direction in (("shared::cluster", "global"), ("shared::cta", "global")):
        return _bind_tensor_load(instruction)
    raise unknown(instruction, "direction of a tensor copy")


def _bind_tensor_load(instruction):
    rest = [m for m in instruction.modifiers[3:] if m not in ("tile", _GATHER)]
    gathers = _GATHER in instruction.modifiers
    form = _completion(instruction, rest)
    target_op, tensor_op, barrier_op, *extra = instruction.operands
    if len(extra) != form.multicast + form.hint:
        raise unknown(instruction, "operands of a tensor load")
    target, barrier = shared_address(target_op), shared_address(barrier_op)
    tensor = _tensor_operand(instruction, tensor_op)
    mask = uniform(extra[0], 32) if form.multicast else None
    split, effect = _issues(instruction), effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        for lane in split(warp, lanes):
            pointer, coordinates = tensor(warp, lane)
            ranks = mask(warp, lane) & 0xFFFF if mask else None
            places = _destinations(
                cluster, target(warp, lane), barrier(warp, lane), ranks, form.group
            )
            issue = functools.partial(submit, warp, instruction, effect)
            if gathers:
                _submit_gather(issue, warp, coordinates, places, pointer)
            else:
                tile = _tensor_map(cluster.machine, pointer, coordinates)
                _submit_load(issue, warp, tile, places, pointer)

    return execute


def _submit_gather(issue: Callable, warp, coordinates, places, pointer: int) -> None:
    """Load a row of the box for each of four rows, one after the other in shared memory."""
    column, *rows = coordinates
    for number, row in enumerate(rows):
        tile = _tensor_map(warp.cta.cluster.machine, pointer, (column, row))
        tensor_map = tile[0]
        if tensor_map.box[1] != 1:
            raise SimulationError(
                f"a copy of {_GATHERED_ROWS} rows with a descriptor of a box of {tensor_map.box}; "
                "its second dimension must be 1"
            )
        of_row = [(cta, at + number * tensor_map.row_bytes, signal) for cta, at, signal in places]
        _submit_load(issue, warp, tile, of_row, pointer)


def _submit_load(issue: Callable, warp, tile, places, pointer: int) -> None:
    cluster = warp.cta.cluster
    machine = cluster.machine
    tensor_map, coordinates = tile

    def perform() -> None:
        for cta, offset, barrier in places:
            size = tiles.load_tile(tensor_map, coordinates, machine.memory, cta.smem, offset)
            cluster.mbarrier(barrier).complete_tx(size)

    machine.counters["tma.load bytes"] += tensor_map.tile_bytes * len(places)
    size = tensor_map.shared_bytes
    writes = tuple((cta, offset, size, barrier) for cta, offset, barrier in places)
    issue(perform, writes=writes, loaded=tile, descriptor=pointer)


def _bind_tensor_store(instruction, skip: int, reduction: str | None):
    rest = [m for m in instruction.modifiers[skip:] if m != "tile"]
    if rest[:1] != ["bulk_group"] or not set(rest[1:]) <= _HINTS:
        raise unknown(instruction, "expected .bulk_group and at most .L2::cache_hint")
    tensor_op, source_op, *hints = instruction.operands
    if len(hints) != len(rest) - 1:
        raise unknown(instruction, "operands of a tensor store")
    tensor, source = _tensor_operand(instruction, tensor_op), shared_address(source_op)
    split, effect = _issues(instruction), effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        cta = warp.cta
        machine = cta.cluster.machine
        for lane in split(warp, lanes):
            pointer, coordinates = tensor(warp, lane)
            tensor_map, coordinates = _tensor_map(machine, pointer, coordinates)
            if tensor_map.dtype in PADDED:
                raise SimulationError(f"TMA stores of padded {tensor_map.dtype} elements")
            if min(coordinates) < 0:
                raise SimulationError(
                    f"a tensor store at the coordinates {coordinates}; stores take none below 0 "
                    "(the hardware ends the kernel with an illegal instruction)"
                )
            offset = _own_offset(cta, source(warp, lane))

            def perform(tensor_map=tensor_map, coordinates=coordinates, offset=offset) -> None:
                tiles.store_tile(
                    tensor_map, coordinates, machine.memory, cta.smem, offset, reduction
                )

            machine.counters["tma.store bytes"] += tensor_map.tile_bytes
            operation = submit(
                warp, instruction, effect, perform, reads=((cta, offset, tensor_map.shared_bytes),),
                stored=(tensor_map, coordinates) if reduction is None else None, descriptor=pointer,
            )  # fmt: skip
            _join_groups(warp, lanes, operation)

    return execute


def _own_offset(cta, shared: int) -> int:
    if shared >> 24 != cta.rank:
        raise MemoryFault(
            f"shared::cta address of CTA rank {shared >> 24}, executed in CTA rank {cta.rank}"
        )
    return shared & _OFFSET


@machine_op(
    "cp.reduce.async.bulk.tensor",
    statistics="tma.reduce",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.TMA_REDUCE,
    effect=Effect.TMA_STORE,
    ties=Ties.IF_GLOBAL,
)
def bind_tensor_reduction(instruction, kernel):
    """cp.reduce.async.bulk.tensor.dim.global.shared::cta.op{.tile}.bulk_group."""
    modifiers = instruction.modifiers
    if modifiers[1:3] != ("global", "shared::cta") or modifiers[3] not in tiles.REDUCTIONS:
        raise unknown(
            instruction, f"modelled reductions: {', '.join(sorted(tiles.REDUCTIONS))} to global"
        )
    return _bind_tensor_store(instruction, 4, modifiers[3])


# ---------------------------------------------------------------- bulk copies


def _check_bulk(size: int, *places: int) -> None:
    if size % 16:
        raise Misaligned(f"bulk copy of {size} bytes; the size must be a multiple of 16")
    for place in places:
        if place % 16:
            raise Misaligned(f"bulk copy at address {place:#x}, which is not 16-byte aligned")


def _shared_bytes(cta, offset: int, size: int) -> np.ndarray:
    if offset + size > cta.smem.size:
        raise MemoryFault(
            f"bulk copy of {size} bytes at shared-memory offset {offset} ends outside the CTA's "
            f"{cta.smem.size} bytes"
        )
    return cta.smem[offset : offset + size]


def _global_bytes(machine, start: int, size: int, write: bool) -> np.ndarray:
    machine.memory.check(start, size, write, "bulk copy")
    return machine.memory.view(start, size)


@machine_op(
    "cp.async.bulk",
    statistics="tma.bulk",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=_by_target(Event.BULK_LOAD, Event.BULK_STORE, Event.NONE),
    effect=_by_target(Effect.BULK, Effect.TMA_STORE, Effect.NONE),
    ties=Ties.NEVER,
)
def bind_bulk_copy(instruction, kernel):
    """cp.async.bulk.dst.src...: copies of contiguous bytes without a tensor map."""
    direction = instruction.modifiers[:2]
    if direction == ("global", "shared::cta"):
        return _bind_bulk_store(instruction, instruction.modifiers[2:], None)
    if direction in (("shared::cluster", "global"), ("shared::cta", "global")):
        return _bind_bulk_load(instruction, True)
    if direction == ("shared::cluster", "shared::cta"):
        return _bind_bulk_load(instruction, False)
    raise unknown(instruction, "direction of a bulk copy")


def _bind_bulk_load(instruction, from_global: bool):
    form = _completion(instruction, instruction.modifiers[2:])
    target_op, source_op, size_op, barrier_op, *extra = instruction.operands
    illegal = form.group or (form.multicast and not from_global)
    if illegal or len(extra) != form.multicast + form.hint:
        raise unknown(instruction, "modifiers or operands of a bulk copy")
    target, barrier = shared_address(target_op), shared_address(barrier_op)
    source = address(source_op, 64) if from_global else shared_address(source_op)
    size = uniform(size_op, 32)
    mask = uniform(extra[0], 32) if form.multicast else None
    split, effect = _issues(instruction), effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        if not from_global:
            require_cluster(warp, "a bulk copy")
        cta, cluster = warp.cta, warp.cta.cluster
        machine = cluster.machine
        for lane in split(warp, lanes):
            count, start = size(warp, lane), source(warp, lane)
            ranks = mask(warp, lane) & 0xFFFF if mask else None
            places = _destinations(cluster, target(warp, lane), barrier(warp, lane), ranks, 0)
            _check_bulk(count, start, places[0][1])
            if not from_global:
                start = _own_offset(cta, start)

            def perform(count=count, start=start, places=places) -> None:
                for destination, offset, signal in places:
                    if from_global:
                        data = _global_bytes(machine, start, count, False)
                    else:
                        data = _shared_bytes(cta, start, count)
                    _shared_bytes(destination, offset, count)[...] = data
                    cluster.mbarrier(signal).complete_tx(count)

            machine.counters["tma.load bytes"] += count * len(places)
            submit(
                warp, instruction, effect, perform,
                writes=tuple((place, at, count, signal) for place, at, signal in places),
                reads=() if from_global else ((cta, start, count),),
                loaded=(start, count) if from_global else None,
            )  # fmt: skip

    return execute


def _bind_bulk_store(instruction, rest: tuple[str, ...], reduction: tuple[str, str] | None):
    if rest[:1] != ("bulk_group",) or not set(rest[1:]) <= _HINTS:
        raise unknown(instruction, "expected .bulk_group and at most .L2::cache_hint")
    target_op, source_op, size_op, *hints = instruction.operands
    if len(hints) != len(rest) - 1:
        raise unknown(instruction, "operands of a bulk store")
    target, source = address(target_op, 64), shared_address(source_op)
    size = uniform(size_op, 32)
    split, effect = _issues(instruction), effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        cta = warp.cta
        machine = cta.cluster.machine
        for lane in split(warp, lanes):
            count, start = size(warp, lane), target(warp, lane)
            offset = _own_offset(cta, source(warp, lane))
            _check_bulk(count, start, offset)

            def perform(count=count, start=start, offset=offset) -> None:
                data = _shared_bytes(cta, offset, count)
                view = _global_bytes(machine, start, count, True)
                if reduction is not None:
                    data = tiles.reduced(*reduction, np.array(view), np.array(data))
                view[...] = data

            machine.counters["tma.store bytes"] += count
            operation = submit(
                warp, instruction, effect, perform, reads=((cta, offset, count),),
                stored=(start, count) if reduction is None else None,
            )  # fmt: skip
            _join_groups(warp, lanes, operation)

    return execute


@machine_op(
    "cp.reduce.async.bulk",
    statistics="tma.reduce",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.BULK_REDUCE,
    effect=_by_target(Effect.BULK, Effect.TMA_STORE, Effect.NONE),
    ties=Ties.IF_GLOBAL,
)
def bind_bulk_reduction(instruction, kernel):
    """cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.op{.noftz}.type, and
    .shared::cluster.shared::cta.mbarrier::complete_tx::bytes.op.type."""
    modifiers = instruction.modifiers
    if modifiers[:3] == ("shared::cluster", "shared::cta", "mbarrier::complete_tx::bytes"):
        return _bind_shared_reduction(instruction)
    if modifiers[:3] != ("global", "shared::cta", "bulk_group"):
        raise unknown(
            instruction,
            "modelled bulk reductions go from shared::cta to global with a "
            "bulk group and to shared::cluster with an mbarrier",
        )
    hints = tuple(m for m in modifiers[3:] if m in _HINTS)
    rest = [m for m in modifiers[3:] if m not in _HINTS and m != "noftz"]
    types = {"u32", "s32", "u64", "s64", "f16", "bf16", "f32", "b32", "b64"}
    if len(rest) != 2 or rest[0] not in tiles.REDUCTIONS or rest[1] not in types:
        raise unknown(instruction, "operation or type of a bulk reduction")
    return _bind_bulk_store(instruction, ("bulk_group", *hints), (rest[0], rest[1]))


#: Operations of a bulk reduction in shared memory and their types (PTX ISA, cp.reduce.async.bulk).
_SHARED_REDUCTIONS = {"add": ("u32", "s32", "u64"), "min": ("u32", "s32"), "max": ("u32", "s32"),
                      "inc": ("u32",), "dec": ("u32",), "and": ("b32",), "or": ("b32",),
                      "xor": ("b32",)}  # fmt: skip


def _bind_shared_reduction(instruction):
    operation, *types = instruction.modifiers[3:]
    if types not in ([name] for name in _SHARED_REDUCTIONS.get(operation, ())):
        raise unknown(instruction, "operation or type of a bulk reduction in shared memory")
    if len(instruction.operands) != 4:
        raise unknown(instruction, "expected destination, source, size and mbarrier")
    target, source = (shared_address(op) for op in instruction.operands[:2])
    size, barrier = uniform(instruction.operands[2], 32), shared_address(instruction.operands[3])
    split, effect = _issues(instruction), effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        require_cluster(warp, "a bulk reduction")
        cta, cluster = warp.cta, warp.cta.cluster
        for lane in split(warp, lanes):
            count, offset = size(warp, lane), _own_offset(cta, source(warp, lane))
            places = _destinations(cluster, target(warp, lane), barrier(warp, lane), None, 0)
            place, at, signal = places[0]
            _check_bulk(count, offset, at)

            def perform(count=count, offset=offset, place=place, at=at, signal=signal) -> None:
                data = np.array(_shared_bytes(cta, offset, count))
                view = _shared_bytes(place, at, count)
                view[...] = tiles.reduced(operation, types[0], np.array(view), data)
                cluster.mbarrier(signal).complete_tx(count)

            submit(warp, instruction, effect, perform, reads=((cta, offset, count),),
                   writes=((place, at, count, signal),))  # fmt: skip

    return execute


# ---------------------------------------------------------------- bulk groups


@dataclass(slots=True)
class BulkGroups:
    """Bulk groups of one thread: copies not yet committed, and committed groups, oldest first."""

    open: list[AsyncOp] = field(default_factory=list)
    committed: list[list[AsyncOp]] = field(default_factory=list)


def thread_groups(warp, lanes: int, kind: str = "bulk") -> list[BulkGroups]:
    """The groups of each executing thread: "bulk", or those of another kind of copy."""
    table = warp.cta.bulk_groups
    active = (lane for lane in range(32) if lanes >> lane & 1)
    return [table.setdefault((kind, warp.index, lane), BulkGroups()) for lane in active]


def _join_groups(warp, lanes: int, operation: AsyncOp) -> None:
    """A copy joins the open group of each executing thread."""
    for groups in thread_groups(warp, lanes):
        groups.open.append(operation)


@machine_op(
    "cp.async.bulk.commit_group",
    rule=Rule.COMMIT_BULK,
    trace=Recorded.ENTRY,
    event=Event.BULK_COMMIT,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.BULK_GROUP,
)
def bind_commit_group(instruction, kernel):
    """cp.async.bulk.commit_group: close the bulk group of each executing thread."""
    if instruction.modifiers:
        raise unknown(instruction, "no modifier is accepted")

    def execute(warp, lanes: int) -> None:
        for groups in thread_groups(warp, lanes):
            groups.committed.append(groups.open)
            groups.open = []

    return execute


@machine_op(
    "cp.async.bulk.wait_group",
    rule=Rule.WAIT_BULK,
    trace=Recorded.ENTRY,
    event=Event.BULK_WAIT,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.BULK_GROUP,
)
def bind_wait_group(instruction, kernel):
    """cp.async.bulk.wait_group{.read} N: until at most N of the thread's latest groups pend."""
    if instruction.modifiers not in ((), ("read",)) or instruction.operands[0].kind != "imm":
        raise unknown(instruction, "expected cp.async.bulk.wait_group{.read} with an immediate")
    allowed = instruction.operands[0].value

    def execute(warp, lanes: int):
        for groups in thread_groups(warp, lanes):
            while len(groups.committed) > allowed:
                pending = [op for op in groups.committed[0] if not op.performed]
                if pending:
                    return Waiting(f"bulk group of {len(pending)} copies", pending[0])
                groups.committed.pop(0)
        return None

    return execute


# ---------------------------------------------------------------- prefetches


@machine_op(
    "cp.async.bulk.prefetch.tensor",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.ENTRY,
    event=Event.TMA_PREFETCH,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_prefetch_tensor(instruction, kernel):
    """cp.async.bulk.prefetch.tensor.dim.L2.global{.tile}: checks its descriptor, moves nothing."""
    rest = instruction.modifiers[1:]
    if rest[:2] != ("L2", "global") or not set(rest[2:]) <= {"tile"} | _HINTS:
        raise unknown(instruction, "modifiers of a tensor prefetch")
    tensor = _tensor_operand(instruction, instruction.operands[0])

    def execute(warp, lanes: int) -> None:
        pointer, coordinates = tensor(warp, lanes)
        _tensor_map(warp.cta.cluster.machine, pointer, coordinates)

    return execute


@machine_op(
    "cp.async.bulk.prefetch",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_prefetch_bulk(instruction, kernel):
    """cp.async.bulk.prefetch.L2.global [src], size: checks the range, moves nothing."""
    level, rest = instruction.modifiers[:2], instruction.modifiers[2:]
    if level != ("L2", "global") or not set(rest) <= _HINTS:
        raise unknown(instruction, "modifiers of a bulk prefetch")
    source, size = address(instruction.operands[0], 64), uniform(instruction.operands[1], 32)

    def execute(warp, lanes: int) -> None:
        start, count = source(warp, lanes), size(warp, lanes)
        _check_bulk(count, start)
        warp.cta.cluster.machine.memory.check(start, count, False, "bulk prefetch")

    return execute


@machine_op(
    "prefetch.tensormap",
    "prefetch.param.tensormap",
    "prefetch.const.tensormap",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_prefetch_descriptor(instruction, kernel):
    """prefetch{.param,.const}.tensormap [a]: checks that a valid TMA descriptor is there."""
    if instruction.modifiers:
        raise unknown(instruction, "no further modifier is accepted")
    pointer = address(instruction.operands[0], 64)

    def execute(warp, lanes: int) -> None:
        read_descriptor(warp.cta.cluster.machine, pointer(warp, lanes))

    return execute
