"""Tiles of the suite's cases, checked against the masks of the one reference."""

from dataclasses import replace

import numpy as np
import pytest

from bench.suite import Case
from fa4_hd256.check.reference import visible
from lab.model.forward import Kernel
from lab.model.peers.frost_backward import Geometry, main_tiles
from lab.model.peers.frost_backward import product_tiles as frost_products
from lab.model.samples import WINDOW_SAMPLES, forward_work
from lab.model.stored_tiles import DV, PRODUCT, dv_tiles, product_tiles
from lab.model.tiles import (
    DKDV,
    DQ,
    ROW,
    ROWS,
    BackwardTiling,
    ForwardTiling,
    dkdv_tiles,
    dq_tiles,
    forward_tiles,
)
from lab.whole.problem import TileCosts, hbm_bytes
from sm100_sim.timing import load

pytest.importorskip("cutlass")

COSTS, VALUES = TileCosts(7000.0, 1500.0, 1.04), load("b200").values()
TILING = ForwardTiling("static")
KERNEL = Kernel("ours", TILING, [VALUES], [COSTS])
STEP_CLOCKS = 2048


@pytest.mark.parametrize(
    ("lengths", "causal", "window"),
    [
        ((700, 700), False, (None, None)),
        ((700, 1000), True, (None, None)),
        ((1000, 300), True, (None, None)),
        ((900, 900), True, (200, None)),
        ((520, 900), False, (130, 40)),
        ((1, 2048), True, (None, None)),
    ],
)  # the last rows of (1000, 300) see something, the first three tiles' rows nothing or little
def test_work_is_the_key_tiles_that_any_row_sees(lengths, causal, window):
    case = Case("test", (lengths,), 2, 1, causal, window)
    tiles = forward_tiles(case, TILING)
    seen = visible(lengths, case.bounds).numpy()
    expected = []
    for begin in range(0, lengths[0], 256):
        keys = np.flatnonzero(seen[begin : begin + 256].any(axis=0))
        expected += [len(np.unique(keys // 128)) * STEP_CLOCKS] * 2
    assert sorted(tile.work for tile in tiles) == sorted(expected)


@pytest.mark.parametrize("left", [256, 300, 512, 1023, 4096])
def test_masked_work_is_what_some_row_sees_and_another_does_not(left):
    case = Case("test", ((2000, 2000),), 1, 1, True, (left, None))
    seen = visible((2000, 2000), case.bounds).numpy()
    for begin, tile in zip(range(0, 2000, 256), _upwards(forward_tiles(case, TILING))):
        rows = seen[begin : begin + 256, : 2000 // 128 * 128].reshape(-1, 2000 // 128, 128)
        some, every = rows.any(axis=(0, 2)), rows.all(axis=(0, 2))
        # The last, short step has keys past the sequence.
        short = seen[begin : begin + 256, 1920:].any()
        assert tile.work == (some.sum() + short) * STEP_CLOCKS
        assert tile.masked == ((some & ~every).sum() + short) * STEP_CLOCKS


def _upwards(tiles):
    """One head's tiles by ascending block: longest first puts them the other way round."""
    return reversed(tiles)


@pytest.mark.parametrize("right", [None, 0, 127])
@pytest.mark.parametrize("left", [None, 127])
def test_the_longest_tiles_are_worked_on_first(left, right):
    """Tiles far from the ends of a sequence count, where a bound cuts nothing off."""
    case = Case("test", ((4096, 4096),), 1, 1, False, (left, right))
    work = [tile.work for tile in forward_tiles(case, TILING)][1:-1]
    assert work == sorted(work, reverse=True)
    assert (len(set(work)) > 1) == ((left is None) != (right is None))


def test_samples_of_windowed_kernels_have_masked_and_unmasked_steps():
    found = [forward_work(sample) for sample in WINDOW_SAMPLES]
    assert [len(tiles) for tiles in found] == [2, 4, 4, 8]
    for tiles in found[:2]:
        assert all(work == masked for work, masked in tiles)
    assert sum(work > 2 * masked for tiles in found[2:] for work, masked in tiles) == 8
    dense = forward_work((512, 2))
    assert dense == [(2 * STEP_CLOCKS, 0.0), (4 * STEP_CLOCKS, 0.0)] * 2
    assert forward_work((256, 1, None, 4096)) == [(32 * STEP_CLOCKS, 0.0)]


def test_tiles_that_are_not_ordered_go_head_by_head_and_upwards():
    case = Case("dense", ((1024, 1024),) * 3, 12, 4, True)
    ordered, plain = (
        forward_tiles(case, replace(TILING, ordered=ordered)) for ordered in (True, False)
    )
    assert sorted(map(repr, ordered)) == sorted(map(repr, plain)) and ordered != plain
    assert [tile.group for tile in plain] == sorted(tile.group for tile in plain)
    assert [tile.work / STEP_CLOCKS for tile in plain] == [2, 4, 6, 8] * 36


def test_tiles_past_a_sequence_are_skipped():
    case = Case("ragged", ((600, 600), (10, 10), (0, 300)), 2, 2, True, packed=True)
    tiles = forward_tiles(case, TILING)
    assert len(tiles) == 3 * 3 * 2
    assert sum(not tile.skipped for tile in tiles) == (3 + 1) * 2
    (schedule,) = KERNEL.run(case)
    longest = COSTS.begin + COSTS.each + COSTS.rate * 5 * STEP_CLOCKS
    assert schedule.clocks == pytest.approx(longest)


def test_packed_heads_fill_the_rows_of_a_tile():
    """256 rows are 32 queries of 8 heads; a ratio that does not divide 128 rows is not packed."""
    packing = replace(TILING, packs_heads=True, exact_grid=True)
    causal = Case("dense", ((512, 512),), 16, 2, True)
    tiles = forward_tiles(causal, packing)
    # Each KV head has 16 blocks, which see 1, 1, 1, 1, 2, .. 4 key tiles.
    steps = [tile.work / STEP_CLOCKS for tile in tiles]
    assert sorted(steps) == sorted([1, 2, 3, 4] * 8)
    assert {tile.group for tile in tiles} == {0, 1}
    ragged = Case("ragged", ((34, 34), (1, 2048), (0, 5)), 16, 2, True, packed=True)
    assert len(forward_tiles(ragged, packing)) == (2 + 1) * 2
    odd = Case("dense", ((512, 512),), 24, 4, True)
    assert forward_tiles(odd, packing) == forward_tiles(odd, TILING)


LONG_WINDOW = Case("window", ((65536, 65536),), 8, 4, True, (1023, None))


def test_tiles_of_a_window_read_what_they_see():
    """Reads from HBM are at least all once and at most what each tile demands: K and V of the four
    heads, Q and dO of the eight, dS aside, are more than L2 holds."""
    whole = 65536 * ROW
    backward = BackwardTiling("static", True, True, ROWS)
    forward = replace(TILING, packs_heads=True)
    for tiles, step, asked, least in (
        (forward_tiles(LONG_WINDOW, forward), STEP_CLOCKS, 2 * 128 * ROW, 8 * whole),
        (dq_tiles(LONG_WINDOW, backward), DQ, 2 * 128 * ROW, 8 * whole),
        (dkdv_tiles(LONG_WINDOW, backward, 1), DKDV, 2 * 256 * ROW, 16 * whole),
        (dv_tiles(LONG_WINDOW, backward, 1), DV, 2 * 128 * ROW, 16 * whole),
        (product_tiles(LONG_WINDOW, backward, 1), PRODUCT, 128 * ROW, 12 * whole),
    ):
        starts, own = np.arange(len(tiles)) // 74, sum(tile.own_bytes for tile in tiles)
        shared = hbm_bytes(tiles, starts, VALUES) - own
        assert 0.99 * least <= shared <= sum(tile.work for tile in tiles) / step * asked


def test_packed_sequences_of_a_length_are_worked_on_as_others():
    """Interleaved heads are as many as fit into L2 by what a sequence has, not all of them."""
    dense = Case("dense", ((1024, 1024),) * 16, 16, 16, True)
    packed, backward = replace(dense, packed=True), BackwardTiling("static", True, True, ROWS)
    assert [*TILING.places(packed)] == [*TILING.places(dense)]
    for tiles in (dq_tiles, dkdv_tiles, dv_tiles):
        rest = () if tiles is dq_tiles else (1,)
        assert tiles(packed, backward, *rest) == tiles(dense, backward, *rest)


def test_a_tile_of_a_causal_backward_shares_what_its_rows_see():
    """K and V of a prefix, Q and dO of a suffix; of the products K or Q alone. FROST's, whose
    queries begin at multiples of 256, too."""
    case = replace(LONG_WINDOW, lengths=((1024, 1024),), heads=1, heads_kv=1, window=(None, None))
    backward, quarters = BackwardTiling("static", True, True, ROWS), [256, 512, 768, 1024]
    for tiles, of_row in (
        (dq_tiles(case, backward), 2 * ROW),
        (dv_tiles(case, backward, 1), 2 * ROW),
    ):
        assert sorted(tile.shared_bytes for tile in tiles) == [n * of_row for n in quarters]
    pairs = sorted(2 * quarters)
    products = sorted(tile.shared_bytes for tile in product_tiles(case, backward, 1))
    assert products == [n * ROW for n in pairs]
    frost = Geometry(1, 1, 1, (1024, 1024), 0)
    assert sorted(tile.shared_bytes for tile in main_tiles(frost)) == [n * 2 * ROW for n in pairs]
    for is_dq in (False, True):
        found = sorted(tile.shared_bytes for tile in frost_products(frost, is_dq))
        assert found == [n * ROW for n in quarters]


def shared_rows(tiles):
    """Return (first, limit) of those that they share, in order."""
    return [(tile.shared_from / (2 * ROW), tile.shared_bytes / (2 * ROW)) for tile in tiles]


def test_a_tile_of_a_window_shares_what_its_rows_see():
    one = replace(LONG_WINDOW, heads=1, heads_kv=1)
    tiles = sorted(shared_rows(forward_tiles(one, TILING)))
    assert {tile.group for tile in forward_tiles(LONG_WINDOW, TILING)} == {0, 1, 2, 3}
    assert tiles == [(max(0, n - 1023), n + 256) for n in range(0, 65536, 256)]
    # Queries that lie before the keys see none.
    shifted = replace(one, lengths=((16384, 8192),), window=(1023, None))
    found = sorted(shared_rows(forward_tiles(shifted, TILING)))
    assert found[:32] == [(0, 0)] * 32 and found[-1] == (8192 - 256 - 1023, 8192)
    # With a bound on one side all that a tile sees begins with the first key.
    causal = forward_tiles(replace(one, window=(None, None)), TILING)
    assert {tile.shared_from for tile in causal} == {-1}
    assert sorted(tile.shared_bytes for tile in causal) == [
        queries * 2 * ROW for queries in range(256, 65536 + 1, 256)
    ]


@pytest.mark.parametrize("seqlen", [2048, 4096, 16384])
def test_a_narrow_window_reads_keys_once(seqlen):
    """L2 holds the windows of all interleaved heads, but not their whole sequences."""
    case = replace(LONG_WINDOW, lengths=((seqlen, seqlen),), heads=48, heads_kv=48,
                   window=(511, None))  # fmt: skip
    tiles = forward_tiles(case, TILING)
    own = sum(tile.own_bytes for tile in tiles)
    found = hbm_bytes(tiles, np.arange(len(tiles)) // 132, VALUES) - own
    assert found == pytest.approx(48 * 2 * ROW * seqlen)
