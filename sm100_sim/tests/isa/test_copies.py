"""cp.async, st.async and red.async: groups, barriers, races, errors. What each size copies and
fills is recorded (tests/tools/test_golden.py, "async").
"""

import numpy as np
import pytest
from kernel_text import run_kernel_text

from sm100_sim.errors import BarrierError, MemoryFault, Misaligned

SCHEDULES = [{}, {"schedule": "lazy"}, {"seed": 3}]


def cp_async(size, rest=""):
    """Each lane copies `size` bytes of p0 to shared memory and from there to p1."""
    words = "".join(
        f"ld.shared.b32 %r5, [%r1+{at}]; st.global.b32 [%rd2+{at}], %r5;\n"
        for at in range(0, size, 4)
    )
    how = "cg" if size == 16 else "ca"
    return f"""
mov.u32 %r0, %tid.x;
mul.lo.u32 %r2, %r0, {size};
mov.u32 %r1, smem;
add.u32 %r1, %r1, %r2;
cvt.u64.u32 %rd0, %r2;
add.s64 %rd1, %rd8, %rd0;
add.s64 %rd2, %rd9, %rd0;
setp.lt.u32 %p1, %r0, 8;
min.u32 %r6, %r0, {size};
cp.async.{how}.shared.global [%r1], [%rd1], {size}{rest};
cp.async.commit_group;
cp.async.wait_group 0;
{words}"""


GROUPS = """
mov.u32 %r0, %tid.x;
shl.b32 %r2, %r0, 2;
mov.u32 %r1, smem;
add.u32 %r1, %r1, %r2;
cvt.u64.u32 %rd0, %r2;
add.s64 %rd1, %rd8, %rd0;
add.s64 %rd2, %rd9, %rd0;
mov.u32 %r6, 7;
st.shared.b32 [%r1], %r6;
st.shared.b32 [%r1+128], %r6;
cp.async.ca.shared.global [%r1], [%rd1], 4;
cp.async.commit_group;
cp.async.ca.shared.global [%r1+128], [%rd1], 4;
cp.async.commit_group;
WAIT;
ld.shared.b32 %r5, [%r1];
st.global.b32 [%rd2], %r5;
ld.shared.b32 %r5, [%r1+128];
st.global.b32 [%rd2+128], %r5;
"""


@pytest.mark.parametrize(
    ("wait", "pending"),
    [("cp.async.wait_group 2", 2), ("cp.async.wait_group 1", 1), ("cp.async.wait_group 0", 0),
     ("cp.async.wait_all", 0)],
)  # fmt: skip
def test_the_latest_groups_may_pend(wait, pending):
    """Copies that take effect as late as allowed: those of the groups that a wait lets pend."""
    source, out = np.arange(100, 132, dtype=np.uint32), np.zeros(64, np.uint32)
    run_kernel_text(GROUPS.replace("WAIT", wait), [source, out], schedule="lazy")
    first, second = out[:32], out[32:]
    assert (first == (7 if pending == 2 else source)).all()
    assert (second == (7 if pending else source)).all()


TRACKED = """
mov.u32 %r0, %tid.x;
shl.b32 %r2, %r0, 2;
mov.u32 %r1, smem;
add.u32 %r1, %r1, %r2;
cvt.u64.u32 %rd0, %r2;
add.s64 %rd1, %rd8, %rd0;
add.s64 %rd2, %rd9, %rd0;
setp.ne.u32 %p0, %r0, 0;
@!%p0 mbarrier.init.shared.b64 [smem+512], COUNT;
bar.sync 0;
cp.async.ca.shared.global [%r1+16], [%rd1], 4;
cp.async.mbarrier.arriveNOINC.shared.b64 [smem+512];
PLAIN
W: mbarrier.try_wait.parity.shared.b64 %p1, [smem+512], 0;
@!%p1 bra W;
ld.shared.b32 %r5, [%r1+16];
st.global.b32 [%rd2], %r5;
"""


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("count", "noinc", "plain"),
    [(64, ".noinc", ""), (64, "", "mbarrier.arrive.shared.b64 _, [smem+512];")],
)
def test_cp_async_arrives_at_an_mbarrier(count, noinc, plain, options):
    """The copies' arrivals are among the count with .noinc; without it they add to it."""
    source, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    body = TRACKED.replace("COUNT", str(count)).replace("NOINC", noinc).replace("PLAIN", plain)
    run_kernel_text(body, [source, out], block=(64, 1, 1), **options)
    assert (out == source).all()


def test_cp_async_with_a_cache_policy_in_both_variants_of_a_kernel():
    """Plain and logged code share the parsed instructions."""
    body = cp_async(16, ", 8, %rd0").replace(".global [%r1]", ".global.L2::cache_hint [%r1]")
    assert "cache_hint" in body
    source = np.arange(1, 32 * 16 + 1).astype(np.uint8)
    for sanitize in (False, True, False):
        out = np.zeros_like(source)
        run_kernel_text(body, [source, out], sanitize=sanitize)
        rows = out.reshape(-1, 16)
        assert (rows[:, :8] == source.reshape(-1, 16)[:, :8]).all() and not rows[:, 8:].any()


