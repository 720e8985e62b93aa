"""`flash_attn_with_kvcache` against the float64 reference: what is written, and the attention."""

from __future__ import annotations

import cache_reference
import pytest
import torch
from operator_calls import kvcache_arguments

from fa4_hd256 import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    plans,
)
from fa4_hd256.check import reference
from fa4_hd256.run import compile
from fa4_hd256.score_mods import alibi

LSE_TOLERANCE = 1e-3
#: Rows in use: none, a few, all but the new ones.
LENGTHS = [0, 21, 59]
ROWS, NEW = 64, 5


def randn(*shape, device="cpu", dtype=torch.bfloat16):
    return torch.randn(*shape).to(device, dtype)


def int32(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def dense_cache(device, batch=3, rows=ROWS, heads_kv=1):
    return tuple(randn(batch, rows, heads_kv, 256, device=device) for _ in "kv")


def tables(device, rotary_dim=64, positions=ROWS, dtype=torch.bfloat16):
    angles = torch.randn(positions, rotary_dim // 2)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def split(rows, counts):
    """Split a padded or packed tensor into the rows of each sequence."""
    return list(rows) if counts is None else list(rows.split(counts))


def accurate(got, lse, rows, **options):
    """got (seqlen_q, heads, 256), lse (heads, seqlen_q) of q, k, v of a sequence, rounded once."""
    tensors = [t[None].to(got.dtype) for t in rows]
    found = reference.compare(got[None], lse[None], tensors, **options)
    assert found.max_error <= found.tolerance, found
    assert found.lse_max_error <= LSE_TOLERANCE, found


def check(q, caches, lengths, new=None, counts=(None, None), rotary=None, table=None, **options):
    """One call against the reference: results, caches, and what the call left alone.

    new: (k, v); counts: rows of each sequence of q and of k, None where padded; rotary: of the
    reference; options: of the attention.
    """
    before = cache_reference.KvCache(*(t.clone() for t in caches), lengths, table)
    ordered = options.get("causal", False) or options.get("window_size", (None, None)) != (
        None, None
    )  # fmt: skip
    per_sequence = None if new is None else list(zip(*(split(t, counts[1]) for t in new)))
    after, rows = before.appended(split(q, counts[0]), per_sequence, rotary, ordered)
    given, device = {"cache_seqlens": int32(lengths, q.device)}, q.device
    if table is not None:
        given["page_table"] = int32(table, device)
    for name, count in (("cu_seqlens_q", counts[0]), ("cu_seqlens_k_new", counts[1])):
        if count is not None:
            given[name] = int32([0, *count], device).cumsum(0).int()
    if counts[0] is not None:
        given["max_seqlen_q"] = max(counts[0])
    if rotary is not None:
        given |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin,
                  "rotary_interleaved": rotary.interleaved}  # fmt: skip
        if rotary.first is not None:
            given["rotary_seqlens"] = int32(rotary.first, device)
    unchanged = q.clone(), given["cache_seqlens"].clone()
    out, lse = flash_attn_with_kvcache(
        q, *caches, *(new or ()), **given, **options, return_lse=True
    )
    assert torch.equal(q, unchanged[0]) and torch.equal(given["cache_seqlens"], unchanged[1])
    for cache, exact in zip(caches, (after.k, after.v)):
        # A rotated row is rounded once, after float32; all others are the same bits.
        error = (cache.cpu().double() - exact).abs()
        assert (error <= (2**-8 if rotary is not None else 0) * exact.abs() + 2**-20).all()
    lse_rows = lse if counts[0] is None else lse.split(counts[0], dim=1)
    for got, got_lse, exact in zip(split(out, counts[0]), lse_rows, rows):
        accurate(got, got_lse, exact, **options)
    return out, lse


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (9, 2), "softcap": 8.0},
        {"causal": True, "window_size": (11, None), "softmax_scale": 0.03},
        {},
    ],
    ids=["causal", "window", "sliding", "full"],
)
@pytest.mark.sampled("causal")
def test_new_rows_of_a_dense_cache(device, options):
    """Two query heads share one of keys; a sequence without rows before, one that fills up."""
    q = randn(3, NEW, 2, 256, device=device)
    new = tuple(randn(3, NEW, 1, 256, device=device) for _ in "kv")
    check(q, dense_cache(device), LENGTHS, new, **options)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (3, 1)), (False, None)])
