"""`python -m bench ex2-sweep`: mixes of hardware and polynomial exp2, their error and their time.

Every mix of the grid is a configuration of the forward. On a GPU that runs it, it is timed; else
its compiled kernel is replayed by the timing model. The best of each mask, length and GPU can be
written as the tuning table that the operator's default configuration reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measure.exp2 import BLOCK, SEQLENS, Error, Times, case_of, error_of, grid, measured_times
from bench.measure.providers import Ours
from bench.measure.settings import Sampling
from bench.measure.timer import CudaTimer
from bench.modelled import modelled
from bench.suite import FORWARD
from bench.tables.comparison import RESOLUTION
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.kernels.blackwell import tuning
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern

#: Column `dtype` of rows of the kernel for q, k and v in e4m3.
E4M3 = "e4m3"

#: Times of mixes and classes, one after the other.
Timed = Iterable[tuple[tuple[Ex2Pattern, str], Times]]


def rows_of(
    times: dict[tuple[Ex2Pattern, str], Times],
    errors: dict[Ex2Pattern, Error],
    causal: bool,
    origin: dict[str, str],
) -> list[dict[str, Any]]:
    """A row for every mix and class; `chosen` marks one of each class.

    origin: gpu, basis and machine. Mixes slower than the fastest by less than the resolution, or
    not in every condition, are not ranked by time: of these hardware alone is chosen, the default,
    else the most accurate, the fewest emulated at equal error.
    """
    rows = []
    for (pattern, name), found in times.items():
        of_class = [t.seconds for (_, other), t in times.items() if other == name]
        fastest = min(of_class, key=lambda s: float(s[0]))
        # Predictions under the same constants; the fast runs of one against the slow of the other.
        nearest = fastest[[0, 2, 1]] if origin[BASIS] == "measured" else fastest
        behind = found.seconds / nearest - 1
        is_tied = bool(behind[0] <= RESOLUTION or behind.min() <= 0)
        row = row_of((pattern, name), times, errors[pattern], causal) | origin
        rows.append(row | {"tied": is_tied, "chosen": False})
    for name in SEQLENS:
        tied = [row for row in rows if row["seqlen_class"] == name and row["tied"]]
        min(tied, key=_preference)["chosen"] = True
    return rows


def row_of(
    job: tuple[Ex2Pattern, str],
    times: dict[tuple[Ex2Pattern, str], Times],
    error: Error,
    causal: bool,
) -> dict[str, Any]:
    """Return the row of a mix and class, beside hardware alone."""
    (pattern, name), found = job, times[job]
    seconds, hardware = found.seconds, times[HARDWARE_ONLY, name].seconds[0]
    flop = case_of(SEQLENS[name], causal).flop(FORWARD)
    return {
        "mask": "causal" if causal else "full", "seqlen_class": name, "seqlen": SEQLENS[name],
        "mix": label(pattern), "pattern": asdict(pattern),
        "degree": pattern.degree if pattern.true_share(BLOCK) else None,
        "true_share": float(pattern.true_share(BLOCK)), "exp2_error": error.exp2,
        "out_error": error.out, "ms": seconds[0] * 1e3, "low_ms": seconds.min() * 1e3,
        "high_ms": seconds.max() * 1e3, "tflops": flop / seconds[0] / 1e12,
        "step_clocks": found.step_clocks, "bound": found.bound, "gain": hardware / seconds[0] - 1,
        **found.figures,
    }  # fmt: skip


def _preference(row: dict[str, Any]) -> tuple:
    return row["true_share"] > 0, row["out_error"], row["true_share"], row["ms"]


def label(pattern: Ex2Pattern) -> str:
    if not pattern.true_share(BLOCK):
        return "hardware"
    last = "" if pattern.last_fragment_hardware else ", all fragments"
    return (
        f"freq {pattern.ex2_emu_freq}, res {pattern.ex2_emu_res}, "
        f"start {pattern.ex2_emu_start_frg}{last}"
    )


def is_e4m3(row: dict[str, Any]) -> bool:
    """Return True for a row of the kernel for q, k and v in e4m3."""
    return row.get("dtype") == E4M3


def entries(rows: Iterable[dict[str, Any]]) -> list[tuning.TunedPattern]:
    """The chosen rows as entries of the tuning table."""
    return [
        tuning.TunedPattern(
            row["gpu"], row["mask"] == "causal", row["seqlen_class"],
            Ex2Pattern(**row["pattern"]), row[BASIS], row[MACHINE], is_e4m3(row),
        )
        for row in rows
        if row["chosen"]
    ]  # fmt: skip


_COLUMNS = (
    Column("gpu", title="GPU"), Column("mask"), Column("seqlen"),
    Column("mix"), Column("degree"), Column("true_share", format=".2%", title="emulated"),
    Column("exp2_error", format=".2e", title="exp2, relative error"),
    Column("out_error", format=".3e", title="out, relative L2"),
    Column("ms", "ms", ".4g", "time"), Column("low_ms", "ms", ".4g", "low"),
    Column("high_ms", "ms", ".4g", "high"), Column("tflops", "TFLOPS", ".0f", "rate"),
    Column("step_clocks", "clocks", ".0f", "step"), Column("bound", title="bound by"),
    Column("gain", format="+.1%", title="over hardware"),
)  # fmt: skip


def tables(
    rows: list[dict[str, Any]], columns: tuple[Column, ...] = (), notes: tuple[str, ...] = ()
) -> list[Table]:
    """Return the whole grid, and the best of each mask and length. columns, notes: further ones of
    the grid."""
    note = (
        f"Times that differ by less than {RESOLUTION:.0%}, or not in one direction over the whole "
        "range, are not ranked: of those tied with the fastest hardware alone is chosen, the "
        "default, else the most accurate mix. Errors: numpy twin of the device code, P in "
        f"{E4M3 if is_e4m3(rows[0]) else 'bf16'}."
    )
    figure = "tflops" if rows[0]["step_clocks"] is None else "step_clocks"
    plot = Plot("true_share", figure, "line", series="seqlen_class", panel="mask")
    columns = (*_COLUMNS, *columns)
    by_share = sorted(rows, key=lambda row: (row["mask"], row["seqlen"], row["true_share"]))
    best = [row for row in by_share if row["chosen"]]
    of = f" in {E4M3}" if is_e4m3(rows[0]) else ""
    return [
        Table("ex2-sweep", f"exp2 mixes of the forward{of}", columns, by_share, notes, plot),
        Table("ex2-sweep", "Best mix", columns, best, (note,)),
    ]


def main(arguments: argparse.Namespace) -> int:
    if arguments.modelled or Ours().missing() is not None:
        return modelled("ex2_sweep", arguments)
    if arguments.e4m3:
        print("--e4m3 is not measured yet; accepted: with --modelled", file=sys.stderr)
        return 2
    timer, sampling = CudaTimer(), Sampling(arguments.warmup, arguments.runs)
    origin = {"gpu": "B200", BASIS: "measured", MACHINE: timer.gpu.name}

    def timed(patterns: Sequence[Ex2Pattern], causal: bool) -> Timed:
        return measured_times(patterns, causal, timer, sampling)

    found = swept(arguments, timed, origin)
    emit(tables(found), arguments)
    write(arguments, found)
    return 0


def swept(
    arguments: argparse.Namespace,
    timed: Callable[[Sequence[Ex2Pattern], bool], Timed],
    origin: dict[str, str],
) -> list[dict[str, Any]]:
    """Return the rows of the masks and mixes that were requested. timed: times of the mixes under a
    mask, causal or not."""
    axes = {name: getattr(arguments, name) for name in ("freq", "res", "start", "degree")}
    patterns = grid(axes, not arguments.all_fragments)
    errors = {pattern: error_of(pattern, is_e4m3=arguments.e4m3) for pattern in patterns}
    rows = []
    for mask in [arguments.mask] if arguments.mask else ["full", "causal"]:
        causal = mask == "causal"
        times = _shown(timed(patterns, causal), errors, causal, origin)
        rows += rows_of(times, errors, causal, origin)
    return rows


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the tuning table where one is requested."""
    if arguments.write:
        tuning.write(entries(rows), Path(arguments.write))
        print(f"tuning table: {arguments.write}", file=sys.stderr)


def _shown(
    timed: Timed, errors: dict[Ex2Pattern, Error], causal: bool, origin: dict[str, str]
) -> dict[tuple[Ex2Pattern, str], Times]:
    """Return the times of a mask's mixes and classes, the row of each printed as it is there."""
    times: dict[tuple[Ex2Pattern, str], Times] = {}

    def heard(one: tuple[tuple[Ex2Pattern, str], Times]) -> list[dict[str, Any]]:
        times.update([one])
        return [row_of(one[0], times, errors[one[0][0]], causal) | origin]

    doing = "measuring" if origin[BASIS] == "measured" else "replaying"
    for _ in results(timed, len(errors) * len(SEQLENS), _COLUMNS, heard, doing):
        pass
    return times
