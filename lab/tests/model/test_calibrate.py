"""Calibration: sets are recovered from rates that a known one made, one that rates contradict is
refused. No kernel is replayed: seconds are a formula of two constants."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lab.__main__ import main
from lab.published.rows import FIT, TEST, Build, Clock, Protocol, Published
from lab.validation import calibrate
from lab.validation.calibrate import Case, Judge, Population, constants_at, spread
from sm100_sim.timing import Values, load, machine_constants

RANGES = {"tmem_load": (60.0, 420.0), "tmem_store": (40.0, 400.0), "clc_query": (300.0, 2000.0)}
TRUE = {"tmem_load": 120.0, "tmem_store": 200.0, "clc_query": 1000.0}
LIMIT = 1.0
#: The share of the highest clock that the GPU of the rows has had.
SHARE = calibrate.LOADED_CLOCK["B200"] / calibrate.HIGHEST_CLOCK["B200"]


def log_clocks(row, constants):
    """Return the clocks of three kernels: bound by loads, by stores, by neither; a longer row has
    less of a start."""
    load, store = constants["tmem_load"], constants["tmem_store"]
    step = {"a": 1500 + 4 * load, "b": 1500 + 4 * store, "c": 2048}[row.build.version]
    return math.log(step * row.seqlen**2 + 5e8)


def published(version, seqlen, constants=TRUE, share=SHARE, role=None):
    row = Published(
        Build("a project", version), "B200", True, 1, seqlen, (32, 2), 1.0, "a page", role=FIT,
        clock=Clock(1.965, "locked"), protocol=Protocol("CUPTI", 0, 10), lab="a lab",
    )  # fmt: skip
    role = role or (FIT if seqlen in (2048, 8192) else TEST)
    seconds = math.exp(log_clocks(row, constants)) * 1e-15 / share
    return replace(row, role=role, tflops=row.tflops * row.seconds / seconds)


@pytest.fixture
def chosen(monkeypatch):
    """Cases whose rates the true constants made, at the clock that load leaves; their seconds."""
    lengths = (2048, 4096, 8192, 16384)
    found = [Case(published(v, s), lambda machine: []) for v in "abc" for s in lengths]
    monkeypatch.setattr(
        calibrate, "log_seconds",
        lambda cases, sets, jobs=1: np.array([
            [log_clocks(case.row, {**TRUE, **one}) + math.log(1e-15) for case in cases]
            for one in sets
        ]),
    )  # fmt: skip
    return found


def test_the_set_that_made_the_rates_has_no_error(chosen):
    judge = Judge(chosen)
    verdict = judge(calibrate.log_seconds(chosen, [TRUE])[0])
    assert verdict.error < 1e-6
    assert verdict.clocks["B200, a lab"] == pytest.approx(calibrate.LOADED_CLOCK["B200"])
    assert len(judge.pairs) == 12


@pytest.mark.parametrize(
    "wrong", [{"tmem_load": 250.0}, {"tmem_store": 60.0}, {"tmem_load": 60.0, "tmem_store": 400.0}]
)
def test_a_set_that_rates_contradict_is_refused(chosen, wrong):
    """Whatever the clock, ratios of two kernels are off."""
    judge = Judge(chosen)
    assert judge(calibrate.log_seconds(chosen, [{**TRUE, **wrong}])[0]).error > 2


def test_sets_are_recovered(chosen):
    judge, generator = Judge(chosen), np.random.default_rng(0)
    population = Population(RANGES, len(chosen), np.array([True, True, False]))
    population.add(spread(24, RANGES, seed=0), chosen)
    first = (judge.errors(population.seconds) < LIMIT).sum()
    for _ in range(4):
        population.add(population.proposed(judge, 24, generator), chosen)
    errors = judge.errors(population.seconds)
    accepted = [constants_at(population.places[n], RANGES) for n in np.flatnonzero(errors < LIMIT)]
    # More than half of the rounds' sets are plausible, few of the first lot.
    assert first < 4 and len(accepted) > 48
    for name, least, most in (("tmem_load", 100, 140), ("tmem_store", 175, 225)):
        values = [one[name] for one in accepted]
        assert min(values) < TRUE[name] < max(values)
        assert least < np.median(values) < most, name
    # Constants that no rate depends on keep their range.
    untold = np.array([one["clc_query"] for one in accepted])
    assert untold.min() < 500 and untold.max() > 1500


def test_what_rates_follow(chosen):
    """Rates follow two of the three constants."""
    found = calibrate.effects(chosen, RANGES)
    assert (found >= calibrate.FOLLOWED).tolist() == [True, True, False]


def test_the_clock_is_fitted_on_one_half_alone(chosen):
    """A test row that is off moves no clock."""
    judge = Judge(chosen)
    seconds = calibrate.log_seconds(chosen, [TRUE])[0]
    clock = judge(seconds).clocks
    assert judge(np.where(judge.fit, seconds, seconds + 0.3)).clocks == clock
    assert judge(np.where(judge.fit, seconds + 0.3, seconds)).clocks != clock


def test_a_clock_above_the_highest_is_no_excuse(chosen):
    judge = Judge(chosen)
    slow = calibrate.log_seconds(chosen, [TRUE])[0] - math.log(SHARE) + 0.1
    verdict = judge(slow)
    assert verdict.clocks["B200, a lab"] == pytest.approx(calibrate.HIGHEST_CLOCK["B200"])
    assert verdict.rows == pytest.approx(0.1)


def test_places_are_spread_over_the_ranges():
    places = spread(10, RANGES, seed=3)
    assert (np.sort(places, axis=0) * 10 // 1 == np.arange(10)[:, None]).all()
    low, high = (constants_at(np.full(3, end), RANGES) for end in (0.0, 1.0))
    assert {name: (low[name], high[name]) for name in RANGES} == RANGES
    middle = constants_at(np.full(3, 0.5), RANGES)["tmem_store"]
    assert middle == pytest.approx(math.sqrt(40 * 400), rel=1e-3)


def test_a_kernel_that_is_not_there_is_named():
    row = published("a", 8192)
    with pytest.raises(ValueError, match="rates of a project a count.*lab peers"):
        calibrate.cases([row], lambda row: None)
    assert calibrate.cases([replace(row, host_bound=True)], lambda row: None) == []


def test_sets_that_are_kept_lie_in_the_ranges():
    """Each set names uncertain constants, and the central values are among the accepted ones."""
    machine = load("b200")
    assert machine.sets is not None and len(machine.sets) >= 16
    for one in machine.sets:
        assert {"tmem_load", "tmem_store", "clock_ghz"} <= set(one)
        for name, value in one.items():
            constant = machine.constants[name]
            assert constant.low <= value * 1.0001 and value <= constant.high * 1.0001, name
    # Draws of one machine differ from those of another in what the machines differ in.
    first = {name: load(name).sampled(1)[1] for name in ("gb200", "gb300")}
    unlike = {n for n, a, b in zip(Values._fields, *first.values()) if a != b}
    assert unlike == {"mufu_interval", "clock_ghz", "power_watts", "hbm_terabytes"}


def test_machine_sets_and_too_many_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_constants, "SETS", tmp_path)
    one = {"error": 1.0, "clock_ghz": {"gb200": 1.88},
           "constants": {"tmem_load": 99.0, "mufu_interval": 5.0}}  # fmt: skip
    (tmp_path / "blackwell.json").write_text(json.dumps({"sets": [one]}))
    central, drawn = load("gb200").sampled(1)
    assert central == load("gb200").values()
    assert drawn == central._replace(tmem_load=99.0, mufu_interval=5.0, clock_ghz=1.88)
    # A machine keeps its own constants.
    assert load("gb300").sampled(1)[1].mufu_interval == load("gb300").values().mufu_interval
    assert load("h200").sets is None and len(load("h200").sampled(3)) == 4
    with pytest.raises(ValueError, match="2 draws of the constants of b200; 1 sets are known"):
        load("b200").sampled(2)


@pytest.mark.parametrize("option", ["--sets", "--lot", "--rounds"])
def test_numbers_that_make_no_search_are_refused(option, capsys):
    assert main(["calibrate", option, "-1"]) == 2
    assert f"{option} -1" in capsys.readouterr().err


def test_lots_come_back_in_the_order_of_the_sets(monkeypatch):
    """Three processes' lots of seven sets, each set's seconds in its own row."""
    lots = []

    def each(function, items, jobs):
        lots.extend(items)
        return [np.array([[one["a"], len(chosen)] for one in sets]) for chosen, sets in items]

    monkeypatch.setattr(calibrate, "each", each)
    cases = [Case(published("a", 2048), lambda machine: [])] * 2
    found = calibrate.log_seconds(cases, [{"a": float(n)} for n in range(7)], jobs=3)
    assert found.tolist() == [[float(n), 2.0] for n in range(7)]
    assert sorted(len(sets) for _, sets in lots) == [2, 2, 3]