@pytest.mark.sampled("True-None-True")
def test_rotary_embedding(device, interleaved, causal, window):
    """Positions of keys count from the rows in use; those of queries only where they have an order.

    A part of the head, all of it, tables in float32, positions of their own: each once.
    """
    rotary_dim, dtype = (256, torch.float32) if interleaved else (64, torch.bfloat16)
    first = [3, 17, 40] if causal else None
    rotary = cache_reference.Rotary(*tables(device, rotary_dim, dtype=dtype), interleaved, first)
    q = randn(3, NEW, 2, 256, device=device)
    new = tuple(randn(3, NEW, 1, 256, device=device) for _ in "kv")
    window = {} if window is None else {"window_size": window}
    check(q, dense_cache(device), LENGTHS, new, rotary=rotary, causal=causal, **window)


@pytest.mark.sampled
def test_a_bound_on_the_queries_that_is_a_tensor(device):
    """A tensor bound is not read, with new rows as without: the rows of q bound each sequence; with
    a tree its nodes do."""
    q = randn(3, 2, 256, device=device)
    new = tuple(randn(2, 2, 1, 256, device=device) for _ in "kv")
    options = {"cu_seqlens_q": int32([0, 1, 3], device), "cache_seqlens": int32([3, 20], device)}
    caches = dense_cache(device, 2)
    tree = torch.ones(2, 2, dtype=torch.bool, device=device).tril()
    for more in ({"causal": True}, {"tree_mask": tree, "causal": True}):
        expected = flash_attn_with_kvcache(q, *caches, *new, max_seqlen_q=2, **options, **more)
        got = flash_attn_with_kvcache(
            q, *caches, *new, max_seqlen_q=torch.tensor(2), max_seqlen_k=torch.tensor(64),
            **options, **more,
        )  # fmt: skip
        assert torch.equal(got, expected)
    with pytest.raises(TypeError, match=r"max_seqlen_q is a tensor of shape \(2,\)"):
        flash_attn_with_kvcache(q, *caches, *new, max_seqlen_q=torch.ones(2).int(), **options)
    with pytest.raises(ValueError, match="max_seqlen_q is a tensor with batch_invariant=True"):
        flash_attn_with_kvcache(
            q, *caches, *new, max_seqlen_q=torch.tensor(2), batch_invariant=True, **options
        )


def test_without_new_rows(device):
    """Lengths as a tensor, as a number for all, and all rows."""
    q, caches = randn(3, 2, 2, 256, device=device), dense_cache(device)
    check(q, caches, LENGTHS, causal=True)
    lengths = int32([21] * 3, device)
    expected = flash_attn_varlen_func(q, *caches, seqused_k=lengths, causal=True)
    assert torch.equal(flash_attn_with_kvcache(q, *caches, cache_seqlens=21, causal=True), expected)
    whole = flash_attn_with_kvcache(q, *caches, causal=True)
    assert torch.equal(whole, flash_attn_varlen_func(q, *caches, causal=True))


def test_steps_one_after_the_other_are_one_call(device):
    """A prompt at once, or in pieces: the same cache, and rows as accurate."""
    q = randn(1, 7, 2, 256, device=device)
    new = tuple(randn(1, 7, 1, 256, device=device) for _ in "kv")
    at_once, in_steps = dense_cache(device, 1), dense_cache(device, 1)
    flash_attn_with_kvcache(q, *at_once, *new, cache_seqlens=0, causal=True)
    for first, last in ((0, 4), (4, 5), (5, 7)):
        step = slice(first, last)
        check(q[:, step], in_steps, [first], tuple(t[:, step] for t in new), causal=True)
    for one, other in zip(at_once, in_steps):
        assert torch.equal(one[:, :7], other[:, :7])


