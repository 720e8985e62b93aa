"""Kernel set of Hopper, for the packages that call kernels: `kernels.kernel_set`."""

from __future__ import annotations

from typing import Any

from ...architectures import named
from ..backward.ds_tiles import DS_BLOCK
from ..forward.tiles import ForwardTiles
from ..kernel_set import BackwardKernel, BackwardSet, KernelSet, KeyKernel
from ..limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM
from .decode.config import DECODE_E4M3, DECODE_NVFP4
from .forward.config import DECODE, MASKED, ForwardConfig
from .forward.e4m3.config import E4m3ForwardConfig, E4m3ForwardWarpPlan

BACKWARD_CTAS = 2  # of a cluster
STEP_QUERIES = 64

#: Bytes of a part's dK and dV of a tile: read by the sum in float32, and written with as many more
#: as float32 has beside 16 bits.
PART_BYTES = 2 * DS_BLOCK * HEAD_DIM * (2 * FLOAT_BYTES - ELEMENT_BYTES)

# As measured on an H200 (lab/notes.md): a step of dV and dS takes 3,850 clocks at 1,690 MHz, a GEMM
# of dS a third of it, and the start and end of a tile of both kernels three steps; dK and dV by
# themselves at the rate of 600 TFLOPS, with five GEMMs.
STORED = KeyKernel(DS_BLOCK, STEP_QUERIES, 2.3e-6, 3.0, PART_BYTES, products=0.31, by_sections=True)
RECOMPUTED = KeyKernel(DS_BLOCK, STEP_QUERIES, 4.6e-6, 3.0, 1.2e6)

SHORT_COST = 1.024  # of a key in a short step, over that in a long one
LONG = ForwardConfig()
E4M3 = E4m3ForwardConfig()
E4M3_COLUMNS = E4m3ForwardConfig(warps=E4m3ForwardWarpPlan(transposers=None))


def tuned(tiles: ForwardTiles, causal: bool, seqlen_k: int, gpu: str, paged: bool) -> Any:
    """The default configuration of a call with such tiles: `KernelSet`.

    Measured on an H200 (lab/notes.md): with a mask steps of 64 keys leave out more; without, 80
    keys take 2.4 % less a key than 64, but more of the last step may be waste.  Few page sizes
    share more than 16 rows with 80 keys.
    """
    for config in (DECODE, MASKED, *DECODE_E4M3, *DECODE_NVFP4, E4M3, E4M3_COLUMNS):
        if config.tiles == tiles:
            return config
    long, short = (-(-seqlen_k // keys) * keys for keys in (LONG.block_kv, MASKED.block_kv))
    return MASKED if causal or paged or short * SHORT_COST < long else LONG


KERNELS = KernelSet(
    named("sm_90a"),
    {
        "forward": "forward.kernel:ForwardKernel",
        "forward_decode_e4m3": "decode.kernel:DecodeE4m3Kernel",
        "forward_e4m3": "forward.e4m3.kernel:ForwardE4m3Kernel",
        "backward_dv": "backward.dv:DvKernel",
        "backward_products": "backward.products:ProductsKernel",
        "backward_single_dk": "backward.single:DkKernel",
        "backward_single_dv": "backward.single:SingleDvKernel",
        "backward_single_dq": "backward.single:DqKernel",
    },
    forward_config="forward.config:ForwardConfig",
    backward_config="backward.config:BackwardConfig",
    tuned=tuned,
    decode_config="decode.config:E4m3Config",
    e4m3_configs=("forward.e4m3.config:E4m3ForwardConfig",),
    forwards=(
        DECODE.tiles,
        LONG.tiles,
        MASKED.tiles,
        *(config.tiles for config in (*DECODE_E4M3, *DECODE_NVFP4)),
        E4M3.tiles,
        E4M3_COLUMNS.tiles,
    ),
    backward=BackwardSet(
        stored=(
            BackwardKernel("dv", ("dv",), has_ds=True),
            BackwardKernel("products", ("dk", "dq"), has_ds=True, computes_scores=False),
        ),
        recomputed=(
            BackwardKernel("single_dk", ("dk",)),
            BackwardKernel("single_dv", ("dv",)),
            BackwardKernel("single_dq", ("dq",)),
        ),
        stored_keys=STORED,
        recomputed_keys=RECOMPUTED,
        cluster=BACKWARD_CTAS,
    ),
    counts_tiles=True,
    gathering=lambda config: config.gathering(),
    gathered_keys="hopper.forward_common:CopiedRows",
)
