"""quack's kernels (PyPI: quack-kernels), called as on a GPU inside `sm100_sim.attached()`.

Row lengths: 1000 is no multiple of a thread block's tile; 65536 in bf16 makes softmax and
cross-entropy split a row over a cluster (st.async to the peers' shared memory).
"""

import pytest
import torch

import sm100_sim

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

pytest.importorskip("quack")
BF16_HALF_ULP = 2**-8


def close(found, exact, terms=1):
    """Within half a bf16 ulp of the largest magnitude, times the number of rounded terms."""
    scale = exact.abs().max().item()
    assert (found.double() - exact).abs().max().item() <= terms * BF16_HALF_ULP * scale


def both(function, reference, *inputs, grad):
    """Outputs and gradients of `function` in the simulator, and of `reference` in float64."""
    with sm100_sim.attached() as session:
        given = [t.clone().requires_grad_() for t in inputs]
        out = function(*given)
        out.backward(grad.to(out.dtype))
        found = [out.detach(), *(t.grad for t in given)]
    exact = [t.double().requires_grad_() for t in inputs]
    out = reference(*exact)
    out.backward(grad.to(inputs[0].dtype).double() if found[0].dtype != torch.float32
                 else grad.double())  # fmt: skip
    return session, found, [out.detach(), *(t.grad for t in exact)]


@pytest.mark.sampled
def test_rmsnorm():
    def simulated(x, weight):
        from quack.rmsnorm import rmsnorm

        return rmsnorm(x, weight, eps=1e-6)

    def reference(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    x, weight = torch.randn(6, 1000, dtype=torch.bfloat16), torch.randn(1000)
    grad = torch.randn(6, 1000).bfloat16().float()
    session, found, exact = both(simulated, reference, x, weight, grad=grad)
    assert len(session.reports) == 2
    for one, true in zip(found, exact, strict=True):
        close(one, true)


@pytest.mark.sampled
def test_layernorm():
    x, weight = torch.randn(6, 1024, dtype=torch.bfloat16), torch.randn(1024)
    with sm100_sim.attached():
        from quack.rmsnorm import layernorm_fwd

        out = layernorm_fwd(x, weight, eps=1e-6)
    close(out, torch.nn.functional.layer_norm(x.double(), (1024,), weight.double(), eps=1e-6))


@pytest.mark.parametrize("length", [1000, 65536])
@pytest.mark.sampled("1000")
def test_softmax(length):
    def simulated(x):
        from quack.softmax import softmax

        return softmax(x)

    x = torch.randn(2, length, dtype=torch.bfloat16)
    grad = torch.randn(2, length).bfloat16().float()
    session, found, exact = both(simulated, lambda x: x.softmax(-1), x, grad=grad)
    assert session.reports[0].cluster == ((1, 4, 1) if length == 65536 else (1, 1, 1))
    close(found[0], exact[0])
    # The kernel takes the rounded probabilities for its gradient.
    close(found[1], exact[1], terms=2)


@pytest.mark.parametrize("length", [1000, 65536])
@pytest.mark.sampled
def test_cross_entropy(length):
    target = torch.tensor([3, length - 1])

    def simulated(x):
        from quack.cross_entropy import cross_entropy

        return cross_entropy(x, target, reduction="none")

    x, grad = torch.randn(2, length, dtype=torch.bfloat16), torch.randn(2)
    _, found, exact = both(
        simulated, lambda x: torch.nn.functional.cross_entropy(x, target, reduction="none"), x,
        grad=grad,
    )  # fmt: skip
    assert (found[0].double() - exact[0]).abs().max() < 1e-5
    close(found[1], exact[1])


@pytest.mark.sampled
def test_topk():
    x = torch.randn(3, 1024, dtype=torch.bfloat16)
    with sm100_sim.attached():
        from quack.topk import topk

        values, indices = topk(x, 16)
    assert torch.equal(values, x.topk(16).values)
    assert torch.equal(x.gather(1, indices.long()), values)


@pytest.mark.sampled
def test_gemm_with_cluster_launch_control():
    """quack's persistent GEMM: TMA, two-CTA tcgen05.mma and CLC scheduling."""
    a, b = torch.randn(300, 136, dtype=torch.bfloat16), torch.randn(136, 264, dtype=torch.bfloat16)
    with sm100_sim.attached(clusters=1) as session:
        from quack.gemm_interface import gemm

        found = gemm(a, b, tuned=False)
    close(found, a.double() @ b.double())
    assert session.reports[0].warps("tcgen05.mma") > 0
    assert session.reports[0].clc["try_cancel"] > 0
