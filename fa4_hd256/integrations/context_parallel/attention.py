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
from .checks import UserArguments, batched, check_heads, settings_of, text_of
from .exchange import Ranks
from .gathered import Gathered
from .heads import attend_by_heads
from .local import LocalResults, Settings, sink_gradient
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
    given = UserArguments(
        softmax_scale, causal, window_size, softcap, config, backward_config, use_clc, score_mod,
        block_mask, mask_mod,
    )  # fmt: skip
    tensors = q, k, v, learnable_sink
    return _attend(tensors, given, Ranks(group), ("ring", order, cu_seqlens), return_lse)


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
    """Bind the arguments to the signature of `ring_attention`, and attend by the named method."""
    bound = _SIGNATURE.bind(*tensors, **options)
    bound.apply_defaults()
    found = bound.arguments
    given = UserArguments(*(found[field] for field in UserArguments._fields))
    tensors = *tensors, found["learnable_sink"]
    method = name, found["order"], found["cu_seqlens"]
    return _attend(tensors, given, Ranks(found["group"]), method, found["return_lse"])


_SIGNATURE = inspect.signature(ring_attention)


@torch.compiler.disable
def _attend(
    tensors: tuple[Any, ...],
    given: UserArguments,
    ranks: Ranks,
    method: tuple[str, str, Any],
    wants_lse: bool,
) -> Any:
    """Check the call on all ranks, then attend. tensors: q, k, v, the sink. method: its name, order
    and cu_seqlens."""
    if is_autocasting():
        tensors = *autocast(*tensors[:3]), tensors[3]
    name, order, offsets = method
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

    `failing_together` covers only the exchanges. A hook that packs saved tensors may raise: an
    activation checkpoint ends its recomputation so. That happens after the last exchange, and must
    not be an error on the other ranks.
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
        with ranks.failing_together():
            walk = kind(ranks, order, k.shape[1], settings)
            out, lse = walk.attend(q, (k, v), settings).results(sink, q.dtype)
        # Tensors that a score_mod or mask_mod reads are saved: autograd checks their versions.
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
        own = LocalResults(q, out, dout, lse, dlse)
        with ctx.walk.ranks.failing_together():
            dq, (dk, dv) = ctx.walk.gradients(own, (k, v), ctx.settings)
            dsink = None if sink is None else sink_gradient(own, sink)
        found = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink
        return None, None, None, None, *found
