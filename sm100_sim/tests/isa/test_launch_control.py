"""Cluster launch control: every cluster once, the words of a response, requests that fail."""

import numpy as np
import pytest
from kernel_text import run_kernel_text

from sm100_sim.errors import ClcError, LaunchError, MemoryFault
from sm100_sim.isa.clc import CTAID_POISON, response_words
from sm100_sim.run.grid import Grid

pytestmark = pytest.mark.simulator

SEEDS = range(8)

# A persistent loop: process the own cluster, then request another until none is left.
CLC = """
mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;  mov.u32 %r2, 0;
mov.u32 %r20, %cluster_ctarank;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALISED;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
WORK:
mul.wide.u32 %rd0, %r1, 4;  add.s64 %rd0, %rd0, %rd8;
@!%p0 atom.global.add.u32 %r3, [%rd0], 1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.ne.u32 %p4, %r20, 0;
or.pred %p5, %p4, %p0;
@!%p5 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes\
.multicast::cluster::all.b128 [smem+16], [smem];
W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [smem], %r2;
@!%p1 bra W;
xor.b32 %r2, %r2, 1;
ld.shared.b128 %q0, [smem+16];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q0;
@!%p2 bra DONE;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r5, %r6, _}, %q0;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r7, %q0;
add.u32 %r1, %r4, %r20;
fence.proxy.async.shared::cta;
bra WORK;
DONE:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize("clusters", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("options", [{}, {"schedule": "lazy"}, {"seed": 5}], ids=str)
def test_every_cluster_is_done_once(clusters, options):
    """14 CTAs in 7 clusters, from one resident cluster to more than there are."""
    done = np.zeros(14, np.uint32)
    progress = []
    report = run_kernel_text(
        CLC, [done], grid=(14, 1, 1), cluster=(2, 1, 1), clusters=clusters,
        progress=lambda *step: progress.append(step), **options,
    )  # fmt: skip
    assert (done == 1).all()
    resident = min(clusters, 7)
    refused = report.clc["refused"]
    # Each cluster requests until it fails; each success is a request of its own. For each refusal a
    # cluster is launched that would have been stolen.
    assert report.clc["try_cancel"] == 7 and refused * ("seed" not in options) == 0
    assert 7 - resident - refused <= report.clc["stolen"] <= 7 - resident
    assert report.resident_clusters == resident
    assert [step for step, _ in progress] == list(range(1, 8))


def test_clc_shares_the_work_between_resident_clusters():
    """Two resident clusters share the tiles: neither does all of the rest."""
    owner = np.zeros(12, np.uint32)
    # The id of the executing cluster's first CTA (a special register) goes to the tile's cell.
    body = CLC.replace(
        "@!%p0 atom.global.add.u32 %r3, [%rd0], 1;",
        "mov.u32 %r3, %clusterid.x;  @!%p0 st.global.b32 [%rd0], %r3;",
    )
    run_kernel_text(body, [owner], grid=(12, 1, 1), cluster=(2, 1, 1), clusters=2)
    assert sorted(np.bincount(owner).tolist()) == [6, 6]


def test_try_cancel_after_an_observed_failure():
    body = CLC.replace("@!%p2 bra DONE;\n", "").replace(
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r5, %r6, _}, %q0;\n"
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r7, %q0;\n",
        "mov.u32 %r4, 0;\n",
    )
    with pytest.raises(ClcError, match="observed that an earlier one failed"):
        run_kernel_text(body, [np.zeros(2, np.uint32)], grid=(2, 1, 1), cluster=(2, 1, 1))


def test_ctaid_of_a_failed_request_is_poison():
    """Compilers take it before they test is_canceled; no CTA has this id."""
    body = CLC.replace("@!%p2 bra DONE;\n", "").replace(
        "add.u32 %r1, %r4, %r20;\n",
        "@!%p2 st.global.u32 [%rd8], %r7;\n@!%p2 bra DONE;\nadd.u32 %r1, %r4, %r20;\n",
    )
    found = np.zeros(2, np.uint32)
    run_kernel_text(body, [found], grid=(2, 1, 1), cluster=(2, 1, 1))
    assert found[0] == CTAID_POISON[0]


def test_query_of_something_else():
    with pytest.raises(ClcError, match="no response of try_cancel"):
        run_kernel_text(
            """
            ld.shared.b128 %q0, [smem];
            clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p0, %q0;
            """
        )


# ---------------------------------------------------------------- the words of a response

# The loop of CLC on a grid of any shape. The response is read as cuDNN's kernels read it on a B200,
# word by word; the first CTA of the cluster that was cancelled is at (x, y, z), this one is %r6 and
# %r7 further. Each CTA counts itself in its cell of the output.
RAW = """
mov.u32 %r0, %tid.x;  mov.u32 %r8, 0;
mov.u32 %r1, %ctaid.x;  mov.u32 %r2, %ctaid.y;  mov.u32 %r3, %ctaid.z;
mov.u32 %r4, %nctaid.x;  mov.u32 %r5, %nctaid.y;
mov.u32 %r6, %cluster_ctaid.x;  mov.u32 %r7, %cluster_ctaid.y;
mov.u32 %r9, %cluster_ctarank;  or.b32 %r10, %r9, %r0;
setp.ne.u32 %p0, %r0, 0;  setp.ne.u32 %p1, %r10, 0;
@%p0 bra INITIALISED;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
WORK:
mad.lo.u32 %r11, %r3, %r5, %r2;  mad.lo.u32 %r11, %r11, %r4, %r1;
mul.wide.u32 %rd0, %r11, 4;  add.s64 %rd0, %rd0, %rd8;
@!%p0 atom.global.add.u32 %r12, [%rd0], 1;
@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;
barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
@!%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes\
.multicast::cluster::all.b128 [smem+16], [smem];
W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [smem], %r8;
@!%p2 bra W;
xor.b32 %r8, %r8, 1;
ld.shared.v4.b32 {%r16, %r17, %r18, %r19}, [smem+16];
fence.proxy.async.shared::cta;
/*valid*/ and.b32 %r20, %r18, 1;
setp.eq.u32 %p3, %r20, 0;
barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
@%p3 bra DONE;
add.u32 %r1, %r16, %r6;
and.b32 %r2, %r17, 0xffff;  add.u32 %r2, %r2, %r7;
shr.u32 %r3, %r17, 16;
bra WORK;
DONE:
"""

SHAPES = [
    ((6, 1, 1), (2, 1, 1)),  # a row, as of most persistent kernels
    ((4, 6, 3), (2, 1, 1)),
    ((4, 6, 3), (1, 2, 1)),  # y of the first CTA is even
    ((4, 6, 2), (2, 2, 1)),
    ((1, 5, 7), (1, 1, 1)),
]


@pytest.mark.parametrize(("grid", "cluster"), SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"schedule": "lazy"}, {"seed": 2}], ids=str)
def test_response_read_word_by_word(grid, cluster, options):
    done = np.zeros(grid[::-1], np.uint32)
    report = run_kernel_text(RAW, [done], grid=grid, cluster=cluster, clusters=2, **options)
    assert (done == 1).all()
    assert report.clc["stolen"] > 0


def test_largest_coordinates():
    assert response_words((2**31 - 2, 65534, 65533))[:3].tolist() == [
        0x7FFF_FFFE, 0xFFFD_FFFE, response_words((0, 0, 0))[2]
    ]  # fmt: skip


@pytest.mark.parametrize("grid", [(1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)], ids=str)
def test_grids_that_do_not_fit_a_response_cannot_be_launched(grid):
    with pytest.raises(LaunchError, match=r"65535.* in y and z"):
        run_kernel_text("", grid=grid)


def test_words_of_a_failed_request_name_no_cta():
    words = response_words(None)
    assert words[:2].tolist() == list(CTAID_POISON) and not words[2] & 1
    # The largest coordinates of the largest grid are one less than its sizes.
    assert words[0] > 2**31 - 2 and words[1] & 0xFFFF > 65534 and words[1] >> 16 > 65534


@pytest.mark.parametrize("first", [None, (6, 4, 2)])
def test_query_of_words_that_a_program_has_stored(first):
    """All zero but for x, y | z << 16 and the lowest bit of word 2; a failure is nobody's."""
    words = (0, 0, 0) if first is None else (first[0], first[2] << 16 | first[1], 1)
    found = np.zeros(4, np.uint32)
    run_kernel_text(
        f"""
        st.shared.v4.b32 [smem], {{{words[0]}, {words[1]}, {words[2]}, 0}};
        ld.shared.b128 %q0, [smem];
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p0, %q0;
        clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r0, %q0;
        clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r1, %q0;
        clusterlaunchcontrol.query_cancel.get_first_ctaid::z.b32.b128 %r2, %q0;
        selp.u32 %r3, 1, 0, %p0;
        st.global.v4.b32 [%rd8], {{%r0, %r1, %r2, %r3}};
        mbarrier.init.shared.b64 [smem+32], 1;
        mov.u32 %r4, %tid.x;  setp.ne.u32 %p1, %r4, 0;
        @!%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem+32], 16;
        @!%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128\
 [smem+16], [smem+32];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [smem+32], 0;
        @!%p2 bra W;
        """,
        [found],
    )  # fmt: skip
    assert found.tolist() == ([0, 0, 0, 0] if first is None else [*first, 1])


