"""What Hopper's kernels are, for the rooms that call them: `kernels.kernel_set`."""

from __future__ import annotations

from fa4_hd256.architectures import named
from fa4_hd256.kernels.forward_combine import CombineConfig
from fa4_hd256.kernels.kernel_set import KernelSet

from .forward.config import DECODE, ForwardConfig

__all__ = ["KERNELS"]

KERNELS = KernelSet(
    named("sm_90a"),
    {"forward": "forward.kernel:ForwardKernel"},
    forward_config="forward.config:ForwardConfig",
    forwards=(DECODE.tiles, ForwardConfig().tiles),
    counts_tiles=True,
    # A decoding step has few rows, a warp each, which wait for memory once for so many parts.
    combine=CombineConfig(parts_at_once=16),
)
