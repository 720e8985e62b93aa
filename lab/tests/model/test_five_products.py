"""flash-attn-4's backward with five products, and its forward with KV splits, on the model."""

import dataclasses
import os

import numpy as np
import pytest
import torch

from bench.measure import providers as measured
from bench.peers import flash_attn_4
from bench.suite import BACKWARD, FORWARD, Case
from lab.model.calls import Kind
from lab.model.peers import flash_attn_4_five as five
from lab.model.peers.flash_attn_4 import FlashAttention4Divided
from lab.model.peers.flash_attn_4_five import FlashAttention4FiveProducts
from lab.model.predictor import PROVIDERS
from lab.model.replays import Replayed, programs
from lab.model.summed_dq import SummedDq, tiles_of
from lab.whole.problem import TileCosts
from sm100_sim.timing import Action, load

MACHINE = load()
FULL, CAUSAL = (Case("dense", ((1024, 1024),) * 2, 8, 8, causal) for causal in (False, True))
GROUPED = Case("dense", ((1024, 1024),), 8, 2, False)
_VARIABLE = "FLASH_ATTENTION_HD256_GENERIC_BWD"


def test_tiles_are_five_products():
    tiles = tiles_of(FULL, five.STEP)
    assert len(tiles) == 2 * 8 * 8 and tiles.work.sum() * 2 * 8192 == FULL.flop(BACKWARD)
    triangle = tiles_of(CAUSAL, five.STEP).work[:8] / five.STEP.work
    assert triangle.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]


def test_queries_that_no_key_of_a_tile_sees_are_left_out():
    """Bottom-right alignment: 256 queries are the last of 1024 rows."""
    case = Case("chunk", ((256, 1024),), 1, 1, True)
    steps = tiles_of(case, five.STEP).work / five.STEP.work
    assert steps.tolist() == 7 * [2] + [1]


def test_a_head_s_sums_lie_beside_its_rows():
    tiles = tiles_of(GROUPED, five.STEP)
    assert set(tiles.group) == set(range(8)) and set(tiles.shared_bytes) == {1024 * (1024 + 2048)}
    # K and V read by each query head; dK and dV in float32, once for the group.
    assert tiles.writes.sum() == 2 * 1024 * 1024 * 2 and tiles.reads.sum() == 8 * 1024 * 1024
    assert (tiles.own_bytes == tiles.reads + tiles.writes).all()


@pytest.mark.parametrize(("terabytes", "bound"), [(1.0, True), (100.0, False)])
def test_what_l2_delivers_bounds_a_tile(monkeypatch, terabytes, bound):
    rows = [Replayed(1, work, (1000 + 2 * work,)) for work in (2560.0, 5120.0)]
    monkeypatch.setattr(five, "kept", lambda *given: rows)
    monkeypatch.setattr(five, "programs", lambda *given: [type("T", (), {"program": None})])
    monkeypatch.setattr(five, "_bytes_of_work", lambda program: 200.0)
    monkeypatch.setattr(FlashAttention4FiveProducts, "_require", lambda self: None)
    constant = dataclasses.replace(MACHINE.constants["l2_terabytes"], value=terabytes,
                                   low=terabytes, high=terabytes)  # fmt: skip
    machine = dataclasses.replace(
        MACHINE, constants={**MACHINE.constants, "l2_terabytes": constant}
    )
    provider = FlashAttention4FiveProducts()
    (costs,) = provider.backward(provider.variant(FULL, BACKWARD), machine, 0).costs("whole")
    values = machine.values()
    expected = 200 * values.sms / 2 / (terabytes * 1e3 / values.clock_ghz)
    assert costs.rate == pytest.approx(expected if bound else 2.0) and (expected > 2) == bound


def test_kernels_around_are_counted():
    costs = [TileCosts(0.0, 0.0, 1.0)]
    tiling = five.BackwardTiling("single", False, False, five.STEP.queries)
    found = SummedDq("five", tiling, [MACHINE.values()], lambda which: costs, step=five.STEP)
    alone, grouped = (found._beside(case, found.plan(case), MACHINE.values())
                      for case in (dataclasses.replace(GROUPED, heads_kv=8), GROUPED))  # fmt: skip
    launch = MACHINE.values().launch_us * 1e-6
    assert grouped > alone + 4 * launch > 6 * launch


@pytest.mark.parametrize("case", [
    dataclasses.replace(FULL, packed=True), dataclasses.replace(FULL, softcap=30.0),
    dataclasses.replace(FULL, window=(128, 0))])  # fmt: skip
def test_only_dense_attention_is_modelled(case):
    provider = PROVIDERS[flash_attn_4.FIVE_PRODUCTS]
    assert provider.refuses(FULL, BACKWARD) == flash_attn_4.unavailable()
    assert "dense" in provider.refuses(case, BACKWARD)
    assert "its forward" in provider.refuses(FULL, FORWARD)


def test_the_variable_is_set_for_the_call_alone(monkeypatch):
    monkeypatch.delenv(_VARIABLE, raising=False)
    seen = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(os.environ.get(_VARIABLE))
            return grad, grad, grad

    provider = measured.FlashAttention4FiveProducts()
    monkeypatch.setattr(provider, "call", lambda inputs: Attention.apply(*inputs.leaves))
    case = Case("small", ((128, 128),), 1, 1, False)
    inputs = measured.Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    measured.backward_call(provider, inputs)()
    assert seen == ["1"] and _VARIABLE not in os.environ
    monkeypatch.setenv(_VARIABLE, "0")
    with flash_attn_4.five_products():
        assert os.environ[_VARIABLE] == "1"
    assert os.environ[_VARIABLE] == "0"


@pytest.mark.simulator
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.sampled
def test_the_kernel_adds_what_is_charged(partial):
    if flash_attn_4.unavailable():
        pytest.skip(flash_attn_4.unavailable())
    found = programs(*five._source(False, partial))
    for (seqlen, _), one in zip(five.BACKWARD_SINGLE_SAMPLES, found, strict=True):
        action = one.program.program.action
        steps, left = seqlen / 128, action[action[:, 0] == Action.TMA_STORE, 1].sum()
        results = 2 * 128 * 256 * (4 if partial else 2)
        assert left == steps * 128 * 256 * 4 + results
        assert one.program.work == steps * five.STEP.work and one.program.unmatched == 0


def test_divided_keys_are_a_provider_where_its_rule_divides():
    provider = FlashAttention4Divided()
    decoding = Case("decoding", ((1, 8192),), 16, 2, True)
    if flash_attn_4.unavailable() is None:
        assert provider.refuses(decoding, FORWARD) is None
    assert provider.default(decoding, FORWARD, MACHINE) == (False, 64)
    assert "divides no keys" in provider.refuses(FULL, FORWARD)
    assert "backward" in provider.refuses(decoding, BACKWARD)
    assert "packed" in provider.refuses(dataclasses.replace(decoding, packed=True), FORWARD)
    assert provider.variant(decoding, FORWARD, divided=True).kind == Kind(True)
    assert np.isfinite(list(provider.default(FULL, FORWARD, MACHINE))).all()
