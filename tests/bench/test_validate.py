"""The validation tables, without replays."""

import numpy as np
import pytest

from bench import modelled, validate
from sm100_sim.timing.machine_constants import load


def test_instructions_are_no_validation():
    table = validate.instructions(load())
    assert {row["role"] for row in table.rows} == {validate.BUILT_FROM} and len(table.rows) == 24
    for row in table.rows:
        assert abs(row["latency_modelled"] - row["latency_published"]) <= 4


class Known:
    """A kernel of a known rate."""

    def tflops(self, shape):
        return np.array([1400.0, 1350.0, 1450.0])


def test_errors_and_roles_of_published_rates(monkeypatch):
    monkeypatch.setattr(modelled, "their_kernel", lambda *arguments: Known())
    monkeypatch.setattr(validate, "gemm_seconds", lambda size, machine: np.full(3, 1e-3))
    table = validate.rates("b200")
    assert len(table.rows) == 1 + len(validate.PUBLISHED)
    gemm, first = table.rows[:2]
    assert gemm["modelled"] == pytest.approx(2 * 8192**3 / 1e-3 / 1e12)
    assert first["error"] == pytest.approx(1400 / 1534.8 - 1)
    assert (first["low"], first["high"]) == (1350.0, 1450.0)
    assert all(row["source"] for row in table.rows)
    fitted = [row for row in table.rows if row["role"] == validate.FITTED]
    assert [row["case"] for row in fitted] == ["attention 256, full, 1x32768"]
    errors = sorted(abs(r["error"]) for r in table.rows if r["role"] == validate.VALIDATION)
    assert f"median error {np.median(errors):.0%}" in table.notes[0]


def test_published_shapes_have_32k_tokens():
    assert all(row.batch * row.seqlen == 32768 for row in validate.PUBLISHED)
