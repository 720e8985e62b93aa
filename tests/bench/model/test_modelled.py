"""Whole attention problems from tile costs, and the replays that are kept; nothing is replayed."""

import numpy as np

from bench.model import replays
from bench.model.forward import Kernel
from bench.model.replays import Replayed, fitted, kept
from bench.model.tiles import ForwardTiling
from bench.suite import FORWARD, Case
from bench.tables.paths import Paths, path_figures
from sm100_sim.timing import TileCosts, load

MACHINE = load()
IDEAL = [TileCosts(0.0, 0.0, 1.0)]
VALUES = [MACHINE.values()._replace(launch_us=0.0, power_tflops=1e9, hbm_terabytes=1e9)]
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


def test_kept_replays_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(replays, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(replays, "_memory", {})
    made = []

    def make():
        made.append(1)
        return [Replayed(2, 4096.0, (5000.0, 5100.0))]

    first = kept(("kernel", 1), MACHINE, 1, make)
    monkeypatch.setattr(replays, "_memory", {})
    assert kept(("kernel", 1), MACHINE, 1, make) == first and len(made) == 1
    kept(("kernel", 2), MACHINE, 1, make)
    kept(("kernel", 1), load("b300"), 1, make)
    kept(("kernel", 1), MACHINE, 2, make)
    assert len(made) == 4


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


def test_replays_are_kept_by_what_the_models_code_means(monkeypatch, tmp_path):
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(replays, "_memory", {})
    digests = ["one", "two"]
    monkeypatch.setattr(replays.timing, "model_digest", lambda: digests[0], raising=False)
    made = []

    def kept():
        replays._memory.clear()
        return replays.kept(["a kernel"], load("b200"), 0, lambda: made.append(1) or [Replayed(
            1, 1.0, (1.0,))])  # fmt: skip

    assert kept() == kept() and len(made) == 1
    digests.pop(0)
    kept()
    assert len(made) == 2
