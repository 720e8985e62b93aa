"""The counter of the dynamic scheduler: which launches share one."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from gpus import gpu

from bench.measure import host
from fa4_hd256 import flash_attn_func, plans
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.forward.tiles import ForwardTiles
from fa4_hd256.kernels.kernel_set import KernelSet
from fa4_hd256.kernels.problem_class import TILE_COUNTER, scalar_names
from fa4_hd256.run import execute, tile_counter
from fa4_hd256.run.argument_types import compile_arguments
from fa4_hd256.run.arguments import CallTensors, call_arguments

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """Counters of CUDA devices on the CPU: the sizes of what was made, how often a stream was
    waited for, and whether a graph is being captured."""
    made = SimpleNamespace(sizes=[], waits=0, capturing=False)

    def zeros(size, dtype, device):
        made.sizes.append(size)
        return torch.full((size,), 0, dtype=dtype)

    def synchronize():
        assert not made.capturing
        made.waits += 1

    monkeypatch.setattr(tile_counter.torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=synchronize)
    )
    for kept in ("_counters", "_free"):
        monkeypatch.setattr(tile_counter, kept, {})
    return made


def test_launches_of_a_stream_share_one(cuda):
    """Others have their own; so have streams of other devices, whose handles may be the same."""
    first = tile_counter.tile_counter(CUDA, 7)
    assert tile_counter.tile_counter(torch.device("cuda"), 7) is first
    others = [
        tile_counter.tile_counter(CUDA, 8),
        tile_counter.tile_counter(torch.device("cuda", 1), 7),
    ]
    assert len({one.data_ptr() for one in (first, *others)}) == 3
    # One wait for each device, and none in any later call.
    assert cuda.sizes == [tile_counter.COUNT] * 2 and cuda.waits == 2


def test_a_launch_that_is_captured_has_its_own(cuda):
    """A graph may be replayed beside launches of the stream that it was captured on."""
    eager = tile_counter.tile_counter(CUDA, 7)
    cuda.capturing = True
    captured = [tile_counter.tile_counter(CUDA, 7) for _ in range(2)]
    cuda.capturing = False
    assert len({one.data_ptr() for one in (eager, *captured)}) == 3
    assert tile_counter.tile_counter(CUDA, 7) is eager
    assert tile_counter.tile_counter(CUDA, 8).data_ptr() not in {one.data_ptr() for one in captured}
    assert cuda.sizes == [tile_counter.COUNT]


def test_a_capture_without_any_left_zeroes_its_own(cuda):
    """A graph zeroes it at each replay: before the first eager launch, or after thousands in
    graphs."""
    cuda.capturing = True
    tile_counter.tile_counter(CUDA, 7)
    assert cuda.sizes == [1] and cuda.waits == 0
    cuda.capturing = False
    tile_counter.tile_counter(CUDA, 7)
    cuda.capturing = True
    found = [tile_counter.tile_counter(CUDA, 7) for _ in range(tile_counter.COUNT)]
    assert cuda.sizes == [1, tile_counter.COUNT, 1] and cuda.waits == 1
    assert len({one.data_ptr() for one in found}) == tile_counter.COUNT


def test_a_stream_of_each_thread(cuda):
    """cudaStreamPerThread is one handle and many streams."""
    found = [tile_counter.tile_counter(CUDA, 2)]
    thread = threading.Thread(target=lambda: found.append(tile_counter.tile_counter(CUDA, 2)))
    thread.start()
    thread.join()
    assert found[0] is not found[1]


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("use_clc", [False, True])
def test_which_kernels_get_one(monkeypatch, counts, use_clc):
    """Kernels of an architecture that counts get one, under the dynamic scheduler: types as
    values."""
    q = torch.zeros(1, 1, 1, 256).bfloat16()
    tiles = ForwardTiles(128, 128, 64, 1, 1e-6, 5)
    options, config = Options(1.0, use_clc=use_clc), SimpleNamespace(tiles=tiles)
    problem = Problem.describe((q, q, q), options, config=config)
    kernels = KernelSet(problem.kernels.architecture, counts_tiles=counts)
    monkeypatch.setattr(Problem, "kernels", kernels)
    tensors = CallTensors(q, q, q, q, torch.zeros(1, 1, 1))
    *_, scalars, _ = call_arguments(tensors, problem, gpu())
    own = problem.problem_class
    assert (scalars.tile_counter is not None) == (counts and use_clc)
    *_, types, _ = compile_arguments(own, scalar_names(own, counts))
    assert [value is None for value in types] == [value is None for value in scalars]
    # Clusters of one CTA that run at once.
    assert int(scalars.clusters.value) == 148


@pytest.mark.architecture("sm_100a")
def test_a_kernel_that_counts_nothing_gets_none(monkeypatch):
    """Blackwell's schedulers count no tiles in memory."""

    def refuse(*_):
        raise AssertionError("a counter was made")

    monkeypatch.setattr(execute, "tile_counter", refuse)
    q = torch.randn(1, 128, 1, 256).bfloat16()
    assert flash_attn_func(q, q, q, use_clc=False).isfinite().all()


@pytest.mark.architecture("sm_90a")
def test_launches_of_a_call_share_one(monkeypatch):
    """A backward's kernels run one after the other, so the call asks for one counter."""
    made = []

    def counted(device, stream):
        made.append(torch.zeros(1, dtype=torch.int32))
        return made[-1]

    monkeypatch.setattr(execute, "tile_counter", counted)
    leaves = [torch.randn(1, 4, 1, 256).bfloat16().requires_grad_() for _ in "qkv"]
    with host.stand_in():
        out = flash_attn_func(*leaves, use_clc=True)
        made.clear()
        (plan,) = plans.launched_by(lambda: out.backward(torch.ones_like(out)))
        counts = [any(v.name == TILE_COUNTER for v in step.views) for step in plan.launches]
        (execution,) = [e for e in plans._cache.executions.values() if e.plan is plan]
        packed = [step for step, is_one in zip(execution._free[-1], counts) if is_one]
    assert sum(counts) > 1 and len(made) == 1
    assert all(made[0].data_ptr() in list(step._words) for step in packed)
