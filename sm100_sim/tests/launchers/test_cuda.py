"""Kernels in CUDA C++, compiled by NVRTC: `launch_cuda` and the command `run`."""

import re

import numpy as np
import pytest

import sm100_sim
from sm100_sim.__main__ import main
from sm100_sim.command.run import argument
from sm100_sim.cuda_launcher import nvrtc_version

pytestmark = pytest.mark.simulator


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    try:
        return nvrtc_version()
    except sm100_sim.MissingExtra as missing:
        pytest.skip(str(missing))


SOURCE = """
#include <cuda_fp16.h>
struct Pair { float a; int b; double c; };
__device__ __noinline__ float times(float x, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) { sum += x; if (sum > 20.f) return sum; }
  return sum;
}
__device__ __noinline__ Pair pair_of(float x, char n, Pair q) {
  return Pair{times(x, n) + q.a, n + q.b, x * q.c};
}
namespace ours {
template <int N> __global__ void combined(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  Pair p = pair_of(in[i], (char)(i % 7), Pair{1.f, 2, 3.0});
  out[i] = p.a + p.b + (float)p.c + __half2float(__float2half(in[i])) * N;
}
}
"""
RACY = """
__global__ void reversed(const int* in, int* out) {
  __shared__ int cells[64];
  cells[threadIdx.x] = in[threadIdx.x];
  BARRIER
  out[threadIdx.x] = cells[63 - threadIdx.x];
}
"""
COPY = """
#include <cuda/std/cstdint>
struct alignas(64) Map { char bytes[128]; };
__global__ void copied(const __grid_constant__ Map map, float* out) {
  alignas(128) __shared__ float tile[32 * 8];
  __shared__ uint64_t barrier;
  uint32_t place = (uint32_t)__cvta_generic_to_shared(tile);
  uint32_t at = (uint32_t)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(at));
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {0, 8}], [%2];" :: "r"(place), "l"(&map), "r"(at) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; "
               "@!p bra L; }" :: "r"(at) : "memory");
  for (int i = threadIdx.x; i < 256; i += 32) out[i] = tile[i];
}
"""


def test_templates_structs_and_device_functions():
    x = np.linspace(-2, 3, 100, dtype=np.float32)
    out = np.zeros_like(x)
    sm100_sim.launch_cuda(SOURCE, "ours::combined<5>", [x, out, 100], grid=2, block=64)
    want = []
    for i, value in enumerate(x):
        total = np.float32(0)
        for _ in range(i % 7):
            total += value
            if total > 20:
                break
        want.append(total + 1 + i % 7 + 2 + value * 3 + np.float32(np.float16(value)) * 5)
    assert np.abs(out - want).max() < 1e-4


def run(source, tmp_path, *arguments):
    path = tmp_path / "kernel.cu"
    path.write_text(source)
    return main(["run", str(path), *arguments])


def test_a_race_is_two_lines_of_the_file_and_the_missing_edge(tmp_path, capsys):
    """The command, from a source with and without the barrier."""
    arguments = (
        "--kernel",
        "reversed",
        "--block",
        "64",
        "--arg",
        "i32[64]=arange",
        "--arg",
        "i32[64]",
    )
    assert run(RACY.replace("BARRIER", ""), tmp_path, *arguments, "--sanitize") == 1
    out = capsys.readouterr().out.splitlines()
    (first,) = (line for line in out if line.strip().startswith("first:"))
    (second,) = (line for line in out if line.strip().startswith("second:"))
    assert re.search(r"kernel.cu:4: cells\[threadIdx.x\] = in\[threadIdx.x\];", first)
    assert re.search(r"kernel.cu:6: out\[threadIdx.x\] = cells\[63 - threadIdx.x\];", second)
    assert any(line.strip().startswith("missing: nothing orders the two") for line in out)
    assert out[-1].startswith(
        "sm100_sim: ran as B200 (148 SMs, sm_100a), schedule plain; looked for"
    )
    fixed = RACY.replace("BARRIER", "__syncthreads();")
    assert run(fixed, tmp_path, *arguments, "--sanitize", "--seeds", "2", "--device=b300:9") == 0
    said = capsys.readouterr().out
    assert "[63, 62, 61, 60, 59, 58] ..." in said and "cause" not in said
    assert "ran as B300 (9 SMs, sm_103a), schedule plain, seed 0, seed 1;" in said


@pytest.mark.parametrize("how", ["function", "command"])
def test_tensor_maps(how, tmp_path):
    """A tile by TMA, its descriptor made by `tensor_map`, or by an argument of the command."""
    if how == "command":
        arguments = ["--kernel", "copied", "--block", "32", "--sanitize", "--save", str(tmp_path),
                     "--arg", "map:f32[16,32]=arange,box=8x32", "--arg", "f32[256]"]  # fmt: skip
        assert run(COPY, tmp_path, *arguments) == 0
        out = np.load(tmp_path / "array1.npy")
    else:
        out, source = np.zeros(256, np.float32), argument("f32[16,32]=arange", [])
        sm100_sim.launch_cuda(
            COPY, "copied", [sm100_sim.tensor_map(source, (8, 32)), out], block=32,
            options=sm100_sim.Options(seed=1),
        )  # fmt: skip
    assert (out == np.arange(256, 512)).all()


def test_what_does_not_compile_or_fit_is_said(tmp_path, capsys):
    assert run("__global__ void k() { nothing; }", tmp_path, "--kernel", "k") == 2
    assert 'identifier "nothing" is undefined' in capsys.readouterr().err
    assert run(RACY.replace("BARRIER", ""), tmp_path, "--kernel", "reversed") == 2
    assert "reversed has 2 parameters: " in capsys.readouterr().err
    with pytest.raises(sm100_sim.LaunchError, match="'f32' is not understood|not understood"):
        argument("f32[", [])
