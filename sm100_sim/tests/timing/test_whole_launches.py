"""Time of whole launches: CTAs that share an SM, waves, and bytes at HBM's rate."""

import numpy as np
import pytest

import sm100_sim
from sm100_sim import timing

pytestmark = pytest.mark.simulator

pytest.importorskip("triton")  # it brings ptxas
pytest.importorskip("numba")

from sm100_sim.timing.replaying.replay import replay  # noqa: E402
from sm100_sim.timing.whole import Resources, WholeLaunches, side_by_side  # noqa: E402

#: Steps of a warp behind a barrier of its CTA.
STEPS = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry steps(.param .u64 out, .param .u32 count)
{
.reg .pred %p0; .reg .b32 %r<4>; .reg .f32 %f<2>; .reg .b64 %rd<3>;
ld.param.u32 %r0, [count];
mov.u32 %r1, %tid.x;
cvt.rn.f32.u32 %f0, %r1;
NEXT:
BARRIER
STEP
add.u32 %r0, %r0, -1;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra NEXT;
ld.param.u64 %rd0, [out];
mul.wide.u32 %rd1, %r1, 4;
add.u64 %rd0, %rd0, %rd1;
st.global.f32 [%rd0], %f0;
ret;
}
"""
#: A chain of additions leaves the pipes free; four exponentials per step fill theirs.
CHAIN = STEPS.replace("BARRIER", "bar.sync 0;").replace("STEP", "add.f32 %f0, %f0, %f0;")
FULL = STEPS.replace("BARRIER", "").replace("STEP", "ex2.approx.ftz.f32 %f0, %f0;\n" * 4)
#: As CHAIN, with the barrier of a cluster.
CLUSTER = STEPS.replace("STEP", "add.f32 %f0, %f0, %f0;").replace(
    "BARRIER", "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
)


def launch_of(text, block=128, cluster=1, steps=200):
    found = WholeLaunches("h200", 0)
    sm100_sim.launch_ptx(
        text, "steps", [np.zeros(block, np.float32), steps], block=block, cluster=cluster,
        grid=cluster, options=found.options(),
    )  # fmt: skip
    (launch,) = found.launches
    return launch


def clocks(launch, copies):
    stored = timing.StoredProgram.of(launch.prediction.compiled)
    values = launch.prediction.machine.values()
    return replay(side_by_side(stored, copies), values).clocks


def test_resident_ctas_by_every_limit():
    """A register file has 64K registers, an SM 64 warps, 32 CTAs and 228 KiB of shared memory."""
    assert Resources(128, 32, 0).resident == 16
    assert Resources(32, 32, 0).resident == 32
    assert Resources(256, 128, 0).resident == 2
    assert Resources(256, 129, 0).resident == 1
    assert Resources(128, 32, 75 << 10).resident == 3
    assert Resources(384, 168, 227 << 10).resident == 1


def test_ctas_that_wait_share_an_sm_without_loss():
    """Each with barriers of its own: warps of two CTAs never wait for each other."""
    launch = launch_of(CHAIN)
    assert clocks(launch, 4) < 1.5 * clocks(launch, 1)


def test_ctas_that_fill_a_pipe_share_it():
    """Another three CTAs take as many rounds of the pipe."""
    launch = launch_of(FULL, block=256)
    alone, four = clocks(launch, 1), clocks(launch, 4)
    assert 4 * 200 * 4 * 2 * 8 <= four < 4.2 * alone


def test_a_whole_launch_takes_waves_of_what_is_resident():
    launch = launch_of(FULL, block=256)
    resident = launch.resources.resident
    assert resident == 8
    wave, waves = launch.whole(132 * resident), launch.whole(132 * resident * 3)
    assert (wave.rounds, waves.rounds) == (1.0, 3.0)
    assert waves.waves == pytest.approx(3 * wave.waves)
    assert wave.bound == "MUFU pipe" and 0.9 < wave.busy["MUFU pipe"] <= 1
    assert launch.whole(1).resident == 1


def test_a_whole_launch_is_no_faster_than_its_bytes():
    launch = launch_of(CHAIN)
    values = launch.prediction.machine.values()
    whole = launch.whole(132, hbm_bytes=values.hbm_terabytes * 1e9)
    assert whole.bound == "HBM" and whole.memory == pytest.approx(1e-3)
    assert whole.seconds == pytest.approx(1e-3 + values.launch_us * 1e-6)
    assert launch.seconds(132).tolist() == [launch.whole(132).seconds]


def test_clusters_with_a_barrier_are_not_put_side_by_side():
    launch = launch_of(CLUSTER, cluster=2, steps=10)
    with pytest.raises(ValueError, match="one at a time"):
        clocks(launch, 2)
