"""`bench masks` without a GPU: its cases, checks and rows, under a timer of the test's own."""

from __future__ import annotations

import pytest
import torch
from fake_timer import FakeTimer

from bench.commands import masks as command
from bench.measure import checking, mask_providers, providers
from bench.measure import masks as of_masks
from bench.measure.masks import CASES, MaskedCase, documents, images, prefix_lm, window
from bench.measure.settings import LEAST_RUNS, Sampling
from bench.measure.timer import interleave
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables import ready
from bench.tables.comparison import BOUND, OURS

pytest.importorskip("cutlass")

CPU = torch.device("cpu")
#: Small ones of each kind; lengths are no multiples of a tile, nor of what is evaluated at once.
PATTERNS = prefix_lm(), documents(100), images(), images(60), window(100, 4)


def _case(pattern, batch=2, seqlen=700, heads=(2, 1)):
    return MaskedCase("masks", ((seqlen, seqlen),) * batch, *heads, False, pattern=pattern)


def _named(pattern):
    return pattern.text


class Dense(mask_providers.DenseSdpa):
    """SDPA in the place of ours."""

    def __init__(self):
        super().__init__(OURS)


class DenseCausal(mask_providers.DenseSdpa):
    """SDPA in the place of the bound."""

    def __init__(self):
        super().__init__(BOUND)

    def computed(self, case):
        return case.plain

    def call(self, inputs):
        assert not isinstance(inputs.case, MaskedCase) and not inputs.masks
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs.leaves)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2)


@pytest.mark.parametrize("pattern", PATTERNS, ids=_named)
@pytest.mark.parametrize("seqlen", [300, 700])
def test_both_ways_to_say_a_mask_are_one(pattern, seqlen):
    case = _case(pattern, seqlen=seqlen)
    named, dense = case.tile_mask(CPU).dense(), case.dense(CPU)
    assert named.shape == dense.shape and torch.equal(named, dense)
    assert dense.shape[0] == (2 if pattern.by_entry else 1)
    assert case.pairs == dense.expand(2, -1, -1, -1).sum()
    rows = range(seqlen - 70, seqlen - 6)
    last = case.last_key(1, rows)
    of_rows = dense[-1, 0, rows.start : rows.stop]
    assert torch.equal(case.seen(1, rows, last + 1), of_rows[:, : last + 1])
    assert not of_rows[:, last + 1 :].any()


def test_masks_are_those_of_the_field():
    """Queries of each kind, by hand."""
    seen = _case(prefix_lm(), 2, 64).dense(CPU)[:, 0]
    assert seen[1, 3].nonzero()[:, 0].tolist() == list(range(16))
    assert seen[0, 30].nonzero()[:, 0].tolist() == list(range(31))
    seen = _case(window(3, 2), 1, 64).dense(CPU)[0, 0]
    assert seen[40].nonzero()[:, 0].tolist() == [0, 1, 37, 38, 39, 40]
    seen = _case(images(10), 1, 600).dense(CPU)[0, 0]
    # The first image: 300 .. 555.
    assert seen[300].nonzero()[:, 0].tolist() == list(range(290, 556))
    assert seen[299].nonzero()[:, 0].tolist() == list(range(289, 300))
    assert seen[556].nonzero()[:, 0].tolist() == list(range(546, 557))
    ids = of_masks.document_ids(16, 2, 64, CPU)
    assert ids[0, -1] > 0 and not torch.equal(ids[0], ids[1])
    seen = _case(documents(16), 2, 64).dense(CPU)[1, 0]
    first = int((ids[1] == ids[1, 50]).nonzero()[0, 0])
    assert seen[50].nonzero()[:, 0].tolist() == list(range(first, 51))


