"""Tiles over a machine: costs, waves, balance, traffic, bounds."""

import numpy as np
import pytest

from lab.whole.problem import Sample, Tile, TileCosts, fit, hbm_bytes, schedule
from sm100_sim.timing import load

VALUES = load().values()._replace(sms=8, launch_us=0.0, cta_reuse=0.0)
COSTS = TileCosts(begin=100.0, each=50.0, rate=1.0)


def test_fit_recovers_costs():
    true = TileCosts(4000.0, 1800.0, 1.04)
    samples = [
        Sample(n, w, true.begin + n * true.each + true.rate * w)
        for n, w in ((1, 4096), (2, 8192), (2, 30000), (8, 40000))
    ]
    found = fit(samples, single=False)
    assert found == pytest.approx(true) or np.allclose(
        [found.begin, found.each, found.rate], [true.begin, true.each, true.rate]
    )


def test_fit_needs_variety():
    with pytest.raises(ValueError, match="do not determine"):
        fit([Sample(1, 100, 200), Sample(1, 200, 300)], single=False)


def test_fit_single_counts_everything_as_the_tile():
    found = fit([Sample(1, 1000, 6000), Sample(1, 2000, 7100)], single=True)
    assert found.begin == 0 and found.each == pytest.approx(4900)
    assert found.rate == pytest.approx(1.1)


@pytest.mark.parametrize("single", [False, True])
def test_no_tile_is_faster_than_the_tensor_core(single):
    """Short tiles that overlap: 8,000 clocks more than their work, 6,000 more if longer."""
    tiles = (1, 1, 1, 1) if single else (1, 2, 4, 4)
    works = (2048, 6144, 12288, 20480)
    samples = [
        Sample(n, work, work + more)
        for n, work, more in zip(tiles, works, (8000, 8000, 8000, 6000), strict=True)
    ]
    found = fit(samples, single)
    assert found.rate == 1.0 and found.each >= 0
    assert found.of(Tile(100000.0)) >= 100000
    for one in samples:
        whole = found.begin + one.tiles * found.each + found.rate * one.work
        assert whole == pytest.approx(one.clocks, rel=0.1)


@pytest.mark.parametrize("single", [False, True])
def test_masked_work_has_a_cost_of_its_own(single):
    true = TileCosts(0.0 if single else 8000.0, 1700.0, 1.05, 0.2)
    samples = [
        Sample(n, work, true.begin + n * true.each + true.rate * work + true.mask * masked, masked)
        for n, work, masked in ((1, 4096, 4096), (1 + (not single), 12288, 9000), (1, 40000, 8000),
                                (1 if single else 8, 60000, 8000))
    ]  # fmt: skip
    found = fit(samples, single)
    costs = (found.begin, found.each, found.rate, found.mask)
    assert np.allclose(costs, (true.begin, true.each, true.rate, true.mask))
    assert found.of(Tile(1000.0, masked=500.0)) == pytest.approx(1700 + 1050 + 100)


def test_one_wave_and_one_tile_more():
    """Four clusters of two: four tiles take as long as one, five as long as two."""
    tiles = [Tile(1000.0)] * 5
    one = schedule(tiles[:4], COSTS, VALUES, 2, "static")
    two = schedule(tiles, COSTS, VALUES, 2, "static")
    assert one.clocks == 1150 and two.clocks == 2200
    assert one.balance == pytest.approx(1.0) and two.balance < 0.65


@pytest.mark.parametrize("policy", ["dynamic", "single"])
def test_longest_first_balances_what_static_does_not(policy):
    works = sorted((100.0 * (i + 1) for i in range(12)), reverse=True)
    tiles = [Tile(w) for w in works]
    static = schedule(tiles, COSTS, VALUES, 2, "static").clocks
    other = schedule(tiles, COSTS, VALUES, 2, policy).clocks
    assert other < static
    total = sum(COSTS.of(t) for t in tiles) + 4 * COSTS.begin
    assert other >= total / 4


@pytest.mark.parametrize(("policy", "each"), [("static", 70), ("dynamic", 70), ("single", 1270)])
def test_empty_tiles_cost_what_was_replayed(policy, each):
    """Three waves of them before the only tile with work, whatever the policy itself takes."""
    values = VALUES._replace(clc_query=300.0, cta_reuse=1200.0)
    costs = TileCosts(begin=100.0, each=50.0, rate=1.0, empty=70.0)
    found = schedule([Tile(0.0)] * 12 + [Tile(1000.0)], costs, values, 2, policy)
    assert found.clocks == 3 * each + 1150


def test_skipped_tiles_cost_little_but_keep_their_places():
    """Tiles past the end of short sequences: static clusters pass them, CLC requests each."""
    values = VALUES._replace(clc_query=300.0)
    tiles = [Tile(1000.0), Tile(0.0), Tile(0.0), Tile(0.0)] * 2
    static = schedule(tiles, COSTS, values, 2, "static")
    assert static.clocks == 2200, "both tiles fall to the first cluster"
    dynamic = schedule(tiles, COSTS, values, 2, "dynamic")
    assert dynamic.clocks == 2200, "the first cluster has claimed the second at its beginning"
    fewer = schedule(tiles[:3] + tiles[4:], COSTS, values, 2, "dynamic")
    assert fewer.clocks == 1150 + 300, "the second is in the first wave, an empty one is claimed"
    assert hbm_bytes(tiles, static.starts, values) == 0


