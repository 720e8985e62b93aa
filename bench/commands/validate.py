"""`python -m bench validate`: the timing model against what others and we have measured.

Tables: the single instructions that the tensor core's forms were made from; published rates of GEMM
and attention on B200, from the same projects' kernels run through the model; replays of windowed
kernels that the costs of their tiles were not fitted to; a Hopper GPU (`bench hopper`). The role of
a row says whether it can count as validation.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.measure.providers import OURS
from bench.model import flash_attn_4 as theirs
from bench.model import ours
from bench.model.backward import Backward
from bench.model.calls import Kind
from bench.model.forward import Kernel
from bench.model.replays import Replayed, fitted, kept, one_cluster, replayed
from bench.model.samples import BACKWARD_HELD_OUT, HELD_OUT, Samples
from bench.model.tiles import DKDV, DQ_PRODUCT, STEP_WORK
from bench.peers import flash_attn_4
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from sm100_sim import timing
from sm100_sim.timing.machine_constants import Machine, load
from sm100_sim.timing.problem import Tile, TileCosts, schedule
from sm100_sim.timing.tensor import MEASURED, mma_cost

BUILT_FROM, VALIDATION, FITTED = "built from", "validation", "fitted"
CONSISTENCY = "consistency of the model"
DRAWS = 4

_PR_2280 = "github.com/Dao-AILab/flash-attention/pull/2280"
_PR_2605 = "github.com/Dao-AILab/flash-attention/pull/2605"
_PAPER = "arXiv 2603.05451"
_TILUS = "nvidia.github.io/tilus, tutorial on matmul for Blackwell: cuBLAS and its last version"
_REFERENCE = "no single one: published rates at head_dim 256"


@dataclass(frozen=True)
class Published:
    """A rate of flash-attn-4 on B200 as somebody published it, in TFLOPS.

    heads: of queries and of keys. clock_ghz: that the GPU was locked to, None if that is not said.
    """

    head_dim: int
    causal: bool
    batch: int
    seqlen: int
    tflops: float
    source: str
    role: str = VALIDATION
    heads: tuple[int, int] = (16, 16)
    direction: str = FORWARD
    clock_ghz: float | None = None

    @property
    def case(self) -> str:
        mask = "causal" if self.causal else "full"
        heads = "" if self.heads[0] == self.heads[1] else f", heads {self.heads[0]}/{self.heads[1]}"
        return f"attention {self.head_dim}, {mask}, {self.batch}x{self.seqlen}{heads}"

    @property
    def problem(self) -> Case:
        return Case("published", ((self.seqlen,) * 2,) * self.batch, *self.heads, self.causal)


def _series(
    causal: bool, heads: tuple[int, int], tokens: int, rates: dict[int, float], **origin: Any
) -> Iterator[Published]:
    """Rates at head_dim 256 by seqlen, with as many tokens in each batch."""
    for seqlen, rate in rates.items():
        yield Published(256, causal, tokens // seqlen, seqlen, rate, heads=heads, **origin)


#: 32k tokens in a batch of any length. Two listings of PR 2605, which differ, count per cent of
#: 2250 TFLOPS, a B200's peak; one that counts per cent of 2500 (1837 at 4x8192) is left out.
PUBLISHED = (
    Published(128, False, 4, 8192, 1534.8, _PR_2280),
    Published(128, True, 4, 8192, 1418.1, _PR_2280),
    *(Published(128, False, 32768 // s, s, rate, f"{_PR_2605}, one listing")
      for s, rate in ((1024, 975), (2048, 1131), (4096, 1256), (8192, 1289), (16384, 1330))),
    *(Published(128, True, 32768 // s, s, rate, f"{_PR_2605}, one listing")
      for s, rate in ((1024, 660), (2048, 899), (4096, 1062))),
    *(Published(128, False, 32768 // s, s, rate, f"{_PR_2605}, another listing")
      for s, rate in ((1024, 1205), (2048, 1279), (4096, 1328), (8192, 1358), (16384, 1362))),
    *(Published(128, True, 32768 // s, s, rate, f"{_PR_2605}, another listing")
      for s, rate in ((1024, 697), (2048, 927), (4096, 1090))),
    Published(128, False, 1, 32768, 1613, f"{_PAPER}: the highest of all shapes"),
    Published(256, False, 1, 32768, 1750, f"{_REFERENCE} end at 1.7 to 1.8 PFLOPS", FITTED, (8, 8)),
)  # fmt: skip

_CONTRIBUTOR = "github.com/Johnsonms/flash-attention"
_SLOW = {"source": f"{_CONTRIBUTOR}, AI/HD256_PERSISTENT_CLUSTER_PR.md: main", "clock_ghz": 1.755}
_FAST = {"source": f"{_CONTRIBUTOR}, agent_space/notes_hd256_fwd_tma_epilogue.md: baseline",
         "clock_ghz": 1.965}  # fmt: skip
#: The forward at head_dim 256, by one of its authors on B200s with locked clocks. At 1755 MHz the
#: batch is not said: 131072 tokens, as in the backward listing of the same machine.
PUBLISHED_256 = (
    *_series(False, (32, 32), 1 << 17, {1024: 985, 2048: 1307, 4096: 1474, 8192: 1582, 16384: 1641,
             32768: 1450, 65536: 1417, 131072: 1398}, **_SLOW),
    *_series(True, (32, 32), 1 << 17, {1024: 592, 2048: 910, 4096: 1215, 8192: 1411, 16384: 1540,
             32768: 1552, 65536: 1486, 131072: 1363}, **_SLOW),
    *_series(False, (32, 2), 1 << 17, {1024: 1012, 2048: 1329, 4096: 1496, 8192: 1601, 16384: 1620,
             32768: 1482, 65536: 1436, 131072: 1389}, **_SLOW),
    *_series(True, (32, 2), 1 << 17, {1024: 600, 2048: 919, 4096: 1242, 8192: 1434, 16384: 1556,
             32768: 1624, 65536: 1493, 131072: 1373}, **_SLOW),
    *_series(False, (8, 8), 1 << 15, {1024: 941, 2048: 1277, 4096: 1457, 8192: 1568}, **_FAST),
    *_series(True, (8, 8), 1 << 15, {1024: 583, 2048: 894, 4096: 1176, 8192: 1361}, **_FAST),
)  # fmt: skip

_BACKWARD = {"source": f"{_CONTRIBUTOR}, agent_space/ncu_hd256/BENCH_after.md: B",
             "direction": BACKWARD, "clock_ghz": 1.755}  # fmt: skip
#: The backward at head_dim 256 on the same machine, five products counted; its dK and dV leave by
#: TMA, as in the version known here.
PUBLISHED_BACKWARD = (
    *_series(False, (32, 32), 1 << 17, {4096: 850, 8192: 906, 16384: 932, 32768: 909, 65536: 905,
             131072: 906}, **_BACKWARD),
    *_series(True, (32, 32), 1 << 17, {4096: 657, 8192: 773, 16384: 851, 32768: 843, 65536: 845,
             131072: 859}, **_BACKWARD),
    *_series(False, (32, 2), 1 << 17, {4096: 903, 8192: 917, 16384: 915, 32768: 918, 65536: 910,
             131072: 913}, **_BACKWARD),
    *_series(True, (32, 2), 1 << 17, {4096: 742, 8192: 813, 16384: 805, 32768: 845, 65536: 854,
             131072: 852}, **_BACKWARD),
)  # fmt: skip

#: (M, N, K) of the GEMMs whose replays give the costs of a tile of 256 x 256.
GEMM_SAMPLES = ((256, 256, 512), (256, 256, 1024), (512, 256, 512), (512, 512, 1024))
GEMM_TILE = 256
GEMM_PUBLISHED = {8192: 1610.0}

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


@functools.cache
def gemm_seconds(size: int, machine_name: str) -> np.ndarray:
    """quack's bf16 GEMM (its default configuration) of size^3, for each of the drawn machines."""
    machine = load(machine_name)

    def make() -> list[Replayed]:
        from quack.gemm_interface import gemm

        found = []
        for m, n, k in GEMM_SAMPLES:
            with timing.attached(machine, DRAWS) as session, one_cluster():
                a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
                gemm(a, torch.randn(k, n, dtype=torch.bfloat16, device="cuda"), tuned=False)
            tiles = m * n // GEMM_TILE**2
            found.append(replayed(session.predictions[-1], tiles))
        return found

    rows = kept((flash_attn_4.versions(), "gemm", GEMM_SAMPLES), machine, DRAWS, make)
    # 256 x 256 x 16 takes a pair 128 clocks.
    work = size / 16 * 128
    tiles = [Tile(work, own_bytes=2.0 * GEMM_TILE**2)] * (size // GEMM_TILE) ** 2
    tiles[0] = Tile(work, own_bytes=4.0 * size**2)
    return np.array([
        schedule(tiles, costs, values, 2, "dynamic").seconds
        for costs, values in zip(fitted(rows, "dynamic"), machine.sampled(DRAWS))
    ])  # fmt: skip


def _rate_row(
    case: str, published: float, tflops: np.ndarray, role: str, source: str
) -> dict[str, Any]:
    return {
        "case": case,
        "clock": None,
        "published": published,
        "modelled": float(tflops[0]),
        "low": float(tflops.min()),
        "high": float(tflops.max()),
        "error": float(tflops[0] / published - 1),
        "role": role,
        "source": source,
    }


def _theirs(row: Published, machine_name: str) -> Kernel | Backward:
    variant = theirs.Variant(Kind(row.causal), row.head_dim)
    return getattr(theirs.FlashAttention4(), row.direction)(variant, load(machine_name), DRAWS)


def _attention_rows(
    published: Iterable[Published], machine_name: str
) -> Iterator[dict[str, Any]]:
    kernels: dict[tuple, Kernel | Backward] = {}
    for row in published:
        key = row.head_dim, row.causal, row.direction
        if key not in kernels:
            print(f"replaying {row.direction}, {row.case}", file=sys.stderr, flush=True)
            kernels[key] = _theirs(row, machine_name)
        kernel = kernels[key]
        if row.clock_ghz:
            locked = [values._replace(clock_ghz=row.clock_ghz) for values in kernel.values]
            kernel = replace(kernel, values=locked)
        found = _rate_row(row.case, row.tflops, kernel.tflops(row.problem), row.role, row.source)
        yield {**found, "clock": row.clock_ghz}


def _finished(title: str, rows: list[dict[str, Any]], machine_name: str, *notes: str) -> Table:
    """The table of some rates, with the errors of its validation rows in a note."""
    for row in rows:
        row |= {BASIS: "modelled", MACHINE: modelled_machine(load(machine_name))}
    errors = np.array([row["error"] for row in rows if row["role"] == VALIDATION])
    close = ", ".join(
        f"within {aim} % {np.sum(np.abs(errors) <= aim / 100)} of {len(errors)}" for aim in (10, 20)
    )
    summary = f"Validation rows: median error {np.median(np.abs(errors)):.0%}, {close}."
    plot = Plot(("case", "source"), ("published", "modelled"))
    return Table("validate", title, RATE_COLUMNS, rows, (summary, *notes), plot)


def rates(machine_name: str) -> list[Table]:
    """Published rates on B200 and the model's, an error for each row."""
    rows = [
        _rate_row(f"GEMM {size}^3", rate, 2.0 * size**3 / gemm_seconds(size, machine_name) / 1e12,
                  VALIDATION, _TILUS)
        for size, rate in GEMM_PUBLISHED.items()
    ]  # fmt: skip
    rows += _attention_rows(PUBLISHED, machine_name)
    locked = list(_attention_rows(PUBLISHED_256, machine_name))
    backward = list(_attention_rows(PUBLISHED_BACKWARD, machine_name))
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


def _held_out_rows(
    name: str, costs: TileCosts, outside: tuple[Samples, list[Replayed]], step: float
) -> Iterator[dict[str, Any]]:
    """outside: samples and their replays. step: clocks of the tensor core in a step."""
    for (seqlen, _, left), run in zip(*outside, strict=True):
        clocks = costs.begin + costs.each * run.tiles
        clocks += costs.rate * run.work + costs.mask * run.masked
        yield {
            "kernel": name, "seqlen": seqlen, "window": f"({left}, 0)", "tiles": run.tiles,
            "steps": run.work / step, "masked": run.masked / step,
            "replayed": run.clocks[0], "predicted": clocks, "error": clocks / run.clocks[0] - 1,
        }  # fmt: skip


def held_out(machine: Machine) -> Table:
    """Replays of windowed kernels beside what costs fitted to other replays say of them."""
    kind = Kind(True, window=True)
    given = machine, DRAWS
    inside, outside = ours.Variant(kind), ours.Variant(kind, samples=HELD_OUT)
    rows = list(
        _held_out_rows(
            OURS, fitted(ours.replays(inside, *given), inside.policy)[0],
            (HELD_OUT, ours.replays(outside, *given)), STEP_WORK,
        )
    )  # fmt: skip
    variant = theirs.Variant(kind)
    rows += _held_out_rows(
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
        rows += _held_out_rows(f"{OURS}, {name}", costs, (BACKWARD_HELD_OUT, runs), work)
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
