"""Another order, or other rings, is an edit of the tables: such kernels give the same bits."""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32
from gpus import gpu
from step_traces import assert_as_declared

import sm100_sim
from fa4_hd256 import ForwardConfig
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.blackwell.forward.kernel import ForwardKernel
from fa4_hd256.kernels.plan.budgets import SmemPlan
from fa4_hd256.kernels.plan.edges import EdgeTable
from fa4_hd256.kernels.plan.steps import Operand, Ring, StepTable, arrive, each, write
from fa4_hd256.run import catalogue
from fa4_hd256.run.arguments import CallTensors, call_arguments, compile_arguments
from fa4_hd256.run.tracing import trace_and_compile

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]


def renamed(product, ring: str):
    """A product whose B is loaded into a ring of another name, with edges of that name."""

    def use(edge_use):
        return replace(edge_use, edge=edge_use.edge.replace("kv_", f"{ring}_"))

    return replace(
        product,
        b=replace(product.b, ring=ring),
        waits=tuple(map(use, product.waits)),
        commits=tuple(map(use, product.commits)),
        loads=tuple(replace(x, ring=ring) if x.ring == "kv" else x for x in product.loads),
    )


class TwoRings(ForwardConfig):
    """K in a ring of two buffers and V in one of its own, where they share a ring of three."""

    STAGES = {"k": 2, "v": 1}

    @property
    def edges(self) -> EdgeTable:
        edges = []
        for edge in super().edges.edges:
            if edge.name.startswith("kv_"):
                edges += [
                    replace(edge, name=edge.name.replace("kv", ring), stages=stages)
                    for ring, stages in self.STAGES.items()
                ]
            else:
                edges.append(edge)
        return EdgeTable(tuple(edges))

    @property
    def smem(self) -> SmemPlan:
        q, kv, *others = super().smem.regions
        rings = (replace(kv, name=ring, stages=stages) for ring, stages in self.STAGES.items())
        return SmemPlan((q, *rings, *others))

    @property
    def steps(self) -> StepTable:
        table = super().steps
        qk, *pv = table.products
        rings = [ring for ring in table.rings if ring.name != "kv"]
        rings += [Ring(ring, f"{ring}_loaded", f"{ring}_free") for ring in self.STAGES]
        products = (renamed(qk, "k"), *(renamed(product, "v") for product in pv))
        return replace(table, rings=tuple(rings), products=products)


class TwoRingsKernel(ForwardKernel):
    def smem(self, memory):
        config, stages = self.config, TwoRings.STAGES
        scale = cute.make_layout((config.block_q, config.scale_stages))
        return {
            "q": memory.operand("q", config.block_q, 256, config.q_stages),
            "k": memory.operand("k", config.block_kv // 2, 256, stages["k"]),
            "v": memory.operand("v", config.block_kv, 128, stages["v"]),
            "scale": cute.make_tensor(memory.region("scale", Float32, 16), scale),
        }


class PvFirst(ForwardConfig):
    """PV of a step before QK of the following one, which is issued in the same iteration."""

    @property
    def steps(self) -> StepTable:
        table = super().steps
        qk, *pv = table.products
        return replace(table, products=(*pv, qk))


class PAtOnce(ForwardConfig):
    """P handed over when all of it is made, and multiplied by one product."""

    @property
    def edges(self) -> EdgeTable:
        edges = [edge for edge in super().edges.edges if edge.name != "p0_done"]
        return EdgeTable(
            tuple(replace(e, name="p_done") if e.name == "p1_done" else e for e in edges)
        )

    @property
    def steps(self) -> StepTable:
        table = super().steps
        qk, begin, end = table.products
        pv = replace(
            begin, name="PV", a=Operand("P", "p", "p"), b=replace(begin.b, part=None),
            waits=(*begin.waits[:-1], each("p_done")), commits=end.commits,
        )  # fmt: skip
        rings = [ring for ring in table.rings if ring.name not in ("p0", "p1")]
        softmax, *others = table.roles
        first, step, last = softmax.acts
        step = replace(step, actions=(*step.actions[:-4], write("p", "P"), arrive("p_done")))
        softmax = replace(softmax, acts=(first, step, last))
        rings = (*rings, Ring("p", "p_done", over="s"))
        return replace(table, rings=rings, products=(qk, pv), roles=(softmax, *others))


EDITS = {
    "two rings": (TwoRings(), TwoRingsKernel),
    "PV first": (PvFirst(), ForwardKernel),
    "P at once": (PAtOnce(), ForwardKernel),
}
TILES = (3, 1, 0, 0, 0)  # steps of those of `attend`


def attend(config, kernel, monkeypatch, **options):
    """Return (out, lse, report) of tiles of several steps, of one, and of none, on one CTA pair."""
    monkeypatch.setitem(
        catalogue.KINDS, "forward",
        lambda spec: (
            kernel(spec.config, spec.problem_class), compile_arguments(spec.problem_class)
        ),
    )  # fmt: skip
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, 256).bfloat16() for length in (1200, 300, 300))
    problem = Problem.describe((q, k, v), Options.check(None, True, (None, None), 0.0, False))
    compiled = trace_and_compile(catalogue.KernelSpec("forward", config, problem.problem_class))
    out, lse = torch.full_like(q, float("nan")), torch.full((1, 1, 1200), float("nan"))
    tensors = CallTensors(q, k, v, out, lse)
    report = sm100_sim.launch(compiled, *call_arguments(tensors, problem, gpu(1), 0), **options)
    return out, lse, report


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.sampled
def test_an_edited_table_gives_the_same_bits(edit, monkeypatch):
    expected = attend(ForwardConfig(), ForwardKernel, monkeypatch)
    config, kernel = EDITS[edit]
    out, lse, report = attend(config, kernel, monkeypatch, seed=1, sanitize=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert report.findings == []
    *_, report = attend(config, kernel, monkeypatch, trace=True)
    assert_as_declared(report, config, TILES)
    with pytest.raises(AssertionError):
        assert_as_declared(report, ForwardConfig(), TILES)
