"""Standing of ours: the best of several peers, sample by sample, with the model's own error."""

import numpy as np
import pytest

from bench.tables.comparison import OURS, Standing, standing, verdict

TIMES = {OURS: np.array([1.0, 1.0]), "a": np.array([1.2, 0.9]), "b": np.array([1.1, 1.1])}


def test_the_fastest_peer_of_each_sample_counts():
    found = standing(TIMES)
    assert isinstance(found, Standing)
    # On average a takes the least; in the first sample b is faster.
    assert found.peer == "a"
    assert found.probability == 0.5
    assert found.gain == pytest.approx(np.sqrt(1.1 * 0.9) - 1)
    assert verdict(found) == "open"


def test_the_error_of_a_ratio_takes_certainty_away():
    times = {OURS: np.ones(4), "a": np.full(4, 1.02)}
    sure, doubtful = standing(times), standing(times, error=0.02)
    assert sure.probability == 1.0 and verdict(sure) == OURS
    # ln 1.02 is 0.99 standard deviations.
    assert doubtful.probability == pytest.approx(0.839, abs=1e-3) and verdict(doubtful) == "open"
    behind = standing({OURS: np.ones(4), "a": np.full(4, 0.9)}, error=0.02)
    assert behind.probability < 1e-6 and verdict(behind) == "a"


def test_equal_times_are_half_a_win():
    assert standing({OURS: np.ones(2), "a": np.ones(2)}).probability == 0.5


@pytest.mark.parametrize("missing", [OURS, "a"])
def test_there_is_no_standing_of_one(missing):
    times = {OURS: np.ones(2), "a": np.ones(2), "PyTorch math": np.ones(2)}
    del times[missing]
    assert standing(times) is None and verdict(None) is None
