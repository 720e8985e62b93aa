"""Kernel set of Blackwell, for the packages that call kernels: `kernels.kernel_set`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ...architectures import named
from ...softmax_emu.pattern import Ex2Pattern
from ..backward.ds_tiles import DS_BLOCK, DS_TILE
from ..forward.tiles import ForwardTiles
from ..kernel_set import MXFP8, BackwardKernel, BackwardSet, KernelSet, KeyKernel
from ..rows.sequences import PADDING
from . import tuning
from .decode.config import DECODE, DECODE_E4M3, DECODE_NVFP4, DecodeConfig
from .forward.config import E4M3_CONFIG, E4M3_TILES, TILES, ForwardConfig
from .forward.mxfp8_config import MXFP8_CONFIG, MXFP8_TILES
from .pair_plan import BLOCK_KV, CTAS

RECOMPUTED = KeyKernel(BLOCK_KV, PADDING, 4.16e-6, 1.0, 1e6)
#: Modelled calls lose least with 2 MB per part, of 0.5 to 4 (lab/notes.md).
STORED = KeyKernel(DS_BLOCK, DS_TILE, 1.8e-6, 1.0, 2e6, products=0.35)
STORED_MXFP8 = KeyKernel(DS_BLOCK, DS_TILE, 1.1e-6, 1.0, 2e6, products=0.35)


#: Tiles of few query rows -> their configuration.
_OF_FEW_ROWS = {config.tiles: config for config in (*DECODE, *DECODE_E4M3, *DECODE_NVFP4)}


def tuned(tiles: ForwardTiles, causal: bool, seqlen_k: int, gpu: str, paged: bool) -> Any:
    """The default configuration of a call with such tiles: `KernelSet`. Loads bound tiles of few
    rows, never exponentials: every mask, length and GPU gets the same. Others take the exp2 mix of
    the tuning table; gpu: "B200" or "B300"."""
    few = _OF_FEW_ROWS.get(tiles)
    if few is not None:
        return few
    # mxfp8 takes the mix of e4m3: its softmax does the same.
    is_e4m3 = tiles in (E4M3_TILES, MXFP8_TILES)
    pattern = tuning.pattern_for(causal, seqlen_k, gpu, is_e4m3=is_e4m3)
    return _with_pattern(pattern, {E4M3_TILES: E4M3_CONFIG, MXFP8_TILES: MXFP8_CONFIG}.get(tiles))


@functools.lru_cache(maxsize=64)
def _with_pattern(pattern: Ex2Pattern, config: ForwardConfig | None) -> ForwardConfig:
    """Every call needs one, and the plans take longer to derive than a small call to launch."""
    return replace(config or ForwardConfig(), ex2_pattern=pattern)


KERNELS = KernelSet(
    named("sm_100a"),
    {
        "forward": "forward.kernel:ForwardKernel",
        "forward_e4m3": "forward.e4m3:ForwardE4m3Kernel",
        MXFP8: "forward.mxfp8:ForwardMxfp8Kernel",
        "forward_decode": "decode.kernel:DecodeKernel",
        "forward_decode_e4m3": "decode.e4m3:DecodeE4m3Kernel",
        "forward_decode_nvfp4": "decode.nvfp4:DecodeNvfp4Kernel",
        "backward_dv": "backward.dv:DvKernel",
        "backward_products": "backward.products:ProductsKernel",
        "backward_dkdv": "backward.dkdv:DkdvKernel",
        "backward_dq": "backward.dq:DqKernel",
        "backward_dv_mxfp8": "backward.mxfp8.dv:DvMxfp8Kernel",
        "backward_products_mxfp8": "backward.mxfp8.products:ProductsMxfp8Kernel",
    },
    forward_config="forward.config:ForwardConfig",
    decode_config="decode.config:DecodeConfig",
    e4m3_configs=("forward.config:E4m3ForwardConfig", "forward.mxfp8_config:Mxfp8Config"),
    backward_config="backward.config:BackwardConfig",
    tuned=tuned,
    # Tiles of few rows come first: NOTE [keys as M] in `decode.config`.
    forwards=(
        *(config.tiles for config in DECODE),
        TILES,
        *(config.tiles for config in (*DECODE_E4M3, *DECODE_NVFP4)),
        E4M3_TILES,
        MXFP8_TILES,
    ),
    gathering=lambda config: config.gathering() if isinstance(config, DecodeConfig) else config,
    backward=BackwardSet(
        stored=(
            BackwardKernel("dv", ("dv",), has_ds=True),
            BackwardKernel("products", ("dk", "dq"), has_ds=True, computes_scores=False),
        ),
        recomputed=(BackwardKernel("dkdv", ("dk", "dv")), BackwardKernel("dq", ("dq",))),
        stored_keys=STORED,
        recomputed_keys=RECOMPUTED,
        cluster=CTAS,
    ),
    mxfp8_backward=BackwardSet(
        stored=(
            BackwardKernel("dv_mxfp8", ("dv",), has_ds=True),
            BackwardKernel("products_mxfp8", ("dk", "dq"), has_ds=True, computes_scores=False),
        ),
        recomputed=(),
        stored_keys=STORED_MXFP8,
        recomputed_keys=STORED_MXFP8,
        cluster=CTAS,
    ),
    mxfp8_backward_config="backward.mxfp8.config:Mxfp8BackwardConfig",
)
