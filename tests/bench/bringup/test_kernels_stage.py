"""The stage of the kernels: right results pass, wrong ones fail. The operator is replaced."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from simulated_target import SIMULATOR

import fa4_hd256
from bench.bringup.outcome import Target, simulated
from bench.bringup.stages import kernels
from bench.bringup.stages.kernels import Call
from fa4_hd256.check import reference
from sm100_sim import device

pytestmark = pytest.mark.simulator

CALL = Call((40, 70), options={"causal": True})


def operator(change):
    """Replace `flash_attn_func`: the reference's result after `change(out, lse)`."""

    def attention(q, k, v, return_lse, use_clc, num_splits, **options):
        out, lse = reference.attention(q, k, v, **options)
        out, lse = out.to(q.dtype), lse.float()
        change(out, lse)
        return out, lse

    return attention


def one_wrong_element(out, lse):
    out[0, 7, 1, 200] += 0.5


def one_nan(out, lse):
    out[0, 7, 1, 200] = math.nan


def wrong_lse(out, lse):
    lse[0, 1, 30] += 0.01


@pytest.mark.parametrize(
    ("change", "state"),
    [(lambda out, lse: None, "passed"), (one_wrong_element, "failed"), (one_nan, "failed"),
     (wrong_lse, "failed")],
)  # fmt: skip
def test_a_forward_is_judged(change, state, monkeypatch):
    monkeypatch.setattr(fa4_hd256, "flash_attn_func", operator(change), raising=False)
    outcome = kernels._forward(CALL, SIMULATOR)
    assert outcome.state == state, outcome
    json.dumps(outcome.as_json(), allow_nan=False)


def packed_operator(swap: bool):
    """Replace `flash_attn_varlen_func`; swap: two rows of the second sequence change places."""

    def attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, **_):
        outs, lses = [], []
        offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for (a, b), (c, d) in zip(*map(itertools.pairwise, offsets)):
            out, lse = reference.attention(q[None, a:b], k[None, c:d], v[None, c:d], causal=causal)
            outs.append(out[0].to(q.dtype))
            lses.append(lse[0].float())
        out = torch.cat(outs)
        if swap:
            out = out.clone()
            out[[80, 81]] = out[[81, 80]]
        return out, torch.cat(lses, dim=1)

    return attention


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("swap", "state"), [(False, "passed"), (True, "failed")])
def test_packed_sequences_are_judged(swap, state, is_backward, monkeypatch):
    monkeypatch.setattr(fa4_hd256, "flash_attn_varlen_func", packed_operator(swap), raising=False)
    outcome = kernels._packed(is_backward, False, SIMULATOR)
    assert outcome.state == state, outcome


@pytest.mark.parametrize("capability", [(8, 0), (10, 1), (12, 0)])
def test_gpus_outside_the_family_are_skipped(capability):
    said = kernels.missing(Target("gpu", "a GPU", capability, 100))
    assert "B200 or GB200 (compute capability 10.0)" in said
    assert said.endswith(f"this GPU has {capability[0]}.{capability[1]}")


def test_without_a_gpu_in_pytorch_the_kernels_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = kernels.missing(Target("gpu", "a B300", (10, 3), 148))
    assert torch.__version__ in said and "sees no GPU" in said
    assert kernels.missing(SIMULATOR) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.missing(Target("gpu", "a B300", (10, 3), 148)) == ""


@pytest.mark.parametrize("name", ["backward_dq", "backward_products"])
@pytest.mark.sampled("backward_dq")
def test_a_gradient_on_another_architecture(name, monkeypatch):
    """Kernels and configuration are those of the GPU that the stage runs on."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200")
    outcome = kernels.run(f"smallest {name}", simulated(device("h200")), lambda text: None)
    assert outcome.state == "passed", outcome
