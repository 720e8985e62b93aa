"""Files of the package that a call goes through which finds its plan: their number."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from paged_cases import int32

import fa4_hd256
from bench.measure import host
from fa4_hd256 import flash_attn_func, flash_attn_with_kvcache

pytestmark = pytest.mark.simulator

ROOT = Path(fa4_hd256.__file__).parent


def files_of(call):
    """Paths of the package's files whose functions a call runs, in any thread."""
    seen = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in path.parents:
            seen.add(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def normal(*shape, grad=False):
    return torch.randn(shape).bfloat16().requires_grad_(grad)


def forward():
    q, k, v = (normal(1, 4, 2, 256) for _ in "qkv")
    return lambda: flash_attn_func(q, k, v, causal=True)


def backward():
    q, k, v = (normal(1, 4, 2, 256, grad=True) for _ in "qkv")
    out = flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def new_rows():
    caches, given = [normal(4, 16, 2, 256) for _ in "kv"], [normal(1, 1, 2, 256) for _ in "qkv"]
    options = {"cache_seqlens": int32([3]), "page_table": int32([[0, 1]])}
    return lambda: flash_attn_with_kvcache(given[0], *caches, *given[1:], **options)


@pytest.mark.parametrize(
    ("make", "most"),
    [(forward, 8), (backward, 9), (new_rows, 12)],
    ids=["forward", "backward", "new rows"],
)
def test_a_call_that_finds_its_plan(make, most):
    with host.stand_in():
        call = make()
        for _ in range(3):
            call()
        found = files_of(call)
    assert {"plans.py", "run/execute.py", "run/packing.py"} <= found
    assert len(found) <= most, sorted(found)
