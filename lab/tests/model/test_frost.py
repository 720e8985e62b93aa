"""cuDNN's FROST on the timing model: the order of its tiles, and what is replayed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.peers import frost
from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256.check import reference
from fa4_hd256.check.reference import visible
from lab.model.calls import Kind
from lab.model.peers import frost as model
from lab.model.peers import frost_code
from lab.model.peers.frost_backward import (
    STEP_WORK,
    UNIT_WORK,
    FrostBackward,
    Geometry,
    main_tiles,
    product_tiles,
)
from lab.model.tiles import forward_tiles
from lab.published import nvidia
from lab.published.rows import FROST
from lab.whole.problem import TileCosts
from sm100_sim.timing import load

CAUSAL = Case("dense", ((2048, 2048),) * 3, 8, 2, True)
FULL = Case("dense", ((2048, 2048),) * 3, 8, 2, False)
#: A KV head takes 32 MiB of the 60 that it counts on; more than the 50 that it lets one take.
LONG = Case("long", ((32768, 32768),), 8, 2, True)
TOO_LONG = Case("long", ((65536, 65536),), 8, 2, True)


def places(case):
    blocks = -(-case.seqlen_q // 256)
    return list(frost_code.forward_order(
        blocks, case.batch, case.heads, case.heads_kv, case.seqlen_k, case.causal
    ))  # fmt: skip


@pytest.mark.parametrize("case", [CAUSAL, FULL, LONG, TOO_LONG], ids=str)
def test_every_tile_comes_once(case):
    found = places(case)
    assert len(found) == len(set(found)) == case.seqlen_q // 256 * case.heads * case.batch
    assert len(forward_tiles(case, model.Tiling("dynamic"))) == len(found)


def test_causal_tiles_come_longest_first_among_heads_that_share_l2():
    # Six KV heads of 2 MiB fit together: rows of all heads, the last one first.
    found = places(CAUSAL)
    assert [block for block, *_ in found] == sorted((b for b, *_ in found), reverse=True)
    # One of 32 MiB fits: its four query heads, then those of the other.
    assert [head // 4 for _, head, _ in places(LONG)] == [0] * 512 + [1] * 512
    assert [block for block, *_ in places(LONG)][:8] == [127] * 4 + [126] * 4
    # No head fits: all are interleaved.
    assert [head for _, head, _ in places(TOO_LONG)][:16] == [*range(8)] * 2
    assert places(FULL)[:9] == [*((n, 0, 0) for n in range(8)), (0, 1, 0)]


def test_what_it_does_not_take():
    provider = model.Frost()
    if frost.unavailable():
        assert frost.PACKAGE in provider.refuses(CAUSAL, FORWARD)
        return
    assert provider.refuses(CAUSAL, FORWARD) is None
    packed = Case("packed", ((5, 5), (7, 7)), 2, 1, True, packed=True)
    assert "packed" in provider.refuses(packed, FORWARD)
    assert "softcap" in provider.refuses(Case("dense", ((5, 5),), 2, 1, True, softcap=5.0), FORWARD)


def test_another_build_is_not_taken_for_the_installed_one(tmp_path, monkeypatch):
    from lab.model import replays

    monkeypatch.setattr(replays, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(replays, "_memory", {})
    variant = model.Variant(Kind(True), ("0.0.1", "0.0.2"))
    with pytest.raises(RuntimeError, match=r"0\.0\.1"):
        model.traced(variant, load("b200"))


@pytest.mark.third_party
@pytest.mark.simulator
@pytest.mark.sampled
def test_the_order_is_that_of_the_kernel(monkeypatch):
    """One cluster runs all tiles of a causal call; Q of each is loaded in this order."""
    pytest.importorskip("cudnn")
    import sm100_sim

    monkeypatch.setenv("SM100_SIM_CLUSTERS", "1")
    case = Case("dense", ((512, 512),) * 2, 4, 2, True)
    with sm100_sim.attached(trace=True) as session:
        q, k, v = (torch.randn(2, 512, n, 256, dtype=torch.bfloat16) for n in (4, 2, 2))
        frost.Forward()(q, k, v, causal=True)
    loads = [
        entry.operands for entry in session.reports[-1].trace
        if "tensor.4d.shared::cluster.global" in entry.opcode and entry.ctaid[0] == 0
    ]  # fmt: skip
    # The first load is Q's; others to its place are those of further tiles.
    place, (of_q, _), *_ = loads[0]
    coordinates = [where for to, (which, where), *_ in loads if (to, which) == (place, of_q)]
    found = [(row // 256, head, batch) for _, head, row, batch in coordinates]
    assert found == places(case)


@pytest.mark.parametrize("lengths", [(1024, 1024), (640, 1024), (1024, 768)])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_tiles_cover_what_is_seen(lengths, causal):
    """Every visible pair of a query and a key lies in a unit of the main kernel, and what the
    products read of dS has been written by it."""
    seqlen_q, seqlen_k = lengths
    geometry = Geometry(1, 2, 2, lengths, seqlen_k - seqlen_q if causal else None)
    seen = visible(lengths, (None, 0 if causal else None)).numpy()
    written = np.zeros(geometry.padded, bool)
    for keys in range(0, geometry.padded[1], 256):
        first, limit = geometry.queries_of(keys)
        written[first:limit, keys : keys + 256] = True
    assert not (seen & ~written[:seqlen_q, :seqlen_k]).any()
    work = sum(tile.work for tile in main_tiles(geometry))
    assert work == 2 * written.sum() / 128**2 * UNIT_WORK
    for queries in range(0, seqlen_q, 256):
        summed = geometry.keys_of(queries)
        assert written[queries : queries + 256, :summed].all()
        assert not seen[queries : queries + 256, summed:].any()
    bytes_read = sum(tile.own_bytes - tile.writes for tile in product_tiles(geometry, False))
    assert bytes_read == 2 * 2 * written[:seqlen_q, :seqlen_k].sum()


def test_which_published_builds_are_replayed():
    """Version, CuTe DSL and plan must be those of the kernel that is traced."""
    releases_known = {one.version() for one in model.HISTORY}
    assert releases_known == {"1.31.0", "1.32.0"}
    rows = [row for row in (*nvidia.TRAINING, *nvidia.INFERENCE) if row.build.project == FROST]
    assert rows
    for row in rows:
        plan = dict(row.build.options)
        replayed = [one for one in model.HISTORY if one.replays(row.build)]
        assert len(replayed) == (plan["SPLIT_KV"] == 1)
        for one in replayed:
            assert one.release.cutlass_dsl == row.build.cutlass_dsl
            # The plan's order is the case's order here.
            of, heads = row.problem, row.problem.heads
            tiles = of.seqlen_q // 256
            order = list(frost_code.forward_order(tiles, 1, heads, of.heads_kv, of.seqlen_k, True))
            by_rows = [(tiles - 1 - n // heads, n % heads, 0) for n in range(tiles * heads)]
            assert plan["SCHED_POLICY"] in ((1, 2) if order == by_rows else (2,))


def test_backward_goes_in_chunks_of_heads_that_fit():
    assert frost_code.backward_chunks(1, 32, 2, (8192, 8192)) == (1, 32)
    assert frost_code.backward_chunks(1, 32, 2, (16384, 16384)) == (1, 16)
    assert frost_code.backward_chunks(1, 32, 2, (32768, 32768)) == (1, 4)
    assert frost_code.backward_chunks(4, 16, 16, (8192, 8192)) == (4, 16)
    assert frost_code.backward_chunks(8, 16, 16, (8192, 8192)) == (8, 8)
    chunks = pytest.importorskip("cudnn.sdpa.bwd.api_dsl_sm107")._sm107_chunks
    for batch, heads, heads_kv in ((1, 32, 2), (3, 24, 8), (8, 16, 16), (2, 8, 1)):
        for seqlen in (2048, 8192, 16384, 32768, 65536):
            theirs = chunks(batch, heads, heads // heads_kv, seqlen, seqlen, 2,
                            allow_subgroups=True)  # fmt: skip
            assert frost_code.backward_chunks(batch, heads, heads_kv, (seqlen, seqlen)) == theirs


def test_backward_call_of_several_chunks():
    """Each chunk has the three kernels; the rest of the time is that of bytes."""
    values = [load("b200").values()]
    backward = FrostBackward("ideal", values, lambda which: [TileCosts(0.0, 0.0, 1.0)])
    case = Case("long", ((16384, 16384),), 32, 2, False)
    (call,) = backward.calls(case)
    assert [times for times, _ in call.schedules] == [2, 2, 2]
    main, *products = (one for _, one in call.schedules)
    assert main.work == 2 * 16 * 128**2 * UNIT_WORK
    assert all(one.work == 2 * 16 * 64 * 256 * STEP_WORK for one in products)
    assert call.flop == case.flop(BACKWARD)


@pytest.mark.third_party
@pytest.mark.simulator
@pytest.mark.parametrize("lengths", [(256, 256), (100, 300)])
@pytest.mark.sampled
def test_gradients_of_its_backward(lengths):
    pytest.importorskip("cudnn")
    import sm100_sim

    torch.manual_seed(0)
    shapes = ((lengths[0], 2), (lengths[1], 1), (lengths[1], 1), (lengths[0], 2))
    q, k, v, dout = (torch.randn(1, n, h, 256, dtype=torch.bfloat16) for n, h in shapes)
    exact = reference.gradients((q, k, v), dout, causal=True)
    allowed = reference.same_dtype_gradients((q, k, v), dout, causal=True)
    with sm100_sim.attached():
        out, lse = frost.Forward()(q, k, v, causal=True)
        found = frost.Backward()(q, k, v, out, lse, dout, causal=True)
    for name, mine in zip("qkv", found):
        error = (mine.double() - exact[name]).abs().max()
        # dK and dV of the heads of a group are summed from bf16.
        assert error <= 3 * (allowed[name].double() - exact[name]).abs().max()


@pytest.mark.parametrize(("case", "columns", "packs"), [
    ((1, (1, 131072), 32, 2), 16, True), ((128, (2, 131072), 32, 2), 32, True),
    ((1, (2, 131072), 32, 2), 0, True), ((1, (512, 65536), 16, 1), 0, False),
    ((1, (1, 1000), 4, 4), 16, False), ((1, (1, 1000), 24, 1), 16, False),
])  # fmt: skip
def test_which_kernel_a_call_of_few_queries_takes(case, columns, packs):
    batch, lengths, heads, heads_kv = case
    assert frost.decode_columns(*case) == columns
    assert frost.packs_heads(lengths[0], heads, heads_kv) == packs
    config = pytest.importorskip("cudnn.sdpa.fwd.config_sm100")
    ratio = heads // heads_kv if packs else 1
    wide = config.d256_wide_decode_launch(batch, heads // ratio, lengths[1])
    assert config.decode_d256_q_tile(lengths[0], ratio, wide_launch=wide) == columns


def test_parts_are_those_of_the_published_plans():
    """512 x 65536 .. 1024 x 131072 (rows.Build: SPLIT_KV), by its heuristics."""
    pytest.importorskip("cudnn")
    rows = [row for row in nvidia.INFERENCE if row.build.project == FROST and row.keys is not None]
    for row in rows:
        of = row.problem
        found = frost.chosen_splits(1, of.lengths[0], of.heads, of.heads_kv, 148)
        assert found == dict(row.build.options)["SPLIT_KV"], of


def test_tiles_of_divided_keys():
    """Parts come last in the grid; all of them together have the keys of the call once."""
    case = Case("chunk", ((512, 4096),) * 2, 8, 2, True)
    tiling = replace(model.Tiling("dynamic"), num_splits=4)
    order = list(tiling.places(case))
    assert len(set(order)) == len(order) == 2 * 8 * 2 * 4
    entries = [entry for *_, entry in order]
    assert entries == [n for n in (0, 4, 1, 5, 2, 6, 3, 7) for _ in range(16)]
    whole, parts = forward_tiles(case, model.Tiling("dynamic")), forward_tiles(case, tiling)
    assert sum(tile.work for tile in parts) == sum(tile.work for tile in whole)


@pytest.mark.third_party
@pytest.mark.simulator
@pytest.mark.sampled
def test_what_is_replayed_of_few_queries(tmp_path, monkeypatch):
    """One CTA has a tile of the kernel for decoding; its steps are those of its KV split."""
    pytest.importorskip("cudnn")
    from lab.model import replays

    monkeypatch.setattr(replays, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(replays, "_memory", {})
    variant = model.Variant(Kind(True), few=model.Few(1, 16, True, 16))
    found = model.traced(variant, load("b200"))
    assert [row.tiles for row in found] == [1, 1, 1]
    assert [row.program.work for row in found] == [4 * 256, 8 * 256, 16 * 256]
