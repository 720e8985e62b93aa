"""Attention over two and four processes, each with the compiled kernels, against one process."""

from __future__ import annotations

import re
from dataclasses import replace

import context_cases
import numpy as np
import pytest
import torch
from context_cases import Case
from ranks import Failed, Pool
from torch.distributed import DistBackendError, DistNetworkError

from fa4_hd256 import masks
from fa4_hd256.integrations.context_parallel import exchange
from fa4_hd256.mask_mods import MaskMod

CAUSAL = {"causal": True}

TWO = {
    "causal, sink, gradient of LSE": Case(sink=True, lse=True, options=CAUSAL),
    "all keys": Case(batch=2),
    "zigzag, causal": Case(order="zigzag", batch=2, options=CAUSAL),
    "zigzag, window": Case(order="zigzag", options={"window_size": (40, 9)}),
    "softcap, scale": Case(options={**CAUSAL, "softcap": 5.0, "softmax_scale": 0.1}),
    "documents": Case(documents=(0, 17, 17, 90, 128), options=CAUSAL),
    "zigzag, documents, sink": Case(
        order="zigzag", documents=(0, 5, 40, 100, 128), sink=True, options=CAUSAL
    ),
    "gathered, zigzag, causal": Case(
        "all_gather_attention", "zigzag", batch=2, sink=True, lse=True, options=CAUSAL
    ),
    "gathered, documents, window": Case(
        "all_gather_attention", documents=(0, 5, 40, 100, 128), options={"window_size": (30, 9)}
    ),
    "heads, zigzag": Case(
        "ulysses_attention", "zigzag", heads=(4, 2), sink=True, lse=True, options=CAUSAL
    ),
    # Rows are so many that one head of a group takes the kernel that two take.
    "heads, one of keys, documents": Case(
        "ulysses_attention", documents=(0, 5, 40, 110, 128), options=CAUSAL
    ),
    "causal, ALiBi, sink, gradient of LSE": Case(
        batch=2, sink=True, lse=True, score_mod="alibi", options=CAUSAL
    ),
    "zigzag, window, by place": Case(
        order="zigzag", batch=2, score_mod="places", options={"window_size": (40, 9)}
    ),
    "zigzag, documents, by place": Case(
        order="zigzag", documents=(0, 5, 40, 40, 100, 128), score_mod="places", options=CAUSAL
    ),
    "gathered, zigzag, by place": Case(
        "all_gather_attention", "zigzag", batch=2, score_mod="places"
    ),
    "heads, by place": Case(
        "ulysses_attention",
        heads=(4, 2),
        documents=(0, 5, 40, 40, 100, 128),
        score_mod="places",
        options=CAUSAL,
    ),
    "prefix": Case(batch=2, mask="prefix", sink=True, lse=True),
    "zigzag, images on a window, ALiBi": Case(
        order="zigzag", mask="images on a window", score_mod="alibi"
    ),
    "window and first tokens, softcap": Case(
        mask="window and first tokens", options={"softcap": 5.0}
    ),
    "zigzag, a BlockMask": Case(order="zigzag", mask="BlockMask"),
    "zigzag, whole tiles, images on a window": Case(
        order="zigzag", rows=512, mask="images on a window"
    ),
    "gathered, zigzag, of heads": Case("all_gather_attention", "zigzag", mask="of heads"),
    "gathered, prefix": Case("all_gather_attention", batch=2, mask="prefix"),
    "heads, of heads": Case("ulysses_attention", heads=(2, 2), mask="of heads"),
    "heads, zigzag, a BlockMask": Case("ulysses_attention", "zigzag", mask="BlockMask"),
    # Tiles of the parts are not tiles of the whole; the end cuts the last.
    "mask_mod, sink, gradient of LSE": Case(
        rows=300, batch=2, mask="lists", mask_mod=True, sink=True, lse=True
    ),
    "zigzag, mask_mod, ALiBi": Case(
        order="zigzag", rows=304, mask="lists", mask_mod=True, score_mod="alibi"
    ),
    "zigzag, whole tiles, mask_mod, softcap": Case(
        order="zigzag", rows=512, mask="lists", mask_mod=True, options={"softcap": 5.0}
    ),
    "gathered, zigzag, mask_mod beside a mask with bits": Case(
        "all_gather_attention", "zigzag", mask="of heads", mask_mod=True
    ),
    "gathered, mask_mod beside a BlockMask, by place": Case(
        "all_gather_attention", mask="BlockMask", mask_mod=True, score_mod="places"
    ),
    "heads, zigzag, mask_mod": Case(
        "ulysses_attention",
        "zigzag",
        rows=300,
        batch=2,
        heads=(2, 2),
        mask="lists",
        mask_mod=True,
        sink=True,
    ),
}
#: Cases of two ranks that four have, too.
OF_BOTH = (
    "all keys", "zigzag, window", "causal, ALiBi, sink, gradient of LSE", "softcap, scale",
    "zigzag, documents, sink", "zigzag, documents, by place", "prefix",
    "zigzag, images on a window, ALiBi", "window and first tokens, softcap",
    "zigzag, mask_mod, ALiBi", "gathered, zigzag, of heads",
    "gathered, mask_mod beside a BlockMask, by place", "heads, zigzag",
)  # fmt: skip
#: Every kind of mask and every way. The kernels are those of `TWO`.
FOUR = {
    **{name: TWO[name] for name in OF_BOTH},
    "zigzag, causal": Case(order="zigzag", options=CAUSAL),
    "window": Case(options={"window_size": (40, 9)}),
    "zigzag, documents by tiles": Case(order="zigzag", mask="documents"),
    "zigzag, of heads": Case(order="zigzag", mask="of heads"),
    "a BlockMask": Case(mask="BlockMask"),
    "mask_mod, sink, gradient of LSE": Case(
        rows=304, batch=2, mask="lists", mask_mod=True, sink=True, lse=True
    ),
    "gathered, causal": Case("all_gather_attention", options=CAUSAL),
    "heads, documents, by place": Case(
        "ulysses_attention",
        heads=(4, 4),
        documents=(0, 5, 40, 40, 100, 128),
        score_mod="places",
        options=CAUSAL,
    ),
    "heads, zigzag, a BlockMask": Case(
        "ulysses_attention", "zigzag", heads=(4, 2), mask="BlockMask"
    ),
    "heads, mask_mod beside a BlockMask": Case(
        "ulysses_attention", batch=2, heads=(4, 2), mask="BlockMask", mask_mod=True, sink=True
    ),
}