def test_flop_count_visible_pairs():
    case = _case(window(3, 2), 2, 64, (4, 2))
    pairs = sum(sum(j <= i and (i - j <= 3 or j < 2) for j in range(64)) for i in range(64))
    assert case.flop(FORWARD) == 2 * pairs * 4 * 256 * 4
    assert case.flop(BACKWARD) == 2.5 * case.flop(FORWARD)
    # Prefixes of 512, 1024, 1536 and 2048: the pairs of each above the diagonal.
    above = sum(prefix * (prefix - 1) // 2 for prefix in (512, 1024, 1536, 2048))
    assert CASES[0].mask == "prefix-LM"
    assert CASES[0].pairs == 4 * 4096 * 4097 // 2 + above


def test_the_cases():
    assert len({str(case) for case in CASES}) == len(CASES) <= 6
    assert [case.mask for case in CASES] == [
        "prefix-LM", "documents", "images, causal", "images, window 1023", "window 1023, first 4",
    ]  # fmt: skip
    assert {case.shape for case in CASES} == {"4x4096", "1x16384"}
    assert {case.heads_text for case in CASES} == {"16/16", "8/4"}
    assert CASES[0].plain == Case("masks", ((4096, 4096),) * 4, 16, 16, True)
    with pytest.raises(ValueError, match="a mask beside causal"):
        MaskedCase("masks", ((64, 64),), 2, 1, True, pattern=window())


@pytest.mark.parametrize("pattern", PATTERNS, ids=_named)
@pytest.mark.sampled("prefix-LM")
def test_the_check_sees_the_mask(pattern):
    """Right under the case's own mask; wrong where one key too many is seen."""

    class Leaking(Dense):
        def call(self, inputs):
            mask = inputs.case.dense(CPU).clone()
            mask[-1, :, -1, :-1] = mask[-1, :, -1, :-1].logical_not()
            inputs.masks[mask_providers.SDPA] = mask
            return super().call(inputs)

    for provider, passes in ((Dense(), True), (Leaking(), False)):
        inputs = providers.Inputs.random(_case(pattern, seqlen=400), CPU, torch.bfloat16)
        with torch.no_grad():
            assert checking.check_forward(inputs, provider.call(inputs)).passed == passes
        assert checking.check_gradients(provider, inputs).passed == passes


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_rows(direction, monkeypatch, capsys):
    monkeypatch.setattr(ready, "LATER", 0.0)
    case = _case(images(60), seqlen=400)
    table = command.measure(
        [(case, direction)], [Dense(), DenseCausal(), mask_providers.DenseSdpa()], FakeTimer(),
        Sampling(1, 3),
    )  # fmt: skip
    (row,) = table.rows
    assert {name: one["status"] for name, one in row["details"].items()} == {
        OURS: "ok",
        BOUND: "ok",
        mask_providers.SDPA: "ok",
    }
    milliseconds = row["ours_ms"]
    assert row[OURS] == pytest.approx(case.flop(direction) / milliseconds / 1e9)
    assert row[BOUND] == pytest.approx(case.plain.flop(direction) / row["causal_ms"] / 1e9)
    assert row["sdpa_ratio"] == pytest.approx(row["sdpa_ms"] / milliseconds)
    assert row["flex_ms"] is None and row["flex_ratio"] is None and row["runs"] == 3
    assert row["peer"] == mask_providers.SDPA
    assert row["visible"] == case.pairs / (2 * 400 * 400) and row["mask_us"] > 0
    assert f"{mask_providers.SDPA}: " in row["remarks"]
    assert f"| {milliseconds:.3f} " in capsys.readouterr().err
    assert "images, window 60" in table.as_markdown()


def test_flex_attention_is_asked_for_smaller_blocks(monkeypatch):
    """A row says that FlexAttention's own choice fails; where all fail, it has the first error."""
    from torch.nn.attention.flex_attention import flex_attention

    def function(self):
        def attend(*tensors, kernel_options, **options):
            if len(asked) == 0:
                asked.append(kernel_options)
                try:
                    raise MemoryError("shared memory, required 300000")
                except MemoryError as error:
                    raise RuntimeError("no choices\nmore of it") from error
            return flex_attention(*tensors, **options)

        return attend

    asked: list = []
    monkeypatch.setattr(mask_providers.FlexAttention, "_function", function)
    flex = mask_providers.FlexAttention()
    case = _case(documents(100), seqlen=300)
    (row,) = command.measure([(case, FORWARD)], [flex], FakeTimer(), Sampling(0, 1)).rows
    assert asked == [None] and row["flex_ms"] is not None
    small = mask_providers.KERNEL_OPTIONS[1]
    reason = "RuntimeError: no choices, from MemoryError: shared memory, required 300000"
    assert row["remarks"] == f"FlexAttention: with {small}; without, {reason}"
    # FlexAttention's backward is for GPUs alone.
    (row,) = command.measure([(case, BACKWARD)], [flex], FakeTimer(), Sampling(0, 1)).rows
    assert row["flex_ms"] is None and "NotImplementedError" in row["remarks"]


@pytest.mark.simulator
@pytest.mark.sampled
def test_ours_in_the_simulator():
    case = _case(images(10), 1, 150, (1, 1))
    inputs = providers.Inputs.random(case, CPU, torch.bfloat16)
    for provider, expected in (
        (mask_providers.OursMasked(), case), (mask_providers.OursFunction(), case),
        (mask_providers.OursCausal(), case.plain),
    ):  # fmt: skip
        computed = provider.computed(case)
        assert computed == expected
        own = providers.Inputs(computed, inputs.q, inputs.k, inputs.v, inputs.dout, None)
        with torch.no_grad():
            assert checking.check_forward(own, provider.call(own)).passed


def test_rounds_fit_into_a_time():
    limited = Sampling(32, 128, 1.6).limited
    assert limited(0.01) == Sampling(32, 128, 1.6) and limited(0.1) == Sampling(3, 12)
    assert limited(10.0) == Sampling(0, LEAST_RUNS)
    assert Sampling(32, 128).limited(1e3) == Sampling(32, 128)
    with pytest.raises(ValueError, match="0 seconds for all runs; accepted: more than 0"):
        Sampling(seconds=0)
    # Calls of 1 ms, two in a round.
    found = interleave(FakeTimer(), {"a": int, "b": str}, Sampling(4, 16, 0.01))
    assert [len(samples.seconds) for samples in found.values()] == [LEAST_RUNS] * 2


def test_cases_and_providers_are_chosen_by_name():
    with pytest.raises(ValueError, match="no case has 'chess' in its line; there are masks: 4x40"):
        command.chosen("chess", None)
    cases, chosen = command.chosen("documents", [OURS])
    assert [case.mask for case in cases] == ["documents"]
    assert [provider.name for provider in chosen] == [OURS]
