"""Executors of machine operations, extended by what the sanitizer records of them.

A hook is `bind(instruction, execute, sanitizer) -> run(warp, lanes)`; the longest prefix of the
full opcode wins. Every machine operation without a hook only has its warp's native accesses
recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from sm100_sim.isa.copy_async import shared_targets
from sm100_sim.isa.shared import shared_address
from sm100_sim.isa.sync import barrier_groups
from sm100_sim.isa.tcgen05_data import form_of, locator
from sm100_sim.state.warp import (
    SHARED_WINDOW,
    address,
    lane_array,
    predicate_reader,
    reader,
    uniform,
)
from sm100_sim.translate.blocks import operand_registers

from .clocks import BULK, COPY, LOAD, STORE
from .footprints import fragment_regions
from .sanitizer import Sanitizer
from .state import Round, WarpState
from .tracking import FRESH

Executor = Callable[[Any, int], Any]
_HOOKS: dict[str, Callable] = {}


def _hook(*prefixes: str) -> Callable:
    def decorate(bind: Callable) -> Callable:
        _HOOKS.update(dict.fromkeys(prefixes, bind))
        return bind

    return decorate


def wrapped(compiled: Any, sanitizer: Sanitizer) -> list[Executor | None]:
    """The kernel's executors, each followed by the sanitizer."""
    return [
        None if execute is None
        else sanitizer.bind_omitted(instruction) if instruction.index == sanitizer.omitted
        else _bind(instruction, execute, compiled, sanitizer)
        for instruction, execute in zip(compiled.instructions, compiled.executors, strict=True)
    ]


def _bind(instruction: Any, execute: Executor, compiled: Any, sanitizer: Sanitizer) -> Executor:
    name, found = instruction.name, _ordinary
    for prefix, hook in _longest_first():
        if name == prefix or name.startswith(prefix + "."):
            found = hook
            break
    run = found(instruction, execute, sanitizer)
    used = loads_used(instruction, compiled.watched or {})
    if not used:
        return run

    def using(warp: Any, lanes: int) -> Any:
        sanitizer.state(warp).uses[used] = 1
        return run(warp, lanes)

    return using


@functools.cache
def _longest_first() -> list[tuple[str, Callable]]:
    return sorted(_HOOKS.items(), key=lambda item: len(item[0]), reverse=True)


def loads_used(instruction: Any, watched: dict) -> list[int]:
    """Numbers of the tcgen05.ld whose data a machine operation takes as an operand."""
    if instruction.opcode == "tcgen05.ld":
        return []
    found: set[int] = set()
    for operand in instruction.operands:
        for register in operand_registers(operand):
            found |= watched.get(register, frozenset())
    return sorted(found)


