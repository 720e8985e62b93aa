"""The commands of `python -m fa4_hd256`."""

from __future__ import annotations

import json

import pytest
import torch
from gpus import gpu

from fa4_hd256 import ForwardConfig, environment
from fa4_hd256.__main__ import main
from fa4_hd256.check import demo
from fa4_hd256.kernels.blackwell.architecture import KERNELS
from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from fa4_hd256.kernels.blackwell.backward.mxfp8.config import Mxfp8BackwardConfig
from fa4_hd256.kernels.hopper.architecture import KERNELS as HOPPER
from fa4_hd256.kernels.hopper.forward.config import MASKED
from fa4_hd256.kernels.hopper.forward.config import ForwardConfig as HopperForwardConfig
from fa4_hd256.kernels.proof.plans import describe
from fa4_hd256.run import bug_report
from fa4_hd256.run import launch as launching

pytestmark = pytest.mark.architecture("sm_100a")


@pytest.fixture(scope="module")
def result():
    return demo.run("gemma-3-4b", 200)


@pytest.mark.simulator
def test_what_the_demo_reports(result):
    # For each of 4 KV heads 2 tiles of 128 queries x 2 heads; steps of 128 keys, to the diagonal.
    steps = 4 * (1 + 2)
    assert result["backend"] == "simulator"
    assert result["max_error"] <= 2 * result["pytorch_max_error"]
    assert result["lse_max_error"] < 1e-3 and result["rel_l2"] < 1e-2
    assert result["products"] == steps * (256 // 16 + 128 // 16)
    assert result["score_elements"] == steps * 256 * 128
    assert result["emulated_share"] == result["pattern_share"]
    assert result["clusters"] == 8 and result["cluster"] == [2, 1, 1]
    assert result["tma_bytes"] > 0 and result["run_seconds"] > 0 and result["compile_seconds"] > 0


@pytest.mark.simulator
def test_what_the_demo_reports_of_the_backward(result):
    found = result["backward"]
    assert list(found["gradients"]) == ["dq", "dk", "dv"] and found["accurate"]
    for errors in found["gradients"].values():
        assert 0 < errors["max_error"] <= 2 * errors["pytorch_max_error"] + errors["rounding"] * 2
        assert errors["rel_l2"] < 1e-2
    # 8 heads: steps of 16 + 16 + 8 and twice of 8 instructions; each has 256 x 128 scores.
    kernels, steps = found["kernels"], 8 * 2
    assert kernels["preprocess"]["products"] == 0
    assert kernels["dv"]["products"] == steps * 40
    assert kernels["products"]["products"] == 2 * steps * 8
    assert kernels["dv"]["mufu_ex2"] == steps * 256 * 128
    assert kernels["products"]["mufu_ex2"] == 0
    assert all(k["stack_bytes"] == k["local_bytes"] == 0 for k in kernels.values())
    assert found["run_seconds"] > 0 and found["compile_seconds"] > 0


@pytest.mark.simulator
def test_json_is_one_object(capsys):
    assert main(["demo", "--model", "gemma-3-4b", "--seqlen", "60", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shape"]["seqlen"] == 60 and shown["accurate"] is True


@pytest.mark.simulator
def test_text_names_every_figure(result):
    shown = demo.text(result)
    parts = ("max error", "relative L2", "LSE", "products", "MUFU", "TMA", "registers")
    kernels = "preprocess", "dv", "products"
    for part in (*parts, "dq, max error", "dk, max error", "dv, max error", *kernels):
        assert part in shown
    assert shown.count("verdict            accurate") == 2 and "NOT" not in shown


@pytest.mark.simulator
def test_no_spills_and_no_local_memory(result):
    assert result["stack_bytes"] == result["local_bytes"] == 0


@pytest.mark.simulator
def test_an_error_above_twice_pytorchs_fails(result, monkeypatch, capsys):
    backward = {**result["backward"], "accurate": False}
    for wrong in ({**result, "accurate": False}, {**result, "backward": backward}):
        monkeypatch.setattr(demo, "run", lambda *_, wrong=wrong: wrong)
        assert main(["demo"]) == 1
        assert capsys.readouterr().out.count("NOT ACCURATE") == 1


def test_arguments_that_are_not_accepted(capsys):
    assert main(["demo", "--seqlen", "0"]) == 2
    assert "seqlen is 0; accepted: 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--model", "unknown"])


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(bug_report, "has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    said = "error: device is cuda, but PyTorch finds no CUDA device; accepted here: cpu\n"
    assert capsys.readouterr() == ("", said)


def test_nothing_is_said_of_emulation_where_there_is_none():
    none = {"emulated_share": 0.0, "pattern_share": 0.0}
    assert demo._emulated(none) == "all score elements"
    some = demo._emulated({"emulated_share": 0.25, "pattern_share": 0.25})
    assert some == "25.0000% of the score elements emulated; the pattern's share is 25.0000%"


@pytest.mark.simulator
def test_few_rows_of_one_head():
    """A call's default tiles are for few rows; the demo's are the usual ones."""
    assert demo.run("gemma-3-4b", 16)["accurate"]


def test_plan(capsys):
    assert main(["plan"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(describe(KERNELS, ForwardConfig()))
    assert describe(KERNELS, BackwardConfig()) in shown
    assert shown.rstrip().endswith(describe(KERNELS, Mxfp8BackwardConfig()))


def test_plan_of_another_architecture(capsys):
    assert main(["plan", "--arch", "sm_90a"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(describe(HOPPER, HopperForwardConfig()))
    assert describe(HOPPER, MASKED) in shown, "that of causal calls"
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--arch", "sm_80"])
    assert stopped.value.code == 2
    assert "(choose from" in capsys.readouterr().err


def test_env_lists_every_variable(capsys, monkeypatch):
    monkeypatch.setenv("FA4_HD256_PROGRESS", "0")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert all(variable.name in shown for variable in environment.VARIABLES)
    assert "torch" in shown and "nvidia-cutlass-dsl" in shown
    assert "kernels are compiled for sm_100f: B200 or GB200 (compute capability 10.0)" in shown


def test_env_lists_the_gpus(capsys, monkeypatch):
    """The command lists the GPUs of the process, also one that the kernels do not run on, and the
    simulator's."""
    capabilities = [(10, 3), (8, 9)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(launching, "cuda_gpu", lambda device: gpu(76, "gb300"))
    monkeypatch.setattr(bug_report, "has_driver", lambda: True)
    monkeypatch.setenv("SM100_SIM_DEVICE", "b200:19")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "cuda:0: GPU 0, 10.3: 152 SMs, 76 CTA pairs at once" in shown and "as B300" in shown
    assert "cuda:1: GPU 1, 8.9: not in the family" in shown
    assert "cpu: the simulator's: 19 SMs, 9 CTA pairs at once, 9 in a static grid" in shown


def test_env_says_how_the_caches_are(capsys, monkeypatch, tmp_path):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(directory))
    monkeypatch.setenv("SM100_SIM_CACHE_DIR", str(tmp_path / "absent"))
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"compiled kernels in {directory}: owner" in shown
    assert "mode 0777, not used: everybody may write it" in shown
    assert f"translated kernels in {tmp_path / 'absent'}: not there yet" in shown
    monkeypatch.setenv("SM100_SIM_CACHE_DIR", "off")
    assert main(["env"]) == 0
    assert "translated kernels in" not in capsys.readouterr().out
