"""flash-attn-4's public interface, called as on a GPU inside `sm100_sim.attached()`.

head_dim 64 and 128 share their kernels (two query tiles a CTA; the backward at 128 is two-CTA),
head_dim 256 has two-CTA kernels of its own. Errors are compared with PyTorch's own in bf16.
"""

import math

import pytest
import torch

import sm100_sim

pytestmark = [
    pytest.mark.third_party,
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


CASES = [(64, False, 200), (128, True, 256), (256, False, 256)]


@pytest.mark.parametrize(("head_dim", "causal", "seqlen"), CASES)
def test_forward_and_backward(head_dim, causal, seqlen):
    shape = (1, seqlen, 1, head_dim)
    q, k, v, grad = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(4))

    def simulated(q, k, v, causal):
        from flash_attn.cute.interface import flash_attn_func

        out = flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    with sm100_sim.attached() as session:
        found = results(q, k, v, causal, grad, simulated)
    low = results(q, k, v, causal, grad, reference)
    exact = results(*(t.double() for t in (q, k, v)), causal, grad, reference)
    for name, ours, torchs, true in zip(("out", "dq", "dk", "dv"), found, low, exact):
        error = (ours.double() - true).abs().max().item()
        assert error <= (torchs.double() - true).abs().max().item(), name
    kernels = [report.kernel for report in session.reports]
    assert any("fwd" in name or "forward" in name for name in kernels)
    assert any("bwd" in name or "backward" in name for name in kernels)
    assert sum(report.warps("tcgen05.mma") for report in session.reports) > 0
