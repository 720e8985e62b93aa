"""The Hopper backward: its machine code, what the sanitizer says of it, and its plans."""

from __future__ import annotations

import pytest
import torch
from backward_cases import accurate, gradients, inputs

import sm100_sim
from fa4_hd256.architectures import named
from fa4_hd256.kernels.hopper.backward.config import (
    BackwardConfig,
    DvPlan,
    ProductsPlan,
    SinglePlan,
)
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.proof.plans import describe

pytestmark = pytest.mark.simulator

STORED, RECOMPUTED = BackwardConfig(), BackwardConfig(ds_bytes=0)


# Several tiles either way, with rests; one cluster works on all of them, or each on its own.
@pytest.mark.parametrize("config", [STORED, RECOMPUTED], ids=["stored", "recomputed"])
@pytest.mark.parametrize(("seed", "sms"), [(None, 132), (1, 2), (2, 4)])
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "counted"])
@pytest.mark.sampled
def test_no_findings(config, seed, sms, use_clc, monkeypatch, sanitize):
    """No race, lifetime error or missing fence that the sanitizer sees, whatever the schedule."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    sanitize(seed, device=f"h200:{sms}")
    torch.manual_seed(0)
    tensors = inputs((300, 330), (2, 1))
    dout = torch.randn_like(tensors[0])
    options = {"causal": True, "use_clc": use_clc}
    found = gradients(tensors, dout, backward_config=config, **options)
    kernels = 3 if config is STORED else 4
    reports = sm100_sim.last_reports()[-kernels:]
    assert [report.findings for report in reports] == [[]] * kernels
    accurate(found, tensors, dout, causal=True)


@pytest.mark.sampled
def test_schedulers_give_the_same_bits(monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:6")
    tensors = inputs((520, 700), (4, 2))
    dout = torch.randn_like(tensors[0])
    static, counted = (gradients(tensors, dout, causal=True, use_clc=c) for c in (False, True))
    assert all(torch.equal(static[name], counted[name]) for name in "qkv")


def test_a_plan_that_does_not_fit_is_refused():
    for plan in (lambda: DvPlan(dout_stages=3), lambda: ProductsPlan(rows_stages=6)):
        with pytest.raises(ValueError, match="shared memory"):
            plan()
    with pytest.raises(ValueError, match="q_stages is 1 and dout_stages 1; at least 1 and 2"):
        DvPlan(dout_stages=1)
    with pytest.raises(ValueError, match="ds_stages is 2 and rows_stages 2; at least 2 and 3"):
        ProductsPlan(rows_stages=2)
    with pytest.raises(ValueError, match="x_stages is 1 and y_stages 1; at least 2 and 1"):
        SinglePlan("dq", x_stages=1)
    with pytest.raises(ValueError, match="result is 'out'; accepted are dq, dk and dv"):
        SinglePlan("out")
    with pytest.raises(ValueError, match="ds_bytes is -1; accepted"):
        BackwardConfig(ds_bytes=-1)
    assert "dout_free" in describe(kernels_of(named("sm_90a")), STORED)
