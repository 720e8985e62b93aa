"""Tensors that every call makes again."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256.call.division import divided
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import empty_results
from fa4_hd256.run import forward
from fa4_hd256.run.execute import maker

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (), (3, 0, 2), (1, 1, 7, 256)])
def test_they_are_as_torch_makes_them(shape, dtype, device):
    expected = torch.empty(shape, dtype=dtype, device=device)
    make = maker(shape, dtype, expected.device)
    one, other = make(), make()
    for made in (one, other):
        assert made.shape == expected.shape and made.stride() == expected.stride()
        assert made.dtype == dtype and made.device == expected.device
        assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert not made.requires_grad and not made.is_inference()
    assert not expected.numel() or one.data_ptr() != other.data_ptr()


def test_zeros(device):
    make = maker((300, 7), torch.float32, torch.empty(0, device=device).device, is_zero=True)
    make().fill_(1)
    assert not make().any()


@pytest.mark.parametrize("first", [False, True], ids=["first outside", "first inside"])
def test_inference_mode(first, device):
    """A tensor belongs to the mode in which it is made, whatever the maker was made in."""
    device = torch.empty(0, device=device).device
    with torch.inference_mode(first):
        make = maker((2, 19), torch.float64, device)
    with torch.inference_mode():
        assert make().is_inference()
    weight = make().fill_(1).requires_grad_()
    weight.square().sum().backward()
    assert not weight.is_inference() and weight.grad.eq(2).all()


@pytest.mark.cuda
def test_of_a_capture_nothing_is_kept():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        made = maker((4, 1000), torch.complex128, device)()
    assert made.is_contiguous() and made.shape == (4, 1000)
    before = torch.cuda.memory_allocated()
    make = maker((4, 1000), torch.complex128, device)
    assert torch.cuda.memory_allocated() > before, "the element is not of the graph's memory"
    assert make().shape == (4, 1000)


@pytest.mark.simulator
def test_what_is_written_behind_parts_is_no_lse():
    shapes = ((2, 3, 4, 256), (2, 900, 2, 256), (2, 900, 2, 256))
    tensors = tuple(torch.randn(shape).bfloat16() for shape in shapes)
    problem = Problem.describe(tensors, Options.check(None, False, (None, None), 0.0))
    out, lse = empty_results(divided(problem, 3, forward.gpu_of(problem.device)), True)
    assert out.shape == (6, 3, 4, 256) and lse.shape == (6, 4, 3)
    assert out.is_contiguous() and lse.is_contiguous() and out.isnan().all() and lse.isnan().all()
    between = lse.data_ptr() - (out.data_ptr() + out.nbytes)
    assert between == 4 * forward.BETWEEN_SPLITS > 0
