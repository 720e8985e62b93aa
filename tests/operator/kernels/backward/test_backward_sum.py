"""The kernel that adds up parts of dK and dV: float32, in the parts' order, rounded once."""

from __future__ import annotations

import math

import pytest
import torch
from backward_cases import check, inputs

from fa4_hd256.call import backward_problem
from fa4_hd256.gpus.family import architecture_of
from fa4_hd256.kernels.small.backward_sum import SumConfig
from fa4_hd256.run.backward_arguments import sum_call_arguments
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.execute import execute
from fa4_hd256.run.plan import PlanBuilder


def added(parts, heads, dtype=torch.bfloat16):
    """Return the kernel's sum of parts of dK and dV, in memory that holds NaN."""
    device = parts[0].device
    batch, rows = parts[0].shape[:2]
    results = tuple(
        torch.full((batch, rows, heads, 256), math.nan, dtype=dtype, device=device)
        for _ in range(2)
    )
    spec = KernelSpec("backward_sum", SumConfig(), dtype, architecture_of(device))
    tensors = (*parts, *results)
    builder = PlanBuilder.for_tensors(device, ("dk parts", "dv parts", "dk", "dv"), tensors)
    views = tuple(builder.inputs.values())
    builder.launch(spec, sum_call_arguments(views[:2], views[2:]))
    execute(builder.plan(), tensors)
    return results


def expected(parts, heads, dtype):
    """Return the same sums one after the other, exactly as rounded."""
    numbered = parts.unflatten(2, (heads, -1)).unbind(3)
    total = torch.zeros_like(numbered[0])
    for part in numbered:
        total = total + part
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "count"), [(1, 1, 1, 2), (2, 5, 3, 3), (1, 9, 2, 8), (3, 17, 1, 5)]
)
@pytest.mark.sampled("1-1-1-2-dtype0", "1-9-2-8-dtype0")
def test_sums_are_those_of_float32_in_order(device, batch, rows, heads, count, dtype):
    torch.manual_seed(rows)
    shape = batch, rows, heads * count, 256
    # The first and the last part cancel: another order has other sums.
    parts = tuple(torch.randn(shape) for _ in range(2))
    for of_parts in parts:
        of_parts[:, :, ::count] += 3e5
        of_parts[:, :, count - 1 :: count] -= 3e5
    parts = tuple(of_parts.to(device) for of_parts in parts)
    found = added(parts, heads, dtype)
    for result, of_parts in zip(found, parts, strict=True):
        wanted = expected(of_parts, heads, dtype)
        assert torch.equal(result, wanted)
        turned = of_parts.unflatten(2, (heads, -1)).roll(1, 3).flatten(2, 3)
        assert count == 2 or not torch.equal(expected(turned, heads, dtype), wanted)


def test_nan_of_any_part_comes_through(device):
    parts = tuple(torch.zeros(1, 3, 3, 256, device=device) for _ in range(2))
    parts[0][0, 1, 2, 77] = math.nan
    dk, dv = added(parts, 1)
    assert dk.isnan().nonzero().tolist() == [[0, 1, 0, 77]]
    assert not dv.any()


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.sampled
def test_gradients_in_parts(device, monkeypatch, parts):
    """The last part may have fewer heads; the memory of the sums may hold anything."""
    monkeypatch.setattr(backward_problem, "choose_head_parts", lambda *given: parts)
    check(inputs((40, 70), (5, 1), device=device), causal=True)