def test_a_cache_of_any_layout(device):
    """Heads before rows, keys and values of one tensor: written and read in place."""
    both = randn(3, 2, ROWS, 512, device=device)
    caches = both.transpose(1, 2).split(256, dim=-1)
    q = randn(3, 1, 4, 256, device=device)
    new = tuple(randn(3, 1, 2, 256, device=device) for _ in "kv")
    check(q, caches, LENGTHS, new, causal=True)


def pages(device, page_size, counts, heads_kv=1, heads_first=False):
    """Return (caches, table): of each sequence so many pages, in no order; one page nobody has."""
    numbers = torch.randperm(sum(counts) + 1).tolist()
    table = [[numbers.pop() for _ in range(count)] for count in counts]
    shape = sum(counts) + 1, page_size, heads_kv, 256
    if heads_first:
        shape = shape[0], heads_kv, page_size, 256
    caches = tuple(randn(*shape, device=device) for _ in "kv")
    return tuple(t.transpose(1, 2) for t in caches) if heads_first else caches, table


@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (16, {"causal": True}),
        (48, {"causal": True, "window_size": (9, None)}),
        (16, {"softcap": 8.0, "window_size": (30, 1)}),
    ],
)
@pytest.mark.sampled("16-options0")
def test_new_rows_of_a_cache_in_pages(device, page_size, options):
    """Rows that begin a page, fill one, and lie in two."""
    lengths = [0, page_size - 2, 2 * page_size - NEW]
    caches, table = pages(device, page_size, [2, 2, 2])
    q = randn(3, NEW, 2, 256, device=device)
    new = tuple(randn(3, NEW, 1, 256, device=device) for _ in "kv")
    check(q, caches, lengths, new, table=table, **options)


@pytest.mark.sampled
def test_pages_packed_and_turned(device):
    """All at once: several KV heads, heads before rows, packed rows, rotary embedding."""
    counts = [3, 1, 0], [3, 1, 2]
    caches, table = pages(device, 16, [2, 2, 2], 2, heads_first=True)
    q = randn(sum(counts[0]), 4, 256, device=device)
    new = tuple(randn(sum(counts[1]), 2, 256, device=device) for _ in "kv")
    rotary = cache_reference.Rotary(*tables(device), interleaved=False)
    check(q, caches, [14, 31, 0], new, counts, rotary, table, causal=True)


@pytest.mark.parametrize("with_rows", [True, False], ids=["new rows", "none"])
@pytest.mark.sampled("none")
def test_results_in_memory_that_is_given(device, with_rows):
    """out=, with rotated queries where there are new rows."""
    q, caches = randn(3, 2, 2, 256, device=device), dense_cache(device)
    new, options = (), {"cache_seqlens": int32([0, 21, 59], device), "causal": True}
    if with_rows:
        new = tuple(randn(3, 2, 1, 256, device=device) for _ in "kv")
        options |= dict(zip(("rotary_cos", "rotary_sin"), tables(device)))
    again = tuple(t.clone() for t in caches)
    expected = flash_attn_with_kvcache(q, *caches, *new, **options)
    out = torch.full_like(q, torch.nan)
    assert flash_attn_with_kvcache(q, *again, *new, **options, out=out) is out
    assert torch.equal(out, expected)
    assert all(torch.equal(one, other) for one, other in zip(caches, again))


