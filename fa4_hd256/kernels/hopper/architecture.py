"""What Hopper's kernels are, for the rooms that call them: `kernels.kernel_set`."""

from __future__ import annotations

from fa4_hd256.architectures import named
from fa4_hd256.kernels.kernel_set import ForwardTiles, KernelSet

from .forward.plan import BLOCK_KV, CTAS, TILE_Q, WARPGROUP_ROWS

__all__ = ["KERNELS"]

KERNELS = KernelSet(
    named("sm_90a"),
    {"forward": "forward.kernel:ForwardKernel"},
    forward_config="forward.config:ForwardConfig",
    # A step of 80 keys: 2 x 1280 clocks of the tensor core, at 1.7 GHz.
    forward=ForwardTiles(
        WARPGROUP_ROWS, TILE_Q, BLOCK_KV, CTAS, step_seconds=1.5e-6, least_saved=5
    ),
    counts_tiles=True,
)
