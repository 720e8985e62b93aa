"""`python -m bench training`: a small model of Gemma's shape trained with each attention.

Loss by step, ours beside PyTorch's in float32, flash-attn-4 and PyTorch's in bf16, and ours once
more: the same bits. Runs on a CUDA GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.measure import training
from bench.measure.providers import attempt
from bench.measure.time_limit import TimeLimit, add_time_limit
from bench.measure.training import IMPLEMENTATIONS, Run, Shape
from bench.tables.comparison import OURS
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Table

REFERENCE = "SDPA float32"
#: Losses of single steps jump; compared are means over so many.
SMOOTHED = 20
#: Of a run, where the table shows its loss.
SHOWN = (0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
#: cuBLAS has the same bits in each run only with this, read when it is first used.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Means over the last `SMOOTHED` steps before each, fewer at the begin."""
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(ends - SMOOTHED, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def table(found: dict[str, Run | str], steps: int, machine: str, text: str) -> Table:
    """found: of each implementation its run, or why it has none."""
    shown = sorted({max(1, round(share * steps)) for share in SHOWN})
    exact = found[REFERENCE]
    columns = (
        Column("attention"), Column("status"),
        *(Column(f"step_{n}", format=".3f", title=f"loss at {n}") for n in shown),
        Column("apart", format=".3f", title=f"farthest from {REFERENCE}"),
        Column("equal", title="bits of the run again"),
        Column("milliseconds", "ms", ".1f", "step"),
    )  # fmt: skip
    rows = []
    for name, run in found.items():
        row: dict[str, Any] = dict.fromkeys(column.name for column in columns)
        row |= {"attention": name, BASIS: "measured", MACHINE: machine}
        if isinstance(run, str):
            rows.append(row | {"status": run})
            continue
        means = smoothed(run.losses)
        row |= {f"step_{n}": float(means[n - 1]) for n in shown}
        row |= {"milliseconds": run.milliseconds, "status": "ok", "losses": run.losses}
        if isinstance(exact, Run) and name != REFERENCE:
            row["apart"] = float(np.abs(means - smoothed(exact.losses)).max())
            row["equal"] = _same_bits(name, found)
        rows.append(row)
    note = (
        f"{text}. Losses in nats a token, means over {SMOOTHED} steps; a step's time is that of "
        "the whole model, whose products are float32."
    )
    return Table("training", "Training with each attention", columns, rows, (note,))


def _same_bits(name: str, found: dict[str, Run | str]) -> str | None:
    again = found.get(f"{name}, again")
    run = found[name]
    if not isinstance(again, Run) or not isinstance(run, Run):
        return None
    return "the same" if again.losses == run.losses else "others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    parser.add_argument(
        "--attention", action="append", choices=IMPLEMENTATIONS,
        help=f"beside {REFERENCE} and ours; repeatable, all unless chosen",
    )
    for field in fields(Shape):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default)
    add_time_limit(parser)
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours does not run. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device to train on; training is measured, never modelled")
    os.environ.setdefault(*WORKSPACE)
    shape = replace(Shape(), **{f.name: getattr(arguments, f.name) for f in fields(Shape)})
    device = torch.device("cuda")
    found: dict[str, Run | str] = {}
    chosen = {REFERENCE, OURS, *(arguments.attention or IMPLEMENTATIONS)}
    limit = TimeLimit(arguments.within)
    names = *(name for name in IMPLEMENTATIONS if name in chosen), f"{OURS}, again"
    for name in limit.begun(names):
        print(name, file=sys.stderr, flush=True)
        attention = IMPLEMENTATIONS[name.removesuffix(", again")]
        run, reason = attempt(
            partial(
                training.train, attention, shape, arguments.steps, device, seed=arguments.seed
            )
        )
        found[name] = reason or run
    found |= dict.fromkeys(limit.left_out, limit.reason)
    heads = f"heads {shape.heads}/{shape.heads_kv} of 256"
    masks = f"{shape.layers} layers, " + (
        f"window {shape.window} but for every {shape.full_every}th"
        if shape.window else "causal"
    )
    text = (
        f"{masks}, {heads}, {shape.batch} x {shape.seqlen} tokens a step, weights of seed "
        f"{arguments.seed}. SDPA bf16 runs, without and with a window, as "
        f"{training.back_ends(shape, device)}"
    )
    emit(table(found, arguments.steps, torch.cuda.get_device_name(device), text), arguments)
    return 0 if isinstance(found[OURS], Run) else 1
