"""Rates that others have published, each with the kernel, the GPU and the protocol it is of."""

from __future__ import annotations

from dataclasses import replace

from bench.suite import Case
from lab.published import flash_attention, nvidia
from lab.published.rows import CUDNN, HOST_BOUND, Published

#: All of attention.
ROWS = (
    *flash_attention.FORWARD_256, *flash_attention.BACKWARD_256, *flash_attention.FORWARD_128,
    *nvidia.TRAINING, *nvidia.INFERENCE, *nvidia.DECODE, *nvidia.FROST_BACKWARD,
    *nvidia.CUDNN_BACKWARD, *nvidia.PROFILED,
)  # fmt: skip

#: Rates of closed kernels, which stand as published. Those of keys in pages are of other calls than
#: tables of rates have.
_CLOSED = tuple(
    row for row in (*nvidia.TRAINING, *nvidia.INFERENCE, *nvidia.CUDNN_BACKWARD)
    if row.build.project == CUDNN
)  # fmt: skip


def closed_peer(machine: str, case: Case, direction: str) -> Published | None:
    """cuDNN's highest published rate of that very call on a GPU of that name whose clock was free;
    None where none is known."""
    same = replace(case, group="published")
    found = [
        row for row in _CLOSED
        if (row.machine, row.direction, row.problem) == (machine, direction, same)
        and row.held_ghz is None and row.kind != HOST_BOUND
    ]  # fmt: skip
    return max(found, key=lambda row: row.tflops, default=None)
