"""A GEMM compiled by CuTe DSL for each kind of operand, loaded by TMA and multiplied exactly."""

import cutlass
import pytest
import torch
from gemm_kernel import multiply

import sm100_sim

SIZES = 128, 64, 64


@pytest.mark.parametrize(
    ("dtype", "operand", "out", "accumulator", "transposed"),
    [
        (torch.bfloat16, cutlass.BFloat16, torch.float32, cutlass.Float32, True),
        (torch.int8, cutlass.Int8, torch.int32, cutlass.Int32, False),
        (torch.float32, cutlass.TFloat32, torch.float32, cutlass.Float32, False),
        # The 128-byte swizzle with atoms of 32 bytes, in TMA as in the MMA.
        (torch.float32, cutlass.TFloat32, torch.float32, cutlass.Float32, True),
    ],
)
def test_one_tile(dtype, operand, out, accumulator, transposed):
    m, n, k = SIZES
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-3, 4, (rows, k), generator=generator).to(dtype) for rows in (m, n))
    if transposed:
        a, b = (t.T.contiguous().T for t in (a, b))
    d = torch.full((m, n), -1, dtype=out)
    with sm100_sim.attached():
        multiply(a, b, (operand, operand), accumulator, d)
    assert torch.equal(d.double(), a.double() @ b.double().T)
