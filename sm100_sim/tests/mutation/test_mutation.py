"""Leaving out synchronisation of compiled kernels: what the sanitizer makes of it."""

import subprocess
import sys

import numpy as np
import pytest
from kernel_text import run_kernel_text
from project import HELPERS
from sanitizer_kernels import COPIES, RING, TENSOR, changed
from sanitizer_kernels_warpgroup import IN_REGISTERS, WARPGROUP

from sm100_sim import launcher
from sm100_sim.launcher import Options
from sm100_sim.mutation.score import Score, captured

pytestmark = pytest.mark.simulator


def score(text: str, arrays=(), only=None, strict=False, seeds=2, **launch):
    """The score of a kernel given as PTX text; keywords of the launch, and jobs and accept."""
    total = Score("test", seeds, seeds)
    add_launch(total, text, arrays, only, strict, **launch)
    return total


def add_launch(total, text, arrays=(), only=None, strict=False, **launch):
    """Try one launch more."""
    options = Options(sanitize="strict" if strict else True, clusters=launch.pop("clusters", None))
    settings = {name: launch.pop(name) for name in ("jobs", "accept") if name in launch}
    with captured(lambda one: list(total.add(one, options, only=only, **settings))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kernel_text.run_kernel", launcher.run_kernel)
            run_kernel_text(text, list(arrays), **launch)


def outcomes(total):
    return [mutant.outcome for mutant in total.mutants.values()]


def test_every_mutant_of_the_small_kernels_is_settled():
    # Nothing of a ring of one slot can be left out.
    assert outcomes(score(RING, block=(64, 1, 1))) == ["caught"] * 5
    # Nothing of a warpgroup's MMAs can be left out: fence, commit, wait, the proxy fence and five
    # barriers.
    assert outcomes(score(WARPGROUP, block=(160, 1, 1))) == ["caught"] * 9


def test_strict_reading_needs_the_fences_of_tensor_memory():
    def fences(instructions):
        return [i for i in instructions if i.name.startswith("tcgen05.fence")]

    plain = score(TENSOR, only=fences, block=(128, 1, 1))
    assert outcomes(plain) == ["redundant"] * 4
    strict = score(TENSOR, only=fences, block=(128, 1, 1), strict=True)
    assert outcomes(strict) == ["caught"] * 4


def test_redundant_mutants_name_the_edge():
    doubled = changed(COPIES, "proxy", "fence.proxy.async.shared::cta;\n" * 2)
    array = np.zeros(32, np.uint32)
    results = score(doubled, [array], lambda found: [i for i in found if "proxy" in i.name])
    assert outcomes(results) == ["redundant"] * 2
    assert all("fence.proxy.async" in mutant.why for mutant in results.mutants.values())


@pytest.mark.parametrize("again", [True, False])
def test_a_later_fence_may_cover_the_accesses(again):
    """The MMA that needs the first of two fences before two barriers waits for the second; without
    a second, nothing says so."""
    last = "tcgen05.fence::before_thread_sync;\nbar.sync 1;\n"
    text = changed(TENSOR, "wait ld", "tcgen05.wait::ld.sync.aligned;\n" + last)
    if not again:
        text = changed(
            TENSOR,
            "end",
            "bar.sync 0;\ntcgen05.ld.sync.aligned.32x32b.x4.b32 "
            "{%r20, %r21, %r22, %r23}, [%r11];\ntcgen05.wait::ld.sync.aligned;\n" + last,
        )

    def first(found):
        fences = [i for i in found if i.name.startswith("tcgen05.fence::before")]
        return [fences[1 if again else -1]]

    (mutant,) = score(text, only=first, block=(128, 1, 1), strict=True).mutants.values()
    assert mutant.outcome == ("redundant" if again else "caught"), mutant
    assert again == ("fence::before_thread_sync" in mutant.why)


_FENCE, _COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
_WAIT, _RELEASE = "wgmma.wait_group.sync.aligned 0;", "mbarrier.arrive.shared.b64 _, [smem+8];"
_SHARED_FENCE = "fence.release.sync_restrict::shared::cta.cluster;"
_RELAXED = "mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [smem+8];"


@pytest.mark.parametrize(
    ("tag", "lines", "opcode", "expected"),
    [
        ("fence", 2 * _FENCE, "wgmma.fence", {"another wgmma.fence": 2}),
        ("registers", f"{_COMMIT} {_FENCE} {IN_REGISTERS}", "wgmma.commit", {"join the group": 1}),
        ("wait", 2 * _WAIT, "wgmma.wait", {"covers the groups, too": 1, "before it": 1}),
        # The buffer is given back between the two.
        ("wait", _WAIT + _RELEASE + _WAIT, "wgmma.wait", {"before it": 1}),
        # The other one is the last of its warp.
        ("release", 2 * _SHARED_FENCE + _RELAXED, "fence.release", {"before anybody needs": 1}),
        # The buffer is given back without the first.
        ("release", _SHARED_FENCE + _RELAXED, "fence.release", {}),
    ],
)  # fmt: skip
def test_what_a_warpgroup_does_twice_is_redundant(tag, lines, opcode, expected):
    """The tagged line of the kernel is replaced; the others of this opcode are needed."""
    text = changed(WARPGROUP, tag, lines)
    if lines.count(_RELEASE):
        text = changed(text, "release", "bar.warp.sync -1;")

    def chosen(found):
        alike = [i for i in found if i.name.startswith(opcode)]
        return alike[:1] if lines.startswith(2 * _SHARED_FENCE) else alike

    total = score(text, only=chosen, block=(160, 1, 1))
    mutants = total.mutants.values()
    named = [m.why for m in mutants if m.outcome == "redundant"]
    assert {edge: sum(edge in why for why in named) for edge in expected} == expected
    assert len(named) == sum(expected.values())
    assert all(m.outcome == "caught" for m in mutants if m.outcome != "redundant")
    assert mutants


def test_memory_is_restored_and_the_launch_still_runs():
    array = np.arange(32, dtype=np.uint32)
    score(COPIES, [array], lambda found: found[:2])
    assert (array == np.arange(32) + 2).all()


def test_a_kernel_with_findings_is_refused():
    with pytest.raises(ValueError, match="not clean"):
        score(changed(RING, "full", ""), block=(64, 1, 1))
    with pytest.raises(ValueError, match="BarrierError"):
        wrong = changed(RING, "full", "mbarrier.arrive.shared.b64 _, [smem], 33;")
        score(wrong, block=(64, 1, 1), accept=True)


def test_findings_of_the_kernel_itself_catch_nothing():
    """Both warps store to one address at their start; the mutants are told from that."""
    racy = changed(RING, "start", "bar.sync 0;\nst.shared.b32 [smem+512], %r1;")
    total = score(racy, block=(64, 1, 1), accept=True)
    assert {kind for kind, _ in total.known} == {"race"}
    assert outcomes(total) == ["caught"] * 5
    own = set(total.known.values())
    assert all(m.why not in own for m in total.mutants.values())


def test_two_processes_give_the_same_score():
    one, two = (score(RING, block=(64, 1, 1), jobs=jobs) for jobs in (1, 2))
    assert one.mutants.keys() == two.mutants.keys()
    assert [(m.outcome, m.why) for m in one.mutants.values()] == [
        (m.outcome, m.why) for m in two.mutants.values()
    ]


#: The second of two warps is for it; those who find that it holds meet.
VOTE = """
mov.u32 %r0, %tid.x;  shr.u32 %r1, %r0, 5;  setp.ne.u32 %p0, %r1, 0;
{}
@!%p1 bra END;
bar.sync 2, 64;
END:
"""


@pytest.mark.parametrize(
    "vote",
    ["barrier.cta.red.or.pred %p1, 1, 64, %p0;", "bar.red.and.pred %p1, 1, 64, %p0;",
     "bar.red.popc.u32 %r4, 1, 64, %p0; setp.ne.u32 %p1, %r4, 0;"],
)  # fmt: skip
def test_without_a_vote_each_warp_goes_by_its_own(vote):
    def votes(found):
        return [i for i in found if ".red." in i.name]

    total = score(VOTE.format(vote), only=votes, block=(64, 1, 1))
    (mutant,) = total.mutants.values()
    assert mutant.outcome == "caught"
    assert "Hang" in mutant.why or "BarrierError" in mutant.why


#: Thread 0 of warp 1 waits for thread 0 of warp 0 twice; a launch without an array stops between.
TWICE = """
ld.global.u32 %r8, [%rd8];
mov.u32 %r0, %tid.x;  setp.ne.u32 %p0, %r0, 0;  shr.u32 %r1, %r0, 5;
setp.ne.u32 %p1, %r1, 0;  setp.eq.u32 %p3, %r8, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
READY: bar.sync 0;
@%p1 bra CONSUMER;
st.shared.b32 [smem+64], %r0;
bar.arrive 1, 64;
@%p3 bra END;
mbarrier.arrive.shared.b64 _, [smem];
bra END;
CONSUMER: bar.sync 1, 64;
@%p3 bra END;
W: mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;  @!%p2 bra W;
END:
"""


def test_later_launches_try_what_earlier_ones_did_not_reach():
    stopping, whole = (np.full(1, flag, np.uint32) for flag in (0, 1))
    total = Score("test", 2, 2)
    add_launch(total, TWICE, [stopping], block=(64, 1, 1))
    assert len(total.mutants) == 3 and len(total.unreached) == 2
    add_launch(total, TWICE, [whole], block=(64, 1, 1))
    assert not total.unreached and total.launches == 2
    assert len(total.mutants) == 5


def test_command(tmp_path):
    script = tmp_path / "ring.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n"
        "import kernel_text, sm100_sim.launcher as launcher\n"
        "from sanitizer_kernels import RING\n"
        "kernel_text.run_kernel = launcher.run_kernel\n"
        "kernel_text.run_kernel_text(RING, block=(64, 1, 1))\n"
    )
    command = [sys.executable, "-m", "sm100_sim", "mutate", "--as-is", "--seeds", "1", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "5 mutants: caught 5, redundant 0, survived 0; 100.0 %" in result.stdout
