"""Small kernels through the whole machine: waiting, waking, schedules, errors, hangs."""

import json
import re

import numpy as np
import pytest
from kernel_text import run_kernel_text

from sm100_sim.errors import (
    BarrierError,
    CtaExited,
    DivergenceError,
    Hang,
    LaunchError,
    MemoryFault,
    Misaligned,
    TmemError,
    UnknownInstruction,
)
from sm100_sim.launcher import Options
from sm100_sim.report import Report
from sm100_sim.state.memory import SHARED_POISON
from sm100_sim.state.warp import aligned_zeros

pytestmark = pytest.mark.simulator

#: Every kind of schedule; results must not depend on it.
SCHEDULES = [{}, {"schedule": "lazy"}, {"seed": 0}, {"seed": 1}, {"clusters": 1}]

# Warp 0 fills a slot of shared memory 8 times, warp 1 adds it up; full at +0, empty at +8.
PRODUCER_CONSUMER = """
mov.u32 %r0, %tid.x;  shr.u32 %r1, %r0, 5;  and.b32 %r2, %r0, 31;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALISED;
mbarrier.init.shared.b64 [smem], 32;
mbarrier.init.shared.b64 [smem+8], 32;
INITIALISED:
bar.sync 0;
mov.u32 %r3, 0;  mov.u32 %r9, 0;
mov.u32 %r4, smem;  shl.b32 %r5, %r2, 2;  add.u32 %r5, %r5, %r4;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra CONSUMER;
PRODUCE:
and.b32 %r6, %r3, 1;  xor.b32 %r6, %r6, 1;
W0: mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r6;
@!%p2 bra W0;
mad.lo.u32 %r7, %r3, 100, %r2;
st.shared.b32 [%r5+64], %r7;
mbarrier.arrive.shared.b64 _, [smem];
add.u32 %r3, %r3, 1;  setp.lt.u32 %p3, %r3, 8;
@%p3 bra PRODUCE;
bra END;
CONSUMER:
and.b32 %r6, %r3, 1;
W1: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r6;
@!%p2 bra W1;
ld.shared.b32 %r7, [%r5+64];  add.u32 %r9, %r9, %r7;
mbarrier.arrive.shared.b64 _, [smem+8];
add.u32 %r3, %r3, 1;  setp.lt.u32 %p3, %r3, 8;
@%p3 bra CONSUMER;
mul.wide.u32 %rd0, %r2, 4;  add.s64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r9;
END:
"""


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_producer_consumer(options):
    out = np.zeros(32, np.uint32)
    report = run_kernel_text(PRODUCER_CONSUMER, [out], block=(64, 1, 1), **options)
    assert out.tolist() == [2800 + 8 * lane for lane in range(32)]
    # Each arrival counts once, each wait that succeeded once, however often it was tried.
    assert report.instructions["mbarrier.arrive"] == {"warps": 16, "lanes": 512}
    if "seed" not in options:
        assert report.warps("mbarrier.try_wait") == 16


# Each CTA of a pair writes its number into its peer's shared memory and arrives remotely there.
PAIR = """
mov.u32 %r0, %tid.x;  mov.u32 %r1, %cluster_ctarank;  mov.u32 %r10, %ctaid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALISED;
mbarrier.init.shared.b64 [smem], 32;
fence.mbarrier_init.release.cluster;
INITIALISED:
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
xor.b32 %r2, %r1, 1;
mov.u32 %r3, smem;
mapa.shared::cluster.u32 %r4, %r3, %r2;
shl.b32 %r5, %r0, 2;  add.u32 %r6, %r4, %r5;
add.u32 %r7, %r10, %r5;
st.shared::cluster.b32 [%r6+256], %r7;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [smem], 0;
@!%p1 bra W;
add.u32 %r8, %r3, %r5;
ld.shared.b32 %r9, [%r8+256];
shl.b32 %r11, %r10, 5;  add.u32 %r11, %r11, %r0;
mul.wide.u32 %rd0, %r11, 4;  add.s64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r9;
"""


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_two_ctas_exchange_through_shared_memory(options):
    out = np.zeros((6, 32), np.uint32)
    report = run_kernel_text(PAIR, [out], grid=(6, 1, 1), cluster=(2, 1, 1), **options)
    peers = np.arange(6)[:, None] ^ 1
    assert (out == peers + 4 * np.arange(32)).all()
    assert report.resident_clusters == options.get("clusters", 3)
    assert report.findings == []


