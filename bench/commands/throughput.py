"""`python -m bench throughput`: forward and backward over the suite, implementations side by side.

On a CUDA GPU every provider's result is checked against the one reference, then all of them are
timed by turns. Without one, ours and flash-attn-4's times are those of the timing model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench import suite
from bench.measure.checking import Check, check_forward, check_gradients
from bench.measure.providers import (
    OURS,
    Inputs,
    Provider,
    attempt,
    backward_call,
    default_providers,
    forward_call,
)
from bench.measure.timer import (
    CudaTimer,
    Gpu,
    Samples,
    Sampling,
    Timer,
    add_sampling_options,
    interleave_prepared,
)
from bench.model.calls import Kind
from bench.model.predictor import Predicted, Predictor, add_model_options, printing_predictor
from bench.model.replays import PATH_COLUMNS, path_figures, path_note
from bench.peaks import B200_TFLOPS, SM100_FLOP_PER_CLOCK
from bench.peers import flash_attn_4
from bench.processes import add_jobs_option, each
from bench.suite import BACKWARD, DIRECTIONS, Case
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table

#: Differences of predictions below this are not ranked: the model does not resolve them.
RESOLUTION = 0.05
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def measured_rows(
    cases: Iterable[tuple[Case, str]], providers: Sequence[Provider], timer: Timer,
    sampling: Sampling, dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Check and time every (case, direction) on the timer's GPU; one row for each."""
    missing = {provider.name: provider.missing() for provider in providers}
    rows = []
    for case, direction in cases:
        print(f"{direction}, {case}", file=sys.stderr, flush=True)
        ready, details = _ready(case, direction, providers, (timer, dtype, missing))
        found, failed = attempt(lambda r=ready: interleave_prepared(timer, r, sampling))
        for name in ready:
            if failed:
                details[name] |= {"status": f"while timing: {failed}", "failed": True}
            else:
                details[name] |= _measured(found[name], case.flop(direction), timer.gpu)
        machine = f"{timer.gpu.name}, driver {timer.gpu.driver}"
        rows.append(_row(case, direction, details) | {BASIS: "measured", MACHINE: machine})
        # Graphs and their memory must be gone before the next case allocates its own.
        del ready
        gc.collect()
        timer.release_memory()
    return rows


