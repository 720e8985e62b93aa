"""Backwards under a block mask on the timing model: their tiles, chunks, and costs of steps."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from bench.measure.masks import Documents, Images, MaskedCase, PrefixLm, Window
from bench.suite import BACKWARD, Case
from fa4_hd256 import masks
from fa4_hd256.call import tile_mask
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.operator_arguments import BackwardTensors
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.backward.block_mask import TILES_OF_A_HEAD
from lab.model import masked_backward, stored_tiles
from lab.model.machines import B200
from lab.model.masked import MaskSample
from lab.model.masked_backward import ListedChunk, dv_tiles, gradient_problem, product_tiles
from lab.model.ours import Kind, Ours, Variant
from lab.model.replays import fitted
from lab.model.stored_tiles import DS, DV, PRODUCT
from lab.model.tiles import PARTIAL_ROW, ROW, BackwardTiling, Order
from lab.whole.problem import TileCosts
from sm100_sim import timing
from sm100_sim.timing import load

pytest.importorskip("cutlass")

CPU = torch.device("cpu")
PATTERNS = PrefixLm(), Documents(100), Images(), Images(60), Window(100, 4)
TILING = BackwardTiling("dynamic", True, True, 256, gpu=B200, order=Order(equal_too=True))


class Full(Window):
    """Everybody sees all."""

    by_entry = False

    def tile_mask(self, batch, seqlen, device):
        return masks.from_dense(torch.ones(seqlen, seqlen, dtype=torch.bool, device=device))


def case(pattern, seqlen=1000, heads=(4, 2), batch=2):
    return MaskedCase("masks", ((seqlen, seqlen),) * batch, *heads, False, pattern=pattern)


def chunk(of, head_parts=1, sequences=None):
    sequences = range(of.batch) if sequences is None else sequences
    own = replace(of, lengths=of.lengths[: len(sequences)])
    queries = range(of.seqlen_q)
    return ListedChunk(own, head_parts, True, whole=of, sequences=sequences, queries=queries)


def backward(ds_bytes):
    values = [load("b200").values()]
    return masked_backward.MaskedBackward(
        "ideal", TILING, values, lambda which: [TileCosts(0.0, 0.0, 1.0)], ds_bytes
    )


def met_blocks(of):
    """Return (batch, blocks of keys, blocks of queries) bool, by the dense mask: those in which a
    query sees a key."""
    dense = of.dense(CPU).expand(of.batch, -1, -1, -1)[:, 0]
    rest = -of.seqlen_q % 256
    padded = torch.nn.functional.pad(dense, (0, rest, 0, rest))
    return padded.unflatten(2, (-1, 256)).unflatten(1, (-1, 256)).any(4).any(2).transpose(1, 2)


@pytest.mark.parametrize("head_parts", [1, 2])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.text)
def test_tiles_are_blocks_in_which_somebody_sees(pattern, head_parts):
    """1000 rows: of each side eight tiles of 128, all blocks have two."""
    one = case(pattern)
    met = met_blocks(one).numpy()
    blocks = int(met.sum())
    assert 0 < blocks < met.size
    of_one = chunk(one, head_parts)
    dv, products = dv_tiles(of_one, TILING), product_tiles(of_one, TILING)
    assert sum(tile.work for tile in dv) == 4 * 2 * blocks * DV
    assert sorted(tile.work for tile in dv) == sorted(
        (4 // 2 // head_parts * 2 * DV * met.sum(2)).flatten().tolist() * 2 * head_parts
    )
    assert sum(tile.work for tile in products) == 2 * 4 * 2 * blocks * PRODUCT
    assert len(dv) == 2 * 4 * 2 * head_parts
    assert len(products) == 2 * 4 * (2 * head_parts + 4)
    assert masked_backward.shares(one)[0] == pytest.approx(blocks / met.size)
    # dS is written for each step, dV and dK in float32 where they are parts.
    of_keys = (PARTIAL_ROW if head_parts > 1 else ROW) * 2 * 1000 * 2 * head_parts
    assert sum(tile.writes for tile in dv) == of_keys
    assert sum(tile.writes for tile in products) == of_keys + ROW * 2 * 1000 * 4
    assert sum(tile.own_bytes for tile in dv) >= DS * 4 * 2 * blocks + of_keys


@pytest.mark.parametrize(
    ("heads", "head_parts"), [((4, 4), 1), ((4, 2), 1), ((6, 2), 1), ((4, 2), 2), ((8, 2), 2)]
)
def test_where_all_is_seen_tiles_are_those_without_a_mask(heads, head_parts):
    """Tiles are the same, some in another order."""
    one = case(Full(), 1024, heads)
    plain = Case("plain", one.lengths, *heads, False)
    of_one = chunk(one, head_parts)
    for listed, dense in (
        (dv_tiles(of_one, TILING), stored_tiles.dv_tiles(plain, TILING, head_parts)),
        (product_tiles(of_one, TILING), stored_tiles.product_tiles(plain, TILING, head_parts)),
    ):
        assert sorted(map(astuple, listed)) == sorted(map(astuple, dense))


def test_steps_with_bits():
    """One of the first two tiles of keys is seen by all, the other by every second query."""
    dense = torch.ones(512, 512, dtype=torch.bool)
    dense[::2, 128:256] = False
    lists = masked_backward.BlockLists.of(masks.from_dense(dense))
    assert lists.written.tolist() == lists.read.tolist() == lists.columns.tolist() == [[4, 4]]
    assert lists.partial.tolist() == [[4, 0]] and lists.shares == (1.0, 0.5)


def test_chunks_have_their_own_lists():
    """Sequences whose masks differ have chunks of as many as dS has room for."""
    one = case(PrefixLm(), 1024, (2, 1), 4)
    model = backward(2 * 2 * 1024 * 1024 * 2)
    plan = model.plan(one)
    assert [part.sequences for part in plan] == [range(2), range(2, 4)]
    work = [float(model.tiles("dv", part).work.sum()) for part in plan]
    met = met_blocks(one).sum((1, 2)).tolist()
    assert work == [2 * 2 * DV * sum(met[:2]), 2 * 2 * DV * sum(met[2:])]
    assert work[0] < work[1]


def test_ranges_of_queries_have_their_own_lists():
    """Every block of 256 x 256 is in one chunk where dS of no head fits."""
    one = case(PrefixLm(), 1000, (1, 1), 2)
    model = backward(512 * 1024 * 2)
    plan = model.plan(one)
    assert [(part.sequences, part.queries) for part in plan] == [
        (range(n, n + 1), range(first, min(first + 512, 1000))) for n in (0, 1)
        for first in (0, 512)
    ]  # fmt: skip
    met = met_blocks(one)
    for kernel, work in (("dv", DV), ("products", 2 * PRODUCT)):
        found = [float(model.tiles(kernel, part).work.sum()) for part in plan]
        blocks = [int(met[n, :, half].sum()) for n in (0, 1) for half in (slice(2), slice(2, 4))]
        assert found == [2 * work * count for count in blocks]


def test_it_is_divided_as_the_operator_divides_it():
    one = case(Images(60), 300)
    mask, (heads, heads_kv) = one.tile_mask(CPU), (4, 2)
    q, k = (torch.zeros(2, 300, n, 256, dtype=torch.bfloat16) for n in (heads, heads_kv))
    lse = torch.zeros(2, heads, 300)
    ragged = {"mask_blocks": mask.blocks, "mask_key_bits": mask.key_bits}
    tensors = BackwardTensors(q, None, q, k, k, q, lse, **ragged)
    options = Options.check(None, False, (None, None), 0.0, False)
    expected, found = BackwardProblem.describe(tensors, options), gradient_problem(one)
    assert found.ds_shape == expected.ds_shape and found.dkdv_class == expected.dkdv_class
    for heads_kv, sequences in ((1, 1), (2, 1), (2, 2)):
        parts = [p.head_parts_for(heads_kv, sequences, B200) for p in (found, expected)]
        assert parts[0] == parts[1]


def test_long_tiles_of_many_heads_begin_first():
    """NOTE [long lists]: those of the first keys, which all queries see, of at least so many heads
    before others of these heads."""
    one = case(Window(100, 4), 16384, (40, 40), 1)
    tiles = dv_tiles(chunk(one), TILING)
    longest = max(tile.work for tile in tiles)
    section = B200.pairs // TILES_OF_A_HEAD
    assert [tile.work == longest for tile in tiles[: section + 1]] == [True] * section + [False]
    groups = [tile.group for tile in tiles[:section]]
    assert len(set(groups)) == section


def test_tiles_are_shared_out_as_without_a_mask():
    found, plain = (
        make(load("b200"), 0).tiling for make in (
            lambda *machine: masked_backward.backward(*machine, use_clc=True),
            lambda *machine: Ours().backward(variant(BACKWARD), *machine),
        )
    )  # fmt: skip
    assert found == replace(plain, order=Order(equal_too=True))
    assert found.claims != variant("forward").claims


def test_rows_that_some_tile_lists_come_from_memory():
    """Documents: no tile lists all queries, together they do."""
    one = case(Documents(100), 4096, (1, 1), 1)
    tiles = dv_tiles(chunk(one), TILING)
    own = sum(t.own_bytes - t.reads - t.writes - DS * t.work / DV for t in tiles)
    bits = masked_backward.lists_of(one, range(one.seqlen_q)).partial.sum() * 128 * 256 / 8
    shared = max(t.shared_bytes for t in tiles)
    assert shared < 2 * ROW * 4096 / 2
    assert own - bits + shared == pytest.approx(2 * ROW * 4096)


def test_what_a_shorter_list_leaves_out_is_seen(monkeypatch):
    """The count of steps is that of the mask's own lists."""
    blocks = tile_mask._blocks

    def without_last(tiles):
        found = blocks(tiles)
        found[..., 0, :2] -= 1
        return found

    monkeypatch.setattr(tile_mask, "_blocks", without_last)
    masked_backward.lists_of.cache_clear()
    with pytest.raises(AssertionError):
        test_tiles_are_blocks_in_which_somebody_sees(PATTERNS[0], 1)
    masked_backward.lists_of.cache_clear()


