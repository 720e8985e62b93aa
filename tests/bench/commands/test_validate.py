"""The validation tables, without replays."""

import io
from dataclasses import dataclass

import numpy as np
import pytest

from bench.commands import validate
from bench.model import flash_attn_4 as theirs
from bench.model import ours, published, validation
from bench.model.replays import Replayed
from bench.model.samples import forward_work
from bench.suite import BACKWARD
from bench.tables.results import draw
from sm100_sim.timing import load


def test_instructions_are_no_validation():
    table = validate.instructions(load())
    assert {row["role"] for row in table.rows} == {published.BUILT_FROM} and len(table.rows) == 24
    for row in table.rows:
        assert abs(row["latency_modelled"] - row["latency_published"]) <= 4


@dataclass(frozen=True)
class Known:
    """A kernel of a known rate, in proportion to the clock."""

    values: list

    def tflops(self, problem):
        return np.array([1400.0, 1350.0, 1450.0]) * self.values[0].clock_ghz / 1.85


@pytest.fixture
def tables(monkeypatch):
    known = Known([load().values()])
    for direction in ("forward", "backward"):
        monkeypatch.setattr(theirs.FlashAttention4, direction, lambda *arguments: known)
    monkeypatch.setattr(validation, "gemm_seconds", lambda size, machine: np.full(3, 1e-3))
    return validate.rates("b200")


def test_errors_and_roles_of_published_rates(tables):
    table = tables[0]
    assert len(table.rows) == 1 + len(published.PUBLISHED)
    gemm, first = table.rows[:2]
    assert gemm["modelled"] == pytest.approx(2 * 8192**3 / 1e-3 / 1e12)
    assert first["error"] == pytest.approx(1400 / 1534.8 - 1)
    assert (first["low"], first["high"]) == (1350.0, 1450.0)
    assert all(row["source"] for table in tables for row in table.rows)
    fitted = [row for row in table.rows if row["role"] == published.FITTED]
    assert [row["case"] for row in fitted] == ["attention 256, full, 1x32768"]
    drawn = io.BytesIO()
    draw([validate.instructions(load()), *tables], drawn, "svg")
    assert drawn.getvalue().count(b"<svg")
    errors = sorted(abs(r["error"]) for r in table.rows if r["role"] == published.VALIDATION)
    assert f"median error {np.median(errors):.0%}" in table.notes[0]


def test_a_locked_clock_is_modelled_at_that_clock(tables):
    _, forward, backward = tables
    assert (len(forward.rows), len(backward.rows)) == (40, 24)
    for row in forward.rows + backward.rows:
        assert row["clock"] in (1.755, 1.965) and row["role"] == published.VALIDATION
        assert row["modelled"] == pytest.approx(1400 * row["clock"] / 1.85)
        assert row["error"] == pytest.approx(row["modelled"] / row["published"] - 1)


def test_replays_outside_the_fit_are_predicted_from_those_inside(monkeypatch):
    """Clocks that follow the form exactly are predicted exactly; ours here takes 2 % longer."""

    def replays(samples, single, extra=1.0):
        found = []
        for sample in samples:
            tiles = forward_work(sample)
            tiles = [max(tiles)] if single else tiles
            work, masked = (sum(column) for column in zip(*tiles))
            clocks = (0 if single else 8000) + 1700 * len(tiles) + 1.05 * work + 0.2 * masked
            found.append(Replayed(len(tiles), work, (clocks * extra,), 0, 0, masked))
        return found

    def of_ours(variant, machine, draws):
        if variant.kernel != "forward":
            assert variant.use_clc and variant.kind.window and variant.kernel.startswith("kept ")
        outside = variant.samples is not None
        return replays(variant.chosen_samples(), False, 1.02 if outside else 1.0)

    def of_theirs(variant, machine, draws, samples=None):
        return replays(samples or variant.samples(), True)

    monkeypatch.setattr(ours, "replays", of_ours)
    monkeypatch.setattr(theirs, "replays", of_theirs)
    rows = validate.held_out(load()).rows
    backward_names = ["ours, dK/dV, dS stored"] * 2 + ["ours, dQ from stored dS"] * 2
    assert [row["kernel"] for row in rows] == ["ours"] * 3 + ["flash-attn-4"] * 3 + backward_names
    errors = [row["error"] for row in rows]
    assert errors == pytest.approx([1 / 1.02 - 1] * 3 + [0.0] * 3 + [1 / 1.02 - 1] * 4)
    assert [row["masked"] for row in rows[3:6]] == [4, 4, 4]


def test_published_shapes_have_as_many_tokens_as_their_listing():
    assert all(row.batch * row.seqlen == 32768 for row in published.PUBLISHED)
    for row in published.PUBLISHED_256 + published.PUBLISHED_BACKWARD:
        assert row.batch * row.seqlen == (32768 if row.clock_ghz == 1.965 else 131072)


@pytest.mark.parametrize(
    ("seqlen", "rate", "milliseconds"),
    [(4096, 850, 51.77), (131072, 906, 1553.84)],
)
def test_the_shapes_of_the_backward_listing_give_its_times(seqlen, rate, milliseconds):
    """The listing has both; the batch and the count of FLOP follow from them."""
    row = next(r for r in published.PUBLISHED_BACKWARD if r.seqlen == seqlen)
    assert row.tflops == rate
    assert row.problem.flop(BACKWARD) / (rate * 1e9) == pytest.approx(milliseconds, rel=2e-3)
