"""Mixes of exp2 on the timing model; one of them replayed for real."""

import dataclasses
import json

import pytest
from printed_rows import HALF

from bench.__main__ import main
from bench.commands import ex2_sweep
from bench.measure import exp2 as measured
from fa4_hd256.kernels.blackwell import tuning
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY
from lab.model import exp2 as modelled
from lab.model.calls import Kind
from lab.model.forward import Kernel
from lab.model.ours import Ours
from lab.model.replays import Replayed
from lab.model.tiles import ForwardTiling
from lab.paths import Paths
from lab.whole.problem import TileCosts
from sm100_sim.timing import load

pytest.importorskip("cutlass")


def planted(monkeypatch):
    """Replays by hand: a cluster with 1000 clocks of work takes 1100 of them and 200 fewer under a
    mix, 2 % more under other constants. Returns the calls that were made of them."""
    calls = []

    def replayed(pattern, kind, machine, draws, is_e4m3=False):
        assert not is_e4m3
        calls.append((pattern, kind, machine.name, draws))
        clocks = 900.0 if pattern.true_share() else 1100.0
        return Replayed(1, 1000.0, tuple(clocks * f for f in (1, 1.02)[: draws + 1]), 1, 10)

    def forward(self, variant, machine, draws):
        costs = [TileCosts(7000.0, 1500.0, 1.04 + draw) for draw in range(draws + 1)]
        calls.append((variant.kind, machine.name, draws))
        tiling, values = ForwardTiling("static"), [machine.values()] * (draws + 1)
        return Kernel("ours", tiling, values, costs, Paths(3, 1000))

    monkeypatch.setattr(modelled, "replayed", replayed)
    monkeypatch.setattr(Ours, "forward", forward)
    return calls


def test_what_a_mix_changes_is_put_down_to_the_steps(monkeypatch):
    """Machines count one by one, per clock of the replay's work; the rest of the kernel stays."""
    calls = planted(monkeypatch)
    found = dict(modelled.modelled_times([HARDWARE_ONLY, HALF], True, "b200", 1, 1))
    kind, machine = Kind(True), load("b200")
    assert calls == [
        (kind, "b200", 1), (HARDWARE_ONLY, kind, "b200", 1), (HALF, kind, "b200", 1),
    ]  # fmt: skip
    assert list(found) == [(p, name) for p in (HARDWARE_ONLY, HALF) for name in measured.SEQLENS]
    base = Ours().forward(modelled.ours.Variant(kind), machine, 1)
    hardware, mixed = (
        modelled.replayed(pattern, kind, machine, 1) for pattern in (HARDWARE_ONLY, HALF)
    )
    kernel = modelled.with_mix(base, mixed, hardware)
    rates = [1.04 - 0.2, 2.04 - 0.2 * 1.02]
    assert [cost.rate for cost in kernel.costs] == pytest.approx(rates)
    for before, after in zip(base.costs, kernel.costs, strict=True):
        assert dataclasses.replace(after, rate=before.rate) == before
    assert kernel.paths == Paths(3 + 1, 1000 + 10)
    assert dataclasses.replace(kernel, costs=base.costs, paths=base.paths) == base
    schedules = kernel.run(measured.case_of(measured.SEQLENS["short"], True))
    times = found[HALF, "short"]
    assert times.seconds.tolist() == [schedule.seconds for schedule in schedules]
    assert times.bound == schedules[0].bound
    for (pattern, _), times in found.items():
        assert times.figures == {"unmatched": 4, "ambiguous": 1010}
        assert times.step_clocks == pytest.approx(2048 * (0.84 if pattern == HALF else 1.04))
    with pytest.raises(ValueError, match="zip"):
        modelled.with_mix(base, dataclasses.replace(mixed, clocks=mixed.clocks[:1]), hardware)


def test_a_mix_is_replayed_in_its_own_configuration(monkeypatch):
    seen = []

    def replays(variant, machine, draws):
        seen.append((variant, machine, draws))
        return ["first", "second"]

    monkeypatch.setattr(modelled.ours, "replays", replays)
    assert modelled.replayed(HALF, Kind(True), load("b200"), 3) == "first"
    ((variant, machine, draws),) = seen
    assert variant.kind == Kind(True) and machine.name == "b200" and draws == 3
    assert variant.config == ForwardConfig(ex2_pattern=HALF)
    assert variant.samples == (modelled.SAMPLE,)


