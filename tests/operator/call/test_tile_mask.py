"""Masks by tiles: what each function of `fa4_hd256.masks` says, against the dense mask."""

from __future__ import annotations

import pytest
import torch
from operator_calls import forward_arguments
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
)

from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.call import tile_mask
from fa4_hd256.call.tile_mask import ABSENT, ASKED
from fa4_hd256.kernels.mask.block_mask import FULL, NOTHING


def places(seqlen_q, seqlen_k=None):
    """Return (level of each query, key), which broadcast."""
    seqlen_k = seqlen_k or seqlen_q
    level = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    return level, torch.arange(seqlen_k)[None]


def same(mask, *dense):
    """The mask is this dense one of each batch entry."""
    expected = torch.stack(dense)[:, None]
    assert torch.equal(mask.dense(), expected)
    assert mask.tiles.shape == (len(dense), 1, *(-(-n // 128) for n in expected.shape[2:]))


# Prefixes of nothing, less than causal shows, inside a tile, of whole tiles, of all keys.
def test_prefix_lm():
    level, key = places(300, 520)
    prefixes = 0, 7, 300, 384, 520
    dense = [(key <= level) | (key < prefix) for prefix in prefixes]
    same(masks.prefix_lm(torch.tensor(prefixes), 300, 520), *dense)
    same(masks.prefix_lm(300, 300, 520), dense[2])


# More keys than queries, and fewer: queries that see nothing.
@pytest.mark.parametrize(
    ("lengths", "window", "tokens"),
    [((700, 900), 100, 5), ((500, 300), 0, 0), ((300, 300), 400, 130)],
)
def test_sliding_window(lengths, window, tokens):
    level, key = places(*lengths)
    dense = (key <= level) & ((key >= level - window) | (key < tokens))
    found = masks.sliding_window(window, *lengths, first_tokens=tokens)
    same(found, dense)


IDS = torch.tensor([[0] * 130 + [1] * 5 + [0] * 200 + [4] * 65, [3] * 400])


def runs(ids):
    """Number of the run of equal neighbours."""
    return torch.cat((ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 20)])
def test_documents(causal, window):
    level, key = places(400)
    dense = []
    for ids in IDS:
        seen = runs(ids)[:, None] == runs(ids)[None]
        if causal:
            seen = seen & (key <= level)
        dense.append(seen if window is None else seen & (key >= level - window))
    same(masks.documents(IDS, causal=causal, window=window), *dense)
    same(masks.documents(IDS[0], causal=causal, window=window), dense[0])


@pytest.mark.parametrize("window", [None, 30])
def test_bidirectional_blocks(window):
    """Gemma 3's: images across a border of tiles, next to each other, at the end; text between."""
    blocks = torch.full((2, 400), -1)
    blocks[0, 100:140], blocks[0, 140:180], blocks[0, 390:] = 0, 1, 2
    level, key = places(400)
    dense = []
    for row in blocks:
        seen = (key <= level) if window is None else (key <= level) & (key >= level - window)
        dense.append(seen | ((runs(row)[:, None] == runs(row)[None]) & (row >= 0)))
    same(masks.bidirectional_blocks(blocks, window=window), *dense)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 200, 333), (1, 2, 128, 256)])
def test_from_dense(shape):
    dense = torch.rand(shape) > 0.5
    dense[0, 0, :128] = True
    dense[-1, -1, :128, 128:] = False
    found = masks.from_dense(dense)
    assert torch.equal(found.dense(), dense)
    assert torch.equal(masks.from_dense(dense[0, 0]).dense()[0, 0], dense[0, 0])
    wide = dense.expand(*shape) if shape[0] > 1 else dense.expand(4, -1, -1, -1)
    assert masks.from_dense(wide).tiles.shape[0] == shape[0]


