"""Keys of a sequence in a KV cache: entries, rows of a page table, left padding.

cache_batch_idx and cache_leftpad are arguments at run time, so that caches of any number of rows
have one kernel.
"""

from __future__ import annotations

import cache_reference
import pytest
import torch
from paged_cases import accurate, int32

from fa4_hd256 import flash_attn_varlen_func, flash_attn_with_kvcache, kv_cache
from fa4_hd256.call import cache_checks, checks

#: Rows in use, left padding among them: none, a few, more than a tile of keys, all.
LENGTHS, LEFTPAD = [0, 21, 150, 203], [0, 21, 140, 7]
#: Entries of a larger cache.
ENTRIES, BATCH = [5, 0, 2, 3], 6


def randn(*shape, device):
    return torch.randn(*shape, 256).to(device, torch.bfloat16)


def cache(rows, device, layout="nhd"):
    """Return k and v, (6, rows, 1, 256)."""
    if layout == "pages of both":
        both = randn(BATCH, 2, rows, 1, device=device)
        return tuple(both.unbind(1))
    return tuple(randn(BATCH, rows + 5, 1, device=device)[:, :rows] for _ in "kv")


def check(caches, q, new=(), rotary=None, leftpad=None, **options):
    """One call on entries of the caches against the reference; new rows are written where theirs
    belong."""
    device, lengths = q.device, LENGTHS
    if new:
        lengths = [min(length, caches[0].shape[1] - new[0].shape[1]) for length in LENGTHS]
    before = cache_reference.KvCache(
        *(t.clone() for t in caches), lengths, [[entry] for entry in ENTRIES], leftpad
    )
    rows_of = list(zip(*new)) if new else None
    after, rows = before.appended(list(q), rows_of, rotary, True)
    given = {"cache_seqlens": int32(lengths, device), "cache_batch_idx": int32(ENTRIES, device)}
    if leftpad is not None:
        given["cache_leftpad"] = int32(leftpad, device)
    if rotary is not None:
        given |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin}
    out, lse = flash_attn_with_kvcache(
        q, *caches, *new, **given, **options, causal=True, return_lse=True
    )
    for tensor, exact in zip(caches, (after.k, after.v)):
        error = (tensor.cpu().double() - exact).abs()
        assert (error <= (2**-8 if rotary is not None else 0) * exact.abs() + 2**-20).all()
    for got, got_lse, exact in zip(out, lse, rows):
        tensors = [t[None].to(got.dtype) for t in exact]
        accurate(got[None], got_lse[None], tensors, causal=True)


@pytest.mark.parametrize("layout", ["nhd", "pages of both"])
def test_entries_of_any_number_of_rows(device, layout):
    """Entries lie further apart than their rows take; K and V of an entry behind each other. No
    padding, said by zeros: one kernel serves this file."""
    check(cache(203, device, layout), randn(4, 3, 4, device=device), leftpad=[0] * 4, num_splits=1)


def test_rows_are_not_compiled_in(device, monkeypatch):
    """Another number of rows needs no other kernel."""
    from fa4_hd256.run import forward

    specs, spec = [], forward.forward_spec

    def noted(*arguments):
        specs.append(spec(*arguments))
        return specs[-1]

    monkeypatch.setattr(forward, "forward_spec", noted)
    for rows in (203, 250, 256):
        check(cache(rows, device), randn(4, 1, 4, device=device), leftpad=[0] * 4, num_splits=1)
    assert len({(one.problem_class, one.config) for one in specs}) == 1


@pytest.mark.sampled
def test_left_padding(device):
    """Sequences begin at any row; one has none but padding, and its queries see no key."""
    q = randn(4, 3, 4, device=device)
    check(cache(203, device), q, leftpad=LEFTPAD, num_splits=3)


def test_new_rows_behind_left_padding(device):
    """New rows lie behind those in use, and have the positions of their rows: padding counts."""
    new = tuple(randn(4, 3, 1, device=device) for _ in "kv")
    angles = torch.randn(210, 32)
    rotary = cache_reference.Rotary(
        *(t.to(device, torch.bfloat16) for t in (angles.cos(), angles.sin()))
    )
    check(cache(203, device), randn(4, 3, 4, device=device), new, rotary, LEFTPAD)


@pytest.mark.sampled
def test_left_padding_of_a_whole_batch(device):
    """All rows behind the padding count without cache_batch_idx and lengths."""
    k, v = (t[:4] for t in cache(203, device))
    q, leftpad = randn(4, 1, 4, device=device), int32(LEFTPAD, device)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_leftpad=leftpad, return_lse=True)
    for row, first in enumerate(LEFTPAD):
        one = slice(row, row + 1)
        accurate(out[one], lse[one], (q[one], k[one, first:], v[one, first:]))


@pytest.mark.sampled
def test_a_prefill_of_packed_queries(device):
    """The kernel of large tiles, whose keys begin anywhere."""
    counts = [150, 0, 200, 70]
    q, caches = randn(sum(counts), 1, device=device), cache(203, device)
    given = {
        "cu_seqlens_q": int32([0, *counts], device).cumsum(0).int(), "max_seqlen_q": 200,
        "cache_seqlens": int32(LENGTHS, device), "cache_batch_idx": int32(ENTRIES, device),
        "cache_leftpad": int32(LEFTPAD, device),
    }  # fmt: skip
    out, lse = flash_attn_with_kvcache(q, *caches, **given, causal=True, return_lse=True)
    end = 0
    for row, count in enumerate(counts):
        rows, end = slice(end, end + count), end + count
        keys = [t[ENTRIES[row], None, LEFTPAD[row] : LENGTHS[row]] for t in caches]
        accurate(out[None, rows], lse[None, :, rows], (q[None, rows], *keys), causal=True)