@pytest.mark.sampled
def test_entries_of_a_larger_cache(device):
    """cache_batch_idx: each sequence has an entry of the cache."""
    caches = dense_cache(device, batch=5)
    before = cache_reference.KvCache(*(t.clone() for t in caches), LENGTHS, [[4], [0], [2]])
    q = randn(3, NEW, 2, 256, device=device)
    new = tuple(randn(3, NEW, 1, 256, device=device) for _ in "kv")
    given = {"cache_batch_idx": int32([4, 0, 2], device), "causal": True}
    out, lse = flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=int32(LENGTHS, device), **given, return_lse=True
    )
    after, rows = before.appended(list(q), list(zip(*new)))
    for cache, exact in zip(caches, (after.k, after.v)):
        assert torch.equal(cache.cpu().double(), exact)
    for results in zip(out, lse, rows):
        accurate(*results, causal=True)
    whole = flash_attn_with_kvcache(q, *caches, **given)
    chosen = [t[[4, 0, 2]] for t in caches]
    expected = flash_attn_with_kvcache(q, *chosen, causal=True)
    assert (whole.float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()


def call(device, **changed):
    q = randn(2, 1, 2, 256, device=device)
    arguments = {
        "q": q, "k_cache": randn(2, 16, 1, 256, device=device),
        "v_cache": randn(2, 16, 1, 256, device=device), "k": randn(2, 1, 1, 256, device=device),
        "v": randn(2, 1, 1, 256, device=device), "cache_seqlens": int32([3, 4], device),
        "causal": True,
    }  # fmt: skip
    return arguments | changed


WRONG = {
    "no lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens is None"),
    "lengths of int64": ({"cache_seqlens": torch.tensor([3, 4])}, TypeError, "int64"),
    "a bool": ({"cache_seqlens": True}, TypeError, "an int or"),
    "too many rows": ({"cache_seqlens": 17}, ValueError, "accepted: 0 to 16"),
    "too many rows of one": (
        {"cache_seqlens": int32([3, 17], "cpu")}, ValueError,
        r"cache_seqlens is \[3, 17\]; accepted: 0 to 16",
    ),
    "fewer than none": ({"cache_seqlens": int32([3, -1], "cpu")}, ValueError, "accepted: 0 to 16"),
    "too many rows, none new": (
        {"cache_seqlens": int32([3, 17], "cpu"), "k": None, "v": None}, ValueError,
        r"cache_seqlens is \[3, 17\]; accepted: 0 to 16",
    ),
    "too many rows in pages": (
        {"cache_seqlens": int32([3, 17], "cpu"), "page_table": int32([[0], [1]], "cpu")},
        ValueError, r"cache_seqlens is \[3, 17\]; accepted: 0 to 16",
    ),
    "no lengths of pages": (
        {"cache_seqlens": None, "page_table": int32([[0], [1]], "cpu")}, ValueError,
        "cache_seqlens is None; accepted with k and v",
    ),
    "no room": ({"cache_seqlens": 16}, ValueError, "new row would be row 16; accepted: 0 to 15"),
    "k alone": ({"v": None}, TypeError, "v is None"),
    "another batch": ({"k": randn(1, 1, 1, 256)}, ValueError, r"\(2, any, 1, 256\)"),
    "another dtype": ({"v": randn(2, 1, 1, 256, dtype=torch.float16)}, TypeError, "float16"),
    "latent queries": ({"qv": randn(2, 1, 2, 256)}, NotImplementedError, "qv is given"),
    "left padding past the rows in use of pages": (
        {"cache_leftpad": int32([0, 5], "cpu"), "page_table": int32([[0], [1]], "cpu")},
        ValueError, r"cache_leftpad is \[0, 5\]; accepted: 0 to \[3, 4\]",
    ),
    "left padding past the rows in use": (
        {"cache_leftpad": int32([0, 5], "cpu")}, ValueError,
        r"cache_leftpad is \[0, 5\]; accepted: 0 to \[3, 4\]",
    ),
    "left padding of one sequence": (
        {"cache_leftpad": int32([0], "cpu")}, ValueError, r"accepted: \(2,\), one number"
    ),
    "sin alone": ({"rotary_sin": randn(16, 8)}, TypeError, "rotary_cos is None"),
    "tables of two dtypes": (
        {"rotary_cos": randn(16, 8).float(), "rotary_sin": randn(16, 8)}, TypeError,
        "rotary_cos is torch.float32, rotary_sin torch.bfloat16; accepted: one dtype of both",
    ),
    "a word for a rotation": (
        {"rotary_cos": randn(16, 8), "rotary_sin": randn(16, 8), "rotary_interleaved": 1},
        TypeError, "rotary_interleaved must be True or False",
    ),
    "positions of another type": (
        {"rotary_cos": randn(16, 8), "rotary_sin": randn(16, 8),
         "rotary_seqlens": torch.tensor([5, 2])}, TypeError, "rotary_seqlens",
    ),
    "positions of one sequence": (
        {"rotary_cos": randn(16, 8), "rotary_sin": randn(16, 8),
         "rotary_seqlens": int32([5], "cpu")}, ValueError, "rotary_seqlens",
    ),
    "positions past the tables": (
        {"rotary_cos": randn(16, 8), "rotary_sin": randn(16, 8),
         "rotary_seqlens": int32([5, 16], "cpu")}, ValueError, "at position 16; accepted: 0 to 15",
    ),
    "positions without tables": (
        {"rotary_seqlens": int32([5, 2], "cpu")}, ValueError,
        "rotary_seqlens is given without rotary_cos and rotary_sin; accepted: with them",
    ),
    "positions without tables, none new": (
        {"k": None, "v": None, "cache_seqlens": None, "rotary_seqlens": int32([5, 2], "cpu")},
        ValueError, "rotary_seqlens is given without rotary_cos and rotary_sin",
    ),
    "offsets of no rows": (
        {"k": None, "v": None, "cu_seqlens_k_new": int32([0, 1, 2], "cpu")}, ValueError,
        "cu_seqlens_k_new is given without k and v; accepted: with them",
    ),
    "offsets of no rows, no lengths": (
        {"k": None, "v": None, "cache_seqlens": None,
         "cu_seqlens_k_new": int32([0, 1, 2], "cpu")}, ValueError, "cu_seqlens_k_new is given",
    ),
    "an odd part": (
        {"rotary_cos": randn(16, 9), "rotary_sin": randn(16, 9)}, ValueError, "multiple of 16"
    ),
    "no positions": (
        {"rotary_cos": randn(0, 8), "rotary_sin": randn(0, 8)}, ValueError, "at least one position"
    ),
    "few positions": (
        {"rotary_cos": randn(4, 8), "rotary_sin": randn(4, 8)}, ValueError, "accepted: 0 to 3"
    ),
    "rotary without rows": (
        {"rotary_cos": randn(16, 8), "rotary_sin": randn(16, 8), "k": None, "v": None},
        ValueError, "without k and v",
    ),
    "no such row of the table": (
        {"cache_batch_idx": int32([0, 2], "cpu"), "page_table": int32([[0], [1]], "cpu")},
        ValueError, "cache_batch_idx holds 2; accepted: 0 to 1, the rows of page_table",
    ),
    "a table of one sequence": (
        {"page_table": int32([[0]], "cpu")}, ValueError, r"page_table has shape \(1, 1\) on cpu"
    ),
    "a table without pages": (
        {"page_table": torch.zeros(2, 0, dtype=torch.int32), "cache_seqlens": 0}, ValueError,
        r"page_table has shape \(2, 0\) on cpu; accepted: \(2, pages of the longest",
    ),
    "an entry twice": (
        {"cache_batch_idx": int32([1, 1], "cpu"), "cache_seqlens": 4}, ValueError,
        "two new rows would be row 4 of batch entry 1 of the cache; accepted: a place of its own",
    ),
    "pages of int64": (
        {"page_table": torch.tensor([[0], [1]])}, TypeError,
        r"page_table must be an int32 tensor, got a Tensor of shape \(2, 1\) and torch.int64",
    ),
    "pages of one dimension": (
        {"page_table": int32([0, 1], "cpu")}, ValueError,
        r"page_table is a Tensor of shape \(2,\) and torch.int32; accepted: a \(batch, pages of",
    ),
    "offsets in a list": (
        {"cu_seqlens_k_new": [0, 1, 2], "k": randn(2, 1, 256), "v": randn(2, 1, 256)}, TypeError,
        r"cu_seqlens_k_new must be an int32 tensor, got \[0, 1, 2\]",
    ),
    "a page twice": (
        {"page_table": int32([[0, 1], [1, 0]], "cpu"), "cache_seqlens": int32([19, 3], "cpu")},
        ValueError, "two new rows would be row 3 of page 1 of the cache; accepted: a place of",
    ),
    "a page twice in a sequence": (
        {"page_table": int32([[0, 0], [1, 1]], "cpu"), "cache_seqlens": int32([15, 3], "cpu"),
         "k": randn(2, 17, 1, 256), "v": randn(2, 17, 1, 256)},
        ValueError, "two new rows would be row 15 of page 0",
    ),
    "no such entry": (
        {"cache_batch_idx": int32([0, 7], "cpu")}, ValueError,
        "cache_batch_idx holds 7; accepted: 0 to 1, the entries of the cache",
    ),
    "a negated view": (
        {"v_cache": torch._neg_view(randn(2, 16, 1, 256))}, ValueError, "v_cache is a negated view"
    ),
    "queries that lack a dimension, rotated": (
        {"q": randn(2, 2, 256), "rotary_cos": randn(16, 8), "rotary_sin": randn(16, 8)},
        ValueError, "q has 3 dimensions",
    ),
    "a list that is none": (
        {"scheduler_metadata": [1]}, TypeError, "scheduler_metadata must be an int32 tensor"
    ),
    "no such page": (
        {"page_table": int32([[0], [2]], "cpu"), "window_size": (0, 0), "causal": True},
        ValueError, "2; accepted: 0 to 1",
    ),
    "pages of 0": (
        {"k_cache": randn(4, 0, 1, 256), "v_cache": randn(4, 0, 1, 256),
         "page_table": int32([[0, 1], [2, 3]], "cpu")}, ValueError, "a page_size of 1 or more",
    ),
    "offsets past the end": (
        {"cu_seqlens_k_new": int32([0, 1, 3], "cpu"), "k": randn(2, 1, 256),
         "v": randn(2, 1, 256)}, ValueError, r"\[0, 1, 3\]",
    ),
    # Refusals of the attention come before anything is written.
    "a window": ({"window_size": (2,)}, ValueError, "window_size"),
    "parts": ({"num_splits": 1.0}, TypeError, "num_splits"),
    "out of another dtype": ({"out": randn(2, 1, 2, 256).half()}, TypeError, "out has dtype"),
    "a score_mod": ({"score_mod": lambda score: score}, TypeError, "a ScoreMod of"),
    "sparse rows": ({"v": randn(2, 1, 1, 256).to_sparse()}, TypeError, "v must be a dense"),
    "rows that share memory": (
        {"v_cache": randn(1, 16, 1, 256).expand(2, 16, 1, 256)}, ValueError,
        "v_cache has shape .* elements that share memory",
    ),
    "out that shares memory": (
        {"out": randn(2048).as_strided((2, 1, 2, 256), (256, 256, 256, 1))}, ValueError,
        "out has shape .* elements that share memory",
    ),
    "no offsets": (
        {"q": randn(2, 2, 256), "cu_seqlens_q": int32([], "cpu"), "cache_seqlens": 3}, ValueError,
        r"cu_seqlens_q is a Tensor of shape \(0,\) and torch.int32; accepted: a \(batch \+ 1,\)",
    ),
}  # fmt: skip


