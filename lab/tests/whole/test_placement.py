"""Tiles over places: own bytes of tiles that start together; the compiled run against others."""

import numpy as np
import pytest

from lab.whole.problem import Late, Tile, TileCosts, schedule
from sm100_sim.timing import load

#: Four clusters of two CTAs; HBM gives 100 bytes per clock, a cluster takes as many.
VALUES = load().values()._replace(
    sms=8, launch_us=0.0, cta_reuse=0.0, clock_ghz=1.0, hbm_terabytes=0.1,
    l2_bytes_per_clock_sm=50.0, l2_terabytes=1e3, uneven_shares=0.0,
)  # fmt: skip
COSTS = TileCosts(begin=100.0, each=50.0, rate=1.0)
CLOCKS = 1050


def tile(work=1000.0, reads=0.0, writes=0.0):
    return Tile(work, own_bytes=reads + writes, reads=reads, writes=writes)


def run(tiles, policy="static", **options):
    return schedule(tiles, COSTS, VALUES, 2, policy, **options)


def test_reading_alone_is_what_the_replay_has():
    assert run([tile(reads=1000.0)]).clocks == 100 + CLOCKS


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_equal_tiles_that_start_together_share_hbm(policy):
    """4000 bytes take 40 clocks, 10 of them in each tile's own costs; in every wave, as long as all
    get equal shares."""
    found = run([tile(reads=1000.0)] * 12, policy)
    assert found.clocks == pytest.approx(100 + 3 * (CLOCKS + 30))
    assert found.balance == pytest.approx(1.0)


def test_uneven_shares_end_the_lockstep():
    """The first wave waits as long as with equal ones, each later one less."""
    values = VALUES._replace(uneven_shares=0.3)
    found = schedule([tile(reads=1000.0)] * 40, COSTS, values, 2, "static")
    waits = np.diff(found.starts.reshape(10, 4), axis=0) - CLOCKS
    waits[0] -= COSTS.begin
    assert waits[0].mean() == pytest.approx(30, rel=0.2)
    sums = waits.sum(axis=1)
    assert np.all(np.diff(sums) < 1e-6) and sums[-1] < sums[0] / 4


def test_half_of_the_machine_waits_half():
    assert run([tile(reads=1000.0)] * 2).clocks == pytest.approx(100 + CLOCKS + 10)


def test_tiles_that_start_apart_do_not_wait():
    """First tiles end 100 clocks from one another, ten times what a reading takes."""
    first = [tile(1000.0 + 100 * i) for i in range(4)]
    found = run([*first, *[tile(reads=1000.0)] * 4], "dynamic", claims=0)
    assert found.clocks == 100 + 1350 + CLOCKS


def test_what_tiles_leave_behind_is_in_the_way_of_the_next():
    """A wave's results and the next wave's operands: 8000 bytes."""
    found = run([tile(reads=1000.0, writes=1000.0)] * 8)
    assert found.clocks == pytest.approx(100 + CLOCKS + 30 + CLOCKS + 70)
    # Nobody waits for the last results.
    assert run([tile(writes=1000.0)] * 4).clocks == 100 + CLOCKS


def sharing(nbytes):
    """Three waves of tiles that read own bytes, and so many that no other has either."""
    return [Tile(1000.0, i, nbytes, own_bytes=1000.0, reads=1000.0) for i in range(12)]


def test_own_bytes_get_what_shared_ones_leave():
    """Half of HBM: 80 clocks a wave for 4000 bytes instead of 40, 10 of them in a tile's costs."""
    clocks = 100 + 3 * (CLOCKS + 70)
    found = run(sharing(50.0 * clocks / 12))
    assert found.clocks == pytest.approx(clocks, rel=2e-3)
    assert found.bound == "clusters"
    # A thousandth of HBM leaves no wait.
    assert run(sharing(0.1 * clocks / 12)).clocks == run(sharing(0.0)).clocks


def test_the_more_is_shared_the_longer_it_takes():
    """No longer than the tiles alone and then all of HBM's bytes."""
    alone = run(sharing(0.0)).clocks
    found = [run(sharing(nbytes)) for nbytes in np.geomspace(1e2, 1e8, 25)]
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds) and alone * 1e-9 <= seconds[0] < seconds[-1] / 1000
    assert all(one.clocks <= alone + one.hbm_bytes / 100 for one in found)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_operands_asked_for_a_tile_ahead_cost_the_first_wave_alone(policy):
    tiles = [tile(reads=1000.0, writes=1000.0)] * 12
    found = run(tiles, policy, prefetches=True)
    assert found.clocks == pytest.approx(100 + 30 + 3 * CLOCKS)


