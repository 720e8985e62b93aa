"""One validated description of a forward call.

Everything a user can get wrong is found here, before anything is compiled, and said in the user's
words: what was given, what is accepted. What comes after may rely on a `Problem` being sound.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fa4_hd256.gpus.devices import sms_are_shared
from fa4_hd256.gpus.family import describe_family, in_family
from fa4_hd256.kernels.blackwell.pair_plan import BLOCK_Q, TILE_Q
from fa4_hd256.kernels.limits import HEAD_DIM, TMA_ALIGNMENT, TMA_STRIDE_LIMIT
from fa4_hd256.kernels.problem_class import ELEMENT_TYPES, ProblemClass
from fa4_hd256.kernels.sequences import SequenceTensors
from schedulers.choice import backward_prefers_clc, clc_requested, prefers_clc

DTYPES = tuple(ELEMENT_TYPES)

#: Tensors that describe ragged sequences, in the order in which the kernel takes them.
RAGGED = SequenceTensors._fields


@dataclass(frozen=True)
class Options:
    """What a call asks for beside q, k and v, validated.

    softmax_scale: finite. window: keys visible to the left and right of the diagonal, None for
    unbounded; causal is (., 0). softcap: 0 for none.
    """

    softmax_scale: float
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    use_clc: bool = False

    @classmethod
    def check(
        cls, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, use_clc: bool = False
    ) -> Options:
        """Validate the options as users give them.

        Raises TypeError or ValueError; see the check_* functions for what is accepted.
        """
        check_causal(causal)
        left, right = check_window(window_size)
        return cls(
            check_scale(softmax_scale), (left, 0 if causal else right), check_softcap(softcap),
            use_clc,
        )

    def scheduled(
        self,
        use_clc: bool | None,
        rows: int = 1,
        offsets: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> Options:
        """The same with the tile scheduler that a user who passes `use_clc` gets.

        rows: of queries. offsets, longest: cu_seqlens_q and max_seqlen_q where these are packed.
        Raises as `clc_requested` does.
        """
        filling = (1, 1)
        if offsets is not None and longest is not None:
            filling = rows, (offsets.numel() - 1) * longest
        default = prefers_clc(self.window != (None, None), *filling, sms_are_shared())
        return replace(self, use_clc=clc_requested(use_clc, default))

    def backward_use_clc(self, use_clc: bool | None, ragged: bool) -> bool:
        """Whether the backward of a user who passes `use_clc` takes the dynamic tile scheduler.

        ragged: whether sequences have lengths of their own. Raises as `clc_requested` does.
        """
        default = backward_prefers_clc(self.window != (None, None), ragged, sms_are_shared())
        return clc_requested(use_clc, default)


@dataclass(frozen=True)
class Problem:
    """A forward call: q (batch, seqlen_q, heads_q, 256), k and v (batch, seqlen_k, heads_kv, 256).

    Packed sequences have a batch of 1 here and `sequences` entries. max_seqlen_q, max_seqlen_k:
    bounds on the longest sequence, which grids follow. num_splits: parts into which the forward
    divides the keys of each query tile (see `splits`).
    """

    q_shape: tuple[int, ...]
    max_seqlen_q: int
    max_seqlen_k: int
    sequences: int
    dtype: torch.dtype
    device: torch.device
    options: Options
    sink: bool
    ragged: tuple[str, ...]
    packed_heads: int = 1
    num_splits: int = 1

    @classmethod
    def describe(
        cls,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: Options,
        sink: torch.Tensor | None = None,
        ragged: dict[str, torch.Tensor] | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Problem:
        """Validate q, k, v (4-D) and what goes with them.

        ragged: those of `RAGGED` that are given. max_seqlen_q: with cu_seqlens_q. max_seqlen_k:
        with cu_seqlens_k; None for as many as k has rows.

        Raises TypeError for an argument of the wrong kind or dtype and ValueError for a wrong
        shape, head_dim, ratio of heads, device or length.
        """
        q, k, v = tensors
        named = {"q": q, "k": k, "v": v}
        ragged = ragged or {}
        check_tensors(named)
        check_shapes(q.shape, k.shape, v.shape, "cu_seqlens_q" in ragged, "cu_seqlens_k" in ragged)
        check_device(q.device)
        if sink is not None:
            check_sink(sink, q)
        sequences = check_sequences(q, k, ragged)
        if max_seqlen_k is None:
            max_seqlen_k = max(1, k.shape[1])
        return cls(
            q_shape=tuple(q.shape),
            max_seqlen_q=check_max_seqlen("q", q, ragged, max_seqlen_q),
            max_seqlen_k=check_max_seqlen("k", k, ragged, max_seqlen_k),
            sequences=sequences,
            dtype=q.dtype,
            device=q.device,
            options=options,
            sink=sink is not None,
            ragged=tuple(name for name in RAGGED if name in ragged),
            packed_heads=packed_heads(q.shape[2] // k.shape[2], ragged),
        )

    @property
    def problem_class(self) -> ProblemClass:
        options = self.options
        left, right = options.window
        return ProblemClass(
            self.dtype,
            left is not None,
            right is not None,
            options.softmax_scale < 0,
            options.softcap > 0,
            self.sink,
            self.ragged,
            options.use_clc,
            self.packed_heads,
            self.num_splits > 1,
        )

    @property
    def tile_queries(self) -> int:
        """Queries of a tile of the forward."""
        return TILE_Q // self.packed_heads

    @property
    def num_tiles(self) -> int:
        """Query tiles of the forward's grid, empty ones of short sequences included."""
        blocks = -(-self.max_seqlen_q // self.tile_queries)
        return blocks * (self.q_shape[2] // self.packed_heads) * self.sequences

    @property
    def is_empty(self) -> bool:
        """Whether there is no query row at all, so that nothing is launched."""
        return self.sequences == 0 or self.q_shape[0] == 0 or self.q_shape[1] == 0

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        batch, seqlen, heads, _ = self.q_shape
        return (batch, heads, seqlen)


def packed_heads(group: int, ragged: Any) -> int:
    """How many of the `group` query heads of a KV head share a query tile: all or none.

    All where they divide a CTA's rows: a causal tile then spans fewer queries, so that less of it
    is masked, and short sequences fill it. None where queries have lengths in use: a descriptor
    that clips rows of a batch entry has no dimension left for the heads.
    """
    return group if BLOCK_Q % group == 0 and "seqused_q" not in ragged else 1


def check_tensors(
    tensors: dict[str, torch.Tensor], packed: dict[str, bool] | None = None
) -> None:
    """Each a tensor of head_dim 256, all of one accepted dtype and on one device.

    packed: which of them are (total, heads, 256), the others being (batch, seqlen, heads, 256).
    """
    packed = packed or {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got {tensor.layout}")
        if tensor.dtype not in DTYPES:
            accepted = " or ".join(map(str, DTYPES))
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {accepted}")
        dimensions, form = 4, f"(batch, seqlen, heads, {HEAD_DIM})"
        if packed.get(name):
            dimensions, form = 3, f"(total, heads, {HEAD_DIM})"
        if tensor.ndim != dimensions:
            raise ValueError(
                f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}; "
                f"accepted: {dimensions}, {form}"
            )
        if tensor.shape[-1] != HEAD_DIM:
            raise ValueError(
                f"{name} has head_dim {tensor.shape[-1]}, shape {tuple(tensor.shape)}; "
                f"accepted: {HEAD_DIM} only"
            )
    _check_equal("dtype", {name: t.dtype for name, t in tensors.items()}, TypeError)
    _check_equal("device", {name: t.device for name, t in tensors.items()}, ValueError)


def _check_equal(what: str, values: dict[str, object], error: type[Exception]) -> None:
    if len(set(values.values())) > 1:
        given = ", ".join(f"{name} {value}" for name, value in values.items())
        raise error(f"{', '.join(values)} must share one {what}; got {given}")


def check_shapes(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    packed_q: bool = False,
    packed_k: bool = False,
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


def check_window(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) with None for unbounded; -1 means unbounded too."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; accepted: a pair (left, right)")
    sides = []
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window_size is {window_size!r}; each side must be an int or None")
        if side is not None and side < -1:
            raise ValueError(
                f"window_size is {window_size!r}; accepted: 0 or more, None or -1 for unbounded"
            )
        sides.append(None if side == -1 else side)
    return sides[0], sides[1]


def check_softcap(softcap: Any) -> float:
    """The softcap as a Python float, 0 for none."""
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a real number, got {type(softcap).__name__}")
    if not 0 <= float(softcap) <= torch.finfo(torch.float32).max:
        raise ValueError(f"softcap is {softcap}; accepted: 0 (none) or a positive finite number")
    return float(softcap)


def check_sink(sink: torch.Tensor, q: torch.Tensor) -> None:
    """One logit per query head."""
    if not isinstance(sink, torch.Tensor):
        raise TypeError(f"learnable_sink must be a torch.Tensor, got {type(sink).__name__}")
    if sink.dtype not in (torch.float32, *DTYPES):
        accepted = ", ".join(map(str, (torch.float32, *DTYPES)))
        raise TypeError(f"learnable_sink has dtype {sink.dtype}; accepted: {accepted}")
    if tuple(sink.shape) != (q.shape[2],):
        raise ValueError(
            f"learnable_sink has shape {tuple(sink.shape)}; accepted: ({q.shape[2]},), one logit "
            "per query head"
        )
    _check_equal("device", {"q": q.device, "learnable_sink": sink.device}, ValueError)


def given_ragged(*tensors: Any) -> dict[str, Any]:
    """Those of the four tensors of `RAGGED`, given in its order, that are not None, by name."""
    return {name: t for name, t in zip(RAGGED, tensors, strict=True) if t is not None}


def check_ragged_types(ragged: dict[str, Any]) -> None:
    """Each an int32 tensor."""
    for name, tensor in ragged.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be an int32 tensor")


def check_max_type(side: str, longest: Any) -> int:
    """The same, an int: reading a tensor would synchronise with the device."""
    if longest is None or isinstance(longest, bool) or not isinstance(longest, int):
        raise TypeError(
            f"max_seqlen_{side} must be an int with cu_seqlens_{side}, got {longest!r}; a tensor "
            "is not accepted because reading it would synchronise with the device"
        )
    return longest


def check_sequences(q: torch.Tensor, k: torch.Tensor, ragged: dict[str, torch.Tensor]) -> int:
    """Types, shapes and, on the CPU, contents of the ragged tensors; returns the batch size."""
    check_ragged_types(ragged)
    sizes = {}
    for name, tensor in ragged.items():
        if tensor.ndim != 1 or tensor.stride(0) != 1:
            raise ValueError(f"{name} must be one-dimensional and contiguous")
        _check_equal("device", {"q": q.device, name: tensor.device}, ValueError)
        sizes[name] = tensor.numel() - name.startswith("cu_")
    for side, tensor in (("q", q), ("k", k)):
        if f"cu_seqlens_{side}" not in ragged:
            sizes[side] = tensor.shape[0]
    if len(set(sizes.values())) > 1 or min(sizes.values()) < 0:
        raise ValueError(
            f"the batch sizes disagree: {sizes} (cu_seqlens hold batch + 1 offsets, seqused batch "
            "lengths)"
        )
    if q.device.type == "cpu":
        _check_offsets(q, k, ragged)
    return next(iter(sizes.values()))


def _check_offsets(q: torch.Tensor, k: torch.Tensor, ragged: dict[str, torch.Tensor]) -> None:
    """Offsets ascend from 0 to the total; lengths in use are not negative. Only on the CPU, where
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
    longest = check_max_type(side, longest)
    if longest < 1:
        raise ValueError(f"max_seqlen_{side} is {longest}; accepted: 1 or more")
    if tensor.device.type == "cpu" and offsets.numel() > 1:
        found = int(offsets.diff().max())
        if found > longest:
            rows = {"q": "query", "k": "key"}[side]
            raise ValueError(
                f"max_seqlen_{side} is {longest}, but a sequence has {found} {rows} rows"
            )
    return longest


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
    """CPU tensors run in the simulator, CUDA tensors on a GPU of the family (`family.FAMILY`);
    nothing else is offered."""
    if device.type == "cpu":
        return
    accepted = (
        f"accepted: CUDA tensors on a {describe_family()}, or CPU tensors, for which the compiled "
        "kernel runs in the simulator"
    )
    if device.type != "cuda":
        raise ValueError(f"q, k and v are on device {device}; {accepted}")
    capability = torch.cuda.get_device_capability(device)
    if not in_family(capability):
        raise ValueError(
            f"q, k and v are on {device}, a {torch.cuda.get_device_name(device)} with compute "
            f"capability {capability[0]}.{capability[1]}; {accepted}"
        )


def tma_can_take(tensor: torch.Tensor) -> bool:
    """Whether TMA can read the tensor where it lies; strides of dimensions of size 1 mean nothing.

    A stride of 0 (an expanded dimension) is refused: CuTe DSL 4.8 encodes it as a positive one
    into the descriptor.
    """
    if tensor.numel() == 0:
        return True
    if tensor.data_ptr() % TMA_ALIGNMENT:
        return False
    *outer, last = zip(tensor.shape, tensor.stride())
    if last[0] > 1 and last[1] != 1:
        return False
    strides = (stride * tensor.element_size() for size, stride in outer if size > 1)
    return all(s % TMA_ALIGNMENT == 0 and 0 < s < TMA_STRIDE_LIMIT for s in strides)


def without_expanded_heads(
    k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with one head where all their heads are one expanded head: grouped queries read
    it without a copy."""
    if k.shape[2] > 1 and k.stride(2) == 0 and v.stride(2) == 0:
        return k[:, :, :1], v[:, :, :1]
    return k, v


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