def _ready(
    case: Case, direction: str, providers: Sequence[Provider],
    setting: tuple[Timer, torch.dtype, dict[str, str | None]],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(what `Timer.prepare` made of the providers whose results are right, what is known of each
    provider)."""
    timer, dtype, missing = setting
    inputs, ready, details = None, {}, {}
    for provider in providers:
        reason = missing[provider.name] or provider.refuses(case, direction)
        if reason is not None:
            details[provider.name] = {"status": reason}
            continue
        inputs = inputs or Inputs.random(case, timer.device, dtype)
        with timer.on_stream():
            checked, reason = attempt(
                lambda p=provider, i=inputs: _checked(p, i, direction)
            )
        if reason is not None:
            details[provider.name] = {"status": reason, "failed": True}
            continue
        call, check = checked
        figures = {"max_error": check.error, "tolerance": check.tolerance}
        status = f"wrong: error {check.error:.3g}, accepted {check.tolerance:.3g}"
        if check.passed:
            prepared, reason = attempt(lambda c=call: timer.prepare(c))
            status = reason or "ok"
            if reason is None:
                ready[provider.name] = prepared
        details[provider.name] = {"status": status, "failed": status != "ok", **figures}
    return ready, details


def _checked(provider: Provider, inputs: Inputs, direction: str) -> tuple[Any, Check]:
    """(the call to time, how far its result is from the reference)."""
    if direction == BACKWARD:
        check = check_gradients(provider, inputs)
        call = backward_call(provider, inputs)
        call()
        return call, check
    call = forward_call(provider, inputs)
    return call, check_forward(inputs, call())


def _measured(samples: Samples, flop: float, gpu: Gpu) -> dict[str, Any]:
    """Figures of one provider: TFLOPS at the median time, and at that of p80 and p20."""
    low, median, high = (samples.quantile(share) for share in (0.2, 0.5, 0.8))
    state, tflops = samples.median_state(), flop / median / 1e12
    peak = gpu.peak_tflops(state.clock_mhz)
    return {
        "median_ms": median * 1e3, "p20_ms": low * 1e3, "p80_ms": high * 1e3,
        "tflops": tflops, "tflops_low": flop / high / 1e12, "tflops_high": flop / low / 1e12,
        "of_peak": None if peak is None else tflops / peak, "of_2250": tflops / B200_TFLOPS,
        "clock_mhz": state.clock_mhz, "power_watts": state.power_watts,
        "runs": len(samples.seconds), "launch": samples.launch,
    }  # fmt: skip


def times_of(case: Case, row: dict[str, Any], required: Iterable[str]) -> dict[str, np.ndarray]:
    """Provider -> seconds (median, p20, p80) of a measured row, of those that ran.

    Raises RuntimeError if a required one did not.
    """
    details = row["details"]
    failed = {n: details[n]["status"] for n in required if details[n]["status"] != "ok"}
    if failed:
        raise RuntimeError(f"{case}: {failed}")
    return {
        name: np.array([found[key] for key in ("median_ms", "p20_ms", "p80_ms")]) / 1e3
        for name, found in details.items() if found["status"] == "ok"
    }


def modelled_rows(
    cases: Iterable[tuple[Case, str]], names: Sequence[str], predictor: Predictor
) -> list[dict[str, Any]]:
    """Predict every (case, direction); one row for each."""
    machine = predictor.machine
    values, rows = machine.values(), []
    peak = values.sms * SM100_FLOP_PER_CLOCK * values.clock_ghz / 1e3
    origin = {BASIS: "modelled", MACHINE: modelled_machine(machine)}
    for case, direction in cases:
        details, predicted = {}, {}
        for name in names:
            reason = predictor.refuses(name, case, direction)
            if reason is None:
                found = predictor.predict(name, case, direction)
                details[name] = _predicted(found, case.flop(direction), peak)
                details[name]["clock_mhz"] = values.clock_ghz * 1e3
                predicted[name] = found
            else:
                details[name] = {"status": reason}
        both = [predicted.get(name) for name in (OURS, flash_attn_4.PACKAGE)]
        row = _row(case, direction, details) | origin
        row |= path_figures(*(found and found.paths for found in both))
        if None not in both:
            # The same draw of the constants for both.
            ours, theirs = (found.seconds for found in both)
            ratios = theirs / ours
            row |= {"ratio_low": float(ratios.min()), "ratio_high": float(ratios.max())}
        rows.append(row | _unlimited(both))
    return rows


@dataclass(frozen=True)
class Predictions:
    """`modelled_rows` as a function of the cases, for a pool of processes."""

    names: tuple[str, ...]
    machine: str
    draws: int

    def __call__(self, cases: Sequence[tuple[Case, str]]) -> list[dict[str, Any]]:
        predictor = printing_predictor(self.machine, self.draws)
        return modelled_rows(cases, self.names, predictor)

    def all(self, cases: Sequence[tuple[Case, str]], jobs: int) -> list[dict[str, Any]]:
        """Rows of all cases in their order, on `jobs` processes; those that share kernels go to one
        process."""
        groups: dict[tuple[str, Kind], list[int]] = defaultdict(list)
        for index, (case, direction) in enumerate(cases):
            groups[direction, Kind.of(case)].append(index)
        parts = [[cases[index] for index in group] for group in groups.values()]
        rows = {}
        for group, found in zip(groups.values(), each(self, parts, jobs), strict=True):
            rows |= zip(group, found, strict=True)
        return [rows[index] for index in range(len(cases))]


def _unlimited(both: Sequence[Predicted | None]) -> dict[str, Any]:
    """The ratio of ours and the other if nothing limits the power, with its range over draws that
    are the same for both; nothing in it for a direction whose time several kernels share."""
    seconds = [None if found is None else found.unlimited for found in both]
    names = ("unlimited_ratio", "unlimited_ratio_low", "unlimited_ratio_high")
    if any(of_one is None for of_one in seconds):
        return dict.fromkeys((*names, "unlimited"))
    ratios = seconds[1] / seconds[0]
    figures = float(ratios[0]), float(ratios.min()), float(ratios.max())
    text = "{:.2f} ({:.2f}..{:.2f})".format(*figures)
    return {**dict(zip(names, figures, strict=True)), "unlimited": text}


def _predicted(found: Predicted, flop: float, peak: float) -> dict[str, Any]:
    tflops = flop / found.seconds[0] / 1e12
    return {
        "status": "ok", "median_ms": found.seconds[0] * 1e3,
        "low_ms": found.low * 1e3, "high_ms": found.high * 1e3,
        "tflops": tflops, "tflops_low": flop / found.high / 1e12,
        "tflops_high": flop / found.low / 1e12, "of_peak": tflops / peak,
        "of_2250": tflops / B200_TFLOPS, "bound": found.bound,
        "unmatched": found.paths.unmatched, "ambiguous": found.paths.ambiguous,
    }  # fmt: skip


def _row(case: Case, direction: str, details: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the table: TFLOPS under each provider's name, everything else in `details`."""
    ours, theirs = (details.get(name, {}) for name in (OURS, flash_attn_4.PACKAGE))
    ratio = low = high = None
    if "tflops" in ours and "tflops" in theirs:
        ratio = ours["tflops"] / theirs["tflops"]
        low = ours["tflops_low"] / theirs["tflops_high"]
        high = ours["tflops_high"] / theirs["tflops_low"]
    return {
        "direction": direction, "group": case.group, "shape": case.shape,
        "heads": case.heads_text, "mask": case.mask,
        "panel": f"{direction}, {case.group}, {case.mask}",
        **{name: found.get("tflops") for name, found in details.items()},
        "range": _range(ours), "their_range": _range(theirs), "of_peak": ours.get("of_peak"),
        "clock_mhz": ours.get("clock_mhz"),
        "ratio": ratio, "ratio_low": low, "ratio_high": high, "faster": _faster(ours, theirs),
        "details": details,
    }  # fmt: skip


def _range(found: dict[str, Any]) -> str | None:
    if "tflops" not in found:
        return None
    return f"{found['tflops_low']:.0f}..{found['tflops_high']:.0f}"


def _faster(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Who is ahead; nobody where the ranges overlap or differ by less than the resolution."""
    if "tflops" not in ours or "tflops" not in theirs:
        return None
    for name, one, other in ((OURS, ours, theirs), (flash_attn_4.PACKAGE, theirs, ours)):
        apart = one["tflops_low"] > other["tflops_high"]
        if apart and one["tflops"] > (1 + RESOLUTION) * other["tflops"]:
            return name
    return "not ranked"


def table(rows: list[dict[str, Any]]) -> Table:
    """Providers side by side; what did not run is listed below with its reason."""
    names = list(rows[0]["details"])
    columns = (
        Column("direction"), Column("shape"), Column("heads"), Column("mask"),
        *(Column(name, "TFLOPS", ".0f", name) for name in names),
        Column("range", title="ours, range"),
        Column("their_range", title=f"{flash_attn_4.PACKAGE}, range"),
        Column("of_peak", format=".1%", title="ours, of peak"),
        Column("clock_mhz", "MHz", ".0f", "clock"),
        Column("ratio", format=".2f", title=f"ours / {flash_attn_4.PACKAGE}"),
        Column("ratio_low", format=".2f", title="low"),
        Column("ratio_high", format=".2f", title="high"),
        Column("faster"),
    )  # fmt: skip
    if rows[0][BASIS] == "modelled":
        columns += (Column("unlimited", title="ratio without the power limit"), *PATH_COLUMNS)
    plot = Plot(("shape", "heads"), tuple(names), panel="panel")
    return Table("throughput", "Throughput at head_dim 256", columns, rows, _notes(rows), plot)


def summary(rows: list[dict[str, Any]]) -> Table | None:
    """Ratios by direction, group and mask, every row counted; None where no row has one."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["ratio"] is not None:
            mask = row["mask"] if row["mask"] in ("full", "causal") else "windows"
            groups[row["direction"], row["group"], mask, row[BASIS], row[MACHINE]].append(row)
    if not groups:
        return None
    found = []
    for (direction, group, mask, basis, machine), of_group in groups.items():
        ratios = [row["ratio"] for row in of_group]
        winners = [row["faster"] for row in of_group]
        ahead = [row["ratio"] > 1 + RESOLUTION and row["ratio_low"] > 1 for row in of_group]
        found.append({
            "direction": direction, "group": group, "mask": mask, "rows": len(of_group),
            "least": min(ratios), "median": statistics.median(ratios), "most": max(ratios),
            "ahead": sum(ahead), OURS: winners.count(OURS), "theirs": winners.count(
                flash_attn_4.PACKAGE), BASIS: basis, MACHINE: machine,
        })  # fmt: skip
    columns = (
        Column("direction"), Column("group"), Column("mask"), Column("rows"),
        Column("least", format=".2f"), Column("median", format=".2f"),
        Column("most", format=".2f"),
        Column(OURS, title="ours faster"),
        Column("ahead", title="ours ahead under every condition"),
        Column("theirs", title=f"{flash_attn_4.PACKAGE} faster"),
    )  # fmt: skip
    note = (
        "faster: as in the table of all rows. Ahead under every condition: by more than "
        f"{RESOLUTION:.0%}, and in every draw of the constants, the same for both; where times are "
        "measured, in the slow runs of ours against the fast ones of the other."
    )
    title = f"Ours / {flash_attn_4.PACKAGE}, ratios of rates"
    plot = Plot(("direction", "group", "mask"), "median", low="least", high="most")
    return Table("throughput", title, columns, found, (note,), plot)


def _notes(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    measured = rows[0][BASIS] == "measured"
    ranges = "p80 to p20 of the timed runs" if measured else (
        "over draws of the uncertain constants, of ratios with the same draw for both"
    )
    notes = [
        f"Ranges: {ranges}. \"faster\" names a provider only where the ranges do not overlap and "
        f"the difference is {RESOLUTION:.0%} or more. FLOP: 4 Sq Sk D a head, half if causal, "
        "visible pairs with a window; backward 2.5 times that. Peak: dense bf16 at the clock "
        "recorded."
    ]
    if not measured:
        notes.append(
            "Ratio without the power limit, with its range: of the times that clusters and HBM "
            "need by themselves, as on a GPU whose limit is higher or whose clock is locked lower. "
            "It tells apart what the limit makes alike; \"faster\" does not use it. Forward only."
        )
        notes.append(path_note(f"the replays behind a row, ours / {flash_attn_4.PACKAGE}'s"))
    reasons: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        for name, found in row["details"].items():
            if found["status"] != "ok":
                reasons[name, found["status"]] += 1
    for (name, reason), count in reasons.items():
        notes.append(f"{name}: {count} of {len(rows)} not run: {reason}.")
    return tuple(notes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, help="both unless chosen")
    add_model_options(parser)
    add_jobs_option(parser)
    add_sampling_options(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of a measurement")
    suite.add_selection(parser)
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours was run and broke, or was wrong."""
    directions = [arguments.direction] if arguments.direction else list(DIRECTIONS)
    cases = [
        (case, direction) for direction in directions for case in suite.selected(arguments)
    ]
    providers = default_providers()
    if torch.cuda.is_available() and not arguments.modelled:
        sampling = Sampling(arguments.warmup, arguments.runs)
        timer, dtype = CudaTimer(), DTYPES[arguments.dtype]
        rows = measured_rows(cases, providers, timer, sampling, dtype)
    else:
        names = tuple(provider.name for provider in providers)
        rows = Predictions(names, arguments.machine, arguments.draws).all(cases, arguments.jobs)
    emit([found for found in (table(rows), summary(rows)) if found], arguments)
    return 1 if any(row["details"][OURS].get("failed") for row in rows) else 0