NAMED_BARRIER = """
mov.u32 %r0, %tid.x;  shr.u32 %r1, %r0, 5;
mov.u32 %r2, smem;  shl.b32 %r3, %r0, 2;  add.u32 %r3, %r3, %r2;
setp.eq.u32 %p0, %r1, 2;
@%p0 bra LATE;
st.shared.b32 [%r3], %r0;
barrier.arrive 5, 96;
bra END;
LATE:
barrier.sync 5, 96;
ld.shared.b32 %r4, [%r3+-256];  ld.shared.b32 %r5, [%r3+-128];
add.u32 %r4, %r4, %r5;
and.b32 %r6, %r0, 31;
mul.wide.u32 %rd0, %r6, 4;  add.s64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r4;
END:
"""


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_named_barrier_arrive_and_sync(options):
    out = np.zeros(32, np.uint32)
    run_kernel_text(NAMED_BARRIER, [out], block=(96, 1, 1), **options)
    assert out.tolist() == [2 * lane + 32 for lane in range(32)]


def test_barrier_reduction():
    """popc, and, or over 96 threads; every third votes yes."""
    out = np.zeros((96, 3), np.uint32)
    run_kernel_text(
        """
        mov.u32 %r0, %tid.x;  rem.u32 %r1, %r0, 3;  setp.eq.u32 %p0, %r1, 0;
        bar.red.popc.u32 %r2, 1, %p0;
        bar.red.and.pred %p1, 1, 96, %p0;
        bar.red.or.pred %p2, 1, 96, %p0;
        selp.u32 %r3, 1, 0, %p1;  selp.u32 %r4, 1, 0, %p2;
        mul.wide.u32 %rd0, %r0, 12;  add.s64 %rd0, %rd0, %rd8;
        st.global.b32 [%rd0], %r2;  st.global.b32 [%rd0+4], %r3;  st.global.b32 [%rd0+8], %r4;
        """,
        [out], block=(96, 1, 1),
    )  # fmt: skip
    assert (out == [32, 0, 1]).all()


def test_barrier_without_count_ignores_exited_warps():
    run_kernel_text(
        """
        mov.u32 %r0, %tid.x;  setp.lt.u32 %p0, %r0, 32;
        @%p0 ret;
        bar.sync 0;
        """,
        block=(96, 1, 1),
    )


# Lane 7 waits for what lane 3 of the same warp does later in program order.
ONE_LANE_WAITS = """
mov.u32 %r0, %tid.x;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [smem], 1;
bar.warp.sync -1;
mov.u32 %r1, 0;
setp.ne.u32 %p1, %r0, 7;
@%p1 bra OTHERS;
W: mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;
@!%p2 bra W;
ld.shared.b32 %r1, [smem+64];
bra JOIN;
OTHERS:
setp.ne.u32 %p3, %r0, 3;
@%p3 bra JOIN;
st.shared.b32 [smem+64], 1234;
mbarrier.arrive.shared.b64 _, [smem];
JOIN:
mul.wide.u32 %rd0, %r0, 4;  add.s64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r1;
"""


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_one_lane_waits_while_the_others_go_on(options):
    out = np.ones(32, np.uint32)
    run_kernel_text(ONE_LANE_WAITS, [out], **options)
    assert out.tolist() == [1234 if lane == 7 else 0 for lane in range(32)]


@pytest.mark.parametrize(
    "poll",
    ["ld.volatile.global.b32 %r1, [%rd8];", "atom.relaxed.gpu.global.or.b32 %r1, [%rd8], 0;"],
)
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.sampled("*-ld.volatile*", "{}-atom.*")
def test_polling_a_flag_in_global_memory(options, poll):
    """CTA 0 spins on a flag that CTA 1 sets: spinning must not starve the one it waits for."""
    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    run_kernel_text(
        f"""
        mov.u32 %r0, %ctaid.x;  setp.ne.u32 %p0, %r0, 0;
        @%p0 bra SET;
        SPIN: {poll}  setp.eq.u32 %p1, %r1, 0;
        @%p1 bra SPIN;
        st.global.b32 [%rd9], %r1;
        bra END;
        SET: st.volatile.global.b32 [%rd8], 77;
        END:
        """,
        [flag, out], grid=(2, 1, 1), **({**options, "clusters": 2}),
    )  # fmt: skip
    assert out[0] == 77