@pytest.mark.parametrize(
    "valid",
    [
        "setp.ne.u32 %p4, %r18, 0;  selp.u32 %r20, 1, 0, %p4;",  # all bits of word 2
        "and.b32 %r20, %r19, 1;",  # word 3
        "setp.ne.u32 %p4, %r19, 0;  selp.u32 %r20, 1, 0, %p4;",
        "xor.b32 %r20, %r18, 1;",  # true of failures
    ],
)
def test_who_relies_on_undefined_words_fails(valid):
    """Either clusters that were taken over are never done, or a CTA that does not exist is."""
    body = RAW.replace("/*valid*/ and.b32 %r20, %r18, 1;", valid)
    assert body != RAW
    done = np.zeros(12, np.uint32)
    try:
        run_kernel_text(body, [done], grid=(12, 1, 1), cluster=(2, 1, 1), clusters=1)
    except MemoryFault:
        return
    assert (done == 0).any()


# ---------------------------------------------------------------- what nobody promises


def test_copies_of_a_response_arrive_on_their_own():
    """A CTA that goes on because its leader has its copy works by luck."""
    wait = "W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [smem], %r8;\n@!%p2 bra W;"
    own = f"setp.ne.u32 %p5, %r9, 0;\n@%p5 bra OVER;\n{wait}\nOVER:\n"
    meet = "barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;\n"
    body = RAW.replace(wait, own + meet)
    assert body != RAW

    def right(**options) -> bool:
        done = np.zeros(16, np.uint32)
        try:
            run_kernel_text(body, [done], grid=(16, 1, 1), cluster=(2, 1, 1), clusters=2, **options)
        except MemoryFault:
            return False
        return (done == 1).all()

    assert right()
    assert not all(right(seed=seed) for seed in SEEDS)


