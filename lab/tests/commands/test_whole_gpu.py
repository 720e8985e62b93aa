"""The whole-problem model against an H200's measurements (whole_gpu_measured.json)."""

import json

import numpy as np
import pytest

from lab.__main__ import main
from lab.micro import hopper_kernels
from lab.model.hopper import whole_gpu as model
from lab.whole.problem import Tile, TileCosts, schedule
from sm100_sim.timing import load, replay_program

MEASURED, PREDICTED = model.measurements()
VALUES = load("h200").values()


def test_what_was_predicted_was_measured():
    for part, rows in PREDICTED.items():
        assert set(rows) <= set(MEASURED[part]), part
    assert not any("error" in MEASURED[part] for part in MEASURED if part in PREDICTED)


def test_the_power_budget_gives_the_clock_under_load():
    """One energy of a FLOP, set by the product: attention on all SMs and on a part of them."""
    found = {
        name: (model.sustained_share(name, row, VALUES), row["late"][1] / model.first_clock(row))
        for name, row in MEASURED["loads"].items() if name in model.FLOP
    }  # fmt: skip
    assert len(found) == 7
    for name, (modelled, measured) in found.items():
        assert modelled == pytest.approx(measured, rel=0.04), name
    heads = [found[f"attention, cuDNN, {n} heads of 128 queries"][0] for n in (66, 99, 132)]
    assert heads[0] == 1.0 > heads[1] > heads[2]


def test_equal_tiles_fall_apart_as_on_the_gpu():
    """Clocks of a load of 64 KiB by 132 SMs that run freely, above those of one alone, by tile.
    The first two have cold TLBs besides, which the model lacks."""
    (row,) = (MEASURED["own_bytes"][f"free, load, {n} SMs"] for n in (132,))
    measured = np.array(row["load by tile"])
    alone = np.median(measured[12:])
    values = VALUES._replace(l2_terabytes=1e3, hbm_terabytes=4.59)
    each = model.WORK + alone
    tiles = [Tile(1.0, own_bytes=model.BUFFER, reads=model.BUFFER)] * (132 * model.TILES)
    found = schedule(tiles, TileCosts(0.0, each, 0.0), values, 1, "static")
    waits = np.median(np.diff(found.starts.reshape(model.TILES, 132), axis=0) - each, axis=1)
    assert waits[2:10].sum() == pytest.approx((measured[2:10] - alone).sum(), rel=0.35)
    assert waits[8:].max() < 100 and measured[8:].max() - alone < 200
    even = schedule(
        tiles, TileCosts(0.0, each, 0.0), values._replace(uneven_shares=0.0), 1, "static"
    )  # fmt: skip
    assert even.clocks > 1.1 * found.clocks, "with equal shares they never do"


@pytest.mark.parametrize("tokens", ["128", "1024", "2048", "4096"])
def test_the_slower_of_host_and_gpu_decides(tokens):
    row = MEASURED["hosts"][tokens]
    assert model.ten_calls(row["device"], row["host"]) == pytest.approx(row["ten"], rel=0.13)


def _round_clocks(stored, values):
    """Return the clocks of a bulk load of 64 KiB behind so many bytes of bulk stores on one SM."""
    from lab.model.hopper import single_kernels as hopper

    copy = "cp.async.bulk.global.shared::cta.bulk_group"
    stores = "".join(
        f"@%leader {copy} [%buf+{131072 + i}], [%addr+{65536 + i}], 16384;\n"
        for i in range(0, stored, 16384)
    )
    stores += "@%leader cp.async.bulk.commit_group;\n" if stored else ""
    kernel = hopper_kernels._bulk_load(65536)
    body = kernel.ptx.replace("LOOP:\n", f"LOOP:\n{stores}")
    end = "\nmov.u64 %end, %clock64;"
    body = body.replace(end, f"\n@%leader cp.async.bulk.wait_group 0;{end}")
    kernel = hopper_kernels.Kernel("behind a store", 1, body, 1, "load")
    compiled = hopper.program_of(kernel)
    assert compiled.unmatched == 0
    return hopper.round_clocks(compiled, replay_program(compiled, values))


def test_a_load_waits_for_the_stores_before_it():
    pytest.importorskip("numba")
    pytest.importorskip("triton", reason="its ptxas compiles the kernel for sm_90a")
    values = VALUES._replace(sms=1.0)
    queues = {name: row["issue"][1] + row["load"][1] for name, row in MEASURED["queues"].items()}
    alone = _round_clocks(0, values)
    for stored in (16, 64):
        measured = queues[f"store {stored} KiB, load 64 KiB from L2, 1 SMs"]
        measured -= queues["load 64 KiB from L2, 1 SMs"]
        found = _round_clocks(stored << 10, values) - alone
        assert found == pytest.approx(measured, abs=100)
    # Out of order the store alone, 2048 clocks, is what a round takes.
    free = _round_clocks(64 << 10, values._replace(tma_in_order=0.0))
    assert free == pytest.approx(2048, rel=0.01) and free < alone + found - 900


def test_the_command(capsys):
    assert main(["whole-gpu", "--json"]) == 0
    rows, loads = json.loads(capsys.readouterr().out)["tables"]
    assert {row["part"] for row in rows["rows"]} == {"own bytes", "queues", "launches", "hosts"}
    (row,) = (r for r in rows["rows"] if r["row"] == "load, 132 SMs")
    assert row["before"] == pytest.approx(4401, abs=1) and abs(row["error"]) < 0.1
    slow = {row["load"]: row["share"] for row in loads["rows"]}
    assert slow["product, random"] < 0.9 and slow["copy"] == pytest.approx(1.0, abs=0.01)
