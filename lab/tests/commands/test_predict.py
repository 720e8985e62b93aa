"""`python -m lab predict`: errors by row and by whether a row was known before."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lab.commands import predict
from lab.micro import rows_under_load
from lab.micro.whole_gpu_measure import attention
from lab.model.hopper import rows as hopper_rows
from lab.model.hopper.attention import Times

KNOWN = "fa4_hd256 forward: 4x4096, 16/16, full"
UNSEEN = "fa4_hd256 forward: 5x3072, 16/16, full"
DECODING = "fa4_hd256 forward: 1x(1, 131072), 32/2, causal"


@pytest.fixture
def fixed(monkeypatch):
    """Every row takes a millisecond, 1.1 sustained, and a million clocks; measured is what is said
    here."""
    times = Times(clocks=1e6, busy=0.9, seconds=1e-3, for_good=1.1e-3)
    monkeypatch.setattr(hopper_rows.Row, "times", lambda row, clocks: times)
    found = {
        KNOWN: {"first": [800.0, 1600.0], "late": [1000.0, 1400.0], "clocks": 800_000},
        UNSEEN: {"first": [1250.0, 1600.0], "late": [1250.0, 1400.0]},
        DECODING: {"us": 1000.0, "from": "a test"},
    }
    monkeypatch.setattr(hopper_rows, "measured", lambda: found)


def test_first_launches_and_those_for_good_each_have_an_error(fixed):
    """An empty graph takes 4.25 us beside the launch that the model has."""
    table = predict.predictions()
    rows = {row["row"]: row for row in table.rows}
    known, unseen, decoding = (rows[name] for name in (KNOWN, UNSEEN, DECODING))
    assert known["first"] == pytest.approx(1004.25) and known["late"] == pytest.approx(1104.25)
    assert known["first_error"] == pytest.approx(0.2553, abs=1e-4)
    assert known["late_error"] == pytest.approx(0.10425)
    assert known["clock_error"] == pytest.approx(0.25) and known["ghz"] == pytest.approx(1.4)
    assert unseen["late_error"] == pytest.approx(-0.1166) and unseen["clock_error"] is None
    assert decoding["first_error"] == pytest.approx(0.00425) and decoding["late_error"] is None
    notes = " ".join(table.notes)
    assert "prediction: no: times for good of 1 rows, within 10 % 0, mean -11.7%" in notes
    assert "before the prediction: yes: clocks of 1 rows, within 10 % 0, mean +25.0%" in notes


def test_rows_are_chosen_by_name(fixed):
    table = predict.predictions("head_dim 128")
    assert len(table.rows) == 12


def test_what_a_gpu_measures_are_its_own_rows_without_decoding_steps():
    h200, h100 = (list(predict.to_measure("", f"NVIDIA {name}")) for name in ("H200", "H100 SXM"))
    assert [row.case for row in h200] == [row.case for row in h100] and len(h200) == 77
    assert all(row.gpu == "h100" and ", H100" in row.name for row in h100)
    assert not [row for row in h200 if row.decodes]
    assert not list(predict.to_measure("", "NVIDIA B200"))


def test_first_launches_end_before_the_clock_gives_way():
    """The very first is left out; of long launches the second counts, however late it ends."""
    short = [[4.0 * n, 4.0 + n / 100, 1700.0 - n] for n in range(12)]
    found = {"first": short, "late": [5.0, 1500.0], "watts": 690.0, "count": 200}
    assert rows_under_load.figures(found)["first"] == [4025.0, 1697.5]
    long = [[30.0 * n, 30.0 + n, 1700.0 - 100 * n] for n in range(12)]
    found = rows_under_load.figures(found | {"first": long})
    assert found["first"] == [31000.0, 1600.0] and found["late"] == [5000.0, 1500.0]


def test_measuring_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = predict.argparse.Namespace(measure="x", row="")
    with pytest.raises(ValueError, match="no CUDA device to measure on"):
        predict.main(arguments)


def test_measuring_no_row_says_so(monkeypatch):
    class Timer:
        gpu = SimpleNamespace(name="NVIDIA B200")

    monkeypatch.setattr(predict, "CudaTimer", Timer)
    arguments = predict.argparse.Namespace(measure="x", row="4x4096")
    with pytest.raises(ValueError, match="no row of NVIDIA B200 has '4x4096' in its name"):
        predict.main(arguments)


def test_attention_of_given_tensors_by_a_back_end():
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    found = attention(torch.nn.attention.SDPBackend.MATH, (q, k, v))()
    torch.testing.assert_close(found, (q @ k.mT / 4).softmax(-1) @ v)


def test_another_head_dim_is_flash_attn_4s_forward_alone():
    (row, *_) = predict.to_measure("fa4_hd256 forward", "NVIDIA H200")
    with pytest.raises(RuntimeError, match="is not a forward of flash-attn-4"):
        rows_under_load.prepared(replace(row, head_dim=128), None)
