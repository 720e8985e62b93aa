"""Whole attention problems from tile costs, and the replays that are kept; nothing is replayed."""

import numpy as np
import pytest

from bench import modelled, replays
from bench.backward_plan import BackwardPlan, plan
from bench.modelled import Kernel, Shape
from bench.modelled_backward import DKDV, DQ, DQ_PRODUCT, DS, Backward, Order
from bench.replays import Paths, Replayed, kept, path_figures
from bench.suite import Case
from sm100_sim.timing.machine_constants import load
from sm100_sim.timing.problem import TileCosts

MACHINE = load()
IDEAL = [TileCosts(0.0, 0.0, 1.0)]
VALUES = [MACHINE.values()._replace(launch_us=0.0, power_tflops=1e9, hbm_terabytes=1e9)]
FULL, CAUSAL = Shape(2, 4096, 8, 2, False), Shape(2, 4096, 8, 2, True)


def forward():
    return Kernel("ideal", 256, 256, 2, "static", VALUES, IDEAL)


def backward(order):
    return Backward("ideal", 256, order, VALUES, lambda which: IDEAL)


OURS, THEIRS = Order("static", True, True, 256), Order("single", False, False, 128)


def test_flop_by_convention():
    assert FULL.flop(256) == 4 * 4096**2 * 256 * 16
    assert FULL.flop(256, "backward") == 2.5 * FULL.flop(256)
    assert CAUSAL.flop(256) == FULL.flop(256) / 2


def test_ideal_full_attention_takes_its_tensor_core_time():
    found = forward().run(Shape(1, 4096, 74, 74, False))[0]
    steps = 4096 // 256 * 74 * 4096 // 128 / 74
    assert found.clocks == steps * 2048 and found.balance == 1.0


