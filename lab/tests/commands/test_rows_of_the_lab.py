"""Long commands of the lab print each row as it is ready, on a pipe too, where no bar is drawn."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch
from printed_rows import noting, rows_in

from lab.__main__ import main
from lab.commands import calibrate, parallel, ranks, validate
from lab.measure.rank_processes import ONE_GPU
from lab.model import predictor
from lab.published import flash_attention
from lab.validation import calibrate as model_calibrate
from lab.validation import validation


@pytest.fixture
def seen(monkeypatch, capfd):
    return noting(monkeypatch, capfd)


@pytest.mark.parametrize("command", [parallel, ranks], ids=["parallel", "ranks"])
def test_ranks_of_processes(command, monkeypatch, seen):
    def each_job(function, jobs, count):
        yield from seen((job, "no GPU" if job[-1] == "FSDP2" else (20.0,)) for job in jobs)

    monkeypatch.setattr(command, "each_job", each_job)
    monkeypatch.setattr(command, "rank_count", lambda asked, name: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    main([command.__name__.rpartition(".")[2]])
    assert len(seen.before) > 8
    assert [rows_in(text) for text in seen.before] == list(range(len(seen.before)))
    assert ONE_GPU in seen.before[1] and "20.00" in seen.before[1]


def test_validate(monkeypatch, seen):
    """Each rate at the machine's clock when its kernel is replayed, before clocks are fitted."""
    rows = [row for row in flash_attention.FORWARD_256 if row.machine == "b200"][:4]
    kernel = type("Kernel", (), {"values": [validate.load().values()]})()
    replays = seen(kernel for _ in rows)
    monkeypatch.setattr(validation, "_kernel", lambda row, draws: next(replays))
    monkeypatch.setattr(validation, "replayable", lambda row: predictor)
    monkeypatch.setattr(validation, "_seconds", lambda kernel, row, clock: np.array([row.seconds]))
    assert len(validation.judged(rows, ["b200"])) == 4
    assert [rows_in(text) for text in seen.before] == [0, 1, 2, 3]
    assert str(rows[0].build) in seen.before[1] and "+0.0%" in seen.before[1]


def test_calibrate(monkeypatch, seen):
    """A row for each round, the first lot's before the next one is proposed."""
    numbers = seen(range(3))

    def log_seconds(chosen, sets, jobs):
        next(numbers)
        return np.zeros((len(sets), len(chosen)))

    arguments = Namespace(lot=4, rounds=2, seed=0, jobs=1)
    monkeypatch.setattr(model_calibrate, "log_seconds", log_seconds)
    monkeypatch.setattr(calibrate, "effects", lambda chosen, ranges, jobs: np.ones(len(ranges)))
    monkeypatch.setattr(model_calibrate.Population, "proposed", lambda self, *_: self.places[:4])
    rows = [row for row in flash_attention.FORWARD_256 if row.machine == "b200"][:4]
    chosen = [model_calibrate.Case(row, lambda machine: []) for row in rows]
    population, _ = calibrate.search(chosen, arguments)
    assert len(population.places) == 12
    assert [rows_in(text) for text in seen.before] == [0, 1, 2]
    assert "sets replayed" in seen.before[1] and "| 8 " not in seen.before[1]
