"""Page tables of SGLang's requests, drafts and trees, against loops over positions."""

from __future__ import annotations

import weakref

import pytest
import torch

from fa4_hd256.integrations.sglang.metadata import (
    EngineStep,
    GraphBuffers,
    ImageRows,
    Tables,
    draft_steps,
    node_tables,
    tree_of,
)

#: Nodes of a tree and their parents; the first has none.
PARENTS = [0, 0, 0, 1, 1, 2]
NODES = len(PARENTS)


def slots_of(requests, positions, page_size):
    """Return a table of slots whose pages are in a random order."""
    pages = torch.randperm(requests * positions // page_size)
    slots = pages[:, None] * page_size + torch.arange(page_size)
    return slots.view(requests, positions).to(torch.int32)


def keys_of(table, count, page_size):
    """Return the slots of a sequence's keys: those of a row of a page table."""
    position = torch.arange(count)
    return table[position // page_size].long() * page_size + position % page_size


def other(slots):
    """Return the slots of another cache: its pages are two further."""
    return slots.long() + 32


def seen_nodes():
    seen = torch.eye(NODES, dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        seen[node] |= seen[parent]
    return seen


@pytest.mark.parametrize("page_size", [1, 16])
def test_requests(page_size):
    slots = slots_of(4, 64, page_size)
    tables = Tables(slots, page_size, other)
    requests, lengths = torch.tensor([3, 1]), (33, 48)
    found = tables.of_requests(requests, 48)
    assert {t.dtype for t in found.values()} == {torch.int32}
    for row, (request, count) in enumerate(zip(requests, lengths)):
        keys = slots[request, :count].long()
        assert torch.equal(keys_of(found["page_table"][row], count, page_size), keys)
        window = keys_of(found["window_table"][row], count, page_size)
        assert torch.equal(window, keys + 32)
    # No more than a request can have.
    assert tables.of_requests(requests, 1000)["page_table"].shape == (2, 64 // page_size)
    assert "window_table" not in Tables(slots, page_size).of_requests(requests, 48)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("to_window", [None, other])
def test_tables_of_a_graph(page_size, to_window):
    """Written in place: columns behind the keys stay; another number of requests is an error."""
    tables = Tables(slots_of(4, 64, page_size), page_size, to_window)
    requests, keys = torch.tensor([3, 1]), 33
    given = tables.of_requests(torch.tensor([0, 2]), 64)
    before = {name: table.clone() for name, table in given.items()}
    step = EngineStep(torch.arange(3, dtype=torch.int32), 1, torch.tensor([33, 20]), 64, **given)
    tables.write(step, requests, keys)
    for name, expected in tables.of_requests(requests, keys).items():
        columns = expected.shape[1]
        assert columns == -(-keys // page_size)
        assert torch.equal(given[name][:, :columns], expected)
        assert torch.equal(given[name][:, columns:], before[name][:, columns:])
    with pytest.raises(ValueError, match="batch has 1 requests; accepted: 2"):
        tables.write(step, requests[:1], keys)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lengths", [[15, 16], [30, 1]])
def test_branches_of_drafts(page_size, lengths):
    """Keys of a branch are those before the draft, then its own, in pages behind those of the
    branches before it."""
    branches, steps = 3, 5
    slots = slots_of(3, 128, page_size)
    requests = torch.tensor([2, 0])
    step = draft_steps(
        Tables(slots, page_size), requests, torch.tensor(lengths), (branches, steps), max(lengths)
    )
    assert step.max_seqlen_q == 1 and step.cu_seqlens_q.tolist() == list(range(7))
    assert step.seqused_k.shape == (steps - 1, 2 * branches)
    for row in range(2 * branches):
        request, branch = requests[row // branches], row % branches
        length = lengths[row // branches]
        rest = length % page_size
        pages = -(-(rest + steps) // page_size)
        begin = length - rest + branch * pages * page_size
        own = slots[request, begin : begin + rest + steps]
        keys = torch.cat((slots[request, : length - rest], own)).long()
        for index in range(steps - 1):
            count = int(step.of_draft(index).seqused_k[row])
            assert count == length + index + 1
            assert torch.equal(keys_of(step.page_table[row], count, page_size), keys[:count])


def test_masks_of_trees():
    """Both forms of SGLang's mask say which node sees which; behind a mask is padding."""
    seen, lengths = seen_nodes(), [4, 1]
    other_seen = torch.eye(NODES, dtype=torch.bool)
    trees = (seen, other_seen)
    of_nodes = torch.cat([tree.flatten() for tree in trees])
    whole = torch.cat(
        [
            torch.cat((torch.zeros(NODES, count, dtype=torch.bool), tree), 1).flatten()
            for count, tree in zip(lengths, trees)
        ]
    )
    for mask, form in ((of_nodes, True), (whole, False)):
        found = tree_of(mask, torch.tensor([*lengths, 1]), NODES, form)
        assert found.shape == (3, NODES, NODES) and found.dtype == torch.bool
        assert torch.equal(found[:2], torch.stack(trees))


@pytest.mark.parametrize("reach", [3, 40])
def test_nodes_of_trees_with_a_window(reach):
    """A node has the window's keys before the tree, then its ancestors and itself."""
    slots, seen = slots_of(3, 64, 1), seen_nodes()
    requests, lengths = torch.tensor([2, 1]), torch.tensor([20, 2])
    found = node_tables(Tables(slots, 1, other), requests, lengths, seen.expand(2, -1, -1), reach)
    assert found["node_starts"].tolist() == list(range(2 * NODES + 1))
    for row in range(2 * NODES):
        request, length = requests[row // NODES], int(lengths[row // NODES])
        before = range(max(length - reach, 0), length)
        nodes = [length + node for node in range(NODES) if seen[row % NODES, node]]
        keys = slots[request, [*before, *nodes]].long() + 32
        assert int(found["node_keys"][row]) == len(keys)
        assert torch.equal(found["node_table"][row, : len(keys)].long(), keys)


def test_images_of_a_step():
    """Lengths of the whole step; a part of one stays causal."""
    spans = [(0, 2, 5), (0, 8, 9), (1, 30, 31), (1, 20, 24), (1, 9, 20)]
    found = ImageRows.of(spans, [6, 12], [2, 20], torch.device("cpu"))
    assert found.requests.tolist() == [0, 1, 1] and found.ends.tolist() == [6, 32, 25]
    assert found.rows.tolist() == [*range(4), 16, 17, *range(6, 11)]
    assert found.starts.tolist() == [0, 4, 6, 11] and (found.longest, found.furthest) == (5, 32)
    table = torch.arange(6).view(2, 3)
    assert torch.equal(found.keys_of(table)["page_table"], table[[0, 1, 1]])
    assert ImageRows.of(spans[1:2], [6, 12], [2, 20], torch.device("cpu")) is None


def step_of(requests, pages, value):
    return EngineStep(
        torch.arange(requests + 1, dtype=torch.int32), 1,
        torch.full((requests,), value, dtype=torch.int32), 100,
        torch.full((requests, pages), value, dtype=torch.int32),
    )  # fmt: skip


def test_graphs_share_tensors():
    """A replay fills what its capture has read; columns that its keys do not take stay."""
    buffers = GraphBuffers(8)
    large, small = (buffers.hold(step_of(n, 4, n), n) for n in (8, 2))
    assert small.page_table.data_ptr() == large.page_table.data_ptr()
    addresses = [tensor.data_ptr() for tensor in large.tensors().values()]
    GraphBuffers.refill(large, step_of(8, 3, 7))
    assert addresses == [tensor.data_ptr() for tensor in large.tensors().values()]
    assert (large.seqused_k == 7).all() and (large.page_table[:, :3] == 7).all()
    with pytest.raises(RuntimeError, match="size"):
        GraphBuffers.refill(large, step_of(3, 4, 1))
    # A larger one gets tensors of its own, and does not move those that a graph has.
    buffers.hold(step_of(9, 4, 9), 9)
    assert addresses == [tensor.data_ptr() for tensor in large.tensors().values()]


def test_offsets_that_no_replay_writes():
    """Constant tensors stay the step's own, and live as long as the buffers."""
    buffers, step = GraphBuffers(8), step_of(4, 4, 4)
    held = buffers.hold(step, 4, ("cu_seqlens_q",))
    assert held.cu_seqlens_q is step.cu_seqlens_q and held.page_table is not step.page_table
    kept = weakref.ref(step.cu_seqlens_q)
    del held, step
    assert kept() is not None