# ---------------------------------------------------------------- hangs and errors


@pytest.mark.parametrize("options", [{}, {"schedule": "lazy"}, {"seed": 3}], ids=str)
def test_a_hang_lists_who_waits_for_what(options):
    body = """
    mov.u32 %r0, %tid.x;  setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [smem], 3;
    mbarrier.arrive.expect_tx.shared.b64 _, [smem], 4096;
    READY:
    bar.sync 0;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra SECOND;
    W: mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;
    @!%p2 bra W;
    ret;
    SECOND:
    bar.sync 4, 96;
    """
    with pytest.raises(Hang) as caught:
        run_kernel_text(body, block=(64, 1, 1), grid=(2, 1, 1), clusters=1, **options)
    text = str(caught.value)
    assert "clusters: 0 of 2 done, 1 resident." in text
    assert "CTA (0, 0, 0) warp 0 at `mbarrier.try_wait.parity.shared.b64" in text
    assert "waits for parity 0; mbarrier at shared offset 0x400 of CTA rank 0: phase 0" in text
    assert "2 of 3 arrivals pending, 4096 bytes pending" in text
    assert "warp 1 at `bar.sync 4, 96`" in text
    assert "barrier 4: 32 of 96 threads have arrived" in text


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=str)
def test_endless_polling_is_a_hang(options):
    """A wait outside a spin loop that never succeeds."""
    body = """
    mov.u32 %r0, %tid.x;  setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [smem], 1;
    POLL: mbarrier.test_wait.parity.shared.b64 %p2, [smem], 0;
    add.u32 %r1, %r1, 1;
    @!%p2 bra POLL;
    """
    with pytest.raises(Hang, match="polls near"):
        run_kernel_text(body, **options)


@pytest.mark.parametrize(
    ("body", "error", "texts"),
    [
        ("add.s64 %rd0, %rd8, 128; st.global.b32 [%rd0], 1;", MemoryFault,
         ["outside the tensors", "p0; it ends 0 bytes before", "`st.global.b32 [%rd0], 1",
          "CTA (0, 0, 0), warp 0, lane 0"]),
        ("add.s64 %rd0, %rd8, 2; st.global.b32 [%rd0], 1;", Misaligned, ["misaligned global"]),
        ("ld.shared.b32 %r0, [smem+4096];", MemoryFault,
         ["outside the allocated bytes", "CTA rank 0, offset 0x1400; a CTA has 5120 bytes"]),
        ("mov.u32 %r0, 0x01000400; ld.shared::cluster.b32 %r0, [%r0];", MemoryFault,
         ["CTA rank outside the cluster"]),
        ("mbarrier.arrive.shared.b64 _, [smem+8];", BarrierError,
         ["no mbarrier has been initialised at shared offset 0x408", "initialised there: none"]),
        ("mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 5; @%p0 bra E;"
         "mbarrier.init.shared.b64 [smem+4], 1; E:", Misaligned,
         ["accepted: multiples of 8", "lane 5"]),
        ("mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 5; @%p0 bra E;"
         "mbarrier.init.shared.b64 [smem], 2; mbarrier.arrive.shared.b64 _, [smem];"
         "mbarrier.init.shared.b64 [smem], 2; E:", BarrierError, ["init of a live barrier"]),
        ("bar.sync 16;", BarrierError, ["accepted are 0 to 15"]),
        ("bar.sync 1, 48;", BarrierError, ["multiples of 32"]),
        ("barrier.cluster.wait;", BarrierError, ["without an arrive"]),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;", TmemError,
         ["exits with tensor memory still allocated"]),
    ],
    ids=lambda value: value.split(";")[0][:40] if isinstance(value, str) else None,
)  # fmt: skip
def test_errors_name_place_and_cause(body, error, texts):
    with pytest.raises(error) as caught:
        run_kernel_text(body, [np.zeros(32, np.uint32)])
    for text in texts:
        assert text in str(caught.value)


