"""`bench masks` on packed sequences with chosen keys, without a GPU: cases, checks and rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_timer import FakeTimer

from bench.commands import masks as command
from bench.measure import checking, mask_providers, providers
from bench.measure.masks import CHOSEN, PACKED_CASES, MaskedCase, chosen_keys, seen_in
from bench.measure.settings import Sampling
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.comparison import OURS

pytest.importorskip("cutlass")

CPU = torch.device("cpu")
LENGTHS = 150, 3, 300


def _case(lengths=LENGTHS, heads=2, keys=40):
    of_both = tuple((length, length) for length in lengths)
    return MaskedCase(
        "packed masks", of_both, heads, heads, False, packed=True, pattern=chosen_keys(keys)
    )


def _dense(case):
    """Return the mask of the packed row, sequence by sequence."""
    found, begin, seen = (
        torch.zeros(case.row[1], case.row[1], dtype=torch.bool),
        0,
        case.mask_mod(CPU),
    )
    for number, (length, _) in enumerate(case.lengths):
        tokens, rows = torch.arange(length), slice(begin, begin + length)
        found[rows, rows] = seen(number, 0, tokens[:, None], tokens)
        begin += length
    return found


class DenseRow(mask_providers.DenseSdpa):
    """SDPA on the packed row in the place of ours. leaks: a query sees one key too many."""

    def __init__(self, leaks=False):
        super().__init__(OURS)
        self._leaks = leaks

    def refuses(self, case, direction):
        return None

    def call(self, inputs):
        mask = _dense(inputs.case)
        if self._leaks:
            mask[-1, : LENGTHS[0]] = True
        q, k, v = (leaf.transpose(0, 1)[None] for leaf in inputs.leaves)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out[0].transpose(0, 1)


def test_the_cases():
    assert {case.heads_text for case in PACKED_CASES} == {"64/64", "8/8"}
    assert {case.batch for case in PACKED_CASES} == {8, 32}
    # Engines take this way where the longest sequence has more keys than are chosen.
    assert all(case.seqlen_k > CHOSEN and case.packed for case in PACKED_CASES)
    case = _case()
    assert case.plain == Case("packed masks", case.lengths, 2, 2, True, packed=True)
    for wrong in ({"lengths": ((5, 7),)}, {"causal": True}, {"window": (3, None)}):
        with pytest.raises(ValueError, match="a mask beside causal"):
            replace(case, **wrong)


def test_chosen_keys():
    """All keys while there are no more than are chosen, then about as many, others in each row."""
    seen = _case((600,), keys=100).mask_mod(CPU)(
        0, 0, torch.arange(600)[:, None], torch.arange(600)
    )
    assert torch.equal(seen[:100], torch.ones(100, 600, dtype=torch.bool).tril())
    assert not seen.triu(1).any()
    counts = seen[100:].sum(1)
    assert 60 < counts.min() and counts.max() < 140 and 97 < counts.float().mean() < 103
    assert not torch.equal(seen[500, :500], seen[501, :500])


def test_words_are_the_mask():
    case = _case()
    dense, words = _dense(case), case.words(CPU)
    row, key = torch.arange(case.row[1])[:, None], torch.arange(case.row[1])
    assert torch.equal(seen_in(words)(0, 0, row, key), dense)
    assert torch.equal(case.tile_mask(CPU).dense()[0, 0], dense)
    assert case.pairs == dense.sum()
    own = case.words_of_sequences(CPU, 256, 512)
    assert own.shape == (3, 512, 16)
    begin = 0
    for number, length in enumerate(LENGTHS):
        tokens = torch.arange(length)
        rows = slice(begin, begin + length)
        assert torch.equal(seen_in(own[number])(0, 0, tokens[:, None], tokens), dense[rows, rows])
        assert not own[number, length:].any()
        begin += length


def test_the_check_sees_the_mask():
    for provider, passes in ((DenseRow(), True), (DenseRow(leaks=True), False)):
        inputs = providers.Inputs.random(_case(), CPU, torch.bfloat16)
        with torch.no_grad():
            assert checking.check_forward(inputs, provider.call(inputs)).passed == passes
        assert checking.check_gradients(provider, inputs).passed == passes


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_rows(direction):
    case = _case()
    chosen = [DenseRow(), mask_providers.DenseSdpa()]
    (row,) = command.measure([(case, direction)], chosen, FakeTimer(), Sampling(1, 3)).rows
    assert row["details"][OURS]["status"] == "ok" and row["mask_us"] > 0
    assert row["visible"] == case.pairs / sum(n * n for n in LENGTHS)
    assert row[OURS] == pytest.approx(case.flop(direction) / row["ours_ms"] / 1e9)
    assert "SDPA, dense mask: takes no packed sequences" in row["remarks"]


def test_flex_attention_has_the_mask(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(
        mask_providers.FlexAttention, "_function",
        lambda self: lambda *tensors, kernel_options, **given: flex_attention(*tensors, **given),
    )  # fmt: skip
    flex = mask_providers.FlexAttention()
    (row,) = command.measure([(_case(), FORWARD)], [flex], FakeTimer(), Sampling(0, 1)).rows
    assert row["details"][mask_providers.FLEX]["status"] == "ok"


@pytest.mark.simulator
@pytest.mark.parametrize("name", ["bits", "mask_mod", "causal"])
@pytest.mark.sampled("bits")
def test_ours_in_the_simulator(name):
    """Compare bits, mask_mod, and causal, which is another mask."""
    case = _case((130, 40), heads=1, keys=20)
    inputs = providers.Inputs.random(case, CPU, torch.bfloat16)
    provider = {
        "bits": mask_providers.OursMasked, "mask_mod": mask_providers.OursFunction,
        "causal": mask_providers.OursCausal,
    }[name]()  # fmt: skip
    own = replace(inputs, case=provider.computed(case), expected={}, masks={})
    with torch.no_grad():
        out = provider.call(own)
    assert checking.check_forward(own, out).passed
    assert checking.check_forward(inputs, out).passed == (name != "causal")