#: Cases of two ranks that `make test` runs: one of each way, and one of a mask.
TWO_SAMPLED = {
    "causal, sink, gradient of LSE", "zigzag, causal", "gathered, zigzag, causal", "heads, zigzag",
    "prefix",
}  # fmt: skip


def sampled(names, kept):
    return [
        name if name in kept else pytest.param(name, marks=pytest.mark.sampled) for name in names
    ]


@pytest.fixture(scope="module")
def pools(request):
    """Return a function from the number of ranks to their pool."""
    device = request.config.getoption("--device")
    made: dict[int, Pool] = {}

    def pool(count):
        if device == "cuda":
            if torch.cuda.device_count() < count:
                pytest.skip(f"needs {count} GPUs")
        if count not in made:
            made[count] = Pool(count, device)
        return made[count]

    yield pool
    for started in made.values():
        with started:
            pass


def results(pool, case, device):
    found = pool.run(context_cases.run, case, device)
    failed = [answer for answer in found if not isinstance(answer, dict)]
    assert not failed, failed[0].trace if failed[0] else "a rank ended"
    return found


def check(pool, case, device):
    found = results(pool, case, device)
    worst = context_cases.errors(case, found)
    assert {"out", "lse", "q", "k", "v"} | ({"sink"} if case.sink else set()) == set(worst)
    assert all(ratio <= 1 for ratio in worst.values()), worst
    if case.way == "ulysses_attention":
        check_bits(found, pool.run(context_cases.run_alone, case, device)[0], case)


