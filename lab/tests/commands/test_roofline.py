"""Closed forms of `roofline` and `intensity`: against what the simulator counts, and by hand."""

import json

import pytest
import torch

pytest.importorskip("cutlass")

import sm100_sim
from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256 import BackwardConfig, ForwardConfig, flash_attn_func
from fa4_hd256.check import reference
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.__main__ import main
from lab.compiled import demand
from lab.compiled import roofline as closed_forms
from sm100_sim.timing import load


def case(seqlen_q, seqlen_k, causal=False, window=None, heads=(2, 1)):
    return Case("chosen", ((seqlen_q, seqlen_k),), *heads, causal, (window, None))


@pytest.mark.simulator
@pytest.mark.parametrize("ds_bytes", [0, 1 << 30])
@pytest.mark.sampled
def test_what_the_simulator_counts(ds_bytes):
    """MMAs, bytes of TMA and results of the special-function units, forward and backward."""
    config, keeps_ds = BackwardConfig(ds_bytes=ds_bytes), ds_bytes > 0
    q, k, v = (torch.randn(1, s, h, 256).bfloat16() for s, h in ((300, 2), (400, 1), (400, 1)))
    tensors = [t.requires_grad_() for t in (q, k, v)]
    options = {"causal": True, "num_splits": 1, "backward_config": config}
    flash_attn_func(*tensors, **options).sum().backward()
    kernels = ("backwarddv", "products") if keeps_ds else ("dkdv", "backwarddq")
    reports = {
        name: next(r for r in reversed(sm100_sim.last_reports()) if name in r.kernel.lower())
        for name in ("forward", "preprocess", *kernels)
    }
    chosen = case(300, 400, causal=True)
    totals = demand.totals(chosen, FORWARD) + demand.totals(chosen, BACKWARD, config)
    found = dict(zip(reports, totals, strict=True))
    # One instruction of the pair has K = 16: 128 x 256 x 16 or 256 x 128 x 16 multiplications in
    # the scores, twice that in the products with N = 256 of M = 256.
    small, large = 2 * 256 * 128 * 16, 2 * 256 * 256 * 16
    flop = {name: total.demand.flop for name, total in found.items()}
    # The forward's tiles are shared by both heads and span fewer queries.
    forward, *steps = (found[name].steps for name in ("forward", *kernels))
    assert forward < min(steps)
    assert flop["forward"] == forward * (16 * small + 8 * large)
    mmas = {name: report.warps("tcgen05.mma") for name, report in reports.items()}
    of_step = {"forward": 24, "dkdv": 64, "backwarddq": 40, "backwarddv": 40, "products": 8}
    assert mmas == {"preprocess": 0} | {
        name: of_step[name] * found[name].steps for name in ("forward", *kernels)
    }
    wide = {"dkdv": 0, "backwarddq": 8, "backwarddv": 8, "products": 8}
    for name in kernels:
        narrow = of_step[name] - wide[name]
        assert flop[name] == found[name].steps * (wide[name] * large + narrow * small)
    for name, report in reports.items():
        total = found[name]
        stores = ForwardConfig().q_bytes * 2 * total.tiles if name == "forward" else 0
        assert report.tma["load_bytes"] == total.demand.tma_bytes - stores
        assert report.tma["store_bytes"] == stores
        hardware = report.opcodes.get("ex2.approx.ftz.f32", {"lanes": 0})["lanes"]
        factors = 256 * total.steps if name == "forward" else 0
        assert hardware == total.demand.exp2 - factors


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal", "window"),
    [(300, 700, False, None), (700, 300, True, None), (1, 300, True, None), (900, 1000, True, 200),
     (64, 1, True, None)],
)  # fmt: skip
def test_steps_are_those_with_a_visible_key(seqlen_q, seqlen_k, causal, window):
    """A step is a block of 256 x 128 of the mask in which anything is visible."""
    seen = reference.visible((seqlen_q, seqlen_k), (window, 0 if causal else None))
    blocks = [
        [seen[i : i + 256, j : j + 128].any().item() for j in range(0, seqlen_k, 128)]
        for i in range(0, seqlen_q, 256)
    ]
    steps, query_tiles = sum(map(sum, blocks)), sum(map(any, blocks))
    key_tiles = sum(map(any, zip(*blocks)))
    found = demand._counts(case(seqlen_q, seqlen_k, causal, window, heads=(6, 3)))
    assert found == (6 * steps, 6 * query_tiles, 3 * key_tiles)


