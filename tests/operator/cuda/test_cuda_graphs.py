"""CUDA graphs: capture once, change the inputs, replay."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import CASES, differing

from fa4_hd256 import flash_attn_varlen_func, get_scheduler_metadata
from fa4_hd256.call import tile_mask

pytestmark = pytest.mark.cuda

SCHEDULERS = pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])


def captured(run):
    """Return (graph, its results) of `run`, after a first call outside a graph as PyTorch
    requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@SCHEDULERS
@pytest.mark.parametrize("name", CASES)
def test_replays_with_changed_inputs(name, use_clc, device):
    """Forward, and backward where there is one, in one graph: the bits of an eager call."""
    case = CASES[name]
    tensors = case.tensors(device)
    graph, results = captured(lambda: case.run(tensors, use_clc))
    for seed in (1, 2, 3):
        for key, tensor in case.tensors(device, seed).items():
            tensors[key].copy_(tensor)
        graph.replay()
        expected = case.run(tensors, use_clc)
        assert differing(results, expected) == [], f"inputs {seed}"


@SCHEDULERS
def test_other_lengths_than_captured(use_clc, device):
    """Offsets are read by the kernels: packed sequences may be of other lengths at each replay."""
    case = CASES["packed"]
    tensors = case.tensors(device)
    graph, results = captured(lambda: case.run(tensors, use_clc))
    sorted_lengths = sorted(case.lengths)
    for key, side in zip(("cu_q", "cu_k"), zip(*sorted_lengths)):
        tensors[key][1:] = torch.tensor(side, device=device).cumsum(0)
    graph.replay()
    assert differing(results, case.run(tensors, use_clc)) == []


@SCHEDULERS
def test_a_graph_beside_eager_launches(use_clc, device):
    """Replays on one stream while another one runs the same kernels eagerly."""
    case = CASES["grouped"]
    tensors, others = case.tensors(device), case.tensors(device, 1)
    expected = case.run(tensors, use_clc), case.run(others, use_clc)
    graph, results = captured(lambda: case.run(tensors, use_clc))
    side, found = torch.cuda.Stream(), []
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(side):
            found.append(case.run(others, use_clc))
        graph.replay()
    torch.cuda.synchronize()
    assert differing(results, expected[0]) == []
    assert all(differing(one, expected[1]) == [] for one in found)


@SCHEDULERS
def test_decoding_steps(use_clc, device):
    """One graph of a decoding step serves a cache that grows: `seqused_k` says how far it is in
    use."""
    q = torch.randn(3, 1, 16, 256, device=device).bfloat16()
    k, v = (torch.randn(3, 4096, 2, 256, device=device).bfloat16() for _ in range(2))
    used = torch.full((3,), 5, dtype=torch.int32, device=device)

    def step():
        return flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True, use_clc=use_clc)

    graph, out = captured(step)
    for seqlen in (6, 128, 129, 4096):
        used.fill_(seqlen)
        q.normal_()
        graph.replay()
        scores = (
            torch.einsum(
                "bqhd,bkhd->bhqk", q.float(), k[:, :seqlen].float().repeat_interleave(8, 2)
            )
            / 16
        )
        wanted = torch.einsum(
            "bhqk,bkhd->bqhd", scores.softmax(-1), v[:, :seqlen].float().repeat_interleave(8, 2)
        )
        assert (out.float() - wanted).norm() < 8e-3 * wanted.norm(), seqlen


@SCHEDULERS
def test_a_list_of_parts_follows_the_lengths(use_clc, device):
    """The scheduler metadata is made on the device, nothing waits: by a graph at each replay."""
    q = torch.randn(4, 1, 16, 256, device=device).bfloat16()
    k, v = (torch.randn(4, 4096, 2, 256, device=device).bfloat16() for _ in range(2))
    used = torch.tensor([4096, 5, 300, 0], dtype=torch.int32, device=device)

    def step():
        listed = get_scheduler_metadata(used, 1, 4096, 16, 2, True)
        return flash_attn_varlen_func(
            q, k, v, seqused_k=used, causal=True, scheduler_metadata=listed, use_clc=use_clc
        ), listed

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, (out, listed) = captured(step)
    for lengths in ([1, 4000, 0, 700], [4096] * 4):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected, wanted = step()
        assert torch.equal(listed, wanted) and torch.equal(out, expected), lengths


def test_a_mask_made_in_a_capture_is_not_counted(monkeypatch, device):
    """Each replay makes it again, with as many tiles as its inputs have then."""
    monkeypatch.setattr(tile_mask, "MOST_TILES", 0)
    tiles = torch.full((1, 1, 4, 4), tile_mask.FULL, dtype=torch.int32, device=device)
    before = tile_mask.TileMask((512, 512), tiles, None)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        inside = tile_mask.TileMask((512, 512), tiles.clone(), None)
    for mask in (before, inside):
        mask.count_listed()
    assert before.listed_tiles > 0 == inside.listed_tiles
