"""Slots of a kernel's arguments in a plan: views of named tensors, numbers, and the stream."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = [
    "ALIGNMENT", "COUNTER", "STREAM", "Number", "Slot", "View", "contiguous_strides", "leaves",
    "mapped", "plain_arguments",
]  # fmt: skip

#: Bytes: the strictest alignment that any kernel's argument has.
ALIGNMENT = 32

#: Name of the dynamic scheduler's counter.
COUNTER = "tile_counter"


@dataclass(frozen=True)
class View:
    """A view of a tensor that a plan names: shape, strides and offset in elements, without memory.

    Methods have PyTorch's names and meaning, so that what divides and reshapes tensors takes views
    as well. past_alignment: bytes of the named tensor's address past a multiple of `ALIGNMENT`.
    """

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
        """Return the view that is all of a contiguous tensor."""
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
        """Return the address of the first element, counted from a multiple of `ALIGNMENT`."""
        return self.past_alignment + self.begin

    @property
    def begin(self) -> int:
        """Bytes from the named tensor's address to the first element."""
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
    """Return PyTorch's strides of a contiguous tensor."""
    found, below = [], 1
    for size in reversed(shape):
        found.append(below)
        below *= max(size, 1)
    return tuple(reversed(found))


@dataclass(frozen=True)
class Number:
    """A scalar of 32 bits. kind: "Int32" or "Float32"."""

    value: int | float
    kind: str

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "Float32" else str(self.value)


class _Stream(enum.Enum):
    """The slot of the CUDA stream."""

    STREAM = "stream"


STREAM = _Stream.STREAM

#: An argument of a kernel.
Slot = View | Number | _Stream


def leaves(arguments: Any) -> Iterator[Any]:
    """Arguments in the order in which CuTe DSL packs them, which leaves out None."""
    if isinstance(arguments, (tuple, list)):
        for part in arguments:
            yield from leaves(part)
    elif arguments is not None:
        yield arguments


def mapped(arguments: Any, function: Callable[[Slot], Any]) -> Any:
    """Return the nested arguments with `function` of each, in their order. Tuples keep their type,
    and None stays."""
    if isinstance(arguments, tuple):
        parts = [mapped(part, function) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)
    return None if arguments is None else function(arguments)


def plain_arguments(arguments: Any) -> Any:
    """Return the nested arguments with CuTe DSL's numbers as `Number`s."""

    def plain(argument: Any) -> Slot:
        if isinstance(argument, (View, _Stream)):
            return argument
        return Number(argument.value, type(argument).__name__)

    return mapped(arguments, plain)
