"""Closed forms of a case: clocks of each resource, FLOP for each byte of each level of memory.

Rows for `lab roofline` and `lab intensity`, from `demand`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.peaks import SM100_FLOP_PER_CLOCK
from bench.suite import FORWARD, Case
from bench.tables.table import BASIS, MACHINE
from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from fa4_hd256.kernels.blackwell.forward.config import CTAS, ForwardConfig
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.compiled import demand
from lab.compiled.demand import Total
from lab.model.machines import gpu_of
from lab.model.origin import modelled_machine
from sm100_sim.timing import Machine, Values


def resource_rows(
    case: Case, direction: str, machine: Machine, pattern: Ex2Pattern | None = None
) -> list[dict[str, Any]]:
    """A row for each kernel of the direction and each resource.

    low, high: of the clocks of a step, over the ranges of the machine's constants. share: of the
    kernel's busiest resource, over the whole problem. tflops: what the convention's FLOP of the
    kernel would give if this resource were the only limit; a backward kernel has the part of them
    that its products are of all products.
    """
    values, found = machine.values(), []
    kernels = demand.totals(case, direction, configuration(direction, pattern), gpu_of(machine))
    products = sum(total.demand.flop for total in kernels)
    for total in kernels:
        clocks = {
            resource.name: demand.machine_clocks(total, resource, values)
            for resource in demand.RESOURCES
        }
        clocks[demand.HBM] = demand.hbm_clocks(total, values)
        flop = case.flop(direction) * total.demand.flop / products if products else 0.0
        for name, whole in clocks.items():
            if not whole:
                continue
            seconds = whole / (values.clock_ghz * 1e9)
            found.append({
                "direction": direction, "kernel": total.kernel.name, "resource": name,
                **_step(total, name, machine),
                "clocks": whole, "share": whole / max(clocks.values()),
                "microseconds": seconds * 1e6,
                "tflops": flop / seconds / 1e12 if flop else None,
                "steps": total.steps, "tiles": total.tiles,
                BASIS: "computed", MACHINE: modelled_machine(machine),
            })  # fmt: skip
    return found


def configuration(direction: str, pattern: Ex2Pattern | None) -> Any:
    """The default configuration with that mix of exp2, None for its own."""
    kind = ForwardConfig if direction == FORWARD else BackwardConfig
    return kind() if pattern is None else kind(ex2_pattern=pattern)


def _step(total: demand.Total, name: str, machine: Machine) -> dict[str, Any]:
    """Amount and clocks of one step of a CTA; of HBM its part of the whole, if it has steps."""
    if name == demand.HBM:
        if not total.steps:
            return dict.fromkeys(("step_amount", "step_clocks", "low", "high")) | {"unit": "B"}
        ctas = CTAS * total.steps
        clocks = [
            function * machine.values().sms / ctas
            for function in (
                demand.hbm_clocks(total, machine.values()),
                *demand.extremes(
                    lambda values: demand.hbm_clocks(total, values), machine,
                    ("hbm_terabytes", "clock_ghz"),
                ),
            )
        ]  # fmt: skip
        amount = total.hbm_bytes / ctas
        return dict(zip(("step_clocks", "low", "high"), clocks)) | {
            "step_amount": amount,
            "unit": "B",
        }
    resource = next(r for r in demand.RESOURCES if r.name == name)
    step = total.kernel.step if total.steps else total.kernel.tile
    low, high = resource.clock_range(step, machine)
    return {
        "step_amount": resource.amount(step), "unit": resource.unit,
        "step_clocks": resource.clocks(step, machine.values()), "low": low, "high": high,
    }  # fmt: skip


@dataclass(frozen=True)
class Level:
    """bytes: moved by a kernel on a case. bytes_per_clock: delivered to one SM; constants: those
    that this depends on."""

    name: str
    bytes: Callable[[Total], float]
    bytes_per_clock: Callable[[Values], float]
    constants: tuple[str, ...]


def _hbm_bytes_per_clock(values: Values) -> float:
    return values.hbm_terabytes * 1e12 / (values.sms * values.clock_ghz * 1e9)


def _of(name: str, bytes_of: Callable[[Total], float], resource: str) -> Level:
    found = next(r for r in demand.RESOURCES if r.name == resource)
    return Level(name, bytes_of, found.rate, found.constants)


LEVELS = (
    Level("HBM", lambda t: t.hbm_bytes, _hbm_bytes_per_clock, ("hbm_terabytes", "clock_ghz")),
    _of("L2", lambda t: t.demand.l2_bytes, "TMA and L2"),
    _of("SMEM, operands", lambda t: t.demand.operand_bytes, "SMEM port"),
    _of("SMEM, all", lambda t: t.demand.smem_bytes, "SMEM port"),
    _of("TMEM, warps", lambda t: t.demand.tmem_bytes, "TMEM"),
)


def level_rows(case: Case, direction: str, machine: Machine) -> list[dict[str, Any]]:
    """A row for each kernel of the direction that has products, and each level.

    flop: what the tensor cores execute, whole steps; useful: the part of it that the convention
    counts. margin: intensity over the machine's balance, low and high over the ranges of its
    constants; below 1 the level limits.
    """
    found = []
    totals = demand.totals(case, direction, gpu=gpu_of(machine))
    products = sum(total.demand.flop for total in totals)
    for total in totals:
        flop = total.demand.flop
        for level in LEVELS if flop else ():
            moved = level.bytes(total)
            intensity = flop / moved

            def margin(values: Values, level: Level = level, intensity: float = intensity) -> float:
                return intensity * level.bytes_per_clock(values) / SM100_FLOP_PER_CLOCK

            central = margin(machine.values())
            low, high = demand.extremes(margin, machine, level.constants)
            found.append({
                "case": f"{case.shape}, {case.heads_text}, {case.mask}",
                "direction": direction, "kernel": total.kernel.name, "level": level.name,
                "flop": flop, "useful": case.flop(direction) / products, "bytes": moved,
                "intensity": intensity, "balance": intensity / central, "margin": central,
                "margin_low": low, "margin_high": high,
                "limited_by": "tensor core" if central >= 1 else level.name,
                BASIS: "computed", MACHINE: modelled_machine(machine),
            })  # fmt: skip
    return found


#: (batch, seqlen, heads, KV heads): short, where HBM counts most, to long; few KV heads and many.
SHAPES = ((64, 512, 16, 2), (4, 8192, 16, 2), (4, 8192, 16, 16), (1, 32768, 16, 2))


def cases() -> list[Case]:
    """Full and causal attention of `SHAPES`."""
    return [
        Case("chosen", ((seqlen, seqlen),) * batch, heads, heads_kv, causal)
        for batch, seqlen, heads, heads_kv in SHAPES
        for causal in (False, True)
    ]
