"""`python -m bench accuracy`: errors of out, or of gradients, against float64.

Forward: what the polynomial exp2 costs in out. The compiled kernel runs in the simulator, once for
every degree, mix and dtype, on the same inputs. The share of emulated exp2 is counted while it runs
and must be that of the pattern. Backward: dQ, dK and dV by kind of call, on every architecture.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch

import sm100_sim
from bench.measure import gradient_accuracy
from bench.measure.gradient_accuracy import DTYPES, GradientAccuracy
from bench.processes import stream
from bench.suite import FORWARD
from bench.tables.origin import simulator_machine
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check import reference
from fa4_hd256.check.single_kernels import launch_forward
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.softmax_emu.pattern import COEFFICIENTS, HARDWARE_ONLY, Ex2Pattern

COLUMNS = (
    Column("dtype"), Column("degree"), Column("true_share", format=".2%", title="emulated"),
    Column("mix", title="freq, res"),
    Column("max_error", format=".3e", title="out, max error"),
    Column("pytorch_max_error", format=".3e", title="of same-dtype PyTorch"),
    Column("rel_l2", format=".3e", title="out, relative L2"),
    Column("lse_max_error", format=".2e", title="LSE, max error"),
)  # fmt: skip
#: Names of gradients in `GradientAccuracy.comparisons`, and of their columns.
_GRADIENTS = {"q": "dQ", "k": "dK", "v": "dV"}
#: Makers of gradients: where dS is stored, and where it is recomputed.
_KERNELS = {
    True: {"q": "products", "k": "products", "v": "dV"},
    False: {"q": "dQ", "k": "dK/dV", "v": "dK/dV"},
}
GRADIENT_COLUMNS = (
    Column("architecture"), Column("dtype"), Column("call"),
    *(
        Column(f"{name}_{key}", format=".2e", title=f"{name}, {title}")
        for name in _GRADIENTS.values()
        for key, title in (
            ("max_error", "max error"), ("pytorch_max_error", "of same-dtype PyTorch"),
            ("rel_l2", "relative L2"),
        )
    ),
)  # fmt: skip
WORST_COLUMNS = (
    Column("architecture"), Column("dtype"), Column("gradient"), Column("kernel"), Column("calls"),
    Column("ratio", format=".2f", title="max error over PyTorch's, most"), Column("call"),
    Column("of_tolerance", format=".0%", title="of what tests accept, most"),
    Column("rel_l2", format=".2e", title="relative L2, most"),
)  # fmt: skip


#: freq, res, last fragment on hardware: 18.75 %, 37.5 % and 100 % of a step's columns.
_MIXES = ((14, 4, True), (4, 3, True), (2, 2, False))
#: Hardware only, then every degree at every mix.
PATTERNS = (
    HARDWARE_ONLY,
    *(
        Ex2Pattern(freq, res, 0, last_fragment_hardware=last, degree=degree)
        for (freq, res, last), degree in itertools.product(_MIXES, COEFFICIENTS)
    ),
)


@dataclass(frozen=True)
class Shape:
    """Full attention, batch 1, one head, standard normal q, k, v."""

    seqlen_q: int = 256
    seqlen_k: int = 512


@dataclass(frozen=True)
class Case:
    """One run of the forward."""

    pattern: Ex2Pattern
    dtype: torch.dtype
    shape: Shape = Shape()


@dataclass(frozen=True)
class Accuracy:
    """Errors of one case. executed_share: of the score elements, counted by the simulator."""

    case: Case
    executed_share: float
    comparison: reference.Comparison


def measure(case: Case) -> Accuracy:
    """Run one case in the simulator. Raises RuntimeError if another share was emulated than the
    pattern says."""
    shape, config = case.shape, ForwardConfig(ex2_pattern=case.pattern)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, seqlen, 1, HEAD_DIM, generator=generator).to(case.dtype)
        for seqlen in (shape.seqlen_q, shape.seqlen_k, shape.seqlen_k)
    )
    options = Options.check(None, False, (None, None), 0.0, False)
    problem = Problem.describe((q, k, v), options, config=config)
    out, lse = launch_forward(problem, (q, k, v))
    # Scores take the flushing form of ex2, factors of a row the other.
    report = sm100_sim.last_reports()[-1]
    steps = -(-shape.seqlen_q // config.tile_q) * -(-shape.seqlen_k // config.block_kv)
    hardware = report.opcodes.get("ex2.approx.ftz.f32", {"lanes": 0})["lanes"]
    share = 1 - hardware / (steps * config.tile_q * config.block_kv)
    if share != case.pattern.true_share(config.block_kv):
        raise RuntimeError(f"{share:.4%} of the score elements were emulated; {case.pattern}")
    return Accuracy(case, share, reference.compare(out, lse, (q, k, v)))


def default_cases() -> list[Case]:
    return [Case(pattern, dtype) for dtype, pattern in itertools.product(DTYPES, PATTERNS)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(found: list[Accuracy]) -> Table:
    shape = found[0].case.shape
    title = (
        f"Error of the forward against float64: {shape.seqlen_q} queries, {shape.seqlen_k} keys, "
        "one head, full attention, standard normal inputs"
    )
    plot = Plot(("degree", "true_share"), "rel_l2", panel="dtype")
    return Table("accuracy", title, COLUMNS, [_row(result) for result in found], plot=plot)


def _row(result: Accuracy) -> dict[str, Any]:
    case, pattern = result.case, result.case.pattern
    emulates = pattern.true_share()
    return {
        "dtype": _name(case.dtype), "degree": pattern.degree if emulates else None,
        "true_share": result.executed_share,
        "mix": f"{pattern.ex2_emu_freq}, {pattern.ex2_emu_res}" if emulates else "hardware",
        "pattern": asdict(pattern), **asdict(case.shape), **asdict(result.comparison),
        "tolerance": result.comparison.tolerance, BASIS: "measured", MACHINE: simulator_machine(),
    }  # fmt: skip


def gradient_tables(results: list[GradientAccuracy]) -> list[Table]:
    """A row for each case; then the worst of each gradient and kernel."""
    rows = [_gradient_row(result) for result in results]
    title = "Error of the backward against float64, standard normal inputs"
    note = (
        "256 queries and 300 keys, two heads, unless the call says otherwise; packed: three "
        "sequences of as many rows in all but ten. Where dS is not recomputed it is stored. "
        "PyTorch: autograd of matmul and softmax in the same dtype."
    )
    noted = (
        "products: dK and dQ of a stored dS. Tests accept twice PyTorch's own largest error, twice "
        "the rounding of the result, and what cancellation leaves of a gradient that vanishes."
    )
    plot = Plot("call", tuple(f"{name}_rel_l2" for name in _GRADIENTS.values()), panel="panel")
    return [
        Table("accuracy", title, GRADIENT_COLUMNS, rows, (note,), plot),
        Table("accuracy", "The worst of each", WORST_COLUMNS, _worst(results), (noted,)),
    ]


def _gradient_row(result: GradientAccuracy) -> dict[str, Any]:
    case, found = result.case, result.comparisons
    errors = {
        f"{_GRADIENTS[name]}_{key}": value
        for name, one in found.items()
        for key, value in (asdict(one) | {"tolerance": one.tolerance}).items()
    }
    return {
        **_place(case), "call": case.call.name, "of_call": asdict(case.call), **errors,
        "panel": f"{case.architecture}, {_name(case.dtype)}", "accurate": result.accurate,
        BASIS: "measured", MACHINE: simulator_machine(),
    }  # fmt: skip


def _place(case: gradient_accuracy.Case) -> dict[str, str]:
    return {"architecture": case.architecture, "dtype": _name(case.dtype)}


def _worst(results: list[GradientAccuracy]) -> list[dict[str, Any]]:
    """Return the worst result by architecture, dtype, gradient and the kernel that makes it."""
    groups: dict[tuple[str, ...], list[tuple[str, reference.GradientComparison]]] = defaultdict(
        list
    )
    for result in results:
        case = result.case
        for name, found in result.comparisons.items():
            kernel = _KERNELS[case.call.stores_ds][name]
            group = (*_place(case).values(), _GRADIENTS[name], kernel)
            groups[group].append((case.call.name, found))
    rows = []
    for (architecture, dtype, gradient, kernel), of_group in groups.items():
        ratio, call = max((one.max_error / one.pytorch_max_error, call) for call, one in of_group)
        rows.append({
            "architecture": architecture, "dtype": dtype, "gradient": gradient, "kernel": kernel,
            "calls": len(of_group), "ratio": ratio, "call": call,
            "of_tolerance": max(one.max_error / one.tolerance for _, one in of_group),
            "rel_l2": max(one.rel_l2 for _, one in of_group),
            BASIS: "measured", MACHINE: simulator_machine(),
        })  # fmt: skip
    return rows


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if the error of a gradient is above its tolerance."""
    if arguments.direction == FORWARD:
        cases = default_cases()
        found = stream(measure, cases, arguments.jobs)
        shown = results(found, len(cases), COLUMNS, lambda one: [_row(one)], "simulating")
        emit(table(list(shown)), arguments)
        return 0
    calls = gradient_accuracy.default_cases()
    gradients = stream(gradient_accuracy.measure, calls, arguments.jobs)
    judged = list(results(
        gradients, len(calls), GRADIENT_COLUMNS, lambda one: [_gradient_row(one)], "simulating"
    ))  # fmt: skip
    emit(gradient_tables(judged), arguments)
    return 0 if all(result.accurate for result in judged) else 1
