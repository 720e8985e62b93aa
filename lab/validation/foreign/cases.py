"""The launches that are predicted and measured: few clusters in the simulator, many on the GPU.

A case has the same kernel, configuration and inner sizes in both; only the grid differs. Sizes are
far above an H200's L2 of 60 MB where a kernel is to be bound by HBM.
"""

from __future__ import annotations

import math

from . import cuda_kernels as cuda
from . import packages
from .case import Call, Case, World


def _sum(world: World, n: int) -> Call:
    from .triton_kernels import vector_sum

    x, y, out = (world.tensor(n, dtype="float32") for _ in range(3))
    return lambda: vector_sum[(n // 1024,)](x, y, out, n, BLOCK=1024, num_warps=4)


def _softmax(world: World, rows: int, columns: int) -> Call:
    from .triton_kernels import row_softmax

    x, out = (world.tensor(rows, columns, dtype="bfloat16") for _ in range(2))
    return lambda: row_softmax[(rows,)](x, out, columns, columns, BLOCK=columns, num_warps=8)


def _layer_norm(world: World, rows: int, columns: int) -> Call:
    from .triton_kernels import row_layer_norm

    x, out = (world.tensor(rows, columns, dtype="float16") for _ in range(2))
    weight, bias = (world.tensor(columns, dtype="float16") for _ in range(2))
    return lambda: row_layer_norm[(rows,)](
        x, out, weight, bias, columns, columns, 1e-5, BLOCK=2048, num_warps=8
    )


def _product(world: World, m: int, n: int, k: int) -> Call:
    from .triton_kernels import BM, BN, product

    a, b = world.tensor(m, k, dtype="float16"), world.tensor(k, n, dtype="float16")
    c = world.tensor(m, n, dtype="float16")
    grid = (math.ceil(m / BM.value) * math.ceil(n / BN.value),)
    return lambda: product[grid](a, b, c, m, n, k, num_warps=8, num_stages=4)


def _rope(world: World, rows: int) -> Call:
    from cudnn.rope.frost.kernels import cudnn_frost_rope_qdq_inplace

    x = world.tensor(rows, 512, dtype="bfloat16")
    cache = world.tensor(4096, 64, dtype="float32")
    positions = world.tensor(rows // 16, dtype="int64", low=4096)
    return lambda: cudnn_frost_rope_qdq_inplace[(rows // 4,)](
        x, cache, positions, rows, HEADS=16, FP4=False, ROWS=4, PACKED_IO=True, num_warps=4
    )


def _transpose(world: World, rows: int, columns: int) -> Call:
    x, out = (
        world.tensor(rows, columns, dtype="float32"),
        world.tensor(columns, rows, dtype="float32"),
    )
    tile = cuda.TRANSPOSE_TILE
    grid, block = (columns // tile, rows // tile, 1), (tile, cuda.TRANSPOSE_ROWS, 1)
    return lambda: world.launch("transpose", grid, block, x, out, rows, columns)


def _add_up(world: World, n: int) -> Call:
    x, total = world.tensor(n, dtype="float32"), world.tensor(1, dtype="float32")
    grid = (n // (4 * cuda.SUM_THREADS * cuda.SUM_EACH), 1, 1)
    return lambda: world.launch("add_up", grid, (cuda.SUM_THREADS, 1, 1), x, total)


def _gemm(world: World, m: int, n: int, k: int) -> Call:
    a, b = world.tensor(m, k, dtype="float32"), world.tensor(k, n, dtype="float32")
    c = world.tensor(m, n, dtype="float32")
    grid = (n // cuda.GEMM_TILE, m // cuda.GEMM_TILE, 1)
    return lambda: world.launch("gemm", grid, (cuda.GEMM_THREADS, 1, 1), a, b, c, m, n, k)


def _quack_rms_norm(world: World, rows: int, columns: int) -> Call:
    from quack.rmsnorm import _rmsnorm_fwd

    x, out = (world.tensor(rows, columns, dtype="bfloat16") for _ in range(2))
    weight = world.tensor(columns, dtype="float32")
    return lambda: _rmsnorm_fwd(x, weight, out)


def _quack_softmax(world: World, rows: int, columns: int) -> Call:
    from quack.softmax import _softmax_fwd

    x, out = (world.tensor(rows, columns, dtype="bfloat16") for _ in range(2))
    return lambda: _softmax_fwd(x, out)


def _quack_cross_entropy(world: World, rows: int, columns: int) -> Call:
    from quack.cross_entropy import cross_entropy_fwd_out

    x = world.tensor(rows, columns, dtype="bfloat16")
    target = world.tensor(rows, dtype="int64", low=columns)
    loss = world.tensor(rows, dtype="float32")
    return lambda: cross_entropy_fwd_out(x, target, None, loss, None, None, None)


_HERE, _QUACK = "written here, in the manner of Triton's tutorials", "quack-kernels 0.6.5"
_TEXTBOOK = "written here, as textbooks have it"

CASES = (
    Case("vector sum, fp32", "Triton", _HERE, _sum, {"n": 4096}, {"n": 1 << 26},
         clusters=1 << 16, hbm_bytes=12.0 * (1 << 26)),
    Case("softmax, bf16, rows of 8192", "Triton", _HERE, _softmax,
         {"rows": 2, "columns": 8192}, {"rows": 32768, "columns": 8192},
         clusters=32768, hbm_bytes=4.0 * 32768 * 8192),
    Case("layer norm, fp16, rows of 8192", "Triton", _HERE, _layer_norm,
         {"rows": 2, "columns": 8192}, {"rows": 32768, "columns": 8192},
         clusters=32768, hbm_bytes=4.0 * 32768 * 8192),
    Case("product, fp16, wgmma, 4096^3", "Triton", _HERE, _product,
         {"m": 128, "n": 256, "k": 4096}, {"m": 4096, "n": 4096, "k": 4096},
         clusters=512, hbm_bytes=6.0 * 4096**2, work=2.0 * 4096**3),
    Case("RoPE and e4m3 in place, bf16", "Triton", "nvidia-cudnn-frontend 1.32.0", _rope,
         {"rows": 16}, {"rows": 1 << 19}, clusters=1 << 17, hbm_bytes=2048.0 * (1 << 19)),
    Case("transpose, fp32, 16384^2", "CUDA C++", _TEXTBOOK, _transpose,
         {"rows": 32, "columns": 64}, {"rows": 16384, "columns": 16384},
         clusters=512 * 512, hbm_bytes=8.0 * 16384**2),
    Case("sum of 2^28, fp32", "CUDA C++", _TEXTBOOK, _add_up, {"n": 1 << 15}, {"n": 1 << 28},
         clusters=1 << 14, hbm_bytes=4.0 * (1 << 28)),
    Case("product, fp32, 4096^3", "CUDA C++", _TEXTBOOK, _gemm,
         {"m": 128, "n": 128, "k": 4096}, {"m": 4096, "n": 4096, "k": 4096},
         clusters=1024, hbm_bytes=12.0 * 4096**2, work=2.0 * 4096**3),
    Case("rmsnorm, bf16, rows of 4096", "CuTe DSL", _QUACK, _quack_rms_norm,
         {"rows": 4, "columns": 4096}, {"rows": 65536, "columns": 4096},
         clusters=32768, hbm_bytes=4.0 * 65536 * 4096),
    Case("softmax, bf16, rows of 4096", "CuTe DSL", _QUACK, _quack_softmax,
         {"rows": 4, "columns": 4096}, {"rows": 65536, "columns": 4096},
         clusters=32768, hbm_bytes=4.0 * 65536 * 4096),
    Case("cross entropy, bf16, rows of 8192", "CuTe DSL", _QUACK, _quack_cross_entropy,
         {"rows": 2, "columns": 8192}, {"rows": 65536, "columns": 8192},
         clusters=65536, hbm_bytes=2.0 * 65536 * 8192),
    *packages.CASES,
)  # fmt: skip
