"""`python -m bench roofline`: clocks of each resource for a shape, without any waiting.

The busiest resource bounds a kernel from below, whatever its schedule; how far above it stays is
what `python -m bench timing` models. All figures are closed forms (`demand`) of the kernels'
configuration and of the machine's constants.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.model import demand
from bench.model.machines import gpu_of
from bench.suite import BACKWARD, DIRECTIONS, FORWARD, Case
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.shape_options import add_shape_options, chosen_case
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from fa4_hd256.kernels.blackwell.forward.config import CTAS, ForwardConfig
from sm100_sim.timing.machine_constants import Machine, load
from softmax_emu.pattern import Ex2Pattern

COLUMNS = (
    Column("direction"),
    Column("kernel"),
    Column("resource"),
    Column("step_amount", format=".0f", title="amount a step"),
    Column("unit"),
    Column("step_clocks", "clocks", ".0f", "a step"),
    Column("low", "clocks", ".0f"),
    Column("high", "clocks", ".0f"),
    Column("share", format=".0%", title="of the busiest"),
    Column("microseconds", "us", ".1f", "whole problem"),
    Column("tflops", "TFLOPS", ".0f", "bound"),
)


def rows(
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
            "step_amount": amount, "unit": "B"
        }
    resource = next(r for r in demand.RESOURCES if r.name == name)
    step = total.kernel.step if total.steps else total.kernel.tile
    low, high = resource.clock_range(step, machine)
    return {
        "step_amount": resource.amount(step), "unit": resource.unit,
        "step_clocks": resource.clocks(step, machine.values()), "low": low, "high": high,
    }  # fmt: skip


def table(case: Case, directions: tuple[str, ...], machine: Machine, pattern=None) -> Table:
    """All kernels of the directions on one case."""
    found = [row for direction in directions for row in rows(case, direction, machine, pattern)]
    bounds = []
    for name in dict.fromkeys((row["direction"], row["kernel"]) for row in found):
        chosen = [row for row in found if (row["direction"], row["kernel"]) == name]
        busiest = max(chosen, key=lambda row: row["clocks"])
        bounds.append(f"{name[1]}: {busiest['resource']}, {busiest['microseconds']:.1f} us")
    notes = (
        "Bounds: " + "; ".join(bounds) + ".",
        "A step is 256 queries x 128 keys of a CTA pair, its figures are of one CTA; those of "
        "preprocess, which has no steps, are of 256 rows. The whole problem includes what tiles "
        "need beside their steps. HBM: every tensor once. Formulas: docs/roofline.md.",
    )
    title = f"Roofline, {case.shape}, heads {case.heads_text}, {case.mask}, head_dim 256, bf16"
    plot = Plot("resource", "microseconds", series="kernel", panel="direction")
    return Table("roofline", title, COLUMNS, found, notes, plot)


def chosen_pattern(arguments: argparse.Namespace) -> Ex2Pattern | None:
    """The mix of exp2 of the options. Raises ValueError for one option without the other."""
    if (arguments.freq is None) != (arguments.res is None):
        raise ValueError("--freq and --res belong together")
    return None if arguments.freq is None else Ex2Pattern(arguments.freq, arguments.res)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser, seqlen=8192)
    parser.add_argument("--freq", type=int, help="ex2_emu_freq; with --res, default: as configured")
    parser.add_argument("--res", type=int, help="ex2_emu_res")
    parser.add_argument("--machine", default="b200", help="b200, b300 or a file")
    parser.add_argument("--direction", choices=DIRECTIONS, help="both, if not given")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    directions = (arguments.direction,) if arguments.direction else (FORWARD, BACKWARD)
    case, pattern = chosen_case(arguments), chosen_pattern(arguments)
    emit(table(case, directions, load(arguments.machine), pattern), arguments)
    return 0
