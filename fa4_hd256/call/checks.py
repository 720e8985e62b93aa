"""Everything a user can get wrong, found before anything is compiled and said in the user's words:
what was given, what is accepted.

In two steps, each of which comes once. Where a user calls: kinds of arguments, which an operator's
schema could not carry (`check_kinds`, `..._of`). In the operator, which graphs call by itself: all
the rest, ranges of options, tensors and their contents.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import ELEMENT_TYPES

DTYPES = tuple(ELEMENT_TYPES)


def check_kinds(tensors: dict[str, Any], ragged: dict[str, Any], num_splits: Any) -> None:
    """Tensors and an int. tensors: None for one not given."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    for name, tensor in ragged.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(_NOT_INT32.format(name))
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be an int, got {num_splits!r}")


def causal_of(causal: Any) -> bool:
    """The same, a bool."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    return causal


def window_of(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) with None for unbounded; -1 means unbounded too."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; accepted: a pair (left, right)")
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window_size is {window_size!r}; each side must be an int or None")
    left, right = (None if side == -1 else side for side in window_size)
    return left, right


def scale_of(softmax_scale: Any) -> float:
    """A Python float; 1 / sqrt(256) for None."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(HEAD_DIM)
    return _real("softmax_scale", softmax_scale, "a real number or None")


def softcap_of(softcap: Any) -> float:
    """A Python float, 0 for none."""
    return _real("softcap", softcap, "a real number")


