"""`python -m bench accuracy`: what the polynomial exp2 costs in out, against float64.

The compiled forward runs in the simulator, once for every degree, mix and dtype, on the same
inputs. The share of emulated exp2 is counted while it runs and must be that of the pattern.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from bench.measure import accuracy as measured
from bench.measure.accuracy import Accuracy
from bench.processes import add_jobs_option
from bench.tables.origin import simulator_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from softmax_emu.pattern import Ex2Pattern

COLUMNS = (
    Column("dtype"),
    Column("degree"),
    Column("true_share", format=".2%", title="emulated"),
    Column("mix", title="freq, res"),
    Column("max_error", format=".3e", title="out, max error"),
    Column("pytorch_max_error", format=".3e", title="of same-dtype PyTorch"),
    Column("rel_l2", format=".3e", title="out, relative L2"),
    Column("lse_max_error", format=".2e", title="LSE, max error"),
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _degree(pattern: Ex2Pattern) -> int | None:
    return pattern.degree if pattern.true_share() else None


def table(results: list[Accuracy]) -> Table:
    """A row for each case."""
    shape = results[0].case.shape
    rows = [
        {
            "dtype": _name(result.case.dtype),
            "degree": _degree(result.case.pattern),
            "true_share": result.executed_share,
            "mix": _mix(result.case.pattern),
            "pattern": asdict(result.case.pattern),
            **asdict(result.case.shape),
            **asdict(result.comparison),
            "tolerance": result.comparison.tolerance,
            BASIS: "measured",
            MACHINE: simulator_machine(),
        }
        for result in results
    ]
    title = (
        f"Error of the forward against float64: {shape.seqlen_q} queries, {shape.seqlen_k} keys, "
        "one head, full attention, standard normal inputs"
    )
    plot = Plot(("degree", "true_share"), "rel_l2", panel="dtype")
    return Table("accuracy", title, COLUMNS, rows, plot=plot)


def _mix(pattern: Ex2Pattern) -> str:
    if not pattern.true_share():
        return "hardware"
    return f"{pattern.ex2_emu_freq}, {pattern.ex2_emu_res}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_jobs_option(parser)
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    emit(table(measured.measure_all(measured.default_cases(), arguments.jobs)), arguments)
    return 0
