"""Early ends of a launch, in words: a refused access, a divergence, a hang."""

from __future__ import annotations

from collections.abc import Iterable

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

#: Waiting warps that the report of a hang lists.
LISTED_WARPS = 64


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
    lines = [line for warp in warps for line in _waiting_lines(warp)]
    shown = lines[:LISTED_WARPS]
    if len(lines) > LISTED_WARPS:
        shown.append(f"  and {len(lines) - LISTED_WARPS} more")
    return Hang(
        "the launch hangs: no warp can go on and no asynchronous operation is in flight; "
        f"clusters: {done} of {number} done, {len(left)} resident. Waiting:\n" + "\n".join(shown)
    )


def _waits_for_registers(warp: ResidentWarp) -> bool:
    return any(isinstance(waiting.key, RegisterPool) for _, waiting in warp.all_waiting())


def _waiting_lines(warp: ResidentWarp) -> list[str]:
    """List the waits of a warp's lanes, one line for each."""
    name = f"  CTA {warp.cta.ctaid} warp {warp.index}"
    lines = []
    for lanes, waiting in warp.all_waiting():
        instruction = waiting.instruction
        source = f", {instruction.source[0]}:{instruction.source[1]}" if instruction.source else ""
        lines.append(
            f"{name} lanes {lanes:#010x} at `{instruction.text}` (PTX line {instruction.line}"
            f"{source}) waits for {waiting.describe()}"
        )
    if not lines and warp.live:
        lane = (warp.live & -warp.live).bit_length() - 1
        instruction = warp.instruction_of(lane)
        text = f"polls near `{instruction.text}` (PTX line {instruction.line})"
        lines.append(f"{name} lanes {warp.live:#010x} {text}")
    return lines
