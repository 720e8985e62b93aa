"""`python -m bench validate`: the timing model against what others and we have measured.

Tables: the single instructions that the tensor core's forms were made from; published rates of GEMM
and attention on B200, from the same projects' kernels run through the model; replays of windowed
kernels that the costs of their tiles were not fitted to; a Hopper GPU (`bench hopper`). The role of
a row says whether it can count as validation.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from bench.model import flash_attn_4 as theirs
from bench.model import ours, validation
from bench.model.calls import Kind
from bench.model.published.flash_attention import BACKWARD_256, FORWARD_128, FORWARD_256
from bench.model.published.gemm import GEMM_PUBLISHED, TILUS
from bench.model.published.rows import AS_PUBLISHED, BUILT_FROM, CONSISTENCY
from bench.model.replays import fitted
from bench.model.samples import BACKWARD_HELD_OUT, HELD_OUT
from bench.model.tiles import DKDV, DQ_PRODUCT, STEP_WORK
from bench.peers import flash_attn_4
from bench.tables.comparison import OURS
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from sm100_sim.timing import MEASURED, Machine, load, mma_cost

INSTRUCTION_COLUMNS = (
    Column("instruction"),
    Column("n", title="N"),
    Column("latency_published", "clocks", ".0f", "latency"),
    Column("latency_modelled", "clocks", ".0f", "modelled"),
    Column("interval_published", "clocks", ".0f", "interval"),
    Column("interval_modelled", "clocks", ".0f", "modelled"),
)
RATE_COLUMNS = (
    Column("case"),
    Column("clock", "GHz", ".3f", "locked clock"),
    Column("published", "TFLOPS", ".0f"),
    Column("modelled", "TFLOPS", ".0f"),
    Column("low", "TFLOPS", ".0f"),
    Column("high", "TFLOPS", ".0f"),
    Column("error", "", "+.0%"),
    Column("role"),
    Column("source"),
)


HELD_OUT_COLUMNS = (
    Column("kernel"), Column("seqlen"), Column("window"), Column("tiles"),
    Column("steps", format=".0f"), Column("masked", format=".0f"),
    Column("replayed", "clocks", ".0f"), Column("predicted", "clocks", ".0f", "by the fit"),
    Column("error", "", "+.1%"),
)  # fmt: skip


def instructions(machine: Machine) -> Table:
    """Latency and interval of single tcgen05.mma, published and by the closed forms."""
    rows = []
    for (group, m, a_in_tmem), found in MEASURED.items():
        place = "TMEM" if a_in_tmem else "SMEM"
        for n, (latency, interval) in found.items():
            cost = mma_cost(m, n, group, a_in_tmem)
            rows.append({
                "instruction": f"M {m}, cta_group::{group}, A from {place}",
                "n": n,
                "latency_published": latency,
                "latency_modelled": cost.latency,
                "interval_published": interval,
                "interval_modelled": cost.interval,
                "role": BUILT_FROM,
                BASIS: "modelled",
                MACHINE: modelled_machine(machine),
            })  # fmt: skip
    title = "Single tcgen05.mma, bf16, K = 16: what the closed forms were built from"
    plot = Plot("n", ("latency_published", "latency_modelled"), "line", panel="instruction")
    return Table("validate", title, INSTRUCTION_COLUMNS, rows, plot=plot)


def _finished(title: str, rows: list[dict[str, Any]], machine_name: str, *notes: str) -> Table:
    """The table of some rates, with the errors of its rows in a note."""
    for row in rows:
        row |= {BASIS: "modelled", MACHINE: modelled_machine(load(machine_name))}
    errors = np.array([row["error"] for row in rows])
    close = ", ".join(
        f"within {aim} % {np.sum(np.abs(errors) <= aim / 100)} of {len(errors)}" for aim in (10, 20)
    )
    median = f"{np.median(np.abs(errors)):.0%}"
    summary = f"Of another version than the one replayed: median error {median}, {close}."
    plot = Plot(("case", "source"), ("published", "modelled"))
    return Table("validate", title, RATE_COLUMNS, rows, (summary, *notes), plot)


def rates(machine_name: str) -> list[Table]:
    """Published rates on B200 and the model's, an error for each row."""
    rows = []
    for size, rate in GEMM_PUBLISHED.items():
        tflops = 2.0 * size**3 / validation.gemm_seconds(size, machine_name) / 1e12
        rows.append(validation.rate_row(f"GEMM {size}^3", rate, tflops, AS_PUBLISHED, TILUS))
    rows += validation.attention_rows(FORWARD_128, machine_name)
    locked = list(validation.attention_rows(FORWARD_256, machine_name))
    backward = list(validation.attention_rows(BACKWARD_256, machine_name))
    version = "The published rates are of earlier versions of flash-attn-4 than the one replayed."
    return [
        _finished(
            "Rates on B200, published and modelled", rows, machine_name,
            "Publications of one case differ by a fifth and more; clocks and power of their GPUs "
            "are not given, and which GPU PR 2605 ran on is inferred from its per cent of peak. "
            "The GEMM is quack's, the published rate cuBLAS's and Tilus's.",
        ),
        _finished(
            "Forward at head_dim 256 on B200, clocks locked", locked, machine_name,
            f"Modelled at the clock of the row. {version} Batches of the rows at 1755 MHz are not "
            "published: 131072 tokens.",
        ),
        _finished(
            "Backward at head_dim 256 on B200, clocks locked", backward, machine_name,
            f"Modelled at the clock of the row. {version} Five products are counted, seven done. "
            "Rates at head_dim 128 are published, too (PR 2280: 1360 TFLOPS full, 1209 causal at "
            "4x8192); that kernel is not modelled.",
        ),
    ]  # fmt: skip


