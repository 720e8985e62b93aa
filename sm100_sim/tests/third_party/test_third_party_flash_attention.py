"""flash-attn-4's public interface, called as on a GPU inside `sm100_sim.attached()`.

For SM100 head_dim 64 and 128 share their kernels (two query tiles per CTA; the backward at 128 is
two-CTA), head_dim 256 has two-CTA kernels of its own. For SM90 all head_dims share theirs. Errors
are compared with PyTorch's own in bf16.
"""

import math

import pytest
import torch

import sm100_sim

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.sampled,
    pytest.mark.simulator,
    # flash-attn-4 is older than the DSL it runs on here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data"),
]

pytest.importorskip("flash_attn.cute")


def reference(q, k, v, causal):
    """Attention of (batch, seqlen, heads, dim) tensors in their own dtype."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def results(q, k, v, causal, grad, attention):
    """[out, dq, dk, dv] of an attention function on copies of the inputs."""
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*inputs, causal)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(t.grad for t in inputs)]


def simulated(q, k, v, causal):
    """Compute its attention of the same tensors."""
    from flash_attn.cute.interface import flash_attn_func

    out = flash_attn_func(q, k, v, causal=causal)
    return out[0] if isinstance(out, tuple) else out


def compare(head_dim, causal, seqlen, heads=1, **options):
    """The reports of a forward and backward whose errors are at most PyTorch's."""
    q, grad = (torch.randn(1, seqlen, heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, seqlen, 1, head_dim, dtype=torch.bfloat16) for _ in range(2))

    def grouped(q, k, v, causal):
        return reference(q, *(t.expand(q.shape) for t in (k, v)), causal)

    with sm100_sim.attached(**options) as session:
        found = results(q, k, v, causal, grad, simulated)
    low = results(q, k, v, causal, grad, grouped)
    exact = results(*(t.double() for t in (q, k, v)), causal, grad, grouped)
    for name, ours, torchs, true in zip(("out", "dq", "dk", "dv"), found, low, exact):
        error = (ours.double() - true).abs().max().item()
        assert error <= (torchs.double() - true).abs().max().item(), name
    kernels = [report.kernel for report in session.reports]
    assert any("fwd" in name or "forward" in name for name in kernels)
    assert any("bwd" in name or "backward" in name for name in kernels)
    return session.reports


CASES = [(64, False, 200), (128, True, 256), (256, False, 256)]


@pytest.mark.parametrize(("head_dim", "causal", "seqlen"), CASES)
def test_forward_and_backward(head_dim, causal, seqlen):
    reports = compare(head_dim, causal, seqlen)
    assert sum(report.warps("tcgen05.mma") for report in reports) > 0


@pytest.fixture
def on_hopper(monkeypatch):
    """The simulator passes for an H200; flash-attn-4 remembers which device it has queried."""
    from flash_attn.cute import cute_dsl_utils, interface

    asked = interface._get_device_arch, cute_dsl_utils._get_device_arch_and_num_sms
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200")
    for function in asked:
        function.cache_clear()
    yield
    for function in asked:
        function.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "causal", "seqlen", "heads", "options"),
    [
        (64, True, 200, 2, {"schedule": "lazy"}),
        (128, True, 256, 1, {"sanitize": True}),
        (128, False, 320, 4, {"seed": 5}),
        (256, False, 256, 1, {"sanitize": True, "schedule": "lazy"}),
        (256, True, 200, 2, {"seed": 2}),
    ],
    ids=str,
)
def test_the_kernels_for_hopper(on_hopper, head_dim, causal, seqlen, heads, options):
    """The SM90 path runs under schedules in which wgmmas take effect late."""
    reports = compare(head_dim, causal, seqlen, heads, **options)
    assert sum(report.warps("wgmma.mma_async") for report in reports) > 0
    assert not any(report.warps("tcgen05.mma") for report in reports)
    # Findings of its preprocessing are known (docs/findings.md); there are no others.
    assert {finding.kind for report in reports for finding in report.findings} <= {"two-writers"}
