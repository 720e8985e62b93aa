"""Shared addresses and submission, for the asynchronous machine operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from sm100_sim.errors import MemoryFault, SimulationError
from sm100_sim.state.events import AsyncOp, Touches
from sm100_sim.state.warp import SHARED_WINDOW, Warp, address, uniform

from .columns import Effect


def shared_address(operand, generic: bool = False) -> Callable[[Warp, int], int]:
    """Accessor of a shared address (CTA rank << 24 | offset) in the lowest set lane.

    `generic`: the instruction names no state space, so a 64-bit register holds a generic address;
    everything else is a shared address as it is. Raises MemoryFault when a generic address does
    not lie in the shared window.
    """
    base = operand.base if operand.kind == "mem" else operand
    wide = base.kind == "reg" and base.register.file == "r64"
    bits = 64 if wide and generic else 32
    read = address(operand, bits) if operand.kind == "mem" else uniform(operand, bits)
    if not wide:
        return read
    if not generic:
        return lambda warp, lanes: read(warp, lanes) & 0xFFFFFFFF

    def from_generic(warp: Warp, lanes: int) -> int:
        value = read(warp, lanes)
        offset = value - SHARED_WINDOW
        if not 0 <= offset < 1 << 32:
            raise MemoryFault(f"generic address {value:#x} is not in shared memory")
        return offset

    return from_generic


def require_own(warp: Warp, shared: int, what: str) -> None:
    """Raise MemoryFault if a shared address is not in the CTA's own memory.

    What names the state space .shared or .shared::cta reaches that alone (PTX ISA, "State spaces:
    shared"): ptxas makes other instructions of it than of .shared::cluster.
    """
    if shared >> 24 != warp.cta.rank:
        raise MemoryFault(
            f"{what} in .shared::cta at the address {shared:#x} of CTA rank {shared >> 24}, "
            f"executed in CTA rank {warp.cta.rank}; only .shared::cluster and generic addresses "
            "reach other CTAs"
        )


def require_cluster(warp: Warp, what: str) -> None:
    """Raise MemoryFault in a launch without clusters, where the hardware knows no such operation.

    A cluster of one CTA will do, if the kernel or its launch names it (docs/facts.md,
    `cluster-copies`).
    """
    if not warp.cta.cluster.machine.explicit_cluster:
        raise MemoryFault(
            f"{what} to .shared::cluster in a launch without clusters; launch clusters, be they of "
            "one CTA, or name them by .reqnctapercluster (the hardware ends the kernel with an "
            "illegal instruction)"
        )


def submit(
    warp: Warp,
    instruction,
    effect: Effect,
    perform: Callable[[], None],
    queue: Hashable | None = None,
    complete: Callable[[], None] | None = None,
    **touched,
) -> AsyncOp:
    """Issue an asynchronous operation; what it raises later names the place of its issue.

    effect: what the instruction's row names (`table.effect_of`). touched: fields of
    `events.Touches`.
    """
    if not effect:
        raise ValueError(f"{instruction.text}: its row of the instruction table names no effect")
    cta = warp.cta

    def perform_at() -> None:
        try:
            perform()
        except SimulationError as error:
            raise error.at(instruction, cta.ctaid, warp.index) from None

    operation = AsyncOp(effect, perform_at, queue, complete)
    operation.touches = Touches(warp, instruction, **touched)
    cta.cluster.machine.submit(operation)
    return operation