def words_of(dense):
    """Return packed bits of a mask (..., seqlen_q, seqlen_k); bits behind the last key are set."""
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[-1] % 32), value=True)
    weights = 1 << torch.arange(32, dtype=torch.int32)
    return (padded.unflatten(-1, (-1, 32)) * weights).sum(-1, dtype=torch.int32)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 200, 333), (1, 2, 128, 256)])
def test_from_words(shape):
    """Tiles and bits of packed bits are those of the dense mask, and the words stay as they are."""
    dense = torch.rand(shape) > 0.5
    dense[0, 0, :128] = True
    dense[-1, -1, :128, 128:] = False
    words = words_of(dense)
    before = words.clone()
    found, expected = masks.from_words(words, shape[3]), masks.from_dense(dense)
    assert found.lengths == shape[2:] and torch.equal(words, before)
    assert torch.equal(found.tiles, expected.tiles) and torch.equal(found.bits, expected.bits)
    assert torch.equal(masks.from_words(words[0, 0], shape[3]).dense()[0, 0], dense[0, 0])
    wide = words.expand(4, -1, -1, -1) if shape[0] == 1 else words
    assert masks.from_words(wide, shape[3]).tiles.shape[0] == shape[0]


@pytest.mark.parametrize("heads", [1, 3])
def test_words_of_a_layer(heads):
    """Keys that both see; the lists of tiles, and what is made of them, are made once."""
    blocks = masks.documents(torch.arange(300) // 140)
    own = blocks.dense()
    for number in range(2):
        dense = torch.rand(1, 1, 300, 300) > 0.5
        dense[:, :, 128:256] = number == 0
        found = masks.with_words(blocks, words_of(dense))
        assert torch.equal(found.dense(), own & dense)
        assert found.steps(1) is masks.with_words(blocks, words_of(dense)).steps(1)
    for_heads = masks.from_dense(torch.rand(1, heads, 300, 300) > 0.3)
    dense = torch.rand(1, heads, 300, 300) > 0.5
    found = masks.with_words(for_heads, words_of(dense))
    assert torch.equal(found.dense(), for_heads.dense() & dense)
    found = masks.with_words(for_heads, words_of(dense[:, :1]))
    assert torch.equal(found.dense(), for_heads.dense() & dense[:, :1])
    assert torch.equal(blocks.dense(), own)


def test_words_within_the_bits_of_the_first_head_are_of_that_alone():
    by_head = create_block_mask(lambda b, h, q, k: (q + h) % 3 > 0, 1, 1, 200, 200, device="cpu")
    first = masks.from_block_mask(by_head)
    found = masks.with_words(first, words_of(torch.ones(200, 200) > 0))
    assert found.of_first == first.of_first == (False, True)


def test_words_of_a_layer_that_are_refused():
    blocks, words = masks.documents(torch.zeros(64).int()), torch.zeros(64, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="block_mask is Tensor; accepted: a mask of fa4_hd256"):
        masks.with_words(words, words)
    for wrong in (words[:63], words.expand(2, 1, 64, 2).clone()):
        with pytest.raises(ValueError, match="words of its queries and keys"):
            masks.with_words(blocks, wrong)
    with pytest.raises(ValueError, match="block_mask has no bits"):
        masks.with_words(blocks.lists, words)


def test_words_that_are_refused():
    words = torch.zeros(5, 3, dtype=torch.int32)
    with pytest.raises(TypeError, match="words is torch.int64; accepted: an int32 tensor"):
        masks.from_words(words.long(), 96)
    for wrong, seqlen_k in ((words, 97), (words, 64), (words[None], 96), (words[:0], 96)):
        with pytest.raises(ValueError, match=r"words has shape .*; accepted: .*seqlen_q, [234]\)"):
            masks.from_words(wrong, seqlen_k)
    with pytest.raises(ValueError, match="seqlen_k is 0"):
        masks.from_words(words, 0)


def test_kinds_of_tiles():
    """Full ones have no bits, unless they end behind the last key; empty ones are listed by no
    tile of queries without another one of them that sees something."""
    dense = torch.zeros(300, 300, dtype=torch.bool)
    dense[:128] = True
    dense[128:256, 130] = True
    mask = masks.from_dense(dense)
    (first, partial, last) = (1, 2, 3)
    assert mask.tiles[0, 0].tolist() == [
        [FULL, FULL, first], [tile_mask.ABSENT, partial, tile_mask.ABSENT],
        [tile_mask.ABSENT] * 3,
    ]  # fmt: skip
    assert len(mask.bits) == last and not mask.bits[NOTHING].any()
    assert mask.steps(2)[0, 0].tolist() == [
        [[3, 0, 0, 0], [2, first, NOTHING, 0], [1, FULL, partial, 0], [0, FULL, NOTHING, 0]],
        [[0, 0, 0, 0], *([number, NOTHING, NOTHING, 0] for number in (2, 1, 0))],
    ]
    assert mask.steps(2) is mask.steps(2)
    assert mask.steps(1)[0, 0, 1, :2].tolist() == [[1, 0, 0, 0], [1, partial, 0, 0]]


# Ranges that begin and end at blocks, or with the last query, inside a block; all of them.
@pytest.mark.parametrize("queries", [(0, 256), (256, 768), (512, 900), (768, 900), (0, 900)])
@pytest.mark.parametrize("keys", [130, 700])
def test_lists_of_some_queries(queries, keys):
    """Lists equal those of a mask that has these queries alone, of each head and entry."""
    kinds = torch.rand(2, 3, 900, keys) > 0.5
    for tile in torch.randperm(8)[:4].tolist():
        kinds[:, :, tile * 128 : tile * 128 + 128, : keys // 2] = False
    kinds[:, 1:, :512] = kinds[:, :1, :512]
    kinds[0, :, 512:768] = False
    mask, span = masks.from_dense(kinds), range(*queries)
    expected = mask.part(span, range(keys), range(3)).blocks
    found = tile_mask.blocks_of_queries(mask.blocks, keys, span)
    assert found.shape == expected.shape and found.is_contiguous()
    assert torch.equal(found[..., 0, :], expected[..., 0, :])
    places = torch.arange(found.shape[3] - 1)
    listed = places < expected[..., 0, 0, None]
    assert torch.equal(found[..., 1:, :][listed], expected[..., 1:, :][listed])
    assert (found[..., 1:, 0] >= 0).all()
    assert (found[..., 1:, 0] < max(-(-len(span) // 256), -(-keys // 256)) * 2).all()


DOCUMENTS = torch.tensor([0] * 150 + [1] * 10 + [2] * 240)


def of_documents(b, h, q, k):
    """Indexes a tensor, and depends on batch and head."""
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k + h * 3) & (k >= b)


# Queries, keys, and both not multiples of a block; blocks of several tiles.
@pytest.mark.parametrize("block", [128, (256, 128), (128, 384)])
@pytest.mark.parametrize("lengths", [(400, 400), (256, 130), (130, 384)])
def test_from_block_mask(lengths, block):
    mask = create_block_mask(of_documents, 2, 3, *lengths, device="cpu", BLOCK_SIZE=block)
    dense = create_mask(of_documents, 2, 3, *lengths, device="cpu")
    found = masks.from_block_mask(mask)
    assert torch.equal(found.dense(), dense)
    assert masks.as_tile_mask(mask) is masks.as_tile_mask(mask)
    assert masks.as_tile_mask(found) is found


def test_blocks_alone():
    """`from_kv_blocks` without full blocks and a function gives the blocks that are listed."""
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 1, 0], [0, 1, 2]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, seq_lengths=(256, 300))
    tiles = masks.from_block_mask(mask).tiles[0, 0]
    absent = tile_mask.ABSENT
    assert tiles[1].tolist() == [FULL, FULL, absent]
    assert tiles[0, :2].tolist() == [absent] * 2 and tiles[0, 2] > 0


def one_for_all(mask_mod):
    """A `BlockMask` of 300 x 300 in one batch entry and one head, whose blocks are all partial."""
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32)
    indices = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
    return BlockMask.from_kv_blocks(
        counts, indices, mask_mod=mask_mod, BLOCK_SIZE=128, seq_lengths=(300, 300)
    )


#: A function, and in how many batch entries and heads of 2 and 3 it sees something else.
READERS = {
    "neither": (lambda b, h, q, k: q >= k, (1, 1)),
    "head": (lambda b, h, q, k: q >= k + h * 40, (1, 3)),
    "batch entry": (lambda b, h, q, k: q >= k + b * 40, (2, 1)),
    "tensors of both": (of_documents, (2, 3)),
    "branch by head": (lambda b, h, q, k: torch.where(h == 1, q >= k, q < k), (1, 3)),
    "type of b": (noop_mask, (1, 1)),
    "joined": (and_masks(lambda b, h, q, k: q >= k, noop_mask), (1, 1)),
    "joined with one of heads": (and_masks(noop_mask, lambda b, h, q, k: q >= k + h), (1, 3)),
    "size of h": (lambda b, h, q, k: (q >= k) & torch.ones_like(h, dtype=torch.bool), (1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS.values(), ids=READERS)
def test_a_block_mask_for_all_heads(case):
    """The mask_mod is evaluated for each head, and each batch entry, whose bits may be its own; and
    once where they are those of all."""
    mask_mod, apart = case
    mask = one_for_all(mask_mod)
    found = masks.as_tile_mask(mask, batch=2, heads=3)
    dense = create_mask(mask_mod, 2, 3, 300, 300, device="cpu")
    assert torch.equal(found.dense().expand(2, 3, -1, -1), dense)
    assert found.tiles.shape[:2] == apart
    assert masks.as_tile_mask(mask, batch=2, heads=3) is found
    assert (masks.as_tile_mask(mask, batch=2, heads=4) is found) == (apart[1] == 1)
    assert masks.as_tile_mask(mask, batch=2, heads=3, with_bits=False).tiles.shape[:2] == (1, 1)


def test_a_mask_of_the_first_head_alone():
    """Made without calls' numbers of heads, it goes with one head; so do those made of it."""
    mask = one_for_all(READERS["head"][0])
    found = masks.from_block_mask(mask)
    assert torch.equal(found.dense()[0, 0], places(300)[0] >= places(300)[1])
    cu = torch.tensor([0, 100, 300], dtype=torch.int32)
    everything = range(300)
    for one in (found, masks.in_sequences(mask, cu, cu), found.part(*(everything,) * 2, range(1)),
                found.part(range(40, 300), everything, range(1))):  # fmt: skip
        assert masks.as_tile_mask(one, batch=2, heads=1) is one
        with pytest.raises(ValueError, match="heads=1, whose mask_mod .* accepted: .*heads=3"):
            masks.as_tile_mask(one, batch=2, heads=3)
    assert masks.as_tile_mask(found, heads=3, with_bits=False) is found.lists
    with pytest.raises(ValueError, match="block_mask is of heads=1"):
        flash_attn_func(*tensors(300, 300), block_mask=found)
    of_entries = masks.from_block_mask(one_for_all(READERS["batch entry"][0]))
    with pytest.raises(ValueError, match="of batch=1, whose mask_mod .* accepted: .*batch=2"):
        masks.as_tile_mask(of_entries, batch=2, heads=3)


def test_bits_of_every_tile(monkeypatch):
    """GPU-style masks, where nobody waits for the number of partial tiles, are equal; also by
    chunks."""
    expected = masks.documents(IDS).dense()
    monkeypatch.setattr(tile_mask, "CHUNK", 5)
    assert torch.equal(masks.documents(IDS).dense(), expected)
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda t: torch.arange(len(t))[:, None])
    found = masks.documents(IDS)
    assert torch.equal(found.dense(), expected)
    assert len(found.bits) == 1 + found.tiles.numel()


def tensors(seqlen_q=256, seqlen_k=256, heads=2):
    return [torch.zeros(1, s, heads, 256, dtype=torch.bfloat16)
            for s in (seqlen_q, seqlen_k, seqlen_k)]  # fmt: skip


def dense(*shape):
    return masks.from_dense(torch.ones(shape, dtype=torch.bool))


ERRORS = {
    "kind": ({"block_mask": torch.ones(256, 256)}, TypeError, "block_mask is Tensor; accepted"),
    "lengths": (
        {"block_mask": dense(1, 1, 200, 256)}, ValueError,
        "of 200 queries and 256 keys; accepted: 256 and 256",
    ),
    "batch": (
        {"block_mask": dense(3, 1, 256, 256)}, ValueError, "of batch 3 and 1 heads; accepted: 1",
    ),
    "heads": (
        {"block_mask": dense(1, 3, 256, 256)}, ValueError, "3 heads; accepted: 1 or 1, and 1 or 2",
    ),
    "device": (
        {"block_mask": masks.TileMask((256, 256), *(torch.zeros(1, 1, 2, 2, device="meta"),) * 2)},
        ValueError, "block_mask is on meta; accepted: cpu",
    ),
    "causal": (
        {"block_mask": dense(256, 256), "causal": True}, ValueError, "with block_mask; accepted",
    ),
    "window": (
        {"block_mask": dense(256, 256), "window_size": (3, None)}, ValueError, "with block_mask",
    ),
    "splits": (
        {"block_mask": dense(256, 256), "num_splits": 2}, ValueError, "num_splits is 2 with block",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors(case):
    options, error, text = case
    with pytest.raises(error, match=text):
        flash_attn_func(*tensors(), **options)


def test_blocks_of_another_size():
    mask = create_block_mask(of_documents, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=r"BLOCK_SIZE \(64, 64\); accepted: multiples of 128"):
        flash_attn_func(*tensors(), block_mask=mask)


@pytest.mark.parametrize("offsets", [[0, 300, 300, 620, 700], [0, 128, 256, 690, 690]])
def test_in_sequences(offsets):
    """A mask of packed rows keeps what queries see of keys of their own sequence alone; rows behind
    the last offset see nothing."""
    seen = torch.rand(1, 2, 700, 500) > 0.3
    seen[..., 300:620, 100:384] = True
    of_keys = [0, 100, 120, 384, 500]
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in (offsets, of_keys))
    rows, keys = (
        torch.bucketize(torch.arange(n), cu[1:], right=True) for n, cu in ((700, cu_q), (500, cu_k))
    )
    own = (rows[:, None] == keys) & (rows < 4)[:, None]
    mask = masks.in_sequences(masks.from_dense(seen), cu_q, cu_k)
    assert torch.equal(mask.dense(), seen & own)
    assert (mask.tiles == ABSENT).any() and (mask.tiles == FULL).any()
    lists = masks.in_sequences(masks.from_dense(seen), cu_q, cu_k, with_bits=False)
    assert lists.bits is None
    # Evaluated tiles may turn out to be empty, or full; nothing else.
    assert not ((lists.tiles == FULL) & (mask.tiles != FULL)).any()
    assert not ((lists.tiles == ABSENT) & (mask.tiles != ABSENT)).any()


def test_the_operator_by_itself_wants_what_gradients_take(forward_config):
    q, k, v = tensors()
    halves = forward_config().tile_q // 128
    mask = dense(256, 256)
    q.requires_grad_()
    lists = {"mask_steps": mask.steps(halves), "mask_bits": mask.bits}
    with pytest.raises(NotImplementedError, match="mask_steps without mask_blocks and mask_key"):
        torch.ops.fa4_hd256.forward(*forward_arguments(q, k, v, **lists))


def test_lists_of_ds():
    """Lists have blocks of 256 x 256 of any head; tiles past the end are written and not read."""
    seen = torch.zeros(2, 2, 300, 600, dtype=torch.bool)
    seen[0, 0, :128, :128] = True
    seen[0, 1, 257, 300] = True
    seen[1, 0, 5, 599] = True
    mask = masks.from_dense(seen)
    bits = mask.tiles[0, 1, 2, 2].item()
    of_first, of_second = mask.blocks[0]
    none = [NOTHING, NOTHING, 0]
    assert of_first[0, :3].tolist() == [[2, 2, 0, 0], [0, FULL, NOTHING, 0], [1, *none]]
    # The second block's tiles of dS come behind the four of the first one.
    assert of_second[0, :3, 0].tolist() == of_first[0, :3, 0].tolist()
    assert of_second[1, :3].tolist() == [[2, 1, 4, 0], [2, bits, NOTHING, 0], [3, *none]]
    assert of_first[2, 0].tolist() == [0, 0, 8, 0]
    blocks_of_queries = of_first[3:, :3, 0].tolist()
    assert blocks_of_queries == [[2, 1, 0], [2, 3, 2]]
    assert of_first[4, 1:3].tolist() == [[3, 6, 0, 0], [2, 4, 0, 0]]
    assert mask.blocks[1, 0, 3, :2].tolist() == [[1, 1, 0, 0], [4, 0, 0, 0]]


# All queries, or those of some blocks.
@pytest.mark.parametrize("queries", [(0, 1100), (256, 1100), (512, 1024)])
def test_numbers_of_listed_tiles(queries):
    """One after the other, without a gap; a list of a block of queries says the same ones."""
    keys, seen = 600, torch.zeros(2, 2, 1100, 600, dtype=torch.bool)
    for query, key in torch.randint(0, keys, (9, 2)).tolist():
        seen[query % 2, key % 2, query + 400, key] = True
    mask = masks.from_dense(seen)
    blocks = tile_mask.blocks_of_queries(mask.blocks, keys, range(*queries))
    for lists in blocks[:, 1].tolist():
        rows, columns, numbers = lists[:3], lists[3:], {}
        for block, ((written, _, first, _), *entries) in enumerate(rows):
            for half in range(2):
                for place in range(written):
                    tile = 2 * block + half, entries[place][0]
                    numbers[tile] = first + half * written + place
        assert [*numbers.values()] == [*range(len(numbers))]
        found = {
            (kv_tile, 2 * block + half): number + half
            for block, ((read, *_), *entries) in enumerate(columns)
            for kv_tile, number, *_ in entries[:read]
            for half in range(2)
        }
        # Tiles past the last key are written alone.
        assert found == {tile: n for tile, n in numbers.items() if tile[0] < -(-keys // 128)}


# All tiles of dS count, up to some; those of the entry that lists most.
@pytest.mark.parametrize(("window", "unit"), [(0, 64), (1000, 64), (7000, 128)])
def test_count_of_listed_tiles(window, unit, monkeypatch):
    seqlen = 8192
    documents = torch.stack([torch.zeros(seqlen), torch.arange(seqlen)])
    mask = masks.documents(documents.int(), window=window)
    assert mask.listed_tiles == 0
    mask.count_listed()
    before = -(-window // 256)
    exact = 4 * sum(min(block, before) + 1 for block in range(seqlen // 256))
    assert mask.listed_tiles == -(-exact // unit) * unit
    assert mask.listed_tiles - exact < max(64, exact / 16)


def test_of_no_listed_tiles_there_is_a_count():
    """0 says that nobody knows."""
    mask = masks.from_dense(torch.zeros(300, 300, dtype=torch.bool))
    mask.count_listed()
    assert mask.listed_tiles == tile_mask.ROUNDED_TILES


def test_bits_by_keys(monkeypatch):
    monkeypatch.setattr(tile_mask, "CHUNK", 3)
    mask = masks.from_dense(torch.rand(300, 300) > 0.5)
    exchanged = masks.TileMask(mask.lengths, mask.tiles.transpose(2, 3), mask.key_bits)
    assert torch.equal(exchanged.dense()[0, 0, :256, :256], mask.dense()[0, 0, :256, :256].T)


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: masks.prefix_lm(2.0, 3), TypeError, "prefix is 2.0; accepted"),
    (lambda: masks.prefix_lm(2, 0), ValueError, "seqlen is 0; accepted: 1"),
    (lambda: masks.sliding_window(-1, 3), ValueError, "window is -1; accepted"),
    (lambda: masks.documents(torch.ones(3)), TypeError, "ids is torch.float32; accepted"),
    (lambda: masks.documents(IDS, causal=False, window=3), ValueError, "window is 3 with causal"),
    (lambda: masks.bidirectional_blocks(IDS[None]), ValueError, "blocks has shape"),
    (lambda: masks.bidirectional_blocks(IDS, window=-2), ValueError, "window is -2; accepted"),
    (lambda: masks.from_dense(torch.ones(3, 3)), TypeError, "mask is torch.float32; accepted"),
    (lambda: masks.from_dense(torch.ones(3, dtype=torch.bool)), ValueError, "mask has shape"),
])  # fmt: skip
def test_errors_of_named_masks(make, error, text):
    with pytest.raises(error, match=text):
        make()


ONE, CU = torch.tensor([1]), torch.tensor([0, 3, 8], dtype=torch.int32)
OF_8 = masks.from_dense(torch.ones(8, 8) > 0)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: masks.prefix_lm([3], 8), TypeError, r"prefix is \[3\]; accepted: an int"),
        (lambda: masks.prefix_lm(True, 8), TypeError, "prefix is True"),
        (lambda: masks.prefix_lm(-4, 8), ValueError, "prefix is -4; accepted: 0"),
        (lambda: masks.prefix_lm(1 << 80, 8), ValueError, "prefix is 1208"),
        (lambda: masks.prefix_lm(-ONE, 8), ValueError, r"prefix is \[-1\]; accepted: 0 or more"),
        (lambda: masks.prefix_lm(ONE > 0, 8), TypeError, "prefix is torch.bool"),
        (lambda: masks.prefix_lm(ONE + 1j, 8), TypeError, "prefix is torch.complex64"),
        (lambda: masks.prefix_lm(ONE[:0], 8), ValueError, r"prefix has shape \(0,\)"),
        (lambda: masks.prefix_lm(ONE, 8, device="meta"), ValueError, "device is meta; accepted"),
        (lambda: masks.prefix_lm(3, 8.0), TypeError, "seqlen is 8.0; accepted: an int, 1 or more"),
        (lambda: masks.prefix_lm(3, 8, "8"), TypeError, "seqlen_k is '8'"),
        (lambda: masks.sliding_window(2.5, 8), TypeError, "window is 2.5; accepted: an int"),
        (lambda: masks.sliding_window(2, 8, first_tokens=-1), ValueError, "first_tokens is -1"),
        (lambda: masks.documents(ONE.to_sparse()), ValueError, "ids is nested or of layout"),
        (lambda: masks.documents(ONE * 1j), TypeError, "ids is torch.complex64"),
        (lambda: masks.documents(ONE, causal=1), TypeError, "causal must be True or False"),
        (lambda: masks.documents(ONE, window="3"), TypeError, "window is '3'"),
        (lambda: masks.bidirectional_blocks([1]), TypeError, "blocks is list"),
        (lambda: masks.bidirectional_blocks(ONE, window=True), TypeError, "window is True"),
        (lambda: masks.from_dense((torch.ones(3, 3) > 0).to_sparse()), ValueError, "layout"),
        (lambda: masks.tree_words(torch.ones(0, 4, 4) > 0), ValueError, r"shape \(0, 4, 4\)"),
        (lambda: masks.tree_words((torch.ones(3, 3) > 0).to_sparse()), ValueError, "layout"),
        (lambda: masks.in_sequences(OF_8, [0, 8], CU), TypeError, "cu_seqlens_q is list"),
        (lambda: masks.in_sequences(OF_8, CU, CU.float()), TypeError, "cu_seqlens_k is .*float32"),
        (lambda: masks.in_sequences(OF_8, CU[None], CU), ValueError, r"shape \(1, 3\); accepted"),
        (lambda: masks.in_sequences(OF_8, CU[:1], CU[:1]), ValueError, "q has 1 offsets"),
        (lambda: masks.in_sequences(OF_8, CU, CU[:2]), ValueError, "cu_seqlens_k 2; accepted: as"),
        (lambda: masks.in_sequences(OF_8, CU * 2, CU), ValueError, r"cu_seqlens_q is \[0, 6, 16\]"),
        (lambda: masks.in_sequences(OF_8, CU, CU.flip(0)), ValueError, "that ascend from 0"),
        (lambda: masks.in_sequences(OF_8, CU, CU.to("meta")), ValueError, "k is on meta"),
    ],
)  # fmt: skip
def test_what_masks_are_not_made_of(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("queries", "keys", "shares"),
    [
        (range(128, 384), range(0, 256), True),
        (range(256, 500), range(384, 700), True),
        (range(0, 500), range(0, 700), True),
        (range(60, 310), range(100, 650), False),
        (range(128, 250), range(0, 128), False),
        (range(0, 1), range(699, 700), False),
    ],
)
def test_a_part(queries, keys, shares):
    """The dense mask's rows and columns; bits are shared where tiles are the same, and with them
    what is made of them."""
    dense = torch.rand(2, 3, 500, 700) < 0.4
    dense[:, :, :128, 256:384], dense[:, :, 128:256], dense[:, :, 256:, :300] = False, True, False
    whole = masks.from_dense(dense)
    for heads in (range(3), range(1, 2)):
        part = whole.part(queries, keys, heads)
        assert part is whole.part(queries, keys, heads)
        expected = dense[:, heads.start : heads.stop, queries.start : queries.stop]
        assert torch.equal(part.dense(), expected[..., keys.start : keys.stop])
        assert (part.bits is whole.bits) == shares
        assert (part.key_bits is whole.key_bits) == shares
        tiles = masks.from_dense(part.dense()).tiles
        assert torch.equal(tiles.clamp(max=1), part.tiles.clamp(max=1))
    of_all = masks.from_dense(dense[:, :1])
    assert of_all.part(queries, keys, range(2, 3)).tiles.shape[1] == 1


@pytest.mark.parametrize("queries", [range(128, 384), range(60, 310)])
def test_a_part_without_bits(queries):
    """A tile of the part is full, or empty, where all that it meets is; `met` says what that is."""
    kinds = torch.randint(0, 3, (2, 3, 4, 4), dtype=torch.int8)
    whole, keys = masks.TileMask.of_kinds((500, 512), kinds), range(128, 512)
    part, met = whole.part(queries, keys, range(1, 3)), whole.met(queries, keys)
    assert part.bits is None and part is whole.part(queries, keys, range(1, 3))
    top = queries.start // 128
    assert torch.equal(met, whole.tiles[:, :, top : -(-queries.stop // 128), 1:])
    for row, first in enumerate(range(queries.start, queries.stop, 128)):
        last = min(first + 128, queries.stop) - 1
        above, below = (met[:, 1:, place // 128 - top] for place in (first, last))
        assert torch.equal(part.tiles[:, :, row], torch.where(above == below, above, ASKED))


def test_units():
    """A unit that shares a tile with what is seen counts as seen."""
    dense = torch.zeros(1, 2, 512, 256, dtype=torch.bool)
    dense[0, 1, 130, 255] = True
    assert masks.from_dense(dense).units(64) == tuple(
        (False, False, row in (2, 3), row in (2, 3)) for row in range(8)
    )
