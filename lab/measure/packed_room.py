"""Memory and time of the backward of packed sequences where the host has read their lengths, and
where not: `python -m lab.measure.packed_room`.

Batches of 64 sequences, most of them short, heads 16/2, causal: medians of the time, and the most
memory that PyTorch has allocated beside what the call begins with.  Gradients of both are compared
bit by bit where dS is stored in both.  Needs a GPU of the family.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.measure.providers import Inputs
from bench.measure.timer import CudaTimer, Sampling, interleave
from bench.suite import Case, ragged_lengths
from fa4_hd256 import flash_attn_varlen_func, get_backward_metadata

SEQUENCES, LONGEST = 64, (4096, 8192, 16384)
HEADS = 16, 2
SAMPLING = Sampling(warmup=8, runs=32)


def gradients(lengths: list[int], device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return two functions that compute gradients of a batch: with the lengths read, and
    without."""
    case = Case("packed room", tuple((n, n) for n in lengths), *HEADS, causal=True, packed=True)
    inputs = Inputs.random(case, device, torch.bfloat16)
    leaves = q, k, v = [tensor.requires_grad_() for tensor in inputs.leaves]
    assert inputs.cu_seqlens is not None  # of a packed case
    of_q, of_k = inputs.cu_seqlens
    known = {"read": get_backward_metadata(of_q, of_k, causal=True), "not read": None}
    found: dict[str, Callable[[], Any]] = {}
    for name, metadata in known.items():
        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, max_seqlen_q=case.seqlen_q,
            max_seqlen_k=case.seqlen_k, causal=True, backward_metadata=metadata,
        )  # fmt: skip
        found[name] = partial(torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True)
    return found


def taken(call: Callable[[], Any]) -> float:
    """GiB that a call holds at most beside what was held before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure() -> dict[str, Any]:
    """Return, by the longest sequence and whether lengths are read, ms and GiB; and whether bits
    are alike."""
    timer = CudaTimer()
    found: dict[str, Any] = {"device": timer.gpu.name}
    for longest in LONGEST:
        lengths = [queries for queries, _ in ragged_lengths(SEQUENCES, longest)]
        with timer.on_stream():
            calls = gradients(lengths, timer.device)
            results = {name: call() for name, call in calls.items()}
            held = {name: taken(call) for name, call in calls.items()}
        alike = all(map(torch.equal, *results.values()))
        del results
        samples = interleave(timer, calls, SAMPLING)
        found[f"{SEQUENCES} sequences up to {max(lengths)}, {sum(lengths)} rows"] = {
            "same bits": alike,
            **{
                name: {
                    "ms": [round(1e3 * one.quantile(share), 3) for share in (0.5, 0.2, 0.8)],
                    "GiB": round(held[name], 3),
                    "MHz": one.median_state().clock_mhz,
                }
                for name, one in samples.items()
            },
        }
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
