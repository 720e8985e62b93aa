"""A training step of a Gemma-shaped block, divided by PyTorch over two processes that each run the
compiled kernels, against one process: tensor parallelism and FSDP2."""

import pytest
import torch
import training_block
from ranks import Failed, Pool

#: Of a gradient's norm: sums of float32 in another order, rounded to bfloat16 around attention.
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
    return answers(pool, request, training_block.whole)[0]


def answers(pool, request, function, *arguments):
    found = pool.run(function, request.config.getoption("--device"), *arguments)
    for one in found:
        assert not isinstance(one, Failed) and one is not None, getattr(one, "trace", "a rank died")
    return found


def errors(found, expected):
    """Of each parameter's gradient, by its norm."""
    assert found.keys() == expected.keys()
    return {name: ((found[name] - e).norm() / e.norm()).item() for name, e in expected.items()}


@pytest.mark.parametrize("name", ["tensor_parallel", "fully_sharded"])
def test_gradients_are_those_of_one_process(pool, request, expected, name):
    for found in answers(pool, request, getattr(training_block, name)):
        worst = errors(found, expected)
        assert max(worst.values()) < TOLERANCE, worst


def test_gradients_of_some_heads_are_seen(pool, request, expected):
    """Norms of a rank's own heads are not those of all."""
    found = answers(pool, request, training_block.tensor_parallel, False)[0]
    assert errors(found, expected)["q_norm.weight"] > 10 * TOLERANCE
