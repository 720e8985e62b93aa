"""Forwards without a mask whose last wave of tiles is a launch by itself, in KV splits."""

from __future__ import annotations

import pytest
import torch
from backward_cases import accurate as accurate_gradients
from backward_cases import gradients, inputs
from gpus import gpu
from paged_cases import accurate
from replays import forget, simulated
from test_split_keys import describe

import sm100_sim
from fa4_hd256 import flash_attn_func
from fa4_hd256.call.division import last_wave
from fa4_hd256.call.options import BY_RULE, FIXED_SPLITS

pytestmark = pytest.mark.architecture("sm_100a")

#: Six tiles of 256 queries, the last of 230, for 4 pairs of SMs: a wave and a half. Twenty steps.
QUERIES, KEYS, PAIRS = 3 * 256 - 26, 20 * 128 - 5, 4


# A tile is 256 rows, a step 128 keys. A split costs a step for every 4500 rows, and four for the
# launch, and must save two.
@pytest.mark.parametrize(
    ("lengths", "options", "pairs", "found"),
    [
        # 1,024 tiles, 14 waves: the last 14 blocks of 8 heads in three half waves, or the last 7 of
        # 16. The last 4 of 32 are 128 tiles, which take four half waves.
        ((32768, 32768), {"heads": (8, 8)}, 76, (114 * 256, 2)),
        ((16384, 16384), {"heads": (8, 8), "batch": 2}, 76, (57 * 256, 2)),
        ((8192, 8192), {"heads": (8, 8), "batch": 4}, 76, None),
        # Half a wave has too few steps.
        ((32768, 4096), {"heads": (8, 8)}, 76, None),
        # 13.8 waves of a B200; as many tiles as two waves hold; less than one wave (`splits_for`).
        ((32768, 32768), {"heads": (8, 8)}, 74, None),
        ((2048, 32768), {"heads": (19, 19)}, 76, None),
        ((1024, 32768), {"heads": (8, 8)}, 74, None),
        # One block per head: there is none to be left for the last wave.
        ((256, 32768), {"heads": (90, 90)}, 74, None),
        # Heads that share tiles of 32 queries: 75 tiles, one of them left.
        ((75 * 32, 32768), {"heads": (8, 1)}, 74, (74 * 32, 8)),
    ],
)  # fmt: skip
def test_the_rule(lengths, options, pairs, found):
    assert last_wave(describe(lengths, **options), BY_RULE, gpu(pairs)) == found


def test_what_is_divided_makes_up_the_whole():
    problem = describe((32768, 32768), (8, 8))
    first, rest = last_wave(problem, BY_RULE, gpu(76)).problems(problem)
    assert (first.num_splits, rest.num_splits) == (1, 2)
    assert first.q_shape[1] + rest.q_shape[1] == 32768
    assert (first.max_seqlen_q, rest.max_seqlen_q) == (first.q_shape[1], rest.q_shape[1])
    assert first.num_tiles + rest.num_tiles == problem.num_tiles


@pytest.mark.parametrize("num_splits", [FIXED_SPLITS, 1, 2])
def test_nothing_is_where_a_number_is_given(num_splits):
    assert last_wave(describe((32768, 32768), (8, 8)), num_splits, gpu(76)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"window": (None, 0)},
        {"window": (4096, None)},
        {"seqused_k": torch.tensor([32768], dtype=torch.int32)},
        {"seqused_q": torch.tensor([32768], dtype=torch.int32)},
    ],
)
def test_nothing_is_where_tiles_differ(options):
    assert last_wave(describe((32768, 32768), (8, 8), **options), BY_RULE, gpu(76)) is None


@pytest.fixture
def few_pairs(monkeypatch):
    """The simulated GPU has `PAIRS`."""
    monkeypatch.setenv("SM100_SIM_DEVICE", f"b200:{2 * PAIRS}")


def tiles_launched(call):
    """Return (what the call returned, CTA pairs of each of its forwards)."""
    before = sm100_sim.last_reports()
    found = call()
    new = [report for report in sm100_sim.last_reports() if report not in before]
    forwards = [report.grid[0] // 2 for report in new if "ForwardKernel" in report.kernel]
    assert len(new) == len(forwards) + (len(forwards) > 1), "parts are combined once"
    return found, forwards


@pytest.mark.simulator
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "CLC"])
@pytest.mark.sampled
def test_against_the_reference(few_pairs, use_clc):
    tensors, sink = inputs((QUERIES, KEYS), (2, 2)), torch.randn(2)
    options = {"learnable_sink": sink, "softcap": 20.0}

    def attend(**other):
        return flash_attn_func(*tensors, **options, **other, use_clc=use_clc, return_lse=True)

    (out, lse), forwards = tiles_launched(attend)
    # Two tiles, in two parts each; the dynamic scheduler's grid is one of tiles.
    assert forwards == [4, 4]
    assert out.is_contiguous() and lse.is_contiguous()
    accurate(out, lse, tensors, **options)
    (whole, _), forwards = tiles_launched(lambda: attend(num_splits=1))
    assert forwards == [6 if use_clc else PAIRS]
    # The first wave's rows are the same bits; the others are summed in another order.
    assert torch.equal(out[:, :512], whole[:, :512]) and not torch.equal(out, whole)


@pytest.mark.simulator
@pytest.mark.sampled
def test_gradients(few_pairs):
    tensors = inputs((QUERIES, KEYS), (2, 2))
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(1, 2, QUERIES)
    accurate_gradients(gradients(tensors, dout, dlse), tensors, dout, dlse)


@pytest.mark.simulator
def test_sequences_of_a_batch_and_a_result_that_is_given(few_pairs):
    """q and out with strides of their own, as parts of wider tensors have them."""
    tensors = inputs((QUERIES, KEYS), (1, 1), batch=2)
    wide = torch.zeros(2, QUERIES, 3, 256, dtype=torch.bfloat16)
    wide[:, :, 1:2] = tensors[0]
    given = torch.full_like(wide, 7.0)
    (out, lse), forwards = tiles_launched(
        lambda: flash_attn_func(wide[:, :, 1:2], *tensors[1:], out=given[:, :, 2:], return_lse=True)
    )
    assert forwards == [4, 4] and out.data_ptr() == given[:, :, 2:].data_ptr()
    assert torch.equal(given[:, :, :2], torch.full_like(given[:, :, :2], 7.0))
    accurate(out.contiguous(), lse, tensors)


@pytest.mark.simulator
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_repeated_call_equals_one_that_was_not(few_pairs, monkeypatch, return_lse):
    launched = simulated(monkeypatch)
    flash_attn_func(*inputs((QUERIES, KEYS), (2, 2)), return_lse=return_lse)
    tensors = [torch.randn_like(tensor) for tensor in inputs((QUERIES, KEYS), (2, 2))]
    before = len(launched)
    found = flash_attn_func(*tensors, return_lse=return_lse)
    assert len(launched) == before + 3
    forget()
    expected = flash_attn_func(*tensors, return_lse=return_lse)
    assert len(launched) == before + 3
    pairs = zip(found, expected) if return_lse else [(found, expected)]
    assert all(torch.equal(one, other) for one, other in pairs)
    forget()
