"""Test the Hopper forward: its machine code and its plan."""

from __future__ import annotations

import pytest
import torch

import sm100_sim
from fa4_hd256 import flash_attn_func
from fa4_hd256.architectures import named
from fa4_hd256.kernels.hopper.architecture import tuned
from fa4_hd256.kernels.hopper.forward.config import ForwardConfig
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.proof.plans import describe

pytestmark = pytest.mark.simulator

#: Configurations that a call may get by default, and a cluster that shares its loads.
LONG, SHORT = ForwardConfig(), ForwardConfig(block_kv=64)


@pytest.mark.parametrize(
    "causal, seqlen_k, keys",
    [(True, 16384, 64), (False, 16384, 80), (False, 1024, 80), (False, 512, 64), (False, 1, 64)],
)
def test_the_default_wastes_little_of_the_last_step(causal, seqlen_k, keys):
    found = tuned(ForwardConfig().tiles, causal, seqlen_k, "H200", paged=False)
    assert found.block_kv == keys


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="shared memory"):
        ForwardConfig(block_kv=128)
    with pytest.raises(ValueError, match="block_kv is 72; accepted are multiples of 16"):
        ForwardConfig(block_kv=72)
    with pytest.raises(ValueError, match="v_stages is 1"):
        ForwardConfig(v_stages=1)
    with pytest.raises(ValueError, match="ctas is 4; accepted are 1 and 2"):
        ForwardConfig(ctas=4)
    with pytest.raises(ValueError, match="rescale_threshold is 16"):
        ForwardConfig(rescale_threshold=16.0)
    assert "k_free" in describe(kernels_of(named("sm_90a")), ForwardConfig())


@pytest.fixture
def sanitized(monkeypatch):
    """Return (out, findings) of a causal call on Hopper under the sanitizer."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:4")

    def findings(config: ForwardConfig, seqlen: int = 330, use_clc: bool = False) -> tuple:
        q, k, v = (torch.randn(1, seqlen, 2, 256, dtype=torch.bfloat16) for _ in range(3))
        out = flash_attn_func(q, k, v, causal=True, config=config, use_clc=use_clc)
        return out, sm100_sim.last_reports()[-1].findings

    return findings


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("config", [LONG, SHORT, ForwardConfig(ctas=2)], ids=repr)
@pytest.mark.sampled("*block_kv=80,*ctas=1,*-static")
def test_no_findings(sanitized, config, use_clc):
    """The sanitizer finds nothing in calls with several tiles per CTA, with steps that a warpgroup
    leaves out, and with loads for a cluster."""
    out, findings = sanitized(config, 700, use_clc)
    assert out.isfinite().all() and findings == []


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled
def test_the_same_bits_under_both_schedulers(num_splits, monkeypatch):
    """Tiles of several lengths give the same bits on fewer SMs, in whatever order SMs take them."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    q, k, v = (torch.randn(1, 700, 2, 256, dtype=torch.bfloat16) for _ in range(3))
    options = {"causal": True, "num_splits": num_splits, "return_lse": True}
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:132")
    expected = flash_attn_func(q, k, v, **options, use_clc=False)
    for sms in (2, 5):
        monkeypatch.setenv("SM100_SIM_DEVICE", f"h200:{sms}")
        for use_clc in (False, True):
            found = flash_attn_func(q, k, v, **options, use_clc=use_clc)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
