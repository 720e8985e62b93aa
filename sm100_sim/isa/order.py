"""Instructions that order or pace others: fences, programmatic launches, sleeping.

PTX ISA 9.3, "membar, fence", "griddepcontrol", "nanosleep". Memory of the simulator is sequentially
consistent, so a fence changes no state; its form is checked all the same.
"""

from __future__ import annotations

import re

from sm100_sim.events import YIELD
from sm100_sim.isa.table import machine_op, split_modifiers, unknown

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


@machine_op("fence", "fence.proxy", statistics=lambda i: (
    "fence.proxy" if i.name.startswith("fence.proxy") else "fence"))
def bind_fence(instruction, kernel):
    """fence in all its forms."""
    form = instruction.name.removeprefix("fence").lstrip(".")
    if not _FENCES.fullmatch(form):
        raise unknown(instruction, "not a form of fence that the PTX ISA lists")
    return _no_effect


@machine_op("membar")
def bind_membar(instruction, kernel):
    """membar.{cta,gl,sys} and membar.proxy.alias."""
    if instruction.modifiers not in (("cta",), ("gl",), ("sys",), ("proxy", "alias")):
        raise unknown(instruction, "expected .cta, .gl, .sys or .proxy.alias")
    return _no_effect


@machine_op("griddepcontrol")
def bind_griddepcontrol(instruction, kernel):
    """griddepcontrol.{wait,launch_dependents}: launches run one after the other here."""
    split_modifiers(instruction, ("wait", "launch_dependents"))
    return _no_effect


@machine_op("nanosleep")
def bind_nanosleep(instruction, kernel):
    """nanosleep.u32 t: others get a turn; no time passes."""
    split_modifiers(instruction, ("u32",))
    return lambda warp, lanes: YIELD
