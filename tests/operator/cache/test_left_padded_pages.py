"""Left padding of sequences whose keys lie in pages: the first key is any row of any page.

Rows under the padding and behind the last key are NaN, and pages without a key have no number in
the table.
"""

from __future__ import annotations

import cache_reference
import e4m3_cases
import pytest
import torch
from paged_cases import NO_PAGE, NOT_OF_MATHS, Paged, accurate, int32, offsets, queries

from fa4_hd256 import flash_attn_with_kvcache, get_scheduler_metadata
from fa4_hd256.score_mods import alibi

#: Rows in use and padding of each sequence: none; a part of a page; several pages and a part; up to
#: a page's end; within one page, with rows of it before and behind; all but a row; all; no rows.
LENGTHS, LEFTPAD = (300, 261, 290, 150, 93, 40, 23, 0), (0, 5, 203, 32, 66, 39, 23, 0)
SLOPES = (0.05, 0.4, 0.011, 0.2)


def padded(page_size, device="cpu", heads=1, lengths=LENGTHS, leftpad=LEFTPAD, **kinds):
    """Return (the cache, k and v of each sequence behind its padding)."""
    paged = Paged.of(lengths, page_size, heads, device=device, **kinds)
    keys = [[t[:, pad:] for t in paged.keys(row)] for row, pad in enumerate(leftpad)]
    for row, pad in enumerate(leftpad):
        for first in range(0, pad, page_size):
            number, rows = int(paged.table[row, first // page_size]), min(page_size, pad - first)
            for cache in (paged.k, paged.v):
                cache[number, :rows] = torch.nan
            if rows == page_size or pad == lengths[row]:
                paged.table[row, first // page_size] = NO_PAGE
    return paged, keys


def attend(q, paged, leftpad=LEFTPAD, lengths_q=None, **options):
    given = dict(options)
    if lengths_q is not None:
        given |= {"cu_seqlens_q": offsets(lengths_q, q.device), "max_seqlen_q": max(lengths_q)}
    given = {
        "cache_seqlens": paged.used, "page_table": paged.table,
        "cache_leftpad": int32(leftpad, q.device), **given,
    }  # fmt: skip
    return flash_attn_with_kvcache(q, paged.k, paged.v, return_lse=True, **given)


def parts_of(q, found, row, lengths_q):
    """Return q, out and lse of a sequence."""
    out, lse = found
    if lengths_q is None:
        return q[row : row + 1], out[row : row + 1], lse[row : row + 1]
    start = sum(lengths_q[:row])
    rows = slice(start, start + lengths_q[row])
    return q[rows][None], out[rows][None], lse[:, rows][None]


def check(q, page_size, lengths_q=None, heads=1, **options):
    """A call against the reference of each sequence; (out, lse)."""
    paged, keys = padded(page_size, q.device, heads)
    found = attend(q, paged, lengths_q=lengths_q, **options)
    wanted = {name: value for name, value in options.items() if name not in NOT_OF_MATHS}
    for row, (k, v) in enumerate(keys):
        own, *results = parts_of(q, found, row, lengths_q)
        accurate(*results, (own, k, v), **wanted)
    return found


def test_decoding(device):
    """Parts of keys; some rows of a tile see no key of a sequence that is shorter than the tile."""
    check(queries(8, 3, 4, device=device), 32, causal=True, num_splits=3)


@pytest.mark.sampled
def test_a_prefill_of_packed_queries(device):
    """The kernel of large tiles."""
    lengths_q = (150, 40, 200, 3, 0, 12, 5, 1)
    check(queries(sum(lengths_q), 2, device=device), 32, lengths_q, causal=True)


# Rows that are gathered; boxes of a page, of a part of one; pages that divide no tile; both kinds
# of kernels.
@pytest.mark.parametrize("page_size", [1, 6, 16, 48, 64, 128, 256, 784])
@pytest.mark.parametrize("seqlen_q", [1, 70])
@pytest.mark.sampled
def test_page_sizes(page_size, seqlen_q, device):
    check(queries(8, seqlen_q, 8, device=device), page_size, heads=2, num_splits=1)


# Windows that begin before the padding ends, behind it, and with bounds of either sign.
@pytest.mark.parametrize(
    "window", [(60, 0), (20, 10), (None, -7), (200, -40), (-2, None), (-1000, None), (None, -300)]
)
@pytest.mark.parametrize("seqlen_q", [3, 150])
@pytest.mark.sampled
def test_windows(window, seqlen_q, device):
    check(queries(8, seqlen_q, 2, device=device), 16, window_size=window, use_clc=seqlen_q == 3)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 5.0}, {"batch_invariant": True}, {"use_clc": True}, {"softmax_scale": -0.1}],
    ids=str,
)
@pytest.mark.parametrize("seqlen_q", [2, 130])
@pytest.mark.sampled
def test_options(options, seqlen_q, device):
    check(queries(8, seqlen_q, 4, device=device), 32, causal=True, **options)