@pytest.mark.parametrize("order", [OURS, THEIRS])
def test_backward_tiles_add_up_to_all_products(order):
    """Three products of dQ and four of dK and dV, whatever the order and the splits."""
    pairs = FULL.batch * FULL.heads
    units = (FULL.seqlen // 256) * (FULL.seqlen // 128) * pairs
    found = backward(order)
    dq = sum(tile.work for tile in found._dq_tiles(FULL))
    assert dq == DQ * units
    for splits in (1, 2, 4):
        tiles = found._dkdv_tiles(FULL, splits)
        assert sum(tile.work for tile in tiles) == DKDV * units
        assert len(tiles) == FULL.batch * FULL.heads_kv * splits * (FULL.seqlen // 128)


def test_where_ds_is_kept_a_product_of_dq_is_left():
    """And dS is written once and read once, by tiles of their own."""
    found, units = backward(OURS), 16 * 32 * FULL.batch * FULL.heads
    dq, dkdv = found._dq_tiles(FULL, keeps=True), found._dkdv_tiles(FULL, 1, keeps=True)
    assert sum(tile.work for tile in dq) == DQ_PRODUCT * units
    assert sum(tile.work for tile in dkdv) == DKDV * units
    anew = found._dkdv_tiles(FULL, 1)
    assert sum(k.own_bytes - a.own_bytes for k, a in zip(dkdv, anew)) == DS * units
    assert sum(tile.own_bytes for tile in dq) == DS * units + 2 * 256 * 2 * 4096 * 8


@pytest.mark.parametrize(("ds_bytes", "heads"), [(0, 0), (1 << 28, 1), (1 << 30, 2)])
def test_heads_of_a_kept_ds(ds_bytes, heads):
    """FULL's dS of one KV head, 4 query heads and both sequences, takes 256 MiB."""
    costs = {"kept dq": 1.0, "kept dkdv": 1.0, "kept dkdv partial": 1.0, "dq": 2.0, "dkdv": 2.0}
    found = Backward(
        "ideal", 256, OURS, VALUES, lambda which: [TileCosts(0.0, 0.0, costs[which])], ds_bytes
    )
    assert found.plan(FULL).ds_heads == heads
    whole = backward(OURS).seconds(FULL)
    if heads:
        # 5 products of 7, and no tile takes longer than before.
        assert found.seconds(FULL) < whole
    else:
        assert found.seconds(FULL) > whole


def test_causal_backward_starts_at_the_diagonal():
    tiles = backward(OURS)._dkdv_tiles(CAUSAL, 1)
    # Keys 0..255 are seen by all 16 units of the 4 heads of a group, the last keys by one.
    works = sorted({tile.work / DKDV / 4 for tile in tiles})
    assert works == list(range(1, 17))
    finer = backward(THEIRS)._dkdv_tiles(CAUSAL, 1)
    assert min(tile.work for tile in finer) == DKDV * 4 / 2
    # dQ sees two tiles of keys for every block of queries up to its own.
    assert sorted({t.work / DQ for t in backward(OURS)._dq_tiles(CAUSAL)}) == [
        2.0 * (i + 1) for i in range(16)
    ]


def test_few_kv_heads_are_split_and_pay_for_it():
    few = Shape(1, 1024, 16, 1, False)
    ours, theirs = backward(OURS), backward(THEIRS)
    assert ours.plan(few).splits == 8 and theirs.plan(few).splits == 1
    assert ours.run(few)["dkdv"][0].clocks < theirs.run(few)["dkdv"][0].clocks / 4
    slow = [VALUES[0]._replace(hbm_terabytes=0.001)]
    split = Backward("ideal", 256, OURS, slow, lambda which: IDEAL)
    assert split._beside(few, 8, slow[0]) > 2 * split._beside(few, 1, slow[0])


@pytest.mark.parametrize(
    ("case", "ds_bytes", "expected"),
    [
        # 16 tiles of each KV head; dS of one takes 4 heads x 2048^2 x 2 bytes.
        (Case("a", ((2048, 2048),), 8, 2, False), 0, BackwardPlan(2, 0)),
        (Case("a", ((2048, 2048),), 8, 2, False), 1 << 26, BackwardPlan(2, 2)),
        (Case("a", ((2048, 2048),), 8, 2, False), 1 << 25, BackwardPlan(4, 1)),
        # Packed: at most 100 // 128 + 2 tiles of keys; queries of dS in whole units of the longest.
        (Case("a", ((40, 40), (60, 60)), 4, 1, True, packed=True), 0, BackwardPlan(4, 0)),
        (Case("a", ((40, 40), (60, 60)), 4, 1, True, packed=True), 2 * 4 * 60 * 256 * 2,
         BackwardPlan(4, 1)),
        (Case("a", ((40, 40), (60, 60)), 4, 1, True, packed=True), 2 * 4 * 60 * 256 * 2 - 1,
         BackwardPlan(4, 0)),
    ],
)  # fmt: skip
def test_the_plan_of_a_backward_is_the_operators(case, ds_bytes, expected):
    assert plan(case, ds_bytes, 74) == expected


def test_seconds_include_every_launch():
    values = [VALUES[0]._replace(launch_us=1000.0)]
    found = Backward("ideal", 256, THEIRS, values, lambda which: IDEAL)
    slower = found.seconds(FULL) - backward(THEIRS).seconds(FULL)
    assert slower == pytest.approx([3e-3])


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
    found = backward(OURS)
    found.paths.update({"dq": Paths(1, 2), "dkdv": Paths(0, 5), "kept dq": Paths(9, 9)})
    assert found.paths_of(FULL) == Paths(1, 7)


def test_costs_of_each_draw():
    rows = [Replayed(1, 1000.0, (1600.0, 1700.0)), Replayed(1, 2000.0, (2700.0, 2900.0))]
    costs = modelled.fitted(rows, "single")
    assert np.allclose([(c.each, c.rate) for c in costs], [(500.0, 1.1), (500.0, 1.2)])


def test_refusals():
    with pytest.raises(ValueError, match="'forward' and 'backward'"):
        modelled.our_kernel(False, direction="sideways")
