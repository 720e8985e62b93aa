"""Time as it is measured: bursts and load."""

import math

import pytest

from lab.whole.conditions import BURST, SUSTAINED, Call
from lab.whole.problem import Tile, TileCosts, schedule
from sm100_sim.timing import load

VALUES = load().values()._replace(
    sms=2, launch_us=0.0, clock_ghz=1.0, power_watts=1000.0, static_watts=200.0, load_ms=100.0,
    energy_exponent=1.0,
)  # fmt: skip


def call(values=VALUES, beside=0.0, own_bytes=0.0):
    """A millisecond of a pair's tensor cores at full rate: 2 x 8192 FLOP per clock."""
    tiles = [Tile(1e6, own_bytes=own_bytes)]
    found = schedule(tiles, TileCosts(0.0, 0.0, 1.0), values, 2, "static")
    return Call([(1, found)], beside)


def joules(watts, values=VALUES):
    """The constants where the tensor cores of a call at the nominal clock take that many watts."""
    flop = 2 * 8192 * 1e9
    return values._replace(mma_picojoules=watts / flop * 1e12)


def test_flop_are_those_of_all_ctas():
    assert call().flop == 2 * 8192 * 1e6


def test_what_the_budget_allows_keeps_the_clock():
    light = joules(800.0)
    assert call().clock_share(light) == 1.0
    assert call().seconds(light, SUSTAINED) == call().seconds(light) == 1e-3


@pytest.mark.parametrize(
    ("exponent", "share"), [(0.0, 0.5), (1.0, math.sqrt(0.5)), (2.0, 0.5 ** (1 / 3))]
)
def test_the_clock_gives_way_until_the_budget_holds(exponent, share):
    """1600 watts beside 200 of 1000: half as much, of a product of rate and energy."""
    heavy = joules(1600.0)._replace(energy_exponent=exponent)
    assert call().clock_share(heavy) == pytest.approx(share, abs=1e-8)
    assert call().seconds(heavy, SUSTAINED) == pytest.approx(1e-3 / share)
    assert call().seconds(heavy, BURST) == 1e-3


def test_a_kernel_that_wastes_less_runs_slower_clocks_and_is_still_faster():
    """No constant rate: of two kernels of the same work under load the better one stays ahead."""
    heavy = joules(1600.0)
    good, bad = call(), Call([(1, schedule([Tile(1e6)], TileCosts(0.0, 2e5, 1.0), VALUES, 2,
                                           "static"))])  # fmt: skip
    assert good.clock_share(heavy) < bad.clock_share(heavy) < 1.0
    ratio = bad.seconds(heavy, SUSTAINED) / good.seconds(heavy, SUSTAINED)
    assert ratio == pytest.approx(math.sqrt(1.2), rel=1e-6) and 1.0 < ratio < 1.2


def test_neither_memory_nor_what_stands_beside_follows_the_clock():
    heavy = joules(1600.0)
    slow = call(own_bytes=4e-3 * VALUES.hbm_terabytes * 1e12)
    assert slow.seconds(heavy, SUSTAINED) == pytest.approx(4e-3)
    share = call(beside=1e-3).clock_share(heavy)
    assert share == 1.0, "half of the time at 1600 watts is within the budget"
    assert call(beside=5e-4).seconds(heavy, SUSTAINED) == pytest.approx(
        5e-4 + 1e-3 / call(beside=5e-4).clock_share(heavy)
    )


def test_a_call_before_the_load_has_worked_is_as_in_a_burst():
    """After 100 ms of load; one that begins half a millisecond before is half of either."""
    heavy, one = joules(1600.0), call()
    late = one.seconds(heavy, SUSTAINED)
    assert one.seconds(heavy, 0.099) == 1e-3
    assert one.seconds(heavy, 0.0995) == pytest.approx((1e-3 + late) / 2)
    assert one.seconds(heavy, 0.1) == pytest.approx(late)