def test_init_of_an_unused_barrier_is_a_finding():
    report = run_kernel_text(
        "mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 5; @%p0 bra E;"
        "mbarrier.init.shared.b64 [smem], 1; mbarrier.init.shared.b64 [smem], 1; E:",
        [np.zeros(32, np.uint32)],
    )
    assert ["nothing has used yet, at shared offset 0x400" in text for text in report.findings] == [
        True
    ]


@pytest.mark.parametrize(
    "text",
    ["mbarrier.arrive.release.gpux.shared.b64 _, [smem];", "bar.sync.foo 0;", "fence.proxy.magic;",
     "setmaxnreg.inc.sync.aligned.u32 25;", "frobnicate.u32 %r0, %r1;", "membar.cluster;",
     "atom.shared.add.f32x2 %r0, [smem], %r1;", "atom.cta.shared.gpu.add.u32 %r0, [smem], %r1;"],
)  # fmt: skip
def test_unknown_forms_are_named(text):
    with pytest.raises(UnknownInstruction) as caught:
        run_kernel_text(text)
    assert text.rstrip(";") in str(caught.value)


def test_diverged_aligned_barrier():
    """Half a warp at one aligned barrier and half at another can never meet."""
    body = """
    mov.u32 %r0, %tid.x;  setp.lt.u32 %p0, %r0, 16;
    @%p0 bra LOW;
    bar.sync 1;
    bra END;
    LOW: bar.sync 2;
    END:
    """
    with pytest.raises(DivergenceError, match="`bar.sync"):
        run_kernel_text(body)


@pytest.mark.parametrize("low", ["sync 1, 64", "red.popc.u32 %r2, 1, 64, %p0"])
@pytest.mark.parametrize("high", ["sync 2, 64", "red.popc.u32 %r2, 2, 64, %p0"])
def test_halves_of_a_warp_at_two_barriers(low, high):
    """An H200 ends the kernel: the golden case "halves of a warp at two barriers", with sync."""
    body = f"""
    mov.u32 %r0, %tid.x;  setp.lt.u32 %p0, %r0, 16;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra END;
    @%p0 bra LOW;
    barrier.cta.{high};
    bra END;
    LOW: barrier.cta.{low};
    END:
    """
    with pytest.raises(BarrierError, match="lanes of warp 0 come to barrier"):
        run_kernel_text(body, block=(64, 1, 1))


@pytest.mark.parametrize(
    ("launch", "text"),
    [({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of cluster"),
     ({"cluster": (17, 1, 1), "grid": (17, 1, 1)}, "up to 16 CTAs"),
     ({"block": (1025, 1, 1)}, "cannot be launched"),
     ({"block": (1, 1, 65)}, "threads in z: up to 64"),
     ({"dynamic_smem": 233_000}, "the kernel may have 232448")],
)  # fmt: skip
def test_impossible_launches(launch, text):
    with pytest.raises(LaunchError, match=text):
        run_kernel_text("mov.u32 %r0, 0;", **launch)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"clusters": 0}, "clusters is 0"), ({"seed": -1}, "seed is -1"),
     ({"schedule": "fast"}, "'eager', 'lazy'")],
)  # fmt: skip
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        Options(**options)


@pytest.mark.parametrize("options", [{}, {"schedule": "lazy"}, {"seed": 3}], ids=str)
def test_bulk_store_still_in_flight_at_exit_is_found(options):
    """The store takes effect all the same; a schedule that delays it shows the missing wait."""
    out = np.zeros(4, np.uint32)
    body = """
    mov.u32 %r0, %tid.x;  setp.ne.u32 %p0, %r0, 0;
    @%p0 ret;
    st.shared.b32 [smem], 11;
    fence.proxy.async.shared::cta;
    mov.u32 %r1, smem;
    cp.async.bulk.global.shared::cta.bulk_group [%rd8], [%r1], 16;
    cp.async.bulk.commit_group;
    """
    report = run_kernel_text(body, [out], **options)
    assert out[0] == 11
    late = [f for f in report.findings if "1 asynchronous operations still in flight" in f]
    assert len(late) == len(report.findings)
    if "seed" not in options:  # a random schedule may delay it or not
        assert bool(late) == ("schedule" in options)
    waiting = body + "cp.async.bulk.wait_group 0;"
    assert run_kernel_text(waiting, [out], **options).findings == []


