"""The public functions, and what autograd calls."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...call.autocast import autocast, is_autocasting
from ...mask_mods import MaskMod
from ...score_mods import ScoreMod
from .checks import GivenArguments, batched, check_heads, settings_of, text_of
from .exchange import Ranks
from .gathered import Gathered
from .heads import attend_by_heads
from .local import OwnRows, Settings, sink_gradient
from .ring import RingAttention

__all__ = ["all_gather_attention", "ring_attention", "ulysses_attention"]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    order: str = "contiguous",
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    config: Any = None,
    backward_config: Any = None,
    use_clc: bool | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    mask_mod: MaskMod | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_func` of a sequence whose rows are divided among the ranks of a group.

    q: (batch, rows, heads, 256); k, v: (batch, rows, heads_kv, 256): this rank's rows, as many on
    every rank; with cu_seqlens (rows, heads, 256) and (rows, heads_kv, 256). bfloat16 or float16,
    all alike: no keys and values in float8_e4m3fn.

    group: of torch.distributed; None: all ranks.
    order: one of `ORDERS`, which `shard` takes, too: "contiguous", or "zigzag", in which ranks have
        equal work under a causal mask.
    cu_seqlens: offsets of documents packed into the whole sequence, from 0 to its rows, alike on
        all ranks; they see nothing of one another. A tensor on a GPU is waited for.
    score_mod: as of `flash_attn_func`, with cu_seqlens of `flash_attn_varlen_func`: of places in
        the whole sequence and of all heads. Every rank gives the same tensors, whole.
    block_mask: as of `flash_attn_func`, of the whole sequence, the same on every rank; instead of
        causal, window_size and cu_seqlens. A GPU is waited for at the first call with one.
    mask_mod: as of `flash_attn_func`, beside a block_mask: of places in the whole sequence and of
        all heads. Every rank gives the same tensors, whole.
    The other arguments are those of `flash_attn_func`; masks are of the whole sequence. Partial
    results are rounded to q's type and summed in float32. The same bits in every run.

    Returns out like q, or (out, lse); lse: (batch, heads, rows) float32, with cu_seqlens (heads,
    rows). Autograd differentiates both with respect to q, k, v and learnable_sink. The gradient of
    learnable_sink is of this rank's queries, to be summed over ranks as other parameters' are.

    Raises TypeError or ValueError for what is not accepted, on all ranks: a rank that refuses its
    call, or calls with other sizes or options, is an error everywhere. RuntimeError where another
    rank has raised inside a call or has ended, at all later calls over the group, and without
    torch.distributed being initialised.
    """
    given = GivenArguments(
        softmax_scale, causal, window_size, softcap, config, backward_config, use_clc, score_mod,
        block_mask, mask_mod,
    )  # fmt: skip
    tensors = q, k, v, learnable_sink
    return _attend(tensors, given, Ranks(group), ("ring", order, cu_seqlens), return_lse)


def all_gather_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`ring_attention`, where every rank gathers all keys and values before it begins.

    Memory for all of k and v on every rank, twice in order "zigzag"; one exchange that nothing
    hides, and one call of a kernel, in order "zigzag" two. Arguments, results and errors are those
    of `ring_attention`.
    """
    return _other_way("all_gather", (q, k, v), options)


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`ring_attention`, where ranks exchange rows of all heads for all rows of some heads.

    heads: a multiple of the ranks; heads_kv: a multiple of them, or a divisor, whose heads are then
    sent to several ranks. Bitwise what one GPU computes of a rank's heads, gradients, too, but for
    dk and dv of heads that are sent to several ranks: sums of what these have, each rounded to
    their type. Arguments, results and errors are those of `ring_attention`; of gradients those of
    learnable_sink are of this rank's heads, 0 for others.
    """
    return _other_way("ulysses", (q, k, v), options)


def _other_way(name: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call attention with the arguments of `ring_attention`, checked as Python does."""
    bound = _SIGNATURE.bind(*tensors, **options)
    bound.apply_defaults()
    found = bound.arguments
    given = GivenArguments(*(found[field] for field in GivenArguments._fields))
    tensors = *tensors, found["learnable_sink"]
    way = name, found["order"], found["cu_seqlens"]
    return _attend(tensors, given, Ranks(found["group"]), way, found["return_lse"])


_SIGNATURE = inspect.signature(ring_attention)


@torch.compiler.disable
def _attend(
    tensors: tuple[Any, ...],
    given: GivenArguments,
    ranks: Ranks,
    way: tuple[str, str, Any],
    wants_lse: bool,
) -> Any:
    """tensors: q, k, v, the sink. way: its name, order and cu_seqlens."""
    if is_autocasting():
        tensors = *autocast(*tensors[:3]), tensors[3]
    name, order, offsets = way
    is_packed = offsets is not None

    def check() -> tuple[str, tuple[tuple[Any, ...], Settings]]:
        found = batched(tensors, is_packed)
        settings = settings_of(found, given, ranks, (order, offsets))
        if name == "ulysses":
            check_heads(found, ranks.count)
        return text_of(found, settings, name, order), (found, settings)

    (q, k, v, sink), settings = ranks.agree(check)
    if name == "ulysses":
        out, lse = attend_by_heads((q, k, v, sink), settings, given._asdict(), (ranks, order))
    else:
        kind = RingAttention if name == "ring" else Gathered
        out, lse = _OverRanks.apply(kind, ranks, order, settings, q, k, v, sink)
    if is_packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if wants_lse else out


class _OverRanks(torch.autograd.Function):
    """Attention of this rank's queries over all ranks' keys.

    Only the exchanges are in common. An exception of a hook that packs saved tensors comes when
    all is exchanged: activation checkpoints end a recomputation by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: type[RingAttention] | type[Gathered],
        ranks: Ranks,
        order: str,
        settings: Settings,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tensors: q, k, v, the sink, which may be None."""
        q, k, v, sink = tensors
        with ranks.in_common():
            walk = kind(ranks, order, k.shape[1], settings)
            out, lse = walk.attend(q, (k, v), settings).results(sink, q.dtype)
        # Tensors of functions are saved, so that autograd finds out where they have changed.
        ctx.save_for_backward(q, k, v, sink, out, lse, *settings.read)
        ctx.walk, ctx.settings = walk, settings
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink, out, lse, *_ = ctx.saved_tensors
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        own = OwnRows(q, out, dout, lse, dlse)
        with ctx.walk.ranks.in_common():
            dq, (dk, dv) = ctx.walk.gradients(own, (k, v), ctx.settings)
            dsink = None if sink is None else sink_gradient(own, sink)
        found = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink
        return None, None, None, None, *found
