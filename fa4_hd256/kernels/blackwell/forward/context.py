"""Context of the warp roles of the Blackwell forward kernel: its operands, and the rings of each
role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ....schedulers.protocol import WorkTile
from ...forward.common import ForwardCommon
from ...forward.context import ForwardContext, ForwardKernelTensors
from ...limits import HEAD_DIM
from ...operands import SharedMemory
from ...plan.edges import RingRecord, RingState
from ...problem_class import OptionalTensors
from ..pair_kernel import PairContext
from .config import ForwardConfig


@dataclass(frozen=True)
class BlackwellForwardContext(ForwardContext, PairContext):
    """State that every warp role of one CTA shares.

    Buffers in `smem`, of 16-bit elements but for the last: "q" (block_q, 256, q_stages); "o" (the
    same), where O is staged; "k" (block_kv / 2, 256, kv_stages), this CTA's keys; "v" (block_kv,
    128, kv_stages), this CTA's columns, in the same memory as "k"; each with half of the columns
    for e4m3, but for "o"; "scale" (block_q, scale_stages) float32, the factor by
    which the correction warps rescale a row of O, after the last step 1 / the row's sum;
    "exchange" (block_q, 2) float32, where the softmax has two warpgroups.
    """


@dataclass(kw_only=True)
class LoadRings(RingRecord):
    """Buffers that the load warp fills next: of K and V, and of Q. Each state serves both edges of
    its ring: the wait for "free" and the bytes of "loaded"."""

    kv: RingState
    q: RingState


@dataclass(kw_only=True)
class MmaRings(RingRecord):
    """Buffers that the MMA warp uses next: of K and V, Q, S, each half of P, and O.

    A state serves both edges of its ring: kv waits for kv_loaded and commits kv_free, o waits for
    o_free and commits o_done.  q only waits: the epilogue signals q_free.  s only commits s_done:
    the order of the MMAs frees S.  p_first and p_last are the halves of a step's keys, each with a
    stage for each S buffer.
    """

    kv: RingState
    q: RingState
    s: RingState
    p_first: RingState
    p_last: RingState
    o: RingState


@dataclass(kw_only=True)
class SoftmaxRings(RingRecord):
    """Buffers that a softmax warp uses next: of S, whose P lies over it, and of the factors. s
    waits for s_done and arrives on p_first_done and p_last_done; scale waits for scale_free and
    arrives on scale_done."""

    s: RingState
    scale: RingState


@dataclass(kw_only=True)
class CorrectionRings(RingRecord):
    """Buffers that a correction warp uses next: of the factors, of staged slices of O, of O. scale
    waits for scale_done and arrives on scale_free; o waits for o_done and arrives on o_free; staged
    only arrives on o_staged."""

    scale: RingState
    staged: RingState
    o: RingState


class ScoreRow(NamedTuple):
    """Row of scores of one softmax thread: its tile, query and query head."""

    work: WorkTile
    query: Int32
    head: Int32


def tensors_of(
    kernel: ForwardCommon,
    operands: tuple[cute.Tensor, ...],
    lse: cute.Tensor,
    optional: OptionalTensors,
) -> ForwardKernelTensors:
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
    rows = {"scale": config.scale_stages}
    if config.softmax_groups > 1:
        rows["exchange"] = config.softmax_groups
    staged = memory.operand("q", config.block_q, HEAD_DIM, config.q_stages)
    return {
        "q": _first_columns(staged, config.columns),
        "o": staged,
        "k": memory.operand("kv", config.block_kv // 2, config.columns, config.kv_stages),
        "v": memory.operand("kv", config.block_kv, config.columns // 2, config.kv_stages),
        **{
            name: cute.make_tensor(
                memory.region(name, Float32, 16), cute.make_layout((config.block_q, stages))
            )
            for name, stages in rows.items()
        },
    }


def _first_columns(staged: cute.Tensor, columns: int) -> cute.Tensor:
    """Return the part of the buffers that Q takes: `e4m3` NOTE [Q below O]."""
    if columns == HEAD_DIM:
        return staged
    parts = cute.logical_divide(staged, (None, cute.make_layout(columns)))
    return parts[None, (None, 0), None]
