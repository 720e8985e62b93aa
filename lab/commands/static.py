"""`python -m lab static`: what the compiler made of our kernels and of flash-attn-4's.

Of each kernel registers, stack, local memory, SMEM, instructions; of the forward's two loops that
take the time the instructions of one step by class, of the backward's kernels what they execute for
one unit of 256 queries x 128 keys.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from bench.peers import flash_attn_4
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table, markdown
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.compiled import compiled_backward, compiled_forward
from lab.compiled.compiled_backward import SEQLEN, UNIT_KV, UNIT_Q, BackwardReport
from lab.compiled.compiled_forward import STEP_COLUMNS, KernelReport, LoopCounts
from lab.compiled.instruction_classes import CLASS_NAMES
from lab.model.origin import compiler_machine


def _row(report: KernelReport) -> dict[str, Any]:
    return {
        "project": report.project,
        "mask": report.mask,
        "true_share": float(report.share),
        "own_tuning": report.is_own_tuning,
        "registers": report.registers,
        "stack": report.stack,
        "local": report.local,
        "spills": report.spills,
        "smem_bytes": report.smem_bytes,
        "instructions": report.instructions,
        **{
            f"{name}_step": {"total": loop.total, "steps": loop.steps, **loop.classes}
            for name, loop in (("softmax", report.softmax), ("mma", report.mma))
        },
        BASIS: "computed",
        MACHINE: compiler_machine(),
    }


FORWARD_COLUMNS = (
    Column("project"),
    Column("mask"),
    Column("true_share", format=".2%", title="emulated"),
    Column("own_tuning"),
    Column("registers"),
    Column("stack"),
    Column("local"),
    Column("spills"),
    Column("smem_bytes", "B", title="SMEM"),
    Column("instructions"),
)


def forward_table(reports: list[KernelReport]) -> Table:
    """A row for each kernel, its loops' classes inside; the loops of each mask as notes."""
    missing = flash_attn_4.unavailable()
    notes = [f"Without the other project to compare with: {missing}."] if missing else []
    for title, name in (("Unmasked softmax loop", "softmax"), ("MMA loop", "mma")):
        for mask in dict.fromkeys(report.mask for report in reports):
            chosen = [report for report in reports if report.mask == mask]
            notes += [
                f"{title}, {mask} attention: instructions of one warp per step of "
                f"{STEP_COLUMNS} keys, at each true share of emulated exp2",
                _loop_table(chosen, [getattr(report, name) for report in chosen]),
            ]
    title = f"Compiled kernels, forward, bf16, head_dim {HEAD_DIM}"
    plot = Plot(("mask", "true_share"), "instructions", series="project")
    return Table("static", title, FORWARD_COLUMNS, [_row(r) for r in reports], tuple(notes), plot)


def _loop_table(reports: list[KernelReport], loops: list[LoopCounts]) -> str:
    """Classes down, kernels across; classes that occur nowhere are left out."""
    header = [
        f"{r.project}, {float(r.share):.2%}" + (" (its own)" if r.is_own_tuning else "")
        for r in reports
    ]
    names = [name for name in CLASS_NAMES if any(loop.classes[name] for loop in loops)]
    rows = [("class", *header)]
    rows += [(name, *(f"{loop.classes[name]:g}" for loop in loops)) for name in names]
    return markdown([*rows, ("all", *(f"{loop.total:g}" for loop in loops))])


BACKWARD_COLUMNS = (
    Column("project"),
    Column("kernel"),
    Column("registers"),
    Column("stack"),
    Column("local"),
    Column("spills"),
    Column("smem_bytes", "B", title="SMEM"),
    Column("tmem_columns", title="TMEM columns"),
    Column("instructions"),
    Column("executed", "a unit", ".0f"),
    Column("mmas", "a unit", ".1f", "MMAs"),
    Column("load_bytes", "B a unit", ".0f", "TMA loads"),
    Column("store_bytes", "B a unit", ".0f", "TMA stores"),
)


def backward_table(reports: list[BackwardReport], seqlen: int = SEQLEN) -> Table:
    """A row for each kernel."""
    missing = flash_attn_4.unavailable()
    notes = [f"Without the other project to compare with: {missing}."] if missing else []
    notes.append(
        f"A unit is {UNIT_Q} queries x {UNIT_KV} keys; what is executed in it was counted in a "
        f"simulated run: full attention, seqlen {seqlen}, one head, prologues included."
    )
    origin = {BASIS: "computed", MACHINE: compiler_machine()}
    rows = [asdict(report) | origin for report in reports]
    title = f"Compiled kernels, backward, bf16, head_dim {HEAD_DIM}"
    plot = Plot("kernel", "executed", series="project")
    return Table("static", title, BACKWARD_COLUMNS, rows, tuple(notes), plot)


def main(arguments: argparse.Namespace) -> int:
    tables = []
    if arguments.direction != "backward":
        found = results(compiled_forward.reports(), compiled_forward.count(), FORWARD_COLUMNS,
                        lambda report: [_row(report)], "compiling")  # fmt: skip
        tables.append(forward_table(list(found)))
    if arguments.direction != "forward":
        backwards = results(compiled_backward.measure(), compiled_backward.count(),
                            BACKWARD_COLUMNS, lambda one: [asdict(one)], "simulating")  # fmt: skip
        tables.append(backward_table(compiled_backward.in_order(backwards)))
    emit(tables, arguments)
    return 0
