"""Operands of the forward kernel: TMA tensors, and buffers in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...limits import HEAD_DIM
from ...operands import SharedMemory
from .config import ForwardConfig


def tensors_of(
    kernel: ForwardCommon, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
) -> ForwardKernelTensors:
    """Return the tensors of a kernel. operands: q, k, v, out by (seqlen, columns, heads, batch)."""
    config, (q, k, v, out) = kernel.config, operands
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    store = cpasync.CopyBulkTensorTileS2GOp()
    q = kernel.tma_tensor("q", q, (load, config.block_q, config.columns))
    k = kernel.loaded_tensor("k", k, (load, config.block_kv // 2, config.columns))
    v = kernel.loaded_tensor("v", v, (load, config.block_kv, config.columns // 2))
    o = None
    if not kernel.problem_class.split:
        o = kernel.tma_tensor("o", out, (store, config.block_q, config.o_slice))
    return ForwardKernelTensors(q, k, v, o, out, lse, optional)


def buffers_in(memory: SharedMemory, config: ForwardConfig) -> dict[str, cute.Tensor]:
    """Return the buffers of a CTA: `BlackwellForwardContext`."""
    scale_layout = cute.make_layout((config.block_q, config.scale_stages))
    staged = memory.operand("q", config.block_q, HEAD_DIM, config.q_stages)
    return {
        "q": _first_columns(staged, config.columns),
        "o": staged,
        "k": memory.operand("kv", config.block_kv // 2, config.columns, config.kv_stages),
        "v": memory.operand("kv", config.block_kv, config.columns // 2, config.kv_stages),
        "scale": cute.make_tensor(memory.region("scale", Float32, 16), scale_layout),
    }


def _first_columns(staged: cute.Tensor, columns: int) -> cute.Tensor:
    """Return the part of the buffers that Q takes: `e4m3` NOTE [Q below O]."""
    if columns == HEAD_DIM:
        return staged
    parts = cute.logical_divide(staged, (None, cute.make_layout(columns)))
    return parts[None, (None, 0), None]
