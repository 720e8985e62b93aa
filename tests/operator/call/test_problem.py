"""Layouts that are used in place, and what the kernel sees of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.memory import tma_can_take
from fa4_hd256.call.options import Options
from fa4_hd256.run.execute import execute
from fa4_hd256.run.plan import PlanBuilder


def tensor(*shape):
    return torch.randn(shape).bfloat16()


def layouts():
    """name -> (tensor (batch, seqlen, heads, 256), whether TMA can take it)."""
    fused = tensor(2, 5, 3 * 4 * 256)
    padded = tensor(2, 5, 4, 264)
    shifted = tensor(2 * 5 * 4 * 256 + 8)
    return {
        "contiguous": (tensor(2, 5, 4, 256), True),
        "slice of a fused QKV": (fused.view(2, 5, 3, 4, 256)[:, :, 1], True),
        "heads before sequence": (tensor(2, 4, 5, 256).transpose(1, 2), True),
        "sequence first": (tensor(5, 2, 4, 256).transpose(0, 1), True),
        "every other token": (tensor(2, 10, 4, 256)[:, ::2], True),
        "row padded by 16 bytes": (padded[..., :256], True),
        "base 16 bytes on": (shifted[8:].view(2, 5, 4, 256), True),
        "one head for all": (tensor(2, 5, 1, 256).expand(2, 5, 4, 256), False),
        "one batch entry for all": (tensor(1, 5, 4, 256).expand(2, 5, 4, 256), False),
        "row padded by 8 bytes": (tensor(2, 5, 4, 260)[..., :256], False),
        "base 2 bytes on": (tensor(2 * 5 * 4 * 256 + 1)[1:].view(2, 5, 4, 256), False),
        "head_dim not innermost": (tensor(2, 5, 256, 4).transpose(2, 3), False),
        "every other element": (tensor(2, 5, 4, 512)[..., ::2], False),
    }


def as_kernel_operand(given_tensor):
    """A tensor as a plan passes it on."""
    builder = PlanBuilder.for_tensors(given_tensor.device, ("q",), (given_tensor,))
    view = builder.operand(builder.inputs["q"])
    (tensor,) = execute(builder.plan(view), (given_tensor,))
    return view.in_memory(tensor)


def test_which_layouts_are_copied():
    for name, (given_tensor, in_place) in layouts().items():
        assert tma_can_take(given_tensor) == in_place, name
        operand = as_kernel_operand(given_tensor)
        assert (operand.data_ptr() == given_tensor.data_ptr()) == in_place, name
        assert torch.equal(operand, given_tensor), name
        assert tma_can_take(operand), name


def test_strides_of_dimensions_of_size_one_mean_nothing():
    """Slices and as_strided leave any number there, which TMA would refuse."""
    odd = tensor(5, 256).as_strided((1, 5, 1, 256), (3, 256, 7, 1))
    operand = as_kernel_operand(odd)
    assert operand.data_ptr() == odd.data_ptr()
    assert torch.equal(operand, odd)
    assert all(stride * 2 % 16 == 0 for stride in operand.stride()[:3])


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.permutations(range(3)))
def test_operands_keep_their_values(sizes, order):
    base = tensor(*(sizes[i] for i in order), 256)
    permuted = base.permute(*(order.index(i) for i in range(3)), 3)
    assert list(permuted.shape[:3]) == sizes
    operand = as_kernel_operand(permuted)
    assert operand.data_ptr() == permuted.data_ptr()
    assert torch.equal(operand, permuted)
    assert all(stride * 2 % 16 == 0 for stride in operand.stride()[:3])


def described(scale=None, causal=False, window=(None, None), softcap=0.0):
    q, k = tensor(1, 3, 12, 256), tensor(1, 7, 2, 256)
    return Problem.describe((q, k, k), Options.check(scale, causal, window, softcap, False))


def test_scale():
    assert described().options.softmax_scale == 1 / 16
    assert not described().problem_class.negative_scale
    assert described(-2).problem_class.negative_scale
    assert not described(0).problem_class.negative_scale


def test_windows():
    """-1 and None are unbounded; causal is a bound of 0 on the right, whatever window is given."""
    assert described(window=(-1, None)).options.window == (None, None)
    assert described(causal=True).options.window == (None, 0)
    assert described(causal=True, window=(5, 7)).options.window == (5, 0)
    assert described(window=(-1, 0)).problem_class == described(causal=True).problem_class
    assert described(window=(0, 5)).problem_class.bounded_left
    assert not described(window=(None, 5)).problem_class.bounded_left


def test_lengths_are_not_compiled_in():
    q, k = tensor(2, 9, 4, 256), tensor(2, 30, 2, 256)
    other = Problem.describe((q, k, k), Options(1.0, (100, None)))
    q, k = tensor(1, 3, 8, 256), tensor(1, 3, 4, 256)
    again = Problem.describe((q, k, k), Options(0.5, (7, None)))
    assert other.problem_class == again.problem_class


@pytest.mark.parametrize(
    ("heads", "packed"), [((8, 1), 8), ((128, 1), 128), ((4, 4), 1), ((6, 2), 1), ((256, 1), 1)]
)
def test_heads_that_share_tiles(heads, packed, forward_config):
    """All of a group where they divide the rows of a tile's part, 128 on Blackwell and 64 of a
    warpgroup on Hopper; none where not or where queries have lengths in use."""
    packed = 1 if packed > forward_config().tiles.cta_rows else packed
    # More queries than Hopper's tiles of a few rows hold, which take any group.
    q, k = (tensor(1, 100, count, 256) for count in heads)
    assert Problem.describe((q, k, k), Options(1.0)).problem_class.packed_heads == packed
    used = {"seqused_q": torch.tensor([2], dtype=torch.int32)}
    padded = Problem.describe((q, k, k), Options(1.0), None, used)
    assert padded.problem_class.packed_heads == 1
