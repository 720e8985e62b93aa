"""Packed sequences of which few are long: blocks of queries numbered in a row."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.check import reference
from schedulers import PackedBlocks

#: A long one at each end, none, one row, and more of them than a warp has lanes.
LENGTHS = (300, 1, 0, 17, 130, 260, 5, *[2] * 40, 129)


def attend(lengths, heads, device, **options):
    """(tensors, out, lse) of sequences with as many keys as queries."""
    tensors = tuple(torch.randn(sum(lengths), h, 256).to(device, torch.bfloat16)
                    for h in (heads[0], heads[1], heads[1]))  # fmt: skip
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    out, lse = flash_attn_varlen_func(
        *tensors, offsets, offsets, longest, longest, return_lse=True, **options
    )
    return tensors, out, lse


def is_right(tensors, out, lse, lengths, **options):
    """Whether each sequence is what the reference makes of it."""
    begins = [0, *itertools.accumulate(lengths)]
    for begin, end in itertools.pairwise(begins):
        rows = slice(begin, end)
        operands = tuple(t[rows][None] for t in tensors)
        compared = reference.compare(out[rows][None], lse[:, rows][None], operands, **options)
        if not compared.max_error <= compared.tolerance:
            return False
    return True


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (2, 2)], ids=str)
def test_every_row_is_computed(device, heads, use_clc):
    found = attend(LENGTHS, heads, device, causal=True, use_clc=use_clc)
    assert is_right(*found, LENGTHS, window_size=(None, 0))


def test_full_attention_and_windows(device):
    for window in ((None, None), (20, None), (3, 40)):
        found = attend(LENGTHS, (2, 2), device, window_size=window)
        assert is_right(*found, LENGTHS, window_size=window)


@pytest.mark.simulator
def test_a_number_that_leads_elsewhere_is_seen(device, planted):
    """So these lengths are numbered in a row, and the number counts."""
    found = PackedBlocks.found

    def another(self, number):
        block, sequence = found(self, number)
        return block + 1, sequence

    planted.setattr(PackedBlocks, "found", another)
    assert not is_right(
        *attend(LENGTHS, (2, 2), device, causal=True, use_clc=False), LENGTHS,
        window_size=(None, 0),
    )  # fmt: skip