#: CTA 1 leaves after the cluster barrier; CTA 0 goes on once it has. %r4: its shared memory.
LATE = """
    mov.u32 %r0, %tid.x;  mov.u32 %r1, %cluster_ctarank;  setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [smem], 64;
    mov.u32 %r6, 0;
    st.shared.b32 [smem+16], %r6;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    setp.eq.u32 %p1, %r1, 1;
    @%p1 ret;
    mov.u32 %r2, 0;
    LATE: add.u32 %r2, %r2, 1;  setp.lt.u32 %p2, %r2, 300000;
    @%p2 bra LATE;
    mov.u32 %r3, smem;  mapa.shared::cluster.u32 %r4, %r3, 1;
    cvt.u64.u32 %rd0, %r3;  cvta.shared.u64 %rd0, %rd0;
"""
EXITED = r"CTA \([13], 0, 0\), rank 1, has exited: "


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"sanitize": True}, {"schedule": "lazy"}])
def test_arriving_at_a_cta_that_has_exited_is_found(options):
    """Each cluster has the finding; under a seed, those where CTA 1 comes first."""
    body = f"{LATE} mbarrier.arrive.shared::cluster.b64 _, [%r4];"
    found = run_kernel_text(body, grid=(4, 1, 1), cluster=(2, 1, 1), **options).findings
    texts = [text for text in found if re.search(EXITED, text)]
    assert texts
    assert all("its mbarrier at shared offset 0x400 is used" in text for text in texts)


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"sanitize": True}])
@pytest.mark.parametrize(
    "access",
    [
        "ld.shared::cluster.b32 %r5, [%r4+16];",
        "st.shared::cluster.b32 [%r4+16], %r0;",
        "atom.shared::cluster.add.u32 %r5, [%r4+16], 1;",
        "mapa.u64 %rd2, %rd0, 1; ld.b32 %r5, [%rd2+16];",
        "@%p0 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4+16], %r0, [%r4];",
        "@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%r4+16], [%r3], 16, [%r4];",
        "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%r4+16], [%rd8], 16, [%r4];",
        "mov.b16 %rs0, 3; @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%r3+16], [%rd8], 16, [%r3], %rs0;",
    ],
)
def test_reaching_into_a_cta_that_has_exited(access, options):
    """The error says so, not that bytes outside the allocation are accessed, with CTA and rank."""
    body = f".reg .b16 %rs<2>; {LATE} {access}"
    with pytest.raises(CtaExited, match=EXITED) as raised:
        run_kernel_text(
            body, [aligned_zeros((16,), np.uint8)], grid=(4, 1, 1), cluster=(2, 1, 1), **options
        )
    assert "allocated bytes" not in str(raised.value)
    assert raised.value.cta in ((0, 0, 0), (2, 0, 0)) and raised.value.instruction.text in access


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_memory_of_an_ended_cta_is_fresh_again(options):
    """Later CTAs get the pages of earlier ones, full of the pattern of what nobody has written."""
    body = """
    mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;  mov.u32 %r2, smem;
    shl.b32 %r3, %r0, 2;  add.u32 %r2, %r2, %r3;
    ld.shared.b32 %r5, [%r2+64];  st.shared.b32 [%r2+64], %r0;
    shl.b32 %r6, %r1, 5;  add.u32 %r6, %r6, %r0;
    mul.wide.u32 %rd0, %r6, 4;  add.s64 %rd0, %rd0, %rd8;  st.global.b32 [%rd0], %r5;
    """
    out = np.zeros((6, 32), np.uint32)
    run_kernel_text(body, [out], grid=(6, 1, 1), threads=1, **options)
    assert (out == SHARED_POISON).all()


