"""`python -m bench ladder`: what each optimisation of the forward brings, one switch at a time.

Every rung is a configuration of the kernel that is shipped (`ForwardConfig`): compiled, run in the
simulator against the float64 reference, and timed, on a GPU or by the timing model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measure.checking import check_forward
from bench.measure.providers import Inputs, Ours, Provider, PyTorchSdpa, attempt, forward_call
from bench.measure.timer import CudaTimer, Sampling, Timer, add_sampling_options, interleave
from bench.model import ours
from bench.model.calls import Kind
from bench.model.predictor import add_model_options
from bench.model.replays import PATH_COLUMNS, Paths, path_figures, path_note
from bench.model.samples import SAMPLES as ALL_SAMPLES
from bench.model.tiles import STEP_WORK
from bench.processes import add_jobs_option, each
from bench.suite import FORWARD, Case
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit, markdown_text
from bench.tables.shape_options import add_shape_options, chosen_case
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256 import flash_attn_func
from fa4_hd256.check import reference
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from sm100_sim.timing.machine_constants import Machine, load
from softmax_emu.pattern import Ex2Pattern

#: Differences below this are not ranked: the model does not resolve them, and a measurement of one
#: GPU hardly.
RESOLUTION = 0.05
#: The field's mix: 37.5 % of a step's columns.
PATTERN = Ex2Pattern(4, 3)
#: Of the replays (`model.samples`); three costs of a tile follow from them.
SAMPLES = (ALL_SAMPLES[0], ALL_SAMPLES[2], ALL_SAMPLES[-1])
#: (queries, keys) of the simulated check: several tiles, ends inside a tile.
CHECKED = (520, 600)
NOT_RUNNABLE = "not runnable here"


@dataclass(frozen=True)
class Rung:
    """One configuration; `name` is what it adds to the one before."""

    name: str
    config: ForwardConfig
    use_clc: bool = False

    def call(self, inputs: Inputs) -> torch.Tensor:
        """out of the operator, as `Provider.call`."""
        case = inputs.case
        return flash_attn_func(
            *inputs.leaves, causal=case.causal, window_size=case.window, config=self.config,
            use_clc=self.use_clc,
        )  # fmt: skip


def rungs(pattern: Ex2Pattern = PATTERN) -> list[Rung]:
    """The ladder: each rung has the switches of those before it.

    pattern: of the rung that emulates exp2. The last rung is the default configuration, where that
    is another one.
    """
    config = ForwardConfig(
        ex2_pattern=Ex2Pattern(), arithmetic="plain", s_stages=1, rescale_threshold=0.0,
        ordered_tiles=False,
    )  # fmt: skip
    found = [Rung("plain exp2", config)]
    for name, switch in (
        ("folded scale", {"arithmetic": "folded"}),
        ("packed f32x2", {"arithmetic": "packed"}),
        ("double-buffered S", {"s_stages": 2}),
        ("conditional rescale", {"rescale_threshold": ForwardConfig().rescale_threshold}),
        ("emulation ratio", {"ex2_pattern": pattern}),
        ("tile order", {"ordered_tiles": True}),
    ):
        config = replace(config, **switch)
        found.append(Rung(name, config))
    found.append(Rung("CLC", config, use_clc=True))
    if config != ForwardConfig():
        found.append(Rung("default configuration", ForwardConfig()))
    return found


@dataclass(frozen=True)
class Error:
    """Against the reference. error: of out; tolerance: of it; lse_error: in nats, None if not
    known."""

    error: float
    tolerance: float
    lse_error: float | None = None

    @property
    def correct(self) -> bool:
        return self.error <= self.tolerance and (self.lse_error or 0.0) <= 1e-3


def simulated_error(rung: Rung, causal: bool) -> Error:
    """Run the compiled kernel of a rung in the simulator: two heads that share one of keys."""
    generator = torch.Generator().manual_seed(0)
    seqlen_q, seqlen_k = CHECKED
    q, k, v = (
        torch.randn(1, seqlen, heads, HEAD_DIM, generator=generator).bfloat16()
        for seqlen, heads in ((seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1))
    )
    out, lse = flash_attn_func(
        q, k, v, causal=causal, return_lse=True, config=rung.config, use_clc=rung.use_clc
    )
    found = reference.compare(out, lse, (q, k, v), causal=causal)
    return Error(found.max_error, found.tolerance, found.lse_max_error)


@dataclass(frozen=True)
class Timing:
    """A rung's time. seconds: float64, of paired conditions: the first is the central one of the
    model's drawn machines, or the median, p20 and p80 of a measurement. error: see `Error`.
    step_clocks, paths: of a step of one CTA pair, and of the replays; modelled only."""

    rung: Rung
    seconds: np.ndarray
    error: Error
    step_clocks: float | None = None
    paths: Paths | None = None


@dataclass(frozen=True)
class Prediction:
    """What to predict; a function of the rung, for a pool of processes."""

    case: Case
    machine: str
    draws: int

    def __call__(self, rung: Rung) -> Timing:
        case = self.case
        variant = ours.Variant(Kind(case.causal), rung.use_clc, rung.config, SAMPLES)
        kernel = ours.Ours().forward(variant, load(self.machine), self.draws)
        error = simulated_error(rung, case.causal)
        seconds, clocks = kernel.seconds(case), kernel.costs[0].rate * STEP_WORK
        return Timing(rung, seconds, error, clocks, kernel.paths)


def predict_all(chosen: Sequence[Rung], prediction: Prediction, jobs: int) -> list[Timing]:
    """Predict every rung, on `jobs` processes."""
    if jobs == 1:
        return [_announced(prediction, rung) for rung in chosen]
    return each(prediction, chosen, jobs)


def _announced(prediction: Callable[[Rung], Timing], rung: Rung) -> Timing:
    print(rung.name, file=sys.stderr, flush=True)
    return prediction(rung)


def measure_all(
    chosen: Sequence[Rung], case: Case, timer: Timer, sampling: Sampling,
    pytorch: Iterable[Provider],
) -> tuple[list[Timing], dict[str, float | str]]:
    """(timings of the rungs, median seconds of PyTorch's implementations or why they did not run).

    All of them are timed by turns, on the same inputs.
    """
    inputs = Inputs.random(case, timer.device, torch.bfloat16)
    calls, errors, others = {}, {}, {}
    for rung in chosen:
        calls[rung.name] = forward_call(rung, inputs)
        check = check_forward(inputs, calls[rung.name]())
        errors[rung.name] = Error(check.error, check.tolerance)
    for provider in pytorch:
        call = forward_call(provider, inputs)
        reason = provider.missing() or provider.refuses(case, FORWARD) or attempt(call)[1]
        if reason:
            others[provider.name] = reason
        else:
            calls[provider.name] = call
    found = interleave(timer, calls, sampling)
    timings = []
    for rung in chosen:
        samples = found[rung.name]
        seconds = np.array([samples.quantile(share) for share in (0.5, 0.2, 0.8)])
        timings.append(Timing(rung, seconds, errors[rung.name]))
    others |= {
        provider.name: found[provider.name].quantile(0.5)
        for provider in pytorch if provider.name in found
    }
    return timings, others


def rows(
    timings: Sequence[Timing], case: Case, pytorch: float | None, origin: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each rung.

    pytorch: seconds of PyTorch's fastest implementation, None where it did not run. origin: basis
    and machine.
    """
    flop, found, before = case.flop(FORWARD), [], None
    for timing in timings:
        seconds = timing.seconds
        tflops = flop / seconds / 1e12
        gain = None if before is None else before.seconds / _opposed(seconds, origin[BASIS])
        found.append({
            "step": timing.rung.name,
            "milliseconds": seconds[0] * 1e3, "tflops": tflops[0],
            "tflops_low": tflops.min(), "tflops_high": tflops.max(),
            "range": f"{tflops.min():.0f}..{tflops.max():.0f}",
            "step_clocks": timing.step_clocks,
            "gain": None if gain is None else gain[0],
            "gain_low": None if gain is None else gain.min(),
            "gain_high": None if gain is None else gain.max(),
            "effect": _effect(gain),
            "over_pytorch": NOT_RUNNABLE if pytorch is None else pytorch / seconds[0],
            "correct": timing.error.correct, "max_error": timing.error.error,
            "tolerance": timing.error.tolerance, "lse_max_error": timing.error.lse_error,
            "config": repr(timing.rung.config), "use_clc": timing.rung.use_clc,
            **path_figures(timing.paths), **origin,
        })  # fmt: skip
        before = timing
    return found


def _opposed(seconds: np.ndarray, basis: str) -> np.ndarray:
    """What another configuration's seconds are compared with, element by element: predictions
    under the same constants; of a measurement the slow runs with the fast ones."""
    return seconds[[0, 2, 1]] if basis == "measured" else seconds


def _effect(gain: np.ndarray | None) -> str | None:
    """ "faster" or "slower" where all conditions agree, and by 5 % or more."""
    if gain is None:
        return None
    if gain.min() > 1 and gain[0] >= 1 + RESOLUTION:
        return "faster"
    if gain.max() < 1 and gain[0] <= 1 / (1 + RESOLUTION):
        return "slower"
    return "not ranked"


COLUMNS = (
    Column("step"),
    Column("milliseconds", "ms", ".3f", "time"),
    Column("tflops", "TFLOPS", ".0f", "rate"),
    Column("range", "TFLOPS"),
    Column("step_clocks", "clocks", ".0f", "a step of a CTA pair"),
    Column("gain", format=".3f", title="over the step before"),
    Column("effect"),
    Column("over_pytorch", format=".2f", title="over PyTorch"),
    Column("correct"),
    Column("max_error", format=".2e", title="max error"),
    Column("tolerance", format=".2e", title="accepted"),
)

_NOTES = (
    "Each step keeps the switches before it; the default configuration is compared with the step "
    "above it. conditional rescale: before it O is rescaled whenever a row maximum of a warp grew, "
    "after it only by more than the threshold; the kernel has no form that rescales in every step. "
    "tile order: before it query blocks upwards, one head after the other.",
    "correct: the compiled kernel against the float64 reference, tolerance as in the tests.",
)


def table(found: list[dict[str, Any]], case: Case, others: dict[str, float | str]) -> Table:
    """others: PyTorch's implementations, median seconds or why they did not run."""
    replayed = found[0][BASIS] == "modelled"
    if replayed:
        ranges = f"Ranges: over draws of the uncertain constants; gains below {RESOLUTION:.0%}, or "
        ranges += "whose sign is not the same in every draw, are not ranked. Inputs of the replays "
        ranges += "are standard normal, which decides how often O is rescaled."
    else:
        ranges = f"Ranges: p20 to p80. Gains below {RESOLUTION:.0%}, or where the slow runs of one "
        ranges += "step overlap with the fast ones of the other, are not ranked."
    listed = "; ".join(
        f"{name}: {value}" if isinstance(value, str) else f"{name}: {value * 1e3:.3f} ms"
        for name, value in others.items()
    )
    title = f"Optimisation ladder, forward, {case.shape}, heads {case.heads_text}, {case.mask}"
    columns, notes = COLUMNS, (*_NOTES, ranges, f"PyTorch: {listed}.")
    if replayed:
        columns, notes = columns + PATH_COLUMNS, (*notes, path_note("the replays of a step"))
    plot = Plot("step", "tflops", low="tflops_low", high="tflops_high")
    return Table("ladder", title, columns, found, notes, plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser, seqlen=8192)
    parser.add_argument("--freq", type=int, default=PATTERN.ex2_emu_freq, help="of the emulation")
    parser.add_argument("--res", type=int, default=PATTERN.ex2_emu_res, help="of the emulation")
    add_model_options(parser)
    add_jobs_option(parser)
    add_sampling_options(parser)
    parser.add_argument("--markdown", metavar="FILE", help="the table as Markdown to FILE")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    case = chosen_case(arguments)
    if case.seqlen_q != case.seqlen_k or case.window != (None, None):
        raise ValueError("the ladder takes one --seqlen and no --window")
    chosen = rungs(Ex2Pattern(arguments.freq, arguments.res))
    missing = "modelled, as asked" if arguments.modelled else Ours().missing()
    if missing is None:
        found, others = _measured(chosen, case, Sampling(arguments.warmup, arguments.runs))
    else:
        machine: Machine = load(arguments.machine)
        prediction = Prediction(case, machine.name, arguments.draws)
        timings = predict_all(chosen, prediction, arguments.jobs)
        origin = {BASIS: "modelled", MACHINE: modelled_machine(machine)}
        found, others = rows(timings, case, None, origin), {NOT_RUNNABLE: missing}
    result = table(found, case, others)
    if arguments.markdown:
        Path(arguments.markdown).write_text(markdown_text([result]) + "\n")
    emit(result, arguments)
    return 0 if all(row["correct"] for row in found) else 1


def _measured(
    chosen: Sequence[Rung], case: Case, sampling: Sampling
) -> tuple[list[dict[str, Any]], dict[str, float | str]]:
    """(rows, PyTorch's implementations) on this machine's GPU."""
    timer = CudaTimer()
    pytorch = (PyTorchSdpa("cuDNN", "CUDNN_ATTENTION"), PyTorchSdpa("math", "MATH"))
    timings, others = measure_all(chosen, case, timer, sampling, pytorch)
    known = [value for value in others.values() if not isinstance(value, str)]
    origin = {BASIS: "measured", MACHINE: timer.gpu.name}
    return rows(timings, case, min(known, default=None), origin), others
