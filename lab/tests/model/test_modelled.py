"""Whole attention problems from tile costs, and the replays that are kept; nothing is replayed."""

import numpy as np
import pytest

from bench.suite import FORWARD, Case
from lab.model import replays
from lab.model.forward import Kernel
from lab.model.replays import Replayed, Traced, fitted, kept
from lab.model.tiles import ForwardTiling
from lab.paths import Paths, path_figures
from lab.whole.problem import TileCosts
from sm100_sim import timing
from sm100_sim.timing import load
from sm100_sim.timing.machine_code.resources import Instructions
from sm100_sim.timing.program import Program

MACHINE = load()
IDEAL = [TileCosts(0.0, 0.0, 1.0)]
VALUES = [MACHINE.values()._replace(launch_us=0.0, hbm_terabytes=1e9)]
FULL, CAUSAL = (Case("dense", ((4096, 4096),) * 2, 8, 2, causal) for causal in (False, True))


def forward():
    return Kernel("ideal", ForwardTiling("static"), VALUES, IDEAL)


def test_flop_by_convention():
    assert FULL.flop(FORWARD) == 4 * 4096**2 * 256 * 16
    assert CAUSAL.flop(FORWARD) == FULL.flop(FORWARD) / 2
    assert FULL.flop(FORWARD, 128) == FULL.flop(FORWARD) / 2


def test_ideal_full_attention_takes_its_tensor_core_time():
    found = forward().run(Case("dense", ((4096, 4096),), 74, 74, False))[0]
    steps = 4096 // 256 * 74 * 4096 // 128 / 74
    assert found.clocks == steps * 2048 and found.balance == 1.0


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A kernel of one warp that issues and exits; the list grows when it is traced."""
    monkeypatch.setattr(replays, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(replays, "_memory", {})
    made = []

    def one():
        made.append(1)
        return [Traced(program_of_one_warp(), 2, 512.0)]

    return one, made


def program_of_one_warp():
    """Four instructions with a stall count of five."""
    code = Instructions(*(np.full(4, value, np.int32) for value in
                          (0, 1, 0, 5, 0, -1, -1, 0, 0, 0, 0)))  # fmt: skip
    none = np.zeros(0, np.int64)
    program = Program(
        np.arange(4, dtype=np.int32), np.full(4, -1, np.int32), np.array([0], np.int32),
        np.array([4], np.int32), np.array([0], np.int32), none.reshape(0, 5), none.reshape(0, 5),
        0, 1,
    )  # fmt: skip
    return timing.StoredProgram(code, program, [(0, 0)], 4096.0, 0, 3)


def test_programs_are_traced_once_and_replays_made_of_them(trace, monkeypatch):
    one, made = trace
    first = kept(("kernel", 1), one, MACHINE, 1)
    assert [(row.tiles, row.work, row.ambiguous, row.masked) for row in first] == [
        (2, 4096.0, 3, 512.0)
    ]
    assert first[0].clocks == (16.0, 16.0)
    monkeypatch.setattr(replays, "_memory", {})
    assert kept(("kernel", 1), one, MACHINE, 1) == first and len(made) == 1
    kept(("kernel", 1), one, load("b300"), 1)
    assert len(kept(("kernel", 1), one, MACHINE, 2)[0].clocks) == 3
    assert len(made) == 1
    kept(("kernel", 2), one, MACHINE, 1)
    assert len(made) == 2


def test_a_kept_program_is_the_one_that_was_traced(trace, monkeypatch):
    one, made = trace
    kept_first = replays.programs(("kernel",), one)[0].program
    monkeypatch.setattr(replays, "_memory", {})
    again, said = replays.programs(("kernel",), one)[0].program, program_of_one_warp()
    assert len(made) == 1
    for found in (kept_first, again):
        assert (found.work, found.warps, found.ambiguous) == (said.work, said.warps, 3)
        for mine, theirs in zip(found.program, said.program, strict=True):
            assert np.array_equal(mine, theirs)
        for mine, theirs in zip(found.instructions, said.instructions, strict=True):
            assert np.array_equal(mine, theirs)


def test_paths_of_replays_are_added():
    rows = [Replayed(1, 1.0, (1.0,), 2, 30), Replayed(1, 1.0, (1.0,), 0, 4)]
    assert Paths.of(rows) + Paths(1, 1) == Paths(3, 35)
    assert path_figures(Paths(3, 35)) == {"unmatched": 3, "ambiguous": 35}
    assert path_figures(Paths(0, 5), None) == {"unmatched": "0 / -", "ambiguous": "5 / -"}
    assert path_figures(None, None) == path_figures(None) == {"unmatched": None, "ambiguous": None}


def test_costs_of_each_draw():
    rows = [Replayed(1, 1000.0, (1600.0, 1700.0)), Replayed(1, 2000.0, (2700.0, 2900.0))]
    costs = fitted(rows, "single")
    assert np.allclose([(c.each, c.rate) for c in costs], [(500.0, 1.1), (500.0, 1.2)])


def test_what_is_kept_is_known_by_what_the_models_code_means(trace, monkeypatch):
    one, made = trace
    digests = {"model_digest": "one", "trace_digest": "one"}
    replayed = []
    of = Traced.replayed
    monkeypatch.setattr(Traced, "replayed", lambda *given: replayed.append(1) or of(*given))
    for name in digests:
        monkeypatch.setattr(replays.timing, name, lambda name=name: digests[name], raising=False)

    def both():
        monkeypatch.setattr(replays, "_memory", {})
        kept(["a kernel"], one, MACHINE, 0)
        return len(made), len(replayed)

    assert both() == both() == (1, 1)
    digests["model_digest"] = "two"
    assert both() == (1, 2)
    digests |= {"model_digest": "three", "trace_digest": "three"}
    assert both() == (2, 3)
