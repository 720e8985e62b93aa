"""`lab contention`: what a row says, from tiles whose times are known."""

from types import SimpleNamespace

import pytest

from bench.suite import FORWARD, Case
from lab.commands import contention
from lab.model.forward import Kernel
from lab.model.tiles import ForwardTiling
from lab.paths import Paths
from lab.whole.problem import TileCosts
from sm100_sim.timing import load

MACHINE = load("b200")
#: 37 heads of 1024 queries: 148 tiles, two for each of 74 CTA pairs.
CASE = Case("dense", ((1024, 1024),), 37, 37, False)


def kernel(use_clc: bool) -> Kernel:
    """Every tile takes a million clocks, so that neither HBM nor power binds."""
    return Kernel(
        "ours", ForwardTiling("dynamic" if use_clc else "static"), [MACHINE.values()],
        [TileCosts(begin=0.0, each=1e6, rate=0.0)], paths=Paths(0, int(use_clc)),
    )  # fmt: skip


@pytest.fixture
def rows():
    predictor = SimpleNamespace(
        machine=MACHINE, forward=lambda provider, case, use_clc: kernel(use_clc)
    )
    found = list(contention.modelled_rows(CASE, predictor, FORWARD, (1, 37)))
    contention.table(found)
    return found


def test_a_static_grid_that_does_not_fit_takes_twice_as_long(rows):
    for row in rows:
        assert row["full grid"] == pytest.approx(2.0, rel=0.02)


def test_what_is_left_shares_the_tiles(rows):
    """73 pairs take three rounds for two, 37 take four."""
    for row, rounds in zip(rows, (3, 4), strict=True):
        for name in ("fitted grid", "CLC"):
            assert row[name] == pytest.approx(rounds / 2, rel=0.02)


def test_what_a_row_rests_on(rows):
    assert [row["held"] for row in rows] == [1, 37]
    assert rows[0]["ambiguous"] == "0 / 1" and rows[0]["basis"] == "modelled"
