"""The one reference that tests, demo and bench compare with, in float64 on the CPU.

Nothing here is used to compute attention for a user: the operator runs the compiled kernel only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

#: Rows of scores held at once, so that long sequences do not need seqlen_q * seqlen_k doubles.
_ROWS = 4096


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a call, named as in `flash_attn_func`."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    learnable_sink: torch.Tensor | None = None

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right), None for unbounded; causal bounds the right side at 0."""
        left, right = (None if side == -1 else side for side in self.window_size)
        return left, 0 if self.causal else right

    def scale(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.softmax_scale is None else self.softmax_scale


def visible(
    lengths: tuple[int, int],
    window: tuple[int | None, int | None],
    rows: range | None = None,
) -> torch.Tensor:
    """Which key a query sees: bool (len(rows), seqlen_k), all rows by default.

    lengths: (seqlen_q, seqlen_k). The mask is bottom-right aligned: with d = i + seqlen_k -
    seqlen_q query i sees the keys d - left .. d + right.
    """
    seqlen_q, seqlen_k = lengths
    rows = range(seqlen_q) if rows is None else rows
    distance = torch.arange(seqlen_k) - (
        torch.arange(rows.start, rows.stop)[:, None] + seqlen_k - seqlen_q
    )
    left, right = window
    seen = torch.ones(len(rows), seqlen_k, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64: out like q, lse (batch, heads, seqlen_q) in natural log.

    q: (batch, seqlen_q, heads, dim); k, v: (batch, seqlen_k, heads_kv, dim), any dtype and
    device; options: those of `AttentionOptions`. Query head h uses key/value head
    h // (heads / heads_kv). A query that sees no key has out = 0, and lse = -inf or the sink's
    logit.
    """
    chosen = AttentionOptions(**options)
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k = k.shape[1]
    out = torch.empty(batch, seqlen_q, heads, v.shape[3], dtype=torch.float64)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float64)
    group = heads // k.shape[2]
    for b in range(batch):
        for h in range(heads):
            keys, values = (t[b, :, h // group].cpu().double() for t in (k, v))
            for start in range(0, seqlen_q, _ROWS):
                rows = range(start, min(start + _ROWS, seqlen_q))
                queries = q[b, rows.start : rows.stop, h].cpu().double()
                scores = _capped(chosen.scale(dim) * (queries @ keys.T), chosen.softcap)
                scores.masked_fill_(~visible((seqlen_q, seqlen_k), chosen.window, rows), -math.inf)
                part = torch.logsumexp(_with_sink(scores, chosen.learnable_sink, h), dim=1)
                # exp(-inf - 0) = 0 in rows without a visible key, where -inf + inf would be NaN.
                shift = part.masked_fill(part == -math.inf, 0.0)
                lse[b, h, rows.start : rows.stop] = part
                out[b, rows.start : rows.stop, h] = torch.exp(scores - shift[:, None]) @ values
    return out, lse


def _with_sink(scores: torch.Tensor, sink: torch.Tensor | None, head: int) -> torch.Tensor:
    """Scores (rows, keys) with a column for the head's sink, or an empty-safe one without."""
    logit = -math.inf if sink is None else sink[head].item()
    return torch.cat((scores, scores.new_full((scores.shape[0], 1), logit)), dim=1)


def same_dtype_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """out of plain PyTorch in the dtype of q, whose error sets the tolerance.

    Scores and probabilities are rounded to that dtype, the softmax itself is in float32: what a
    user would write with matmul and softmax. options: those of `AttentionOptions`.
    """
    chosen = AttentionOptions(**options)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    heads_first = [t.cpu().transpose(1, 2) for t in (q, k, v)]
    queries, keys, values = (
        t if t.shape[1] == heads else t.repeat_interleave(group, dim=1) for t in heads_first
    )
    scores = (queries @ keys.transpose(2, 3)) * chosen.scale(q.shape[3])
    scores = _capped(scores, chosen.softcap)
    scores.masked_fill_(~visible((q.shape[1], k.shape[1]), chosen.window), -math.inf)
    if chosen.learnable_sink is not None:
        sink = chosen.learnable_sink.cpu().to(scores.dtype)[None, :, None, None]
        scores = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), dim=3)
    weights = torch.softmax(scores, dim=3, dtype=torch.float32).nan_to_num(0.0)
    return (weights[..., : k.shape[1]].to(q.dtype) @ values).transpose(1, 2)


@dataclass(frozen=True)
class Comparison:
    """Errors of one result against the float64 reference.

    max_error, pytorch_max_error: largest absolute error of out, ours and same-dtype PyTorch's.
    rounding: largest error of the reference itself when rounded to the dtype of out.
    rel_l2: ||out - reference|| / ||reference||, 0 if both vanish. lse_max_error: absolute, nats.
    """

    max_error: float
    pytorch_max_error: float
    rounding: float
    rel_l2: float
    lse_max_error: float

    @property
    def tolerance(self) -> float:
        """The largest error accepted: twice PyTorch's own and twice the rounding of the result."""
        return 2 * self.pytorch_max_error + 2 * self.rounding


def compare(out: torch.Tensor, lse: torch.Tensor, inputs: tuple, **options) -> Comparison:
    """Compare (out, lse) for `inputs` (q, k, v) with the reference; `options` as of `attention`.

    NaN anywhere gives an infinite error. Infinities of lse must be in the same places.
    """
    expected, expected_lse = attention(*inputs, **options)
    pytorch = same_dtype_pytorch(*inputs, **options)
    difference = out.cpu().double() - expected
    norm = expected.norm().item()
    return Comparison(
        max_error=_largest(difference),
        pytorch_max_error=_largest(pytorch.double() - expected),
        rounding=_largest(expected.to(out.dtype).double() - expected),
        rel_l2=difference.norm().item() / norm if norm else difference.norm().item(),
        lse_max_error=_lse_error(lse.cpu().double(), expected_lse),
    )


def _largest(difference: torch.Tensor) -> float:
    if difference.numel() == 0:
        return 0.0
    return difference.abs().nan_to_num(nan=math.inf).max().item()


def _lse_error(lse: torch.Tensor, expected: torch.Tensor) -> float:
    empty = expected == -math.inf
    if not torch.equal(lse == -math.inf, empty):
        return math.inf
    return _largest((lse - expected)[~empty])