def test_a_seed_refuses_requests_and_takes_clusters_in_any_order():
    """Everything is done once all the same; what is refused is launched later."""
    body = RAW.replace("atom.global.add.u32 %r12, [%rd0], 1", "atom.global.add.u32 %r12, [%rd9], 1")
    body = body.replace("/*valid*/", "@!%p0 st.global.u32 [%rd0], %r12;\n/*valid*/")
    refused, orders = 0, set()
    for seed in SEEDS:
        place, count = np.zeros(20, np.uint32), np.zeros(1, np.uint32)
        report = run_kernel_text(body, [place, count], grid=(20, 1, 1), clusters=2, seed=seed)
        assert sorted(place.tolist()) == list(range(20)) and count[0] == 20
        assert report.clc["stolen"] <= 18
        assert report.clc["try_cancel"] >= report.clc["stolen"] + report.clc["refused"]
        refused += report.clc["refused"]
        orders.add(tuple(place.tolist()))
    assert refused > 0 and len(orders) == len(SEEDS)


def test_cancelled_clusters_are_never_launched():
    grid = Grid(6)
    assert grid.take() == 0
    assert grid.cancel(lambda first, end: end - 1) == 5
    assert grid.cancel(lambda first, end: 2) == 2
    assert grid.cancel(lambda first, end: 5) == 1, "the search goes round"
    assert grid.cancel(lambda first, end: None) is None and not grid.exhausted
    assert [grid.take(), grid.take(), grid.take()] == [3, 4, None]
    assert grid.exhausted and grid.cancel(lambda first, end: first) is None


def test_a_closed_grid_gives_nothing():
    grid = Grid(6)
    grid.cancel(lambda first, end: 3)
    grid.close()
    assert grid.take() is None and grid.cancel(lambda first, end: first) is None