@pytest.mark.simulator
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_errors_leave_the_cache_as_it_was(wrong):
    changed, error, message = wrong
    given = call("cpu", **changed)
    before = [given[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**given)
    for cache, name in zip(before, ("k_cache", "v_cache")):
        assert torch.equal(cache, given[name])


@pytest.mark.simulator
@pytest.mark.parametrize("name", ["q", "k_cache", "k", "slopes"])
def test_out_that_the_call_reads_leaves_the_cache_as_it_was(name):
    given = call("cpu", q=randn(2, 1, 2, 256))
    given["out"] = given["q"].view(-1).as_strided((2, 1, 2, 256), (512, 512, 256, 1))
    if name == "k_cache":
        given["out"] = given[name].view(2, 8, 2, 256)[:, :1]
    if name == "k":
        given["out"] = randn(2, 1, 2, 256)
        given["k"] = given["out"][:, :, :1]
    if name == "slopes":
        given["out"] = randn(2, 1, 2, 256)
        given["score_mod"] = alibi(given["out"].view(-1)[:4].view(torch.float32))
    before = [given[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(ValueError, match="out lies in memory that the call reads"):
        flash_attn_with_kvcache(**given)
    for cache, name in zip(before, ("k_cache", "v_cache")):
        assert torch.equal(cache, given[name])


METADATA = {"cache_seqlens": int32([7, 22], "cpu"), "max_seqlen_q": 2, "max_seqlen_k": 32,
            "num_heads_q": 4, "num_heads_kv": 2}  # fmt: skip


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("max_seqlen_q", -1, ValueError, "max_seqlen_q is -1; accepted: 1 to"),
        ("num_heads_q", 0, ValueError, "num_heads_q is 0; accepted: 1 to"),
        ("max_seqlen_q", True, TypeError, "max_seqlen_q must be an int, got True"),
        ("max_seqlen_k", 1 << 70, ValueError, "max_seqlen_k is"),
        ("max_seqlen_k", 32.0, TypeError, "max_seqlen_k must be an int"),
        ("num_heads_q", -4, ValueError, "num_heads_q is -4"),
        ("kv_dtype", "fp8", TypeError, "kv_dtype is 'fp8'; accepted: None or"),
    ],
)
def test_what_metadata_is_not_made_for(name, value, error, says):
    with pytest.raises(error, match=says):
        get_scheduler_metadata(**METADATA | {name: value})


@pytest.mark.simulator
@pytest.mark.parametrize("changed", [{"max_seqlen_k": 1 << 31}, {"kv_dtype": torch.float16}])
def test_what_metadata_is_made_for(changed):
    """Bounds past 32 bits; the dtype that q has, whichever."""
    assert get_scheduler_metadata(**METADATA | changed).dtype == torch.int32


@pytest.mark.simulator
@pytest.mark.parametrize(
    "form",
    [{}, {"page_table": int32([[1], [0]], "cpu")}, {"cache_batch_idx": int32([1, 0], "cpu")}],
    ids=["rows", "pages", "entries"],
)
def test_factors_of_no_number_leave_the_cache_as_it_was(form):
    given = call("cpu", **form)
    caches = {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    scales = {name: torch.ones(1, 2, 1, 1) for name in ("k_descale", "v_descale")}
    scales["v_descale"][0, 1] = 0
    before = {name: cache.view(torch.uint8).clone() for name, cache in caches.items()}
    with pytest.raises(ValueError, match="v_descale has a factor of 0.0; accepted: finite"):
        flash_attn_with_kvcache(**given | caches | scales)
    for name, cache in caches.items():
        assert torch.equal(cache.view(torch.uint8), before[name])


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_kernel_that_is_missing_leaves_the_cache_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv("FA4_HD256_JIT", "0")
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "_memory", {})
    given = call("cpu")
    before = given["k_cache"].clone()
    with pytest.raises(compile.MissingKernelError, match="nothing may be compiled"):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)


