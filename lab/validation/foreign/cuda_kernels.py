"""Kernels in CUDA C++: of the kind that textbooks have, and sources that include a package's."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: Threads of a CTA of each, and edges of tiles.
TRANSPOSE_TILE, TRANSPOSE_ROWS = 32, 8
SUM_THREADS, SUM_EACH = 256, 16
GEMM_THREADS, GEMM_TILE = 256, 128

_TEXT = r"""
// Transposes a matrix through a tile of shared memory, whose rows are one word apart from the
// banks' period.
extern "C" __global__ void transpose(const float* from, float* to, int rows, int columns) {
  __shared__ float tile[32][33];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  #pragma unroll
  for (int i = 0; i < 32; i += 8)
    tile[threadIdx.y + i][threadIdx.x] = from[(size_t)(y + i) * columns + x];
  __syncthreads();
  x = blockIdx.y * 32 + threadIdx.x;
  y = blockIdx.x * 32 + threadIdx.y;
  #pragma unroll
  for (int i = 0; i < 32; i += 8)
    to[(size_t)(y + i) * rows + x] = tile[threadIdx.x][threadIdx.y + i];
}

// Adds up 256 * 16 vectors of four elements per CTA, by shuffles, shared memory and an atomic.
extern "C" __global__ void __launch_bounds__(256) add_up(const float4* from, float* total) {
  __shared__ float parts[8];
  const float4* mine = from + (size_t)blockIdx.x * 256 * 16 + threadIdx.x;
  float sum = 0.f;
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    float4 v = mine[i * 256];
    sum += (v.x + v.y) + (v.z + v.w);
  }
  #pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = 0.f;
    #pragma unroll
    for (int i = 0; i < 8; ++i) all += parts[i];
    atomicAdd(total, all);
  }
}

// C = A B in float32: a tile of 128 x 128 per CTA, 8 x 8 per thread, K in steps of 8.
extern "C" __global__ void __launch_bounds__(256) gemm(
    const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float as[8][128];
  __shared__ float bs[8][128];
  int thread = threadIdx.x, row = blockIdx.y * 128, column = blockIdx.x * 128;
  int a_row = thread / 2, a_at = thread % 2 * 4, b_row = thread / 32, b_at = thread % 32 * 4;
  int top = thread / 16 * 8, left = thread % 16 * 8;
  float sum[8][8] = {};
  for (int at = 0; at < k; at += 8) {
    float4 va = *(const float4*)(a + (size_t)(row + a_row) * k + at + a_at);
    float4 vb = *(const float4*)(b + (size_t)(at + b_row) * n + column + b_at);
    as[a_at][a_row] = va.x; as[a_at + 1][a_row] = va.y;
    as[a_at + 2][a_row] = va.z; as[a_at + 3][a_row] = va.w;
    *(float4*)&bs[b_row][b_at] = vb;
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[8], y[8];
      #pragma unroll
      for (int j = 0; j < 8; ++j) { x[j] = as[i][top + j]; y[j] = bs[i][left + j]; }
      #pragma unroll
      for (int j = 0; j < 8; ++j)
        #pragma unroll
        for (int l = 0; l < 8; ++l) sum[j][l] += x[j] * y[l];
    }
    __syncthreads();
  }
  #pragma unroll
  for (int j = 0; j < 8; ++j)
    #pragma unroll
    for (int l = 0; l < 8; l += 4)
      *(float4*)(c + (size_t)(row + top + j) * n + column + left + l) =
          make_float4(sum[j][l], sum[j][l + 1], sum[j][l + 2], sum[j][l + 3]);
}
"""


@dataclass(frozen=True)
class Source:
    """A text in CUDA C++. package, include: whose headers it includes, and their folder in it."""

    text: str
    package: str = ""
    include: str = ""

    def folders(self) -> list[Path]:
        """Return the folders of headers. Raises ImportError without the package."""
        return [folder_of(self.package) / self.include] if self.package else []


def folder_of(package: str) -> Path:
    """Return the folder of a package without importing it. Raises ImportError."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not in PYTHONPATH")
    return Path(spec.origin).parent


#: Headers of the host that NVRTC has not, by name: what kernels take of them.
_HOST_HEADERS = {
    "cuda_runtime.h": "typedef unsigned short ushort;",
    "cuda.h": "#define CUDA_VERSION 13000",
    "cmath": "",
    "cstdint": "#include <cuda/std/cstdint>\nusing namespace cuda::std;",
    "type_traits": "#include <cuda/std/type_traits>\nnamespace std { using namespace cuda::std; }",
}


def host_headers() -> Path:
    """Return a folder of its own with the headers of the host for NVRTC."""
    folder = Path(tempfile.mkdtemp(prefix="lab-nvrtc-"))
    for name, text in _HOST_HEADERS.items():
        (folder / name).write_text(text + "\n")
    return folder


TEXTBOOK = Source(_TEXT)
