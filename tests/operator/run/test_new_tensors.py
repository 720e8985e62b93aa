"""Tensors that every call makes again."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256.run.execute import maker


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
