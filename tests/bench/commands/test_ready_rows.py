"""Long commands print each row as it is ready, on a pipe too, where no bar is drawn."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch
from printed_rows import noting, rows_in

from bench.__main__ import main
from bench.commands import ex2_sweep, training
from bench.measure.exp2 import SEQLENS, Times
from bench.measure.training import Run


@pytest.fixture
def seen(monkeypatch, capfd):
    return noting(monkeypatch, capfd)


def test_training(monkeypatch, seen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runs = seen(Run([3.0, 2.0], 5.0) for _ in range(4))
    monkeypatch.setattr(training.training, "train", lambda *given, **more: next(runs))
    assert main(["training", "--steps", "2", "--seed", "1", "--seed", "2"]) == 0
    assert [rows_in(text) for text in seen.before] == [0, 1, 2, 3]
    assert "| 1 " in seen.before[1] and training.REFERENCE in seen.before[1]


def test_ex2_sweep(seen):
    def timed(patterns, causal):
        jobs = [(pattern, name) for pattern in patterns for name in SEQLENS]
        yield from seen((job, Times(np.full(3, 1e-3), "MMA", 9.0)) for job in jobs)

    grid = {"freq": [4], "res": [2, 4], "start": [0], "degree": [3]}
    arguments = Namespace(mask="causal", all_fragments=False, e4m3=False, **grid)
    origin = {"gpu": "B200", "basis": "measured", "machine": "a GPU"}
    assert len(ex2_sweep.swept(arguments, timed, origin)) == 9
    assert len(seen.before) == 9
    assert [rows_in(text) for text in seen.before] == list(range(9))
    assert "hardware" in seen.before[1] and "causal" in seen.before[1]
    headings = ("out, relative L2", "time (ms)", "low (ms)", "rate (TFLOPS)", "over hardware")
    assert all(f"| {heading} |" in seen.before[1] for heading in headings)
