"""Heads divided among ranks (Ulysses): during attention each rank has some heads of all rows.

Ranks exchange rows of all heads for all rows of some heads before attention, and back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...kernels.functions.kernel_functions import ScoreOrigin
from ...private_torch import keeps_graph
from .exchange import Ranks
from .gathered import in_sequence_order, split_by_rank
from .local import Settings, attend
from .spans import Rows, spans_by_rank


class _Exchange(torch.autograd.Function):
    """The exchange `there`, whose gradients are exchanged by `back`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        there: Callable,
        back: Callable,
        ranks: Ranks,
        division: Sequence[Rows],
    ) -> torch.Tensor:
        ctx.back, ctx.division = back, (ranks, division)
        return there(tensor, ranks, division)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(gradient, *ctx.division), None, None, None, None


def to_heads(tensor: torch.Tensor, ranks: Ranks, division: Sequence[Rows]) -> torch.Tensor:
    """Return (batch, all rows, heads / ranks, ...), in the sequence's order; differentiable."""
    return _Exchange.apply(tensor, _by_heads, _by_rows, ranks, division)


def to_rows(tensor: torch.Tensor, ranks: Ranks, division: Sequence[Rows]) -> torch.Tensor:
    return _Exchange.apply(tensor, _by_rows, _by_heads, ranks, division)


def _by_heads(tensor: torch.Tensor, ranks: Ranks, division: Sequence[Rows]) -> torch.Tensor:
    by_rank = torch.stack(tensor.chunk(ranks.count, dim=2))
    return in_sequence_order(ranks.exchange(by_rank), division)


def _by_rows(tensor: torch.Tensor, ranks: Ranks, division: Sequence[Rows]) -> torch.Tensor:
    return torch.cat([*ranks.exchange(split_by_rank(tensor, division))], dim=2)


def _origin(head: int, device: torch.device) -> torch.Tensor:
    fields = ScoreOrigin._fields
    origin = torch.zeros(len(fields), dtype=torch.int32, device=device)
    # Filled in place: a copy from the host would wait for the device.
    origin[fields.index("head")].fill_(head)
    return origin


class _FailingTogether(torch.autograd.Function):
    """A function that fails on all ranks if it fails on one, forward or backward: a separate
    autograd graph shows the errors of all its nodes in one place."""

    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ranks,
        function: Callable[..., tuple[torch.Tensor, ...]],
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        needed = ctx.needs_input_grad[2:]
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(tensors, needed, strict=True)
        ]
        with ranks.failing_together(), torch.enable_grad():
            results = function(*leaves)
        ctx.ranks, ctx.results = ranks, results
        ctx.save_for_backward(*tensors)
        ctx.leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # If the saved tensors were freed, this raises here, on this rank alone.
        _ = ctx.saved_tensors
        results, of_results = zip(
            *(
                (result, gradient)
                for result, gradient in zip(ctx.results, gradients, strict=True)
                if gradient is not None
            )
        )
        with ctx.ranks.failing_together():
            computed = iter(
                torch.autograd.grad(results, ctx.leaves, of_results, retain_graph=keeps_graph())
            )
        needed = ctx.needs_input_grad[2:]
        return None, None, *(next(computed) if needs else None for needs in needed)


def attend_by_heads(
    tensors: tuple[Any, ...], settings: Settings, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    def attention(*leaves: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _attend_to_own_heads(leaves, settings, ranks)

    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _FailingTogether.apply(ranks, attention, *tensors)
    with ranks.failing_together():
        return attention(*tensors)


def _attend_to_own_heads(
    tensors: tuple[Any, ...], settings: Settings, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, sink = tensors
    division = spans_by_rank(settings.order, ranks.count, q.shape[1])
    copies = max(1, ranks.count // k.shape[2])
    k, v = (t.repeat_interleave(copies, dim=2) if copies > 1 else t for t in (k, v))
    q, k, v = (to_heads(tensor, ranks, division) for tensor in (q, k, v))
    first = ranks.rank * q.shape[2]
    arguments = settings.arguments(settings.options.window)
    if sink is not None:
        arguments["learnable_sink"] = sink.chunk(ranks.count)[ranks.rank]
    if settings.block_mask is not None:
        rows = range(settings.rows)
        heads = range(first, first + q.shape[2])
        arguments["block_mask"] = settings.block_mask.part(rows, rows, heads)
    if settings.score_mod is not None:
        arguments["score_mod"] = settings.score_mod.in_part(_origin(first, q.device))
    if settings.mask_mod is not None:
        arguments["mask_mod"] = settings.mask_mod.in_part(_origin(first, q.device))
    out, lse = attend((q, k, v), settings.documents, arguments)
    by_row = lse.transpose(1, 2)
    return to_rows(out, ranks, division), to_rows(by_row, ranks, division).transpose(1, 2)
