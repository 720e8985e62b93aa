"""Queries under a tree mask (speculative decoding), against the float64 reference.

Lengths put the last keys on both sides of a tile's boundary (128 keys on Blackwell, 80 to 128 on
Hopper), heads and queries take every kernel: decode and forward, with one KV split and several.
"""

from __future__ import annotations

import cache_reference
import pytest
import torch
from paged_cases import Paged, accurate, int32, offsets

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, masks
from fa4_hd256.score_mods import alibi


def randn(*shape, device="cpu", dtype=torch.bfloat16):
    return torch.randn(*shape, 256).to(device, dtype)


def tree(nodes, roots=1):
    """bool (nodes, nodes): each node sees itself and its ancestors; the first ones have none."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(roots, nodes):
        seen[node] |= seen[torch.randint(node, ())]
    return seen


def trees(batch, nodes, roots=1, device="cpu"):
    return torch.stack([tree(nodes, roots) for _ in range(batch)]).to(device)


def dense(queries, keys, heads, batch=2, device="cpu", dtype=torch.bfloat16):
    q = randn(batch, queries, heads[0], device=device, dtype=dtype)
    return q, *(randn(batch, keys, heads[1], device=device, dtype=dtype) for _ in "kv")


#: Options that the reference knows.
OF_MATHS = ("causal", "window_size", "softcap", "softmax_scale", "learnable_sink")


def check(tensors, mask, **options):
    """Return (out, lse) of a call, which is as accurate as others."""
    out, lse = flash_attn_func(*tensors, tree_mask=mask, return_lse=True, **options)
    wanted = {name: options[name] for name in OF_MATHS if name in options}
    seen = cache_reference.seen_by_nodes(mask, tensors[1].shape[1])
    accurate(out, lse, tensors, mask=seen, **wanted)
    return out, lse


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# One query; few in a tile of few rows; 16 of 8 heads, a tile of many rows; as many as a word has
# bits, of heads by themselves; a padded group, queries in several tiles; fewer keys than nodes.
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "num_splits"),
    [(1, 129, (8, 1), 1), (5, 130, (8, 1), 1), (16, 257, (16, 2), 2), (32, 270, (2, 2), 3),
     (7, 300, (6, 1), 2), (9, 4, (2, 1), 1)],
)  # fmt: skip
@pytest.mark.sampled("5-130-heads1-1")
def test_trees(queries, keys, heads, num_splits, device):
    tensors = dense(queries, keys, heads, device=device)
    check(tensors, trees(2, queries, device=device), num_splits=num_splits)


# Words of 64 bits: all of them, of a group of heads; in the kernel for few rows, with KV splits;
# fewer keys than nodes, so that the first node's key lies before the first key.
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "num_splits"),
    [(64, 270, (4, 1), 1), (61, 200, (1, 1), 2), (33, 30, (4, 1), 1)],
)
@pytest.mark.sampled
def test_trees_of_64(queries, keys, heads, num_splits, device):
    tensors = dense(queries, keys, heads, device=device)
    # Any bits, not those of ancestors alone: each decides about a key.
    mask = torch.rand(2, queries, queries, device=device) < 0.5
    check(tensors, mask, num_splits=num_splits)


@pytest.mark.sampled
def test_words_of_64_bits(device):
    """Words that were packed before, each bit of them; of fewer nodes, too, than need them."""
    mask = (torch.rand(64, 64) < 0.5) | torch.eye(64, dtype=torch.bool)
    words = masks.tree_words(mask.to(device))
    assert words.dtype == torch.int64 and words.shape == (1, 64)
    for node in range(64):
        assert [bool(int(words[0, node]) >> j & 1) for j in range(64)] == mask[node].tolist()
    assert masks.tree_words(mask[:32, :32]).dtype == torch.int32
    assert masks.tree_words(mask[:33, :33]).dtype == torch.int64
    few = dense(5, 90, (4, 1), device=device)
    narrow = flash_attn_func(*few, tree_mask=mask[:5, :5].to(device), return_lse=True)
    wide = flash_attn_func(*few, tree_mask=words[:, :5], return_lse=True)
    assert same(wide, narrow)


@pytest.mark.sampled
def test_trees_of_60_in_a_paged_cache(device):
    """Engines call so: packed queries of two sequences, pages, one bound of all queries."""
    lengths, mask = (130, 200), torch.rand(2, 60, 60, device=device) < 0.5
    paged = Paged.of(lengths, 16, 1, device=device)
    check_pages(randn(90, 4, device=device), paged, (60, 30), mask, longest=60)


@pytest.mark.parametrize("queries", [2, 16])
@pytest.mark.sampled
def test_the_lower_triangle_is_the_causal_mask(queries, device):
    """Bits are the same, wherever the last keys lie."""
    triangle = torch.ones(queries, queries, dtype=torch.bool, device=device).tril()
    for keys in (queries - 1, 128, 128 + queries // 2, 240 + queries):
        tensors = dense(queries, keys, (4, 1), batch=1, device=device)
        options = {"return_lse": True, "num_splits": 1, "use_clc": False}
        found = flash_attn_func(*tensors, tree_mask=triangle, **options)
        assert same(found, flash_attn_func(*tensors, causal=True, **options))


@pytest.mark.sampled
def test_a_mask_of_any_form_and_the_causal_mask_take_away(device):
    """Later nodes are seen where causal allows it; nodes that see nothing of the tree; roots."""
    tensors = dense(6, 131, (4, 1), device=device)
    anything = torch.rand(2, 6, 6, device=device) < 0.5
    anything[:, 2] = False
    anything[:, 0, 5] = True
    first, second = (check(tensors, anything, causal=causal) for causal in (False, True))
    assert not same(first, second)
    check(tensors, trees(2, 6, roots=3, device=device))


@pytest.mark.sampled
def test_nodes_without_a_key(device):
    """Alone in the cache, and they see not even themselves."""
    tensors, nothing = dense(3, 3, (4, 1), device=device), torch.zeros(3, 3, dtype=torch.bool)
    nothing[1, 1] = True
    out, lse = check(tensors, nothing.to(device))
    assert not out[:, 0].any() and (lse[:, :, 0] == -torch.inf).all()


@pytest.mark.parametrize("queries", [4, 16])
@pytest.mark.sampled
def test_every_option(queries, device):
    """A window counts rows; a sink, softcap, a negative scale, float16, both schedulers."""
    tensors = dense(queries, 300, (8, 1), device=device, dtype=torch.float16)
    options = {
        "window_size": (150, 3), "softcap": 20.0, "softmax_scale": -0.1, "num_splits": 2,
        "learnable_sink": torch.randn(8, device=device),
    }  # fmt: skip
    mask = trees(2, queries, device=device)
    found = check(tensors, mask, use_clc=False, **options)
    if queries == 4:
        options |= {"use_clc": True, "return_lse": True}
        assert same(found, flash_attn_func(*tensors, tree_mask=mask, **options))


@pytest.mark.sampled
def test_beside_a_score_mod(device):
    """ALiBi, whose distances count rows."""
    tensors, mask = dense(4, 130, (4, 1), device=device), trees(2, 4, device=device)
    slopes = torch.linspace(0.01, 0.4, 4)
    out, lse = flash_attn_func(
        *tensors, tree_mask=mask, causal=True, return_lse=True, score_mod=alibi(slopes.to(device))
    )
    accurate(
        out, lse, tensors, causal=True, mask=cache_reference.seen_by_nodes(mask, 130),
        score_mod=lambda s, b, h, q, k: s - slopes.double()[h] * (q + 126 - k).abs(),
    )  # fmt: skip


def attend_pages(q, paged, lengths_q, mask, **options):
    return flash_attn_varlen_func(
        q, paged.k, paged.v, cu_seqlens_q=offsets(lengths_q, q.device),
        max_seqlen_q=options.pop("longest", 16), seqused_k=paged.used, page_table=paged.table,
        return_lse=True, tree_mask=mask, **options,
    )  # fmt: skip


def check_pages(q, paged, lengths_q, mask, **options):
    out, lse = attend_pages(q, paged, lengths_q, mask, **options)
    start = 0
    for row, count in enumerate(lengths_q):
        rows = slice(start, start + count)
        start += count
        nodes = mask[row, :count, :count]
        accurate(
            out[rows][None], lse[:, rows][None], (q[rows][None], *paged.keys(row)),
            mask=cache_reference.seen_by_nodes(nodes, paged.lengths[row]),
            causal=options.get("causal", False),
        )  # fmt: skip
    return out, lse


# Sequences of every number of queries up to 16, none of one; keys of one end with a page, of
# another inside the tile behind the first; one has no other keys than its own.
LENGTHS_Q, LENGTHS_K = (16, 0, 5, 1, 3), (400, 30, 131, 16, 3)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled
def test_pages_and_lengths_on_the_device(num_splits, device):
    paged = Paged.of(LENGTHS_K, 16, 2, device=device)
    q, mask = randn(25, 8, device=device), trees(5, 16, device=device)
    check_pages(q, paged, LENGTHS_Q, mask, causal=True, num_splits=num_splits)


@pytest.mark.sampled
def test_one_mask_for_all_and_words_that_were_packed_before(device):
    """Bits are the same, the 32nd of a word among them; nobody reads the bound."""
    tensors, mask = dense(32, 140, (2, 1), device=device), tree(32).to(device)
    assert mask[31, 31]
    words = masks.tree_words(mask)
    assert words.dtype == torch.int32 and words.shape == (1, 32)
    for node in range(32):
        bits = [bool(int(words[0, node]) >> j & 1) for j in range(32)]
        assert bits == mask[node].tolist()
    found = check(tensors, mask.expand(2, 32, 32))
    for given in (mask, words, words[0], words.T.contiguous().T.expand(2, 32)):
        assert same(found, flash_attn_func(*tensors, tree_mask=given, return_lse=True))
    q, k, v = (t.flatten(0, 1) for t in tensors)
    starts = [offsets((n, n), device) for n in (32, 140)]
    packed = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        max_seqlen_q=torch.tensor(32, device=device), max_seqlen_k=140, tree_mask=mask,
        num_splits=1,
    )  # fmt: skip
    accurate(packed.unflatten(0, (2, 32)), found[1], tensors,
             mask=cache_reference.seen_by_nodes(mask, 140))  # fmt: skip


@pytest.mark.sampled
def test_padded_queries(device):
    """seqused_q: the tree ends with the queries in use."""
    (q, k, v), mask = dense(8, 135, (2, 1), device=device), trees(2, 8, device=device)
    used = (8, 3)
    out, lse = flash_attn_varlen_func(
        q, k, v, seqused_q=int32(used, device), tree_mask=mask, return_lse=True
    )
    for row, n in enumerate(used):
        one = q[row : row + 1, :n], k[row : row + 1], v[row : row + 1]
        seen = cache_reference.seen_by_nodes(mask[row, :n, :n], 135)
        accurate(out[row : row + 1, :n], lse[row : row + 1, :, :n], one, mask=seen)


@pytest.mark.sampled
def test_new_rows_of_a_cache_are_the_tree(device):
    caches = [randn(2, 160, 1, device=device) for _ in "kv"]
    q, k, v = dense(4, 4, (4, 1), device=device)
    lengths, mask = [126, 40], trees(2, 4, device=device)
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=int32(lengths, device), tree_mask=mask, return_lse=True
    )
    for row, length in enumerate(lengths):
        keys = [cache[row : row + 1, : length + 4] for cache in caches]
        assert torch.equal(keys[0][0, length:], k[row])
        seen = cache_reference.seen_by_nodes(mask[row], length + 4)
        accurate(out[row : row + 1], lse[row : row + 1], (q[row : row + 1], *keys), mask=seen)


@pytest.mark.sampled
def test_no_findings(sanitize):
    sanitize(None, clusters=2)
    check(dense(5, 130, (8, 1)), trees(2, 5), num_splits=2)


def test_words_of_any_strides_become_rows():
    """Kernels read the words of a row one after the other."""
    words = torch.arange(12, dtype=torch.int32).view(2, 6)
    assert masks.tree_words(words) is words
    for given in (words[:, ::2], words[:, :3].T):
        found = masks.tree_words(given)
        assert found.stride(1) == 1 and torch.equal(found, given)
    assert torch.equal(masks.tree_words(words[0]), words[:1])


SQUARE = torch.ones(3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [({"tree_mask": [[1]]}, TypeError, "tree_mask is list; accepted: None, or a bool tensor"),
     ({"tree_mask": SQUARE.float()}, TypeError, "tree_mask has dtype torch.float32; accepted: a b"),
     ({"tree_mask": SQUARE[:2]}, ValueError, r"tree_mask has shape \(2, 3\); accepted"),
     ({"tree_mask": SQUARE[0]}, ValueError, r"tree_mask has shape \(3,\); accepted"),
     ({"tree_mask": torch.ones(65, 65, dtype=torch.bool)}, ValueError, "of up to 64 queries"),
     ({"tree_mask": torch.ones(2, 33, dtype=torch.int32)}, ValueError, "int32 of up to 32 nodes"),
     ({"tree_mask": torch.ones(2, 65, dtype=torch.int64)}, ValueError, "of up to 64 queries"),
     ({"tree_mask": SQUARE.expand(4, 3, 3)}, ValueError, "of 4 sequences; accepted: 2"),
     ({"tree_mask": SQUARE[:2, :2]}, ValueError, "of 2 nodes, and sequences have up to 3"),
     ({"tree_mask": SQUARE, "block_mask": masks.prefix_lm(1, 3, 9)}, ValueError, "both given")],
    ids=str,
)  # fmt: skip
def test_what_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        flash_attn_func(*dense(3, 9, (2, 1)), **given)


def test_more_that_is_refused():
    q, k, v = dense(3, 9, (2, 1))
    with pytest.raises(NotImplementedError, match="tree_mask: no gradients"):
        flash_attn_func(q.requires_grad_(), k, v, tree_mask=SQUARE)
    q = q.detach()
    turned = {"rotary_cos": torch.ones(9, 8), "rotary_sin": torch.ones(9, 8)}
    with pytest.raises(ValueError, match="rotary_cos is given with tree_mask"):
        flash_attn_with_kvcache(
            q, k, v, k[:, :3], v[:, :3], cache_seqlens=2, tree_mask=SQUARE, **turned
        )
    before = k.clone()
    with pytest.raises(ValueError, match="tree_mask is of 2 nodes"):
        flash_attn_with_kvcache(
            q, k, v, before[:, :3], before[:, :3], cache_seqlens=2, tree_mask=SQUARE[:2, :2]
        )
    assert torch.equal(k, before)


@pytest.mark.cuda
def test_in_a_cuda_graph(device):
    """A replay packs the mask that the tensor holds then."""
    tensors, mask = dense(4, 300, (8, 1), device=device), trees(2, 4, device=device)

    def step():
        return flash_attn_func(*tensors, tree_mask=mask)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    mask.copy_(trees(2, 4, device=device))
    graph.replay()
    assert torch.equal(out, step())