def test_cp_async_errors():
    arrays = [np.zeros(32 * 16, np.uint8), np.zeros(32 * 16, np.uint8)]
    with pytest.raises(MemoryFault, match="cp.async reads 16 bytes"):
        run_kernel_text(cp_async(16), [arrays[0][:256], arrays[1]])
    with pytest.raises(Misaligned, match="cp.async of 16 bytes to shared"):
        run_kernel_text(cp_async(16).replace("[%r1]", "[%r1+4]"), arrays)


STORE = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, %cluster_ctarank;
xor.b32 %r2, %r1, 1;
mov.u32 %r3, smem;
setp.ne.u32 %p0, %r0, 0;
shl.b32 %r4, %r0, 3;
add.u32 %r4, %r4, %r3;
st.shared.b64 [%r4+16], 0;
@!%p0 mbarrier.init.shared.b64 [smem], 1;
@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], BYTES;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r5, %r4, %r2;
mapa.shared::cluster.u32 %r6, %r3, %r2;
mul.lo.u32 %r7, %r1, 1000;
add.u32 %r7, %r7, %r0;
add.u32 %r8, %r7, 7;
INSTRUCTION
W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p1, [smem], 0;
@!%p1 bra W;
ld.shared.v2.b32 {%r9, %r10}, [%r4+16];
mad.lo.u32 %r11, %r1, 32, %r0;
mul.wide.u32 %rd0, %r11, 8;
add.s64 %rd0, %rd0, %rd8;
st.global.v2.b32 [%rd0], {%r9, %r10};
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
TO_PEER = "shared::cluster.mbarrier::complete_tx::bytes"
VALUES = np.arange(32)[None] + 1000 * np.array([[1], [0]])


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_st_async_writes_to_the_peer(options):
    out = np.zeros((2, 32, 2), np.uint32)
    store = f"st.async.{TO_PEER}.v2.b32 [%r5+16], {{%r7, %r8}}, [%r6];"
    body = STORE.replace("INSTRUCTION", store).replace("BYTES", "256")
    run_kernel_text(body, [out], grid=(2, 1, 1), cluster=(2, 1, 1), **options)
    assert (out[:, :, 0] == VALUES).all() and (out[:, :, 1] == VALUES + 7).all()


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_red_async_adds_at_the_peer(options):
    out = np.zeros((2, 32, 2), np.uint32)
    add = f"red.async.relaxed.cluster.{TO_PEER}.add.u32 [%r5+16], %r7, [%r6];"
    body = STORE.replace("INSTRUCTION", add + add.replace("%r7", "%r8")).replace("BYTES", "256")
    run_kernel_text(body, [out], grid=(2, 1, 1), cluster=(2, 1, 1), **options)
    assert (out[:, :, 0] == 2 * VALUES + 7).all() and (out[:, :, 1] == 0).all()


def test_red_async_of_two_warps_on_one_word_is_no_race():
    """Reductions are atomic among themselves; a plain store between them is a finding."""
    body = f"""
    mov.u32 %r0, %tid.x;  and.b32 %r1, %r0, 31;  mov.u32 %r3, smem;
    shl.b32 %r4, %r1, 2;  add.u32 %r4, %r4, %r3;
    setp.ne.u32 %p0, %r0, 0;  setp.ge.u32 %p2, %r0, 32;
    @!%p2 st.shared.b32 [%r4+16], 0;
    @!%p0 mbarrier.init.shared.b64 [smem], 1;
    @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    red.async.relaxed.cluster.{TO_PEER}.add.u32 [%r4+16], %r0, [%r3];
    STORE
    W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p1, [smem], 0;
    @!%p1 bra W;
    ld.shared.b32 %r9, [%r4+16];
    mul.wide.u32 %rd0, %r0, 4;  add.s64 %rd0, %rd0, %rd8;
    st.global.b32 [%rd0], %r9;
    """
    out = np.zeros(64, np.uint32)
    report = run_kernel_text(
        body.replace("STORE", ""), [out], block=(64, 1, 1), sanitize=True, explicit_cluster=True
    )
    assert report.findings == []
    assert (out == np.tile(2 * np.arange(32) + 32, 2)).all()
    report = run_kernel_text(
        body.replace("STORE", "@!%p2 st.shared.b32 [%r4+16], 0;"),
        [out],
        block=(64, 1, 1),
        sanitize=True,
        explicit_cluster=True,
    )
    assert {finding.kind for finding in report.findings} == {"copy-in-flight", "race"}
    with pytest.raises(MemoryFault, match="in a launch without clusters"):
        run_kernel_text(body.replace("STORE", ""), [out], block=(64, 1, 1))


def test_st_async_barrier_must_be_in_the_destination():
    store = f"st.async.{TO_PEER}.b32 [%r5+16], %r7, [%r3];"
    body = STORE.replace("INSTRUCTION", store).replace("BYTES", "128")
    with pytest.raises(BarrierError, match="must be in the destination CTA"):
        run_kernel_text(body, [np.zeros(128, np.uint32)], grid=(2, 1, 1), cluster=(2, 1, 1))
