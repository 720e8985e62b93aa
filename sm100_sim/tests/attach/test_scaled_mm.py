"""torch._scaled_mm and scaled_grouped_mm inside `attached()`, block scales placed one by one."""

import itertools

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm

import sm100_sim

pytestmark = pytest.mark.simulator

pytest.importorskip("cutlass")
E2M1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def place(scales: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The bytes cuBLAS reads for scales (rows, blocks): offsets as its documentation gives them."""
    rows, columns = scales.shape
    across = -(-columns // 4)
    stored = torch.zeros(-(-rows // 128) * across * 512)
    for r, c in itertools.product(range(rows), range(columns)):
        tile = r // 128 * across + c // 4
        stored[512 * tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    return stored.to(kind)


def operand(rows: int, k: int, block: int, kind: torch.dtype, seed: int):
    """Return (the operand, its scales as stored, float64 values)."""
    generator = torch.Generator().manual_seed(seed)
    scales = 2.0 ** torch.randint(-3, 4, (rows, k // block), generator=generator)
    if kind == torch.float4_e2m1fn_x2:
        codes = torch.randint(0, 16, (rows, k), generator=generator)
        values = torch.tensor([(1 - 2 * (c >> 3)) * E2M1[c & 7] for c in range(16)])[codes]
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(kind)
    else:
        packed = torch.randn(rows, k, generator=generator).to(kind)
        values = packed.float()
    return packed, scales, values.double() * scales.double().repeat_interleave(block, 1)


@pytest.mark.parametrize(
    "kind,scale_kind,block",
    [
        (torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
        (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16),
        (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 32),
    ],
)
@pytest.mark.parametrize("m,n,k", [(128, 256, 128), (200, 96, 320)])
def test_products_of_scaled_blocks(kind, scale_kind, block, m, n, k):
    a, a_scales, a_values = operand(m, k, block, kind, 1)
    b, b_scales, b_values = operand(n, k, block, kind, 2)
    with sm100_sim.attached():
        found = torch._scaled_mm(
            a,
            b.t(),
            place(a_scales, scale_kind),
            place(b_scales, scale_kind),
            out_dtype=torch.float32,
        )
        biased = torch._scaled_mm(
            a,
            b.t(),
            place(a_scales, scale_kind),
            place(b_scales, scale_kind),
            bias=torch.ones(n),
            out_dtype=torch.bfloat16,
        )
    exact = a_values @ b_values.t()
    bound = 2.0**-22 * k * (a_values.abs() @ b_values.abs().t())
    assert ((found - exact).abs() <= bound).all()
    assert torch.allclose(biased.double(), exact + 1, rtol=2.0**-8, atol=1e-3)


def test_scales_of_another_size_are_refused():
    a, scales, _ = operand(128, 128, 32, torch.float8_e4m3fn, 1)
    stored = place(scales, torch.float8_e8m0fnu)
    with sm100_sim.attached(), pytest.raises(ValueError, match="take 512"):
        torch._scaled_mm(a, a.t(), stored, stored[:-1], out_dtype=torch.float32)


def test_one_scale_for_all_goes_to_pytorch():
    a = torch.randn(32, 64).to(torch.float8_e4m3fn)
    one = torch.tensor(0.5)
    with sm100_sim.attached():
        found = torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.float32)
    assert torch.allclose(found, 0.25 * (a.float() @ a.float().t()), rtol=1e-2, atol=1e-2)


#: Group sizes, one of them empty, and as rows no multiples of the 128 of a scale tile.
GROUPS = (64, 0, 192)
MX, NV = ScalingType.BlockWise1x32, [ScalingType.BlockWise1x16, ScalingType.TensorWise]


def grouped(a, b, scales, factors, **options) -> torch.Tensor:
    """scaled_grouped_mm with MX scales or, with a factor of each group and operand, NVFP4."""
    recipe = MX if factors is None else NV
    first, second = scales if factors is None else [[*pair] for pair in zip(scales, factors)]
    ends = torch.tensor(GROUPS).cumsum(0, dtype=torch.int32)
    swizzle = SwizzleType.SWIZZLE_32_4_4
    with sm100_sim.attached():
        return scaled_grouped_mm(
            a, b, first, recipe, second, recipe, swizzle, swizzle, offs=ends,
            output_dtype=torch.float32, **options,
        )  # fmt: skip


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


@pytest.mark.parametrize("along_k", [False, True], ids=["rows", "k"])
@pytest.mark.parametrize(
    "kind,scale_kind,block",
    [
        (torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
        (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16),
    ],
)
def test_grouped_products(kind, scale_kind, block, along_k):
    m, n, k = 96, 160, 128
    shapes = [((m, size), (n, size)) if along_k else ((size, k), (n, k)) for size in GROUPS]
    parts = [
        [operand(*shape, block, kind, 2 * g + i) for i, shape in enumerate(pair)]
        for g, pair in enumerate(shapes)
    ]
    packed = [[side[i][0].view(torch.uint8) for side in parts] for i in range(2)]
    if along_k:
        a, b = torch.cat(packed[0], 1).view(kind), torch.cat(packed[1], 1).view(kind).t()
    else:
        a, b = torch.cat(packed[0]).view(kind), torch.stack(packed[1]).view(kind).transpose(1, 2)
    scales = [joined([place(side[i][1], scale_kind) for side in parts]) for i in range(2)]
    factors = None
    if scale_kind == torch.float8_e4m3fn:
        factors = torch.tensor([0.5, 3.0, 2.0]), torch.tensor([4.0, 5.0, 0.25])
    found = grouped(a, b, scales, factors)
    exact = [left[2] @ right[2].t() for left, right in parts]
    if factors is not None:
        exact = [e * x * y for e, x, y in zip(exact, *factors, strict=True)]
    want = torch.stack(exact) if along_k else torch.cat(exact)
    assert found.shape == want.shape
    assert torch.allclose(found.double(), want, rtol=1e-5, atol=1e-3)


def test_other_grouped_products_go_to_pytorch():
    a = torch.randn(sum(GROUPS), 64).to(torch.float8_e4m3fn)
    b = torch.randn(3, 32, 64).to(torch.float8_e4m3fn).transpose(1, 2)
    scales = [torch.ones(1, dtype=torch.float8_e8m0fnu)] * 2
    with pytest.raises(NotImplementedError, match="_scaled_grouped_mm_v2"):
        grouped(a, b, scales, None, bias=torch.ones(3, 32))
