"""Boxes of keys in pages: what the simulator sees of them, and bugs that the tests refuse."""

from __future__ import annotations

import pytest
import torch
from paged_cases import Paged, attend, check

import sm100_sim
from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.kernels.rows import pages
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
@pytest.mark.sampled("16")
def test_boxes_have_the_bytes_of_tiles(page_size):
    """Tiles that end beside a page, in it and past the end load as many bytes as without pages."""
    paged, q = Paged.of((300,), page_size), torch.randn(1, 1, 2, 256).bfloat16()
    options = {"num_splits": 1, "use_clc": False, "causal": True}
    attend(q, paged, **options)
    found = sm100_sim.last_reports()[-1].tma
    k, v = paged.padded()
    flash_attn_varlen_func(q, k, v, seqused_k=paged.used, **options)
    assert found == sm100_sim.last_reports()[-1].tma


def _neighbour(self, row):
    return BOX(self, row ^ self.box_rows)


def _stale(self):
    tile = NEXT(self)
    return pages.PagedTile(tile._keys, tile._number, self._places, tile._following)


def _unclipped(sequence, first_row, rows, least=0):
    return first_row + rows, rows - rows


def _half_page(keys, *arguments):
    INIT(keys, *arguments)
    keys.page_size //= 2


def _no_window(keys, table, length, first_key, sizes):
    INIT(keys, table, length, first_key * 0, sizes)


def _no_end(keys, table, length, first_key, sizes):
    INIT(keys, table, length, first_key, sizes)
    keys._last_page = length


BOX, NEXT, INIT = pages.PagedTile.box, pages.PagedTile.next, pages.PagedKeys.__init__
BUGS = {
    "the page of the neighbouring box": (pages.PagedTile, "box", _neighbour, AssertionError),
    "the places of the tile before": (pages.PagedTile, "next", _stale, AssertionError),
    "rows past the end": (pages, "clip", _unclipped, (AssertionError, MemoryFault)),
    "another page size": (pages.PagedKeys, "__init__", _half_page, (AssertionError, MemoryFault)),
    "entries left of the window": (pages.PagedKeys, "__init__", _no_window, MemoryFault),
    "entries past the end": (pages.PagedKeys, "__init__", _no_end, MemoryFault),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sampled
def test_a_planted_bug_is_refused(bug, planted):
    owner, name, wrong, error = BUGS[bug]
    planted.setattr(owner, name, wrong)
    with pytest.raises(error):
        decoding(num_splits=1)


def test_the_numbers_that_are_read_decide(monkeypatch):
    """A number out of range stops the kernel that reads it, without the check of the host."""
    from fa4_hd256.call import checks

    monkeypatch.setattr(checks, "check_page_numbers", lambda *_: None)
    paged, q = Paged.of((300,), 16), torch.randn(1, 1, 2, 256).bfloat16()
    paged.table[0, 7] = len(paged.k)
    with pytest.raises(MemoryFault, match="TMA load"):
        attend(q, paged, causal=True, num_splits=1, use_clc=False)
