"""The ladder: its rungs, how gains are judged, both ways of timing with a stand-in for time."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from in_torch import in_torch

pytest.importorskip("cutlass")

from bench.measure.providers import PyTorchSdpa
from bench.measure.timer import Sampling, State
from bench.suite import Case
from fa4_hd256 import ForwardConfig
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.__main__ import main
from lab.commands import ladder
from lab.measure import ladder as of_rungs
from lab.model.calls import Kind
from lab.model.forward import Kernel
from lab.model.ours import Ours
from lab.model.studies import ladder as modelled
from lab.model.tiles import ForwardTiling
from lab.paths import Paths
from lab.whole.problem import TileCosts

CASE = Case("chosen", ((300, 300),), 2, 1, True)
RIGHT = of_rungs.Error(1e-3, 2e-3, 1e-6)


def test_one_switch_a_rung():
    found = of_rungs.rungs()
    *steps, last = found
    assert [rung.name for rung in steps] == [
        "plain exp2", "folded scale", "packed f32x2", "double-buffered S", "conditional rescale",
        "emulation ratio", "tile order", "CLC",
    ]  # fmt: skip
    for before, after in zip(steps, steps[1:]):
        pairs = [(getattr(r.config, f.name), f.name) for f in dataclasses.fields(ForwardConfig)
                 for r in (before, after)]  # fmt: skip
        changed = [name for (a, name), (b, _) in zip(pairs[::2], pairs[1::2]) if a != b]
        if before.use_clc != after.use_clc:
            changed.append("use_clc")
        assert len(changed) == 1, (after.name, changed)
    assert last.config == ForwardConfig() and not last.use_clc
    # Nothing is compared twice.
    default = of_rungs.rungs(ForwardConfig().ex2_pattern)
    assert default[-2].config == ForwardConfig() and default[-1].name == "CLC"


def test_gains_and_what_is_ranked():
    seconds = [[10.0, 11.0], [8.0, 9.0], [7.9, 8.9], [7.9, 8.8], [9.0, 10.0]]
    names = of_rungs.rungs()
    timings = [of_rungs.Timing(rung, np.array(times), RIGHT) for rung, times in zip(names, seconds)]
    timings[-1] = dataclasses.replace(timings[-1], error=of_rungs.Error(3e-3, 2e-3))
    origin = {"basis": "modelled", "machine": "m"}
    rows = ladder.rows(timings, CASE, None, origin)
    assert rows[0]["gain"] is None and rows[0]["effect"] is None
    assert rows[1]["gain"] == 10 / 8 and rows[1]["gain_low"] == 11 / 9
    # 1 % is below what the model resolves.
    assert [row["effect"] for row in rows[1:]] == ["faster", "not ranked", "not ranked", "slower"]
    assert [row["correct"] for row in rows] == [True] * 4 + [False]
    assert {row["over_pytorch"] for row in rows} == {"not runnable here"}
    assert rows[0]["tflops"] == pytest.approx(CASE.flop("forward") / 10.0 / 1e12)
    # Median, p20 and p80: ahead where slow runs of one are before the fast ones of the other.
    seconds = [[10.0, 9.9, 10.1], [9.8, 9.7, 9.8], [9.0, 8.0, 9.75], [8.0, 7.9, 8.0]]
    timings = [of_rungs.Timing(rung, np.array(times), RIGHT) for rung, times in zip(names, seconds)]
    measured = ladder.rows(timings, CASE, 20.0, {"basis": "measured", "machine": "g"})
    assert [row["effect"] for row in measured[1:]] == ["not ranked", "not ranked", "not ranked"]
    assert measured[3]["gain_low"] == 8.0 / 8.0 and measured[0]["over_pytorch"] == 2.0
    timings[2] = dataclasses.replace(timings[2], seconds=np.array([9.0, 8.9, 9.1]))
    measured = ladder.rows(timings, CASE, 20.0, {"basis": "measured", "machine": "g"})
    assert [row["effect"] for row in measured[2:]] == ["faster", "faster"]
    # A wrong LSE is wrong, too.
    assert not of_rungs.Error(0.0, 1.0, 1e-2).correct


class Clock:
    """A timer whose call number n takes n + 1 seconds; calls of PyTorch on the CPU are real."""

    device = torch.device("cpu")

    def prepare(self, call):
        self.prepared = getattr(self, "prepared", 0) + 1
        duration = float(self.prepared)
        return (lambda: duration), "plain"

    def seconds(self, call):
        return call()

    def state(self):
        return State()


@pytest.mark.simulator
@pytest.mark.parametrize("where", ["PyTorch", "simulator"])
@pytest.mark.sampled("PyTorch")
def test_measured(where, monkeypatch):
    """Correctness is checked on the inputs that are timed; PyTorch is timed with them."""
    if where == "PyTorch":
        in_torch(monkeypatch, of_rungs)
    rung = of_rungs.Rung("default", ForwardConfig())
    pytorch = (PyTorchSdpa("math", "MATH"), PyTorchSdpa("cuDNN", "CUDNN_ATTENTION"))
    timings, others = of_rungs.measure_all([rung], CASE, Clock(), Sampling(1, 3), pytorch)
    assert timings[0].seconds.tolist() == [1.0, 1.0, 1.0] and timings[0].error.correct
    found = ladder.rows(timings, CASE, None, {"basis": "measured", "machine": "m"})
    assert "unmatched" not in ladder.table(found, CASE, others).as_markdown()
    assert others["math"] == 2.0
    if not torch.cuda.is_available():
        assert others["cuDNN"] == "no CUDA device"


@pytest.mark.simulator
def test_simulated_error_of_a_rung():
    found = of_rungs.simulated_error(of_rungs.Rung("default", ForwardConfig()), True)
    assert found.correct and 0 < found.error and found.lse_error < 1e-4


def test_command(tmp_path, monkeypatch, capsys):
    """The modelled way, with costs that depend on the configuration in place of replays."""

    def forward(self, variant, machine, draws):
        assert variant.kind == Kind(True) and variant.samples == modelled.SAMPLES
        rate = 3.0 / variant.config.s_stages
        tiling = ForwardTiling(variant.policy, ordered=variant.config.ordered_tiles)
        costs = [TileCosts(5000.0, 2000.0, rate)] * (draws + 1)
        paths = Paths(0, 7 + variant.config.s_stages)
        return Kernel("ours", tiling, [machine.values()] * (draws + 1), costs, paths)

    monkeypatch.setattr(Ours, "forward", forward)
    monkeypatch.setattr(modelled, "simulated_error", lambda rung, causal: RIGHT)
    files = {name: tmp_path / f"ladder.{name}" for name in ("json", "md", "svg")}
    arguments = ["ladder", "--causal", "--modelled", "--jobs", "1", "--json", str(files["json"]),
                 "--markdown", str(files["md"]), "--plot", str(files["svg"])]  # fmt: skip
    assert main(arguments) == 0
    assert "not runnable here" in capsys.readouterr().out
    assert "double-buffered S" in files["md"].read_text() and files["svg"].stat().st_size
    (table,) = json.loads(files["json"].read_text())["tables"]
    rows = {row["step"]: row for row in table["rows"]}
    assert rows["double-buffered S"]["step_clocks"] == 1.5 * 2048
    assert rows["double-buffered S"]["effect"] == "faster"
    assert rows["double-buffered S"]["config"]["s_stages"] == 2
    assert rows["double-buffered S"]["config"]["ex2_pattern"]["ex2_emu_freq"] == 0
    found = [rows[step][name] for step in ("packed f32x2", "double-buffered S")
             for name in ("unmatched", "ambiguous")]  # fmt: skip
    assert found == [0, 8, 0, 9]
    assert {"unmatched", "ambiguous"} <= {column["name"] for column in table["columns"]}
    assert any(note.startswith("unmatched, ambiguous: ") for note in table["notes"])
    # The longest tiles first fill the end of a causal problem with short ones.
    assert rows["tile order"]["gain"] > 1.0
    assert main(["ladder", "--window", "5"]) == 2


def test_the_pattern_of_the_emulation_rung():
    pattern = Ex2Pattern(16, 8)
    chosen = {rung.name: rung.config.ex2_pattern for rung in of_rungs.rungs(pattern)}
    assert chosen["emulation ratio"] == pattern and not chosen["conditional rescale"].true_share()
