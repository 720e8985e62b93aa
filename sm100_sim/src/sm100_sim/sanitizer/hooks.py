"""Executors of machine operations, extended by what the sanitizer records of them.

A hook is `bind(instruction, execute, sanitizer) -> run(warp, lanes)`, for the rules that rows of
the instruction table name; there is one for each rule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from sm100_sim.isa.columns import Rule, require_complete
from sm100_sim.isa.copies.copy_async import shared_targets
from sm100_sim.isa.shared import shared_address
from sm100_sim.isa.sync import barrier_groups
from sm100_sim.isa.table import row_of
from sm100_sim.isa.tensor.tcgen05_data import Form, form_of, load_form, locator
from sm100_sim.isa.tensor.warpgroup import WARPS, warpgroup_of
from sm100_sim.native.calling import callable_of
from sm100_sim.state.warp import (
    SHARED_WINDOW,
    address,
    lane_array,
    predicate_reader,
    reader,
    uniform,
)
from sm100_sim.translate.blocks import operand_registers
from sm100_sim.translate.native_forms import recorded_fragment

from .clocks import BULK, COPY, MMA, STORE
from .compiled.records import OperationRecord
from .compiled.tracking import FRESH
from .compiled.watched import record_load, record_store
from .memory import footprints
from .memory.shadow import raise_failure
from .sanitizer import Sanitizer
from .state import Round, WarpState

Executor = Callable[[Any, int], Any]
_HOOKS: dict[Rule, Callable] = {}
#: Rules of inline operations alone: native code does all there is to do.
_NATIVE_ONLY = (Rule.LOGGED,)


def _hook(*rules: Rule) -> Callable:
    def decorate(bind: Callable) -> Callable:
        _HOOKS.update(dict.fromkeys(rules, bind))
        return bind

    return decorate


def wrapped(
    compiled: Any, executors: list[Executor | None], sanitizer: Sanitizer
) -> list[Executor | None]:
    """The executors of a kernel, each followed by the sanitizer."""
    omission: Any = sanitizer
    return [
        None
        if execute is None
        else omission.bind_omitted(instruction)
        if instruction.index == sanitizer.omitted
        else _bind(instruction, execute, compiled, sanitizer)
        for instruction, execute in zip(compiled.instructions, executors, strict=True)
    ]


def _bind(instruction: Any, execute: Executor, compiled: Any, sanitizer: Sanitizer) -> Executor:
    run = _HOOKS[row_of(instruction).rule](instruction, execute, sanitizer)
    used = loads_used(instruction, compiled.watched or {})
    if not used:
        return run

    def using(warp: Any, lanes: int) -> Any:
        sanitizer.state(warp).uses[used] = 1
        return run(warp, lanes)

    return using


def loads_used(instruction: Any, watched: dict) -> list[int]:
    """Numbers of the tcgen05.ld whose data a machine operation takes as an operand."""
    if row_of(instruction).rule is Rule.TENSOR_LOAD:
        return []
    found: set[int] = set()
    for operand in instruction.operands:
        for register in operand_registers(operand):
            found |= watched.get(register, frozenset())
    return sorted(found)


@_hook(Rule.COMPUTES, Rule.BY_OBJECTS, Rule.NOT_FOLLOWED, Rule.WARPGROUP_FENCE)
def _ordinary(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    """Nothing to add: registers, or what it acts on records it, or nobody follows it."""

    def run(warp: Any, lanes: int) -> Any:
        sanitizer.begin(warp, instruction)
        return execute(warp, lanes)

    return run


# ---------------------------------------------------------------- mbarriers


def arrive_form(instruction: Any, strict: bool) -> tuple[bool, bool]:
    """Return (whether an arrive is relaxed, whether its scope is the CTA)."""
    parts = set(instruction.name.split("."))
    # Without a scope an arrive at a remote barrier counts as one of cluster scope: published
    # kernels rely on it.
    wide = {"cluster", "gpu", "sys"} & parts
    return "relaxed" in parts, "cta" in parts or strict and not wide


@_hook(Rule.ARRIVE)
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


@_hook(Rule.WAIT)
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


@_hook(Rule.INVALIDATE)
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


@_hook(Rule.NAMED_BARRIER, Rule.NAMED_ARRIVE)
def _named(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    row = row_of(instruction)
    # The barrier's number comes behind the result of a reduction.
    number = uniform(instruction.operands[len(row.defines)], 32)
    waits = row.rule is not Rule.NAMED_ARRIVE

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


@_hook(Rule.CLUSTER_ARRIVE)
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


@_hook(Rule.CLUSTER_WAIT)
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


@_hook(
    Rule.FENCE,
    Rule.FENCE_SHARED,
    Rule.FENCE_INIT,
    Rule.FENCE_PROXY,
    Rule.FENCE_PROXY_ACQUIRE,
    Rule.FENCE_PROXY_RELEASE,
    Rule.FENCE_MAP_RELEASE,
)
def _fence(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    order = _orders(sanitizer, row_of(instruction).rule, instruction.modifiers)

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        order(state)
        return execute(warp, lanes)

    return run


def _orders(sanitizer: Sanitizer, rule: Rule, modifiers: tuple[str, ...]) -> Callable:
    """Return the function that applies a fence to the state of its warp."""

    def shared(state: WarpState) -> None:
        sanitizer.ordering(state, "shared")
        state.fence_shared()

    def proxies(state: WarpState) -> None:
        sanitizer.ordering(state, "proxy")
        state.fence_proxy()
        sanitizer.fence_inits(state)
        if rule is Rule.FENCE_PROXY_RELEASE:
            state.fence_shared()

    def inits(state: WarpState) -> None:
        sanitizer.fence_inits(state)
        state.fence()

    def threads(state: WarpState) -> None:
        if "release" not in modifiers:
            sanitizer.flags.fence(state)
        if "acquire" not in modifiers:
            state.fence()

    special = {
        Rule.FENCE: threads, Rule.FENCE_SHARED: shared, Rule.FENCE_INIT: inits,
        Rule.FENCE_MAP_RELEASE: sanitizer.maps.release,
    }  # fmt: skip
    return special.get(rule, proxies)


@_hook(Rule.FENCE_MAP_ACQUIRE)
def _fence_map(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    acquires = address(instruction.operands[0], 64)

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        sanitizer.maps.acquire(state, acquires(warp, lanes))
        return execute(warp, lanes)

    return run


@_hook(Rule.FENCE_BEFORE)
def _fence_before(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        sanitizer.ordering(state, "before")
        state.fence_tensor()
        return outcome

    return run


@_hook(Rule.FENCE_AFTER)
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


@_hook(Rule.ALLOCATE)
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


@_hook(Rule.DEALLOCATE)
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


@_hook(Rule.TENSOR_LOAD)
def _load(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    form, place = load_form(instruction)
    about = OperationRecord(instruction.index, load=sanitizer.load_numbers[instruction.index])
    locate = locator(instruction, place, form)
    return _fragment(instruction, execute, sanitizer, (form, locate), about)


@_hook(Rule.TENSOR_STORE)
def _store(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    place, *split, _ = instruction.operands
    form = form_of(instruction, "unpack::16b", split[0].value if split else None)
    about = OperationRecord(instruction.index)
    locate = locator(instruction, place, form)
    return _fragment(instruction, execute, sanitizer, (form, locate), about)


def _fragment(
    instruction: Any,
    execute: Executor,
    sanitizer: Sanitizer,
    where: tuple[Form, Callable],
    about: OperationRecord,
) -> Executor:
    """A tcgen05.ld or st, recorded as native code records it."""
    form, locate = where
    operation = recorded_fragment(form)
    operation.watch = ctypes.addressof(about)
    loads = row_of(instruction).rule is Rule.TENSOR_LOAD
    routine = record_load if loads else record_store

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        # The registers that are loaded may hold the address.
        lane, column = locate(warp, lanes)
        outcome = execute(warp, lanes)
        if loads:
            state.loads.make_room()
        frontier, context = state.for_tensor(), ctypes.addressof(warp.context)
        callable_of(routine)(
            context, ctypes.addressof(operation), lane << 16 | column, frontier.ctypes.data
        )
        raise_failure()
        return outcome

    owner: Any = run
    owner.kept = about, operation  # native code has their addresses
    return run


@_hook(Rule.WAIT_LOADS)
def _wait_load(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        sanitizer.ordering(state, "loads")
        state.finish_loads(True)
        return execute(warp, lanes)

    return run


@_hook(Rule.WAIT_STORES)
def _wait_store(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        state.frontier[state.store] = state.issued[STORE]
        return execute(warp, lanes)

    return run


# ---------------------------------------------------------------- groups

#: The agent whose group a rule commits, or awaits.
GROUPS = {
    Rule.COMMIT_BULK: BULK, Rule.COMMIT_WARPGROUP: MMA, Rule.COMMIT_COPIES: COPY,
    Rule.WAIT_BULK: BULK, Rule.WAIT_WARPGROUP: MMA,
}  # fmt: skip


@_hook(Rule.COMMIT_BULK, Rule.COMMIT_WARPGROUP, Rule.COMMIT_COPIES)
def _commit_group(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    agent = GROUPS[row_of(instruction).rule]

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        sanitizer.grouping(state, agent, True)
        state.groups[agent].append(state.issued[agent])
        return execute(warp, lanes)

    return run


@_hook(Rule.WAIT_BULK, Rule.WAIT_WARPGROUP)
def _wait_group(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    agent, allowed = GROUPS[row_of(instruction).rule], instruction.operands[0].value

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        sanitizer.grouping(state, agent, False)
        groups = state.groups[agent]
        done = len(groups) - allowed
        if outcome is None and done > 0:
            entry = state.entry(agent)
            state.frontier[entry] = max(int(state.frontier[entry]), groups[done - 1])
            del groups[: done - 1]
            sanitizer.completing(state, agent)
        return outcome

    return run


# ---------------------------------------------------------------- wgmma


@_hook(Rule.WARPGROUP_MMA)
def _product(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        place = warp.index % WARPS
        sanitizer.products.setdefault(instruction.index, (warp.cta.ctaid, warp.index))
        product: Any = warpgroup_of(warp).latest[place]
        state.cluster.record.products = 1
        access = state.asynchronous(MMA, "wgmma", False)
        shadow = sanitizer.cta(warp.cta)
        shadow.visit(access)
        for chunks in footprints.warpgroup_operands(product, place):
            shadow.smem.touch(chunks, access, state.frontier)
        return outcome

    return run


# ---------------------------------------------------------------- cp.async


@_hook(Rule.COPY)
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


@_hook(Rule.WAIT_COPIES, Rule.WAIT_ALL_COPIES)
def _wait_copies(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    everything = row_of(instruction).rule is Rule.WAIT_ALL_COPIES
    allowed = 0 if everything else instruction.operands[0].value

    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        outcome = execute(warp, lanes)
        if outcome is not None:
            return outcome
        groups = state.groups[COPY]
        done = len(groups) - allowed
        if everything:
            state.finish_copies(state.issued[COPY])
            groups.clear()
        elif done > 0:
            state.finish_copies(groups[done - 1])
            del groups[:done]
        return None

    return run


@_hook(Rule.ARRIVE_COPIES)
def _track_copies(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    def run(warp: Any, lanes: int) -> Any:
        state = sanitizer.begin(warp, instruction)
        state.track_copies()
        return execute(warp, lanes)

    return run


# ---------------------------------------------------------------- atomics


@_hook(Rule.ATOMIC)
def _atomic(instruction: Any, execute: Executor, sanitizer: Sanitizer) -> Executor:
    parts = instruction.name.split(".")
    # The address comes behind what is written, if anything is.
    returns = len(row_of(instruction).defines)
    operand = instruction.operands[returns]
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
        if returns:
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


require_complete("sanitizer.hooks", Rule, _HOOKS, without=_NATIVE_ONLY)
