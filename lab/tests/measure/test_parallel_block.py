"""A training step of a Gemma-shaped block, divided by PyTorch over two processes that each run the
compiled kernels, against one process: tensor parallelism and FSDP2."""

import pytest
import torch
import training_block
from ranks import Failed, Pool

#: Tolerance of a gradient's norm: sums of float32 in another order, rounded to bfloat16 around
#: attention.
TOLERANCE = 1e-2


@pytest.fixture(scope="module")
def pool(request):
    device = request.config.getoption("--device")
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with Pool(2, device) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(pool, request):
    return answers(pool, request, "one GPU")[0]


def answers(pool, request, *arguments):
    device = request.config.getoption("--device")
    found = pool.run(training_block.divided, device, *arguments)
    for one in found:
        assert not isinstance(one, Failed) and one is not None, getattr(one, "trace", "a rank died")
    return found


def errors(found, expected):
    assert found.keys() == expected.keys()
    return {name: ((found[name] - e).norm() / e.norm()).item() for name, e in expected.items()}


@pytest.mark.parametrize("name", ["tensor parallel", "FSDP2"])
def test_gradients_are_those_of_one_process(pool, request, expected, name):
    for found in answers(pool, request, name):
        worst = errors(found, expected)
        assert max(worst.values()) < TOLERANCE, worst


def test_gradients_of_some_heads_are_seen(pool, request, expected):
    """Norms of a rank's own heads are not those of all."""
    found = answers(pool, request, "tensor parallel", False)[0]
    assert errors(found, expected)["q_norm.weight"] > 10 * TOLERANCE