# -------------------------------------------------------------------------------- replays

MACHINE = load("b200")


def variant(kernel):
    return Variant(Kind(causal=False), True, kernel=kernel)


def replayed(kernel, sample, mask=None):
    compiled, arguments = masked_backward.call_on(MACHINE, variant(kernel), sample, mask)
    return timing.predict(compiled, *arguments, draws=0)[-1]


def band(rows):
    """Blocks beside the diagonal; every second pair is seen."""
    rows, columns = torch.arange(rows)[:, None], torch.arange(rows)
    near = (rows // 256 - columns // 256).abs() <= 1
    return masks.from_dense(near & ((rows + columns) % 2 == 0))


@pytest.fixture(scope="module", params=["dv", "products"])
def fitted_kernel(request):
    """(kernel, costs of its tiles)."""
    rows = masked_backward.replays(MACHINE, variant(request.param), 0)
    assert not any(row.unmatched for row in rows)
    return request.param, fitted(rows, "dynamic")[0]


@pytest.mark.sampled("products")
def test_costs_say_what_other_samples_take(fitted_kernel):
    """Lists of two and three blocks, and more tiles than any sample that costs are fitted to has:
    0.4 and 1.6 % off; a step a tile is 6 % or more."""
    kernel, costs = fitted_kernel
    assert costs.mask == 0.0
    sample = MaskSample(1536, 1536, True)
    found = replayed(kernel, sample, band(1536))
    steps = 2 * (2 + 3 * 4 + 2)
    work = {"dv": DV * steps, "products": 2 * PRODUCT * steps}[kernel]
    assert found.compiled.work == work
    tiles = masked_backward.sample_tiles(kernel, sample)
    expected = costs.begin + costs.each * tiles + costs.rate * work
    assert expected == pytest.approx(found.clocks, rel=0.025)
    # One step too many, or too few, in each tile is seen, too.
    step = DV if kernel == "dv" else PRODUCT
    for missed in (-1, 1):
        wrong = expected + costs.rate * step * missed * tiles
        assert wrong != pytest.approx(found.clocks, rel=0.025)


@pytest.mark.sampled
def test_a_loop_goes_one_way_whether_a_step_has_bits_or_not():
    """NOTE [one cost of a step]: the selections of both halves of a thread's keys stand under one
    predicate in the loop over steps, whose arithmetic is all executed in each."""
    found = replayed("dv", MaskSample(1024, 512, True))
    function, path = found.compiled.function, found.compiled.paths[0].numbers
    counts = np.bincount(path, minlength=len(function.instructions))
    # Two tiles of eight steps each; the first step is worked on before the loop.
    loop = np.flatnonzero(counts == 2 * 7)
    exp2 = [n for n in loop if function.instructions[n].opcode.startswith("MUFU.EX2")]
    assert len(exp2) == 64
    selections = [n for n in loop if function.instructions[n].base == "SEL"]
    guards = {function.instructions[n].guard for n in selections}
    assert len(selections) == 64 and len(guards) == 1 and "" not in guards
