"""`python -m bench training`: a small model of Gemma's shape trained with each attention.

Loss by step, ours beside PyTorch's in float32, flash-attn-4 and PyTorch's in bf16, and ours once
more: the same bits. Without a CUDA GPU what rounding alone does: PyTorch's in float32, and the same
rounded as kernels round.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.measure import training
from bench.measure.providers import attempt
from bench.measure.time_limit import TimeLimit
from bench.measure.training import IMPLEMENTATIONS, SMOOTHED, Run, Shape, smoothed
from bench.options import REFERENCE
from bench.tables.comparison import OURS
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from fa4_hd256 import progress

ROUNDED = "float32, rounded as kernels do"
#: Suffix of a name, for a second run.
AGAIN = ", again"
#: Shares of a run at which the table shows its loss.
SHOWN = (0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
#: cuBLAS has the same bits in each run only with this, read when it is first used.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def table(
    found: dict[int, dict[str, Run | str]], steps: int, origin: dict[str, str], text: str
) -> Table:
    """found: by seed, of each implementation its run, or why it has none.  origin: of the rows."""
    columns, rows = columns_of(steps), []
    for seed, of_seed in found.items():
        rows += [_row(seed, name, of_seed, steps) | origin for name in of_seed]
    note = (
        f"{text}. Losses in nats a token, means over {SMOOTHED} steps; a step's time is that of "
        "the whole model, whose products are float32."
    )
    return Table("training", "Training with each attention", columns, rows, (note,))


def columns_of(steps: int) -> tuple[Column, ...]:
    """Return the columns of a run of so many steps."""
    return (
        Column("seed"), Column("attention"), Column("status"),
        *(Column(f"step_{n}", format=".3f", title=f"loss at {n}") for n in _shown(steps)),
        Column("apart", format="+.4f", title=f"farthest from {REFERENCE}"),
        Column("at", title="at step"), Column("end", format="+.4f", title="from it at the end"),
        Column("equal", title="bits of the run again"),
        Column("milliseconds", "ms", ".1f", "step"),
    )  # fmt: skip


def _shown(steps: int) -> list[int]:
    return sorted({max(1, round(share * steps)) for share in SHOWN})


def _row(seed: int, name: str, of_seed: dict[str, Run | str], steps: int) -> dict[str, Any]:
    """Return the columns of an attention, beside the others of its seed that are known."""
    row: dict[str, Any] = dict.fromkeys(column.name for column in columns_of(steps))
    row |= {"seed": seed, "attention": name}
    run, exact = of_seed[name], of_seed[REFERENCE]
    if not isinstance(run, Run):
        return row | {"status": run}
    means = smoothed(run.losses)
    row |= {f"step_{n}": float(means[n - 1]) for n in _shown(steps)}
    row |= {"milliseconds": run.milliseconds, "status": "ok", "losses": run.losses}
    if isinstance(exact, Run) and name != REFERENCE:
        differences = means - smoothed(exact.losses)
        farthest = int(np.abs(differences).argmax())
        row |= {"apart": float(differences[farthest]), "at": farthest + 1}
        row["end"] = float(differences[-1])
        if isinstance(again := of_seed.get(name + AGAIN), Run):
            row["equal"] = "the same" if again.losses == run.losses else "others"
    return row


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours does not run on a GPU. Raises ValueError for attentions that want one
    where there is none."""
    limit = TimeLimit(arguments.within)
    is_measured = torch.cuda.is_available()
    names = _names(arguments.attention, is_measured)
    os.environ.setdefault(*WORKSPACE)
    shape = replace(Shape(), **{f.name: getattr(arguments, f.name) for f in fields(Shape)})
    device = torch.device("cuda" if is_measured else "cpu")
    found: dict[int, dict[str, Run | str]] = {seed: {} for seed in arguments.seed or (0,)}
    jobs = [(seed, name) for seed in found for name in names]

    def trained(job: tuple[int, str]) -> dict[str, Any]:
        seed, name = job
        attention = IMPLEMENTATIONS[name.removesuffix(AGAIN)]
        with progress.step(f"training with {name}, seed {seed}"):
            run, reason = attempt(
                partial(training.train, attention, shape, arguments.steps, device, seed=seed)
            )
        found[seed][name] = reason or run
        return _row(seed, name, found[seed], arguments.steps)

    columns = columns_of(arguments.steps)
    ready(map(trained, limit.begun(jobs)), len(jobs), columns, "training")
    for seed, name in limit.left_out:
        found[seed][name] = limit.reason
    origin = {BASIS: "computed", MACHINE: "CPU"}
    if is_measured:
        origin = {BASIS: "measured", MACHINE: torch.cuda.get_device_name(device)}
    emit(table(found, arguments.steps, origin, _text(shape, device)), arguments)
    return int(is_measured and not all(isinstance(of[OURS], Run) for of in found.values()))


def _names(chosen: Sequence[str] | None, is_measured: bool) -> list[str]:
    if not is_measured:
        if set(chosen or ()) - {REFERENCE, ROUNDED}:
            raise ValueError(
                f"--attention {', '.join(chosen or ())} without a CUDA device; accepted there: "
                f"{REFERENCE!r} and {ROUNDED!r}, which need none"
            )
        return [REFERENCE, ROUNDED]
    wanted = {REFERENCE, OURS, *(chosen or IMPLEMENTATIONS)}
    return [*(name for name in IMPLEMENTATIONS if name in wanted), OURS + AGAIN]


def _text(shape: Shape, device: torch.device) -> str:
    masks = f"{shape.layers} layers, " + (
        f"window {shape.window} but for every {shape.full_every}th" if shape.window else "causal"
    )
    text = (
        f"{masks}, heads {shape.heads}/{shape.heads_kv} of 256, {shape.batch} x {shape.seqlen} "
        "tokens a step"
    )
    if device.type == "cuda":
        found = training.back_ends(shape, device)
        text += f". SDPA bf16 runs, without and with a window, as {found}"
    return text
