"""Calls of ours as bench makes them, with the operator's functions in PyTorch."""

import pytest
import torch
from in_torch import in_torch

from bench.measure.providers import Inputs, Ours
from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256.check import reference
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig

CASES = {
    "dense": Case("dense", ((40, 90),) * 2, 4, 2, False),
    "window": Case("window", ((40, 90),) * 2, 4, 2, True, (20, None)),
    "softcap": Case("softcap", ((40, 90),) * 2, 4, 2, True, softcap=5.0),
    "packed": Case("packed", ((40, 90), (7, 11), (1, 30)), 4, 2, True, packed=True),
    "pages": Case("pages", ((3, 90),) * 2, 4, 2, True, page_size=16),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_computes_its_case(name, monkeypatch):
    in_torch(monkeypatch)
    case = CASES[name]
    inputs = Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    out = Ours().call(inputs)
    assert out.shape == inputs.q.shape and out.dtype == torch.bfloat16
    for index, (seqlen_q, seqlen_k) in enumerate(case.lengths):
        q, k, v = (
            inputs.sequence(tensor, index, side)[None]
            for tensor, side in ((inputs.q, 0), (inputs.k, 1), (inputs.v, 1))
        )
        assert (q.shape[1], k.shape[1]) == (seqlen_q, seqlen_k)
        expected, _ = reference.attention(
            q, k, v, causal=case.causal, window_size=case.window, softcap=case.softcap
        )
        found = inputs.sequence(out, index, 0)[None]
        torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_a_call_hands_its_options_on(name, monkeypatch):
    given = []
    for function in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(
            f"fa4_hd256.{function}", lambda *tensors, **options: given.append(options)
        )
    config = ForwardConfig(rescale_threshold=4.0)
    inputs = Inputs.random(CASES[name], torch.device("cpu"), torch.bfloat16)
    Ours().call(inputs)
    Ours(config=config).call(inputs)
    assert [options["config"] for options in given] == [None, config]
    assert all(options["causal"] == CASES[name].causal for options in given)
    assert Ours().refuses(CASES[name], FORWARD) is None
    assert (Ours().refuses(CASES[name], BACKWARD) is None) == (name != "pages")
