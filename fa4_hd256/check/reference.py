"""Reference attention that tests, demo and bench compare with, in float64 on the CPU.

Nothing here is used to compute attention for a user: the operator runs the compiled kernel only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..call.options import ExactWindow

#: Rows of scores held at once, so that long sequences do not need seqlen_q * seqlen_k doubles.
_ROWS = 4096

#: (batch entry, query head).
Head = tuple[int, int]

_Errors = TypeVar("_Errors", bound="Errors")


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a call, named as in `flash_attn_func`.

    out_gate: like q, or without its last dimension: out * sigmoid(out_gate).
    mask: bool (1 or batch, 1 or heads, seqlen_q, seqlen_k), which narrows the other masks: True
    where a query sees a key. score_mod: FlexAttention's (score, batch, head, query, key) -> score,
    of tensors that broadcast.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    learnable_sink: torch.Tensor | None = None
    out_gate: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    score_mod: Callable[..., torch.Tensor] | None = None

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right), None for unbounded. -1 is a bound in an `ExactWindow` only."""
        is_exact = isinstance(self.window_size, ExactWindow)
        left, right = (None if side == -1 and not is_exact else side for side in self.window_size)
        return left, 0 if self.causal else right

    def masked(self, batch: int, head: int) -> torch.Tensor | None:
        if self.mask is None:
            return None
        batches, heads = self.mask.shape[:2]
        return self.mask[min(batch, batches - 1), min(head, heads - 1)].cpu()

    def gated(self, out: torch.Tensor) -> torch.Tensor:
        """Return out (batch, seqlen_q, heads, dim) behind the gate."""
        if self.out_gate is None:
            return out
        gate = self.out_gate.cpu().to(out.dtype)
        return out * torch.sigmoid(gate if gate.ndim == out.ndim else gate[..., None])

    def scale(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.softmax_scale is None else self.softmax_scale

    def changed(
        self, scores: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, first_row: int = 0
    ) -> torch.Tensor:
        """Return scores (.., rows, keys) after softcap and score_mod. batch, head: indices that
        broadcast with the scores. first_row: the query of the first row."""
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.score_mod is None:
            return scores
        rows, keys = scores.shape[-2:]
        query = torch.arange(first_row, first_row + rows)[:, None]
        return self.score_mod(scores, batch, head, query, torch.arange(keys)).to(scores.dtype)


def visible(
    lengths: tuple[int, int], window: tuple[int | None, int | None], rows: range | None = None
) -> torch.Tensor:
    """Return the mask of some queries, bool (len(rows), seqlen_k): True where a query sees a key.
    lengths: (seqlen_q, seqlen_k). rows: all queries by default. The mask is bottom-right aligned:
    query i sees the keys d - left .. d + right, with d = i + seqlen_k - seqlen_q."""
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


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in float64: out like q, lse (batch, heads, seqlen_q) in natural log.

    q: (batch, seqlen_q, heads, dim); k, v: (batch, seqlen_k, heads_kv, dim), any dtype and device.
    options: those of `AttentionOptions`. Query head h uses key/value head h // (heads / heads_kv).
    A query that sees no key has out = 0, lse = -inf or the sink's logit, and no gradient but the
    sink's. Autograd differentiates the results.
    """
    chosen = AttentionOptions(**options)
    batch, seqlen_q, heads, _ = q.shape
    group = heads // k.shape[2]
    outs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            tensors = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
            of_q, of_k, of_v = (tensor.cpu().double() for tensor in tensors)
            out, lse = _one_head(of_q, of_k, of_v, chosen, (b, h))
            outs.append(out)
            lses.append(lse)
    if not outs:
        return q.cpu().double(), torch.zeros(batch, heads, seqlen_q, dtype=torch.float64)
    out = torch.stack(outs).unflatten(0, (batch, heads)).transpose(1, 2).contiguous()
    return chosen.gated(out), torch.stack(lses).unflatten(0, (batch, heads))


def max_logits(q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the greatest visible logit of each query head, float64 (heads,); -inf for none."""
    chosen = AttentionOptions(**options)
    batch, seqlen_q, heads, _ = q.shape
    largest = torch.full((heads,), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            of_q, of_k = q[b, :, h].cpu().double(), k[b, :, h * k.shape[2] // heads].cpu().double()
            for start in range(0, seqlen_q if len(of_k) else 0, _ROWS):
                rows = range(start, min(start + _ROWS, seqlen_q))
                logit = _scores(of_q, of_k, rows, chosen, (b, h)).amax()
                largest[h] = torch.maximum(largest[h], logit)
    return largest


def _one_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: AttentionOptions, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of one head: q, k, v (rows, dim) in float64."""
    outs, lses = [], []
    for start in range(0, max(len(q), 1), _ROWS):
        weights, lse = _weights(q, k, range(start, min(start + _ROWS, len(q))), chosen, head)
        outs.append(weights @ v)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _weights(
    q: torch.Tensor, k: torch.Tensor, rows: range, chosen: AttentionOptions, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities (len(rows), keys) of some rows of one head, and their lse."""
    scores = _scores(q, k, rows, chosen, head)
    lse = _log_sum_exp(_with_sink(scores, chosen.learnable_sink, head[1]))
    # exp(-inf - 0) = 0 in rows without a visible key, where -inf + inf would be NaN.
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.exp(scores - shift[:, None]), lse


def _scores(
    q: torch.Tensor, k: torch.Tensor, rows: range, chosen: AttentionOptions, head: Head
) -> torch.Tensor:
    """Return the logits (len(rows), keys) of some rows of one head, -inf for invisible keys."""
    scores = chosen.scale(q.shape[1]) * (q[rows.start : rows.stop] @ k.T)
    batch, number = map(torch.tensor, head)
    scores = chosen.changed(scores, batch, number, rows.start)
    seen, mask = visible((len(q), len(k)), chosen.window, rows), chosen.masked(*head)
    if mask is not None:
        seen &= mask[rows.start : rows.stop]
    return scores.masked_fill(~seen, -math.inf)


def _log_sum_exp(scores: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of each row: -inf for an empty row, with a gradient of 0."""
    top = scores.detach().amax(dim=1)
    empty = top == -math.inf
    top = top.masked_fill(empty, 0.0)
    total = torch.exp(scores - top[:, None]).sum(dim=1).masked_fill(empty, 1.0)
    return (total.log() + top).masked_fill(empty, -math.inf)


def _with_sink(scores: torch.Tensor, sink: torch.Tensor | None, head: int) -> torch.Tensor:
    """Return scores (rows, keys + 1). The last column is the head's sink, -inf without one."""
    column = scores.new_full((scores.shape[0], 1), -math.inf)
    if sink is not None:
        column = sink[head].cpu().double().expand(column.shape)
    return torch.cat((scores, column), dim=1)


def dequantised(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return queries, keys or values in e4m3 as float64, multiplied by their scales. codes:
    (sequences or pages, rows, heads, dim) float8_e4m3fn. scale: (sequences or pages, heads_kv),
    each of as many heads, or one value, or None for 1."""
    values = codes.cpu().float().double()
    if scale is None:
        return values
    scale = scale.cpu().double()
    if scale.ndim == 2:
        scale = scale.repeat_interleave(codes.shape[2] // scale.shape[1], dim=1)
    return values * (scale.reshape(()) if scale.numel() == 1 else scale[:, None, :, None])


def same_dtype_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return out of PyTorch's matmul and softmax in the dtype of q, whose error sets the tolerance.
    Scores and probabilities are rounded to that dtype. The softmax itself is in float32. options:
    those of `AttentionOptions`."""
    return _same_dtype(q, k, v, **options)[0]


def e4m3_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    """Return out, in `dtype`, of PyTorch in float32 with probabilities rounded to e4m3, whose error
    sets the tolerance of kernels with q, k and v in e4m3.

    Probabilities are rounded times 2^8, so that the small ones keep three bits behind the point.
    q, k, v: dequantised. options: those of `AttentionOptions`.
    """

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        return (weights * 2**8).to(torch.float8_e4m3fn).float() / 2**8

    out, _ = _same_dtype(q.float(), k.float(), v.float(), rounded, **options)
    return out.to(dtype)


def _same_dtype(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of `same_dtype_pytorch`. rounded: rounds the probabilities, None: as q."""
    chosen = AttentionOptions(**options)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    heads_first = [t.cpu().transpose(1, 2) for t in (q, k, v)]
    queries, keys, values = (
        t if t.shape[1] == heads else t.repeat_interleave(group, dim=1) for t in heads_first
    )
    scores = (queries @ keys.transpose(2, 3)) * chosen.scale(q.shape[3])
    entries = (torch.arange(size) for size in scores.shape[:2])
    batch, head = (index.view(-1, *[1] * (3 - i)) for i, index in enumerate(entries))
    scores = chosen.changed(scores, batch, head)
    seen = visible((q.shape[1], k.shape[1]), chosen.window)
    if chosen.mask is not None:
        seen = seen & chosen.mask.cpu()
    empty = ~seen.any(dim=-1)
    if chosen.learnable_sink is not None:
        sink = chosen.learnable_sink.cpu().to(scores.dtype)[None, :, None, None]
        scores = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), dim=3)
        seen = torch.cat((seen, seen.new_ones(*seen.shape[:-1], 1)), dim=-1)
        empty = torch.zeros_like(empty)
    # A row that sees nothing keeps its scores and loses its weights: softmax of nothing is NaN.
    scores = scores.masked_fill(~seen & ~empty[..., None], -math.inf)
    weights = torch.softmax(scores, dim=3, dtype=torch.float32).masked_fill(empty[..., None], 0.0)
    lse = scores.float().logsumexp(dim=3).masked_fill(empty, -math.inf)
    weights = weights[..., : k.shape[1]]
    weights = weights.to(q.dtype) if rounded is None else rounded(weights)
    out = (weights @ values).transpose(1, 2)
    return chosen.gated(out), lse


def gradients(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Return gradients in float64, by autograd of `attention`: "q", "k", "v", and where these are
    given "sink" and "out_gate". inputs: q, k, v. dout: gradient of out. dlse: gradient of lse, None
    for 0. It has no effect in rows whose lse is -inf."""
    exact = tuple(tensor.cpu().double() for tensor in inputs)
    given = [options.pop(name, None) for name in _OPTIONAL]
    more = (None if tensor is None else tensor.cpu().double() for tensor in given)
    return _differentiate(attention, (*exact, *more), dout.cpu().double(), dlse, options)


def same_dtype_gradients(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    given = [options.pop(name, None) for name in _OPTIONAL]
    leaves = tuple(None if tensor is None else tensor.cpu() for tensor in (*inputs, *given))
    return _differentiate(_same_dtype, leaves, dout.cpu(), dlse, options)


#: Tensors among the options that have gradients, too.
_OPTIONAL = ("learnable_sink", "out_gate")


def _differentiate(
    function: Any,
    leaves: tuple[torch.Tensor | None, ...],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    options: dict,
) -> dict[str, torch.Tensor]:
    """Return the gradients of function(leaves) = (out, lse); a leaf may be None."""
    names = ("q", "k", "v", "sink", "out_gate")
    inputs = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in zip(names, leaves, strict=True)
        if tensor is not None
    }
    q, k, v, *given = (inputs.get(name) for name in names)
    out, lse = function(q, k, v, **dict(zip(_OPTIONAL, given, strict=True)), **options)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.cpu().to(lse.dtype)
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    results = torch.autograd.grad((out, lse), tuple(inputs.values()), (dout, dlse))
    return dict(zip(inputs, results, strict=True))


@dataclass(frozen=True)
class Errors:
    """Errors of a result against the float64 reference.

    max_error, pytorch_max_error: largest absolute error of this result, and of same-dtype
    PyTorch's. rounding: largest error of the reference itself when it is rounded to the result's
    dtype. rel_l2: ||result - reference|| / ||reference||, 0 if both vanish. NaN is an infinite
    error.
    """

    max_error: float
    pytorch_max_error: float
    rounding: float
    rel_l2: float

    @property
    def tolerance(self) -> float:
        return 2 * self.pytorch_max_error + 2 * self.rounding

    @classmethod
    def of(
        cls: type[_Errors],
        result: torch.Tensor,
        exact: torch.Tensor,
        pytorch_max_error: float,
        *others: float,
    ) -> _Errors:
        """Return the errors of a result. others: further fields of the class."""
        difference, norm = result.cpu().double() - exact, exact.norm().item()
        rel_l2 = difference.norm().item() / (norm or 1.0)
        rounding = _largest(exact.to(result.dtype).double() - exact)
        return cls(_largest(difference), pytorch_max_error, rounding, rel_l2, *others)


@dataclass(frozen=True)
class Comparison(Errors):
    """Errors of (out, lse). lse_max_error: absolute, nats; infinite if infinities differ."""

    lse_max_error: float


@dataclass(frozen=True)
class GradientComparison(Errors):
    """Errors of one gradient. cancellation: see `cancellation_errors`."""

    cancellation: float

    @property
    def tolerance(self) -> float:
        return super().tolerance + self.cancellation


@dataclass(frozen=True)
class Expected:
    """Reference result for some inputs; `compare` judges other results of these inputs."""

    out: torch.Tensor
    lse: torch.Tensor
    pytorch_max_error: float

    @classmethod
    @torch.no_grad()
    def of(cls, inputs: tuple[torch.Tensor, ...], **options: Any) -> Expected:
        """Return the reference; options: of `attention`. k and v may be dequantised, in float64."""
        q, k, v = inputs
        out, lse = attention(q, k, v, **options)
        pytorch = same_dtype_pytorch(q, k.to(q.dtype), v.to(q.dtype), **options)
        return cls(out, lse, _largest(pytorch.double() - out))

    @classmethod
    @torch.no_grad()
    def of_e4m3(
        cls, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, **options: Any
    ) -> Expected:
        """Return the reference for q, k and v that are e4m3, given dequantised, and out of a
        dtype. options: those of `attention`."""
        q, k, v = inputs
        out, lse = attention(q, k, v, **options)
        pytorch = e4m3_pytorch(q, k, v, dtype, **options)
        return cls(out, lse, _largest(pytorch.double() - out))

    @torch.no_grad()
    def compare(self, out: torch.Tensor, lse: torch.Tensor) -> Comparison:
        lse_error = _lse_error(lse.cpu().double(), self.lse)
        return Comparison.of(out, self.out, self.pytorch_max_error, lse_error)


def compare(
    out: torch.Tensor, lse: torch.Tensor, inputs: tuple[torch.Tensor, ...], **options: Any
) -> Comparison:
    return Expected.of(inputs, **options).compare(out, lse)


def _largest(difference: torch.Tensor) -> float:
    if difference.numel() == 0:
        return 0.0
    return difference.abs().nan_to_num(nan=math.inf).max().item()


def _lse_error(lse: torch.Tensor, expected: torch.Tensor) -> float:
    empty = expected == -math.inf
    if not torch.equal(lse == -math.inf, empty):
        return math.inf
    return _largest((lse - expected)[~empty])


@dataclass(frozen=True)
class ExpectedGradients:
    """Reference gradients by name, and the errors that set the tolerances."""

    exact: dict[str, torch.Tensor]
    pytorch_max_error: dict[str, float]
    cancellation: dict[str, float]

    @classmethod
    def of(
        cls,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        dout: torch.Tensor,
        dlse: torch.Tensor | None = None,
        **options: Any,
    ) -> ExpectedGradients:
        exact = gradients(inputs, dout, dlse, **options)
        pytorch = same_dtype_gradients(inputs, dout, dlse, **options)
        errors = {name: _largest(pytorch[name].double() - exact[name]) for name in exact}
        return cls(exact, errors, cancellation_errors(inputs, dout, **options))

    def compare(self, found: dict[str, torch.Tensor]) -> dict[str, GradientComparison]:
        return {
            name: GradientComparison.of(
                tensor,
                self.exact[name],
                self.pytorch_max_error[name],
                self.cancellation.get(name, 0.0),
            )
            for name, tensor in found.items()
        }


def compare_gradients(
    found: dict[str, torch.Tensor],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> dict[str, GradientComparison]:
    """Compare gradients, named as by `gradients`, with the reference. found: gradients to compare.
    The other arguments are those of `gradients`."""
    return ExpectedGradients.of(inputs, dout, dlse, **options).compare(found)


@torch.no_grad()
def cancellation_errors(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dout: torch.Tensor, **options: Any
) -> dict[str, float]:
    """Return the errors of dQ and dK, "q" and "k", that float32 sums allow where the gradient is 0.

    The gradient of a score is P (dP - delta). Where one key has all of the softmax, dP and delta
    are equal sums of 256 products. In float32, in whatever order, each is off by some 2^-24 of the
    sum of the absolute products (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
    PyTorch's softmax backward has no such difference, so its error says nothing there.
    """
    chosen = AttentionOptions(**options)
    q, k, v, dout = (tensor.cpu().double() for tensor in (*inputs, dout))
    dout = chosen.gated(dout)
    scale, group = abs(chosen.scale(q.shape[3])), q.shape[2] // k.shape[2]
    of_q, of_k = torch.zeros_like(q), torch.zeros_like(k)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            kv = (b, slice(None), h // group)
            for start in range(0, q.shape[1], _ROWS):
                rows = (b, slice(start, start + _ROWS), h)
                whole = range(start, min(start + _ROWS, q.shape[1]))
                weights, _ = _weights(q[b, :, h], k[kv], whole, chosen, (b, h))
                errors = 2**-22 * scale * weights * (dout[rows].abs() @ v[kv].abs().T)
                of_q[rows] = errors @ k[kv].abs()
                of_k[kv] += errors.T @ q[rows].abs()
    return {"q": _largest(of_q), "k": _largest(of_k)}
