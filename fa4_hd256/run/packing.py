"""The calling convention of a compiled kernel's host code: arguments as words of memory.

The host code takes the address of an array of addresses, one of each argument, and behind them one
of the status that it returns. A tensor's argument is a descriptor: its address, 32-bit sizes, then
64-bit strides of all dimensions but the innermost, whose stride is 1. A scalar takes 4 bytes, the
stream 8. `check_convention` compares this with what the installed CuTe DSL packs.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass.cute.runtime import from_dlpack

from .compile import CompiledKernel
from .plan import Launch
from .slots import STREAM, Number, Slot, View, leaves, mapped

__all__ = ["PackedArguments", "Template", "check_convention"]

_WORD = 8
_NUMBERS = {"Int32": "<i", "Float32": "<f"}


def _words(slot: Slot) -> bytes:
    """A packed argument, whole words; addresses and the stream are 0."""
    if isinstance(slot, View):
        sizes = struct.pack(f"<{slot.ndim}i", *slot.shape)
        strides = struct.pack(f"<{slot.ndim - 1}q", *slot.strides[:-1])
        return bytes(_WORD) + _padded(sizes) + strides
    if isinstance(slot, Number):
        return _padded(struct.pack(_NUMBERS[slot.kind], slot.value))
    return bytes(_WORD)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % _WORD)


class _Place(NamedTuple):
    """Place of an address: a word, the number of the tensor, bytes from its address."""

    word: int
    number: int
    offset: int


class Template:
    """The arguments of a launch, packed but for addresses.

    words: of all arguments, one after the other. starts: word at which each begins. places: where
    addresses go. stream: its word.
    """

    def __init__(self, launch: Launch, numbers: Mapping[str, int]) -> None:
        """numbers: of the tensors that the plan names."""
        content, places, stream = bytearray(), [], None
        self.starts: list[int] = []
        for slot in launch.slots:
            start = len(content) // _WORD
            self.starts.append(start)
            if isinstance(slot, View):
                places.append(_Place(start, numbers[slot.name], slot.begin))
            elif slot is STREAM:
                stream = start
            content += _words(slot)
        if stream is None:
            raise RuntimeError(f"the arguments of {launch.spec.kind} lack the stream")
        self.words = struct.unpack(f"<{len(content) // _WORD}Q", content)
        self.stream, self.places = stream, tuple(places)


class PackedArguments:
    """A template's arguments in memory of their own, for one thread at a time."""

    def __init__(self, template: Template) -> None:
        # The status that the host code returns lies behind the arguments.
        self._status = len(template.words)
        self._memory = (ctypes.c_uint64 * (self._status + 1))(*template.words)
        # Written faster than the array itself.
        self._words = memoryview(self._memory).cast("B").cast("Q")
        begin = ctypes.addressof(self._memory)
        #: Of the arguments, in their order.
        self.addresses = tuple(begin + _WORD * start for start in template.starts)
        all_addresses = (*self.addresses, begin + _WORD * self._status)
        self._array = (ctypes.c_void_p * len(all_addresses))(*all_addresses)
        self._address = ctypes.addressof(self._array)
        # Most tensors begin where their view does.
        self._whole = tuple([(p.word, p.number) for p in template.places if not p.offset])
        self._shifted = tuple([tuple(p) for p in template.places if p.offset])
        self._stream = template.stream

    def write(self, addresses: Sequence[int], stream: int) -> None:
        """addresses: of the plan's tensors, by number."""
        words = self._words
        for word, number in self._whole:
            words[word] = addresses[number]
        for word, number, offset in self._shifted:
            words[word] = addresses[number] + offset
        words[self._stream] = stream

    def call(self, function: Callable[[int], Any], addresses: Sequence[int], stream: int) -> None:
        """`write`, then call a kernel's host code. Raises as a call of the compiled function
        does."""
        self.write(addresses, stream)
        function(self._address)
        status = self._words[self._status]
        if status:
            _raise(status & 0xFFFFFFFF)


def _raise(status: int) -> NoReturn:
    """Raise what a call of a compiled function does when its host code returns this status."""
    from cutlass.base_dsl.runtime import cuda as helpers

    raise helpers.create_cuda_runtime_error(status, helpers.cudart.cudaError_t)


def check_convention(compiled: CompiledKernel, launch: Launch) -> None:
    """Compare, once for a kernel, this module's packing with CuTe DSL's own: of arguments like
    those of a launch, whose tensors have one element. Raises RuntimeError where they differ."""
    kept: list[torch.Tensor] = []
    arguments = mapped(launch.arguments, _small)
    values = mapped(arguments, lambda slot: _value(slot, kept))
    addresses, adapted = compiled.execution_args.generate_execution_args(values, {})
    slots = tuple(leaves(arguments))
    given = [_content(slot, address) for slot, address in zip(slots, addresses)]
    own = [_words(slot) for slot in slots]
    for index, tensor in zip([i for i, s in enumerate(slots) if isinstance(s, View)], kept):
        own[index] = tensor.data_ptr().to_bytes(_WORD, "little") + own[index][_WORD:]
    del adapted
    if len(slots) != len(addresses) or given != own:
        raise RuntimeError(
            f"CuTe DSL packs {len(addresses)} arguments of {compiled.function_name}, not as the "
            f"{len(slots)} of this package; its calling convention is not that of the version that "
            "this package is made for"
        )


def _small(slot: Slot) -> Slot:
    """Return a view of one element, and any other slot as it is."""
    if isinstance(slot, View):
        return View.contiguous(slot.name, (1,) * slot.ndim, slot.dtype)
    return slot


def _value(slot: Slot, kept: list[torch.Tensor]) -> Any:
    """Return what a compiled function is called with. kept: gets the tensor of a view."""
    if isinstance(slot, View):
        kept.append(torch.zeros(slot.shape, dtype=slot.dtype, device="cpu"))
        described = from_dlpack(kept[-1], assumed_align=slot.element_size())
        return described.mark_layout_dynamic(leading_dim=slot.ndim - 1)
    if isinstance(slot, Number):
        return getattr(cutlass, slot.kind)(slot.value)
    return cuda.CUstream(0)


def _content(slot: Slot, address: Any) -> bytes:
    """Return the words that CuTe DSL packed for a slot, whole ones."""
    size = 4 if isinstance(slot, Number) else len(_words(slot))
    if isinstance(slot, View) and slot.ndim % 2:
        # Sizes of 32 bits before 64-bit strides: padding holds anything.
        sizes = _WORD + 4 * slot.ndim
        content = ctypes.string_at(getattr(address, "value", address), size)
        return content[:sizes] + bytes(4) + content[sizes + 4 :]
    return _padded(ctypes.string_at(getattr(address, "value", address), size))
