"""Clusters on several threads: the same results, counts, findings and errors as on one."""

import dataclasses

import numpy as np
import pytest
from kernel_text import kernel_text, run_kernel_text

from sm100_sim.errors import Hang, MemoryFault
from sm100_sim.launcher import Options, translated_kernel
from sm100_sim.run.grid import Grid, clusters_are_independent

pytestmark = pytest.mark.simulator

# Each CTA sums squares in a loop, passes the sum through an mbarrier and shared memory, and writes
# it; LIMIT and WAIT are replaced to make some of them fail.
WORK = """
mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 64;
READY:
bar.sync 0;
mov.u32 %r2, 0;  mov.u32 %r3, 0;
LOOP:
mad.lo.u32 %r3, %r2, %r2, %r3;
add.u32 %r2, %r2, 1;
add.u32 %r4, %r1, 10;
setp.lt.u32 %p1, %r2, %r4;
@%p1 bra LOOP;
mbarrier.arrive.shared.b64 _, [smem];
PARITY
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r5;
@!%p2 bra WAIT;
mad.lo.u32 %r6, %r1, 64, %r0;
mul.wide.u32 %rd0, %r6, 4;
add.s64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r3;
"""
CTAS = 24
PASSES = "mov.u32 %r5, 0;"


def run(parity=PASSES, ctas=CTAS, **options):
    out = np.zeros((ctas, 64), np.uint32)
    report = run_kernel_text(
        WORK.replace("PARITY", parity), [out], grid=(CTAS, 1, 1), block=(64, 1, 1), **options
    )
    return out, report


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_threads_do_not_show(schedule):
    found = [run(threads=threads, schedule=schedule) for threads in (1, 2, 3)]
    want = [sum(i * i for i in range(cta + 10)) for cta in range(CTAS)]
    plain = [
        dataclasses.replace(report, wall_seconds=0.0, translate_seconds=0.0, seconds={}, threads=1)
        for _, report in found
    ]
    assert [report.threads for _, report in found] == [1, 2, 3]
    assert plain[0] == plain[1] == plain[2]
    assert all((out == np.array(want)[:, None]).all() for out, _ in found)


def test_progress_counts_every_cluster_once():
    steps = []
    run(threads=2, progress=lambda *step: steps.append(step))
    assert steps == [(done, CTAS) for done in range(1, CTAS + 1)]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_cluster_that_fails_is_reported(threads):
    for _ in range(3):
        with pytest.raises(MemoryFault, match=r"CTA \(5, 0, 0\)"):
            run(ctas=5, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_hang_comes_after_everything_else_is_done(threads):
    # CTA 7 waits for a phase that never ends.
    parity = "setp.eq.u32 %p3, %r1, 7;  selp.u32 %r5, 1, 0, %p3;"
    with pytest.raises(Hang, match=r"23 of 24 done") as caught:
        run(parity, threads=threads)
    assert "CTA (7, 0, 0) warp" in str(caught.value)
    assert "CTA (6, 0, 0)" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "independent"),
    [
        ("ld.global.b32 %r0, [%rd8]; st.global.b32 [%rd8], %r0;", True),
        ("atom.shared.add.u32 %r0, [smem], 1;", True),
        ("atom.global.add.u32 %r0, [%rd8], 1;", False),
        ("red.global.add.f32 [%rd8], %r0;", False),
        ("ld.acquire.gpu.global.b32 %r0, [%rd8];", False),
        ("ld.volatile.global.b32 %r0, [%rd8];", False),
        ("ld.volatile.b32 %r0, [%rd8];", False),
        ("fence.acq_rel.gpu;", False),
        ("fence.acq_rel.cluster;", True),
        ("st.release.gpu.global.b32 [%rd8], %r0;", False),
        ("st.relaxed.cta.shared.b32 [smem], %r0;", True),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd8], [smem], 16;", False),
        ("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
         "[smem], [smem+16];", False),
        ("redux.sync.add.u32 %r0, %r1, -1;", True),
    ],
)  # fmt: skip
def test_which_kernels_have_independent_clusters(body, independent):
    kernel = translated_kernel(kernel_text(body, 1), "test")
    assert clusters_are_independent(kernel.instructions) is independent


def test_grid():
    grid = Grid(3)
    assert [grid.take(), grid.take()] == [0, 1]
    grid.close()
    assert grid.take() is None


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_wrong_numbers_of_threads(threads):
    with pytest.raises(ValueError, match="threads is"):
        Options(threads=threads)
