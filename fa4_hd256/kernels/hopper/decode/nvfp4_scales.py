"""Scales of K and V in NVFP4: to shared memory beside a tile, on the barrier of its codes.

A row's scales are 16 bytes, and a tile's rows lie one behind the other.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32

from ....schedulers.protocol import WorkTile
from ...forward.nvfp4_words import SCALE_COLUMNS, copy_scales
from ...operands import SharedMemory
from ...plan.edges import RingState
from .config import BLOCK_KV, E4m3Config
from .context import HopperE4m3DecodeContext


def buffers(memory: SharedMemory, config: E4m3Config) -> dict[str, cute.Tensor]:
    """Return the buffers of scales and of codes by halves of words, none of other types."""

    def flat(region: str, element_type: Any) -> cute.Tensor:
        return cute.make_tensor(memory.region(region, element_type, 1024), cute.make_layout(1))

    if not config.nvfp4:
        return {}
    return {
        "kv_scales": memory.operand("kv_scales", BLOCK_KV, SCALE_COLUMNS, config.kv_stages),
        "scale_words": flat("kv_scales", Uint32),
        "kv_halves": flat("kv", Uint16),
    }


def begin_load(
    kernel: Any,
    context: HopperE4m3DecodeContext,
    name: str,
    work: WorkTile,
    position: Any,
    state: RingState,
) -> None:
    """Begin a K or V load into a free buffer: expect TMA's bytes; in NVFP4 load its scales."""
    loaded, head = context.barriers["kv_loaded"], work.head // context.heads_per_kv
    if not kernel.gathers:
        loaded.expect_bytes(state)
    if not kernel.config.nvfp4:
        return
    source = getattr(context.tensors.optional, f"{name}_block_scale")
    buffer = context.smem["kv_scales"]
    if kernel.gathers:
        copy_scales(source, buffer[None, None, state.index].iterator, position, head)
        return
    place = (
        kernel.keys.rows(context, work, position),
        kernel.keys.first_row(position),
        Int32(0),
        head,
    )
    kernel.keys.load(source, buffer, place, (loaded.pointer(state), state.index))