def test_clocks_of_a_step():
    """Against the figures of docs/kernels.md."""
    values = load("b200").values()
    port = next(r for r in demand.RESOURCES if r.name == "SMEM port")
    recomputed = demand.totals(case(256, 128), BACKWARD, BackwardConfig(ds_bytes=0))
    units = {total.kernel.name: total.kernel.step for total in recomputed}
    kept = {t.kernel.name: t.kernel.step for t in demand.totals(case(256, 128), BACKWARD)}
    units |= {name: kept[name] for name in ("dV and dS", "dK and dQ from dS")}
    units["forward"] = demand.totals(case(256, 128), FORWARD)[0].kernel.step
    assert {name: step.mma for name, step in units.items()} == {
        "forward": 2048,
        "preprocess": 0,
        "dQ": 3072,
        "dK/dV": 4096,
        "dV and dS": 3072,
        "dK and dQ from dS": 1024,
    }
    # S: 16 instructions of (4 + 2) KiB; PV: 8 of 4 KiB; K and V of 32 KiB each, factors.
    assert port.clocks(units["forward"], values) == 16 * 48 + 8 * 32 + 512 + 8
    assert port.clocks(units["dQ"], values) == 2 * 768 + 256 + 768
    # Four products, TMA writes, P and dS, LSE and delta by TMA and by the warps.
    assert port.clocks(units["dK/dV"], values) == 4 * 768 + 2048 + 512 + 16 + 512
    # The port's clocks are dQ's, with LSE and delta by TMA and to the warps; a product of dS: 8 of
    # (4 + 4) KiB, dS and K or Q.
    assert port.clocks(units["dV and dS"], values) == 2 * 768 + 256 + 768 + 8 + 128
    assert port.clocks(units["dK and dQ from dS"], values) == 8 * 64 + 512


def test_rows_of_a_case():
    machine = load("b200")
    found = closed_forms.resource_rows(case(4096, 4096), FORWARD, machine)
    by_name = {row["resource"]: row for row in found}
    assert set(by_name) == {r.name for r in demand.RESOURCES} | {demand.HBM}
    busiest = by_name["tensor core"]
    assert busiest["share"] == 1.0 and all(row["share"] <= 1 for row in found)
    # Full attention of whole tiles: nothing but the convention's FLOP, at the machine's peak.
    peak = 148 * 8192 * machine.values().clock_ghz / 1e3
    assert busiest["tflops"] == pytest.approx(peak)
    for row in found:
        assert row["low"] <= row["step_clocks"] <= row["high"]
    emulated = closed_forms.resource_rows(case(4096, 4096), FORWARD, machine, Ex2Pattern(4, 3))
    emulated = {row["resource"]: row for row in emulated}
    # 37.5 % of the exponentials leave the MUFU; the factor per row and step stays.
    assert emulated["MUFU"]["step_amount"] == 128 * 128 * 0.625 + 128
    assert emulated["FMA"]["step_amount"] == 128 * 128 * (2 + 0.375 * 6)


def test_intensity_follows_from_roofline():
    """Margin = clocks of the tensor core over those of the level."""
    machine, chosen = load("b200"), case(2048, 2048, causal=True)
    for direction in (FORWARD, BACKWARD):
        clocks = {
            (row["kernel"], row["resource"]): row["clocks"]
            for row in closed_forms.resource_rows(chosen, direction, machine)
        }
        for row in closed_forms.level_rows(chosen, direction, machine):
            resource = {"HBM": "HBM", "L2": "TMA and L2", "SMEM, all": "SMEM port"}.get(
                row["level"]
            )
            if resource:
                ratio = clocks[row["kernel"], "tensor core"] / clocks[row["kernel"], resource]
                assert row["margin"] == pytest.approx(ratio)
            assert row["margin_low"] <= row["margin"] <= row["margin_high"]
    useful = {row["useful"] for row in closed_forms.level_rows(chosen, FORWARD, machine)}
    # 16 blocks of 128 queries of both heads see 1 to 16 key tiles; by convention half of 256 count.
    assert useful == {128 / 136}


def test_a_window_without_work_does_not_break_the_table():
    rows = closed_forms.resource_rows(case(64, 1, causal=True), BACKWARD, load("b300"))
    assert {row["kernel"] for row in rows} == {"preprocess", "dV and dS", "dK and dQ from dS"}


def test_commands(tmp_path, capsys):
    assert (
        main(
            [
                "roofline",
                "--seqlen",
                "1024",
                "--heads",
                "8/4",
                "--json",
                str(tmp_path / "r.json"),
                "--plot",
                str(tmp_path / "r.svg"),
            ]
        )
        == 0
    )
    assert "dV and dS" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())["tables"][0]
    assert {row["basis"] for row in found["rows"]} == {"computed"}
    assert (tmp_path / "r.svg").stat().st_size > 0
    assert main(["intensity", "--csv"]) == 0
    assert "SMEM, operands" in capsys.readouterr().out
    assert main(["roofline", "--heads", "8"]) == 2
    assert "16/2" in capsys.readouterr().err
    assert main(["roofline", "--freq", "4"]) == 2
