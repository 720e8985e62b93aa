"""`python -m bench accuracy` on two cases; the whole table is a matter of minutes."""

import json
from dataclasses import replace

import pytest
import torch

from bench.__main__ import main
from bench.commands import accuracy as measured
from fa4_hd256.run import execute
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, POLYNOMIAL_ONLY, Ex2Pattern

pytestmark = pytest.mark.simulator
pytest.importorskip("cutlass")

# Two steps of keys, so that rows are rescaled or not; the second one ends early.
SHAPE = measured.Shape(40, 200)


#: A polynomial that is too coarse to hide in the rounding of fp16.
COARSE = Ex2Pattern(2, 2, 0, last_fragment_hardware=False, degree=2)
HARDWARE_CASE, COARSE_CASE = (
    measured.Case(pattern, torch.float16, SHAPE) for pattern in (HARDWARE_ONLY, COARSE)
)


@pytest.mark.sampled
def test_errors_and_shares():
    results = hardware, coarse = list(map(measured.measure, (HARDWARE_CASE, COARSE_CASE)))
    assert (hardware.executed_share, coarse.executed_share) == (0.0, 1.0)
    for result in results:
        assert result.comparison.lse_max_error < 2.1e-3, "degree 2: 2.054e-3 relative"
    assert hardware.comparison.max_error <= hardware.comparison.tolerance
    assert coarse.comparison.rel_l2 > 1.5 * hardware.comparison.rel_l2
    assert coarse.comparison.lse_max_error > 100 * hardware.comparison.lse_max_error


@pytest.mark.sampled
def test_another_share_than_the_pattern_says_is_an_error(monkeypatch):
    compile_kernel = execute.compile_kernel

    def compile_another(spec):
        return compile_kernel(replace(spec, config=measured.ForwardConfig()))

    monkeypatch.setattr(execute, "compile_kernel", compile_another)
    with pytest.raises(RuntimeError, match="0.0000% of the score elements were emulated"):
        measured.measure(measured.Case(POLYNOMIAL_ONLY, torch.float16, SHAPE))


def test_forms(monkeypatch, capsys):
    hardware = measured.measure(HARDWARE_CASE)
    coarser = replace(hardware.comparison, max_error=2 * hardware.comparison.max_error)
    results = [hardware, measured.Accuracy(COARSE_CASE, 1.0, coarser)]
    monkeypatch.setattr(measured, "stream", lambda measure, cases, jobs: results)
    assert main(["accuracy", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    rows = table["rows"]
    assert [row["degree"] for row in rows] == [None, 2]
    assert [row["true_share"] for row in rows] == [0.0, 1.0]
    assert rows[1]["max_error"] == results[1].comparison.max_error
    assert main(["accuracy", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in lines[-1].split("|")]
    assert cells[1:5] == ["float16", "2", "100.00%", "2, 2"]
    assert len(lines) == 6
