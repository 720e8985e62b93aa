"""Forwards whose bits do not depend on the batch: KV splits that follow its bounds alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from backward_cases import inputs
from gpus import gpu
from paged_cases import int32

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, get_scheduler_metadata
from fa4_hd256.call.division import FEWEST_KEYS, divided
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import FIXED_SPLITS, MOST_SPLITS, Options
from fa4_hd256.check import reference

#: Query heads over KV heads.
HEADS = (8, 1)
#: Keys in use of sequences of 1200: three parts and two, a part and one key, none, a few.
USED = (1200, 900, FEWEST_KEYS + 1, 0, 60)
LONGEST = 1200


def attend(tensors, used, **options):
    """Return (out, lse) of sequences whose keys have lengths in use."""
    return flash_attn_varlen_func(
        *tensors, seqused_k=int32(used, tensors[0].device), causal=True, return_lse=True, **options
    )


def of(tensors, entries):
    return tuple(tensor[list(entries)].clone() for tensor in tensors)


@pytest.mark.sampled
def test_a_sequence_has_the_same_bits_in_every_batch(use_clc, device):
    """All together, in another order, and each alone; the sink is the first part's."""
    tensors = inputs((2, LONGEST), HEADS, len(USED), device=device)
    options = {"batch_invariant": True, "learnable_sink": torch.randn(8, device=device)}
    out, lse = attend(tensors, USED, use_clc=use_clc, **options)
    order = (2, 4, 0)
    others = attend(of(tensors, order), [USED[i] for i in order], use_clc=not use_clc, **options)
    assert torch.equal(others[0], out[list(order)]) and torch.equal(others[1], lse[list(order)])
    for entry, used in enumerate(USED):
        own = of(tensors, [entry])
        alone = attend(own, [used], **options)
        assert torch.equal(alone[0], out[entry : entry + 1])
        assert torch.equal(alone[1], lse[entry : entry + 1])
        seen = (own[0], own[1][:, :used], own[2][:, :used])
        sink = options["learnable_sink"]
        found = reference.compare(*alone, seen, causal=True, learnable_sink=sink)
        assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-3, found


def test_other_parts_have_other_bits(device):
    """Bits depend on how keys are split; the test before compares something."""
    tensors = inputs((2, LONGEST), HEADS, 1, device=device)
    fixed = attend(tensors, USED[:1], batch_invariant=True)
    listed = get_scheduler_metadata(int32(USED[:1], device), 2, LONGEST, *HEADS, True)
    assert not torch.equal(fixed[0], attend(tensors, USED[:1], scheduler_metadata=listed)[0])


@pytest.mark.sampled
def test_windows_and_packed_queries(device):
    """Parts begin where a window does."""
    lengths = (3, 1, 0, 2)
    starts = int32([0, *itertools.accumulate(lengths)], device)
    used = (1200, 700, 90, 1100)
    q = torch.randn(sum(lengths), 8, 256).to(device, torch.bfloat16)
    _, k, v = inputs((1, LONGEST), HEADS, len(lengths), device=device)
    options = {"window_size": (800, 0), "batch_invariant": True, "return_lse": True}
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts, max_seqlen_q=3, seqused_k=int32(used, device), **options
    )
    for entry, (count, keys) in enumerate(zip(lengths, used, strict=True)):
        if not count:
            continue
        rows = slice(int(starts[entry]), int(starts[entry + 1]))
        own = q[rows], k[entry : entry + 1], v[entry : entry + 1]
        alone = flash_attn_varlen_func(
            *own, cu_seqlens_q=int32([0, count], device), max_seqlen_q=3,
            seqused_k=int32([keys], device), **options,
        )  # fmt: skip
        assert torch.equal(alone[0], out[rows]) and torch.equal(alone[1], lse[:, rows])
        seen = own[0][None], own[1][:, :keys], own[2][:, :keys]
        found = reference.compare(out[rows][None], lse[:, rows][None], seen, window_size=(800, 0))
        assert found.max_error <= found.tolerance, found


def one_more_tile(device):
    """Two parts of 512 keys for a window of 1023 that touches nine KV tiles of 128."""
    q, k, v = inputs((1, LONGEST), HEADS, device=device)
    out, lse = flash_attn_varlen_func(
        q, k, v, seqused_k=int32([1100], device), window_size=(1022, 0), batch_invariant=True,
        return_lse=True,
    )  # fmt: skip
    seen = q, k[:, :1100], v[:, :1100]
    found = reference.compare(out, lse, seen, window_size=(1022, 0))
    assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-3, found


@pytest.mark.sampled
def test_the_last_part_has_all_that_is_left(device):
    one_more_tile(device)


def problem(keys, queries=1, window=(None, None), batch=1):
    number = torch.zeros((), dtype=torch.bfloat16)
    q, k = (number.expand(batch, s, h, 256) for s, h in ((queries, 16), (keys, 2)))
    return Problem.describe((q, k, k), Options.check(None, False, window, 0.0))


@pytest.mark.parametrize(
    ("keys", "count", "part"),
    [(300, 1, None), (512, 1, None), (513, 2, 512), (1 << 15, 64, 512), (1 << 17, 64, 2048),
     ((1 << 17) + 1, 61, 2176)],
)  # fmt: skip
def test_parts_follow_the_bounds_alone(keys, count, part):
    for batch in (1, 7, 300):
        found = divided(problem(keys, batch=batch), FIXED_SPLITS, gpu())
        assert (found.num_splits, found.part_keys) == (count, part)
        assert found.num_splits <= MOST_SPLITS and found.problem_class.fixed_parts == (count > 1)


def test_many_queries_are_not_divided():
    found = divided(problem(1 << 17, queries=512), FIXED_SPLITS, gpu())
    assert (found.num_splits, found.part_keys) == (1, None)


def test_a_window_bounds_the_parts():
    found = divided(problem(1 << 17, window=(1023, 0)), FIXED_SPLITS, gpu())
    assert replace(found, num_splits=2, part_keys=512) == found


def test_what_is_refused(device):
    tensors = inputs((1, 600), HEADS, device=device)
    with pytest.raises(ValueError, match="num_splits is 2 with batch_invariant=True.*accepted: 0"):
        flash_attn_func(*tensors, num_splits=2, batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant must be True or False, got 1"):
        flash_attn_func(*tensors, batch_invariant=1)
    with pytest.raises(ValueError, match="num_splits is -1; accepted: 1 .none. to 64"):
        flash_attn_func(*tensors, num_splits=-1)
    packed = [tensor.squeeze(0) for tensor in tensors]
    starts = int32([0, 1], device), int32([0, 600], device)
    with pytest.raises(ValueError, match="max_seqlen_k is None with cu_seqlens_k and batch_inv"):
        flash_attn_varlen_func(
            *packed, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=1,
            batch_invariant=True,
        )  # fmt: skip