@pytest.mark.simulator
def test_a_grid_that_is_too_large_leaves_the_cache_as_it_was():
    given = call("cpu", q=randn(2, 2, 256), cu_seqlens_q=int32([0, 1, 2], "cpu"))
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=r"max_seqlen_q is \d+: 2 sequences"):
        flash_attn_with_kvcache(**given, max_seqlen_q=1 << 30, num_splits=64)
    assert torch.equal(given["k_cache"], before)


@pytest.mark.simulator
@pytest.mark.parametrize("name", ["v_cache", "out"])
def test_what_nothing_is_written_to_here(name):
    """PyTorch refuses it when all has been written."""
    given = call("cpu")
    with torch.inference_mode():
        given[name] = torch.zeros_like(given["v_cache" if name == "v_cache" else "q"])
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=f"{name} was made under torch.inference_mode"):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)


@pytest.mark.parametrize("name", ["q", "rotary_cos"])
@pytest.mark.sampled
def test_no_gradients(device, name):
    cos, sin = tables(device, positions=16)
    given = call(device, rotary_cos=cos, rotary_sin=sin)
    given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name} requires gradients"):
        flash_attn_with_kvcache(**given)
    assert not given["k_cache"].requires_grad
    with torch.no_grad():
        assert not flash_attn_with_kvcache(**given).requires_grad


