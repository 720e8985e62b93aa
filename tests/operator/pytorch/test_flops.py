"""FLOPs that PyTorch's counter has for calls, masks included."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, masks
from fa4_hd256.call.operator_arguments import BackwardTensors, ForwardTensors
from fa4_hd256.call.options import UNBOUNDED
from fa4_hd256.ops import flops

OF_PAIR = 2 * 256


def counted(call, *tensors):
    """Count the FLOPs of the forward, and of the backward."""
    with FlopCounterMode(display=False) as forward:
        out = call(*tensors)
    with FlopCounterMode(display=False) as backward:
        out.float().sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def leaves(shape, heads=1):
    return [torch.randn(*shape, h, 256).bfloat16().requires_grad_() for h in (heads, 1, 1)]


def test_calls():
    """Tensors are fake, so that no kernel is compiled; offsets are read."""
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = leaves((1, 8))
        pairs = 8 * 9 // 2
        found = counted(lambda *t: flash_attn_func(*t, causal=True), q, k, v)
        assert found == (2 * OF_PAIR * pairs, 5 * OF_PAIR * pairs)
        # Without those of K and V.
        found = counted(lambda *t: flash_attn_func(*t, causal=True), q, k.detach(), v.detach())
        assert found == (2 * OF_PAIR * pairs, 3 * OF_PAIR * pairs)
        pairs = 3 * 4 // 2 + 5 * 6 // 2
        found = counted(lambda *t: flash_attn_varlen_func(*t, causal=True, **packed), *leaves((8,)))
        assert found == (2 * OF_PAIR * pairs, 5 * OF_PAIR * pairs)


def test_new_rows_of_a_cache(device):
    """New rows are among the keys."""
    caches = [torch.randn(2, 64, 1, 256, device=device).bfloat16() for _ in "kv"]
    q, k, v = (torch.randn(2, 1, h, 256, device=device).bfloat16() for h in (2, 1, 1))
    lengths = torch.tensor([3, 17], dtype=torch.int32, device=device)
    with FlopCounterMode(display=False) as counter:
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
    assert counter.get_total_flops() == 2 * OF_PAIR * 2 * (4 + 18)


NONE = [(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0)]


def seen(lengths, window):
    """Count the visible pairs of the dense mask."""
    queries, keys = lengths
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    left, right = (10**6 if side == UNBOUNDED else side for side in window)
    return int(((ahead >= -left) & (ahead <= right)).sum())


@pytest.mark.parametrize("window", NONE + [(3, 0), (2, 4), (0, 0), (-1, 3), (5, -2)])
@pytest.mark.parametrize("lengths", [(8, 8), (3, 11), (11, 3), (1, 5)])
def test_pairs_of_windows(lengths, window):
    assert flops._seen(*lengths, *window) == seen(lengths, window)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("lengths", [(300, 300), (130, 390), (100, 257)])
def test_pairs_of_block_masks(lengths, halves):
    """Lists by queries and those by keys agree, with tiles that end behind the last row."""
    torch.manual_seed(0)
    dense = torch.rand(2, 1, *lengths) < 0.3
    dense[:, :, : lengths[0] // 2, : lengths[1] // 2] = True
    dense[:, :, :, 200:280] = False
    mask = masks.from_dense(dense)
    q, k = (torch.empty(2, rows, 3, 256) for rows in lengths)
    steps = ForwardTensors(q, k, k, mask_steps=mask.steps(halves), mask_bits=mask.bits)
    blocks = mask.blocks[:, :, : -(-lengths[1] // 256)]
    by_keys = BackwardTensors(q, None, q, k, k, q, q)
    for tensors, lists, bits in (
        (steps, steps.mask_steps, mask.bits), (by_keys, blocks, mask.key_bits),
    ):  # fmt: skip
        assert flops._pairs(tensors, None, lists, bits) == 3 * int(dense.sum())


def test_a_mask_that_is_read_under_fake_tensors():
    """A graph that is traced under a counter: its mask is a real one."""
    mask, q = masks.sliding_window(3, 8), torch.empty(1, 8, 1, 256)
    steps = ForwardTensors(q, q, q, mask_steps=mask.steps(1), mask_bits=mask.bits)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert flops._pairs(steps, None, steps.mask_steps, mask.bits) == 1 + 2 + 3 + 5 * 4


@pytest.mark.sampled
def test_a_counter_that_is_imported_later():
    """Importing the operator does not import it, since that takes long."""
    script = (
        "import sys; from fa4_hd256 import interface; n = 'torch.utils.flop_counter';"
        "before = n in sys.modules; from torch.utils.flop_counter import flop_registry as r;"
        "import torch; print(before, torch.ops.fa4_hd256.forward in r)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split()[1:] == ["True"], done.stderr[-1000:]