def check_bits(found, alone, case):
    """Heads over ranks are bitwise a call of one process, but for dK and dV of key/value heads that
    are sent to several ranks, which sum what they have rounded."""
    names = {"out", "lse", "q"}
    if case.heads[1] % len(found) == 0:
        names |= {"k", "v"}
    for of_rank in found:
        differ = [name for name in names if not np.array_equal(of_rank[name], alone[name])]
        assert not differ
    if case.sink:
        own = [of_rank["sink"].reshape(len(found), -1)[rank] for rank, of_rank in enumerate(found)]
        assert np.array_equal(np.concatenate(own), alone["sink"])


@pytest.mark.parametrize("name", sampled(TWO, TWO_SAMPLED))
def test_two(pools, device, name):
    check(pools(2), TWO[name], device)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.sampled
def test_four(pools, device, name):
    check(pools(4), FOUR[name], device)


@pytest.mark.parametrize("name", ["zigzag, causal", "zigzag, window"])
@pytest.mark.sampled("zigzag, causal")
def test_the_same_bits_again(pools, device, name):
    once, again = (results(pools(2), TWO[name], device) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_backwards_of_heads_over_ranks(pools, device):
    """A retained graph allows a second backward, as of any function; else all ranks have an
    error."""
    for answer in pools(2).run(context_cases.backwards_of_heads, device):
        assert not isinstance(answer, Failed), answer.trace
        again, without_graph, raised = answer
        assert again and without_graph and "backward through the graph a second time" in raised


@pytest.mark.simulator
@pytest.mark.parametrize("rows", [304, 512])
@pytest.mark.sampled
def test_parts_have_the_same_kernels(pools, rows):
    """Parts in both orders lie elsewhere, of spans that tiles divide, and of others."""
    pool, case = pools(2), Case(rows=rows, mask="lists", mask_mod=True)
    pool.run(context_cases.kernels_got, case)
    assert pool.run(context_cases.kernels_got, replace(case, order="zigzag")) == [0, 0]


@pytest.mark.simulator
@pytest.mark.parametrize(
    "function, expected",
    [
        (context_cases.other_rows, r"ValueError.*calls differ.*\[1, 16, 2, 256\]"),
        (context_cases.other_options, r"ValueError.*calls differ.*window \(None, None\)"),
        (context_cases.other_mask_mod, r"calls differ.*mask_mod seen_by.*'torch.int32', 1, 32\]"),
    ],
)
def test_calls_that_differ_are_an_error_on_all(pools, function, expected):
    for answer in pools(2).run(function):
        assert isinstance(answer, Failed)
        assert re.search(expected, f"{answer.kind}: {answer.text}", re.S), answer


@pytest.mark.simulator
def test_a_call_that_one_refuses_is_an_error_on_all(pools):
    other, own = pools(2).run(context_cases.bad_call)
    assert own.kind == "ValueError" and "softcap" in own.text
    assert other.kind == "RuntimeError" and re.search("rank 1 .* refused .*softcap", other.text)


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (context_cases.other_dtype, "kv", "k has dtype torch.float8_e4m3fn; accepted over ranks: "),
        (context_cases.other_dtype, "v", "v has dtype torch.float8_e4m3fn; accepted over ranks: "),
        (context_cases.no_tensor, None, "v must be a torch.Tensor, got list"),
        (context_cases.no_tensor, (0, 64), "v must be a torch.Tensor, got list"),
    ],
    ids=["k and v in e4m3", "v in e4m3", "a list", "a list, packed"],
)
def test_tensors_that_one_refuses_are_an_error_on_all(pools, function, given, expected):
    other, own = pools(2).run(function, given)
    assert own.kind == "TypeError" and re.search(expected, own.text), own
    assert other.kind == "RuntimeError" and re.search(f"rank 1 .*TypeError: {expected}", other.text)


