"""`python -m bench ex2-sweep`: mixes of hardware and polynomial exp2, their error and their time.

Every mix of the grid is a configuration of the forward. On a GPU that runs it, it is timed; else
its compiled kernel is replayed by the timing model. The best of each mask, length and GPU can be
written as the tuning table that the operator's default configuration reads.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measure.checking import check_forward
from bench.measure.providers import Inputs, Ours
from bench.measure.timer import CudaTimer, Sampling, add_sampling_options, interleave
from bench.model import ours
from bench.model.calls import Kind
from bench.model.predictor import add_model_options
from bench.model.replays import PATH_COLUMNS, Paths, Replayed, path_figures, path_note
from bench.model.samples import SAMPLES
from bench.model.tiles import STEP_WORK
from bench.processes import add_jobs_option, each
from bench.suite import FORWARD, Case
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.kernels.blackwell import tuning
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from sm100_sim.timing.machine_constants import load
from sm100_sim.timing.problem import TileCosts
from softmax_emu.coefficients import COEFFICIENTS
from softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern
from softmax_emu.reference_twin import exponentiate, round_to_bfloat16

from .throughput import RESOLUTION

#: Columns of a step, to which a pattern is applied.
BLOCK = ForwardConfig.block_kv
#: What stands for each class of `tuning.SEQLEN_CLASSES`; 32k tokens, or one sequence.
SEQLENS = {"short": 1024, "medium": 8192, "long": 65536}
HEADS = (16, 2)
#: What a mix is replayed on, beside the hardware's mix on `SAMPLES`: one long tile.
SAMPLE = SAMPLES[-1]


@dataclass(frozen=True)
class Times:
    """Of one mix and class. seconds: median, p20 and p80, or of all replays, the central one first.

    bound: what decides the modelled time. step_clocks: modelled, of a step of a CTA pair: what the
    mix can change where the power limit or HBM decides. paths: of the replays behind it.
    """

    seconds: np.ndarray
    bound: str | None = None
    step_clocks: float | None = None
    paths: Paths | None = None


@dataclass(frozen=True)
class Error:
    """Of one mix. exp2: largest relative error of an exp2; out: relative L2, P in bf16."""

    exp2: float
    out: float


def error_of(pattern: Ex2Pattern, rows: int = 64, keys: int = 512, seed: int = 0) -> Error:
    """Errors by the numpy twin, bit-exact with the device code where the polynomial is used.

    The scores are those of standard normal q and k at softmax scale 1/16; products are in float64.
    """
    generator = np.random.default_rng(seed)
    scores = generator.standard_normal((rows, keys)).astype(np.float32) * np.float32(16)
    values = generator.standard_normal((keys, HEAD_DIM))
    scale_log2, top = np.log2(np.e) / 16, scores.max(axis=1)
    found = np.concatenate(
        [
            exponentiate(scores[:, begin : begin + BLOCK], scale_log2, top, pattern)
            for begin in range(0, keys, BLOCK)
        ],
        axis=1,
    )
    exact = np.exp2((scores.astype(np.float64) - top[:, None]) * float(np.float32(scale_log2)))
    relative = np.abs(found / exact - 1)
    out = (round_to_bfloat16(found) @ values) / found.sum(axis=1, dtype=np.float64)[:, None]
    expected = (exact @ values) / exact.sum(axis=1)[:, None]
    distance = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    # Exponents far below the row's maximum are rounded as arguments, on both paths alike.
    return Error(float(relative[exact > 2.0**-8].max()), float(distance))


def grid(axes: dict[str, Sequence[int]], last_fragment_hardware: bool) -> list[Ex2Pattern]:
    """Hardware only, then the mixes of all combinations that differ in an element or a degree.

    axes: values of ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg and degree; of a combination with
    res above freq there is none. Raises ValueError for a value that no pattern accepts.
    """
    found = {_elements(HARDWARE_ONLY): HARDWARE_ONLY}
    for freq, res, start, degree in itertools.product(*axes.values()):
        if res > freq > 0:
            continue
        pattern = Ex2Pattern(freq, res if freq else 0, start, last_fragment_hardware, degree)
        found.setdefault(_elements(pattern), pattern)
    return list(found.values())


def _elements(pattern: Ex2Pattern) -> tuple:
    """What is compiled: the emulated columns of a step, and how."""
    fragments, columns = BLOCK // 32, range(32)
    emulated = tuple(
        pattern.is_emulated(f, c, fragments) for f in range(fragments) for c in columns
    )
    return emulated, pattern.degree if any(emulated) else None


def case_of(seqlen: int, causal: bool) -> Case:
    """The problem that stands for a class of lengths."""
    return Case("sweep", ((seqlen, seqlen),) * max(1, 32768 // seqlen), *HEADS, causal)


def measured_times(
    patterns: Sequence[Ex2Pattern], causal: bool, timer: CudaTimer, sampling: Sampling
) -> dict[tuple[Ex2Pattern, str], Times]:
    """Every mix and class, by turns.

    Raises RuntimeError if a result is wrong.
    """
    found = {}
    for name, seqlen in SEQLENS.items():
        inputs = Inputs.random(case_of(seqlen, causal), timer.device, torch.bfloat16)
        calls = {}
        for pattern in patterns:
            provider = Ours(config=ForwardConfig(ex2_pattern=pattern))
            check = check_forward(inputs, provider.call(inputs))
            if not check.passed:
                raise RuntimeError(f"{pattern}: error {check.error}, accepted {check.tolerance}")
            calls[pattern] = lambda p=provider, i=inputs: p.call(i)
        for pattern, samples in interleave(timer, calls, sampling).items():
            quantiles = [samples.quantile(share) for share in (0.5, 0.2, 0.8)]
            found[pattern, name] = Times(np.array(quantiles))
    return found


def _replayed(job: tuple[Ex2Pattern, bool, str, int]) -> Replayed:
    """The sample under one mix."""
    pattern, causal, machine, draws = job
    config = ForwardConfig(ex2_pattern=pattern)
    variant = ours.Variant(Kind(causal), config=config, samples=(SAMPLE,))
    return ours.replays(variant, load(machine), draws)[0]


def modelled_times(
    patterns: Sequence[Ex2Pattern], causal: bool, machine: str, draws: int, jobs: int
) -> dict[tuple[Ex2Pattern, str], Times]:
    """Every mix and class.

    Costs of tiles are fitted for hardware exp2; what a mix changes on one more replay is put down
    to the steps.
    """
    todo = [(pattern, causal, machine, draws) for pattern in patterns]
    replays = each(_replayed, todo, jobs)
    base = ours.Ours().forward(ours.Variant(Kind(causal)), load(machine), draws)
    hardware = replays[patterns.index(HARDWARE_ONLY)]
    found = {}
    for pattern, run in zip(patterns, replays, strict=True):
        costs = [
            TileCosts(c.begin, c.each, c.rate + (clocks - without) / run.work)
            for c, clocks, without in zip(base.costs, run.clocks, hardware.clocks, strict=True)
        ]
        kernel, clocks = replace(base, costs=costs), STEP_WORK * costs[0].rate
        paths = base.paths + Paths.of([run])
        for name, seqlen in SEQLENS.items():
            schedules = kernel.run(case_of(seqlen, causal))
            seconds = np.array([schedule.seconds for schedule in schedules])
            found[pattern, name] = Times(seconds, schedules[0].bound, clocks, paths)
    return found


def rows_of(
    times: dict[tuple[Ex2Pattern, str], Times], errors: dict[Ex2Pattern, Error],
    causal: bool, origin: dict[str, str],
) -> list[dict[str, Any]]:
    """A row for every mix and class; `chosen` marks one of each class.

    origin: gpu, basis and machine. Mixes slower than the fastest by less than the resolution, or
    not in every condition, are not ranked by time: of these hardware alone is chosen, the default,
    else the most accurate, the fewest emulated at equal error.
    """
    rows = []
    for (pattern, name), found in times.items():
        seconds, hardware = found.seconds, times[HARDWARE_ONLY, name].seconds[0]
        of_class = [t.seconds for (_, other), t in times.items() if other == name]
        fastest = min(of_class, key=lambda s: s[0])
        # Predictions under the same constants; the fast runs of one against the slow of the other.
        behind = seconds / (fastest[[0, 2, 1]] if origin[BASIS] == "measured" else fastest) - 1
        flop = case_of(SEQLENS[name], causal).flop(FORWARD)
        rows.append(
            {
                "gpu": origin["gpu"], "mask": "causal" if causal else "full",
                "seqlen_class": name, "seqlen": SEQLENS[name],
                "mix": label(pattern), "pattern": asdict(pattern),
                "degree": pattern.degree if pattern.true_share(BLOCK) else None,
                "true_share": float(pattern.true_share(BLOCK)),
                "exp2_error": errors[pattern].exp2, "out_error": errors[pattern].out,
                "ms": seconds[0] * 1e3, "low_ms": seconds.min() * 1e3,
                "high_ms": seconds.max() * 1e3, "tflops": flop / seconds[0] / 1e12,
                "step_clocks": found.step_clocks, "bound": found.bound,
                "gain": hardware / seconds[0] - 1, **path_figures(found.paths),
                "tied": bool(behind[0] <= RESOLUTION or behind.min() <= 0), "chosen": False,
                BASIS: origin[BASIS], MACHINE: origin[MACHINE],
            }
        )  # fmt: skip
    for name in SEQLENS:
        tied = [row for row in rows if row["seqlen_class"] == name and row["tied"]]
        min(tied, key=_preference)["chosen"] = True
    return rows


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


def entries(rows: Iterable[dict[str, Any]]) -> list[tuning.Entry]:
    """The chosen rows as entries of the tuning table."""
    return [
        tuning.Entry(
            row["gpu"], row["mask"] == "causal", row["seqlen_class"],
            Ex2Pattern(**row["pattern"]), row[BASIS], row[MACHINE],
        )
        for row in rows
        if row["chosen"]
    ]  # fmt: skip


_MIX = (
    Column("mix"), Column("degree"), Column("true_share", format=".2%", title="emulated"),
    Column("exp2_error", format=".2e", title="exp2, relative error"),
    Column("out_error", format=".3e", title="out, relative L2"),
)  # fmt: skip
_CLASS = (Column("gpu", title="GPU"), Column("mask"), Column("seqlen"))
_TIME = (
    Column("ms", "ms", ".4g", "time"), Column("low_ms", "ms", ".4g", "low"),
    Column("high_ms", "ms", ".4g", "high"), Column("tflops", "TFLOPS", ".0f", "rate"),
    Column("step_clocks", "clocks", ".0f", "step"), Column("bound", title="bound by"),
    Column("gain", format="+.1%", title="over hardware"),
)  # fmt: skip


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """The whole grid, and the best of each mask and length."""
    note = (
        f"Times that differ by less than {RESOLUTION:.0%}, or not in one direction over the whole "
        "range, are not ranked: of those tied with the fastest hardware alone is chosen, the "
        "default, else the most accurate mix. Errors: numpy twin of the device code, P in bf16."
    )
    figure = "tflops" if rows[0]["step_clocks"] is None else "step_clocks"
    plot = Plot("true_share", figure, "line", series="seqlen_class", panel="mask")
    columns, notes = (*_CLASS, *_MIX, *_TIME), ()
    if rows[0][BASIS] == "modelled":
        columns += PATH_COLUMNS
        replays = "the replay of a mix and those that costs of tiles are fitted to"
        notes = (path_note(replays),)
    by_share = sorted(rows, key=lambda row: (row["mask"], row["seqlen"], row["true_share"]))
    best = [row for row in by_share if row["chosen"]]
    return [
        Table("ex2-sweep", "exp2 mixes of the forward", columns, by_share, notes, plot),
        Table("ex2-sweep", "Best mix", columns, best, (note,)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    axes = parser.add_argument_group("grid", "all combinations, and hardware only")
    axes.add_argument("--freq", type=int, nargs="+", default=[4, 8, 16], help="ex2_emu_freq")
    axes.add_argument("--res", type=int, nargs="+", default=[2, 4], help="ex2_emu_res")
    axes.add_argument("--start", type=int, nargs="+", default=[0, 2], help="ex2_emu_start_frg")
    axes.add_argument(
        "--degree", type=int, nargs="+", default=[3], help=f"of {', '.join(map(str, COEFFICIENTS))}"
    )
    axes.add_argument(
        "--all-fragments", action="store_true", help="emulate in a row's last fragment, too"
    )
    parser.add_argument("--mask", choices=("full", "causal"), help="both unless chosen")
    add_model_options(parser, draws=2)
    add_jobs_option(parser)
    add_sampling_options(parser)
    parser.add_argument(
        "--write", nargs="?", const=str(tuning.TABLE), metavar="FILE",
        help="write the best as tuning table, by default the one that the operator reads",
    )
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    axes = {name: getattr(arguments, name) for name in ("freq", "res", "start", "degree")}
    patterns = grid(axes, not arguments.all_fragments)
    masks = [arguments.mask] if arguments.mask else ["full", "causal"]
    errors = {pattern: error_of(pattern) for pattern in patterns}
    on_gpu = not arguments.modelled and Ours().missing() is None
    rows = []
    for mask in masks:
        print(f"{mask}: {len(patterns)} mixes", file=sys.stderr, flush=True)
        if on_gpu:
            timer = CudaTimer()
            sampling = Sampling(arguments.warmup, arguments.runs)
            times = measured_times(patterns, mask == "causal", timer, sampling)
            origin = {"gpu": "B200", BASIS: "measured", MACHINE: timer.gpu.name}
        else:
            name = arguments.machine
            draws, jobs = arguments.draws, arguments.jobs
            times = modelled_times(patterns, mask == "causal", name, draws, jobs)
            machine = modelled_machine(load(name))
            origin = {"gpu": name.upper(), BASIS: "modelled", MACHINE: machine}
        rows += rows_of(times, errors, mask == "causal", origin)
    emit(tables(rows), arguments)
    if arguments.write:
        tuning.write(entries(rows), Path(arguments.write))
        print(f"tuning table: {arguments.write}", file=sys.stderr)
    return 0
