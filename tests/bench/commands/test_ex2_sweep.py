"""The sweep of exp2 mixes: its grid, its errors, its choice."""

import pytest
from printed_rows import HALF, times

from bench.commands import ex2_sweep
from bench.commands.ex2_sweep import Error
from bench.measure import exp2 as measured
from fa4_hd256.kernels.blackwell import tuning
from fa4_hd256.kernels.blackwell.architecture import tuned
from fa4_hd256.kernels.blackwell.forward.config import TILES, ForwardConfig
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, POLYNOMIAL_ONLY, Ex2Pattern

pytest.importorskip("cutlass")


def test_errors_follow_the_polynomial():
    hardware, coarse, fine = (
        measured.error_of(p)
        for p in (HARDWARE_ONLY, Ex2Pattern(2, 2, degree=2), Ex2Pattern(2, 2, degree=3))
    )
    assert hardware.exp2 < 1e-6 < fine.exp2 <= 8.7e-5 < coarse.exp2 < 2.1e-3
    # bf16 keeps 8 bits of P, which hides degree 3 but not degree 2.
    assert hardware.out == pytest.approx(fine.out, rel=0.02)
    assert 1.05 * hardware.out < coarse.out < 3e-3


@pytest.mark.parametrize(("half", "chosen"), [(0.97, HARDWARE_ONLY), (0.90, HALF)])
def test_less_than_five_per_cent_is_not_ranked(half, chosen, tmp_path):
    # The mix is the more accurate one by chance of rounding, which says nothing.
    errors = {HARDWARE_ONLY: Error(4e-7, 1.001e-3), HALF: Error(8.6e-5, 1e-3)}
    origin = {"gpu": "B200", "basis": "modelled", "machine": "try"}
    rows = ex2_sweep.rows_of(times(1.0, half), errors, True, origin)
    best = ex2_sweep.entries(rows)
    assert [entry.pattern for entry in best] == [chosen] * 3
    table = tmp_path / "tuning.json"
    tuning.write(best, table)
    assert tuning.pattern_for(True, 100_000, "B200", table) == chosen
    assert tuning.pattern_for(False, 100_000, "B200", table) == HARDWARE_ONLY, "no entry"
    assert tuning.pattern_for(True, 100_000, "B300", table) == HARDWARE_ONLY
    other = tuning.TunedPattern("B200", True, "long", POLYNOMIAL_ONLY, "measured", "try")
    tuning.write([other], table)
    assert tuning.pattern_for(True, 16385, "B200", table) == POLYNOMIAL_ONLY
    assert tuning.pattern_for(True, 16384, "B200", table) == chosen


def test_a_gain_of_some_draws_only_leaves_the_default():
    found = times(1.0, 0.9)
    for name in measured.SEQLENS:
        found[HALF, name].seconds[2] = 1.1
    errors = {HARDWARE_ONLY: Error(4e-7, 1e-3), HALF: Error(8.6e-5, 1e-3)}
    rows = ex2_sweep.rows_of(found, errors, True, {"gpu": "B200", "basis": "modelled",
                                                   "machine": "try"})  # fmt: skip
    assert [entry.pattern for entry in ex2_sweep.entries(rows)] == [HARDWARE_ONLY] * 3


def test_measured_ranges_that_overlap_are_not_ranked():
    """Median, p20 and p80: fast runs of hardware alone are as fast as slow ones of the mix."""
    errors = {HARDWARE_ONLY: Error(4e-7, 1e-3), HALF: Error(8.6e-5, 1e-3)}
    for slowest, chosen in ((0.97, HARDWARE_ONLY), (0.92, HALF)):
        found = times(1.0, 0.9)
        for name in measured.SEQLENS:
            found[HARDWARE_ONLY, name].seconds[:] = 1.0, 0.95, 1.02
            found[HALF, name].seconds[:] = 0.9, 0.89, slowest
        rows = ex2_sweep.rows_of(found, errors, True, {"gpu": "B200", "basis": "measured",
                                                       "machine": "try"})  # fmt: skip
        assert [entry.pattern for entry in ex2_sweep.entries(rows)] == [chosen] * 3


def test_what_is_no_tuning_table_is_refused(tmp_path):
    wrong = tmp_path / "wrong.json"
    for text in ("[]", '{"exp2": [{"gpu": "B200"}]}', "{"):
        wrong.write_text(text)
        tuning.read.cache_clear()
        with pytest.raises(ValueError, match="not a tuning table"):
            tuning.read(wrong)


def test_the_default_configuration_reads_the_table(monkeypatch):
    """The table that is shipped is readable, and what it says is what a call gets."""
    for causal in (False, True):
        for seqlen in (1, 4096, 1 << 20):
            expected = tuning.pattern_for(causal, seqlen, "B200")
            assert tuned(TILES, causal, seqlen, "B200", False).ex2_pattern == expected
    monkeypatch.setattr(tuning, "pattern_for", lambda causal, seqlen_k, gpu, **_: HALF)
    assert tuned(TILES, True, 5, "B200", False) == ForwardConfig(ex2_pattern=HALF)
