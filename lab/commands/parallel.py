"""`python -m lab parallel`: training steps of a Gemma-shaped block over several GPUs, measured.

Forward and backward in bf16, by one GPU, under tensor parallelism and under FSDP2, the tokens of a
step being the same, with this project's attention and with PyTorch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.measure.time_limit import TimeLimit
from bench.tables.comparison import OURS
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from lab.measure.parallel_block import DIVISIONS, Attention, Block, BlockShape, causal_attention
from lab.measure.rank_processes import ONE_GPU, Times, each_job, figures, rank_count
from lab.measure.ranks import sampled

#: Shapes of the size of Gemma 3 12B's blocks, with all keys before a query.
SHAPES = (
    BlockShape(3840, 15360, 16, 8, 4, 4096),
    BlockShape(3840, 15360, 16, 8, 4, 32768),
)  # fmt: skip


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's with cuDNN."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {OURS: causal_attention, "SDPA, cuDNN": _sdpa}

#: Shape, attention, division.
Job = tuple[BlockShape, str, str]

COLUMNS = (
    Column("block"), Column("attention"), Column("division"), Column("status"),
    Column("ms", "ms", ".2f", "median"), Column("low", "ms", ".2f", "20 %"),
    Column("high", "ms", ".2f", "80 %"), Column("speedup", "", ".2f", f"over {ONE_GPU}"),
)  # fmt: skip


def timed(job: Job, sampling: tuple[int, int]) -> Times:
    """Time the steps of a rank's process. sampling: steps before, steps that count."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shape, attention, division = job
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(7)
    block = Block(shape, ATTENTIONS[attention]).to(device, torch.bfloat16)
    x = torch.randn(shape.batch, shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    divided, own = DIVISIONS[division](block, x, mesh)

    def step() -> None:
        divided.zero_grad()
        divided(own).float().square().mean().backward()

    return sampled(step, sampling, device)


def table(found: Mapping[Job, Times | str], ranks: int, machine: str) -> Table:
    """found: times of every job, or why there are none."""
    rows = [_row(job, found) | {BASIS: "measured", MACHINE: machine} for job in found]
    note = "Forward and backward of one block, from a barrier to the end of the slowest rank."
    return Table("parallel", f"Training steps over {ranks} GPUs", COLUMNS, rows, (note,))


def _row(job: Job, found: Mapping[Job, Times | str]) -> dict[str, Any]:
    """Columns of a job, beside what is found for one GPU."""
    shape, attention, division = job
    row: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)
    row |= {"block": str(shape), "attention": attention, "division": division}
    one = None if division == ONE_GPU else found.get((shape, attention, ONE_GPU))
    return row | figures(found[job], one)


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours broke."""
    limit = TimeLimit(arguments.within)
    ranks = rank_count(arguments.ranks, "parallel")
    jobs = [(s, name, division) for s in SHAPES for division in DIVISIONS for name in ATTENTIONS]
    found: dict[Job, Times | str] = {}

    def heard(one: tuple[Job, Times | str]) -> list[dict[str, Any]]:
        found.update([one])
        return [_row(one[0], found)]

    timing = partial(timed, sampling=(arguments.warmup, arguments.runs))
    each = each_job(timing, limit.begun(jobs), ranks)
    for _ in results(each, len(jobs), COLUMNS, heard, "measuring"):
        pass
    machine = f"{ranks} x {torch.cuda.get_device_name(0)}"
    emit(limit.noted(table(found, ranks, machine)), arguments)
    return int(any(isinstance(t, str) for (_, name, _), t in found.items() if name == OURS))
