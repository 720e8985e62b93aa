"""Ranks of `ranks.Pool` that fail inside calls over ranks, and what the others have of it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fa4_hd256.integrations import context_parallel
from fa4_hd256.integrations.context_parallel import gathered, heads, local, ring
from fa4_hd256.integrations.context_parallel.exchange import Ranks
from fa4_hd256.ops import autograd

#: Seconds for which ranks wait for one another; and for which GPUs do, over NCCL.
PATIENCE, GPU_PATIENCE = 300.0, 20.0


class Planned(Exception):
    """Error that a rank raises here."""


class Met(NamedTuple):
    """Result of a call: "" for none, what it raised, when by the machine's clock."""

    kind: str
    text: str
    when: float


def met(call: Callable[[], Any]) -> Met:
    try:
        call()
    except Exception as error:
        return Met(type(error).__name__, str(error), time.monotonic())
    return Met("", "", time.monotonic())


#: Failing launches by way and whether it is in the backward: a name of a module.
LAUNCHES: dict[tuple[str, bool], tuple[Any, str]] = {
    ("ring_attention", False): (local, "attend"),
    ("ring_attention", True): (ring, "add_gradients"),
    ("all_gather_attention", False): (local, "attend"),
    ("all_gather_attention", True): (gathered, "add_gradients"),
    ("ulysses_attention", False): (heads, "attend"),
    ("ulysses_attention", True): (autograd, "call_backward"),
}


def _failing(way: str, in_backward: bool, launches: int) -> Any:
    """Launches from this number on raise."""
    module, name = LAUNCHES[way, in_backward]
    right, seen = getattr(module, name), []

    def launch(*given: Any, **options: Any) -> Any:
        if len(seen) == launches:
            raise Planned("out of memory, say")
        seen.append(name)
        return right(*given, **options)

    return mock.patch.object(module, name, launch)


def _step(way: str, group: Any, device: str = "cpu") -> None:
    """Forward and backward."""
    q, k, v = (
        torch.randn(1, 32, heads, 256, device=device).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    )
    getattr(context_parallel, way)(q, k, v, group=group).sum().backward()


def raises_inside(
    rank: int, failing: int, way: str, in_backward: bool, launches: int
) -> tuple[list[Met], bool]:
    """Run three steps over a group of all ranks, one rank failing in a launch of the first one.
    Return (their results, whether the group itself still works)."""
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    found = _three_steps(way, group, "cpu", _failing(way, in_backward, launches), rank == failing)
    counted = torch.ones(1)
    dist.all_reduce(counted, group=group)
    return found, int(counted) == dist.get_world_size()


def _three_steps(way: str, group: Any, device: str, failing: Any, fails: bool) -> list[Met]:
    """Run three steps and return their results; the launches of the first fail on a rank that
    fails."""
    _step(way, group, device)  # so that no rank compiles when one fails
    with failing if fails else contextlib.nullcontext():
        found = [met(lambda: _step(way, group, device))]
    return found + [met(lambda: _step(way, group, device)) for _ in range(2)]


def raises_inside_on_gpu(rank: int, failing: int, way: str, in_backward: bool) -> list[Met]:
    """Run the three steps of `raises_inside` over NCCL; no rank waits for its GPU."""
    group = dist.new_group(timeout=timedelta(seconds=GPU_PATIENCE))
    launches = _failing(way, in_backward, 0)
    return _three_steps(way, group, "cuda", launches, rank == failing)


def checkpointed(rank: int, way: str, ends_early: bool) -> list[str]:
    """Return how results and gradients of checkpoints differ from those without, twice with
    recomputation that PyTorch ends by an exception, and once with reentrant autograd. ends_early:
    nothing else is saved behind the attention."""
    torch.manual_seed(rank)
    given = [torch.randn(1, 32, heads, 256).bfloat16() for heads in (4, 2, 2)]

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = getattr(context_parallel, way)(q, k, v)
        return out if ends_early else out.sin()

    def step(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        out = attend(*leaves)
        out.float().square().sum().backward()
        return [out, *[leaf.grad for leaf in leaves]]

    expected, differ = step(layer), []
    for is_reentrant in (False, False, True):
        found = step(functools.partial(checkpoint, layer, use_reentrant=is_reentrant))
        names = zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
        differ += [f"{name} {is_reentrant}" for name, f, e in names if not torch.equal(f, e)]
    return differ


def waits_for_its_gpu(rank: int) -> Met:
    """Wait for the GPU; return the result."""
    return met(torch.cuda.synchronize)


def dies(rank: int) -> Met:
    """Rank 1 ends before its first call."""
    if rank == 1:
        os._exit(3)
    return met(lambda: _step("ring_attention", dist.group.WORLD))


def dies_inside(rank: int, failing: int, way: str, in_backward: bool) -> Met:
    """One rank ends when it is to exchange tensors, in its call or in the backward of it."""

    def end(*given: Any) -> None:
        os._exit(3)

    def prepare() -> None:
        if rank == failing:
            for name in ("start", "gather", "exchange"):
                setattr(Ranks, name, end)

    def step() -> None:
        q, k = (torch.randn(1, 32, heads, 256).bfloat16().requires_grad_() for heads in (4, 2))
        if not in_backward:
            prepare()
        out = getattr(context_parallel, way)(q, k, k)
        prepare()
        out.sum().backward()

    return met(step)
