"""`bench masks` on score_mods, without a GPU: its cases, checks and rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_timer import FakeTimer

from bench.commands import masks as command
from bench.measure import checking, mask_providers, providers
from bench.measure.masks import CASES, PACKED_CASES
from bench.measure.scored import ALIBI, CAP, CAPPED, DISTANCES, SCORED_CASES, ScoredCase
from bench.measure.settings import Sampling
from bench.peers import flash_attn_4
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.comparison import BOUND, FUNCTION, OURS, SOFTCAP, standing

pytest.importorskip("cutlass")

CPU = torch.device("cpu")
FUNCTIONS = ALIBI, DISTANCES, CAPPED


def _case(function, batch=2, seqlen=200, heads=(4, 2)):
    return ScoredCase("scores", ((seqlen, seqlen),) * batch, *heads, True, function=function)


def _named(function):
    return function.text


class InTorch(providers.Ours):
    """The function in PyTorch, in float32, in the place of ours."""

    def missing(self):
        return None

    def changed(self, case):
        return case.torch_function(CPU)

    def call(self, inputs):
        case = inputs.case
        q, k, v = (tensor.transpose(1, 2).float() for tensor in inputs.leaves)
        k, v = (t.repeat_interleave(case.heads // case.heads_kv, dim=1) for t in (k, v))
        tokens, heads = torch.arange(case.seqlen_q), torch.arange(case.heads)[:, None, None]
        scores = self.changed(case)(q @ k.mT / 16, 0, heads, tokens[:, None], tokens)
        seen = tokens <= tokens[:, None]
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return out.to(inputs.q.dtype).transpose(1, 2)


class WithoutIt(InTorch):
    """Provider that leaves the function out."""

    def changed(self, case):
        return lambda score, *place: score


def test_the_cases():
    assert [case.function for case in SCORED_CASES] == [ALIBI, DISTANCES, CAPPED]
    lines = [*map(str, CASES), *map(str, PACKED_CASES), *map(str, SCORED_CASES)]
    assert len(set(lines)) == len(lines)
    assert str(SCORED_CASES[0]) == "scores: 4x4096, heads 16/16, causal, ALiBi"
    assert SCORED_CASES[0].plain == Case("scores", ((4096, 4096),) * 4, 16, 16, True)
    assert SCORED_CASES[0].pairs == SCORED_CASES[0].plain.pairs
    case = _case(CAPPED)
    assert case.capped == replace(case.plain, softcap=CAP)
    for wrong in ({"causal": False}, {"softcap": 1.0}, {"window": (3, None)}, {"packed": True}):
        with pytest.raises(ValueError, match="a score_mod beside"):
            replace(case, **wrong)


@pytest.mark.parametrize("function", (ALIBI, DISTANCES), ids=_named)
def test_bias(function):
    """Biases by hand equal those of the function that is compared with."""
    case = _case(function, seqlen=300)
    bias = case.bias(CPU, torch.float32)
    assert bias.shape == (1, 4, 300, 300)
    assert (bias[0] == -torch.inf).equal(torch.ones(4, 300, 300, dtype=torch.bool).triu(1))
    if function is ALIBI:
        assert bias[0, :, 200, 190].tolist() == [-10 / 4, -10 / 16, -10 / 64, -10 / 256]
    else:
        assert bias[0, 1, 299, 171] == bias[0, 1, 299, 0] == bias[0, 1, 200, 73]
        assert bias[0, 1, 200, 72] != bias[0, 1, 200, 74]
    with pytest.raises(ValueError, match="tanh, cap 5 is no bias; accepted: a function that adds"):
        _case(CAPPED).bias(CPU, torch.float32)


@pytest.mark.parametrize("function", FUNCTIONS, ids=_named)
def test_the_check_sees_the_function(function):
    """Rows and heads of a block are counted as in the case; forward and gradients."""
    for provider, passes in ((InTorch(), True), (WithoutIt(), False)):
        inputs = providers.Inputs.random(_case(function), CPU, torch.bfloat16)
        with torch.no_grad():
            assert checking.check_forward(inputs, provider.call(inputs)).passed == passes
        assert checking.check_gradients(provider, inputs).passed == passes


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("function", (ALIBI, CAPPED), ids=_named)
@pytest.mark.sampled("ALiBi*")
def test_rows(function, direction, monkeypatch):
    case, capped = _case(function), function is CAPPED
    chosen = [
        InTorch(), mask_providers.OursFunction(), mask_providers.OursSoftcap(),
        mask_providers.DenseSdpa(), mask_providers.FlashAttention4Functions(),
    ]  # fmt: skip
    (row,) = command.measure([(case, direction)], chosen, FakeTimer(), Sampling(1, 3)).rows
    expected = {OURS, mask_providers.SDPA} | ({SOFTCAP, flash_attn_4.PACKAGE} if capped else set())
    assert row["details"].keys() == expected
    assert row["ours_ms"] is not None and row["mask_us"] is None and row["function_ms"] is None
    assert row[OURS] == pytest.approx(case.flop(direction) / row["ours_ms"] / 1e9)
    assert row["visible"] == 0.5
    if capped:
        assert row["sdpa_ms"] is None and "a bias is added to scores" in row["remarks"]
    else:
        assert row["sdpa_ratio"] == pytest.approx(row["sdpa_ms"] / row["ours_ms"])


@pytest.mark.sampled
def test_flex_attention_has_the_function(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(
        mask_providers.FlexAttention, "_function",
        lambda self: lambda *tensors, kernel_options, **given: flex_attention(*tensors, **given),
    )  # fmt: skip
    for function in FUNCTIONS:
        flex = mask_providers.FlexAttention()
        (row,) = command.measure(
            [(_case(function), FORWARD)], [flex], FakeTimer(), Sampling(0, 1)
        ).rows
        assert row["details"][mask_providers.FLEX]["status"] == "ok"


def test_ours_with_softcap_is_no_peer():
    found = standing({OURS: 1.0 * torch.ones(2).numpy(), SOFTCAP: torch.ones(2).numpy()})
    assert found is None


@pytest.mark.simulator
@pytest.mark.parametrize("function", FUNCTIONS, ids=_named)
@pytest.mark.sampled
def test_ours_in_the_simulator(function):
    case = _case(function, 1, 150, (2, 1))
    inputs = providers.Inputs.random(case, CPU, torch.bfloat16)
    provider = mask_providers.OursMasked()
    with torch.no_grad():
        assert checking.check_forward(inputs, provider.call(inputs)).passed
    assert checking.check_gradients(provider, inputs).passed


@pytest.mark.sampled
@pytest.mark.simulator
def test_what_stands_beside_in_the_simulator():
    case = _case(CAPPED, 1, 150, (2, 1))
    inputs = providers.Inputs.random(case, CPU, torch.bfloat16)
    for provider in (mask_providers.OursSoftcap(), mask_providers.OursCausal()):
        own = replace(inputs, case=provider.computed(case), expected={}, masks={})
        with torch.no_grad():
            assert checking.check_forward(own, provider.call(own)).passed


def test_concerns():
    alibi, capped = _case(ALIBI), _case(CAPPED)
    names = {
        case: [p.name for p in mask_providers.mask_providers() if p.concerns(case)]
        for case in (CASES[0], PACKED_CASES[0], alibi, capped)
    }
    common = [BOUND, mask_providers.SDPA, mask_providers.FLEX]
    assert names[CASES[0]] == [OURS, FUNCTION, *common]
    assert names[PACKED_CASES[0]] == [OURS, FUNCTION, *common, flash_attn_4.PACKAGE]
    assert names[alibi] == [OURS, *common]
    assert names[capped] == [OURS, SOFTCAP, *common, flash_attn_4.PACKAGE]
