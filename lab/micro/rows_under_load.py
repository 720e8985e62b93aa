"""Rows of `lab predict`, measured: `python -m lab predict --measure FILE`.

Each row runs alone, from a GPU at rest until its clock no longer changes. Written are its time and
an SM's clock in first launches and sustained; the same of a product and of cuDNN's attention, which
tell one GPU from another of its kind (`lab.model.hopper.clocks`). Results are checked before, but
for head_dim 128, which the suite's references do not have. L2 has what the launch before left.
Needs what `whole_gpu_measure` needs, and flash-attn-4.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.measure.prepared import prepared_call
from bench.measure.providers import FlashAttention4, Inputs, Ours, forward_call
from bench.measure.timer import CudaTimer
from bench.peers import flash_attn_4
from bench.suite import FORWARD, Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.micro.whole_gpu_measure import Device, attention, load, product

#: Seconds of load; its second half is "late": the clock gives way within 0.12.
SECONDS = 1.0
#: Milliseconds from rest within which launches are "first": the clock gives way after 25 or more.
FIRST_MS = 20.0


class Row(Protocol):
    """Row to be measured: whose kernel, and of what."""

    @property
    def name(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def direction(self) -> str: ...
    @property
    def case(self) -> Case: ...
    @property
    def head_dim(self) -> int: ...


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a result of `whole_gpu_measure.load`: [us, MHz of an SM] of first
    launches, all but the very first, and sustained; launches and watts by the driver's energy
    counter."""
    early = [row for n, row in enumerate(found["first"]) if n == 1 or (n > 1 and row[0] < FIRST_MS)]
    us, mhz = np.median(np.array(early)[:, 1:], axis=0)
    late_ms, late_mhz = found["late"]
    return {
        "first": [round(float(us) * 1e3, 2), round(float(mhz), 1)],
        "late": [round(late_ms * 1e3, 2), round(late_mhz, 1)],
        "watts": round(found["watts"], 1), "launches": found["count"],
    }  # fmt: skip


def _other_head_dim(row: Row) -> Callable[[], Any]:
    """flash-attn-4's forward of another head_dim."""
    case = row.case

    def tensor(heads: int) -> torch.Tensor:
        shape = case.batch, case.seqlen_q, heads, row.head_dim
        return torch.randn(shape, device="cuda").bfloat16()

    q, k, v, dout = map(tensor, (case.heads, case.heads_kv, case.heads_kv, case.heads))
    return forward_call(FlashAttention4(), Inputs(case, q, k, v, dout, None))


def prepared(row: Row, timer: CudaTimer) -> Callable[[], Any]:
    """A graph of the row's call. Raises RuntimeError if its result is wrong."""
    theirs = row.provider == flash_attn_4.PACKAGE
    if row.head_dim != HEAD_DIM:
        if row.direction != FORWARD or not theirs:
            raise RuntimeError(f"{row.name} is not a forward of flash-attn-4")
        return timer.prepare(_other_head_dim(row))[0]
    provider = FlashAttention4() if theirs else Ours()
    inputs = Inputs.random(row.case, timer.device, torch.bfloat16)
    ready, known = prepared_call(provider, inputs, row.direction, timer)
    if ready is None:
        raise RuntimeError(f"{row.name}: {known['status']}")
    return ready[0]


def measure(rows: Iterable[Row], timer: CudaTimer, out: Path) -> None:
    """Write the results to a file, again behind each row, so that none is lost with a later one."""
    device = Device()
    found: dict[str, Any] = {"device": timer.gpu.name, "driver": timer.gpu.driver, "rows": {}}
    cudnn = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    for name, operation in (("product", product()), ("attention", attention(cudnn))):
        operation()
        found[name] = figures(load(device, operation, seconds=SECONDS))
    for row in rows:
        print(row.name, file=sys.stderr, flush=True)
        try:
            call = prepared(row, timer)
            call()
            found["rows"][row.name] = figures(load(device, call, seconds=SECONDS))
            del call
        except Exception as error:  # Other measurements are not lost with it.
            found["rows"][row.name] = {"error": f"{type(error).__name__}: {error}"}
        out.write_text(json.dumps(found, indent=1))
        gc.collect()
        timer.release_memory()
