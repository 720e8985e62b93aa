"""A left-out tcgen05.wait::ld in CuTe DSL and CUDA C++; tests/launchers/test_triton.py has Triton.

The reading "wait-ld" finds it, finds nothing else, and is quiet on the kernels as they should be.
"""

import numpy as np
import pytest

import sm100_sim

pytestmark = pytest.mark.simulator

#: A warp stores a word to tensor memory and loads it again.
CUDA = """
__global__ void round_trip(const unsigned* from, unsigned* to) {
  __shared__ unsigned holder, cells[32];
  unsigned at = (unsigned)__cvta_generic_to_shared(&holder), base, x;
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" :: "r"(at));
  __syncthreads();
  base = holder;
  x = from[threadIdx.x];
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" :: "r"(base), "r"(x));
  asm volatile("tcgen05.wait::st.sync.aligned;");
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(x) : "r"(base));
  WAIT
  to[threadIdx.x] = x + 1;
  RACE
  __syncthreads();
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(base));
}
"""
WAIT = 'asm volatile("tcgen05.wait::ld.sync.aligned;");'
#: A read of a cell that nobody has written: a finding of the default reading.
UNWRITTEN = "if (((volatile unsigned*)cells)[threadIdx.x] == 77) to[0] = 0;"


def kinds_in_cuda(source, reading):
    try:
        x, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
        report = sm100_sim.launch_cuda(
            source, "round_trip", [x, out], block=32, options=sm100_sim.Options(sanitize=reading)
        )
    except sm100_sim.MissingExtra as missing:
        pytest.skip(str(missing))
    assert (out == x + 1).all(), "right, whether or not it waits"
    return [finding.kind for finding in report.findings]


@pytest.mark.parametrize("race", ["", UNWRITTEN], ids=["", "and an unwritten cell"])
@pytest.mark.parametrize(("wait", "found"), [(WAIT, []), ("", ["load-not-waited"])])
def test_cuda(wait, found, race):
    source = CUDA.replace("WAIT", wait).replace("RACE", race)
    assert kinds_in_cuda(source, "wait-ld") == found
    assert set(kinds_in_cuda(source, True)) == ({"uninitialised-read"} if race else set())


def kinds_in_cute(drain, reading):
    """The kinds and notes of a product in CuTe DSL whose epilogue is `drain`."""
    pytest.importorskip("cutlass")
    import cutlass
    import torch
    from gemm_kernel import OneTile, multiply

    class Drained(OneTile):
        pass

    Drained.drain = drain
    a, b = torch.ones(128, 128).half(), torch.ones(16, 128).half()
    d = torch.zeros(128, 16)
    with sm100_sim.attached(sanitize=reading) as session:
        multiply(a, b, (cutlass.Float16, cutlass.Float16), cutlass.Float32, d, Drained)
    assert (d == 128).all(), "right, whether or not it waits"
    (report,) = session.reports
    return [finding.kind for finding in report.findings], len(report.notes)


def _with_wait(self, loading, source, values, target):
    from cutlass import cute

    cute.copy(loading, source, values)
    cute.arch.fence_view_async_tmem_load()
    cute.arch.sync_threads()  # the columns are free
    cute.autovec_copy(values, target)


def _without_wait(self, loading, source, values, target):
    from cutlass import cute

    cute.copy(loading, source, values)
    cute.arch.sync_threads()
    cute.autovec_copy(values, target)


def _by_registers(self, loading, source, values, target):
    from cutlass import cute

    cute.copy(loading, source, values)
    cute.autovec_copy(values, target)  # a GPU waits for the registers that it stores
    cute.arch.sync_threads()


@pytest.mark.parametrize(("drain", "found", "notes"), [
    (_with_wait, [], 0), (_without_wait, ["load-not-waited"], 1), (_by_registers, [], 1),
])  # fmt: skip
def test_cute_dsl(drain, found, notes):
    assert kinds_in_cute(drain, "wait-ld") == (found, notes)
