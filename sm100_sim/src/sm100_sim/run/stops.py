"""Early ends of a launch, in words: a refused access, a divergence, a hang."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from sm100_sim.causes import place_name, ranges, shortened, source_text
from sm100_sim.errors import (
    CtaExited,
    DivergenceError,
    Hang,
    MemoryFault,
    Misaligned,
    SimulationError,
)
from sm100_sim.state.barriers import RegisterPool

from .residency import Cluster, ResidentWarp

#: Places of a kernel that the report of a hang lists.
LISTED_WAITS = 16
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def stop_error(warp: ResidentWarp, divergence: bool) -> SimulationError:
    """The error for a fault or a divergence that native code reported."""
    context, compiled = warp.context, warp.compiled
    machine = warp.cta.cluster.machine
    if divergence:
        return DivergenceError(
            "lanes of one warp wait for each other at different instructions that all of them "
            f"must execute together; lanes {context.stop_lanes:#010x} are at the one named here"
        ).at(compiled.block_instruction[context.stop_block], warp.cta.ctaid, warp.index)
    fault = warp.fault()
    text = f"{fault.reason}: {fault.width} bytes at address {fault.address:#x}"
    if "global" in fault.reason:
        text += f". {machine.memory.nearest(fault.address)}"
    elif "shared::cta" in fault.reason:
        text += (
            f" (CTA rank {fault.address >> 24 & 0xFF}, executed in CTA rank {warp.cta.rank}); "
            "only .shared::cluster and generic addresses reach other CTAs"
        )
    elif "shared" in fault.reason:
        text += (
            f" (CTA rank {fault.address >> 24 & 0xFF}, offset {fault.address & 0xFFFFFF:#x}; "
            f"a CTA has {machine.shared_bytes} bytes, of which the first 1024 are the system's)"
        )
    instruction = compiled.instructions[context.fault_instruction]
    error = Misaligned if "misaligned" in fault.reason else MemoryFault
    if "allocated bytes" in fault.reason:
        target = warp.cta.cluster.cta(fault.address >> 24 & 0xFF)
        if not target.running:
            what = (
                f"{fault.width} bytes at its shared offset {fault.address & 0xFFFFFF:#x} are "
                "accessed"
            )
            error, text = CtaExited, target.gone(what)
    return error(text).at(instruction, warp.cta.ctaid, warp.index, fault.lane)


def hang_of(clusters: Iterable[Cluster], done: int, number: int) -> Hang:
    """The error that says what these clusters, the only ones left, wait for.

    done, number: clusters of the grid that are done, and in all.
    """
    left = sorted(clusters, key=lambda cluster: cluster.id)
    warps = [warp for cluster in left for warp in cluster.warps]
    # Warps that wait for registers come first: the others often wait for such a warp.
    warps.sort(key=lambda warp: not _waits_for_registers(warp))
    groups: dict[tuple, list[_Wait]] = {}
    for wait in (wait for warp in warps for wait in _waits(warp)):
        groups.setdefault((wait.instruction.index, _NUMBER.sub("", wait.what)), []).append(wait)
    lines = [_told(group) for group in list(groups.values())[:LISTED_WAITS]]
    if len(groups) > LISTED_WAITS:
        lines.append(f"  and {len(groups) - LISTED_WAITS} more places")
    return Hang(
        "the launch hangs: no warp can go on and no asynchronous operation is in flight; "
        f"clusters: {done} of {number} done, {len(left)} resident. Waiting:\n"
        + "\n".join(f"  {number}. {line}" for number, line in enumerate(lines, 1))
    )


class _Wait(NamedTuple):
    """Lanes of a warp that wait at an instruction, and what for."""

    warp: ResidentWarp
    lanes: int
    instruction: Any
    what: str


def _waits_for_registers(warp: ResidentWarp) -> bool:
    return any(isinstance(waiting.key, RegisterPool) for _, waiting in warp.all_waiting())


def _waits(warp: ResidentWarp) -> list[_Wait]:
    """List the waits of a warp's lanes, or where it polls."""
    found = [
        _Wait(warp, lanes, waiting.instruction, f"waits for {waiting.describe()}")
        for lanes, waiting in warp.all_waiting()
    ]
    if not found and warp.live:
        lane = (warp.live & -warp.live).bit_length() - 1
        found = [_Wait(warp, warp.live, warp.instruction_of(lane), "polls near here")]
    return found


def _told(group: list[_Wait]) -> str:
    """Waits at one instruction for one kind of thing: who, where, and what the first waits for."""
    first = group[0]
    instruction, ctas = first.instruction, {wait.warp.cta.ctaid for wait in group}
    warps = ranges("warp", sorted({wait.warp.index for wait in group}))
    some = f"CTA {min(ctas)}" if len(ctas) == 1 else f"{len(ctas)} CTAs from {min(ctas)} on"
    lanes = "" if all(wait.lanes == 2**32 - 1 for wait in group) else f" lanes {first.lanes:#010x}"
    where = f"`{shortened(instruction.text)}` (PTX line {instruction.line})"
    if instruction.source is not None:
        code = source_text(*instruction.source)
        where = f"{place_name(*instruction.source)}: {code + '  ' if code else ''}{where}"
    lead = "the first of them " if len(group) > 1 else ""
    return f"{some} {warps}{lanes} at {where}\n     {lead}{first.what}"
