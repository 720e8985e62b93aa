"""Instructions that order, pace or hint: fences, programmatic launches, sleeping, cache lines.

PTX ISA 9.3, "membar, fence", "griddepcontrol", "nanosleep", "applypriority", "discard". Memory of
the simulator is sequentially consistent, so a fence changes no state; its form is checked all the
same.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sm100_sim.errors import Misaligned
from sm100_sim.state.events import YIELD
from sm100_sim.state.warp import reader

from .columns import ByModifier, Effect, Event, NativeForm, Recorded, Rule, Ties
from .table import machine_op, split_modifiers, unknown

_SCOPES = "(?:cta|cluster|gpu|sys)"
#: Everything that may follow `fence` (PTX ISA 9.3, "membar, fence": syntax).
_FENCES = re.compile(
    rf"(?:(?:sc|acq_rel|acquire|release)\.)?{_SCOPES}"
    r"|acquire\.sync_restrict::shared::cluster\.cluster"
    r"|release\.sync_restrict::shared::cta\.cluster"
    r"|mbarrier_init\.release\.cluster"
    r"|proxy\.(?:alias|async(?:\.(?:global|shared|shared::cta|shared::cluster))?)"
    rf"|proxy\.tensormap::generic\.(?:release|acquire)\.{_SCOPES}"
    r"|proxy\.async::generic\.acquire\.sync_restrict::shared::cluster\.cluster"
    r"|proxy\.async::generic\.release\.sync_restrict::shared::cta\.cluster"
)


def _no_effect(warp, lanes: int) -> None:
    """Nothing to do: the instruction orders accesses that are in order already."""


def _fence_op(name: str, rule: Rule, event: Event = Event.NONE) -> Callable:
    """Decorator: the row of one kind of fence or membar."""
    first, *rest = name.split(".")
    return machine_op(
        name, statistics="fence.proxy" if name.startswith("fence.proxy") else first, rule=rule,
        trace=Recorded.ENTRY, event=event, effect=Effect.NONE, synchronises=True,
        native=NativeForm.ORDER, ties=Ties.NEVER if rest == ["proxy", "alias"] else Ties.IF_WIDE,
    )  # fmt: skip


@_fence_op("fence", Rule.FENCE)
@_fence_op("fence.release.sync_restrict::shared::cta", Rule.FENCE_SHARED)
@_fence_op("fence.mbarrier_init", Rule.FENCE_INIT)
@_fence_op("fence.proxy.alias", Rule.NOT_FOLLOWED)
@_fence_op("fence.proxy.async", Rule.FENCE_PROXY, Event.ASYNC_FENCE)
@_fence_op("fence.proxy.async::generic.acquire", Rule.FENCE_PROXY_ACQUIRE, Event.ASYNC_FENCE)
@_fence_op("fence.proxy.async::generic.release", Rule.FENCE_PROXY_RELEASE, Event.ASYNC_FENCE)
@_fence_op("fence.proxy.tensormap::generic.acquire", Rule.FENCE_MAP_ACQUIRE)
@_fence_op("fence.proxy.tensormap::generic.release", Rule.FENCE_MAP_RELEASE)
def bind_fence(instruction, kernel):
    """fence in all its forms."""
    form = instruction.name.removeprefix("fence").lstrip(".")
    if not _FENCES.fullmatch(form):
        raise unknown(instruction, "not a form of fence that the PTX ISA lists")
    return _no_effect


@_fence_op("membar", Rule.FENCE)
@_fence_op("membar.proxy.alias", Rule.NOT_FOLLOWED)
def bind_membar(instruction, kernel):
    """membar.{cta,gl,sys} and membar.proxy.alias."""
    if instruction.name not in ("membar.cta", "membar.gl", "membar.sys", "membar.proxy.alias"):
        raise unknown(instruction, "expected .cta, .gl, .sys or .proxy.alias")
    return _no_effect


@machine_op(
    "griddepcontrol",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.ENTRY,
    event=ByModifier(
        {"launch_dependents": Event.LAUNCH_DEPENDENTS, "wait": Event.WAIT_DEPENDENTS}, Event.NONE
    ),
    effect=Effect.NONE,
    ties=Ties.NEVER,
    native=NativeForm.ORDER,
)
def bind_griddepcontrol(instruction, kernel):
    """griddepcontrol.{wait,launch_dependents}: launches run one after the other here."""
    split_modifiers(instruction, ("wait", "launch_dependents"))
    return _no_effect


@machine_op(
    "nanosleep",
    rule=Rule.COMPUTES,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_nanosleep(instruction, kernel):
    """nanosleep.u32 t: others get a turn; no time passes."""
    split_modifiers(instruction, ("u32",))
    return lambda warp, lanes: YIELD


@machine_op(
    "applypriority",
    "discard",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_line_hint(instruction, kernel):
    """applypriority{.global}.L2::evict_normal and discard{.global}.L2 [a], 128: a line of the L2.

    discard leaves the line's contents undefined; here they stay.
    """
    level = "L2::evict_normal" if instruction.opcode == "applypriority" else "L2"
    split_modifiers(instruction, ("global", ""), (level,))
    if len(instruction.operands) != 2 or instruction.operands[1].value != 128:
        raise unknown(instruction, "the size must be 128")
    pointers, write = reader(instruction.operands[0], 64), instruction.opcode == "discard"

    def execute(warp, lanes: int) -> None:
        for lane in range(32):
            if lanes >> lane & 1:
                pointer = int(pointers(warp)[lane])
                if pointer % 128:
                    raise Misaligned(
                        f"{instruction.opcode} at {pointer:#x}, which is not 128-byte aligned"
                    )
                warp.cta.cluster.machine.memory.check(pointer, 128, write, instruction.opcode)

    return execute


@machine_op(
    "vote",
    "shfl",
    "match",
    statistics="vote",
    rule=Rule.COMPUTES,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_without_sync(instruction, kernel):
    """The forms without .sync, which no target from sm_70 on has."""
    raise unknown(
        instruction,
        f"{instruction.opcode} without .sync does not exist on sm_70 and "
        f"later; use {instruction.opcode}.sync with a membermask",
    )


@machine_op(
    "multimem",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.ALWAYS,
)
def bind_multimem(instruction, kernel):
    """multimem.*: multicast objects span several devices."""
    raise unknown(instruction, "multimem works on memory of several devices, and one is modelled")
