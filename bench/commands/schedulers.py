"""`python -m bench schedulers`: the static tile scheduler against the dynamic one (CLC).

On a GPU that runs the kernels, both are timed, interleaved, chosen by the environment variable
FA_CLC as a user would. Without one, the tiles of every problem are placed on the clusters of the
machine by either rule, with costs from replays of the compiled kernel.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench import suite
from bench.measure.providers import Ours
from bench.measure.settings import Sampling
from bench.measure.throughput import measured_row, times_of
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer
from bench.modelled import modelled
from bench.suite import Case, equal, ragged_lengths
from bench.tables.comparison import RESOLUTION
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.schedulers.choice import VARIABLE

STATIC, CLC = "static", "CLC"


def default_cases() -> list[Case]:
    """Return the cases where the choice may matter: equal and unequal tiles, few and many of
    them."""
    gemma, qwen = (8, 4), (16, 2)
    return [
        *(Case("dense", equal(b, s), *qwen, False) for b, s in ((4, 4096), (1, 8192))),
        # 17 query blocks per head: a last wave that is nearly empty.
        Case("dense", equal(1, 4352), *qwen, False),
        *(
            Case("causal", equal(b, s), *qwen, True)
            for b, s in ((16, 1024), (4, 4096), (2, 8192), (1, 16384), (1, 32768))
        ),
        Case("window", equal(8, 4096), *gemma, True, (512, None)),
        Case("window", equal(1, 65536), *gemma, True, (1023, None)),
        *(
            Case("varlen", equal(b, s), *qwen, True, packed=True)
            for b, s in ((16, 1024), (4, 4096), (2048, 34))
        ),
        *(
            Case("ragged", ragged_lengths(count, longest), *qwen, causal, packed=True)
            for count, longest in ((8, 8192), (64, 4096))
            for causal in (True, False)
        ),
    ]


def identity(case: Case, direction: str) -> dict[str, Any]:
    """Return the columns that say which call a row is of."""
    return {
        "direction": direction, "group": case.group, "shape": case.shape,
        "heads": case.heads_text, "mask": case.mask,
    }  # fmt: skip


def better(gains: np.ndarray) -> str:
    """Return the faster scheduler; neither where the difference is below the resolution or of
    either sign."""
    if abs(gains[0]) < RESOLUTION or gains.min() < 0 < gains.max():
        return "not ranked"
    return CLC if gains[0] > 0 else STATIC


class _ByVariable(Ours):
    def __init__(self, name: str, value: str) -> None:
        super().__init__(name)
        self.environment = {VARIABLE: value}


def measured(job: tuple[Case, str], timer: CudaTimer, sampling: Sampling) -> dict[str, Any]:
    """Return the row of both schedulers on the timer's GPU, results checked before."""
    case, direction = job
    row = measured_row(job, [_ByVariable(STATIC, "0"), _ByVariable(CLC, "1")], timer, sampling)
    times = times_of(case, row, (STATIC, CLC))
    # The widest range: the slow runs of one against the fast ones of the other.
    gains = times[STATIC] / times[CLC][[0, 2, 1]] - 1
    return {
        **identity(case, direction), "tiles": None, STATIC: row[STATIC], CLC: row[CLC],
        "gain": float(gains[0]), "gain_low": float(gains.min()),
        "gain_high": float(gains.max()), "static_balance": None, "clc_balance": None,
        "bound": None, "better": better(gains), "details": row["details"],
        BASIS: row[BASIS], MACHINE: row[MACHINE],
    }  # fmt: skip


COLUMNS = (
    Column("direction"), Column("group"), Column("shape"), Column("heads"), Column("mask"),
    Column("tiles"),
    Column(STATIC, "TFLOPS", ".0f"), Column(CLC, "TFLOPS", ".0f"),
    Column("gain", format="+.1%", title="CLC over static"),
    Column("gain_low", format="+.1%", title="low"),
    Column("gain_high", format="+.1%", title="high"),
    Column("static_balance", format=".1%", title="static, clusters busy"),
    Column("clc_balance", format=".1%", title="CLC, clusters busy"),
    Column("bound", title="static bound by"), Column("better"),
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    return compared(rows, COLUMNS)


def compared(
    rows: list[dict[str, Any]], columns: tuple[Column, ...], notes: tuple[str, ...] = ()
) -> Table:
    note = (
        f'"better" names a scheduler where they differ by {RESOLUTION:.0%} or more, in one '
        "direction over the whole range."
    )
    plot = Plot(("shape", "mask"), (STATIC, CLC), panel="group")
    return Table("schedulers", "Tile schedulers, bf16", columns, rows, (note, *notes), plot)


def main(arguments: argparse.Namespace) -> int:
    if arguments.modelled or Ours().missing() is not None:
        return modelled("schedulers", arguments)
    limit, timer = TimeLimit(arguments.within), CudaTimer()
    sampling = Sampling(arguments.warmup, arguments.runs)
    jobs = [(case, arguments.direction) for case in suite.selected(arguments, default_cases)]
    begun = (measured(job, timer, sampling) for job in limit.begun(jobs))
    emit(limit.noted(table(ready(begun, len(jobs), COLUMNS, "measuring"))), arguments)
    return 0
