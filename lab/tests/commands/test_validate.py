"""The validation tables, without replays."""

import io
from dataclasses import dataclass

import numpy as np
import pytest

from bench.suite import FORWARD
from bench.tables.results import draw
from lab.commands import validate
from lab.model import predictor
from lab.published import ROWS, flash_attention, nvidia
from lab.published.rows import (
    AS_PUBLISHED,
    BURST,
    FIT,
    FROST,
    HOST_BOUND,
    SUSTAINED,
    TEST,
    Build,
    Published,
)
from lab.validation import validation
from lab.whole.conditions import Call
from sm100_sim.timing import load

#: Excess speed of the tests' model at the machine's own clock, by commit.
EXCESS = {"3c015f1a": 1.10, "e122e67c": 1.05}
#: Beside that, in rows of the half of the test.
TEST_EXCESS = 1.02


@dataclass(frozen=True)
class Known:
    """A kernel that is too fast by a known factor, and proportional to the clock."""

    build: Build
    values: list

    def calls(self, case):
        """Return calls of the central constants, and of others by which they take a tenth
        longer."""
        rows = flash_attention.FORWARD_256
        (row,) = (r for r in rows if (r.build, r.problem) == (self.build, case))
        factor = EXCESS[self.build.version] * (TEST_EXCESS if row.role == TEST else 1.0)
        share = load().values().clock_ghz / self.values[0].clock_ghz
        return [
            Call((), row.seconds * share / factor * drawn)
            for drawn, _ in zip((1.0, 1.1), self.values)
        ]


@dataclass(frozen=True)
class Provider:
    """Knows one build."""

    build: Build

    @property
    def name(self):
        return str(self.build)

    def replays(self, build):
        return build == self.build

    def refuses(self, case, direction):
        return None

    def variant(self, case, direction, use_clc=False, divided=False):
        return case.causal

    def forward(self, variant, machine, draws):
        return Known(self.build, [machine.values()] * 2)


@pytest.fixture
def found(monkeypatch):
    """PR 2454's rows; nothing else can be replayed."""
    known = (flash_attention.PR_2454_BASE, flash_attention.PR_2454)
    monkeypatch.setattr(predictor, "PROVIDERS", {})
    monkeypatch.setattr(predictor, "HISTORY", tuple(Provider(build) for build in known))
    monkeypatch.setattr(validation, "_kernels", {})
    return validation.judged(ROWS, ["b200"])


def test_only_rows_whose_kernel_is_replayed_are_judged(found):
    assert len(found) == 36
    assert {one.row.build.version for one in found} == set(EXCESS)
    others = validate.as_published().rows
    assert len(others) == len(ROWS) - 36
    assert not {row["kernel"] for row in others} & {str(one.row.build) for one in found}


def test_host_bound_and_sustained_rows_are_shown_and_not_counted(found):
    counted = [one for one in found if one.counts]
    assert {one.row.kind for one in counted} == {BURST}
    assert {one.row.kind for one in found} == {BURST, SUSTAINED, HOST_BOUND}
    assert max(one.row.seqlen for one in counted) == 32768
    assert len(validate.rates(found, FORWARD).rows) == 36


def test_the_clock_is_fitted_to_one_half_and_tested_on_the_other(found):
    (row,) = validate.clocks(found).rows
    assert row["session"] == "B200, flash-attention at 1965 MHz"
    # The mean of both commits' excess, which the rows of the fit alone have.
    excess = np.sqrt(1.10 * 1.05)
    assert row["clock"] == pytest.approx(load().values().clock_ghz / excess)
    assert row["fit_rms"] == pytest.approx(np.sqrt(1.10 / 1.05) - 1, rel=0.02)
    assert row["test_mean"] == pytest.approx(TEST_EXCESS - 1, rel=0.05)
    assert row["fit_rows"] + row["test_rows"] == sum(one.counts for one in found)


def test_a_host_bound_row_takes_at_least_the_hosts_time(found):
    host_bound = [one for one in found if one.row.kind == HOST_BOUND]
    assert len(host_bound) == 6
    assert min(one.seconds[0] for one in host_bound) == 0.39e-3


def test_errors_are_of_rates_at_both_clocks(found):
    one = next(o for o in found if o.counts and o.row.role == FIT and o.row.build.version[0] == "3")
    assert one.error == pytest.approx(0.10)
    assert one.tflops == pytest.approx(1.10 * one.row.tflops)
    assert one.error_fitted == pytest.approx(1.10 / np.sqrt(1.10 * 1.05) - 1)
    shown = next(r for r in validate.rates(found, FORWARD).rows if r["case"] == one.row.case)
    assert shown["low"] == pytest.approx(shown["modelled"] / 1.1) and shown["high"] == one.tflops


def test_ratios_are_of_two_builds_in_one_session(found):
    table = validate.ratios(found)
    assert len(table.rows) == 18
    for row in table.rows:
        assert (row["kernel"], row["over"]) == (
            "flash-attention e122e67c",
            "flash-attention 3c015f1a",
        )
        if row["kind"] != HOST_BOUND:
            assert row["modelled"] == pytest.approx(row["published"] * 1.05 / 1.10)
    counted = [row["error"] for row in table.rows if row["counts"]]
    assert f"{len(counted)}, {validation.rms(counted):.1f} points rms" in table.notes[0]


