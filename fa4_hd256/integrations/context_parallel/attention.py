"""The public functions, and the autograd function behind them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...call.autocast import autocast, is_autocasting
from ...mask_mods import MaskMod
from ...score_mods import ScoreMod
from .checks import Arguments, batched, check_heads, settings_of, text_of
from .exchange import Ranks
from .gathered import Gathered
from .heads import attend_by_heads
from .local import LocalResults, Settings, sink_gradient
from .ring import RingAttention


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
    """Compute `flash_attn_func` of a sequence whose rows are divided among the ranks of a group.

    q: (batch, rows, heads, 256); k, v: (batch, rows, heads_kv, 256): this rank's rows. Every rank
    has the same number of rows. With cu_seqlens the tensors have no batch dimension. All three have
    one dtype, bfloat16 or float16; float8_e4m3fn is not accepted.

    group: a process group of torch.distributed; None: all ranks.
    order: one of `ORDERS`, the same as for `shard`. Under a causal mask "zigzag" gives all ranks
        equal work; "contiguous" does not.
    cu_seqlens: offsets of documents packed into the whole sequence, from 0 to its number of rows.
        Documents do not see one another. The values must be equal on all ranks. If it is a CUDA
        tensor, the call waits for the device.
    score_mod: as for `flash_attn_func`, with cu_seqlens as for `flash_attn_varlen_func`. It gets
        positions in the whole sequence and heads of the whole call. Every rank passes the same
        tensors, unsharded.
    block_mask: as for `flash_attn_func`, for the whole sequence, equal on all ranks. It replaces
        causal, window_size and cu_seqlens. The first call with a block_mask waits for the device.
    mask_mod: as for `flash_attn_func`, with a block_mask. It gets positions in the whole sequence
        and heads of the whole call. Every rank passes the same tensors, unsharded.
    The other arguments are those of `flash_attn_func`; masks are of the whole sequence.
    Partial results are rounded to q's dtype and summed in float32, in a fixed order: the bits are
    the same in every run.

    Returns out like q, or (out, lse); lse: (batch, heads, rows) float32, with cu_seqlens (heads,
    rows). Autograd differentiates both with respect to q, k, v and learnable_sink. The gradient of
    learnable_sink comes from this rank's queries: sum it over ranks, like that of any parameter.

    Raises TypeError or ValueError on all ranks if any rank's arguments are not accepted, or if
    sizes or options differ between ranks. Raises RuntimeError if another rank has raised inside a
    call or has ended, at every later call over that group, and if torch.distributed is not
    initialised.
    """
    arguments = Arguments(
        group, order, cu_seqlens, softmax_scale, causal, window_size, learnable_sink, softcap,
        deterministic, return_lse, config, backward_config, use_clc, score_mod, block_mask,
        mask_mod,
    )  # fmt: skip
    return _attend_over_ranks("ring", (q, k, v), arguments, Ranks(group))


def all_gather_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `ring_attention` after every rank has gathered all keys and values.

    Every rank needs memory for all of k and v, twice in order "zigzag". The one exchange overlaps
    with no kernel. A rank makes one kernel call, in order "zigzag" two. Arguments, results and
    errors are those of `ring_attention`.
    """
    return _with_arguments("all_gather", (q, k, v), options)


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `ring_attention` by exchanging rows of all heads for all rows of some heads.

    heads must be a multiple of the number of ranks; heads_kv a multiple or a divisor of it. A
    divisor sends each key/value head to several ranks.

    Results and gradients are bitwise those of one GPU that computes the rank's heads, except dk and
    dv of heads sent to several ranks: these are sums of the ranks' gradients, each rounded to k's
    dtype. Arguments, results and errors are those of `ring_attention`. The gradient of
    learnable_sink is of this rank's heads, and 0 for other heads.
    """
    return _with_arguments("ulysses", (q, k, v), options)


def _with_arguments(name: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    bound = _SIGNATURE.bind(*tensors, **options)
    bound.apply_defaults()
    q, k, v, *others = bound.arguments.values()
    arguments = Arguments(*others)
    return _attend_over_ranks(name, (q, k, v), arguments, Ranks(arguments.group))


_SIGNATURE = inspect.signature(ring_attention)


@torch.compiler.disable
def _attend_over_ranks(
    name: str, inputs: tuple[Any, ...], arguments: Arguments, ranks: Ranks
) -> Any:
    q, k, v = autocast(*inputs) if is_autocasting() else inputs

    def check() -> tuple[str, tuple[tuple[Any, ...], Settings]]:
        tensors = batched(q, k, v, arguments)
        settings = settings_of(tensors, arguments, ranks.count)
        if name == "ulysses":
            check_heads(tensors, ranks.count)
        return text_of(tensors, settings, name), (tensors, settings)

    tensors, settings = ranks.agree(check)
    if name == "ulysses":
        out, lse = attend_by_heads(tensors, settings, ranks)
    else:
        kind = RingAttention if name == "ring" else Gathered
        out, lse = _OverRanks.apply(kind, ranks, settings, *tensors)
    if settings.documents is not None:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if arguments.return_lse else out


class _OverRanks(torch.autograd.Function):
    """Attention of this rank's queries over all ranks' keys.

    `failing_together` covers only the exchanges. A hook that packs saved tensors may raise: an
    activation checkpoint ends its recomputation so. That happens after the last exchange, and must
    not be an error on the other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: type[RingAttention] | type[Gathered],
        ranks: Ranks,
        settings: Settings,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with ranks.failing_together():
            walk = kind(ranks, k.shape[1], settings)
            out, lse = walk.attend(q, (k, v)).results(sink, q.dtype)
        # Tensors that a score_mod or mask_mod reads are saved: autograd checks their versions.
        ctx.save_for_backward(q, k, v, sink, out, lse, *settings.read)
        ctx.walk = walk
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
        local = LocalResults(q, out, dout, lse, dlse)
        with ctx.walk.ranks.failing_together():
            dq, (dk, dv) = ctx.walk.gradients(local, (k, v))
            dsink = None if sink is None else sink_gradient(local, sink)
        return None, None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink
