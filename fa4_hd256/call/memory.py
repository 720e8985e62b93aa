"""Memory of a call's tensors: how they lie, what is read in place or copied, what may be written
to, and which views share a byte."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..kernels.limits import TMA_ALIGNMENT, TMA_STRIDE_LIMIT
from ..kernels.problem_class import result_dtypes

#: Bytes: the strictest alignment that any kernel's argument has.
ALIGNMENT = 32


@dataclass(frozen=True)
class View:
    """A view of a tensor that a plan names: shape, strides and offset in elements, without memory.
    Methods have PyTorch's names and meaning, so that what divides and reshapes tensors takes views
    as well. past_alignment: bytes of the named tensor's address past a multiple of `ALIGNMENT`."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    past_alignment: int = 0

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> View:
        """Return the view that is all of a tensor."""
        past = tensor.data_ptr() % ALIGNMENT
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, 0, past)

    @classmethod
    def contiguous(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> View:
        return cls(name, tuple(shape), contiguous_strides(shape), dtype)

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        begin = f" + {self.offset}" if self.offset else ""
        strided = "" if self.is_contiguous() else f" strides {self.strides}"
        return f"{self.name}{begin} ({sizes}){strided} {str(self.dtype).removeprefix('torch.')}"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dimension: int | None = None) -> Any:
        return self.strides if dimension is None else self.strides[dimension]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self.past_alignment + self.begin

    @property
    def begin(self) -> int:
        return self.offset * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        expected = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return not self.numel() or all(n == 1 or own == dense for n, own, dense in expected)

    def detach(self) -> View:
        return self

    def as_strided(self, shape: Sequence[int], strides: Sequence[int]) -> View:
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def narrow(self, dimension: int, start: int, length: int) -> View:
        shape = list(self.shape)
        shape[dimension] = length
        offset = self.offset + start * self.strides[dimension]
        return replace(self, shape=tuple(shape), offset=offset)

    def squeeze(self, dimension: int) -> View:
        if self.shape[dimension] != 1:
            return self
        shape, strides = list(self.shape), list(self.strides)
        del shape[dimension], strides[dimension]
        return self.as_strided(shape, strides)

    def unsqueeze(self, dimension: int) -> View:
        place = dimension % (self.ndim + 1)
        of_one = self.shape[place] * self.strides[place] if place < self.ndim else 1
        shape = (*self.shape[:place], 1, *self.shape[place:])
        return self.as_strided(shape, (*self.strides[:place], of_one, *self.strides[place:]))

    def view(self, form: torch.dtype | Sequence[int]) -> View:
        """Return the same bytes as elements of a wider type, or contiguous ones in a shape."""
        if not isinstance(form, torch.dtype):
            return self.as_strided(form, contiguous_strides(form))
        ratio = form.itemsize // self.dtype.itemsize
        if ratio <= 1:
            return replace(self, dtype=form)
        *outer, columns = self.shape
        strides = (*(stride // ratio for stride in self.strides[:-1]), 1)
        shape = (*outer, columns // ratio)
        return View(self.name, shape, strides, form, self.offset // ratio, self.past_alignment)

    def in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view's elements, given the tensor that it names, of the same dtype."""
        begin = tensor.storage_offset() + self.offset
        return tensor.detach().as_strided(self.shape, self.strides, begin)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    found, below = [], 1
    for size in reversed(shape):
        found.append(below)
        below *= max(size, 1)
    return tuple(reversed(found))


# ---------------------------------------------------------------- read in place, or copied

#: A tensor, or a view of one.
Strided = TypeVar("Strided", bound=Any)


def tma_can_take(tensor: Strided) -> bool:
    """Return True if TMA can read the tensor where it lies; strides of dimensions of size 1 mean
    nothing. A stride of 0 (an expanded dimension) is refused: CuTe DSL 4.8 encodes it as a positive
    one into the descriptor."""
    if tensor.numel() == 0:
        return True
    if tensor.data_ptr() % TMA_ALIGNMENT:
        return False
    if tensor.is_contiguous():  # of most calls, and found in a tenth of the time
        size = tensor.element_size()
        if (
            tensor.shape[-1] * size % TMA_ALIGNMENT == 0
            and tensor.numel() * size < TMA_STRIDE_LIMIT
        ):
            return True
    *outer, last = zip(tensor.shape, tensor.stride())
    if last[0] > 1 and last[1] != 1:
        return False
    strides = (stride * tensor.element_size() for size, stride in outer if size > 1)
    return all(s % TMA_ALIGNMENT == 0 and 0 < s < TMA_STRIDE_LIMIT for s in strides)


def without_expanded_heads(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v with one head where all are one expanded head: queries of a group read it."""
    if k.ndim == v.ndim == 4 and k.shape[2] > 1 and k.stride(2) == 0 and v.stride(2) == 0:
        return k[:, :, :1], v[:, :, :1]
    return k, v


def without_expansion(tensor: Strided) -> Strided:
    """Return a view with one entry in each of the first two dimensions that are expanded."""
    for dimension in range(2):
        if tensor.stride(dimension) == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def without_loose_strides(tensor: Strided) -> Strided:
    """Return the same memory; dimensions of size 1 get contiguous strides, which TMA takes."""
    strides, below = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        strides.append(stride if size > 1 else below)
        below = max(below, size * strides[-1])
    found: Strided = tensor.as_strided(tensor.shape, strides[::-1])
    return found


# ---------------------------------------------------------------- written to


def check_tensor(name: str, tensor: Any) -> None:
    """Raise TypeError for what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")


def check_device(name: str, device: torch.device, accepted: torch.device, like: str) -> None:
    """Raise ValueError for another device than that of the argument `like`."""
    if device != accepted:
        raise ValueError(f"{name} is on {device}; accepted: {accepted}, like {like}")


def require_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")


def check_in_place(tensors: dict[str, torch.Tensor], what: str) -> None:
    """Check that TMA can take tensors where they lie. what: needs that."""
    for name, tensor in tensors.items():
        if not tma_can_take(tensor):
            raise ValueError(
                f"{name} has strides {tensor.stride()} and begins at {tensor.data_ptr():#x}; "
                f"accepted with {what}: a last stride of 1, the other strides and the address "
                f"positive multiples of {TMA_ALIGNMENT} bytes"
            )


def check_out(out: Any, q: torch.Tensor) -> None:
    """A tensor to write the result to, like q, both as the user has them. Raises TypeError for
    another kind or dtype, ValueError for another shape or device, and for a negated view."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor or None, got {type(out).__name__}")
    require_dense("out", out)
    dtypes = result_dtypes(q.dtype)
    if out.dtype not in dtypes:
        accepted = " or ".join(map(str, dtypes))
        like = "" if len(dtypes) > 1 else ", like q"
        raise TypeError(f"out has dtype {out.dtype}; accepted: {accepted}{like}")
    if out.shape != q.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; accepted: {tuple(q.shape)}, like q")
    check_device("out", out.device, q.device, "q")
    # PyTorch fails in words of its own before it calls an operator. A graph cannot ask.
    if not torch.compiler.is_compiling():
        _check_not_negated("out", out)


def check_writable(out: torch.Tensor, inputs: Sequence[Any]) -> None:
    """Check that kernels can write to `out`. Raises TypeError, ValueError, and as `check_apart`."""
    require_dense("out", out)
    check_changeable("out", out)
    if not tma_can_take(out):
        raise ValueError(
            f"out has strides {out.stride()} from an address that is "
            f"{out.data_ptr() % TMA_ALIGNMENT} past a multiple of {TMA_ALIGNMENT}; accepted: a "
            f"last stride of 1, other strides and the address multiples of {TMA_ALIGNMENT} bytes"
        )
    check_not_overlapping("out", out)
    check_apart(out, inputs)


def check_writable_again(out: torch.Tensor, inputs: Sequence[Any]) -> None:
    """Check what no key of an earlier call has of `check_writable`: modes and addresses."""
    check_changeable("out", out)
    check_apart(out, inputs)


def check_changeable(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that PyTorch does not write to."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made under torch.inference_mode(), outside of which PyTorch does not "
            "write to it; accepted: a call under torch.inference_mode(), or another tensor"
        )


def check_not_overlapping(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is written to, of whose elements some may share memory:
    where a dimension steps into what those of smaller strides reach; and for one that PyTorch reads
    negated (`torch.Tensor.is_neg`)."""
    _check_not_negated(name, tensor)
    reached = 1
    sizes = sorted(zip(tensor.stride(), tensor.shape))
    for stride, size in sizes if tensor.numel() else ():
        if size > 1 and stride < reached:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, elements "
                "that share memory; accepted: memory of its own for each, as it is written to"
            )
        reached += (size - 1) * stride


def _check_not_negated(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_neg():
        raise ValueError(
            f"{name} is a negated view; accepted: a tensor whose memory holds its elements, as it "
            "is written to"
        )


def check_apart(
    out: torch.Tensor, inputs: Sequence[Any], what: str = "out lies in memory that the call reads"
) -> None:
    """Raise ValueError if memory written to is an input's too. what: begins the error."""
    if out.is_meta:
        return
    device, (begin, end) = out.device, memory_span(out)
    for tensor in inputs:
        # First what tells most tensors apart in the least time.
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.device == device
            and (other := tensor.data_ptr()) < end
            and (other >= begin or memory_span(tensor)[1] > begin)
            and share_memory(out, tensor)
        ):
            raise ValueError(f"{what}; accepted: memory of its own")


# ---------------------------------------------------------------- shared

#: Search steps after which two views count as overlapping.  Views of one buffer that differ by
#: slices, splits or transpositions take about as many steps as they have dimensions.
MOST_STEPS = 10_000

#: Multiples of a stride, in bytes: (stride, least factor, greatest factor).
_Steps = tuple[tuple[int, int, int], ...]


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last one."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():  # of most calls, and found in a tenth of the time
        return begin, begin + tensor.nbytes
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.element_size()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the views share a byte, or if `MOST_STEPS` do not decide it."""
    (begin, end), (other_begin, other_end) = memory_span(one), memory_span(other)
    if begin >= other_end or other_begin >= end or not (one.numel() and other.numel()):
        return False
    forms = (tuple(t.shape) + (t.element_size(),) for t in (one, other))
    strides = (tuple(n * t.element_size() for n in t.stride()) + (1,) for t in (one, other))
    return _meet(other_begin - begin, *forms, *strides)


@functools.lru_cache(maxsize=4096)
def _meet(
    distance: int,
    shape: tuple[int, ...],
    other_shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_strides: tuple[int, ...],
) -> bool:
    """Return True if a byte of one view is `distance` bytes from the other's start."""
    spans: dict[int, tuple[int, int]] = {}
    for stride, size in zip(strides, shape):
        least, most = spans.get(stride, (0, 0))
        spans[stride] = least, most + size - 1
    for stride, size in zip(other_strides, other_shape):
        least, most = spans.get(stride, (0, 0))
        spans[stride] = least - (size - 1), most
    steps = tuple((s, *spans[s]) for s in sorted(spans, reverse=True) if s and spans[s] != (0, 0))
    return _Search(steps).reaches(distance)


class _Search:
    """Sums of multiples of strides, the greatest stride first."""

    def __init__(self, steps: _Steps) -> None:
        self._steps, self._left = steps, MOST_STEPS
        # What the strides from each one on can add up to.
        self._reach = [_reach(steps[i:]) for i in range(len(steps) + 1)]

    def reaches(self, distance: int, first: int = 0) -> bool:
        """Return True if strides from the number `first` on add up to a distance."""
        low, high = self._reach[first]
        if not low <= distance <= high:
            return False
        if first == len(self._steps):
            return True
        self._left -= 1
        if self._left < 0:
            return True
        stride, least, most = self._steps[first]
        low, high = self._reach[first + 1]
        # Factors that leave a distance within reach of the smaller strides.
        begin = max(least, -((high - distance) // stride))
        end = min(most, (distance - low) // stride)
        return any(
            self.reaches(distance - factor * stride, first + 1) for factor in range(begin, end + 1)
        )


def _reach(steps: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """The least and the greatest sum."""
    return sum(s * low for s, low, _ in steps), sum(s * high for s, _, high in steps)
