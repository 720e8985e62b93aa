"""The timing model with an H200's constants against single instructions measured on one."""

from __future__ import annotations

import json

import micro_replays
import pytest
from checkout import ROOT

from bench.bringup.micro import basic, memory, microbenchmarks
from bench.bringup.micro.timed import Timed, init_barriers, timed, wait
from sm100_sim.timing import load

pytestmark = pytest.mark.simulator

H200 = load("h200").values()
#: Clocks of a round by other kernels, and of those of the bringup.
MEASURED = json.loads((ROOT / "lab/micro/hopper_measured.json").read_text())["rounds"]
STEPS = json.loads((ROOT / "docs/bringup_h200.json").read_text())["stages"]["micro"]["steps"]


@pytest.fixture(autouse=True)
def _assembler():
    if micro_replays.missing():
        pytest.skip(micro_replays.missing())


@pytest.mark.parametrize("name", ["hand-over", "remote hand-over, release", "load from L2"])
def test_figures_that_set_no_constant(name):
    micro = microbenchmarks(132, has_tcgen05=False)[name]
    assert not micro.constant
    found = micro_replays.figure(micro, H200)
    assert found == pytest.approx(STEPS[name]["values"]["value"], rel=0.1)


def _arrive(kind: str, stores: int = 0) -> Timed:
    """A warp arrives at the other CTA of a pair, behind so many stores of its own."""
    setup = (
        init_barriers(1) + "mapa.shared::cluster.u32 %peer, %bar, 1;\nmov.u32 %rank, "
        "%cluster_ctarank;\nsetp.ne.u32 %mine, %rank, 0;\nmul.wide.u32 %at, %thread, 16;\n"
        "add.u64 %far, %buf, %at;\n"
    )
    body = (
        f"@%mine bra PAST;\n{basic._stores(stores, 1)}"
        f"@%leader mbarrier.arrive.{kind}.cluster.shared::cluster.b64 _, [%peer];\nPAST:"
    )
    return timed(f"{kind}, {stores} stores", body, setup=setup, grid=2, cluster=2)


@pytest.mark.parametrize(("kind", "setting", "stores"), [
    ("release", "idle", 0), ("release", "8 own stores", 8), ("relaxed", "8 own stores", 8),
])  # fmt: skip
def test_a_release_waits_for_the_warps_stores(kind, setting, stores):
    found = micro_replays.clocks(_arrive(kind, stores), H200)
    assert found == pytest.approx(MEASURED[f"{kind} arrive, peer; {setting}"], rel=0.1)


def _load(fence: str = "", stored: int = 0) -> Timed:
    """A bulk load of 64 KiB behind bulk stores of so many bytes, and a fence before its wait."""
    copy, some = "cp.async.bulk.global.shared::cta.bulk_group", range(0, stored, 16384)
    stores = "".join(
        f"@%first {copy} [%buf+{131072 + i}], [%pool+{65536 + i}], 16384;\n" for i in some
    )
    commit = "@%first cp.async.bulk.commit_group;\n" if stored else ""
    body = (
        f"{stores}{commit}@%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 65536;\n"
        f"@%first {memory.COPY} [%pool], [%buf], 65536, [%bar];\n{fence}{wait('WAITING')}"
        "xor.b32 %parity, %parity, 1;"
    )
    keep = "@%first cp.async.bulk.wait_group 0;\n" if stored else ""
    return timed(
        f"load behind {stored} {fence}", body, setup=init_barriers(), keep=keep,
        shared=memory.SHARED,
    )  # fmt: skip


def test_tma_works_in_order():
    """Loads behind 16 and 64 KiB of stores come 582 and 2,047 clocks later
    (lab/micro/whole_gpu_measured.json)."""
    alone = micro_replays.clocks(_load(), H200)
    for stored, later in ((16, 582), (64, 2047)):
        found = micro_replays.clocks(_load(stored=stored << 10), H200)
        assert found - alone == pytest.approx(later, abs=100)
    # Out of order the store alone, 2,048 clocks, is what a round takes.
    free = micro_replays.clocks(_load(stored=64 << 10), H200._replace(tma_in_order=0.0))
    assert free == pytest.approx(2048, rel=0.01) and free < found - 900


def test_a_fence_waits_for_loads_of_tma_and_once_more():
    kernel = _load("fence.acq_rel.gpu;\n")
    found = micro_replays.clocks(kernel, H200)
    once = micro_replays.clocks(kernel, H200._replace(fence_behind_loads=0.0))
    assert found - once == pytest.approx(H200.fence_behind_loads, abs=1)
    assert once > micro_replays.clocks(_load(), H200)
