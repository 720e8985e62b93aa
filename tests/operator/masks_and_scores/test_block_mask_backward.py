"""Gradients with block masks, under both schedulers, against the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_block_mask import NAMED, holes, inputs
from torch._subclasses import FakeTensorMode

import sm100_sim
from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.call import tile_mask
from fa4_hd256.check import reference
from fa4_hd256.kernels.backward.ds_tiles import DS_TILE_BYTES
from fa4_hd256.ops.autograd import listed_tiles_of


def gradients(tensors, mask, dout, dlse=None, sink=None, **options):
    """Gradients of the call by name."""
    leaves = [t.detach().requires_grad_() for t in (*tensors, *([] if sink is None else [sink]))]
    named = {} if sink is None else {"learnable_sink": leaves[3]}
    out, lse = flash_attn_func(*leaves[:3], block_mask=mask, return_lse=True, **named, **options)
    results, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    found = torch.autograd.grad(results, leaves, given)
    return dict(zip(("q", "k", "v", "sink"), found))


def check(tensors, mask, with_lse=False, sink=None, use_clc=False, config=None, **options):
    q = tensors[0]
    dout = torch.randn(q.shape).to(q.device, q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1]).to(q.device) if with_lse else None
    found = gradients(
        tensors, mask, dout, dlse, sink, use_clc=use_clc, backward_config=config, **options
    )
    if sink is not None:
        options["learnable_sink"] = sink
    dense = masks.as_tile_mask(mask).dense().cpu()
    compared = reference.compare_gradients(found, tensors, dout, dlse, mask=dense, **options)
    for name, comparison in compared.items():
        assert comparison.max_error <= comparison.tolerance, (name, comparison)
    return found


# One row and key; several tiles whose lists differ, that end inside a tile and a block of 256; a
# mask for each head, whose heads differ; for each batch entry.
@pytest.mark.parametrize(
    ("lengths", "batch", "heads", "own_heads"),
    [((1, 1), 1, (1, 1), 1), ((600, 500), 1, (2, 1), 2), ((300, 700), 2, (2, 2), 1)],
)
@pytest.mark.sampled("static-lengths1-1-heads1-2")
def test_holes(lengths, batch, heads, own_heads, use_clc, device):
    tensors = inputs(*lengths, heads, batch, device=device)
    check(tensors, holes(*lengths, batch, own_heads, device), use_clc=use_clc)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.sampled("prefix", "window", "documents, all keys of each")
def test_named_masks(name, device):
    check(inputs(400, 400, batch=2, device=device), NAMED[name](device), with_lse=True)


@pytest.mark.sampled
def test_dtypes_and_kinds_of_scores(device):
    """float16, a softcap, a sink, a scale below 0, the gradient of the LSE."""
    tensors = inputs(300, 400, (4, 2), 1, torch.float16, device)
    sink = torch.randn(4, device=device)
    options = {"softcap": 20.0, "softmax_scale": -0.1}
    check(tensors, holes(300, 400, 1, 1, device), True, sink, **options)


@pytest.mark.sampled
def test_chunks(device, backward_config):
    """A chunk has one KV head of one sequence: masks by head and by entry are the right ones; bits
    are the same."""
    tensors = inputs(300, 300, (2, 2), 2, device=device)
    mask = holes(300, 300, 2, 2, device)
    dout = torch.randn(tensors[0].shape).to(device, torch.bfloat16)
    of_one = 4 * 4 * 128 * 128 * 2
    options = {"use_clc": False}
    whole = gradients(tensors, mask, dout, **options)
    one = backward_config(ds_bytes=of_one)
    parts = gradients(tensors, mask, dout, backward_config=one, **options)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # A block of queries with all keys.
    least = of_one // 2
    message = f"least 256 queries of 1 query head.*, {least} bytes here; ds_bytes allows 5. "
    message += rf"Accepted: backward_config={backward_config.__module__}.BackwardConfig\(ds_bytes="
    with pytest.raises(NotImplementedError, match=message):
        small = backward_config(ds_bytes=5)
        gradients(tensors, mask, dout, backward_config=small, **options)


@pytest.mark.parametrize("fitting", [1, 2])
@pytest.mark.parametrize("own_heads", [1, 6])
@pytest.mark.sampled("6-2")
def test_chunks_of_a_group(fitting, own_heads, device, backward_config):
    """Chunks have one, or two and one, query heads where dS of a group of three does not fit."""
    tensors, options = inputs(300, 300, (6, 2), 2, device=device), {"use_clc": False}
    of_one = 4 * 128 * 128 * 2 * 4
    config = backward_config(ds_bytes=fitting * of_one)
    mask = holes(300, 300, 2, own_heads, device)
    check(tensors, mask, config=config, **options)
    dout = torch.randn(tensors[0].shape).to(device, torch.bfloat16)
    found = [gradients(tensors, mask, dout, backward_config=config, **options) for _ in range(2)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# A block of queries of one head; of each of two heads, whose masks differ; two blocks and a rest.
# Queries that end inside a block, and inside a tile of it.
@pytest.mark.parametrize(
    ("lengths", "heads", "own_heads", "fitting"),
    [((600, 300), (2, 1), 2, 1), ((600, 300), (4, 2), 4, 2), ((1100, 130), (1, 1), 1, 2)],
    ids=["a head", "heads of a group", "some blocks"],
)
@pytest.mark.sampled("static-heads of a group")
def test_ranges_of_queries(lengths, heads, own_heads, fitting, use_clc, device, backward_config):
    """Chunks are ranges of queries where dS of no query head fits. dQ has the bits of the
    undivided call; dK and dV are added up in a fixed order."""
    tensors, options = inputs(*lengths, heads, 2, device=device), {"use_clc": use_clc}
    of_block = 2 * -(-lengths[1] // 256) * 2 * 128 * 128 * 2
    config = backward_config(ds_bytes=fitting * of_block)
    mask = holes(*lengths, 2, own_heads, device)
    check(tensors, mask, config=config, **options)
    dout = torch.randn(tensors[0].shape).to(device, torch.bfloat16)
    whole = gradients(tensors, mask, dout, **options)
    found = [gradients(tensors, mask, dout, backward_config=config, **options) for _ in range(2)]
    assert torch.equal(found[0]["q"], whole["q"])
    assert all(torch.equal(found[0][name], found[1][name]) for name in whole)


WINDOW = 100
#: A block of keys of 1300 x 1300 meets its own block of queries and the next one.
LISTED = 4 * (2 * 6 - 1)


@pytest.mark.sampled("static")
def test_room_of_listed_tiles(use_clc, device, backward_config, divisions, monkeypatch):
    """No more than there are, and the bits of a call with room for all."""
    for name, value in (("MOST_TILES", 0), ("ROUNDED_TILES", 1)):
        monkeypatch.setattr(tile_mask, name, value)
    tensors = inputs(1300, 1300, (2, 1), 1, device=device)
    mask, options = masks.sliding_window(WINDOW, 1300, device=device), {"use_clc": use_clc}
    config = backward_config(ds_bytes=2 * LISTED * DS_TILE_BYTES)
    check(tensors, mask, config=config, **options)
    assert mask.listed_tiles == LISTED
    (chunk,) = divisions[-1].chunks
    assert chunk.problem.ds_bytes == config.ds_bytes
    dout = torch.randn(tensors[0].shape).to(device, torch.bfloat16)
    found = gradients(tensors, mask, dout, backward_config=config, **options)
    monkeypatch.setattr(tile_mask.TileMask, "count_listed", lambda self: None)
    unknown = masks.sliding_window(WINDOW, 1300, device=device)
    whole = gradients(tensors, unknown, dout, **options)
    assert divisions[-1].problem.ds_shape[2] == 12 * 12
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.sampled
def test_calls_of_masks_with_other_counts(device, divisions, monkeypatch):
    """Each has its own room, although it is repeated and differs in nothing else."""
    for name, value in (("MOST_TILES", 0), ("ROUNDED_TILES", 1)):
        monkeypatch.setattr(tile_mask, name, value)
    tensors = inputs(900, 900, (2, 1), 1, device=device)
    made = [masks.sliding_window(window, 900, device=device) for window in (10, 600)]
    for mask in (*made, *made):
        check(tensors, mask, use_clc=False)
    assert [mask.listed_tiles for mask in made] == [28, 40]
    assert {division.problem.ds_shape[2] for division in divisions} == {28, 40}


@pytest.mark.simulator
def test_too_little_room_is_found():
    """The memory ends one tile early."""
    tensors = inputs(1300, 1300, (2, 1), 1)
    mask = masks.sliding_window(WINDOW, 1300)
    mask.listed_tiles = LISTED - 1
    with pytest.raises(sm100_sim.MemoryFault):
        check(tensors, mask, use_clc=False)


def test_nobody_counts_where_tensors_have_no_numbers():
    mask = masks.sliding_window(WINDOW, 1300)
    with FakeTensorMode():
        assert listed_tiles_of(mask) == 0
    assert listed_tiles_of(mask) == mask.listed_tiles == tile_mask.ROUNDED_TILES
    with FakeTensorMode():
        assert listed_tiles_of(mask) == tile_mask.ROUNDED_TILES


def test_a_small_mask_on_a_gpu_is_not_waited_for():
    mask = masks.sliding_window(WINDOW, 1300)
    mask.tiles = SimpleNamespace(device=torch.device("cuda"), numel=mask.tiles.numel)
    mask.count_listed()
    assert mask.listed_tiles == 0


def test_some_gradients_alone(device):
    q, k, v = inputs(200, 300, device=device)
    mask, dout = holes(200, 300, device=device), torch.randn(q.shape).to(device, q.dtype)
    expected = gradients((q, k, v), mask, dout, use_clc=False)
    for name, place in (("q", 0), ("v", 2)):
        leaves = [q, k, v]
        leaves[place] = leaves[place].detach().requires_grad_()
        out = flash_attn_func(*leaves, block_mask=mask, use_clc=False)
        (found,) = torch.autograd.grad(out, leaves[place], dout)
        assert torch.equal(found, expected[name])


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1])
def test_no_findings(seed, sanitize):
    sanitize(seed, clusters=2)
    tensors = inputs(300, 400)
    mask = holes(300, 400)
    gradients(tensors, mask, torch.randn(tensors[0].shape).bfloat16(), use_clc=False)
    reports = sm100_sim.last_reports()[-4:]
    assert all(report.seed == seed and report.findings == [] for report in reports)