PEER = """
    mov.u32 %r0, %tid.x;  mov.u32 %r1, %cluster_ctarank;  setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [smem], 2;
    st.shared.b32 [smem+16], %r1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    xor.b32 %r2, %r1, 1;  mov.u32 %r3, smem;  mapa.shared::cluster.u32 %r4, %r3, %r2;
"""


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"sanitize": True}])
@pytest.mark.parametrize(
    ("access", "accepted"),
    [
        ("ld.shared.b32 %r5, [%r4+16];", "ld.shared::cluster.b32 %r5, [%r4+16];"),
        ("st.shared::cta.b32 [%r4+16], %r1;", "st.shared::cluster.b32 [%r4+16], %r1;"),
        ("atom.shared.add.u32 %r5, [%r4+16], 1;", "atom.shared::cluster.add.u32 %r5, [%r4+16], 1;"),
        (
            "@%p0 mbarrier.arrive.shared.b64 %rd1, [%r4];",
            "@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r4];",
        ),
        (
            "@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r4], 16;",
            "@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r3], 16;",
        ),
        (
            "mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 1;",
            "mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 1;",
        ),
        (
            "mbarrier.test_wait.parity.shared.b64 %p1, [%r4], 1;",
            "mbarrier.test_wait.parity.shared.b64 %p1, [%r3], 1;",
        ),
    ],
)
def test_shared_without_cluster_is_the_own_memory(access, accepted, options):
    """The instructions that ptxas makes of it (LDS, STS, ATOMS) cannot reach another CTA; waits
    never do."""
    launch = {"grid": (2, 1, 1), "cluster": (2, 1, 1), **options}
    end = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    with pytest.raises(MemoryFault, match="only .shared::cluster and generic addresses reach"):
        run_kernel_text(f"{PEER} {access} {end}", **launch)
    run_kernel_text(f"{PEER} {accepted} {end}", **launch)


# ---------------------------------------------------------------- special values


