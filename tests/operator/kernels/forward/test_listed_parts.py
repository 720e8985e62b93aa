"""Decoding steps of sequences of very different lengths: KV splits that a list names."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from backward_cases import inputs
from gpus import gpu
from paged_cases import int32
from torch.utils._python_dispatch import TorchDispatchMode

from bench.measure import host
from fa4_hd256 import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    metadata,
)
from fa4_hd256.call import checks, scheduler_metadata
from fa4_hd256.call.division import longest_row, room_for_splits, splits_for
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import MOST_SPLITS, Options
from fa4_hd256.call.scheduler_metadata import scheduler_metadata_of
from fa4_hd256.check import reference
from fa4_hd256.kernels.rows.scheduler_metadata import (
    HEADER,
    LAST_BIT,
    SEQUENCE_SHIFT,
    UNUSED,
    list_length,
)  # fmt: skip

#: Query heads over KV heads; rows of the cache.
HEADS, ROWS = (8, 1), 1280
USED = (1200, 90, 0, 700)


class NothingIsRead(TorchDispatchMode):
    """Refuses what hands a number to the host, which waits for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "local_scalar" not in str(function)
        return function(*args, **(kwargs or {}))


def test_a_list_is_made_without_reading(monkeypatch):
    monkeypatch.setattr(metadata, "check_lengths", lambda *_: None)
    monkeypatch.setattr(checks, "check_contents", lambda *_: None)
    with NothingIsRead():
        get_scheduler_metadata(int32(USED), 2, 1300, 8, 2, True)
    with pytest.raises(AssertionError), NothingIsRead():
        int32(USED)[int32(0)]


def accurate(out, lse, seen, **options):
    found = reference.compare(out, lse, seen, **options)
    assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-3, found


