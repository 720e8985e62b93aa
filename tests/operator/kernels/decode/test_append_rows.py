"""The kernel that writes new rows to a cache: which bytes change, how rows in use are counted, and
calls that are repeated."""

from __future__ import annotations

import pytest
import torch
from appended_rows import AppendTensors, run_append
from e4m3_cases import E4M3
from paged_cases import int32, offsets
from replays import copied, forget

from fa4_hd256 import flash_attn_with_kvcache

ARCHITECTURES = "sm_100a", "sm_90a"


@pytest.fixture(params=ARCHITECTURES)
def of_architecture(request, monkeypatch):
    """The simulator's is another one for each run of a test."""
    monkeypatch.setenv("FA4_HD256_ARCH", request.param)


def bits(tensor):
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def caches_and_rows(entries, rows, heads, shape, dtype=torch.bfloat16, device="cpu"):
    """Return (caches, new rows), random."""
    caches = [torch.randn(entries, rows, heads, 256).to(dtype).to(device) for _ in "kv"]
    return caches, [torch.randn(*shape, heads, 256).to(dtype).to(device) for _ in "kv"]


def places(lengths, counts, cache, table=None):
    """Yield (entry, row of it) of each new row in order; None for one that has no place."""
    entries, rows, *_ = cache.shape
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for position in range(length, length + count):
            entry, row = sequence, position
            if table is not None:
                page, row = divmod(position, rows)
                entry = table[sequence][page] if 0 <= page < len(table[0]) else -1
            yield (entry, row) if 0 <= entry < entries and 0 <= row < rows else None


def check(caches, new, lengths, counts, table=None, packed=False):
    """Bytes of new rows are where they belong, no other ones have changed."""
    device = caches[0].device
    before = [cache.clone() for cache in caches]
    after, _ = run_append(
        AppendTensors(
            *new, *caches, int32(lengths, device),
            None if table is None else int32(table, device),
            offsets(counts, device) if packed else None,
        )
    )  # fmt: skip
    assert after.tolist() == [length + count for length, count in zip(lengths, counts)]
    for cache, old, rows in zip(caches, before, new, strict=True):
        rows = rows if packed else rows.flatten(0, 1)
        for row, place in zip(rows, places(lengths, counts, cache, table), strict=True):
            if place is not None:
                old[place] = row
        assert torch.equal(bits(cache), bits(old))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3])
@pytest.mark.simulator
@pytest.mark.sampled("sm_100a-dtype0")
def test_rows_of_a_batch(of_architecture, dtype):
    check(*caches_and_rows(3, 20, 2, (3, 4), dtype), [0, 7, 16], [4, 4, 4])


def test_rows_of_pages(device):
    table = [[5, 1, 0], [2, 4, 7]]
    check(*caches_and_rows(8, 16, 3, (2, 20), device=device), [3, 16], [20, 20], table)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.sampled("False")
def test_packed_rows(device, paged):
    """A batch has more sequences than a warp has lanes, some without any row, the first and the
    last too."""
    counts = [0, 3, 0, 0, *(i % 4 for i in range(60)), 1, 0]
    lengths = [i * 7 % 12 for i in range(len(counts))]
    table = torch.randperm(len(counts)).view(-1, 1).tolist() if paged else None
    given = caches_and_rows(len(counts), 16, 1, (sum(counts),), device=device)
    check(*given, lengths, counts, table, packed=True)


def test_rows_past_the_last_offset_are_not_written(device):
    """A batch for a CUDA graph, which is filled up, has such rows."""
    caches, new = caches_and_rows(2, 16, 2, (7,), device=device)
    before = [cache.clone() for cache in caches]
    lengths, begins = int32([3, 5], device), offsets([2, 1], device)
    run_append(AppendTensors(*new, *caches, lengths, None, begins))
    for cache, old, rows in zip(caches, before, new, strict=True):
        old[0, 3:5], old[1, 5] = rows[:2], rows[2]
        assert torch.equal(bits(cache), bits(old))


def test_rows_that_have_no_place_are_not_written(device):
    """Past the cache, before it, in pages that no table numbers and that no cache has."""
    check(*caches_and_rows(3, 8, 2, (3, 3), device=device), [6, -2, 1 << 30], [3] * 3)
    table = [[1, 2], [9, 0], [-1, 3]]
    check(*caches_and_rows(4, 16, 1, (3, 9), device=device), [27, 9, -1], [9] * 3, table)


def test_without_rows_nothing_is_launched(device):
    caches, new = caches_and_rows(2, 8, 1, (2, 0), device=device)
    check(caches, new, [3, 4], [0, 0])


def given_call(**changed):
    """Arguments of a call with new rows in pages."""
    caches, new = caches_and_rows(4, 16, 1, (2, 1))
    arguments = {
        "q": torch.randn(2, 1, 2, 256).bfloat16(), "k_cache": caches[0], "v_cache": caches[1],
        "k": new[0], "v": new[1], "cache_seqlens": int32([3, 17]),
        "page_table": int32([[3, 0], [1, 2]]), "causal": True,
    }  # fmt: skip
    return arguments | changed


@pytest.mark.simulator
def test_repeated_calls(launched):
    """Calls with other tensors, lengths and pages find the plan, and have the same bits."""
    flash_attn_with_kvcache(**given_call())
    assert not launched
    for lengths, table in (([4, 18], [[0, 3], [2, 1]]), ([0, 31], [[1, 2], [0, 3]])):
        given = given_call(cache_seqlens=int32(lengths), page_table=int32(table))
        other = copied(given)
        versions = given["k_cache"]._version, given["v_cache"]._version
        launched.clear()
        found = flash_attn_with_kvcache(**given)
        assert len(launched) == 2
        # Autograd knows that a cache has changed.
        assert given["k_cache"]._version > versions[0]
        assert given["v_cache"]._version > versions[1]
        forget()
        expected = flash_attn_with_kvcache(**other)
        assert torch.equal(found, expected)
        for name in ("k_cache", "v_cache", "cache_seqlens"):
            assert torch.equal(given[name], other[name])


@pytest.mark.simulator
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize(("name", "says"), [
    ("k", "k_cache lies in the memory of k"),
    ("v_cache", "k_cache and v_cache lie in one place"),
    ("out", "out lies in memory that the call reads"),
])  # fmt: skip
def test_memory_that_two_tensors_share_is_refused(launched, name, says, repeated):
    """Addresses are in no key of a repeated call."""
    out = torch.empty(2, 1, 2, 256, dtype=torch.bfloat16)
    if repeated:
        flash_attn_with_kvcache(**given_call(out=out))
    given = given_call(out=out.clone())
    cache = given["k_cache"]
    given |= {
        "k": {"k": cache[:2, :1]},
        "v_cache": {"v_cache": cache},
        "out": {"out": cache.view(-1)[: out.numel()].view_as(out)},
    }[name]
    before = cache.clone()
    with pytest.raises(ValueError, match=says):
        flash_attn_with_kvcache(**given)
    assert torch.equal(cache, before)
