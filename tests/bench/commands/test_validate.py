"""The validation tables, without replays."""

import io
from dataclasses import dataclass

import numpy as np
import pytest

from bench.commands import validate
from bench.model import flash_attn_4 as theirs
from bench.model import ours, validation
from bench.model.published import flash_attention, nvidia
from bench.model.published.rows import (
    AS_PUBLISHED,
    BUILT_FROM,
    BURST,
    FIT,
    FROST,
    HOST_BOUND,
    SUSTAINED,
    TEST,
    Published,
)
from bench.model.replays import Replayed
from bench.model.samples import forward_work
from bench.tables.results import draw
from sm100_sim.timing import load


def test_instructions_are_no_validation():
    table = validate.instructions(load())
    assert {row["role"] for row in table.rows} == {BUILT_FROM} and len(table.rows) == 24
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


def test_errors_of_published_rates(tables):
    table = tables[0]
    assert len(table.rows) == 1 + len(flash_attention.FORWARD_128)
    gemm, first = table.rows[:2]
    assert gemm["modelled"] == pytest.approx(2 * 8192**3 / 1e-3 / 1e12)
    assert first["error"] == pytest.approx(1400 / 1534.8 - 1)
    assert (first["low"], first["high"]) == (1350.0, 1450.0)
    assert all(row["source"] for table in tables for row in table.rows)
    assert {row["role"] for row in table.rows} == {AS_PUBLISHED}
    drawn = io.BytesIO()
    draw([validate.instructions(load()), *tables], drawn, "svg")
    assert drawn.getvalue().count(b"<svg")
    errors = sorted(abs(r["error"]) for r in table.rows)
    assert f"median error {np.median(errors):.0%}" in table.notes[0]


def test_a_locked_clock_is_modelled_at_that_clock(tables):
    _, forward, backward = tables
    for row in forward.rows + backward.rows:
        assert row["clock"] in (1.755, 1.965)
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


EVERY = (
    *flash_attention.FORWARD_256, *flash_attention.BACKWARD_256, *flash_attention.FORWARD_128,
    *nvidia.TRAINING, *nvidia.INFERENCE, *nvidia.DECODE, *nvidia.FROST_BACKWARD,
    *nvidia.CUDNN_BACKWARD,
)  # fmt: skip


def test_every_row_says_of_what_it_is():
    for row in EVERY:
        assert row.source and row.gpu in ("B200", "GB200", "GB300", "H200") and row.clock.evidence
        assert row.role in (FIT, TEST, AS_PUBLISHED)
        # A rate of a kernel that nobody named validates nothing.
        assert row.build.version or row.role == AS_PUBLISHED
    assert len({(row.build, row.gpu, row.case, row.direction, row.source) for row in EVERY}) == len(
        EVERY
    )


def test_both_halves_hold_every_kernel():
    for rows in (flash_attention.FORWARD_256, flash_attention.BACKWARD_256, nvidia.TRAINING):
        for build in {row.build for row in rows if row.role != AS_PUBLISHED}:
            assert {row.role for row in rows if row.build == build} == {FIT, TEST}


def _one(rows: tuple[Published, ...], **fields) -> Published:
    (found,) = (r for r in rows if all(getattr(r, k) == v for k, v in fields.items()))
    return found


@pytest.mark.parametrize(
    ("seqlen", "rate", "milliseconds"),
    [(4096, 850, 51.77), (131072, 906, 1553.84)],
)
def test_the_shapes_of_the_backward_listing_give_its_times(seqlen, rate, milliseconds):
    """The listing has both; the batch and the count of FLOP follow from them."""
    row = _one(flash_attention.BACKWARD_256, seqlen=seqlen, causal=False, heads=(32, 32))
    assert row.tflops == rate
    assert row.seconds * 1e3 == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.parametrize(
    ("gpu", "seqlen", "milliseconds"),
    [("GB200", 2048, 0.069), ("GB200", 32768, 10.013), ("GB300", 16384, 2.144)],
)
def test_the_shapes_of_nvidias_tables_give_their_times(gpu, seqlen, milliseconds):
    row = _one(nvidia.TRAINING, build=nvidia.FROST_1_31, gpu=gpu, seqlen=seqlen)
    assert row.seconds * 1e3 == pytest.approx(milliseconds, rel=8e-3)


def test_rates_of_nvidias_times_are_theirs():
    row = _one(nvidia.INFERENCE, build=nvidia.FROST_SEPTEMBER, seqlen=8192, heads=(32, 2))
    assert row.tflops == pytest.approx(1577.437, rel=1e-4)
    # Keys of a chunk are not divided by two there.
    rows = [r for r in nvidia.INFERENCE if r.build.project == FROST and r.gpu == "GB300"]
    row = _one(tuple(rows), seqlen=512, keys=131072, heads=(16, 1))
    assert 2 * row.tflops == pytest.approx(1870.748, rel=1e-4)
    assert dict(row.build.options)["SPLIT_KV"] == 2


def test_load_before_a_call_says_what_is_sustained():
    """PR 2454: causal 64k follows 76 ms of load and is not slowed, full 64k 157 ms and is."""
    rows = [r for r in flash_attention.FORWARD_256 if r.build == flash_attention.PR_2454]
    causal, full = (_one(tuple(rows), seqlen=65536, causal=causal) for causal in (True, False))
    assert causal.load_before == pytest.approx(0.076, abs=1e-3) and causal.kind == BURST
    assert full.load_before == pytest.approx(0.157, abs=1e-3) and full.kind == SUSTAINED
    assert _one(tuple(rows), seqlen=1024, causal=True).kind == HOST_BOUND
