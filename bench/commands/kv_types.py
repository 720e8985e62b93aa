"""`python -m bench kv-types`: decoding over keys and values in e4m3 beside the same in bf16.

On a GPU both are timed, interleaved. Both caches then hold the same numbers, those that e4m3 has,
so that both results are compared with the same float64 attention before anything is timed. Without
one times are the model's.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench import suite
from bench.measure.providers import Inputs, Ours
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer, Sampling, Timer
from bench.measure.variants import measured_variants
from bench.suite import FORWARD, Case
from bench.tables.comparison import OURS
from bench.tables.origin import modelled_machine
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.kernels.limits import ELEMENT_BYTES
from lab.model.calls import forward_problem
from lab.model.machines import gpu_of
from lab.model.predictor import OURS_E4M3, Predictor, predictor_of

E4M3, BF16 = "e4m3", "bf16"
#: Bytes of an element, by type of K and V.
BYTES = {BF16: ELEMENT_BYTES, E4M3: 1}


def default_cases() -> list[Case]:
    """Sequences, keys, heads: those of the decode tables."""
    shapes = ((128, 131072, (32, 2)), (1, 131072, (32, 2)), (8, 8192, (16, 2)))
    return [
        Case("kv types", ((queries, keys),) * batch, *heads, True)
        for batch, keys, heads in shapes for queries in (1, 2, 4)
    ]  # fmt: skip


def measured(case: Case, timer: Timer, sampling: Sampling) -> dict[str, Any]:
    """A row of the timer's GPU."""
    of_bf16, of_e4m3 = _inputs(case, timer.device)
    variants = {BF16: (Ours(), of_bf16), E4M3: (Ours(), of_e4m3)}
    found = measured_variants(variants, E4M3, timer, sampling)
    del variants, of_bf16, of_e4m3
    gc.collect()
    timer.release_memory()
    times, reasons = found.pop("times"), found.pop("reasons")
    row = {"group": case.group, "shape": case.shape, "heads": case.heads_text, "ratio": None}
    for kind, nbytes in BYTES.items():
        of_kind = times.get(kind)
        row[kind] = of_kind and of_kind[1] * 1e6
        row[f"range_{kind}"] = of_kind and f"{of_kind[0] * 1e6:.1f}..{of_kind[2] * 1e6:.1f}"
        row[f"rate_{kind}"] = of_kind and case.kv_elements * nbytes / of_kind[1] / 1e12
    if len(times) == len(BYTES):
        row["ratio"] = times[BF16][1] / times[E4M3][1]
    refused = "; ".join(f"{kind}: {why}" for kind, why in sorted(reasons.items()))
    return row | {"refused": refused} | found


def _inputs(case: Case, device: torch.device) -> tuple[Inputs, Inputs]:
    """Return (inputs with k and v in bf16, inputs in e4m3) of the same numbers."""
    found = Inputs.random(case, device, torch.bfloat16)
    codes = []
    for tensor in (found.k, found.v):
        codes.append(tensor.to(torch.float8_e4m3fn))
        # In place: a cache of a GPU's size has no room for a copy of all of it.
        for rows, exact in zip(tensor, codes[-1]):
            rows.copy_(exact)
    return found, replace(found, k=codes[0], v=codes[1])


def modelled(case: Case, predictor: Predictor) -> dict[str, Any]:
    """A row of the timing model."""
    machine, of_kind = predictor.machine, {BF16: OURS, E4M3: OURS_E4M3.name}
    found = {kind: predictor.predict(one, case, FORWARD) for kind, one in of_kind.items()}
    ratios = found[BF16].seconds / found[E4M3].seconds
    row = {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "rows": forward_problem(case).tiles.rows, "ratio": float(ratios[0]),
        "least": float(ratios.min()), "most": float(ratios.max()),
        BASIS: "modelled", MACHINE: modelled_machine(machine),
    }  # fmt: skip
    rate = gpu_of(machine).hbm_bytes_per_second
    for kind, nbytes in BYTES.items():
        seconds = float(found[kind].seconds[0])
        row[kind] = seconds * 1e6
        row[f"parts_{kind}"] = predictor.providers[of_kind[kind]].default(case, FORWARD, machine)[1]
        row[f"hbm_{kind}"] = case.kv_elements * nbytes / seconds / rate
    return row


RATIO = Column("ratio", format=".2f", title="tokens a second, of bf16's")
MEASURED_COLUMNS = (
    Column("shape"), Column("heads"),
    *(column for kind in BYTES for column in (
        Column(kind, "us", ".1f"), Column(f"range_{kind}", title="p20..p80"),
        Column(f"rate_{kind}", "TB/s", ".2f", f"K and V once, {kind}"),
    )),
    RATIO, Column("clock_mhz", "MHz", ".0f", "clock"), Column("power_watts", "W", ".0f", "power"),
)  # fmt: skip
COLUMNS = (
    Column("shape"), Column("heads"), Column("rows", title="rows of a tile"),
    *(column for kind in BYTES for column in (
        Column(kind, "us", ".1f"), Column(f"parts_{kind}", title=f"parts, {kind}"),
        Column(f"hbm_{kind}", format=".1%", title=f"of HBM, {kind}"),
    )),
    RATIO, Column("least", format=".2f"), Column("most", format=".2f"),
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate rows of `modelled`."""
    note = (
        "The call's default kernels and parts, those that make one result of the parts included. "
        "Of HBM: bytes of keys and values over what HBM gives by its data sheet in the time. "
        "Least, most: the ratio under any of the sets of constants that were drawn."
    )
    return _table(COLUMNS, rows, (note,))


def measured_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate rows of `measured`."""
    reasons = sorted({row["refused"] for row in rows} - {""})
    notes = (
        "Medians; both of a row interleaved, results checked, L2 overwritten before each launch. "
        "Clock and power are e4m3's.",
        *(f"Not run: {reason}." for reason in reasons),
    )
    return _table(MEASURED_COLUMNS, rows, notes)


def _table(
    columns: tuple[Column, ...], rows: Sequence[dict[str, Any]], notes: tuple[str, ...]
) -> Table:
    title = "Decoding over K and V in e4m3 beside bf16"
    return Table("kv_types", title, columns, list(rows), notes, Plot(("shape",), tuple(BYTES)))


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if something did not run."""
    limit, cases = TimeLimit(arguments.within), suite.selected(arguments, default_cases)
    if arguments.modelled or Ours().missing() is not None:
        predictor = predictor_of(arguments.machine, arguments.draws)
        rows = ready((modelled(case, predictor) for case in cases), len(cases), COLUMNS)
        emit(table(rows), arguments)
        return 0
    timer, sampling = CudaTimer(), Sampling(arguments.warmup, arguments.runs)
    begun = (measured(case, timer, sampling) for case in limit.begun(cases))
    rows = ready(begun, len(cases), MEASURED_COLUMNS, "measuring")
    emit(limit.noted(measured_table(rows)), arguments)
    return int(any(row["refused"] for row in rows))
