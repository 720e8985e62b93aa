"""Keys and values in pages, under both schedulers, against the float64 reference.

A page size is compiled in, and so are the mask and the kind of the scores: each size comes with
another set of features, all sizes with ragged lengths, zero among them, and rows, pages and entries
of the table in every cache that must not be read.
"""

from __future__ import annotations

import pytest
import torch
from operator_calls import forward_arguments
from paged_cases import Paged, accurate, attend, check, int32, queries

SIZES = (16, 32, 48, 64, 128, 256, 784)


# Packed queries, two heads sharing tiles; sequences without queries, without keys, that end with a
# page, inside one, and behind their first tile of keys.
@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.sampled
def test_page_sizes(page_size, device):
    paged = Paged.of((300, 40, 0, 128, 16), page_size, device=device)
    lengths = (3, 0, 5, 1, 20)
    options = {"causal": True, "num_splits": 1, "use_clc": False}
    out, lse = check(queries(29, 2, device=device), paged, lengths, **options)
    assert (out[3:8] == 0).all() and (lse[:, 3:8] == -torch.inf).all()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Heads before rows; K and V of a page behind each other; K and V of a row behind each other.
@pytest.mark.parametrize(
    ("layout", "page_size"), [("hnd", 48), ("pages of both", 16), ("rows of both", 128)]
)
@pytest.mark.sampled
def test_layouts(layout, page_size, device):
    """Several KV heads, decoding with KV splits; rows of a tile, some of no query."""
    paged = Paged.of((500, 0, 130), page_size, 2, layout, device)
    check(queries(3, 2, 6, device=device), paged, num_splits=3, use_clc=True)


def of_operator(q, paged):
    return forward_arguments(
        q, paged.k, paged.v, window_right=0, seqused_k=paged.used, page_table=paged.table
    )


def test_the_operator_by_itself_refuses_gradients(device):
    paged = Paged.of((40, 0), 16, device=device)
    q = queries(2, 3, 2, device=device).requires_grad_()
    arguments = of_operator(q, paged)
    with pytest.raises(NotImplementedError, match="page_table: no gradients"):
        torch.ops.fa4_hd256.forward(*arguments)
    with torch.no_grad():
        torch.ops.fa4_hd256.forward(*arguments)


# A window of Gemma's kind, whose pages to the left are gone: of a chunk of two tiles, whose rows
# see different pages, with KV splits; of a decoding step inside a page.
@pytest.mark.parametrize(
    ("lengths_q", "page_size", "options"),
    [
        ((300, 5), 32, {"window_size": (100, 0), "num_splits": 2}),
        ((1, 3), 16, {"window_size": (37, 5), "num_splits": 2}),
    ],
)
@pytest.mark.sampled("static-lengths_q1-16-options1")
def test_pages_left_of_a_window_are_never_read(lengths_q, page_size, options, use_clc, device):
    lengths = (640, 300)
    paged = Paged.of(lengths, page_size, device=device)
    before = paged.copy()
    for row, (n, m) in enumerate(zip(lengths_q, lengths, strict=True)):
        paged.forget(row, m - n - options["window_size"][0])
    q = queries(sum(lengths_q), 2, device=device)
    check(q, paged, lengths_q, before, use_clc=use_clc, **options)


# Rows in boxes, and rows that are gathered.
@pytest.mark.parametrize("page_size", [16, 4])
@pytest.mark.sampled
def test_every_feature(page_size, use_clc, device):
    """Window, softcap, a sink, a negative scale, fp16, parts, and heads of several KV heads."""
    paged = Paged.of((260, 0, 77), page_size, 2, "hnd", device, torch.float16)
    options = {
        "window_size": (200, 3), "softcap": 20.0, "softmax_scale": -0.1, "num_splits": 2,
        "learnable_sink": torch.randn(4, device=device),
    }  # fmt: skip
    q = queries(9, 4, device=device, dtype=torch.float16)
    check(q, paged, (5, 3, 1), use_clc=use_clc, **options)


@pytest.mark.sampled
def test_rows_of_padded_queries(device):
    """seqused_q: rows past it are 0 with an LSE of -inf."""
    paged = Paged.of((300, 40), 64, device=device)
    q, used = queries(2, 20, 2, device=device), (20, 3)
    q[1, 3:] = torch.nan
    out, lse = attend(q, paged, seqused_q=int32(used, device), causal=True, use_clc=False)
    for row, n in enumerate(used):
        part = (q[row : row + 1, :n], *paged.keys(row))
        accurate(out[row : row + 1, :n], lse[row : row + 1, :, :n], part, causal=True)
        assert (out[row, n:] == 0).all() and (lse[row, :, n:] == -torch.inf).all()


@pytest.mark.sampled
def test_a_shared_prefix(device):
    """Pages of one sequence in the rows of another; a table whose rows are one expanded row."""
    paged = Paged.of((200, 190), 32, device=device)
    paged.table[1, :5] = paged.table[0, :5]
    q = queries(2, 4, 2, device=device)
    found = check(q, paged, causal=True, use_clc=False)
    both = Paged(paged.k, paged.v, paged.table[:1].expand(2, -1), (200, 160))
    check(q, both, causal=True, use_clc=False)
    # A single entry may have any stride.
    one = Paged(paged.k, paged.v, paged.table.T[:1, :].T, (32, 5))
    check(q, one, causal=True, use_clc=False)
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.sampled
def test_batch_invariant(device):
    """A sequence alone and among others, with as many parts as its own keys fill."""
    paged = Paged.of((700, 1100), 16, device=device)
    q = queries(2, 1, 2, device=device)
    options = {"batch_invariant": True, "causal": True, "use_clc": False, "max_seqlen_k": 1100}
    found = check(q, paged, **options)
    alone = Paged(paged.k, paged.v, paged.table[:1], (700,))
    assert same(attend(q[:1], alone, **options), [t[:1] for t in found])