def held_out(machine: Machine) -> Table:
    """Replays of windowed kernels beside what costs fitted to other replays say of them."""
    kind = Kind(True, window=True)
    given = machine, validation.DRAWS
    inside, outside = ours.Variant(kind), ours.Variant(kind, samples=HELD_OUT)
    rows = list(
        validation.held_out_rows(
            OURS, fitted(ours.replays(inside, *given), inside.policy)[0],
            (HELD_OUT, ours.replays(outside, *given)), STEP_WORK,
        )
    )  # fmt: skip
    variant = theirs.Variant(kind)
    rows += validation.held_out_rows(
        flash_attn_4.PACKAGE, fitted(theirs.replays(variant, *given), "single")[0],
        (HELD_OUT, theirs.replays(variant, *given, HELD_OUT)), STEP_WORK,
    )  # fmt: skip
    # Under the scheduler that such a call takes by default, as the suite has replayed them.
    for which, name, work in (
        ("kept dkdv", "dK/dV, dS stored", DKDV), ("kept dq", "dQ from stored dS", DQ_PRODUCT)
    ):  # fmt: skip
        inside = ours.Variant(kind, use_clc=True, kernel=which)
        outside = replace(inside, samples=BACKWARD_HELD_OUT)
        costs = fitted(ours.replays(inside, *given), inside.policy)[0]
        runs = ours.replays(outside, *given)
        rows += validation.held_out_rows(f"{OURS}, {name}", costs, (BACKWARD_HELD_OUT, runs), work)
    for row in rows:
        row |= {"role": CONSISTENCY, BASIS: "modelled", MACHINE: modelled_machine(machine)}
    note = (
        "Both columns are the model's: this shows that costs of masked and unmasked steps carry "
        "over to other windows and lengths, not that the model is right. Steps: of 256 queries and "
        "128 keys; a plain product has none that is masked."
    )
    title = "Windowed kernels: replays of one cluster outside the fit, and costs of the fit"
    plot = Plot(("kernel", "seqlen", "window"), ("replayed", "predicted"))
    return Table("validate", title, HELD_OUT_COLUMNS, rows, (note,), plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--machine", default="b200", help="b200, b300 or a file")
    parser.add_argument("--no-hopper", action="store_true", help="leave `bench hopper` out")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status. Raises RuntimeError if flash-attn-4 is not installed."""
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    machine = load(arguments.machine)
    tables = [instructions(machine), *rates(arguments.machine), held_out(machine)]
    if not arguments.no_hopper:
        from . import hopper

        tables.append(hopper.compare())
    emit(tables, arguments)
    return 0