def _real(name: str, value: Any, accepted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    return float(value)


def check_options(
    softmax_scale: float, window: tuple[int | None, int | None], softcap: float
) -> None:
    """Their ranges. window: None for unbounded."""
    # The kernel computes with float32, where a larger finite number turns infinite.
    largest = torch.finfo(torch.float32).max
    if not abs(softmax_scale) <= largest:
        raise ValueError(
            f"softmax_scale is {softmax_scale}; accepted: any number that is finite in float32, "
            "negative ones and 0 too"
        )
    if any(side is not None and side < 0 for side in window):
        raise ValueError(
            f"window_size is {window}; accepted: 0 or more, None or -1 for unbounded"
        )
    if not 0 <= softcap <= largest:
        raise ValueError(f"softcap is {softcap}; accepted: 0 (none) or a positive finite number")


_NOT_INT32 = "{} must be an int32 tensor"


def with_batch(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Packed sequences, (total, heads, 256), with a batch of 1."""
    if tensor.ndim != 3:
        raise ValueError(_wrong_rank(name, tensor, 3, f"(total, heads, {HEAD_DIM})"))
    return tensor.unsqueeze(0)


def _wrong_rank(name: str, tensor: torch.Tensor, accepted: int, form: str) -> str:
    return (
        f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}; accepted: {accepted}, "
        f"{form}"
    )


def check_tensors(tensors: dict[str, torch.Tensor], packed: dict[str, bool]) -> None:
    """Each (batch, seqlen, heads, 256), all of one accepted dtype and on one device.

    packed: which of them are packed sequences with a batch of 1, which users pass without.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got {tensor.layout}")
        if tensor.dtype not in DTYPES:
            accepted = " or ".join(map(str, DTYPES))
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {accepted}")
        if tensor.ndim != 4:
            raise ValueError(_wrong_rank(name, tensor, 4, f"(batch, seqlen, heads, {HEAD_DIM})"))
        if tensor.shape[-1] != HEAD_DIM:
            shape = tensor.shape[1:] if packed[name] else tensor.shape
            raise ValueError(
                f"{name} has head_dim {tensor.shape[-1]}, shape {tuple(shape)}; "
                f"accepted: {HEAD_DIM} only"
            )
    _check_equal("dtype", {name: t.dtype for name, t in tensors.items()}, TypeError)
    _check_equal("device", {name: t.device for name, t in tensors.items()}, ValueError)


def _check_equal(what: str, values: dict[str, object], error: type[Exception]) -> None:
    if len(set(values.values())) > 1:
        given = ", ".join(f"{name} {value}" for name, value in values.items())
        raise error(f"{', '.join(values)} must share one {what}; got {given}")


def check_shapes(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], packed_q: bool, packed_k: bool
) -> None:
    """Batch, lengths and heads of three shapes (b, s, h, 256). A batch of 0 is an empty result,
    and so are packed sequences without any row."""
    if tuple(k) != tuple(v):
        raise ValueError(f"k and v must have the same shape; got k {tuple(k)}, v {tuple(v)}")
    if q[0] != k[0] and packed_q == packed_k:
        raise ValueError(f"q, k and v must have the same batch; got q {q[0]}, k and v {k[0]}")
    for name, shape, packed in (("q", q, packed_q), ("k", k, packed_k)):
        if shape[1] < 1 and not packed:
            raise ValueError(f"{name} has seqlen 0, shape {tuple(shape)}; accepted: 1 or more")
        if shape[2] < 1:
            raise ValueError(f"{name} has no heads, shape {tuple(shape)}; accepted: 1 or more")
    if q[2] % k[2]:
        raise ValueError(
            f"{q[2]} query heads over {k[2]} key/value heads; accepted: a number of query heads "
            "that is a multiple of the number of key/value heads"
        )


def check_sink(sink: torch.Tensor, q: torch.Tensor) -> None:
    """One logit per query head."""
    if sink.dtype not in (torch.float32, *DTYPES):
        accepted = ", ".join(map(str, (torch.float32, *DTYPES)))
        raise TypeError(f"learnable_sink has dtype {sink.dtype}; accepted: {accepted}")
    if tuple(sink.shape) != (q.shape[2],):
        raise ValueError(
            f"learnable_sink has shape {tuple(sink.shape)}; accepted: ({q.shape[2]},), one logit "
            "per query head"
        )
    _check_equal("device", {"q": q.device, "learnable_sink": sink.device}, ValueError)


def check_longest(side: str, longest: Any) -> None:
    """max_seqlen of packed sequences, an int: reading a tensor would synchronise with the
    device."""
    if longest is None or isinstance(longest, bool) or not isinstance(longest, int):
        raise TypeError(
            f"max_seqlen_{side} must be an int with cu_seqlens_{side}, got {longest!r}; a tensor "
            "is not accepted because reading it would synchronise with the device"
        )


def check_ragged(q: torch.Tensor, ragged: dict[str, torch.Tensor]) -> None:
    """Dtypes, dimensions and devices."""
    for name, tensor in ragged.items():
        if tensor.dtype != torch.int32:
            raise TypeError(_NOT_INT32.format(name))
        if tensor.ndim != 1 or tensor.stride(0) != 1:
            raise ValueError(f"{name} must be one-dimensional and contiguous")
        _check_equal("device", {"q": q.device, name: tensor.device}, ValueError)


def count_sequences(q: torch.Tensor, k: torch.Tensor, ragged: dict[str, torch.Tensor]) -> int:
    """The batch size. Raises ValueError where that of the tensors differs."""
    sizes = {name: t.numel() - name.startswith("cu_") for name, t in ragged.items()}
    for side, tensor in (("q", q), ("k", k)):
        if f"cu_seqlens_{side}" not in ragged:
            sizes[side] = tensor.shape[0]
    if len(set(sizes.values())) > 1 or min(sizes.values()) < 0:
        raise ValueError(
            f"the batch sizes disagree: {sizes} (cu_seqlens hold batch + 1 offsets, seqused batch "
            "lengths)"
        )
    return next(iter(sizes.values()))


def check_contents(q: torch.Tensor, k: torch.Tensor, ragged: dict[str, torch.Tensor]) -> None:
    """Offsets ascend from 0 to the total; lengths in use are not negative. Only for the CPU, where
    reading them costs no synchronisation."""
    for side, tensor in (("q", q), ("k", k)):
        offsets = ragged.get(f"cu_seqlens_{side}")
        if offsets is not None and offsets.numel():
            steps = offsets.diff()
            if offsets[0] != 0 or offsets[-1] != tensor.shape[1] or (steps < 0).any():
                raise ValueError(
                    f"cu_seqlens_{side} is {offsets.tolist()}; accepted: offsets that ascend from "
                    f"0 to {tensor.shape[1]}, the number of rows of {side}"
                )
        used = ragged.get(f"seqused_{side}")
        if used is not None and (used < 0).any():
            raise ValueError(f"seqused_{side} is {used.tolist()}; accepted: 0 or more")


def check_max_seqlen(
    side: str, tensor: torch.Tensor, ragged: dict[str, torch.Tensor], longest: int | None
) -> int:
    """The longest sequence of a side, "q" or "k"; given by the caller for packed sequences."""
    offsets = ragged.get(f"cu_seqlens_{side}")
    if offsets is None:
        return tensor.shape[1]
    if longest is None or longest < 1:
        raise ValueError(f"max_seqlen_{side} is {longest}; accepted: 1 or more")
    if tensor.device.type == "cpu" and offsets.numel() > 1:
        found = int(offsets.diff().max())
        if found > longest:
            rows = {"q": "query", "k": "key"}[side]
            raise ValueError(
                f"max_seqlen_{side} is {longest}, but a sequence has {found} {rows} rows"
            )
    return longest


def check_gradients(
    named: dict[str, torch.Tensor | None], q: torch.Tensor, lse_shape: tuple[int, ...]
) -> None:
    """out and its gradient like q; lse and its gradient (batch, heads, seqlen_q) float32.

    named: out, dout, lse, dlse; None for one not given. Raises TypeError for another dtype,
    ValueError for another shape or device.
    """
    for name, tensor in named.items():
        if tensor is None:
            continue
        of_rows = name in ("lse", "dlse")
        shape, dtype = (lse_shape, torch.float32) if of_rows else (q.shape, q.dtype)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {dtype}")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {tuple(shape)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {q.device}, like q")
