"""The one reference that tests, demo and bench compare with, in float64 on the CPU.

Nothing here is used to compute attention for a user: the operator runs the compiled kernel only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

#: Rows of scores held at once, so that long sequences do not need seqlen_q * seqlen_k doubles.
_ROWS = 4096


def visible(seqlen_q: int, seqlen_k: int, causal: bool, rows: range | None = None) -> torch.Tensor:
    """Which key a query sees: bool (len(rows), seqlen_k), all rows by default.

    Causal is bottom-right aligned: the last query sees every key, query i the keys
    j <= i + seqlen_k - seqlen_q.
    """
    rows = range(seqlen_q) if rows is None else rows
    keys = torch.arange(seqlen_k)
    if not causal:
        return torch.ones(len(rows), seqlen_k, dtype=torch.bool)
    last = torch.arange(rows.start, rows.stop) + (seqlen_k - seqlen_q)
    return keys[None, :] <= last[:, None]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64: out like q, lse (batch, heads, seqlen_q) in natural log.

    q: (batch, seqlen_q, heads, dim); k, v: (batch, seqlen_k, heads_kv, dim), any dtype and
    device. Query head h uses key/value head h // (heads / heads_kv). A query that sees no key
    has out = 0 and lse = -inf.
    """
    batch, seqlen_q, heads, dim = q.shape
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    out = torch.empty(batch, seqlen_q, heads, v.shape[3], dtype=torch.float64)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float64)
    group = heads // k.shape[2]
    for b in range(batch):
        for h in range(heads):
            keys, values = (t[b, :, h // group].cpu().double() for t in (k, v))
            for start in range(0, seqlen_q, _ROWS):
                rows = range(start, min(start + _ROWS, seqlen_q))
                scores = scale * (q[b, rows.start : rows.stop, h].cpu().double() @ keys.T)
                mask = visible(seqlen_q, k.shape[1], causal, rows)
                scores.masked_fill_(~mask, -math.inf)
                part = torch.logsumexp(scores, dim=1)
                # exp(-inf - 0) = 0 in rows without a visible key, where -inf + inf would be NaN.
                shift = part.masked_fill(part == -math.inf, 0.0)
                lse[b, h, rows.start : rows.stop] = part
                out[b, rows.start : rows.stop, h] = torch.exp(scores - shift[:, None]) @ values
    return out, lse


def same_dtype_pytorch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """out of plain PyTorch in the dtype of q, whose error sets the tolerance.

    Scores and probabilities are rounded to that dtype, the softmax itself is in float32: what a
    user would write with matmul and softmax.
    """
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    heads_first = [t.cpu().transpose(1, 2) for t in (q, k, v)]
    queries, keys, values = (
        t if t.shape[1] == q.shape[2] else t.repeat_interleave(group, dim=1) for t in heads_first
    )
    scores = (queries @ keys.transpose(2, 3)) * scale
    scores.masked_fill_(~visible(q.shape[1], k.shape[1], causal), -math.inf)
    weights = torch.softmax(scores, dim=3, dtype=torch.float32).nan_to_num(0.0)
    return (weights.to(q.dtype) @ values).transpose(1, 2)


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