def test_short_tiles_follow_each_other_no_faster_than_their_chain():
    """The first two tiles of 60 clocks of a cluster are in flight at once, each other one ends 400
    after the one before; long ones do not show it, and in a mixture the short ones do."""
    costs, one = TileCosts(1000.0, 50.0, 1.0, least=400.0), VALUES._replace(sms=2)

    def clocks(*work):
        return schedule([Tile(w) for w in work], costs, one, 2, "static").clocks

    def linear(*work):
        plain = TileCosts(1000.0, 50.0, 1.0)
        return schedule([Tile(w) for w in work], plain, one, 2, "static").clocks

    assert clocks(10.0) == linear(10.0) == 1060
    assert clocks(*[10.0] * 2) == linear(*[10.0] * 2) == 1120
    assert clocks(*[10.0] * 10) == 1120 + 8 * 400
    assert clocks(*[350.0] * 10) == linear(*[350.0] * 10)
    assert clocks(*[1000.0, 10.0] * 10) == linear(*[1000.0, 10.0] * 10) + (20 - 2) / 2 * 340
    skipped = schedule([Tile(10.0), Tile(0.0), Tile(10.0)], costs, one, 2, "static")
    assert skipped.clocks == 1120


def test_reuse_of_a_cta_costs():
    tiles = [Tile(1000.0)] * 8
    with_reuse = schedule(tiles, COSTS, VALUES._replace(cta_reuse=1200.0), 2, "single")
    without = schedule(tiles, COSTS, VALUES, 2, "single")
    assert with_reuse.clocks == without.clocks + 1200


def test_groups_that_fit_are_read_once():
    group = 10e6
    tiles = [Tile(1.0, g, group, 1e3) for g in range(4) for _ in range(5)]
    starts = np.arange(len(tiles), dtype=float)
    assert hbm_bytes(tiles, starts, VALUES) == 4 * group + len(tiles) * 1e3


def test_groups_in_turn_that_do_not_fit_are_read_again():
    group = 40e6
    tiles = [Tile(1.0, g, group) for _ in range(3) for g in range(4)]
    starts = np.arange(len(tiles), dtype=float)
    assert hbm_bytes(tiles, starts, VALUES) == len(tiles) * group


def test_a_tile_brings_in_what_it_sees_and_l2_lacks():
    """Two groups, one kept by L2, whole tiles and half ones; tiles of one that is kept, the
    shortest first."""
    starts = np.arange(4.0)
    turns = [Tile(1.0, g, size) for size in (80e6, 40e6) for g in range(2)]
    assert hbm_bytes(turns, starts, VALUES) == 2 * (80e6 + 40e6)
    growing = [Tile(1.0, 0, size) for size in (10e6, 30e6, 20e6, 40e6)]
    assert hbm_bytes(growing, starts, VALUES) == 40e6


def test_bounds():
    tiles = [Tile(1000.0, own_bytes=1e9)] * 4
    found = schedule(tiles, COSTS, VALUES, 2, "static")
    assert found.bound == "HBM"
    assert found.seconds == pytest.approx(4e9 / (VALUES.hbm_terabytes * 1e12))


def test_refusals():
    with pytest.raises(ValueError, match="static, dynamic, single"):
        schedule([Tile(1.0)], COSTS, VALUES, 2, "random")
    with pytest.raises(ValueError, match="without a tile"):
        schedule([], COSTS, VALUES, 2, "static")


def test_equal_tiles_fall_apart_as_on_the_gpu():
    """132 SMs of an H200 run freely over tiles of 64 KiB and 16,000 clocks of work: clocks of a
    load above those of one alone, by tile. The first two have cold TLBs besides, which the model
    lacks."""
    measured = np.array([3389, 3057, 2397, 1960, 2057, 1861, 1737, 1782]) - 1763
    values = load("h200").values()._replace(l2_terabytes=1e3, hbm_terabytes=4.59)
    size, count, each = 65536, 24, 16000 + 1763
    tiles = [Tile(1.0, own_bytes=size, reads=size)] * (132 * count)
    found = schedule(tiles, TileCosts(0.0, each, 0.0), values, 1, "static")
    waits = np.median(np.diff(found.starts.reshape(count, 132), axis=0) - each, axis=1)
    assert waits[2:10].sum() == pytest.approx(measured.sum(), rel=0.35)
    assert waits[8:].max() < 100
    shared_alike = values._replace(uneven_shares=0.0)
    even = schedule(tiles, TileCosts(0.0, each, 0.0), shared_alike, 1, "static")
    assert even.clocks > 1.1 * found.clocks, "with equal shares they never do"