def test_the_modelled_command(monkeypatch, tmp_path, capsys):
    """Both masks by default, or the chosen one; what is written is what is printed as best."""
    calls = planted(monkeypatch)
    table = tmp_path / "tuning.json"
    command = ["ex2-sweep", "--freq", "4", "--res", "2", "--start", "0", "--degree", "3"]
    command += ["--draws", "1", "--jobs", "1", "--modelled", "--machine", "b300", "--json"]
    assert main([*command, "--write", str(table)]) == 0
    printed = capsys.readouterr()
    grid, best = json.loads(printed.out)["tables"]
    assert f"tuning table: {table}" in printed.err
    assert {call[-2:] for call in calls} == {("b300", 1)}
    keys = [(row["mask"], row["seqlen"], row["true_share"]) for row in grid["rows"]]
    assert keys == [(m, n, s) for m in ("causal", "full") for n in (1024, 8192, 65536)
                    for s in (0.0, 0.375)]  # fmt: skip
    assert [row["true_share"] for row in best["rows"]] == [0.375] * 6
    assert {(row["gpu"], row["basis"]) for row in grid["rows"]} == {("B300", "modelled")}
    assert {row["degree"] for row in grid["rows"]} == {None, 3}
    assert grid["rows"][0]["mix"] == "hardware"
    assert grid["rows"][1]["mix"] == "freq 4, res 2, start 0"
    assert ex2_sweep.tables(grid["rows"])[0].plot.y == "step_clocks"
    without_model = [row | {"step_clocks": None, "basis": "measured"} for row in grid["rows"]]
    assert ex2_sweep.tables(without_model)[0].plot.y == "tflops"
    for row in grid["rows"]:
        assert row["gain"] == 0 if row["mix"] == "hardware" else 0.05 < row["gain"] < 0.3
        assert row["tied"] == row["chosen"] == (row["mix"] != "hardware")
        assert (row["unmatched"], row["ambiguous"]) == (4, 1010)
        assert row["low_ms"] <= row["ms"] <= row["high_ms"]
        flop = measured.case_of(row["seqlen"], row["mask"] == "causal").flop("forward")
        assert row["tflops"] == pytest.approx(flop / row["ms"] / 1e9)
    assert any("replay of a mix" in note for note in grid["notes"])
    assert len(tuning.read(table)) == 6
    assert main([*command, "--mask", "full", "--all-fragments"]) == 0
    printed = capsys.readouterr()
    grid, _ = json.loads(printed.out)["tables"]
    assert {row["mask"] for row in grid["rows"]} == {"full"} and "tuning" not in printed.err
    assert grid["rows"][1]["mix"] == "freq 4, res 2, start 0, all fragments"


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_replayed_sweep(monkeypatch, tmp_path, capsys):
    """The whole command with one mix, replayed on one tile; costs of hardware exp2 are given."""
    pytest.importorskip("numba")
    values = load("b200").values()
    base = Kernel(
        "ours", ForwardTiling("static"), [values], [TileCosts(7000.0, 1500.0, 1.04)],
        Paths(3, 1000),
    )  # fmt: skip
    monkeypatch.setattr(Ours, "forward", lambda *given: base)
    monkeypatch.setattr(modelled, "SAMPLE", (256, 1))
    table = tmp_path / "tuning.json"
    # A mix that tests of the kernel compile, too.
    command = ["ex2-sweep", "--freq", "4", "--res", "3", "--start", "0", "--mask", "full"]
    command += ["--draws", "0", "--jobs", "1", "--modelled", "--write", str(table), "--json"]
    assert main(command) == 0
    grid, best = json.loads(capsys.readouterr().out)["tables"]
    hardware, mixed = (row for row in grid["rows"] if row["seqlen"] == 8192)
    assert (hardware["true_share"], mixed["true_share"]) == (0.0, 0.375)
    assert hardware["step_clocks"] == pytest.approx(1.04 * 2048)
    assert mixed["step_clocks"] != hardware["step_clocks"]
    assert mixed["step_clocks"] == pytest.approx(hardware["step_clocks"], rel=0.5)
    assert [row["seqlen"] for row in best["rows"]] == [1024, 8192, 65536]
    # Events of the costs and of the mix's own replay, in which all is matched.
    assert hardware["unmatched"] == mixed["unmatched"] == 3
    assert min(hardware["ambiguous"], mixed["ambiguous"]) > 1000
    for shown in (grid, best):
        assert {"unmatched", "ambiguous"} <= {column["name"] for column in shown["columns"]}
    assert any("replay of a mix" in note for note in grid["notes"])
    assert len(tuning.read(table)) == 3
