"""Attention of one sequence over several GPUs, in the process of each.

Every rank runs the same calls in the same order; a run's time is that of the slowest rank, by CUDA
events from a barrier on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.suite import FORWARD
from fa4_hd256 import flash_attn_func
from fa4_hd256.integrations import context_parallel, sdpa
from fa4_hd256.integrations.context_parallel import exchange, local, ring
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.measure.rank_processes import ONE_GPU, Times


@dataclass(frozen=True)
class RanksCase:
    """One sequence in bf16. rows: of all ranks together."""

    rows: int
    heads: int
    heads_kv: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"1 x {self.rows}, {self.heads}/{self.heads_kv}, {mask}"

    @property
    def order(self) -> str:
        """Return the order in which ranks have equal work."""
        return "zigzag" if self.causal else "contiguous"

    def flop(self, direction: str) -> float:
        """Return the FLOP of visible pairs; the backward has 2.5 times the forward's."""
        pairs = self.rows * (self.rows + 1) // 2 if self.causal else self.rows**2
        return 4.0 * HEAD_DIM * self.heads * pairs * (1.0 if direction == FORWARD else 2.5)

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """q, k, v and the gradient of the result, the whole sequence's, the same on all ranks."""
        generator = torch.Generator(device).manual_seed(7)
        return [
            torch.randn(
                1, self.rows, heads, HEAD_DIM, generator=generator, device=device,
                dtype=torch.bfloat16,
            )
            for heads in (self.heads, self.heads_kv, self.heads_kv, self.heads)
        ]  # fmt: skip


#: A function that runs a forward, its inputs, and the gradient of its result.
_Prepared = tuple[Callable[[], torch.Tensor], Sequence[torch.Tensor], torch.Tensor]
_Prepare = Callable[[RanksCase, torch.device], contextlib.AbstractContextManager[_Prepared]]


@contextlib.contextmanager
def _whole(case: RanksCase, device: torch.device) -> Iterator[_Prepared]:
    """Each rank by itself attends to the whole sequence."""
    *inputs, dout = case.tensors(device)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    whole: Callable[..., Any] = flash_attn_func
    yield partial(whole, *leaves, causal=case.causal), leaves, dout


@contextlib.contextmanager
def _ours(
    case: RanksCase, device: torch.device, way: str = "ring_attention", **options: Any
) -> Iterator[_Prepared]:
    """A function of `fa4_hd256.integrations.context_parallel`."""
    *inputs, dout = (
        context_parallel.shard(tensor, order=case.order) for tensor in case.tensors(device)
    )
    leaves = [tensor.requires_grad_() for tensor in inputs]
    call = getattr(context_parallel, way)
    yield partial(call, *leaves, causal=case.causal, order=case.order, **options), leaves, dout


@contextlib.contextmanager
def _kernels_alone(case: RanksCase, device: torch.device) -> Iterator[_Prepared]:
    """The ring with a copy on the GPU in the place of each transfer, of random numbers."""
    stored: dict[Any, torch.Tensor] = {}

    def copied(
        self: Any, sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> exchange.Transfer:  # fmt: skip
        for room, _ in receives:
            what = room.shape, room.dtype
            if what not in stored:
                stored[what] = torch.randn(room.shape, dtype=room.dtype, device=device)
            room.copy_(stored[what])
        return exchange.Transfer()

    with mock.patch.object(exchange.Ranks, "start", copied), _ours(case, device) as prepared:
        yield prepared


#: Begin and end of what `_waits` times in a run.
_waited: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []


@contextlib.contextmanager
def _waits(case: RanksCase, device: torch.device) -> Iterator[_Prepared]:
    """The ring, with the time counted that its stream waits for transfers."""
    right = exchange.Transfer.wait

    def wait(self: exchange.Transfer) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        right(self)
        end.record()
        _waited.append((begin, end))

    with mock.patch.object(exchange.Transfer, "wait", wait), _ours(case, device) as prepared:
        yield prepared


@contextlib.contextmanager
def _transfers_alone(case: RanksCase, device: torch.device) -> Iterator[_Prepared]:
    """The ring without its kernels."""

    def nothing(*given: Any) -> None:
        pass

    with (
        mock.patch.object(ring, "add_gradients", nothing),
        mock.patch.object(local.Attended, "add", nothing),
        _ours(case, device) as prepared,
    ):
        yield prepared


@contextlib.contextmanager
def _pytorch(
    case: RanksCase, device: torch.device, backend: SDPBackend, is_ours: bool = False
) -> Iterator[_Prepared]:
    """PyTorch's context_parallel around SDPA; is_ours: over this project's SDPA adapter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as experimental
    from torch.nn import attention

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    experimental.set_rotate_method("alltoall")
    buffers = [tensor.transpose(1, 2).contiguous() for tensor in case.tensors(device)]
    if is_ours:
        attention.activate_flash_attention_impl(sdpa.register())
    try:
        with (
            mock.patch.object(experimental._cp_options, "enable_load_balance", case.causal),
            sdpa_kernel(backend),
            experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4),
        ):
            *inputs, dout = (buffer.clone() for buffer in buffers)
            leaves = [tensor.requires_grad_() for tensor in inputs]
            attend: Callable[..., Any] = F.scaled_dot_product_attention
            grouped = case.heads != case.heads_kv
            call = partial(attend, *leaves, is_causal=case.causal, enable_gqa=grouped)
            yield call, leaves, dout
    finally:
        if is_ours:
            attention.restore_flash_attention_impl()


RING = "ring"
KERNELS, TRANSFERS = "ring, kernels alone", "ring, transfers alone"
WAITS = "ring, waits for transfers"

#: Timed calls by name: processes get names.
WAYS: dict[str, _Prepare] = {
    ONE_GPU: _whole,
    RING: _ours,
    KERNELS: _kernels_alone,
    TRANSFERS: _transfers_alone,
    WAITS: _waits,
    "ring, static scheduler": partial(_ours, use_clc=False),
    "gathered keys": partial(_ours, way="all_gather_attention"),
    "heads over ranks": partial(_ours, way="ulysses_attention"),
    "PyTorch over ours": partial(_pytorch, backend=SDPBackend.FLASH_ATTENTION, is_ours=True),
    "PyTorch over cuDNN": partial(_pytorch, backend=SDPBackend.CUDNN_ATTENTION),
    "PyTorch over FlashAttention-2": partial(_pytorch, backend=SDPBackend.FLASH_ATTENTION),
}


Job = tuple[RanksCase, str, str]


def timed(job: Job, sampling: tuple[int, int]) -> Times:
    """Time a rank's process for (case, direction, way). sampling: runs before, runs that count."""
    case, direction, way = job
    device = torch.device("cuda", torch.cuda.current_device())
    with WAYS[way](case, device) as (call, leaves, dout):
        if direction == FORWARD:
            with torch.no_grad():
                return sampled(call, sampling, device)
        out = call()
        gradients = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        return sampled(gradients, sampling, device)


def sampled(call: Callable[[], Any], sampling: tuple[int, int], device: torch.device) -> Times:
    """Return the times of runs in milliseconds, each the slowest rank's: whole, or what one puts
    into `_waited`."""
    warmup, runs = sampling
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = torch.zeros(runs, dtype=torch.float64)
    for run in range(-warmup, runs):
        _waited.clear()
        dist.barrier()
        begin.record()
        call()
        end.record()
        end.synchronize()
        if run >= 0:
            found[run] = sum(one.elapsed_time(other) for one, other in _waited or [(begin, end)])
    _waited.clear()
    slowest = found.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return tuple(slowest.tolist())
