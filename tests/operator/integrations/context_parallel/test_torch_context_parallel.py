"""PyTorch's own context_parallel, unmodified, over our operator through the SDPA adapter."""

from __future__ import annotations

import pytest
import torch_context_cases as cases
from ranks import Failed, Pool

#: (causal, head to tail, rotation): calls of the forward, and of the backward, of each rank. A rank
#: without head-to-tail makes none for keys behind its queries.
CALLS = {
    (True, True, "allgather"): [2, 2],
    (True, True, "alltoall"): [2, 2],
    (True, False, "alltoall"): [1, 2],
    (False, False, "allgather"): [2, 2],
}


@pytest.fixture(scope="module")
def two(request):
    """Two ranks."""
    device = request.config.getoption("--device")
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("needs 2 GPUs")
    with Pool(2, device) as pool:
        yield pool


@pytest.mark.parametrize("arguments", CALLS)
@pytest.mark.sampled
def test_forward_and_gradients(two, device, arguments):
    for answer, calls in zip(two.run(cases.run, device, *arguments), CALLS[arguments], strict=True):
        assert not isinstance(answer, Failed), answer.trace
        found, made = answer
        assert made == [calls, calls]
        worst = cases.errors(found, causal=arguments[0])
        assert set(worst) == {"out", "q", "k", "v"} and max(worst.values()) <= 1, worst


@pytest.mark.sampled
def test_what_pytorch_refuses(two, device):
    """Head to tail, its default, without a causal mask (docs/training.md)."""
    for answer in two.run(cases.run, device, False, True, "allgather"):
        assert (answer.kind, answer.text) == (
            "RuntimeError", "Load balancing requires `is_causal=True`.",
        )  # fmt: skip
