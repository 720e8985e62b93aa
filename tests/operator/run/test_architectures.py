"""Architectures: a row and a folder each, and nothing else that knows one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fa4_hd256 import environment, flash_attn_func
from fa4_hd256.__main__ import main
from fa4_hd256.architectures import ARCHITECTURES, named
from fa4_hd256.kernels.kernel_set import KernelSet, kernels_of

#: A third architecture: its row, its folder, and what a call on CPU tensors makes of them.
THIRD = """
import sys, types
from fa4_hd256 import architectures
row = architectures.Architecture("sm_80", "third", ("sm_80",), {(8, 0): ("A100",)}, "b200", 1e9)
architectures.ARCHITECTURES += (row,)

import torch
from fa4_hd256 import kernels
from fa4_hd256.kernels.forward.tiles import ForwardTiles
from fa4_hd256.kernels.kernel_set import KernelSet
folder, module, config = (types.ModuleType(f"{kernels.__name__}.{row.folder}{name}")
                          for name in ("", ".architecture", ".config"))
class Config:
    def __init__(self, tiles, gpu):
        self.tiles, self.gpu = tiles, gpu
    def __str__(self):
        return f"tuned for {self.gpu}"
def tuned(tiles, causal, seqlen_k, gpu, paged):
    return Config(tiles, gpu)
config.Config = Config
module.KERNELS = KernelSet(row, {"forward_third": "kernel:Kernel", "forward": "kernel:Kernel"},
                           "config:Config", tuned=tuned,
                           forwards=(ForwardTiles(48, 96, 64, 1, 1e-6, 5),))
for one in (folder, module, config):
    sys.modules[one.__name__] = one

from fa4_hd256.call.forward_problem import Options, Problem
from fa4_hd256.call.division import splits_for
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.run import catalogue, keys
q, k = torch.zeros(1, 1, 12, 256).bfloat16(), torch.zeros(1, 640, 1, 256).bfloat16()
problem = Problem.describe((q, k, k), Options(1.0))
gpu = Gpu((8, 0), 100, 50, 1 << 26, 1e12)
spec = catalogue.forward_spec(problem, gpu)
sources = dict(keys.compiled_sources("forward", row))
print(problem.packed_heads, problem.tile_queries, splits_for(problem, gpu), spec.config,
      "forward_third" in catalogue.KINDS, not any("blackwell" in name for name in sources))
"""


@pytest.mark.sampled
def test_a_third_touches_no_other(tmp_path):
    """A call gets its tiles, clusters and configuration; neither its sources nor those of the
    others are in the other's keys."""
    variables = {**os.environ, "FA4_HD256_ARCH": "sm_80", "FA4_HD256_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", THIRD], env=variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    # 640 keys are 10 steps of 64, a part each: clusters are single CTAs, and there are 100 SMs.
    assert result.stdout.split() == "12 8 10 tuned for A100 True True".split()


def test_rows():
    """Names, folders and compute capabilities are told apart, and each folder says what it has."""
    capabilities = [capability for a in ARCHITECTURES for capability in a.gpus]
    assert len(set(capabilities)) == len(capabilities)
    for field in ("name", "folder", "simulated"):
        assert len({getattr(a, field) for a in ARCHITECTURES}) == len(ARCHITECTURES)
    for architecture in ARCHITECTURES:
        assert kernels_of(architecture).architecture is architecture
        assert set(architecture.own_targets.values()) <= set(architecture.targets)
        assert architecture.own_targets.keys() <= architecture.gpus.keys()


@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES])
def test_kernels_that_are_named_exist(name):
    kernels = kernels_of(named(name))
    for kind in kernels.classes:
        assert callable(kernels.kernel(kind))
    if kernels.forwards:
        config = kernels.config("forward")
        assert {"forward"} <= set(kernels.classes) and config().tiles in kernels.forwards
        for tiles in kernels.forwards:
            tuned = kernels.tuned(tiles, True, 4096, "", False).tiles
            for name in ("cta_rows", "rows", "cluster", "most_rows"):
                assert getattr(tuned, name) == getattr(tiles, name)
        # One is for calls that no other is meant for.
        assert any(tiles.most_rows is None for tiles in kernels.forwards)
    if kernels.backward is not None:
        config = kernels.config("backward")()
        for row in (*kernels.backward.stored, *kernels.backward.recomputed):
            assert row.kind in kernels.classes and config.of_kernel(row.kind)
        for some in (kernels.backward.stored, kernels.backward.recomputed):
            made = sorted(result for row in some for result in row.results)
            assert made == ["dk", "dq", "dv"]


def test_an_architecture_that_does_not_exist(monkeypatch, capsys):
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_80")
    tensors = [torch.zeros(1, 4, 1, 256).bfloat16() for _ in range(3)]
    message = "FA4_HD256_ARCH is 'sm_80'; accepted: sm_100a or sm_90a"
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*tensors)
    assert main(["plan"]) == 2
    assert message in capsys.readouterr().err


def test_what_is_not_written_is_said():
    """A row without kernels says whose they are, what others have, how to choose."""
    kernels = KernelSet(named("sm_90a"))
    message = "sm_90a, H200 .*has no {} yet; .*sm_100a: B200 .*FA4_HD256_ARCH"
    for what, call in (
        ("forward", kernels.forward_tiles),
        ("backward", kernels.backward_set),
        ("forward", lambda: kernels.config("forward")),
        ("kernel backward_dq", lambda: kernels.kernel("backward_dq")),
    ):
        with pytest.raises(NotImplementedError, match=message.format(what)):
            call()


@pytest.mark.simulator
@pytest.mark.architecture("sm_100a")
def test_a_simulated_device_of_another_architecture(monkeypatch):
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200")
    tensors = [torch.zeros(1, 4, 1, 256).bfloat16() for _ in range(3)]
    message = "passes for a h200 .compute capability 9.0, SM100_SIM_DEVICE.*is sm_100a.*accepted"
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*tensors)


def test_the_default(monkeypatch):
    monkeypatch.delenv("FA4_HD256_ARCH")
    assert environment.architecture().name == "sm_100a"