def test_aims_say_how_many_rows_miss_them_and_which_is_the_worst(found):
    by_aim = {row["aim"]: row for row in validate.aims(found).rows}
    own = by_aim["rows at 1k to 32k within 10 %, rms 5 %, at the machine's clock"]
    assert not own["holds"] and own["worst"].startswith("+12.2%: flash-attention 3c015f1a")
    assert own["rows"] == sum(one.counts for one in found)
    assert by_aim["the same at fitted clocks"]["holds"]
    # Without a row nothing holds.
    assert not by_aim["its backward within 10 %, at the clock of that GPU"]["holds"]
    assert by_aim["its backward within 10 %, at the clock of that GPU"]["rows"] == 0


def test_classes_hold_every_row_once(found):
    rows = validate.classes(found).rows
    assert sum(row["rows"] for row in rows) == len(found)
    (row,) = (r for r in rows if (r["mask"], r["lengths"], r["kind"]) == ("full", "4k-32k", BURST))
    assert row["rows"] == 8 and row["worst"] == pytest.approx(1.10 * 1.02 - 1)


def test_tables_can_be_drawn(found):
    drawn = io.BytesIO()
    draw([validate.rates(found, FORWARD)], drawn, "svg")
    assert b"<svg" in drawn.getvalue()


def test_a_step_by_difference_of_two_chunks(found):
    """cuDNN: 64 tiles of 512 more steps in 671.55 us on a B200."""
    rows = validate.steps(found).rows
    cudnn = [r for r in rows if r["kernel"] == "cuDNN 9.27.0" and r["gpu"] == "B200"]
    (row,) = (r for r in cudnn if (r["heads"], r["queries"]) == ("32/2", 512))
    assert row["tiles"] == 64 and row["modelled"] is None
    assert row["published"] == pytest.approx((1332.280 - 660.730) / 512)
    # Keys in four parts: a quarter of the steps in each.
    frost = [r for r in rows if r["kernel"].startswith(FROST) and r["gpu"] == "B200"]
    (row,) = (r for r in frost if (r["heads"], r["queries"]) == ("8/1", 512))
    assert row["tiles"] == 64
    assert row["published"] == pytest.approx((357.118 - 194.848) / 128)


def test_every_row_says_of_what_it_is():
    for row in ROWS:
        assert row.source and row.gpu in ("B200", "GB200", "GB300", "H200") and row.clock.evidence
        assert row.role in (FIT, TEST, AS_PUBLISHED)
        # A rate of a kernel that nobody named validates nothing.
        assert row.build.version or row.role == AS_PUBLISHED
    assert len({(row.build, row.gpu, row.case, row.direction, row.source) for row in ROWS}) == len(
        ROWS
    )


def test_both_halves_hold_every_kernel():
    for rows in (flash_attention.FORWARD_256, flash_attention.BACKWARD_256, nvidia.TRAINING):
        for build in {row.build for row in rows if row.role != AS_PUBLISHED}:
            assert {row.role for row in rows if row.build == build} == {FIT, TEST}


def _one(rows: tuple[Published, ...], **fields) -> Published:
    (found,) = (r for r in rows if all(getattr(r, k) == v for k, v in fields.items()))
    return found


@pytest.mark.parametrize(
    ("seqlen", "rate", "milliseconds"), [(4096, 850, 51.77), (131072, 906, 1553.84)]
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
    # All keys of a chunk are counted there, not those that a query sees.
    rows = [r for r in nvidia.INFERENCE if r.build.project == FROST and r.gpu == "GB300"]
    row = _one(tuple(rows), seqlen=512, keys=131072, heads=(16, 1))
    assert row.tflops * 131072 / (131072 - 511 / 2) == pytest.approx(1870.748, rel=1e-4)
    assert dict(row.build.options)["SPLIT_KV"] == 2


def test_load_before_a_call_says_what_is_sustained():
    """PR 2454: causal 64k follows 76 ms of load and is not slowed, full 64k 157 ms and is."""
    rows = [r for r in flash_attention.FORWARD_256 if r.build == flash_attention.PR_2454]
    causal, full = (_one(tuple(rows), seqlen=65536, causal=causal) for causal in (True, False))
    assert causal.load_before == pytest.approx(0.076, abs=1e-3) and causal.kind == BURST
    assert full.load_before == pytest.approx(0.157, abs=1e-3) and full.kind == SUSTAINED
    assert _one(tuple(rows), seqlen=1024, causal=True).kind == HOST_BOUND


def test_clocks_of_the_profiled_rows():
    """15.34 million full, 8.51 causal; no more than a tensor core needs and six per cent."""
    full, causal = (row.seconds * row.clock.ghz * 1e9 for row in nvidia.PROFILED)
    assert (full / 1e6, causal / 1e6) == pytest.approx((15.341, 8.506), abs=1e-3)
    tiles_of_a_pair = 2 * 128 * 32 / 74
    assert 64 * 2048 < full / tiles_of_a_pair < 64 * 2048 * 1.06
