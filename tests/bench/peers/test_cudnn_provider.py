"""cuDNN's CuTe DSL attention as a provider of the benchmarks, in the simulator."""

from __future__ import annotations

import pytest
import torch

import sm100_sim
from bench.measure.providers import Frost, Inputs, backward_call
from bench.suite import FORWARD, Case
from fa4_hd256.check import reference

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.sampled,
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

pytest.importorskip("cudnn")

HEADS, KV_HEADS = 2, 1


def test_as_a_provider_of_the_benchmarks():
    """`python -m bench throughput` calls it so, windows and unequal lengths in tests of its own; a
    second call takes the kernel of the first."""
    case = Case("dense", ((300, 300),), HEADS, KV_HEADS, True)
    provider = Frost()
    assert provider.refuses(case, FORWARD) is None
    inputs = Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    exact = reference.attention(*inputs.leaves, causal=True)[0]
    with sm100_sim.attached():
        found = [provider.call(inputs) for _ in range(2)]
    assert len(provider.forward.compiled) == 1
    comparison = reference.same_dtype_pytorch(*inputs.leaves, causal=True).double() - exact
    for out in found:
        assert (out.double() - exact).abs().max() <= 2 * comparison.abs().max()


@pytest.mark.parametrize(("lengths", "window"), [
    ((300, 300), (130, None)), ((130, 400), (None, None)),
])  # fmt: skip
def test_masks_of_the_provider(lengths, window):
    """A window, and a causal mask aligned to the bottom right."""
    case = Case("dense", (lengths,), HEADS, KV_HEADS, True, window)
    inputs = Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    mask = {"window_size": case.bounds}
    exact = reference.attention(*inputs.leaves, **mask)[0]
    with sm100_sim.attached():
        found = Frost().call(inputs)
    comparison = reference.same_dtype_pytorch(*inputs.leaves, **mask).double() - exact
    assert (found.double() - exact).abs().max() <= 2 * comparison.abs().max()


def test_gradients_of_the_provider():
    """`backward_call` takes its own backward, at each call."""
    case = Case("dense", ((256, 256),), HEADS, KV_HEADS, False)
    inputs = Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    leaves = tuple(leaf.clone() for leaf in inputs.leaves)
    exact = reference.gradients(leaves, inputs.dout)
    allowed = reference.same_dtype_gradients(leaves, inputs.dout)
    with sm100_sim.attached() as session:
        run = backward_call(Frost(), inputs)
        before = len(session.reports)
        found, again = run(), run()
        assert len(session.reports) - before == 2 * 6
    for name, mine, same in zip("qkv", found, again):
        error = (mine.double() - exact[name]).abs().max()
        assert error <= 3 * (allowed[name].double() - exact[name]).abs().max()
        assert torch.equal(mine, same)
