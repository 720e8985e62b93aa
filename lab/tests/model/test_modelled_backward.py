"""The backward on the timing model: tiles against the masks of the one reference, and chunks;
nothing is replayed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import sm100_sim
from bench.peers import flash_attn_4
from bench.suite import Case, ragged_lengths
from fa4_hd256.check.reference import visible
from fa4_hd256.kernels.backward import mxfp8_ds
from fa4_hd256.kernels.blackwell.backward.mxfp8.config import Mxfp8BackwardConfig
from fa4_hd256.kernels.block_scales import ATOM_BYTES
from lab.model import backward as model_of_backward
from lab.model import ours, samples
from lab.model.backward import Backward
from lab.model.calls import Chunk, Kind, backward_chunks
from lab.model.machines import B200, gpu_of
from lab.model.peers import flash_attn_4 as theirs
from lab.model.replays import Replayed
from lab.model.stored_tiles import DS, DV, PRODUCT, dv_steps, dv_tiles, product_tiles
from lab.model.tiles import DKDV, DQ, ROW, BackwardTiling, dkdv_tiles, dq_tiles
from lab.paths import Paths
from lab.whole.problem import Sample as Fitted
from lab.whole.problem import TileCosts, fit, hbm_bytes
from sm100_sim.timing import load

pytest.importorskip("cutlass")

MACHINE = load()
IDEAL = [TileCosts(0.0, 0.0, 1.0)]
VALUES = [MACHINE.values()._replace(launch_us=0.0, hbm_terabytes=1e9)]
FULL = Case("test", ((4096, 4096),) * 2, 8, 2, False)
CAUSAL = replace(FULL, causal=True)
OURS = BackwardTiling("static", True, True, 256)
THEIRS = BackwardTiling("single", False, False, 128)

MASKS = [
    (((700, 700),), False, (None, None)),
    (((700, 1000),), True, (None, None)),
    (((1000, 300),), True, (None, None)),
    (((900, 900),), True, (200, None)),
    (((520, 900),), False, (130, 40)),
    (((1, 2048),), True, (None, None)),
    (((64, 1),), True, (None, None)),
    (((600, 600), (10, 300), (0, 40), (300, 0)), True, (None, None)),
    (((600, 600), (10, 300), (0, 40), (300, 0)), True, (150, None)),
]


def backward(order, values=VALUES, **options):
    return Backward("ideal", order, values, lambda which: IDEAL, **options)


def spans(seen, size, step, end):
    """Yield, for every `size` rows of seen (bool), the columns that any of them sees, from a
    multiple of step to one of end, for a kernel's loop leaves none out between."""
    for begin in range(0, seen.shape[0], size):
        places = np.flatnonzero(seen[begin : begin + size].any(axis=0))
        if not len(places):
            yield 0
            continue
        yield -(-(places[-1] + 1) // end) * end - places[0] // step * step


@pytest.mark.parametrize(("lengths", "causal", "window"), MASKS)
@pytest.mark.parametrize("order", [OURS, THEIRS])
def test_work_is_what_any_row_sees(lengths, causal, window, order):
    """dQ's tiles by the reference's mask; dK/dV's too, in queries from a multiple of 256 on; those
    of dV and of the products of dS."""
    case = Case("test", lengths, 6, 2, causal, window, packed=len(lengths) > 1)
    seen = [visible(each, case.bounds).numpy() for each in lengths]
    expected = [DQ * n / 128 for one in seen for n in spans(one, 256, 128, 128)] * 6
    tiles = [tile for tile in dq_tiles(case, order) if not tile.skipped]
    assert sorted(tile.work for tile in tiles) == sorted(expected)
    queries = [n for one in seen for n in spans(one.T, 128, 256, order.rows)]
    for head_parts, parts in ((1, (3,)), (2, (2, 1))):
        expected = sorted([DKDV * part * n / 256 for part in parts for n in queries] * 2)
        tiles = [tile for tile in dkdv_tiles(case, order, head_parts) if not tile.skipped]
        assert sorted(tile.work for tile in tiles) == expected
        steps = [n / 128 for one in seen for n in spans(one.T, 256, 128, 128)]
        of_keys = [part * n for part in parts for n in steps] * 2
        tiles = [tile for tile in dv_tiles(case, order, head_parts) if not tile.skipped]
        assert sorted(tile.work for tile in tiles) == sorted(DV * n for n in of_keys)
        of_queries = [n / 128 for one in seen for n in spans(one, 256, 128, 128)] * 6
        tiles = [tile for tile in product_tiles(case, order, head_parts) if not tile.skipped]
        expected = sorted(PRODUCT * n for n in (*of_keys, *of_queries))
        assert sorted(tile.work for tile in tiles) == expected


def test_sections_of_products_leave_no_long_tiles_for_the_end():
    """A tile of dK has the steps of all query heads of its group. 16 groups in sections of three
    would leave one by itself, whose long tiles came last of all; the last section has it."""
    case = Case("test", ((2560, 2560),) * 8, 16, 2, False)
    tiles = product_tiles(case, OURS, 1)
    long = [n for n, tile in enumerate(tiles) if tile.work == 8 * PRODUCT * 20]
    assert len(long) == 16 * 10 and len(tiles) == 9 * 16 * 10
    assert len(tiles) - max(long) > 3 * 74


@pytest.mark.parametrize("left", [256, 300, 1023, 4096])
def test_masked_work_is_what_some_row_sees_and_another_does_not(left):
    case = Case("test", ((2048, 2048),), 1, 1, True, (left, None))
    seen = visible((2048, 2048), case.bounds).numpy()
    units = seen.reshape(8, 256, 16, 128)
    partly = units.any(axis=(1, 3)) & ~units.all(axis=(1, 3))
    assert sum(t.masked for t in dq_tiles(case, OURS)) == DQ * partly.sum()
    assert sum(t.masked for t in dkdv_tiles(case, OURS, 1)) == DKDV * partly.sum()
    steps = seen.reshape(16, 128, 8, 256)
    partly = steps.any(axis=(1, 3)) & ~steps.all(axis=(1, 3))
    assert sum(t.masked for t in dv_tiles(case, OURS, 1)) == DV * partly.sum()
    assert not any(t.masked for t in product_tiles(case, OURS, 1))
    # Without a bound on the left the diagonal's cost is part of each tile's.
    assert not any(t.masked for t in dq_tiles(replace(case, window=(None, None)), OURS))


@pytest.mark.parametrize("order", [OURS, THEIRS])
def test_tiles_add_up_to_all_products(order):
    """Three products of dQ and four of dK and dV, whatever the order and the parts of heads."""
    units = (4096 // 256) * (4096 // 128) * 2 * 8
    assert sum(tile.work for tile in dq_tiles(FULL, order)) == DQ * units
    for head_parts in (1, 2, 4):
        tiles = dkdv_tiles(FULL, order, head_parts)
        assert sum(tile.work for tile in tiles) == DKDV * units
        assert len(tiles) == 2 * 2 * head_parts * (4096 // 128)


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [(((1024, 1024),) * 32, 32), (((1280, 97024),), 16), (((2048, 2048),) * 16, 32)],
)
def test_products_read_no_more_than_they_ask_for(lengths, heads):
    """Reads from HBM stay below the demand, in the order in which a GPU's CTA pairs begin the
    tiles: a tile of dK reads Q of its heads, one of dQ reads K, a step of either 256 x 128 of
    dS."""
    case = Case("test", lengths, heads, 2 if len(lengths) > 1 else 1, True)
    tiles = product_tiles(case, OURS, 1)
    asked = sum(t.work / PRODUCT * (DS + 128 * ROW) + t.writes for t in tiles)
    starts = np.arange(len(tiles)) // OURS.gpu.pairs
    assert hbm_bytes(tiles, starts, load("b200").values()) < asked


def test_where_ds_is_kept_two_products_are_left():
    """dS is written once and, here, read once: that of a head fits into L2."""
    steps = 16 * 32 * 2 * 8
    dv, products = dv_tiles(FULL, OURS, 1), product_tiles(FULL, OURS, 1)
    assert sum(tile.work for tile in dv) == DV * steps
    assert sum(tile.work for tile in products) == 2 * PRODUCT * steps
    of_keys, of_queries = ROW * 2 * 4096 * 2, ROW * 2 * 4096 * 8
    assert sum(tile.own_bytes for tile in dv) == DS * steps + 3 * of_keys
    assert sum(tile.own_bytes for tile in products) == DS * steps + of_keys + of_queries
    # 16384 rows have 37 of 64 blocks of keys side by side.
    long = Case("long", ((16384, 16384),), 1, 1, False)
    (read,) = {t.own_bytes - t.writes for t in product_tiles(long, OURS, 1)[1::2]}
    assert read == pytest.approx((1 - 37 / 64) * DS * 128)
    # A GB200 has a pair more in each half, and the parts that it works on at once follow.
    gpu = gpu_of(load("gb200"))
    wide = replace(OURS, gpu=gpu)
    (read,) = {t.own_bytes - t.writes for t in product_tiles(long, wide, 1)[1::2]}
    assert gpu.pairs == 76 and read == pytest.approx((1 - 38 / 64) * DS * 128)


def test_short_sequences_move_their_own_rows_only():
    """34 queries and keys, two heads of each: Q, dO, dQ, then K, V, dK and dV; dS in a whole
    step."""
    case = Case("test", ((34, 34),) * 5, 2, 2, True, packed=True)
    assert {tile.own_bytes for tile in dq_tiles(case, OURS)} == {3 * ROW * 34}
    assert {tile.own_bytes for tile in dkdv_tiles(case, OURS, 1)} == {4 * ROW * 34}
    kept = dv_tiles(case, OURS, 1)
    assert {tile.own_bytes for tile in kept} == {3 * ROW * 34 + DS}
    assert {tile.shared_bytes for tile in kept} == {2 * ROW * 34}


def test_the_grid_follows_the_rows_of_all_sequences():
    """The kernel of dV, which numbers none in a row, has a grid of the longest one."""
    case = Case("test", ((600, 300), (10, 10), (0, 500)), 4, 2, True, packed=True)
    dq, dkdv = dq_tiles(case, OURS), dkdv_tiles(case, OURS, 2)
    assert len(dq) == (610 // 256 + 3) * 4 and sum(not tile.skipped for tile in dq) == (3 + 1) * 4
    assert len(dkdv) == (810 // 128 + 3) * 4
    assert sum(not tile.skipped for tile in dkdv) == (3 + 1 + 4) * 4
    assert len(dv_tiles(case, OURS, 2)) == 2 * 4 * 3
    # No query of the last sequence sees its keys: zeros are stored.
    assert sum(not tile.work and tile.own_bytes > 0 for tile in dkdv) == 4 * 4


@pytest.mark.parametrize(
    ("lengths", "causal", "visits"),
    [((512, 512), False, 16), ((512, 512), True, 12), ((640, 512), True, 12),
     ((384, 512), True, 10)],
)  # fmt: skip
def test_their_tiles_visit_what_their_kernel_does(lengths, causal, visits):
    """The simulator counts 48 tcgen05.mma for each visit of 128 queries by 128 keys."""
    tiles = dkdv_tiles(Case("test", (lengths,), 1, 1, causal), THEIRS, 1)
    assert sum(tile.work for tile in tiles) == visits * DKDV / 2


def test_a_causal_backward_starts_at_the_diagonal():
    tiles = dkdv_tiles(CAUSAL, OURS, 1)
    # Keys 0..255 are seen by all 16 units of the 4 heads of a group, the last keys by one.
    assert sorted({tile.work / DKDV / 4 for tile in tiles}) == list(range(1, 17))
    # dQ sees two tiles of keys for every block of queries up to its own.
    works = sorted({tile.work / DQ for tile in dq_tiles(CAUSAL, OURS)})
    assert works == [2.0 * (i + 1) for i in range(16)]


@pytest.mark.parametrize(("ds_bytes", "heads"), [(0, 0), (1 << 28, 1), (1 << 30, 2)])
def test_heads_of_a_kept_ds(ds_bytes, heads):
    """FULL's dS of one KV head, 4 query heads and both sequences, takes 256 MiB."""
    costs = {"dv": 1.0, "products": 1.0, "dq": 2.0, "dkdv": 2.0}
    costs |= {"dv partial": 1.0, "products partial": 1.0}
    # A tile of dK is as long as four of dQ: whoever is free takes the next.
    order = replace(OURS, policy="dynamic")
    found = Backward(
        "ideal", order, VALUES, lambda which: [TileCosts(0.0, 0.0, costs[which])], ds_bytes
    )
    chunks = found.plan(FULL)
    if heads:
        assert [(p.case.heads_kv, p.count, p.keeps_ds) for p in chunks] == [
            (heads, 2 // heads, True)
        ]
        # 5 products of 7, and no tile takes longer than before.
        assert found.seconds(FULL) < backward(OURS).seconds(FULL)
    else:
        assert chunks == [Chunk(FULL, 1, False)]
        assert found.seconds(FULL) > backward(OURS).seconds(FULL)


def test_few_kv_heads_are_split_and_pay_for_it():
    few = Case("test", ((1024, 1024),), 16, 1, False)
    ours, theirs = backward(OURS), backward(THEIRS)
    (split,), (whole,) = ours.plan(few), theirs.plan(few)
    assert (split.head_parts, whole.head_parts) == (8, 1)
    clocks = ours.run(split)["dkdv"][0].clocks
    assert clocks < theirs.run(whole)["dkdv"][0].clocks / 4
    slow = VALUES[0]._replace(hbm_terabytes=0.001)
    assert ours._beside(few, [split], slow) > 2 * ours._beside(few, [whole], slow)


def test_a_backward_is_the_sum_of_its_chunks(monkeypatch):
    """Chunks of any shape: two equal ones of a part of the keys, and one of packed sequences."""
    parts = [
        Chunk(Case("part", ((512, 1024),), 8, 2, True), 1, False, 2),
        Chunk(Case("part", ((300, 300), (40, 40)), 8, 2, True, packed=True), 4, False),
    ]
    monkeypatch.setattr(model_of_backward, "backward_chunks", lambda *given: parts)
    found = backward(OURS)
    alone = [sum(run[0].seconds for run in found.run(part).values()) for part in parts]
    beside = found._beside(FULL, parts, VALUES[0])
    assert found.seconds(FULL) == pytest.approx([beside + 2 * alone[0] + alone[1]])
    found.paths.update({"dq": Paths(1, 2), "dkdv": Paths(0, 5), "dkdv partial": Paths(0, 1)})
    # Kernels that several chunks take are counted once.
    assert found.paths_of(FULL) == Paths(1, 8)


@pytest.mark.parametrize(
    ("case", "ds_bytes", "expected"),
    [
        # 16 tiles of each KV head, or 8 with dS; that of one takes 4 heads x 2048^2 x 2 bytes.
        (Case("a", ((2048, 2048),), 8, 2, False), 0, [(2, 2, False, 1)]),
        (Case("a", ((2048, 2048),), 8, 2, False), 1 << 26, [(2, 4, True, 1)]),
        (Case("a", ((2048, 2048),), 8, 2, False), 1 << 25, [(1, 4, True, 2)]),
        (Case("a", ((2048, 2048),), 12, 3, False), 3 << 25, [(3, 2, True, 1)]),
        (Case("a", ((2048, 2048),), 12, 3, False), 2 << 25, [(2, 4, True, 1), (1, 4, True, 1)]),
        # Packed: at most 100 // 128 + 2 tiles of keys; dS in whole blocks of the longest.
        (Case("a", ((40, 40), (60, 60)), 4, 1, True, packed=True), 0, [(1, 4, False, 1)]),
        (Case("a", ((40, 40), (60, 60)), 4, 1, True, packed=True), 2 * 4 * 256 * 256 * 2,
         [(1, 4, True, 1)]),
        (Case("a", ((40, 40), (60, 60)), 4, 1, True, packed=True), 2 * 4 * 256 * 256 * 2 - 1,
         [(1, 4, False, 1)]),
    ],
)  # fmt: skip
def test_the_plan_of_a_backward_is_the_operators(case, ds_bytes, expected):
    found = backward_chunks(case, ds_bytes, B200)
    assert [(p.case.heads_kv, p.head_parts, p.keeps_ds, p.count) for p in found] == expected
    assert all(p.case.heads == p.case.heads_kv * case.heads // case.heads_kv for p in found)


def test_seconds_include_every_launch():
    slow = [VALUES[0]._replace(launch_us=1000.0)]
    slower = backward(THEIRS, slow).seconds(FULL) - backward(THEIRS).seconds(FULL)
    assert slower == pytest.approx([3e-3])


def test_paths_of_the_kernels_that_a_case_takes():
    found = backward(OURS)
    found.paths.update({"dq": Paths(1, 2), "dkdv": Paths(0, 5), "products": Paths(9, 9)})
    assert found.paths_of(FULL) == Paths(1, 7)


TILES_OF = {
    "dq": lambda case, parts: dq_tiles(case, OURS),
    "dkdv": lambda case, parts: dkdv_tiles(case, OURS, parts),
    "dv": lambda case, parts: dv_tiles(case, OURS, parts),
    "products": lambda case, parts: product_tiles(case, OURS, parts),
}


@pytest.mark.parametrize("which", [*TILES_OF, "dkdv partial", "dv partial", "products partial"])
def test_masked_work_of_samples_is_that_of_their_tiles(which):
    for seqlen, heads, left in samples.WINDOW_SAMPLES:
        case = Case("sample", ((seqlen, seqlen),), heads, 1, True, (left, None))
        # Two parts of one query head: the second is empty, and its tiles store zeros.
        head_parts = 2 if which.endswith("partial") else 1
        tiles = TILES_OF[which.removesuffix(" partial")](case, head_parts)
        masked = sum(tile.masked for tile in tiles)
        found = samples.backward_tiles(which, (seqlen, heads, left))
        assert found == (len(tiles), masked)
    assert samples.backward_tiles(which, (512, 2))[1] == 0.0


MXFP8_DV = ours.Variant(Kind(True), config=Mxfp8BackwardConfig(), kernel="dv")
MXFP8 = replace(OURS, element_bytes=1, diagonal=True)


@pytest.mark.parametrize("kernel", ["dv", "dv partial"])
@pytest.mark.parametrize("kind", [Kind(True), Kind(True, window=True)])
def test_masked_work_of_mxfp8_s_samples_is_that_of_their_tiles(kernel, kind):
    """Half of bf16's, as the MMAs take half as long; without a window the diagonal counts."""
    variant = replace(MXFP8_DV, kernel=kernel, kind=kind)
    head_parts = 2 if kernel.endswith("partial") else 1
    for sample in variant.chosen_samples():
        seqlen, heads, left, _ = samples.parts_of(sample)
        case = Case("sample", ((seqlen, seqlen),), heads, 1, True, (left, None))
        seen = visible((seqlen, seqlen), case.bounds).numpy()
        steps = seen.reshape(seqlen // 128, 128, seqlen // 256, 256)
        partly = steps.any(axis=(1, 3)) & ~steps.all(axis=(1, 3))
        tiles = dv_tiles(case, replace(MXFP8, diagonal=not kind.window), head_parts)
        masked = DV / 2 * heads * partly.sum()
        assert sum(tile.masked for tile in tiles) == masked > 0
        assert variant.sample_tiles(sample) == (len(tiles), masked)


@pytest.mark.parametrize("kernel", ["dv", "dv partial"])
def test_samples_of_mxfp8_s_dv_tell_masked_steps_apart(kernel):
    """Costs that a made-up kernel has are found again."""
    variant, rows = replace(MXFP8_DV, kernel=kernel), []
    for sample in variant.chosen_samples():
        seqlen, heads = sample[:2]
        blocks, lengths = range(seqlen // 256), (seqlen, seqlen)
        work = DV / 2 * heads * sum(dv_steps(block, lengths, (None, 0))[0] for block in blocks)
        tiles, masked = variant.sample_tiles(sample)
        clocks = 5000.0 + 4000.0 * tiles + 2.0 * work + 0.25 * masked
        rows.append(Fitted(tiles, work, clocks, masked))
    found = fit(rows, single=False)
    costs = found.begin, found.each, found.rate, found.mask
    assert costs == pytest.approx((5000.0, 4000.0, 2.0, 0.25))
    assert min(row.masked / row.work for row in rows) < 0.25


def test_bytes_of_ds_in_mxfp8_are_those_of_its_tiles():
    """Two tiles a step; each result reads all codes and its own scales."""
    dv, products = dv_tiles(FULL, MXFP8, 1), product_tiles(FULL, MXFP8, 1)
    steps = dv[0].work / (DV / 2)
    assert dv[0].own_bytes - dv[0].reads - dv[0].writes == 2 * mxfp8_ds.TILE_BYTES * steps
    steps = products[0].work / (PRODUCT / 2)
    read = products[0].own_bytes - products[0].writes
    assert read == 2 * (mxfp8_ds.CODE_BYTES + ATOM_BYTES) * steps


def test_chunks_in_mxfp8_have_room_for_its_ds():
    """All of dS fits where half of that of 16 bits does."""
    plain, smaller = (
        backward_chunks(FULL, 300 << 20, B200, is_small) for is_small in (False, True)
    )
    assert sum(chunk.count for chunk in plain) > 1
    assert [chunk.count for chunk in smaller] == [1]


OTHER_KERNELS = [
    *(ours.Variant(Kind(causal), config=Mxfp8BackwardConfig(), kernel=kernel)
      for causal in (False, True) for kernel in ("products", "products partial")),
    ours.Variant(Kind(False), config=Mxfp8BackwardConfig(), kernel="dv"),
    *(ours.Variant(Kind(causal), kernel=kernel)
      for causal in (False, True) for kernel in (*TILES_OF, "dv partial")),
]  # fmt: skip


@pytest.mark.parametrize("variant", OTHER_KERNELS, ids=lambda one: one.kernel)
def test_no_other_kernel_tells_masked_steps_apart_without_a_window(variant):
    """All others keep their samples, and so the figures of their replays."""
    heads = 2 if variant.kernel.endswith("partial") else 1
    expected = tuple((rows, n * heads) for rows, n in samples.BACKWARD_SAMPLES)
    assert variant.chosen_samples() == expected and not variant.diagonal
    assert not any(variant.sample_tiles(sample)[1] for sample in expected)
    tiling = replace(OURS, element_bytes=variant.element_bytes, diagonal=variant.diagonal)
    tiles_of = {"dv": dv_tiles, "products": product_tiles, "dkdv": dkdv_tiles,
                "dq": lambda case, tiling, parts: dq_tiles(case, tiling)}  # fmt: skip
    found = tiles_of[variant.kernel.removesuffix(" partial")](CAUSAL, tiling, heads)
    assert not any(tile.masked for tile in found)


@pytest.mark.parametrize("config", [None, Mxfp8BackwardConfig()])
@pytest.mark.parametrize("kind", [Kind(False), Kind(True), Kind(True, window=True)])
def test_tiles_and_samples_of_a_backward_agree_on_what_is_told_apart(config, kind):
    variant = ours.Variant(kind, config=config, kernel="backward")
    tiling = ours.Ours().backward(variant, MACHINE, 0).tiling
    of_samples = replace(variant, kernel="dv").diagonal
    assert tiling.diagonal == of_samples == (config is not None and kind == Kind(True))
    assert tiling.element_bytes == (2 if config is None else 1)


def test_empty_tiles_cost_what_they_add_to_a_replay():
    """32 tiles where there was 1, 62 clocks more each; of dV 16 for 1 of each of two parts."""
    without, some = Replayed(1, 4096.0, (9000.0, 9500.0)), Replayed(32, 4096.0, (10922.0, 11050.0))
    costs = [TileCosts(7.0, 5.0, 1.1), TileCosts(8.0, 5.0, 1.2)]
    found = ours.with_empty_tiles(costs, without, some)
    assert found == [replace(costs[0], empty=62.0), replace(costs[1], empty=50.0)]
    counts = {
        which: samples.backward_tiles(which, (samples.LONGEST, 1))[0]
        - samples.backward_tiles(which, samples.BACKWARD_SAMPLES[0])[0]
        for which in ("dq", "dkdv", "dv partial", "products")
    }
    assert counts == {"dq": 15, "dkdv": 30, "dv partial": 30, "products": 30}
    variant = ours.Variant(Kind(True), kernel="dv partial")
    assert variant.chosen_samples()[0] == (256, 2)


def test_samples_of_windows_have_masked_and_unmasked_units():
    kind = Kind(True, window=True)
    for tiles_of, unit in (
        (dq_tiles, DQ), (lambda c, o: dkdv_tiles(c, o, 1), DKDV),
        (lambda c, o: dv_tiles(c, o, 1), DV),
    ):  # fmt: skip
        shares = []
        for seqlen, heads, left in ours.Variant(kind, kernel="dq").chosen_samples():
            case = Case("sample", ((seqlen, seqlen),), heads, 1, True, (left, None))
            tiles = tiles_of(case, OURS)
            shares.append(sum(t.masked for t in tiles) / sum(t.work for t in tiles))
        assert shares[:2] == [1.0, 1.0] and max(shares[2:]) < 0.6, (unit, shares)


def test_what_flash_attn_4_refuses_is_not_predicted():
    assert flash_attn_4.backward_refusal(False, False) is None
    if flash_attn_4.unavailable():
        return
    backward = theirs.FlashAttention4().backward
    with pytest.raises(ValueError, match="does not support local attention"):
        backward(theirs.Variant(Kind(True, window=True)), MACHINE, 1)
    with pytest.raises(ValueError, match="does not support softcap"):
        backward(theirs.Variant(Kind(True, window=True, softcap=True)), MACHINE, 1)


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data")
@pytest.mark.skipif(flash_attn_4.unavailable() is not None, reason="flash-attn-4 not installed")
@pytest.mark.third_party
@pytest.mark.sampled
def test_flash_attn_4_itself_refuses_with_these_words():
    from flash_attn.cute.interface import _flash_attn_bwd

    q = torch.zeros(1, 8, 1, 256, dtype=torch.bfloat16)
    call = q, q, q, q, q, torch.zeros(1, 1, 8)
    for window, softcap, options in (
        (True, False, {"window_size_left": 4, "window_size_right": 0}),
        (True, False, {"causal": True, "window_size_left": 4}),
        (False, True, {"causal": True, "softcap": 50.0}),
        (True, True, {"causal": True, "window_size_left": 4, "softcap": 50.0}),
    ):
        # Observed, so that what it compiles before it refuses has a cubin: it keeps that.
        observed = sm100_sim.attached(observe=lambda config, report: None)
        with observed, pytest.raises(AssertionError) as refused:
            _flash_attn_bwd(*call, **options)
        assert str(refused.value) == flash_attn_4.backward_refusal(window, softcap)


def test_many_sequences_of_which_few_are_long():
    """The suite's: few tiles of the grid are empty, and the work is that of the lengths alone; of
    dV, whose kernel has blocks for the longest sequence, most are."""
    case = Case("varlen", ragged_lengths(64, 4096), 16, 2, True, packed=True)
    tiles = dkdv_tiles(case, OURS, 1)
    units = sum(
        -(-q // 256) - block * 128 // 256
        for q, k in case.lengths for block in range(-(-k // 128))
    )  # fmt: skip
    assert sum(tile.work for tile in tiles) == DKDV * 16 * units
    assert sum(tile.skipped for tile in tiles) <= 64 * 2
    of_dv = dv_tiles(case, OURS, 1)
    assert sum(tile.skipped for tile in of_dv) > 0.8 * len(of_dv)