@_hook("red.async")
def _ordinary(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    """Nothing to add: what the operation submits is recorded there, red.async included."""

    def run(warp: Any, lanes: int) -> Any:
        sanitizer.begin(warp, instruction)
        return execute(warp, lanes)

    return run


# ---------------------------------------------------------------- mbarriers


def arrive_form(instruction: Any, strict: bool) -> tuple[bool, bool]:
    """Whether an arrive is relaxed, and whether its scope is the CTA."""
    parts = set(instruction.name.split("."))
    # Without a scope an arrive at a remote barrier counts as one of cluster scope: published
    # kernels rely on it.
    wide = {"cluster", "gpu", "sys"} & parts
    return "relaxed" in parts, "cta" in parts or strict and not wide


@_hook("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    relaxed, narrow = arrive_form(instruction, sanitizer.strict)

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        state.relaxed, state.narrow = relaxed, narrow
        outcome = execute(warp, lanes)
        state.relaxed = state.narrow = False
        state.advance()
        return outcome

    return run


@_hook("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    spaces = [part for part in instruction.name.split(".") if part.startswith("shared")]
    groups = barrier_groups(instruction.operands[1], spaces[0] if spaces else "")
    result = instruction.operands[0]
    succeeded = predicate_reader(result) if result.kind == "pred" else (lambda warp: 0)

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        done = succeeded(warp) & lanes
        if done:
            for barrier, some in groups(warp, lanes):
                if some & done:
                    sanitizer.waited(state, barrier)
        return outcome

    return run


@_hook("mbarrier.inval")
def _invalidate(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        before = dict(warp.cta.barriers)
        outcome = execute(warp, lanes)
        for offset in before.keys() - warp.cta.barriers.keys():
            sanitizer.barrier_ends(state, before[offset])
        return outcome

    return run


# ---------------------------------------------------------------- named and cluster barriers


@_hook("bar.sync", "bar.arrive", "bar.red", "bar.cta", "barrier.sync", "barrier.arrive",
       "barrier.red", "barrier.cta")
def _named(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    parts = instruction.name.split(".")
    number = uniform(instruction.operands[1 if "red" in parts else 0], 32)
    waits = "arrive" not in parts

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        which = number(warp, lanes)
        barrier, rounds = warp.cta.named_barrier(which), sanitizer.cta(warp.cta).named
        if not (barrier.arrived or barrier.partial) or which not in rounds:
            rounds[which] = Round(sanitizer.layout)
        current = rounds[which]
        sanitizer.flush(state)
        state.offer(current.frontier)
        outcome = execute(warp, lanes)
        state.advance()
        if waits:
            state.joining = current
        return outcome

    return run


@_hook("barrier.cluster.arrive")
def _cluster_arrive(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    relaxed = "relaxed" in instruction.name.split(".")

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        cluster = state.cluster
        generation = warp.cta.cluster.barrier.generation
        current = cluster.rounds.setdefault(generation, Round(sanitizer.layout))
        cluster.rounds.pop(generation - 2, None)
        sanitizer.flush(state)
        state.relaxed = relaxed
        state.offer(current.frontier)
        state.relaxed = False
        state.advance()
        state.generation = generation
        return execute(warp, lanes)

    return run


@_hook("barrier.cluster.wait")
def _cluster_wait(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        if outcome is None:
            current = state.cluster.rounds.get(state.generation)
            if current is not None:
                sanitizer.acquire(state, current.frontier)
        return outcome

    return run


# ---------------------------------------------------------------- fences


@_hook("fence", "membar")
def _fence(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    name = instruction.name
    parts = set(name.split("."))
    restricted = {"release", "sync_restrict::shared::cta"} <= parts
    acquires = None
    if name.startswith("fence.proxy.tensormap::generic.acquire"):
        acquires = address(instruction.operands[0], 64)

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        if name.startswith("fence.proxy.async"):
            sanitizer.ordering(state, "proxy")
            state.fence_proxy()
            sanitizer.fence_inits(state)
            if restricted:
                state.fence_shared()
        elif restricted:
            state.fence_shared()
        elif acquires is not None:
            sanitizer.maps.acquire(state, acquires(warp, lanes))
        elif name.startswith("fence.proxy.tensormap"):
            sanitizer.maps.release(state)
        elif name.startswith("fence.mbarrier_init"):
            sanitizer.fence_inits(state)
            state.fence()
        elif not name.startswith(("fence.proxy", "membar.proxy")):
            if "release" not in parts:
                sanitizer.flags.fence(state)
            if "acquire" not in parts:
                state.fence()
        return execute(warp, lanes)

    return run


@_hook("tcgen05.fence::before_thread_sync")
def _fence_before(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        sanitizer.ordering(state, "before")
        state.fence_tensor()
        return outcome

    return run


@_hook("tcgen05.fence::after_thread_sync")
def _fence_after(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        if sanitizer.strict:
            sanitizer.flush(state)
            sanitizer.ordering(state, "after")
            state.ordered = state.frontier.copy()
        return execute(warp, lanes)

    return run


# ---------------------------------------------------------------- tensor memory


@_hook("tcgen05.alloc")
def _alloc(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    spaced = any(part.startswith("shared") for part in instruction.name.split("."))
    target = shared_address(instruction.operands[0], not spaced)
    paired = "cta_group::2" in instruction.modifiers

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        if paired and warp.cta.peer is not None:
            sanitizer.meet(state, warp.cta.peer.rank)
        before = dict(warp.cta.tmem.allocations)
        outcome = execute(warp, lanes)
        if outcome is None:
            cta = sanitizer.cta(warp.cta)
            for first in warp.cta.tmem.allocations.keys() - before.keys():
                count = warp.cta.tmem.allocations[first]
                cta.tmem.plane[first : first + count] = FRESH
            cell = (target(warp, lanes) & 0xFFFFFF) >> 2
            where = (slice(cell // 4, cell // 4 + 1), slice(cell % 4, cell % 4 + 1))
            cta.smem.touch(where, state.access("generic", True), state.frontier)
        return outcome

    return run


@_hook("tcgen05.dealloc")
def _dealloc(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    start, columns = (uniform(operand, 32) for operand in instruction.operands)

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        first = start(warp, lanes) & 0xFFFF
        region = slice(first, first + columns(warp, lanes))
        access = state.access("dealloc", True)
        sanitizer.cta(warp.cta).tmem.touch(region, access, state.frontier)
        return execute(warp, lanes)

    return run


@_hook("tcgen05.ld")
def _load(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    _, place, *rest = instruction.operands
    form = form_of(instruction, "pack::16b", rest[0].value if rest else None)
    locate = locator(instruction, place, form)
    number = sanitizer.load_numbers[instruction.index]

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        access = state.asynchronous(LOAD, "ld", False)
        _touch_fragment(sanitizer, state, form, locate(warp, lanes), access)
        state.uses[number] = 0
        state.loads.append((access.clock, number))
        return outcome

    return run


@_hook("tcgen05.st")
def _store(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    place, *split, _ = instruction.operands
    form = form_of(instruction, "unpack::16b", split[0].value if split else None)
    locate = locator(instruction, place, form)

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        access = state.asynchronous(STORE, "st", True)
        _touch_fragment(sanitizer, state, form, locate(warp, lanes), access)
        return outcome

    return run


def _touch_fragment(
    sanitizer: Sanitizer, state: WarpState, form: Any, where: tuple[int, int], access: Any
) -> None:
    tmem = sanitizer.cta(state.warp.cta).tmem
    for region in fragment_regions(form, *where):
        tmem.touch(region, access, state.for_tensor())


@_hook("tcgen05.wait::ld")
def _wait_load(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        sanitizer.ordering(state, "loads")
        state.finish_loads(True)
        return execute(warp, lanes)

    return run


@_hook("tcgen05.wait::st")
def _wait_store(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        state.frontier[state.store] = state.issued[STORE]
        return execute(warp, lanes)

    return run


# ---------------------------------------------------------------- bulk groups


@_hook("cp.async.bulk.commit_group")
def _commit_group(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        sanitizer.grouping(state, True)
        state.groups.append(state.issued[BULK])
        return execute(warp, lanes)

    return run


@_hook("cp.async.bulk.wait_group")
def _wait_group(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    allowed = instruction.operands[0].value

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        sanitizer.grouping(state, False)
        if outcome is None and len(state.groups) > allowed:
            done = len(state.groups) - allowed
            state.frontier[state.bulk] = max(
                state.frontier[state.bulk], state.groups[done - 1]
            )
            del state.groups[: done - 1]
        return outcome

    return run


# ---------------------------------------------------------------- cp.async


@_hook("cp.async.ca", "cp.async.cg")
def _copy_async(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    target, origin, size = instruction.operands[:3]
    targets, origins, size = shared_targets(target, True), reader(origin, 64), size.value

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        active = lane_array(lanes)
        access = state.asynchronous(COPY, "copy", True)
        state.copies.append(access)
        first = (targets(warp)[active] & 0xFFFFFF) >> 2
        cells = (first[:, None] + np.arange(size >> 2)).reshape(-1)
        sanitizer.cta(warp.cta).smem.touch((cells // 4, cells % 4), access, state.frontier)
        sanitizer.writes.load(state, origins(warp)[active], size)
        return outcome

    return run


@_hook("cp.async.commit_group")
def _commit_copies(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        state.copy_groups.append(state.issued[COPY])
        return execute(warp, lanes)

    return run


@_hook("cp.async.wait_group", "cp.async.wait_all")
def _wait_copies(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    everything = instruction.opcode == "cp.async.wait_all"
    allowed = 0 if everything else instruction.operands[0].value

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        if outcome is not None:
            return outcome
        done = len(state.copy_groups) - allowed
        if everything:
            state.finish_copies(state.issued[COPY])
            state.copy_groups.clear()
        elif done > 0:
            state.finish_copies(state.copy_groups[done - 1])
            del state.copy_groups[:done]
        return None

    return run


@_hook("cp.async.mbarrier.arrive")
def _track_copies(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        for access in state.copies:
            access.reissue(state.clock)
        return execute(warp, lanes)

    return run


# ---------------------------------------------------------------- atomics


@_hook("atom", "red")
def _atomic(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    parts = instruction.name.split(".")
    operand = instruction.operands[1 if instruction.opcode == "atom" else 0]
    shared = any(part.startswith("shared") for part in parts)
    if operand.base is None:
        return _ordinary(instruction, execute, sanitizer)
    addresses = reader(operand, 32 if shared else 64)
    size = 2 if parts[-1].endswith("64") else 1
    acquires, releases = (bool({"acq_rel", which} & set(parts)) for which in ("acquire", "release"))

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        places = np.unique(addresses(warp)[lane_array(lanes)].astype(np.uint64))
        outside = places[:0]
        if not shared:
            offsets = places - np.uint64(SHARED_WINDOW)
            places, outside = offsets[offsets < 1 << 32], places[offsets >= 1 << 32]
        flags = [_touch_atomic(sanitizer, state, place, size) for place in places.tolist()]
        flags += outside.tolist()
        if instruction.opcode == "atom":
            sanitizer.flags.learn(state, flags, acquires)
        outcome = execute(warp, lanes)
        sanitizer.flags.publish(state, flags, releases)
        return outcome

    return run


def _touch_atomic(sanitizer: Sanitizer, state: WarpState, place: int, cells: int) -> int:
    """Record an atomic on a shared address; returns the host address, by which flags are known."""
    rank, offset = place >> 24, place & 0xFFFFFF
    cta = state.cluster.ctas[rank]
    access = state.access("atomic", True)
    if cta.cta is not state.warp.cta:
        sanitizer.meet(state, rank)
        cta.visit(access)
    first = np.arange(offset >> 2, (offset >> 2) + cells)
    cta.smem.touch((first // 4, first % 4), access, state.frontier)
    return cta.cta.smem.__array_interface__["data"][0] + offset