def test_tiles_shorter_than_their_reading_go_at_its_pace():
    """100 clocks of reading, the first in what a cluster costs once, and 60 of work."""
    values = VALUES._replace(sms=2)
    costs = TileCosts(begin=100.0, each=0.0, rate=1.0)
    tiles = [tile(60.0, reads=10000.0)] * 3
    found = schedule(tiles, costs, values, 2, "static", prefetches=True)
    assert found.clocks == pytest.approx(3 * 100 + 60)


def test_one_tile_a_cluster_asks_for_nothing_ahead():
    with pytest.raises(ValueError, match="cannot ask"):
        run([tile()], "single", prefetches=True)


def test_a_tile_claimed_ahead_waits_for_the_one_before_it():
    """Longest first: whoever has the longest has claimed another before the others end."""
    works = (4000.0, 1000.0, 1000.0, 1000.0, 900.0, 800.0, 700.0, 600.0)
    values = VALUES._replace(clc_query=10.0)
    runs = [
        schedule([tile(w) for w in works], COSTS, values, 2, "dynamic", claims=n) for n in (0, 1)
    ]
    late, ahead = (found.cluster_of.tolist() for found in runs)
    assert late.count(0) == 1 and ahead == [0, 1, 2, 3, 0, 1, 2, 3]
    assert runs[0].clocks == 100 + 4050 and runs[1].clocks == runs[0].clocks + 950


def test_two_claimed_ahead_go_round_by_round():
    values = VALUES._replace(clc_query=10.0)
    tiles = [tile(w) for w in (4000.0, *[500.0] * 12)]
    found = schedule(tiles, COSTS, values, 2, "dynamic", claims=2)
    assert found.cluster_of[:12].tolist() == [0, 1, 2, 3] * 3
    assert sorted(found.starts[found.cluster_of == 0].tolist()) == [0, 4150, 4700]
    # Nothing is lost or done twice where tiles are few, or pass at once.
    for count in range(1, 14):
        one = schedule(tiles[:count], COSTS, values, 2, "dynamic", claims=2)
        assert one.busy.sum() == pytest.approx(
            sum(COSTS.of(t) for t in tiles[:count]) + 100 * min(count, 4)
        )
    empty = schedule([Tile(0.0)] * 9 + tiles[:3], COSTS, values, 2, "dynamic", claims=2)
    assert empty.busy.sum() == pytest.approx(
        9 * 10 + 4050 + 2 * 550 + 100 * len(set(empty.cluster_of[9:].tolist()))
    )


def test_a_tile_claimed_late_goes_to_who_is_done_first():
    """Placement equals that without claims, but for a claim in the last clocks of a tile that
    another ends in."""
    works = (4000.0, 1000.0, 1000.0, 1000.0, 900.0, 800.0, 700.0, 600.0)
    late, none, early = (
        schedule([tile(w) for w in works], COSTS, VALUES, 2, "dynamic", claims=claims)
        for claims in (Late(300.0), 0, Late(1e6))
    )
    assert late.cluster_of.tolist() == none.cluster_of.tolist()
    assert late.clocks == none.clocks < early.clocks
    # 300 clocks before its end the first has claimed what another would do at once.
    works = (1000.0, 1200.0, 1200.0, 1200.0, 500.0, 4000.0)
    one, other = (
        schedule([tile(w) for w in works], COSTS, VALUES, 2, "dynamic", claims=Late(work))
        for work in (100.0, 600.0)
    )
    assert one.cluster_of.tolist()[:5] == other.cluster_of.tolist()[:5] == [0, 1, 2, 3, 0]
    assert (one.cluster_of[5], other.cluster_of[5]) == (1, 1)


def test_a_tile_claimed_late_asks_for_its_operands_then():
    """Each of four takes 40 clocks to read; requested 100 before the end, they are there; 20
    before, half of them are."""
    tiles = [tile(reads=1000.0)] * 8
    for lead, wait in ((100.0, 0), (20.0, 20)):
        found = schedule(tiles, COSTS, VALUES, 2, "dynamic", prefetches=True, claims=Late(lead))
        assert found.clocks == pytest.approx(100 + 30 + 2 * CLOCKS + wait)


@pytest.mark.parametrize(("policy", "claims"), [("static", 1), ("single", 1), ("dynamic", 3)])
def test_claims_that_there_are_not(policy, claims):
    with pytest.raises(ValueError, match="claimed ahead"):
        run([tile()], policy, claims=claims)
