"""Errors of launch options tell what was given in words: no object's insides, no long rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sm100_sim import LaunchError, Options
from sm100_sim.ptx_launcher import _extent

GIVEN = {
    "a Tensor of shape (2, 3) and torch.float32": torch.zeros(2, 3),
    "a ndarray of shape (2,) and float64": np.zeros(2),
    "an Options": Options(),
    "the class Options": Options,
    "[0, 1, 2, 3, 4, 5, 6, 7, ...]": list(range(700)),
    "-1": -1,
    "0.5": 0.5,
}


@pytest.mark.parametrize("told", GIVEN)
def test_options_that_are_not_accepted(told):
    for name, accepted in (
        ("clusters", "whole numbers from 1 on"),
        ("threads", "whole numbers from 1 on"),
        ("seed", "whole numbers from 0 on"),
        ("sanitize", "False, True, 'wait-ld', 'strict', 'strict-order'"),
        ("schedule", "'eager', 'lazy'"),
    ):
        with pytest.raises(ValueError) as refused:
            Options(**{name: GIVEN[told]})
        assert str(refused.value) == f"{name} is {told}; accepted: {accepted}"


@pytest.mark.parametrize("told", GIVEN)
def test_extents_that_are_not_accepted(told):
    with pytest.raises(LaunchError) as refused:
        _extent("grid", GIVEN[told])
    assert str(refused.value).startswith(f"grid is {told}; accepted: ")


def test_a_truth_value_is_no_seed():
    with pytest.raises(ValueError, match="seed is True"):
        Options(seed=True)
