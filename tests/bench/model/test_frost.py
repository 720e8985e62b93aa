"""cuDNN's FROST on the timing model: the order of its tiles, and what is replayed."""

import pytest
import torch

from bench.model import frost as model
from bench.model.calls import Kind
from bench.model.tiles import forward_tiles
from bench.peers import frost
from bench.suite import FORWARD, Case
from sm100_sim.timing import load

CAUSAL = Case("dense", ((2048, 2048),) * 3, 8, 2, True)
FULL = Case("dense", ((2048, 2048),) * 3, 8, 2, False)
#: A KV head takes 32 MiB of the 60 that it counts on; more than the 50 that it lets one take.
LONG = Case("long", ((32768, 32768),), 8, 2, True)
TOO_LONG = Case("long", ((65536, 65536),), 8, 2, True)


def places(case):
    blocks = -(-case.seqlen_q // 256)
    return list(frost.forward_order(
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
    # None fits: all heads by turns.
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
    from bench.model import replays

    monkeypatch.setattr(replays, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(replays, "_memory", {})
    variant = model.Variant(Kind(True), ("0.0.1", "0.0.2"))
    with pytest.raises(RuntimeError, match=r"0\.0\.1"):
        model.traced(variant, load("b200"))


@pytest.mark.third_party
@pytest.mark.simulator
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