@pytest.mark.parametrize(
    ("error", "is_of_transport"),
    [
        (RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (DistNetworkError("the client socket has timed out"), True),
        (DistBackendError("NCCL error: ncclRemoteError: remote process exited"), True),
        (DistBackendError("NCCL error: ncclInvalidUsage: mixed types"), False),
        (RuntimeError("Invalid scalar type"), False),
    ],
)
def test_a_lost_rank_is_told_from_a_wrong_call(error, is_of_transport):
    with pytest.raises(RuntimeError) as found, exchange.explaining_transport_errors(0, 2):
        raise error
    assert (found.value is not error) == is_of_transport
    assert ("heard nothing of another rank" in str(found.value)) == is_of_transport


@pytest.mark.simulator
def test_refused(pools):
    alibi, seen = context_cases.score_mod_on("alibi", "cpu"), context_cases.mask_mod_on("cpu")
    cases = {
        "order is 'striped'": {"order": "striped"},
        "32 rows of q and 16 of k": {"keys": 16},
        "3 heads and 1 key/value heads do not divide among 2": {
            "way": "ulysses_attention", "heads": (3, 1),
        },
        "k has dtype torch.float8_e4m3fn; accepted over ranks: torch.bfloat16": {
            "kv_dtype": torch.float8_e4m3fn,
        },
        "k has dtype torch.float8_e4m3fn; accepted over": {
            "kv_dtype": torch.float8_e4m3fn, "way": "all_gather_attention",
        },
        "k has dtype torch.float8_e4m3fn; accepted": {
            "kv_dtype": torch.float8_e4m3fn, "way": "ulysses_attention",
        },
        "rising offsets from 0 to 64": {"cu_seqlens": (0, 40, 30, 64)},
        "cu_seqlens is a tuple": {"cu_seqlens": (0, 1.5, 64)},
        "unexpected keyword|got an unexpected": {"way": "all_gather_attention", "dropout_p": 0.1},
        "config must be": {"backward_config": 3},
        "a ScoreMod of": {"score_mod": max},
        "return_lse must be True or False, got 1": {"return_lse": 1},
        "with a score_mod": {"score_mod": alibi, "softcap": 1.0},
        "block_mask is of 32 queries and 32 keys; accepted: 64": {
            "block_mask": masks.prefix_lm(3, 32)
        },
        "block_mask is of batch 1 and 3 heads": {
            "block_mask": masks.from_dense(torch.ones(1, 3, 64, 64, dtype=torch.bool))
        },
        "bound the keys, .*, with block_mask": {
            "block_mask": masks.prefix_lm(3, 64), "causal": True,
        },
        "block_mask with cu_seqlens": {
            "block_mask": masks.prefix_lm(3, 64), "cu_seqlens": (0, 40, 64),
        },
        "block_mask is int; accepted": {"block_mask": 3},
        "mask_mod is given without block_mask": {"mask_mod": seen},
        "mask_mod is builtin_function_or_method; accepted: a MaskMod": {
            "block_mask": masks.prefix_lm(3, 64), "mask_mod": max,
        },
        "mask_mod with cu_seqlens; .* beside a mask_mod that is True inside documents": {
            "block_mask": masks.prefix_lm(3, 64), "mask_mod": seen, "cu_seqlens": (0, 40, 64),
        },
        # The traced kernel of a part refuses this.
        "a mask_mod returns str; accepted: a Boolean of CuTe DSL": {
            "way": "all_gather_attention", "block_mask": masks.prefix_lm(3, 64),
            "mask_mod": MaskMod.of(context_cases.no_truth), "alone": True,
        },
        "has no bits; accepted: .* or mask_mod, too": {"block_mask": masks.prefix_lm(3, 64).lists},
    }  # fmt: skip
    for found in pools(2).run(context_cases.refusals, list(cases.values())):
        assert not isinstance(found, Failed), found
        for expected, (kind, text) in zip(cases, found, strict=True):
            assert kind in ("ValueError", "TypeError") and re.search(expected, text), (kind, text)
