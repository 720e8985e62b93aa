"""flash-attn-4's code, compiled and read: its forward for sm_100a without a GPU, mixes of exp2, and
its rule of KV splits.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from bench.peers.flash_attn_4 import PACKAGE, forward_module, unavailable
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern

#: Target that it compiles for on a B200.
ARCHITECTURE = "sm_100a"

#: Default of its softmax, which its tuning table cannot change.
_EX2_EMU_RES = 4

#: `num_splits_heuristic`: steps that are never split, and the splits it stops at.
_FEWEST_STEPS, _MOST_SPLITS = 4, 128

#: Rows of a tile of its kernel of one CTA.
SINGLE_ROWS = 128

#: Query heads per key/value head of the compiled kernel, a compile-time constant there.
GROUP = 2


class _Device:
    """Answers of a B200 to its queries of the driver."""

    def get_device_multiprocessor_count(self) -> int:
        return 148

    def get_max_active_clusters(self, size: int, stream: Any = None) -> int:
        return 148 // size

    def get_l2_cache_size_in_bytes(self) -> int:
        return 126 << 20


def versions() -> tuple[str, ...]:
    """Return the versions that its compiled kernels depend on."""
    names = (PACKAGE, "nvidia-cutlass-dsl", "quack-kernels")
    return tuple(importlib.metadata.version(name) for name in names)


def backward_of_an_empty_sequence(rows: int, causal: bool) -> None:
    """Run its backward of one sequence without queries and keys, said to have at most `rows`."""
    from flash_attn.cute.interface import _flash_attn_bwd

    tensor = torch.zeros(rows, 1, HEAD_DIM, dtype=torch.bfloat16)
    offsets = torch.zeros(2, dtype=torch.int32)
    _flash_attn_bwd(
        *[tensor] * 5, torch.zeros(1, rows), causal=causal, cu_seqlens_q=offsets,
        cu_seqlens_k=offsets, max_seqlen_q=rows, max_seqlen_k=rows,
    )  # fmt: skip


def split_numbers(tiles: int, steps: int, sms: int) -> range:
    """KV splits above 1 that its rule may choose; the last is what num_splits=0 takes.

    tiles: of 128 packed rows, over all KV heads and sequences. steps: of 128 keys that the longest
    one has. Any number up to 256 can be requested (its second kernel adds up no more); above 1 a
    call takes the path of one CTA per tile, whatever it takes else.
    """
    if steps <= _FEWEST_STEPS or not tiles:
        return range(2, 2)
    return range(2, min(sms // tiles, _MOST_SPLITS, steps) + 1)


def tuned_pattern(causal: bool) -> Ex2Pattern:
    """The mix of exp2 that it compiles to by itself."""
    return pattern(_tuning(causal)["ex2_emu_freq"], _tuning(causal)["ex2_emu_start_frg"])


def pattern(freq: int, start_fragment: int = 0) -> Ex2Pattern:
    """Return the meaning of a frequency of its tuning table: its last fragment is always
    hardware."""
    if freq == 0:
        return HARDWARE_ONLY
    return Ex2Pattern(freq, _EX2_EMU_RES, start_fragment, last_fragment_hardware=True)


def _tuning(causal: bool) -> dict[str, Any]:
    pair, is_sm103 = True, False
    return forward_module()._TUNING_CONFIG[pair, causal, HEAD_DIM, is_sm103]


@contextlib.contextmanager
def _tuned_to(causal: bool, mix: Ex2Pattern) -> Iterator[None]:
    """Set its tuning table to `mix`, for the body only."""
    if mix != pattern(mix.ex2_emu_freq, mix.ex2_emu_start_frg):
        raise ValueError(f"{PACKAGE} cannot be set to {mix}; its res is {_EX2_EMU_RES}")
    table = _tuning(causal)
    saved = dict(table)
    table.update(ex2_emu_freq=mix.ex2_emu_freq, ex2_emu_start_frg=mix.ex2_emu_start_frg)
    try:
        yield
    finally:
        table.update(saved)


@contextlib.contextmanager
def _device_described() -> Iterator[None]:
    import cutlass

    saved = cutlass.utils.HardwareInfo
    cutlass.utils.HardwareInfo = _Device
    try:
        yield
    finally:
        cutlass.utils.HardwareInfo = saved


def arguments(seqlen: int = 256) -> tuple:
    """Arguments of a call: q, k, v, out (1, seqlen, heads, 256) bf16, lse (1, heads, seqlen)
    float32 and the softmax scale."""
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    shapes = [(1, seqlen, heads, HEAD_DIM) for heads in (GROUP, 1, 1, GROUP)]
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    tensors.append(torch.zeros(1, GROUP, seqlen))
    described = [
        from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=tensor.ndim - 1)
        for tensor in tensors
    ]
    return *described, cutlass.Float32(1 / math.sqrt(HEAD_DIM))


def compile_forward(causal: bool, mix: Ex2Pattern) -> Any:
    """Compile with the same compiler and options as ours; returns what `cute.compile` returned.

    Raises RuntimeError if `unavailable`, ValueError for a mix its tuning table cannot express.
    """
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    import cuda.bindings.driver as cuda
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, GenerateLineInfo, GPUArch, KeepCUBIN, KeepPTX

    # Imported here: the rest of this module runs with earlier releases of CuTe DSL, too.
    from fa4_hd256.run.tracing import targeting

    with (
        targeting(ARCHITECTURE),
        _device_described(),
        _tuned_to(causal, mix),
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(prefix="fa4_hd256_") as scratch,
    ):
        warnings.simplefilter("ignore")
        kernel = forward_module().FlashAttentionForwardSm100(
            HEAD_DIM, HEAD_DIM, qhead_per_kvhead=GROUP, is_causal=causal, m_block_size=128,
            n_block_size=128, q_stage=1, is_static_persistent=not causal, use_2cta_instrs=True,
            # Choice of its interface for dense attention at this head dimension: S twice.
            use_s_ping_pong=True,
        )  # fmt: skip
        options = (
            GPUArch(ARCHITECTURE),
            GenerateLineInfo(True),
            KeepPTX(),
            KeepCUBIN(),
            DumpDir(scratch),
        )
        compiled = cute.compile[options](kernel, *arguments(), stream=cuda.CUstream(0))
        # Read while the files are there: the object may refer to them lazily.
        if not compiled.artifacts.PTX or not compiled.artifacts.CUBIN:
            raise RuntimeError(f"CuTe DSL returned no PTX or no cubin for {PACKAGE}")
    return compiled