@pytest.mark.parametrize("seqlen_q", [2, 130])
@pytest.mark.sampled
def test_positions_count_from_the_first_key(seqlen_q, device):
    """ALiBi's, and those of a user's function: as if there were no padding."""
    q, (paged, keys) = queries(8, seqlen_q, 4, device=device), padded(32, device)
    found = attend(q, paged, causal=True, score_mod=alibi(torch.tensor(SLOPES, device=device)))
    for row, (k, v) in enumerate(keys):
        slopes, offset = torch.tensor(SLOPES), k.shape[1] - seqlen_q

        def of_reference(score, batch, head, query, key, slopes=slopes, offset=offset):
            return score - slopes.to(score.dtype)[head] * (query + offset - key).abs()

        own, *results = parts_of(q, found, row, None)
        accurate(*results, (own, k, v), causal=True, score_mod=of_reference)


@pytest.mark.sampled
def test_a_tree(device):
    """The nodes of a tree are the last keys; of some sequences there are more nodes than keys."""
    q, (paged, keys) = queries(8, 5, 4, device=device), padded(32, device)
    mask = ((torch.rand(8, 5, 5) < 0.5) | torch.eye(5, dtype=torch.bool)).to(device)
    found = attend(q, paged, tree_mask=mask, num_splits=2)
    for row, (k, v) in enumerate(keys):
        own, *results = parts_of(q, found, row, None)
        seen = cache_reference.seen_by_nodes(mask[row : row + 1], k.shape[1])
        accurate(*results, (own, k, v), mask=seen)


@pytest.mark.sampled
def test_a_list_of_parts(device):
    lengths, leftpad = (900, 300, 700, 30), (0, 129, 690, 30)
    paged, keys = padded(64, device, lengths=lengths, leftpad=leftpad)
    q = queries(4, 1, 4, device=device)
    metadata = get_scheduler_metadata(paged.used, 1, 900, 4, 1)
    found = attend(q, paged, leftpad, scheduler_metadata=metadata, max_seqlen_k=900)
    for row, (k, v) in enumerate(keys):
        own, *results = parts_of(q, found, row, None)
        accurate(*results, (own, k, v))


@pytest.mark.parametrize("of_pages", [False, True], ids=["sequences", "pages"])
@pytest.mark.parametrize("page_size", [32, 784, 5])
@pytest.mark.sampled
def test_keys_in_e4m3(of_pages, page_size):
    paged, keys = padded(page_size, dtype=e4m3_cases.E4M3)
    q = queries(8, 2, 8)
    given = e4m3_cases.scales(len(paged.k) if of_pages else 8, 1)
    named = dict(zip(("k_descale", "v_descale"), given))
    found = attend(q, paged, causal=True, num_splits=2, **named)
    for row, own_keys in enumerate(keys):
        values = []
        for rows, scale in zip(own_keys, given):
            places = torch.arange(LEFTPAD[row], LENGTHS[row]) // page_size
            of_row = scale[paged.table[row, places].long()] if of_pages else scale[row].expand(1, 1)
            values.append(rows.float().double() * of_row.double()[None, :, :, None])
        own, *results = parts_of(q, found, row, None)
        e4m3_cases.accurate(results, own, values, causal=True)


@pytest.mark.parametrize("by_index", [False, True], ids=["rows", "chosen rows"])
@pytest.mark.sampled
def test_new_rows(by_index, device):
    """New rows follow cache_seqlens, which counts the padding, and so do their positions."""
    paged, _ = padded(32, device)
    more = torch.arange(len(LENGTHS) * 2).view(len(LENGTHS), 2).int() + len(paged.k)
    k_cache, v_cache = (
        torch.cat([t, torch.full_like(t[:1], torch.nan).expand(len(more) * 2, -1, -1, -1)])
        for t in (paged.k, paged.v)
    )
    table = torch.cat([paged.table[:, :10], paged.table[:, :2]], dim=1).cpu().clone()
    for row, (length, pad) in enumerate(zip(LENGTHS, LEFTPAD)):
        # Of a sequence that is all padding the last page is nobody's.
        count = length // 32 if length == pad else -(-length // 32)
        table[row, count : count + 2] = more[row]
    q, new = queries(8, 3, 4, device=device), [queries(8, 3, 1, device=device) for _ in "kv"]
    angles = torch.randn(310, 32)
    rotary = cache_reference.Rotary(
        *(t.to(device, torch.bfloat16) for t in (angles.cos(), angles.sin()))
    )
    before = cache_reference.KvCache(
        k_cache.clone(), v_cache.clone(), list(LENGTHS), table.tolist(), list(LEFTPAD)
    )
    after, rows = before.appended(list(q), list(zip(*new)), rotary, True)
    given = {"page_table": table.to(device)}
    if by_index:
        order = torch.randperm(8)
        given = {"page_table": table[order.argsort()].to(device)}
        given["cache_batch_idx"] = int32(order.tolist(), device)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=paged.used, causal=True, return_lse=True,
        cache_leftpad=int32(LEFTPAD, device), rotary_cos=rotary.cos, rotary_sin=rotary.sin, **given,
    )  # fmt: skip
    for found, exact in ((k_cache, after.k), (v_cache, after.v)):
        torch.testing.assert_close(
            found.cpu().double(), exact, rtol=2**-8, atol=2**-20, equal_nan=True
        )
    for row, exact in enumerate(rows):
        own, *results = parts_of(q, (out, lse), row, None)
        accurate(*results, tuple(t[None].to(torch.bfloat16) for t in exact), causal=True)
