"""One validated description of a forward call.

Everything a user can get wrong is found here, before anything is compiled, and said in the user's
words: what was given, what is accepted. What comes after may rely on a `Problem` being sound.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from .config import HEAD_DIM

DTYPES = (torch.bfloat16, torch.float16)

#: What TMA asks of a tensor in global memory: base address and every stride but the innermost a
#: multiple of 16 bytes, strides below 2**40 bytes, innermost stride one element (CUDA driver API,
#: cuTensorMapEncodeTiled).
TMA_ALIGNMENT = 16
TMA_STRIDE_LIMIT = 1 << 40

#: The compute capability whose binaries (sm_100a) are compiled here; they run on no other.
SM100 = (10, 0)


@dataclass(frozen=True)
class ProblemClass:
    """What of a call is compiled into the kernel. Everything else is an argument at run time.

    `negative_scale`: the tensor core negates the scores and the kernel gets the scale's absolute
    value, because the online softmax follows the largest score.
    """

    dtype: torch.dtype
    causal: bool
    negative_scale: bool


@dataclass(frozen=True)
class Problem:
    """A forward call: q (batch, seqlen_q, heads_q, 256), k and v (batch, seqlen_k, heads_kv, 256).

    `copied` names those of q, k, v whose layout TMA cannot take, so that they are copied once
    into a contiguous one before the kernel runs.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    softmax_scale: float
    copied: tuple[str, ...]

    @classmethod
    def describe(cls, q, k, v, softmax_scale: float | None, causal: bool) -> Problem:
        """Validate a call. `softmax_scale` None means 1 / sqrt(256).

        Raises TypeError for an argument of the wrong kind or dtype and ValueError for a wrong
        shape, head_dim, ratio of heads, device or scale.
        """
        tensors = {"q": q, "k": k, "v": v}
        check_tensors(tensors)
        check_shapes(q.shape, k.shape, v.shape)
        scale = check_scale(softmax_scale)
        check_causal(causal)
        check_device(q.device)
        return cls(
            batch=q.shape[0],
            seqlen_q=q.shape[1],
            seqlen_k=k.shape[1],
            heads_q=q.shape[2],
            heads_kv=k.shape[2],
            dtype=q.dtype,
            device=q.device,
            causal=causal,
            softmax_scale=scale,
            copied=tuple(name for name, tensor in tensors.items() if not tma_can_take(tensor)),
        )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads_q // self.heads_kv

    @property
    def problem_class(self) -> ProblemClass:
        return ProblemClass(self.dtype, self.causal, self.softmax_scale < 0)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen_q, self.heads_q, HEAD_DIM)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.heads_q, self.seqlen_q)


def check_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """Each one a 4-D tensor of head_dim 256, all of one accepted dtype and on one device."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got {tensor.layout}")
        if tensor.dtype not in DTYPES:
            accepted = " or ".join(map(str, DTYPES))
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {accepted}")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}; "
                f"accepted: 4, (batch, seqlen, heads, {HEAD_DIM})"
            )
        if tensor.shape[3] != HEAD_DIM:
            raise ValueError(
                f"{name} has head_dim {tensor.shape[3]}, shape {tuple(tensor.shape)}; "
                f"accepted: {HEAD_DIM} only"
            )
    _check_equal("dtype", {name: t.dtype for name, t in tensors.items()}, TypeError)
    _check_equal("device", {name: t.device for name, t in tensors.items()}, ValueError)


def _check_equal(what: str, values: dict[str, object], error: type[Exception]) -> None:
    if len(set(values.values())) > 1:
        given = ", ".join(f"{name} {value}" for name, value in values.items())
        raise error(f"{', '.join(values)} must share one {what}; got {given}")


def check_shapes(q, k, v) -> None:
    """Batch, lengths and heads of three shapes (b, s, h, 256). A batch of 0 is an empty result."""
    if tuple(k) != tuple(v):
        raise ValueError(f"k and v must have the same shape; got k {tuple(k)}, v {tuple(v)}")
    if q[0] != k[0]:
        raise ValueError(f"q, k and v must have the same batch; got q {q[0]}, k and v {k[0]}")
    for name, shape in (("q", q), ("k", k)):
        if shape[1] < 1:
            raise ValueError(f"{name} has seqlen 0, shape {tuple(shape)}; accepted: 1 or more")
        if shape[2] < 1:
            raise ValueError(f"{name} has no heads, shape {tuple(shape)}; accepted: 1 or more")
    if q[2] % k[2]:
        raise ValueError(
            f"{q[2]} query heads over {k[2]} key/value heads; accepted: a number of query heads "
            "that is a multiple of the number of key/value heads"
        )


def check_scale(softmax_scale: float | None) -> float:
    """The scale as a Python float; 1 / sqrt(256) for None."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(HEAD_DIM)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(
            f"softmax_scale must be a real number or None, got {type(softmax_scale).__name__}"
        )
    scale = float(softmax_scale)
    # The kernel computes with float32, where a larger finite number turns infinite.
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"softmax_scale is {scale}; accepted: any number that is finite in float32, "
            "negative ones and 0 too"
        )
    return scale


def check_causal(causal: bool) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")


def check_device(device: torch.device) -> None:
    """CPU tensors run in the simulator, CUDA tensors on an SM100 GPU; nothing else is offered."""
    if device.type == "cpu":
        return
    accepted = (
        "accepted: CUDA tensors on an SM100 GPU (B200, compute capability 10.0), or CPU tensors, "
        "for which the compiled kernel runs in the simulator"
    )
    if device.type != "cuda":
        raise ValueError(f"q, k and v are on device {device}; {accepted}")
    capability = torch.cuda.get_device_capability(device)
    if capability != SM100:
        raise ValueError(
            f"q, k and v are on {device}, a {torch.cuda.get_device_name(device)} with compute "
            f"capability {capability[0]}.{capability[1]}; {accepted}"
        )


def tma_can_take(tensor: torch.Tensor) -> bool:
    """Whether TMA can read the tensor in place. The stride of a dimension of size 1 is free."""
    if tensor.numel() == 0:
        return True
    if tensor.data_ptr() % TMA_ALIGNMENT:
        return False
    *outer, last = zip(tensor.shape, tensor.stride())
    if last[0] > 1 and last[1] != 1:
        return False
    strides = (stride * tensor.element_size() for size, stride in outer if size > 1)
    return all(s % TMA_ALIGNMENT == 0 and s < TMA_STRIDE_LIMIT for s in strides)


def as_kernel_operand(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernel may read it: itself where TMA can take it, else one copy.

    A dimension of size 1 may carry any stride; it gets that of a contiguous tensor, so that every
    stride the kernel sees keeps TMA's rule.
    """
    if not tma_can_take(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    strides, below = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        strides.append(stride if size > 1 else below)
        below = max(below, size * strides[-1])
    return tensor.as_strided(tensor.shape, strides[::-1])
