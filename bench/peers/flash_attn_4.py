"""flash-attn-4: which version is known here, what it refuses, how it is called and compiled.

`attention` is its public function, on a GPU or where `sm100_sim` stands in for one;
`compile_forward` its head_dim 256 forward alone, compiled for sm_100a without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern

PACKAGE = "flash-attn-4"
#: Names in tables of its backward with five GEMMs, and of its forward with KV splits by its rule.
FIVE_PRODUCTS, DIVIDED = f"{PACKAGE}, five products", f"{PACKAGE}, num_splits=0"
#: Variable of flash-attn-4 that selects that backward; read at each call.
_FIVE_PRODUCTS_VARIABLE = "FLASH_ATTENTION_HD256_GENERIC_BWD"

#: The version whose private interface this file knows.
KNOWN_VERSION = "4.0.0b36"

#: Target that it compiles for on a B200.
ARCHITECTURE = "sm_100a"

_MODULE = "flash_attn.cute.flash_fwd_sm100"

#: Default of its softmax, which its tuning table cannot change.
_EX2_EMU_RES = 4

#: Multiples of queries and of keys up to which its kernels may ask a mask_mod past the end.
MASK_PADDING = (256, 512)

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


def unavailable() -> str | None:
    """Return why it cannot be compiled here, None if it can."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install {PACKAGE}=={KNOWN_VERSION}"
    if version != KNOWN_VERSION:
        return f"{PACKAGE} {version} is installed; known here is {KNOWN_VERSION} only"
    try:
        _forward_module()
    except ImportError as error:
        return f"{PACKAGE} {version} cannot be imported: {error}"
    return None


def backward_refusal(window: bool, softcap: bool) -> str | None:
    """Return the reason for which its backward at head_dim 256 refuses a call, None if it takes it.

    window: bounded on the left, beside a causal mask or not.
    """
    if softcap:
        return "SM100 backward with head_dim=256 does not support softcap"
    if window:
        return "SM100 backward with head_dim=256 does not support local attention"
    return None


def five_products() -> contextlib.AbstractContextManager[Any]:
    """Select its backward with five GEMMs at head_dim 256, for the body only."""
    return mock.patch.dict(os.environ, {_FIVE_PRODUCTS_VARIABLE: "1"})


def versions() -> tuple[str, ...]:
    """Return the versions that its compiled kernels depend on."""
    names = (PACKAGE, "nvidia-cutlass-dsl", "quack-kernels")
    return tuple(importlib.metadata.version(name) for name in names)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: tuple[tuple[torch.Tensor, int], tuple[torch.Tensor, int]] | None = None,
    **options: Any,
) -> torch.Tensor:
    """out of its public functions, shaped like q.

    q, k, v: (batch, seqlen, heads, head_dim), or without the batch where sequences are packed;
    packed: (cu_seqlens, longest length) of queries and of keys then. options: causal, window_size,
    softcap, num_splits and those of `masked_by`, handed on as they are.
    """
    from flash_attn.cute import interface

    if packed is None:
        result = interface.flash_attn_func(q, k, v, **options)
    else:
        (offsets_q, longest_q), (offsets_k, longest_k) = packed
        result = interface.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, max_seqlen_q=longest_q,
            max_seqlen_k=longest_k, **options,
        )  # fmt: skip
    return _out_of(result)


def masked_by(words: torch.Tensor) -> dict[str, Any]:
    """Return options of `attention` under a mask of packed bits.

    words: (sequences, queries, words) int32, padded as `MASK_PADDING` says; bit j of word w is key
    32 w + j. With a mask_mod its forward has no other bounds, so the bits say causal, too.
    """
    return {"mask_mod": _bit_of_word(), "aux_tensors": [words]}


@functools.cache
def _bit_of_word() -> Any:
    """Return a mask_mod that reads a key's bit. (Its SM90 kernels ask for one key at a time.)"""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def bit_of_word(  # type: ignore[no-untyped-def]
        batch, head, query, key, seqlen_info, aux_tensors
    ):
        b, q, k = (utils.ssa_to_scalar(index) for index in (batch, query, key))
        word = aux_tensors[0][b, q, k >> 5]
        seen = cutlass.Boolean(((word >> (k & 31)) & 1) != 0)
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    return bit_of_word


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """out, shaped like q, (batch, seqlen_q, heads, head_dim), over keys in pages.

    k, v: (pages, page_size, heads_kv, head_dim); options: page_table, seqused_k and what
    `attention` takes, handed on as they are.
    """
    from flash_attn.cute import interface

    return _out_of(interface.flash_attn_varlen_func(q, k, v, max_seqlen_q=q.shape[1], **options))


def _out_of(result: Any) -> torch.Tensor:
    """Return out from the result of its functions, with LSE or without."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


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


def _forward_module() -> Any:
    with warnings.catch_warnings():
        # flash-attn-4 is older than the DSL it runs on here.
        warnings.simplefilter("ignore")
        return importlib.import_module(_MODULE)


def _tuning(causal: bool) -> dict[str, Any]:
    pair, is_sm103 = True, False
    return _forward_module()._TUNING_CONFIG[pair, causal, HEAD_DIM, is_sm103]


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
        kernel = _forward_module().FlashAttentionForwardSm100(
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
