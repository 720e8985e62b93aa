"""flash-attn-4's SM90 backward as the timing model has it: its tiles, and what L2 adds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bench.suite import BACKWARD, Case
from lab.model.hopper import attention as model
from lab.model.hopper.clocks import MOST_GHZ, Clocks
from lab.model.peers import flash_attn_4_hopper as theirs
from lab.model.summed_dq import tiles_of
from lab.whole.problem import TileCosts
from sm100_sim.timing import Action

MACHINE = model.hopper()
STEP_BYTES = theirs.STEP.queries * 256 * 4


def case(seqlen, causal=False, heads=(16, 16)):
    return Case("test", ((seqlen, seqlen),) * 4, *heads, causal)


def works(problem):
    return tiles_of(problem, theirs.STEP).work.tolist()


def test_tiles_of_full_attention_do_its_flop():
    problem = case(768)
    assert sum(works(problem)) * model.WORK_FLOP == pytest.approx(problem.flop(BACKWARD))
    assert len(works(problem)) == 16 * 4 * 16


def test_causal_tiles_begin_at_their_keys():
    """192 keys in tiles of 48 and as many queries in steps of 64: all three steps, then those from
    the keys' own row on."""
    found = works(Case("test", ((192, 192),), 1, 1, True))
    assert found == [theirs.STEP.work * steps for steps in (3, 3, 2, 1)]


def test_heads_in_groups_are_refused():
    with pytest.raises(ValueError, match="heads 16/2: accepted are as many of keys as of queries"):
        theirs.backward(False, MACHINE).plan(case(768, heads=(16, 2)))


@pytest.fixture
def planted(monkeypatch):
    """The kernel's rate alone is what a test says; a step adds 64 KiB, a tile 48 KiB besides."""

    def program(steps):
        action = np.zeros((2 * steps + 1, 4), dtype=np.int64)
        action[:, 0] = Action.TMA_STORE
        action[:, 1] = [STEP_BYTES // 2] * (2 * steps) + [48 << 10]
        program = SimpleNamespace(action=action)
        work = theirs.STEP.work * steps * model.SM_CLOCKS
        return SimpleNamespace(program=SimpleNamespace(program=program, work=work))

    def plant(rate):
        monkeypatch.setattr(theirs, "kept", lambda *given: [])
        monkeypatch.setattr(theirs, "programs", lambda *given: [program(4), program(16)])
        monkeypatch.setattr(theirs, "fitted", lambda *given: [TileCosts(0.0, 0.0, rate)])
        return model.times(theirs.backward(False, MACHINE).calls(case(4096)), MACHINE)

    return plant


def test_sums_of_dq_take_the_time_that_l2_takes_to_add_them(planted):
    """Sums of dQ bound the time, but for the kernels around, if the kernel's own rate is better;
    and the SMs' clock is the highest."""
    few, fewer = planted(0.5), planted(2.0)
    assert few == fewer
    steps = len(works(case(4096))) * 4096 / theirs.STEP.queries
    adding = steps * STEP_BYTES / (theirs.added_terabytes() * 1e12)
    around = 4 * 16 * 4096 * (1024 + 12 + 1024 + 1536) / (MACHINE.values().hbm_terabytes * 1e12)
    assert few.seconds == pytest.approx(adding + around, rel=0.02)
    assert Clocks().first(few.busy) == MOST_GHZ


def test_a_kernel_that_is_slower_than_l2_has_its_own_rate(planted):
    assert planted(8.0).clocks == pytest.approx(planted(16.0).clocks / 2, rel=0.01)