@pytest.mark.parametrize("lengths", [None, [17, 32]], ids=["all rows", "lengths"])
@pytest.mark.sampled("lengths")
def test_rows_of_a_page_table(lengths, device):
    """cache_batch_idx with page_table: the row of the table; all its rows without lengths."""
    k, v = (randn(6, 16, 1, device=device) for _ in "kv")
    table = int32([[0, 1], [2, 3], [4, 5]], device)
    q, chosen = randn(2, 1, 2, device=device), int32([2, 0], device)
    options = {"cache_seqlens": lengths and int32(lengths, device), "causal": True}
    found = flash_attn_with_kvcache(q, k, v, page_table=table, cache_batch_idx=chosen, **options)
    expected = flash_attn_with_kvcache(q, k, v, page_table=table[[2, 0]], **options)
    assert torch.equal(found, expected)


def unchecked(monkeypatch):
    """Leave out checks as on a GPU, where nobody reads what lies on the device."""
    for name in ("check_within", "_check_places_apart"):
        monkeypatch.setattr(cache_checks, name, lambda *_: None)
    for name in ("_check_places", "check_page_numbers"):
        monkeypatch.setattr(checks, name, lambda *_: None)


@pytest.mark.parametrize("paged", [False, True], ids=["entries", "rows of a page table"])
@pytest.mark.sampled("entries")
@pytest.mark.simulator
def test_an_entry_that_there_is_not(paged, monkeypatch):
    """The nearest one is read, and no new row is written."""
    unchecked(monkeypatch)
    wrong, nearest = int32([BATCH, -1, 1 << 30, 3]), int32([BATCH - 1, 0, BATCH - 1, 3])
    caches, q = cache(208, "cpu"), randn(4, 3, 4, device="cpu")
    table = int32(torch.randperm(BATCH * 13).view(BATCH, 13).tolist()) if paged else None
    if paged:
        caches = tuple(t.reshape(BATCH * 13, 16, 1, 256) for t in caches)
    options = {"page_table": table, "causal": True, "num_splits": 1}
    if not paged:
        options["cache_leftpad"] = int32([0] * 4)
    lengths, new = int32([5, 21, 150, 200]), [randn(4, 2, 1, device="cpu") for _ in "kv"]
    before = [t.clone() for t in caches]
    found = flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=lengths, cache_batch_idx=wrong, **options
    )
    for after, row, rows in zip(caches, before, new):
        if paged:
            places = [divmod(n, 16) for n in (200, 201)]
            for (page, at), one in zip(places, rows[3]):
                row[table[3, page], at] = one
        else:
            row[3, 200:202] = rows[3]
        assert torch.equal(after, row)
    expected = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths + 2, cache_batch_idx=nearest, **options
    )
    assert torch.equal(found, expected)


@pytest.mark.simulator
def test_a_page_table_without_rows():
    k = v = randn(6, 32, 1, device="cpu")
    q, table, chosen = randn(2, 1, 2, device="cpu"), torch.zeros(0, 2).int(), int32([0, 0])
    with pytest.raises(ValueError, match="page_table has no row for cache_batch_idx to choose"):
        with pytest.MonkeyPatch.context() as patch:
            unchecked(patch)
            flash_attn_with_kvcache(q, k, v, page_table=table, cache_batch_idx=chosen)


@pytest.mark.sampled
def test_pages_without_lengths(device):
    """All rows of a row of the table are in use."""
    k, v = (randn(6, 16, 1, device=device) for _ in "kv")
    table, q = int32([[4, 1], [2, 0]], device), randn(2, 1, 2, device=device)
    keys = [t[table.long()].flatten(1, 2) for t in (k, v)]
    out, lse = flash_attn_varlen_func(q, k, v, page_table=table, causal=True, return_lse=True)
    accurate(out, lse, (q, *keys), causal=True)


@pytest.mark.simulator
def test_calls_without_new_rows_leave_nothing_out(monkeypatch):
    """Refuse lengths beyond the cache; pass left padding on to the attention without lengths."""
    seen = []
    monkeypatch.setattr(
        kv_cache, "attend_sequences", lambda _, lengths, others, *__: seen.append(others)
    )
    caches, q = cache(32, "cpu"), randn(BATCH, 1, 4, device="cpu")
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn_with_kvcache(q, *caches, cache_seqlens=int32([33] * BATCH))
    flash_attn_with_kvcache(q, *caches, cache_leftpad=int32([5] * BATCH))
    (others,) = seen
    assert others["cache_leftpad"].tolist() == [5] * BATCH


@pytest.mark.simulator
def test_pages_without_lengths_have_a_bound_that_holds():
    k = v = randn(6, 32, 1, device="cpu")
    q, table = randn(2, 1, 2, device="cpu"), int32([[4, 1], [2, 0]])
    with pytest.raises(ValueError, match="max_seqlen_k is 63 with page_table and without seqused"):
        flash_attn_varlen_func(q, k, v, page_table=table, max_seqlen_k=63)
