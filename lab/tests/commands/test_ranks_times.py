"""`lab ranks` without a GPU: what it times, and its tables of given times."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from bench.suite import BACKWARD, FORWARD
from bench.tables.comparison import OURS
from lab.__main__ import main
from lab.commands import parallel
from lab.commands import ranks as command
from lab.measure import rank_processes
from lab.measure.rank_processes import ONE_GPU
from lab.measure.ranks import KERNELS, RING, TRANSFERS, WAITS, WAYS

CASE = command.CASES[0]


def _tables(found):
    row = CASE, FORWARD
    return command.tables({(row, way): times for way, times in found.items()}, 2, "2 x GPU")


def test_rates_are_of_a_gpu_and_over_one():
    first, hidden = _tables({ONE_GPU: (40.0, 41.0, 60.0), RING: (20.0, 25.0, 20.5)})
    one, ring = first.rows
    assert one["tflops"] == pytest.approx(CASE.flop(FORWARD) / 41e9)
    assert ring["tflops"] == pytest.approx(CASE.flop(FORWARD) / 2 / 20.5e9)
    assert (ring["speedup"], ring["efficiency"]) == (2.0, 1.0)
    assert one["speedup"] is None and not hidden.rows


@pytest.mark.parametrize(("waits", "hidden"), [(0.5, 0.75), (0.0, 1.0), (2.5, 0.0)])
def test_hidden_is_what_kernels_do_not_wait_for(waits, hidden):
    first, second = _tables({RING: (21.0,), KERNELS: (20.0,), TRANSFERS: (2.0,), WAITS: (waits,)})
    assert second.rows[0]["hidden"] == hidden
    assert [row["tflops"] for row in first.rows][1:] == [None] * 3


def test_a_way_that_failed_says_why():
    first, _ = _tables({ONE_GPU: (40.0,), RING: "RuntimeError: no"})
    assert [row["status"] for row in first.rows] == ["ok", "RuntimeError: no"]


def test_flop_are_of_visible_pairs():
    full, causal = (command.RanksCase(4, 2, 1, causal) for causal in (False, True))
    assert (full.flop(FORWARD), causal.flop(FORWARD)) == (4 * 256 * 2 * 16, 4 * 256 * 2 * 10)
    assert full.flop(BACKWARD) == 2.5 * full.flop(FORWARD)


def test_rows_stand_side_by_side():
    """A run that ends early has whole rows."""
    jobs = command.jobs_of((), None, None)
    assert [way for _, _, way in jobs[: len(WAYS)]] == [*WAYS]
    assert len(jobs) == len(command.CASES) * 2 * len(WAYS)


def test_what_there_is_not_is_refused(capsys):
    assert main(["ranks", "--only", "1 x 5"]) == 2
    assert "no sequence has '1 x 5' in its line; there are 1 x 131072" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs")
@pytest.mark.parametrize("name", ["ranks", "parallel"])
def test_gpus_are_needed(name, capsys):
    assert main([name, "--ranks", "2"]) == 2
    assert "2 ranks on" in capsys.readouterr().err


def test_steps_are_beside_those_of_one_gpu():
    shape, name = parallel.SHAPES[0], OURS
    found = {
        (shape, name, ONE_GPU): (30.0,), (shape, name, "tensor parallel"): (20.0,),
        (shape, name, "FSDP2"): "RuntimeError: no",
    }  # fmt: skip
    rows = parallel.table(found, 2, "2 x GPU").rows
    assert [row["speedup"] for row in rows] == [None, 1.5, None]
    assert [row["status"] for row in rows] == ["ok", "ok", "RuntimeError: no"]


def test_a_rank_that_ended_is_the_reason():
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(rank_processes._RankLost, match="the process of rank 1 has ended"):
        rank_processes._answer(here, 1)