def check(tensors, used, made_for=None, window=(None, None), **options):
    """Two queries of each sequence, causal, against the reference. made_for: the lengths that the
    list is made for."""
    q, k, v = tensors
    bounds, heads = (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
    lengths = int32(made_for or used, q.device)
    listed = get_scheduler_metadata(lengths, *bounds, *heads, True, window)
    out, lse = flash_attn_varlen_func(
        q, k, v, seqused_k=int32(used, q.device), causal=True, window_size=window, return_lse=True,
        scheduler_metadata=listed, **options,
    )  # fmt: skip
    options.pop("use_clc", None)
    for b, n in enumerate(used):
        seen = (q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        accurate(out[b : b + 1], lse[b : b + 1], seen, causal=True, window_size=window, **options)
    return out, lse


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.sampled("static")
def test_sequences_of_different_lengths(use_clc, device):
    tensors = inputs((2, ROWS), HEADS, len(USED), device=device)
    check(tensors, USED, use_clc=use_clc)


@pytest.mark.sampled
def test_what_rows_past_the_lengths_hold_reaches_nothing(device):
    """NaN in K and V; a window, a softcap and a sink, which is the first part's."""
    tensors = inputs((2, ROWS), HEADS, len(USED), device=device)
    for b, n in enumerate(USED):
        for tensor in tensors[1:]:
            tensor[b, n:] = math.nan
    sink = torch.randn(8, device=device)
    check(tensors, USED, window=(600, 0), softcap=20.0, learnable_sink=sink)


# Grown by a token, and by several steps; shrunk to a few keys and to none.
@pytest.mark.parametrize(
    "made_for", [(1199, 89, 0, 699), (100, 0, 0, 300), (1280, 1280, 900, 1280)]
)
def test_a_list_for_other_lengths_only_balances_worse(made_for, device):
    tensors = inputs((2, ROWS), HEADS, len(USED), device=device)
    check(tensors, USED, made_for)


@pytest.mark.sampled
def test_packed_queries_on_pages(device):
    """Serving engines call so: queries of 0 to 3 rows, keys in pages in any order."""
    lengths, used, page = (3, 1, 0, 2), (1200, 300, 40, 513), 64
    starts = int32([0, *itertools.accumulate(lengths)], device)
    columns = ROWS // page
    table = torch.randperm(4 * columns).reshape(4, columns).to(device, torch.int32)
    q = torch.randn(sum(lengths), 8, 256).to(device, torch.bfloat16)
    k, v = (torch.randn(4 * columns, page, 1, 256).to(device, torch.bfloat16) for _ in "kv")
    listed = get_scheduler_metadata(int32(used, device), 3, ROWS, 8, 1, True)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts, max_seqlen_q=3, seqused_k=int32(used, device),
        page_table=table, causal=True, return_lse=True, scheduler_metadata=listed,
    )  # fmt: skip
    for b, (count, n) in enumerate(zip(lengths, used, strict=True)):
        if count:
            rows = slice(int(starts[b]), int(starts[b + 1]))
            of_pages = (t[table[b].long()].reshape(1, ROWS, 1, 256)[:, :n] for t in (k, v))
            accurate(out[rows][None], lse[:, rows][None], (q[rows][None], *of_pages), causal=True)


def test_a_cache_with_new_rows(device):
    """A list for the rows in use with the new ones; one of another batch is refused before any row
    is written."""
    used, added = (1100, 90, 0, 700), 2
    q, k, v = inputs((2, ROWS), HEADS, len(used), device=device)
    new = [torch.randn(len(used), added, 1, 256).to(device, torch.bfloat16) for _ in "kv"]
    after = int32(used, device) + added
    options = {"cache_seqlens": int32(used, device), "causal": True, "return_lse": True}
    caches = k.clone(), v.clone()
    wrong = get_scheduler_metadata(after[:2], 2, ROWS, *HEADS, True)
    with pytest.raises(ValueError, match="scheduler_metadata has .* words; accepted here: "):
        flash_attn_with_kvcache(q, *caches, *new, scheduler_metadata=wrong, **options)
    with pytest.raises(ValueError, match="num_splits is given with scheduler_metadata"):
        flash_attn_with_kvcache(q, *caches, *new, scheduler_metadata=wrong, num_splits=2, **options)
    assert torch.equal(caches[0], k) and torch.equal(caches[1], v)
    listed = get_scheduler_metadata(after, 2, ROWS, *HEADS, True)
    found = flash_attn_with_kvcache(q, *caches, *new, scheduler_metadata=listed, **options)
    expected = flash_attn_varlen_func(
        q, *caches, seqused_k=after, causal=True, return_lse=True, scheduler_metadata=listed
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert torch.equal(caches[0][0, 1100:1102], new[0][0])


# ------------------------------------------------------------------------------------ the list


def problem(keys, batch, heads=(16, 2), queries=1, window=(None, None)):
    number = torch.zeros((), dtype=torch.bfloat16)
    q, k = (number.expand(batch, s, h, 256) for s, h in ((queries, heads[0]), (keys, heads[1])))
    return Problem.describe((q, k, k), Options.check(None, False, window, 0.0))


LENGTHS = {
    "one long": [131072] + [1024] * 7,
    "equal": [8192] * 8,
    "many short": [1000] * 128,
    "one long among many": [131072] + [1000] * 127,
    "none": [0, 0, 0],
    "more than clusters": [1000 + 50 * i for i in range(300)],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    "window", [(None, None), (None, 0), (1023, 0)], ids=["all keys", "causal", "window"]
)
def test_every_key_is_in_one_part(lengths, window):
    one = problem(131072, len(lengths), window=window)
    room = room_for_splits(one, gpu())
    listed = scheduler_metadata_of(one, gpu(), int32(lengths)).tolist()
    assert len(listed) == list_length(room, len(lengths))
    assert listed[1:HEADER] == [room, len(lengths), 16]
    keys, words = listed[0], listed[HEADER : HEADER + room]
    starts = listed[HEADER + room :]
    assert keys > 0 and keys % one.tiles.keys == 0 and starts[0] == 0
    assert all(word & (LAST_BIT - 1) == UNUSED for word in words[starts[-1] :])
    assert all(word >> SEQUENCE_SHIFT < len(lengths) for word in words)
    for sequence, length in enumerate(lengths):
        own = words[starts[sequence] : starts[sequence + 1]]
        assert own == [
            (sequence << SEQUENCE_SHIFT) + number + (LAST_BIT if number == len(own) - 1 else 0)
            for number in range(len(own))
        ]
        assert 1 <= len(own) <= MOST_SPLITS
        # A window of so many keys touches a step more where it begins within one.
        seen = min(length, longest_row(one)) + one.tiles.keys * (window[0] is not None)
        assert (len(own) - 1) * keys < max(seen, 1) <= max(len(own) * keys, 1)


def test_one_long_sequence_is_divided_among_all_clusters():
    """There are as many splits as clusters, none twice as long as all together on all clusters; the
    rule of equal splits gives the long one's to a few."""
    lengths = LENGTHS["one long"]
    one = problem(131072, len(lengths))
    listed = scheduler_metadata_of(one, gpu(), int32(lengths))
    parts, clusters = int(listed[-1]) * 2, gpu().clusters(one.tiles.cluster)
    assert clusters * 0.8 < parts <= clusters
    together = 2 * sum(lengths) / clusters
    assert together <= int(listed[0]) < 1.3 * together
    assert 131072 / splits_for(one, gpu()) > 2 * int(listed[0])


def test_what_is_refused(device):
    q, k, v = inputs((1, 600), HEADS, 2, device=device)
    used = int32([600, 5], device)
    listed = get_scheduler_metadata(used, 1, 600, *HEADS)
    options = {"seqused_k": used, "scheduler_metadata": listed}
    with pytest.raises(ValueError, match="scheduler_metadata has 10 words; accepted here: "):
        flash_attn_varlen_func(q, k, v, seqused_k=used, scheduler_metadata=int32([0] * 10, device))
    with pytest.raises(ValueError, match="num_splits is given with scheduler_metadata"):
        flash_attn_varlen_func(q, k, v, num_splits=2, **options)
    with pytest.raises(ValueError, match="batch_invariant is given with scheduler_metadata"):
        flash_attn_varlen_func(q, k, v, batch_invariant=True, **options)
    with pytest.raises(ValueError, match="seqused_q is given with scheduler_metadata"):
        flash_attn_varlen_func(q, k, v, seqused_q=int32([1, 1], device), **options)
    with pytest.raises(NotImplementedError, match="scheduler_metadata.*: no gradients"):
        flash_attn_varlen_func(q.requires_grad_(), k, v, **options)
    with pytest.raises(TypeError, match="seqused_k must be an int32 tensor|int32"):
        get_scheduler_metadata(used.long(), 1, 600, *HEADS)
    with pytest.raises(TypeError, match="cache_seqlens must be an int32 tensor, got .3, 4."):
        get_scheduler_metadata([3, 4], 1, 600, *HEADS)
    with pytest.raises(ValueError, match=r"cache_seqlens has shape \(2, 1\)"):
        get_scheduler_metadata(used[:, None], 1, 600, *HEADS)


@pytest.mark.simulator
def test_a_list_for_more_keys_than_there_are():
    with pytest.raises(ValueError, match=r"cache_seqlens is \[600, 601\]; accepted: 0 to 600"):
        get_scheduler_metadata(int32([600, 601]), 1, 600, *HEADS)


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_list_with_as_many_words_by_chance(monkeypatch):
    """Metadata of another batch over other heads is refused, also where a call of those shapes came
    before. A list serves other bounds and another window."""
    listed = get_scheduler_metadata(int32([600, 5]), 1, 600, 8, 1)
    one = get_scheduler_metadata(int32([5]), 1, 600, 16, 2)
    batch = 1 + (listed.numel() - one.numel()) // 2
    q, k, v = inputs((1, 16), (16, 2), batch)
    used = int32([5] * batch)
    right = get_scheduler_metadata(used, 1, 16, 16, 2)
    assert right.numel() == listed.numel()
    message = f"is a list for 2 sequences of 8 .*; accepted: {batch} sequences of 16 query heads"
    with host.stand_in():
        flash_attn_varlen_func(q, k, v, seqused_k=used, scheduler_metadata=right)
        with pytest.raises(ValueError, match=message):
            flash_attn_varlen_func(q, k, v, seqused_k=used, scheduler_metadata=listed)
    # A copy has no mark, but the header.
    options = {"seqused_k": used, "return_lse": True}
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(q, k, v, scheduler_metadata=listed.clone(), **options)
    # The host does not read that of a list on a GPU.
    monkeypatch.setattr(scheduler_metadata, "reads_contents", lambda device: False)
    others = torch.full_like(right, -1), torch.full_like(right, (1 << 31) - 1)
    for other in (listed.clone(), *others):
        found = flash_attn_varlen_func(q, k, v, scheduler_metadata=other, **options)
        assert all(one.isnan().all() for one in found)
    found = flash_attn_varlen_func(q, k, v, scheduler_metadata=right.clone(), **options)
    assert not any(one.isnan().any() for one in found)
    q, k, v = inputs((1, 700), (8, 1), 2)
    options = {"seqused_k": int32([700, 5]), "window_size": (300, 0), "return_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, scheduler_metadata=listed, **options)
    for b, n in enumerate((700, 5)):
        seen = q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n]
        accurate(out[b : b + 1], lse[b : b + 1], seen, window_size=(300, 0))


def test_an_empty_batch(device):
    """Has a list, and an empty result, with new rows and without."""
    q, k, v = inputs((1, 600), HEADS, 2, device=device)
    q, k, v, used = q[:0], k[:0], v[:0], int32([], device)
    listed = get_scheduler_metadata(used, 1, 600, *HEADS)
    out = flash_attn_varlen_func(q, k, v, seqused_k=used, scheduler_metadata=listed)
    assert out.shape == q.shape
    new = k[:, :1], v[:, :1]
    options = {"cache_seqlens": used, "scheduler_metadata": listed}
    assert flash_attn_with_kvcache(q, k, v, *new, **options).shape == q.shape
