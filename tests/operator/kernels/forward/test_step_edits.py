"""Mistakes planted into the code of the forward's load and MMA roles: kernels that still give the
same bits, and whose traces no longer agree with the table of steps."""

from __future__ import annotations

import pytest
import torch
from gpus import gpu
from step_traces import assert_as_declared, edited

import sm100_sim
from fa4_hd256 import ForwardConfig
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.blackwell.forward import kernel
from fa4_hd256.run import building
from fa4_hd256.run.arguments import CallTensors, call_arguments, compile_arguments
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.tracing import trace_and_compile
from fa4_hd256.schedulers import StaticPersistentScheduler

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

#: Lines of the source -> the same in another order.
EDITS = {
    # PV(i) before QK(i + 1) takes V(i) before K(i + 1).
    "PV before QK": {
        """\
                rings = self._qk(context, rings)
                rings = self._pv0(context, rings, step > 1)
                rings = self._pv1(context, rings)
""": """\
                rings = self._pv0(context, rings, step > 1)
                rings = self._pv1(context, rings)
                rings = self._qk(context, rings)
""",
        """\
                rings = self._load_kv(tile_context, work, following_kv_tile, "k", rings)
                rings = self._load_kv(tile_context, work, kv_tile, "v", rings)
""": """\
                rings = self._load_kv(tile_context, work, kv_tile, "v", rings)
                rings = self._load_kv(tile_context, work, following_kv_tile, "k", rings)
""",
    },
    "S before its K buffer": {
        """\
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        barriers["s_done"].commit(rings.s)
        rings.s.advance()
""": """\
        barriers["s_done"].commit(rings.s)
        rings.s.advance()
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
""",
    },
    "K before Q": {
        """\
        rings = self._load_q(context, work, rings)
        return self._load_kv(context, work, kv_tile, "k", rings)
""": """\
        rings = self._load_kv(context, work, kv_tile, "k", rings)
        return self._load_q(context, work, rings)
""",
    },
}
TILES = (3, 1, 0, 0, 0)  # steps of those of `attend`


def attend(kernel_class, monkeypatch, **options):
    """Return (out, lse, report) of tiles of several steps, of one, and of none, on one CTA pair."""
    monkeypatch.setitem(
        building.BUILDERS, "forward",
        lambda spec: (
            kernel_class(spec.config, spec.problem_class, StaticPersistentScheduler),
            compile_arguments(spec.problem_class),
        ),
    )  # fmt: skip
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, 256).bfloat16() for length in (1200, 300, 300))
    problem = Problem.describe((q, k, v), Options.check(None, True, (None, None), 0.0, False))
    spec = KernelSpec("forward", ForwardConfig(), problem.problem_class)
    compiled = trace_and_compile(spec)
    out, lse = torch.full_like(q, float("nan")), torch.full((1, 1, 1200), float("nan"))
    tensors = CallTensors(q, k, v, out, lse)
    report = sm100_sim.launch(compiled, *call_arguments(tensors, problem, gpu(1), 0), **options)
    return out, lse, report


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.sampled
def test_another_order_gives_the_same_bits_and_is_noticed(name, tmp_path, monkeypatch):
    expected = attend(kernel.ForwardKernel, monkeypatch, trace=True)
    assert_as_declared(expected[2], ForwardConfig(), TILES)
    wrong = edited(kernel, EDITS[name], tmp_path, monkeypatch)
    out, lse, report = attend(wrong.ForwardKernel, monkeypatch, trace=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    with pytest.raises(AssertionError):
        assert_as_declared(report, ForwardConfig(), TILES)
