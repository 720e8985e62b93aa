"""Kernel set of Hopper, for the packages that call kernels: `kernels.kernel_set`."""

from __future__ import annotations

from ...architectures import named
from ..backward.ds_tiles import DS_BLOCK
from ..kernel_set import BackwardKernel, BackwardSet, KernelSet, KeyKernel
from .decode.config import DECODE_E4M3
from .forward.config import DECODE, MASKED, ForwardConfig

__all__ = ["KERNELS"]

BACKWARD_CTAS = 2  # of a cluster
STEP_QUERIES = 64

# Steps as measured on an H200 (lab/notes.md): dV and dS at 600 TFLOPS, a GEMM of dS at 640; dK
# and dV by themselves at the same rate, with five GEMMs.
STORED = KeyKernel(DS_BLOCK, STEP_QUERIES, 2.8e-6, 1.5, 1.2e6, products=0.31)
RECOMPUTED = KeyKernel(DS_BLOCK, STEP_QUERIES, 4.6e-6, 3.0, 1.2e6)

KERNELS = KernelSet(
    named("sm_90a"),
    {
        "forward": "forward.kernel:ForwardKernel",
        "forward_decode_e4m3": "decode.kernel:DecodeE4m3Kernel",
        "backward_dv": "backward.dv:DvKernel",
        "backward_products": "backward.products:ProductsKernel",
        "backward_single_dk": "backward.single:DkKernel",
        "backward_single_dv": "backward.single:SingleDvKernel",
        "backward_single_dq": "backward.single:DqKernel",
    },
    forward_config="forward.config:ForwardConfig",
    backward_config="backward.config:BackwardConfig",
    decode_config="decode.config:E4m3Config",
    forwards=(
        DECODE.tiles,
        ForwardConfig().tiles,
        MASKED.tiles,
        *(config.tiles for config in DECODE_E4M3),
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
)
