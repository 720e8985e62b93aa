"""Boxes of keys in pages: what the simulator sees of them."""

from __future__ import annotations

import pytest
import torch
from paged_cases import Paged, attend, check

import sm100_sim
from fa4_hd256 import flash_attn_varlen_func
from sm100_sim.errors import MemoryFault

pytestmark = pytest.mark.simulator


def decoding(page_size=16, **options):
    """Decode two sequences, one of several tiles and one of a part of a page; a window and
    splits."""
    paged = Paged.of((300, 9), page_size)
    before = paged.copy()
    paged.forget(0, 300 - 2 - 150)
    options = {"window_size": (150, 0), "num_splits": 2, "use_clc": False, **options}
    q = torch.randn(4, 2, 256).bfloat16()
    return check(q, paged, (2, 2), before, **options)


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled("None-static", "1-static")
def test_no_findings(use_clc, seed, sanitize):
    sanitize(seed, clusters=2)
    decoding(use_clc=use_clc)
    for report in sm100_sim.last_reports()[-2:]:
        assert report.seed == seed and report.findings == []


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.sampled
def test_boxes_have_the_bytes_of_tiles(page_size):
    """Tiles that end beside a page, in it and past the end load as many bytes as without pages."""
    paged, q = Paged.of((300,), page_size), torch.randn(1, 1, 2, 256).bfloat16()
    options = {"num_splits": 1, "use_clc": False, "causal": True}
    attend(q, paged, **options)
    found = sm100_sim.last_reports()[-1].tma
    k, v = paged.padded()
    flash_attn_varlen_func(q, k, v, seqused_k=paged.used, **options)
    assert found == sm100_sim.last_reports()[-1].tma


def test_the_numbers_that_are_read_decide(monkeypatch):
    """A number out of range stops the kernel that reads it, without the check of the host."""
    from fa4_hd256.call import checks

    monkeypatch.setattr(checks, "check_page_numbers", lambda *_: None)
    paged, q = Paged.of((300,), 16), torch.randn(1, 1, 2, 256).bfloat16()
    paged.table[0, 7] = len(paged.k)
    with pytest.raises(MemoryFault, match="TMA load"):
        attend(q, paged, causal=True, num_splits=1, use_clc=False)
