"""Errors of attention by the format of the cache."""

from __future__ import annotations

import pytest
import torch

from lab.measure import nvfp4_loss
from lab.measure.nvfp4 import KINDS, errors


@pytest.mark.parametrize("kind", KINDS)
def test_errors_follow_from_the_bits_of_a_format(kind):
    """K by the bits of a significand: 8, 4, and about 2 with a scale near the elements."""
    found = errors(kind)
    assert found["bf16"][1] < 2**-9 < found["e4m3"][1] < 2**-5 < found["NVFP4"][1] < 2**-3
    assert found["bf16"][0] < found["e4m3"][0] < found["NVFP4"][0] < 0.25


def test_losses_of_a_model_follow_them():
    """A model that was not trained: how far the loss of a byte moves goes by the format."""
    torch.manual_seed(0)
    text = torch.randint(256, (nvfp4_loss.CONTEXT + 2,))
    found = nvfp4_loss.losses(nvfp4_loss.Model(), text)
    moved = {form: (loss - found["float32"]).norm() for form, loss in found.items()}
    assert len(found["float32"]) == nvfp4_loss.CONTEXT
    assert 0 == moved["float32"] < moved["bf16"] < moved["e4m3"] < moved["NVFP4"]
