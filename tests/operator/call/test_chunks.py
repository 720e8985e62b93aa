"""Divided backwards: every pair of a query and a key once, within the memory; the gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backward_cases import check, gradients, inputs
from gpus import gpu

from fa4_hd256.architectures import named
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.chunks import Chunk, divide, least_ds_bytes
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.backward.ds_tiles import DS_BLOCK, DS_TILE_BYTES, count_tiles
from fa4_hd256.kernels.blackwell.forward.config import TILES
from fa4_hd256.kernels.mask.block_mask import MASK_GRADIENTS

GPU = gpu()
BLACKWELL = named("sm_100a")
FULL, CAUSAL = (None, None), (None, 0)


def problem(
    lengths: tuple[int, int], heads: tuple[int, int], batch: int, window=FULL, copies: int = 1
) -> BackwardProblem:
    """A call on dense tensors; lengths and heads: those of q, then those of k and v."""
    forward = Problem(
        q_shape=(batch, lengths[0], heads[0], 256), max_seqlen_q=lengths[0],
        max_seqlen_k=lengths[1], sequences=batch, dtype=torch.bfloat16,
        device=torch.device("cpu"), options=Options(1 / 16, window), sink=False, ragged=(),
        architecture=BLACKWELL, tiles=TILES,
    )  # fmt: skip
    k_shape = (batch, lengths[1], heads[1], 256)
    return BackwardProblem(forward, k_shape, False, copies, copies)


def visible(lengths: tuple[int, int], window) -> torch.Tensor:
    """bool (queries, keys): the mask, aligned to the end of both."""
    level = torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0]
    keys, (left, right) = torch.arange(lengths[1]), window
    found = torch.ones(lengths, dtype=torch.bool)
    if left is not None:
        found &= keys >= level - left
    if right is not None:
        found &= keys <= level + right
    return found


def pairs(chunk: Chunk, shape: tuple[int, ...]) -> np.ndarray:
    """int (key/value heads, batch, queries, keys) of the whole call: 1 where the chunk has a
    visible pair."""
    found = np.zeros(shape, np.int32)
    sub = chunk.problem
    lengths = sub.forward.q_shape[1], sub.k_shape[1]
    assert lengths == (sub.forward.max_seqlen_q, sub.forward.max_seqlen_k)
    assert lengths == (len(chunk.queries), len(chunk.keys))
    assert len(chunk.sequences) == sub.forward.sequences
    assert len(chunk.heads_kv) * sub.group == sub.forward.q_shape[2]
    index = chunk.heads_kv, chunk.sequences, chunk.queries, chunk.keys
    mask = visible(lengths, sub.forward.options.window)
    found[np.ix_(*index)] = mask
    return found


WINDOWS = (FULL, CAUSAL, (300, 0), (0, 0), (500, 200), (None, 100), (700, None), (0, None))


@pytest.mark.architecture("sm_100a")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(600, 600), (400, 700), (700, 200), (1030, 2)], ids=str)
@pytest.mark.parametrize("size", [2.5, 1.5, 0.7], ids=["heads", "sequences", "queries"])
def test_every_visible_pair_is_in_one_chunk(lengths, window, size):
    """size: of what dS may take, over that of one key/value head of one sequence."""
    whole = problem(lengths, (4, 2), 2, window)
    ds_bytes = int(whole.ds_bytes_of_head // 2 * size)
    division = divide(whole, ds_bytes, GPU)
    # A single block of queries cannot be split.
    seeing = visible(lengths, window).any(1).nonzero().flatten() // 256
    has_ranges = None in window and len(seeing.unique()) > 1
    assert division.problem.keeps_ds == (size > 1 or has_ranges)
    assert division.problem.adds == (size < 1 and has_ranges)
    assert all(chunk.keys for chunk in division.chunks)
    found = sum(pairs(chunk, (2, 2, *lengths)) for chunk in division.chunks)
    assert (found == visible(lengths, window).int().numpy()).all()
    if division.problem.keeps_ds:
        assert all(p.problem.ds_bytes <= ds_bytes for p in division.chunks)


@pytest.mark.architecture("sm_100a")
def test_every_query_is_in_one_range():
    """dQ of a query is written once, even if it sees no key."""
    division = divide(problem((1100, 300), (2, 1), 1, CAUSAL), 2 * 2 * 512 * 256, GPU)
    assert [p.queries for p in division.chunks] == [range(1024), range(1024, 1100)]
    assert [p.keys for p in division.chunks] == [range(224), range(300)]


@pytest.mark.architecture("sm_100a")
def test_keys_of_a_bound_on_the_left():
    """A range's first query sees so many keys to its left; the bound is one from the ranges' ends.
    Of 64 blocks of dS that fit the first four of queries see 63, the next five 60."""
    whole = problem((4096, 4096), (1, 1), 1, (300, None))
    chunks = divide(whole, 2 * 1024 * 4096, GPU).chunks
    assert [p.queries for p in chunks[:2]] == [range(1024), range(1024, 2304)]
    assert [p.keys for p in chunks[:2]] == [range(4096), range(724, 4096)]
    windows = [p.problem.forward.options.window for p in chunks[:2]]
    assert windows == [(300 + 4096 - 1024, None), (300 + 4096 - 2304, None)]


@pytest.mark.architecture("sm_100a")
def test_windows_are_not_divided_into_ranges():
    whole = problem((4096, 4096), (1, 1), 1, (300, 0))
    assert not divide(whole, whole.ds_bytes_of_head - 1, GPU).problem.keeps_ds


@pytest.mark.architecture("sm_100a")
def test_ranges_without_a_mask_are_equal():
    """Seven units; four fit: 4 and 3, not more of one length and a rest."""
    whole = problem((1700, 100), (1, 1), 1)
    for fitting, expected in ((6, [1024, 676]), (4, [1024, 676]), (3, [768, 768, 164])):
        found = divide(whole, 2 * fitting * 256 * 256, GPU).chunks
        assert [len(p.queries) for p in found] == expected


def test_chunks_are_as_large_as_fits():
    whole = problem((512, 512), (8, 4), 6)
    of_head = whole.ds_bytes_of_head

    def shapes(num_bytes: int) -> list[tuple[int, int, int]]:
        found = divide(whole, num_bytes, GPU).chunks
        return [(len(p.heads_kv), len(p.sequences), len(p.queries)) for p in found]

    assert shapes(4 * of_head) == [(4, 6, 512)]
    assert shapes(4 * of_head - 1) == 2 * [(2, 6, 512)]
    assert shapes(of_head) == 4 * [(1, 6, 512)]
    # 5 fit of 4 heads and 6 sequences each, then 3, then half of one.
    assert shapes(of_head - 1) == 6 * [(4, 1, 512)]
    assert shapes(of_head // 2) == 12 * [(2, 1, 512)]
    assert shapes(of_head // 6 - 1) == 48 * [(1, 1, 256)]
    # Not a single unit of queries; nothing.
    for num_bytes in (of_head // 12 - 1, 0):
        assert shapes(num_bytes) == [(4, 6, 512)]
        assert not divide(whole, num_bytes, GPU).problem.keeps_ds


@pytest.mark.architecture("sm_100a")
def test_ragged_sequences_are_divided_by_heads_only():
    whole = problem((512, 512), (2, 2), 4)
    ragged = replace(whole, forward=replace(whole.forward, ragged=("seqused_k",)))
    assert len(divide(ragged, whole.ds_bytes_of_head, GPU).chunks) == 2
    assert not divide(ragged, whole.ds_bytes_of_head - 1, GPU).problem.keeps_ds


@pytest.mark.architecture("sm_100a")
def test_parts_of_a_chunk():
    """Parts follow the tiles of a chunk; an expanded head always has one per copy."""
    # 16 tiles of 32 steps of a head of a sequence: of 2 sequences, of 2 heads, alone, half of it.
    whole = problem((4096, 4096), (16, 2), 4)
    of_sequence = whole.ds_bytes_of_head // 4
    sizes = 4, 2, 1, 0.5
    head_parts = [divide(whole, int(size * of_sequence), GPU).problem.head_parts for size in sizes]
    assert head_parts == [2, 4, 4, 4]
    copied = problem((4096, 4096), (16, 1), 4, copies=4)
    for size in (4, 1, 0.5):
        assert divide(copied, int(size * copied.ds_bytes_of_head / 4), GPU).problem.head_parts == 4


def masked(lengths: tuple[int, int], heads: tuple[int, int], batch: int, copies: int = 1):
    """Return the same call under a block mask."""
    whole = problem(lengths, heads, batch, copies=copies)
    return replace(whole, forward=replace(whole.forward, ragged=MASK_GRADIENTS))


@pytest.mark.architecture("sm_100a")
def test_chunks_under_a_block_mask():
    """Heads of a sequence, query heads of a group, ranges of queries of these with all keys: within
    the memory, and of all query heads each query once."""
    lengths, batch = (1100, 300), 2
    # Each query head has 20 blocks of dS in two sequences: 5 x 2 each.
    whole = masked(lengths, (6, 2), batch)
    of_row = 2 * DS_BLOCK * DS_BLOCK * 2

    def shapes(num_bytes: int) -> list[tuple[int, int, int, int]]:
        division = divide(whole, num_bytes, GPU)
        assert division.problem.keeps_ds
        assert all(p.problem.ds_bytes <= num_bytes for p in division.chunks)
        found = np.zeros((whole.forward.q_shape[2], batch, lengths[0]), np.int32)
        for p in division.chunks:
            found[np.ix_(p.heads, p.sequences, p.queries)] += 1
            assert p.keys == range(lengths[1])
            assert p.problem.forward.max_seqlen_q == len(p.queries) == p.problem.forward.q_shape[1]
            assert p.problem.origin.query == p.queries.start
        assert (found == 1).all()
        sizes = [(len(p.heads), len(p.sequences), len(p.queries)) for p in division.chunks]
        assert division.problem.adds == any(n < whole.group or m < 1100 for n, _, m in sizes)
        return [(len(division.chunks), *size) for size in sorted(set(sizes), reverse=True)]

    assert shapes(6 * 2 * 5 * of_row) == [(1, 6, 2, 1100)]
    assert shapes(3 * 5 * of_row) == [(4, 3, 1, 1100)]
    assert shapes(2 * 5 * of_row) == [(8, 2, 1, 1100), (8, 1, 1, 1100)]
    assert shapes(5 * of_row) == [(12, 1, 1, 1100)]
    # All heads of the group, of one block; no more blocks than one are left for the third.
    assert shapes(5 * of_row - 1) == [(20, 3, 1, 256), (20, 3, 1, 76)]
    assert shapes(2 * of_row) == [(40, 2, 1, 256), (40, 2, 1, 76), (40, 1, 1, 256), (40, 1, 1, 76)]
    assert shapes(of_row) == [(60, 1, 1, 256), (60, 1, 1, 76)]
    # Some blocks at once, as equally many as can be.
    whole = masked(lengths, (2, 2), batch)
    assert shapes(4 * of_row) == [(8, 1, 1, 768), (8, 1, 1, 332)]
    for num_bytes in (of_row - 1, 0):
        with pytest.raises(NotImplementedError, match=f"{of_row} bytes here.*allows {num_bytes}. "):
            divide(whole, num_bytes, GPU)


@pytest.mark.architecture("sm_100a")
def test_chunks_of_listed_tiles():
    """Only listed tiles take memory where the host knows how many there are at most."""
    whole = masked((4096, 2048), (4, 2), 2)
    listed, tile = 130, DS_BLOCK * DS_BLOCK // 4 * 2
    known, of_head = replace(whole, listed_tiles=listed), listed * tile
    assert known.ds_shape == (4, 2, listed, tile // 2)
    assert replace(whole, listed_tiles=10**6).ds_shape == whole.ds_shape

    def shapes(num_bytes: int) -> list[tuple[int, ...]]:
        chunks = divide(known, num_bytes, GPU).chunks
        assert all(p.problem.ds_bytes <= num_bytes for p in chunks)
        found = {(len(p.heads), len(p.sequences), len(p.queries)) for p in chunks}
        return sorted(found, reverse=True)

    assert shapes(8 * of_head) == [(4, 2, 4096)]
    assert shapes(2 * of_head) == [(2, 1, 4096)]
    assert shapes(of_head) == [(1, 1, 4096)]
    # A range's listed tiles are unknown: there is room for all, 32 per block of queries.
    assert shapes(of_head - 1) == [(2, 1, 512)]
    assert least_ds_bytes(known) == least_ds_bytes(whole) == 32 * tile
    # Fewer than a block of queries has with all keys.
    assert least_ds_bytes(replace(whole, listed_tiles=20)) == 20 * tile


@pytest.mark.architecture("sm_100a")
def test_copies_of_a_head_under_a_block_mask_stay_together():
    whole = masked((1100, 300), (4, 1), 1, copies=2)
    of_row = 2 * DS_BLOCK * DS_BLOCK * 2
    found = divide(whole, 4 * 2 * of_row, GPU)
    assert [(len(p.heads), len(p.queries)) for p in found.chunks] == [(4, 512), (4, 512), (4, 76)]
    assert found.problem.head_parts == 2
    with pytest.raises(NotImplementedError, match=f"of 4 query head.* {4 * of_row} bytes here"):
        divide(whole, 4 * of_row - 1, GPU)


OPTIONS = {
    "full": ((520, 300), {}),
    "causal": ((520, 700), {"causal": True}),
    "causal, CLC": ((520, 700), {"causal": True, "use_clc": True}),
    "left": ((600, 600), {"window_size": (130, None)}),
}


@pytest.mark.parametrize(
    ("size", "mask"),
    [(1, "full"), (0.7, "full"), (1, "causal"), (0.7, "causal, CLC"), (0.5, "left")],
)
@pytest.mark.sampled("0.7-full")
def test_gradients_of_chunks(mask, size, device, backward_config):
    """One sequence of a head at a time, or a range of its queries, each adding to dK and dV."""
    lengths, options = OPTIONS[mask]
    tensors = inputs(lengths, (4, 2), batch=2, device=device)
    window = (None, 0) if "causal" in options else options.get("window_size", FULL)
    of_head = 2 * count_tiles(lengths, window) * DS_TILE_BYTES
    config = backward_config(ds_bytes=int(size * of_head))
    check(tensors, backward_config=config, **options)


def test_queries_that_see_no_key(device, backward_config):
    """Hidden queries take no memory: of two blocks of queries that see any, each in a range, the
    first has those before it. Their dQ is 0."""
    tensors = inputs((1030, 20), (2, 1), device=device)
    config = backward_config(ds_bytes=2 * 2 * 256 * 256)
    found = check(tensors, causal=True, backward_config=config)
    assert not found["q"][:, :1010].any() and found["q"][:, 1010:].any()


@pytest.mark.parametrize("size", [1, 0.7], ids=["a sequence", "a range"])
def test_chunks_of_a_head_that_was_expanded(size, device, backward_config):
    q, k, v = inputs((300, 200), (2, 1), batch=2, device=device)
    wide = [t.expand(2, 200, 2, 256) for t in (k, v)]
    config = backward_config(ds_bytes=int(size * 2 * 2 * 512 * 256))
    check((q, *wide), causal=True, backward_config=config)


def test_the_order_of_ranges_is_fixed(device, backward_config):
    tensors = inputs((600, 600), (2, 1), device=device)
    dout = torch.randn_like(tensors[0])
    config = backward_config(ds_bytes=2 * 2 * 256 * 768)
    first, second = (
        gradients(tensors, dout, causal=True, num_splits=1, backward_config=config)
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in "qkv")
