"""Keys and values in pages whose number of rows is no multiple of 16: their rows are gathered.

One kernel serves all sizes.  Rows, pages and entries of the table that must not be read are in
every cache.
"""

from __future__ import annotations

import pytest
import torch
from paged_cases import NO_PAGE, Paged, accurate, attend, check, queries

import sm100_sim
from fa4_hd256 import flash_attn_with_kvcache
from fa4_hd256.call import checks

#: Pages of one row, of a few, of a part of a step, and of more rows than a step has.
SIZES = (1, 2, 4, 8, 3, 24, 100)


def poisoned(paged):
    """Let entries that must not be read number a page of NaN: a page that is none has zeros."""
    is_page = (paged.table >= 0) & (paged.table < len(paged.k))
    spare = {*range(len(paged.k))} - {*paged.table[is_page].tolist()}
    paged.table[~is_page] = min(spare)
    return paged


# Sequences without queries, without keys, that end with a step, and inside one; KV splits. Tiles of
# 16 rows, and of 64.
@pytest.mark.parametrize("longest", [7, 20])
@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.sampled("24-7")
def test_decoding(page_size, longest, device):
    paged = poisoned(Paged.of((300, 40, 0, 128, 16), page_size, device=device))
    q = queries(9 + longest, 2, device=device)
    found = check(q, paged, (3, 0, 5, 1, longest), causal=True, num_splits=2, use_clc=False)
    assert (found[0][3:8] == 0).all() and (found[1][:, 3:8] == -torch.inf).all()


# Several tiles of queries, of several KV heads, under both schedulers; each layout once.
@pytest.mark.parametrize(
    ("page_size", "layout"), [(1, "nhd"), (3, "hnd"), (8, "pages of both"), (40, "rows of both")]
)
@pytest.mark.sampled("static-3-hnd")
def test_prefill(page_size, layout, use_clc, device):
    paged = poisoned(Paged.of((470, 300, 0, 77), page_size, 2, layout, device))
    check(queries(176, 6, device=device), paged, (150, 1, 5, 20), causal=True, use_clc=use_clc)


# Pages to the left of a window are gone.
@pytest.mark.parametrize("lengths_q", [(300, 5), (2, 3)])
@pytest.mark.sampled
def test_pages_left_of_a_window_are_never_read(lengths_q, use_clc, device):
    paged = Paged.of((640, 300), 2, device=device)
    before = paged.copy()
    for row, (n, m) in enumerate(zip(lengths_q, paged.lengths, strict=True)):
        paged.forget(row, m - n - 100)
    q = queries(sum(lengths_q), 3, device=device)
    check(
        q, poisoned(paged), lengths_q, before, use_clc=use_clc, window_size=(100, 0), num_splits=2
    )


@pytest.mark.sampled
def test_new_rows(device):
    """Rows are written to pages of three, and read again."""
    paged = Paged.of((5, 70), 3, device=device)
    more = Paged.of((9, 74), 3, device=device)
    for row, length in enumerate(paged.lengths):
        for place in range(length):
            page = more.table[row, place // 3], place % 3
            for pool, rows in zip((more.k, more.v), paged.keys(row), strict=True):
                pool[page] = rows[0, place]
    q, new = queries(2, 4, 2, device=device), [queries(2, 4, 1, device=device) for _ in "kv"]
    out, lse = flash_attn_with_kvcache(
        q, more.k, more.v, *new, cache_seqlens=paged.used, page_table=more.table, causal=True,
        return_lse=True,
    )  # fmt: skip
    for row in range(2):
        k, v = (torch.cat([t, n[row : row + 1]], dim=1)
                for t, n in zip(paged.keys(row), new, strict=True))  # fmt: skip
        assert all(map(torch.equal, more.keys(row), (k, v)))
        accurate(out[row : row + 1], lse[row : row + 1], (q[row : row + 1], k, v), causal=True)


@pytest.mark.simulator
@pytest.mark.parametrize("longest", [7, 20, 130])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled("static-None-7")
def test_no_findings(longest, seed, use_clc, sanitize):
    sanitize(seed, clusters=2)
    paged = Paged.of((300, 9), 1)
    q = queries(longest + 1, 2)
    check(q, paged, (longest, 1), causal=True, num_splits=2, use_clc=use_clc)
    assert all(report.findings == [] for report in sm100_sim.last_reports()[-3:])


def test_a_number_that_is_none_of_a_page_has_rows_of_zeros(monkeypatch, device):
    """TMA has zeros outside a tensor, too; the host checks nothing here."""
    monkeypatch.setattr(checks, "check_page_numbers", lambda *_: None)
    paged = Paged.of((300,), 1, device=device)
    q = queries(7, 2, device=device)
    k, v = paged.keys(0)
    for row, number in ((7, NO_PAGE), (200, -1), (299, len(paged.k))):
        paged.table[0, row], k[0, row], v[0, row] = number, 0, 0
    out, lse = attend(q, paged, (7,), causal=True, num_splits=2, use_clc=False)
    accurate(out[None], lse[None], (q[None], k, v), causal=True)