def test_special_registers():
    names = ["%ctaid.x", "%ctaid.y", "%cluster_ctarank", "%cluster_ctaid.y", "%clusterid.x",
             "%nclusterid.x", "%nctaid.y", "%cluster_nctarank"]  # fmt: skip
    out = np.zeros((4, 4, len(names)), np.uint32)
    stores = "".join(
        f"mov.u32 %r1, {name}; st.global.b32 [%rd0+{4 * i}], %r1;\n" for i, name in enumerate(names)
    )
    run_kernel_text(
        f"""
        mov.u32 %r1, %ctaid.x;  mov.u32 %r2, %ctaid.y;  mad.lo.u32 %r3, %r2, 4, %r1;
        mul.wide.u32 %rd0, %r3, {4 * len(names)};  add.s64 %rd0, %rd0, %rd8;
        {stores}
        """,
        [out], grid=(4, 4, 1), cluster=(2, 2, 1),
    )  # fmt: skip
    for y in range(4):
        for x in range(4):
            rank = x % 2 + 2 * (y % 2)
            assert out[y, x].tolist() == [x, y, rank, y % 2, x // 2, 2, 4, 4]


# ---------------------------------------------------------------- atomics


def test_atomics_on_global_and_shared_memory():
    """Integer operations against numpy over the 32 lanes, float and packed sums, exch and cas."""
    cells = np.zeros(16, np.uint32)
    cells[2], cells[4] = 0xFFFFFFFF, 7
    run_kernel_text(
        """
        mov.u32 %r0, %tid.x;  add.u32 %r1, %r0, 3;
        red.relaxed.gpu.global.add.u32 [%rd8], %r1;
        red.global.max.s32 [%rd8+4], %r1;
        red.global.and.b32 [%rd8+8], %r1;
        red.global.xor.b32 [%rd8+12], %r1;
        atom.global.cas.b32 %r2, [%rd8+16], 7, 99;
        atom.global.exch.b32 %r3, [%rd8+20], %r1;
        atom.global.inc.u32 %r4, [%rd8+24], 9;
        cvt.rn.f32.u32 %r5, %r0;
        red.global.add.f32 [%rd8+28], %r5;
        mov.b32 %r6, 0x3C003C00;
        red.global.add.noftz.f16x2 [%rd8+32], %r6;
        mov.b32 %r7, 0x3F803F80;
        red.global.add.noftz.bf16x2 [%rd8+36], %r7;
        st.shared.b32 [smem], 0;
        bar.warp.sync -1;
        atom.shared.add.u32 %r8, [smem], 2;
        bar.warp.sync -1;
        ld.shared.b32 %r9, [smem];
        st.global.b32 [%rd8+40], %r9;
        st.shared.b32 [smem], 50;
        bar.warp.sync -1;
        atom.shared.cta.min.u32 %r8, [smem], %r1;
        bar.warp.sync -1;
        ld.shared.b32 %r9, [smem];
        st.global.b32 [%rd8+44], %r9;
        """,
        [cells],
    )
    lanes = np.arange(32, dtype=np.uint32) + 3
    assert cells[0] == lanes.sum() and cells[1] == lanes.max()
    assert cells[2] == np.bitwise_and.reduce(lanes) and cells[3] == np.bitwise_xor.reduce(lanes)
    assert cells[4] == 99 and cells[5] == 34
    assert cells[6] == 32 % 10  # inc wraps to 0 after 9
    assert cells[7:8].view(np.float32)[0] == np.arange(32).sum()
    assert cells[8:9].view(np.float16).tolist() == [32.0, 32.0]
    sums = cells[9:10].view(np.uint16).astype(np.uint32) << 16
    assert sums.view(np.float32).tolist() == [32.0, 32.0]
    assert cells[10] == 64 and cells[11] == lanes.min()


# ---------------------------------------------------------------- report


def test_report_and_trace():
    out = np.zeros(32, np.uint32)
    report = run_kernel_text(PRODUCER_CONSUMER, [out], block=(64, 1, 1), trace=True)
    arrivals = [entry for entry in report.trace if entry.opcode.startswith("mbarrier.arrive")]
    assert [entry.operands[-1] for entry in arrivals] == [0x400, 0x408] * 8
    assert [entry.warp for entry in arrivals] == [0, 1] * 8
    assert [entry.number for entry in report.trace] == list(range(len(report.trace)))
    values = json.loads(report.to_json())
    assert values["kernel"] == "test" and values["block"] == [64, 1, 1]
    assert values["instructions"]["mbarrier.arrive"] == {"warps": 16, "lanes": 512}
    assert values["clc"] == {"try_cancel": 0, "stolen": 0, "refused": 0} and "trace" not in values
    assert values["warp_instructions"] == report.warp_instructions > 100
    assert isinstance(report, Report)


def test_trace_of_a_try_wait_has_its_result():
    """The first tests a phase that is not over, the second for the one before, which is."""
    trace = run_kernel_text(
        """
        .shared .align 8 .b8 smem[8];
        mbarrier.init.shared.b64 [smem], 1;
        mbarrier.test_wait.parity.shared.b64 %p0, [smem], 0;
        mbarrier.test_wait.parity.shared.b64 %p0, [smem], 1;
        """,
        [np.zeros(1, np.uint32)],
        trace=True,
    ).trace
    waits = [entry for entry in trace if entry.opcode.startswith("mbarrier.test_wait")]
    assert [entry.operands[0] for entry in waits] == [0, 1]


def test_guarded_machine_operations_count_executing_lanes():
    report = run_kernel_text(
        """
        mov.u32 %r0, %tid.x;  setp.lt.u32 %p0, %r0, 3;  setp.gt.u32 %p1, %r0, 99;
        @%p0 red.global.add.u32 [%rd8], 1;
        @%p1 red.global.add.u32 [%rd8], 1;
        """,
        [np.zeros(1, np.uint32)],
    )
    assert report.opcodes["red.global.add.u32"] == {"warps": 1, "lanes": 3}


def test_one_seed_gives_one_run():
    def order(**options):
        trace = run_kernel_text(
            PAIR,
            [np.zeros((6, 32), np.uint32)],
            grid=(6, 1, 1),
            cluster=(2, 1, 1),
            trace=True,
            **options,
        ).trace
        return [(entry.ctaid, entry.line) for entry in trace]

    assert order(seed=1) == order(seed=1)
    assert len({tuple(order(seed=seed)) for seed in range(4)}) > 1
