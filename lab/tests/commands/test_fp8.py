"""K and V in e4m3: errors by method, the bytes of a step, and decoding steps on planted replays."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from in_torch import in_torch

pytest.importorskip("cutlass")

from fa4_hd256.kernels.blackwell.decode.config import DECODE, DECODE_E4M3
from lab.__main__ import main
from lab.commands import fp8
from lab.measure import e4m3
from lab.model.studies import e4m3_steps
from lab.model.studies.e4m3_steps import Steps, steps_of
from sm100_sim.timing import load

MACHINE = load("b200")


@pytest.fixture
def planted(monkeypatch):
    """A tile takes 900 clocks and 70 a step of bf16, 50 of e4m3. Returns the calls replayed."""
    calls = []

    def call_on(machine, variant, sample):
        calls.append((machine.name, variant, sample.keys))
        return variant, (sample,)

    def predict(variant, sample, machine, draws):
        steps = sample.keys // 128 * (50.0 if variant.e4m3 else 70.0)
        return [None, SimpleNamespace(clocks=np.array([900.0 + steps, -1.0]))]

    monkeypatch.setattr(e4m3_steps, "call_on", call_on)
    monkeypatch.setattr(e4m3_steps, "timing", SimpleNamespace(predict=predict))
    return calls


@pytest.mark.parametrize("of_e4m3", [False, True])
def test_a_step_is_what_longer_tiles_take(planted, of_e4m3):
    found = steps_of(16, of_e4m3, MACHINE)
    assert (found.step, found.ends) == (50.0 if of_e4m3 else 70.0, 900.0)
    # K and V of 128 keys, an element of one byte or two, and what steps load besides.
    values, config = MACHINE.values(), (DECODE_E4M3 if of_e4m3 else DECODE)[0]
    step_bytes = 2 * 128 * 256 * (1 if of_e4m3 else 2)
    assert step_bytes <= config.tiles.step_bytes < 1.02 * step_bytes
    bytes_a_clock = values.hbm_terabytes * 1e12 / (values.clock_ghz * 1e9) / values.sms
    assert found.hbm == pytest.approx(config.tiles.step_bytes / bytes_a_clock)
    assert [keys for *_, keys in planted] == [1024, 3072]
    (variant,) = {variant for _, variant, _ in planted}
    assert (variant.rows, variant.queries, variant.ratio) == (16, 2, 8)
    assert variant.kind.causal and variant.e4m3 == of_e4m3


def test_hbm_bounds_a_step():
    assert Steps(70.0, 900.0, 50.0).of_keys(8192) == 900 + 64 * 70
    assert Steps(70.0, 900.0, 90.0).of_keys(8192) == 900 + 64 * 90


def test_the_table_of_decoding(planted):
    rows = fp8.decoding_table(MACHINE).rows
    assert [(row["rows"], row["kv"]) for row in rows] == [
        (count, kv) for count in fp8.TILE_ROWS for kv in ("bf16", "e4m3")
    ]
    for of_bf16, of_e4m3 in zip(rows[::2], rows[1::2]):
        assert of_bf16["ratio"] == 1 and of_bf16["step"] == 70 and of_e4m3["step"] == 50
        assert of_e4m3["ratio"] == pytest.approx(of_bf16["clocks"] / of_e4m3["clocks"])
        for row in (of_bf16, of_e4m3):
            assert row["ends"] == 900 and row["basis"] == "modelled"
            assert row["clocks"] == pytest.approx(900 + 64 * max(row["step"], row["hbm"]))


def test_the_table_of_bytes():
    """Bytes of 16 rows and 128 keys, by hand: K and V have 128 KiB in bf16 and 64 KiB in e4m3."""
    rows = {row["method"]: row for row in fp8.cost_table().rows}
    kept, converted, one, two = rows.values()
    assert [row["hbm_bytes"] for row in rows.values()] == [128, 64, 64, 64]
    # Both operands of 32 slices, or of 16: 128 keys and 16 rows, or 32, of 32 bytes each.
    assert [row["products"] for row in rows.values()] == [32, 32, 16, 16]
    assert kept["smem_bytes"] == 128 + 32 * (128 + 16) / 32
    assert converted["smem_bytes"] == 64 + 64 + 128 + 32 * (128 + 16) / 32
    assert one["smem_bytes"] == 64 + 16 * (128 + 16) / 32
    assert two["smem_bytes"] == 64 + 16 * (128 + 32) / 32
    share = 8e12 / 148 / 1.85e9
    for row in rows.values():
        assert row["hbm_clocks"] == pytest.approx(row["hbm_bytes"] * 1024 / share)
        assert row["smem_clocks"] == row["smem_bytes"] * 8 and row["basis"] == "computed"
    assert two["product_clocks"] > one["product_clocks"] == kept["product_clocks"] / 2


def test_errors_of_the_methods(monkeypatch):
    """Fewer bits have larger errors; ours stand beside them where one scale serves all keys."""
    in_torch(monkeypatch, e4m3)
    rows = fp8.error_table((e4m3.Case("normal", 64), e4m3.Case("pages", 64, scales="page"))).rows
    found = {(row["case"], row["method"]): row for row in rows}
    methods = [*e4m3.METHODS, "none: the codes' own error", "none: rounded to bf16"]
    ours = list(e4m3.OURS)
    assert list(found) == [("normal", name) for name in (*methods, *ours)] + [
        ("pages", name) for name in methods
    ]
    for case in ("normal", "pages"):
        one, mixed, two = (
            found[case, f"e4m3: {name}"]["rel_l2"]
            for name in ("Q and P in one part", "Q in two parts, P in one", "Q and P in two parts")
        )
        assert 0.01 < mixed < one < 0.1 and two < mixed / 5
        assert found[case, "none: the codes' own error"]["max_error"] == 0
        own = found[case, "none: the codes' own error"]["rel_l2_of_values"]
        for row in rows:
            if row["case"] == case:
                assert row["rel_l2_of_values"] == pytest.approx(own, rel=0.7)
                assert row["keys"] == 64 and row["basis"] == "measured"
    rounded = found["normal", "none: rounded to bf16"]
    for name in ours:
        assert found["normal", name]["rel_l2"] == pytest.approx(rounded["rel_l2"], rel=0.01)
    machines = {row["method"] in ours: row["machine"] for row in rows}
    assert machines[False] == "PyTorch, emulated" != machines[True]


def test_the_command(planted, monkeypatch, capsys):
    monkeypatch.setattr(fp8, "CASES", ())
    monkeypatch.setattr(fp8, "errors", lambda case: {"method": e4m3.Errors(0.1, 0.2, 0.3)})
    assert main(["fp8", "--machine", "b300", "--json"]) == 0
    errors, costs, decoding = json.loads(capsys.readouterr().out)["tables"]
    assert {row["max_error"] for row in errors["rows"]} == {0.1}
    assert len(costs["rows"]) == 4 and {name for name, *_ in planted} == {"b300"}
    assert len(decoding["rows"]) == 2 * len(fp8.TILE_ROWS)
