"""Cases whose kernels come from packages of others, called through the packages' own functions.

liger-kernel 0.8.5 and flashinfer-python 0.7.2.post1 need not be installed: a folder with the
unpacked wheels in PYTHONPATH does.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

from .case import Call, Case, World
from .cuda_kernels import Source, folder_of

_FLASHINFER, _LIGER = "flashinfer-python 0.7.2.post1", "liger-kernel 0.8.5"
_FLASH_ATTENTION = "flash-attn-4 4.0.0b36"
#: The activation is the caller's: FlashInfer generates this line around its template.
_SILU = Source(
    """
#define FLASHINFER_UTILS_CUH_
#include "flashinfer/activation.cuh"
__device__ __forceinline__ float silu(const float& x) { return x / (1.0f + __expf(-x)); }
template __global__ void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, silu, 8>(
    __nv_bfloat16*, const __nv_bfloat16*, const int);
""",
    package="flashinfer",
    include="data/include",
)
_SILU_KERNEL = "flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, silu, 8>"
_TILE = 128


def _module(package: str, file: str) -> ModuleType:
    """Return a module of a package by its file: the package itself imports far more."""
    name = f"_lab_{package}_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder_of(package) / file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _liger_rms_norm(world: World, rows: int, columns: int) -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    x = world.tensor(rows, columns, dtype="bfloat16")
    weight = world.tensor(columns, dtype="bfloat16")
    return lambda: rms_norm_forward(x, weight, 1e-6, 0.0, "llama", False)


def _liger_layer_norm(world: World, rows: int, columns: int) -> Call:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    x = world.tensor(rows, columns, dtype="bfloat16")
    weight, bias = (world.tensor(columns, dtype="bfloat16") for _ in range(2))
    return lambda: layer_norm_forward(x, weight, bias, 1e-6)


def _liger_swiglu(world: World, rows: int, columns: int) -> Call:
    from liger_kernel.ops.swiglu import swiglu_forward

    a, b = (world.tensor(rows, columns, dtype="bfloat16") for _ in range(2))
    return lambda: swiglu_forward(a, b)


def _flashinfer_product(world: World, m: int, n: int, k: int) -> Call:
    kernel = _module("flashinfer", "triton/kernels/sm_constraint_gemm.py").gemm_kernel
    a, b = world.tensor(m, k, dtype="float16"), world.tensor(k, n, dtype="float16")
    c = world.tensor(m, n, dtype="float16")
    grid = (math.ceil(m / _TILE) * math.ceil(n / _TILE),)
    strides = [s for t in (a, b, c) for s in (t.stride(0), t.stride(1))]
    return lambda: kernel[grid](a, b, c, m, n, k, *strides, alpha=1.0, beta=0.0)


def _flashinfer_silu(world: World, rows: int, columns: int) -> Call:
    x = world.tensor(rows, 2 * columns, dtype="bfloat16")
    out = world.tensor(rows, columns, dtype="bfloat16")
    return lambda: world.launch(
        _SILU_KERNEL, (rows, 1, 1), (min(columns // 8, 256), 1, 1), out, x, columns, source=_SILU
    )


def _attention(world: World, queries: int, keys: int, heads: int, head_dim: int) -> Call:
    from flash_attn.cute.interface import flash_attn_func

    q = world.tensor(1, queries, heads, head_dim, dtype="bfloat16")
    k, v = (world.tensor(1, keys, heads, head_dim, dtype="bfloat16") for _ in range(2))
    return lambda: flash_attn_func(q, k, v)


CASES = (
    Case("attention, head_dim 64, 8192 tokens", "CuTe DSL", _FLASH_ATTENTION, _attention,
         {"queries": 192, "keys": 8192, "heads": 1, "head_dim": 64},
         {"queries": 8192, "keys": 8192, "heads": 32, "head_dim": 64},
         clusters=43 * 32, hbm_bytes=4.0 * 2 * 8192 * 32 * 64, work=4.0 * 8192**2 * 32 * 64),
    Case("attention, head_dim 128, 8192 tokens", "CuTe DSL", _FLASH_ATTENTION, _attention,
         {"queries": 128, "keys": 8192, "heads": 1, "head_dim": 128},
         {"queries": 8192, "keys": 8192, "heads": 16, "head_dim": 128},
         clusters=64 * 16, hbm_bytes=4.0 * 2 * 8192 * 16 * 128, work=4.0 * 8192**2 * 16 * 128),
    Case("RMS norm of Liger, bf16, rows of 4096", "Triton", _LIGER, _liger_rms_norm,
         {"rows": 2, "columns": 4096}, {"rows": 65536, "columns": 4096},
         clusters=65536, hbm_bytes=4.0 * 65536 * 4096),
    Case("layer norm of Liger, bf16, rows of 4096", "Triton", _LIGER, _liger_layer_norm,
         {"rows": 2, "columns": 4096}, {"rows": 65536, "columns": 4096},
         clusters=65536, hbm_bytes=4.0 * 65536 * 4096),
    Case("SwiGLU of Liger, bf16, rows of 8192", "Triton", _LIGER, _liger_swiglu,
         {"rows": 2, "columns": 8192}, {"rows": 32768, "columns": 8192},
         clusters=32768, hbm_bytes=6.0 * 32768 * 8192),
    Case("product of FlashInfer, fp16, 4096^3", "Triton", _FLASHINFER, _flashinfer_product,
         {"m": 128, "n": 256, "k": 4096}, {"m": 4096, "n": 4096, "k": 4096},
         clusters=1024, hbm_bytes=6.0 * 4096**2, work=2.0 * 4096**3),
    Case("SiLU and product of FlashInfer, bf16, rows of 8192", "CUDA C++", _FLASHINFER,
         _flashinfer_silu, {"rows": 2, "columns": 8192}, {"rows": 32768, "columns": 8192},
         clusters=32768, hbm_bytes=6.0 * 32768 * 8192),
)  # fmt: skip
