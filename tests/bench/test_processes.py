"""Work on several processes, with one line about what is left."""

import pytest

from bench.processes import each


@pytest.mark.parametrize("jobs", [1, 2])
def test_parts_that_are_left(jobs, monkeypatch, capfd):
    monkeypatch.setenv("FA4_HD256_PROGRESS", "1")
    assert each(abs, [-1, -2, -3], jobs) == [1, 2, 3]
    assert "replaying and simulating" in capfd.readouterr().err
    monkeypatch.setenv("FA4_HD256_PROGRESS", "0")
    assert each(abs, [-1], 1) == [1] and capfd.readouterr() == ("", "")
