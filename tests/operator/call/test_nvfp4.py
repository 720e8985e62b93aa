"""The quantizer of NVFP4 against float64 and all of its codes."""

from __future__ import annotations

import math

import pytest
import torch

from fa4_hd256.quantize import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
EVERY = torch.cat((VALUES, -VALUES))
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()


def nearest(values, every):
    """The nearest of ascending `every`, and whether two are equally near."""
    upper = torch.searchsorted(every, values).clamp(1, len(every) - 1)
    below, above = every[upper - 1], every[upper]
    return torch.where(values - below <= above - values, below, above), (
        values - below == above - values
    )


def test_every_code_is_dequantized():
    codes = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
    scales = E4M3[torch.randint(len(E4M3), (32, 1))]
    found = dequantize_nvfp4(codes, scales.to(torch.float8_e4m3fn), 0.25, torch.float64)
    for row in range(32):
        for column in range(16):
            code = int(codes[row, column // 2]) >> 4 * (column % 2) & 15
            assert found[row, column] == EVERY[code] * scales[row, 0] * 0.25


@pytest.mark.parametrize("scale", [1.0, 0.0371])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_scales_and_elements_are_the_nearest(scale, spread):
    tensor = torch.randn(64, 3, 256) * spread * torch.rand(64, 1, 1)
    codes, scales = quantize_nvfp4(tensor, scale)
    assert codes.shape == (64, 3, 128) and scales.shape == (64, 3, 16)
    blocks = tensor.double().unflatten(-1, (16, 16))
    scale = float(torch.tensor(scale))
    wanted, _ = nearest((blocks.abs().amax(-1) / 6 / scale).clamp(max=448), E4M3)
    differ = scales.double() != wanted
    # float32's own rounding of the quotient may move a tie.
    assert differ.double().mean() < 1e-3
    steps = scales.double()[..., None] * scale
    found = dequantize_nvfp4(codes, scales, scale, torch.float64).unflatten(-1, (16, 16))
    every = EVERY.unique()
    quotients = torch.where(steps > 0, blocks / steps, 0.0).clamp(-6, 6)
    best, _ = nearest(quotients, every)
    distance, least = (found / steps.clamp(min=1e-30) - quotients).abs(), (best - quotients).abs()
    assert (distance <= least + 2**-20).all()


def test_ties_go_to_even_codes():
    midpoints = (VALUES[1:] + VALUES[:-1]) / 2
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    block = torch.tensor([6.0, *midpoints.tolist(), *(-midpoints).tolist(), -6.0])
    codes, scales = quantize_nvfp4(block)
    assert scales.float().item() == 1.0
    found = dequantize_nvfp4(codes, scales)
    assert found.tolist() == [6.0, *wanted, *(-value for value in wanted), -6.0]


def test_saturation_zeros_and_nan():
    blocks = torch.ones(5, 16)
    blocks[0] *= 1e6
    blocks[1, 3], blocks[1, 4] = math.inf, -math.inf
    blocks[2, 7] = math.nan
    blocks[3] *= 2.0**-13
    codes, scales = quantize_nvfp4(blocks)
    found = dequantize_nvfp4(codes, scales)
    assert (found[0] == 6 * 448).all()
    assert found[1, 3] == 6 * 448 and found[1, 4] == -6 * 448 and (found[1, 5:] == 0).all()
    assert found[2].isnan().all() and (codes[2] == 0).all()
    assert (found[3] == 0).all() and (codes[3] == 0).all()
    assert (found[4] == found[4, 0]).all() and abs(found[4, 0] - 1) < 1 / 16


def test_a_scale_for_each_head():
    tensor = torch.randn(2, 5, 3, 256)
    scales = torch.tensor([0.01, 0.1, 1.0])
    codes, block_scales = quantize_nvfp4(tensor, scales)
    for head, scale in enumerate(scales):
        own = quantize_nvfp4(tensor[:, :, head], float(scale))
        assert torch.equal(codes[:, :, head], own[0])
        assert torch.equal(block_scales[:, :, head].float(), own[1].float())
    found = dequantize_nvfp4(codes, block_scales, scales)
    assert (found - tensor).norm() / tensor.norm() < 0.12


def test_the_global_scale_uses_the_range_of_block_scales():
    tensor = torch.randn(4, 256) * 1e-5
    scale = nvfp4_global_scale(tensor)
    _, block_scales = quantize_nvfp4(tensor, scale)
    assert block_scales.float().max() == 448
    assert nvfp4_global_scale(torch.zeros(3)) == 1


def test_what_is_refused():
    row = torch.zeros(2, 16)
    with pytest.raises(TypeError, match="dtype torch.int32; accepted: a floating-point"):
        quantize_nvfp4(row.int())
    with pytest.raises(ValueError, match=r"shape \(2, 8\); accepted: .* multiple of 16"):
        quantize_nvfp4(row[:, :8])
    with pytest.raises(ValueError, match="global_scale is not positive"):
        quantize_nvfp4(row, 0.0)
    codes, scales = quantize_nvfp4(row)
    with pytest.raises(TypeError, match="accepted: torch.uint8 and torch.float8_e4m3fn"):
        dequantize_nvfp4(codes, scales.float())
    with pytest.raises(ValueError, match=r"accepted: \(2, 1\)"):
        dequantize_nvfp4(codes, scales[:1])


def test_the_global_scale_is_that_of_finite_elements():
    """One element would else leave all others to a scale of 1, or of infinity."""
    tensor = torch.tensor([2e-3, -4e-3, 0.0])
    wanted = nvfp4_global_scale(tensor)
    for value in (math.nan, math.inf, -math.inf):
        wild = torch.cat((tensor, torch.tensor([value])))
        assert nvfp4_global_scale(wild) == wanted and wild[3].isnan() == math.isnan(value)
    assert nvfp4_global_scale(torch.zeros(0, 16)) == 1


def test_global_scales_of_other_shapes_are_refused():
    tensor = torch.randn(3, 4, 16)
    message = r"global_scale has shape \(5,\); accepted: one value, or .* against \(3, 4\)"
    with pytest.raises(ValueError, match=message):
        quantize_nvfp4(tensor, torch.ones(5))
    given = quantize_nvfp4(tensor, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"global_scale has shape \(1, 3, 4\)"):
        dequantize_nvfp4(*given, torch.ones(1, 3, 4))
