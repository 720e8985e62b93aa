"""Processes whose SMs other kernels, NCCL's mostly, may hold while ours run."""

from __future__ import annotations

import pytest
import torch
from backward_cases import gradients, inputs
from torch.testing._internal.distributed.fake_pg import FakeStore

import sm100_sim
from fa4_hd256 import BackwardConfig, ForwardConfig, flash_attn_func
from fa4_hd256.call.forward_problem import backward_use_clc, forward_use_clc
from fa4_hd256.call.process import sms_are_shared
from fa4_hd256.kernels.problem_class import GradientClass, ProblemClass
from fa4_hd256.kernels.small.backward_preprocess import PreprocessClass, PreprocessConfig
from fa4_hd256.kernels.small.combine_config import CombineClass, CombineConfig
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.isa import load_table
from sm100_sim.ptx.parser import parse_module
from sm100_sim.run.grid import clusters_are_independent

pytestmark = pytest.mark.architecture("sm_100a")


def ranks(count: int):
    """A process group of so many ranks that never communicates; ends with the test."""
    torch.distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())


@pytest.fixture(autouse=True)
def _no_choice_by_the_environment(monkeypatch):
    monkeypatch.delenv("FA_CLC", raising=False)
    monkeypatch.delenv("FA4_HD256_RESERVED_SMS", raising=False)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def choices(use_clc=None):
    """Return (forward, backward) of full attention, whose tiles are equal."""
    return forward_use_clc(use_clc, False), backward_use_clc(use_clc)


def test_one_process_keeps_the_static_scheduler():
    """The forward keeps it; a backward has the dynamic one."""
    assert not sms_are_shared() and choices() == (False, True)
    ranks(1)
    assert not sms_are_shared() and choices() == (False, True)


def test_one_of_several_processes_takes_the_dynamic_one():
    ranks(2)
    assert sms_are_shared() and choices() == (True, True)


def test_who_decides_otherwise(monkeypatch):
    """An argument, FA_CLC, or SMs that are left to the others: then a static grid fits."""
    ranks(2)
    assert choices(use_clc=False) == (False, False)
    monkeypatch.setenv("FA_CLC", "0")
    assert choices() == (False, False)
    monkeypatch.delenv("FA_CLC")
    monkeypatch.setenv("FA4_HD256_RESERVED_SMS", "16")
    assert choices() == (False, True)


@pytest.mark.simulator
@pytest.mark.sampled
def test_the_same_bits():
    """Alone and as one of several, plain and in a graph of torch.compile."""
    tensors = inputs((40, 200), (2, 2))
    dout = torch.randn_like(tensors[0])
    expected = gradients(tensors, dout, use_clc=False)
    alone = flash_attn_func(*tensors)
    assert sm100_sim.last_reports()[-1].clc["try_cancel"] == 0
    ranks(2)
    assert torch.equal(flash_attn_func(*tensors), alone)
    assert sm100_sim.last_reports()[-1].clc["try_cancel"] > 0
    found = gradients(tensors, dout)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    layer = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(layer(*tensors), flash_attn_func(*tensors))
    assert sm100_sim.last_reports()[-1].clc["try_cancel"] > 0


def kernels(use_clc: bool):
    problem = ProblemClass(torch.bfloat16, bounded_right=True, use_clc=use_clc)
    config = BackwardConfig()
    yield KernelSpec("forward", ForwardConfig(), problem)
    for kind in ("backward_dv", "backward_products", "backward_dkdv", "backward_dq"):
        yield KernelSpec(kind, config.of_kernel(kind), GradientClass(problem))
    if not use_clc:
        yield KernelSpec("forward_combine", CombineConfig(), CombineClass(torch.bfloat16))
        yield KernelSpec("backward_preprocess", PreprocessConfig(), PreprocessClass(torch.bfloat16))


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "CLC"])
@pytest.mark.sampled
def test_no_cluster_waits_for_another(use_clc):
    """A grid of which only some clusters are resident ends, whatever holds the other SMs: nothing
    of a kernel communicates beyond its cluster but requests of launch control, which the hardware
    answers."""
    load_table()
    for spec in kernels(use_clc):
        (kernel,) = parse_module(compile_kernel(spec).ptx).values()
        launch_control = [i for i in kernel.instructions if i.name.startswith("clusterlaunch")]
        others = [i for i in kernel.instructions if i not in launch_control]
        assert bool(launch_control) == use_clc, spec.kind
        assert clusters_are_independent(others), spec.kind