def step(q, k_cache, v_cache, k, v, lengths, table):
    return flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, page_table=table, causal=True
    )


def step_tensors(device):
    caches, table = pages(device, 16, [2, 2])
    q = randn(2, 1, 2, 256, device=device)
    new = tuple(randn(2, 1, 1, 256, device=device) for _ in "kv")
    return q, *caches, *new, int32([3, 17], device), int32(table, device)


def rotated_step(q, k_cache, v_cache, k, v, lengths, *others):
    """Rotary embedding, the lse, and a tensor for the result."""
    table, cos, sin, out = others
    return flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, page_table=table, causal=True,
        rotary_cos=cos, rotary_sin=sin, return_lse=True, out=out,
    )  # fmt: skip


@pytest.mark.parametrize("call", [step, rotated_step])
def test_a_graph_has_one_operator(device, call):
    """New rows and the attention are one operator, whose schema says what it writes to."""
    given = step_tensors(device)
    if call is rotated_step:
        given = *given, *tables(device, positions=32), torch.empty_like(given[0])
    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(*given)
    called = [node.target for graph in graphs for node in graph.nodes]
    ours = [target for target in called if "fa4_hd256" in str(target)]
    assert ours == [torch.ops.fa4_hd256.forward_kvcache.default]
    arguments = ours[0]._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out", "k_cache", "v_cache", "k_block_scale", "v_block_scale"]


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"k": "k_cache"}, "k_cache lies in the memory of k"),
        ({"v_cache": "k_cache"}, "k_cache and v_cache lie in one place"),
        ({"out": "q"}, "out lies in memory that the call reads"),
    ],
)
def test_the_operator_refuses_memory(changed, says):
    """Nothing but the operator's own body sees where tensors of a graph lie."""
    q, k_cache, v_cache, k, v, lengths, table = step_tensors("cpu")
    named = {"out": torch.empty_like(q), "k_cache": k_cache, "v_cache": v_cache, "q": q, "k": k,
             "v": v}  # fmt: skip
    (name, other), *_ = changed.items()
    named[name] = named[other][: len(named[name]), :1] if name == "k" else named[other]
    before = k_cache.clone()
    arguments = kvcache_arguments(*named.values(), lengths=lengths, page_table=table)
    with pytest.raises(ValueError, match=says):
        torch.ops.fa4_hd256.forward_kvcache(*arguments)
    assert torch.equal(k_cache, before)


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("k", "k_cache lies in the memory of k"),
        ("v_cache", "k_cache and v_cache lie in one place"),
    ],
)
def test_memory_is_refused_before_anything_is_compiled(monkeypatch, name, says):
    given = call("cpu")
    given[name] = given["k_cache"][:, :1] if name == "k" else given["k_cache"]
    # It compiles the kernels of a plan.
    monkeypatch.setattr(plans, "Execution", None)
    with pytest.raises(ValueError, match=says):
        flash_attn_with_kvcache(**given)


@pytest.mark.cuda
def test_in_a_cuda_graph(device):
    """A replay follows the lengths and the table that the tensors have then."""
    given = step_tensors(device)
    step(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*given)
    *_, lengths, table = given
    lengths.copy_(int32([20, 4], device))
    table.copy_(table.flip(0))
    again = tuple(tensor.clone() for tensor in given)
    graph.replay()
    assert torch.equal(out, step(*again))
    assert all(torch.equal(one, other) for one, other in zip(given, again))
