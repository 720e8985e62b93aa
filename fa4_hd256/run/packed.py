"""Launches whose arguments are packed once: launching again writes addresses and the stream.

A compiled kernel's host code takes an array of addresses, one of each argument; a tensor's argument
is a descriptor, its base address first, then sizes and strides. Of calls alike only base addresses
and the stream differ. CuTe DSL packs the arguments of the first call; their bytes are copied, so
that no tensor of it is kept, and a `PackedLaunch` puts others' addresses into them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import cuda.bindings.driver as cuda
import torch

from .compile import CompiledKernel

__all__ = ["COUNTER", "LaunchTemplate", "PackedLaunch", "host_function", "tensor_leaves"]

#: Role of the dynamic scheduler's counter: its address is the stream's.
COUNTER = "tile_counter"

_WORD = 8
_SCALAR_BYTES = 4

#: What stands in for a kernel's host code where there is no GPU: from a compiled kernel, a function
#: of the address of the packed arguments; None: nothing does, and nothing is packed. Tests and
#: `bench host` set it.
stand_in: Callable[[CompiledKernel], Callable[[int], Any]] | None = None


def host_function(compiled: CompiledKernel, device: torch.device) -> Callable[[int], Any] | None:
    """The host code of a kernel, loaded into the process's GPUs: a function of the address of the
    packed arguments. For the CPU what stands in, None where nothing does."""
    if device.type != "cuda":
        return None if stand_in is None else stand_in(compiled)
    # Loads the kernel where that has not been done; the kernel is nobody's device alone.
    return compiled.function.to(None).capi_func


def _raise(status: int) -> NoReturn:
    """Raise what a call of a compiled function does when its host code returns this status."""
    from cutlass.base_dsl.runtime import cuda as helpers

    raise helpers.create_cuda_runtime_error(status, helpers.cudart.cudaError_t)


class _Place(NamedTuple):
    """Where a base address is written: a word, and bytes from the begin of the role's tensor."""

    word: int
    role: int
    offset: int


def _leaves(value: Any) -> Iterator[Any]:
    """Arguments in the order in which CuTe DSL packs them, which leaves out None."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif value is not None:
        yield value


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "load_dltensor")


def tensor_leaves(values: tuple) -> list[Any]:
    """The tensors among a call's arguments."""
    return [leaf for leaf in _leaves(values) if _is_tensor(leaf)]


def _size(leaf: Any) -> int:
    """Bytes of a packed argument: of a tensor the address, 32-bit sizes, and 64-bit strides of all
    dimensions but the innermost."""
    if isinstance(leaf, cuda.CUstream):
        return _WORD
    if _is_tensor(leaf):
        rank = len(leaf.shape)
        return _WORD + -(-_SCALAR_BYTES * rank // _WORD) * _WORD + _WORD * (rank - 1)
    return _SCALAR_BYTES


class LaunchTemplate:
    """A kernel's packed arguments, without the addresses.

    function: see `host_function`.  words: of all arguments, one after the other.
    starts: word at which each begins.  places: where addresses go.  stream: its word.
    """

    def __init__(
        self,
        compiled: CompiledKernel,
        function: Callable[[int], Any],
        values: tuple,
        bases: Sequence[tuple[int, int]],
        counts: bool = False,
    ) -> None:
        """values: the arguments of a call. bases: for each tensor among them the number of its
        role, and the address of what has it. counts: the last is the scheduler's counter.

        Raises RuntimeError if CuTe DSL packs them in another way than this module knows.
        """
        leaves = list(_leaves(values))
        addresses, kept = compiled.execution_args.generate_execution_args(values, {})
        if len(leaves) != len(addresses):
            raise RuntimeError(
                f"CuTe DSL packs {len(leaves)} arguments into {len(addresses)}; its calling "
                "convention is not that of the version that this package is made for"
            )
        self.compiled, self.function, self.counts = compiled, function, counts
        self.linked = compiled.linked
        self.words: list[int] = []
        self.starts: list[int] = []
        places, remaining = [], list(bases)
        stream = None
        for leaf, address in zip(leaves, addresses, strict=True):
            start, size = len(self.words), _size(leaf)
            self.starts.append(start)
            content = ctypes.string_at(getattr(address, "value", address), size)
            content += bytes(-size % _WORD)
            words = [
                int.from_bytes(content[i : i + _WORD], "little")
                for i in range(0, len(content), _WORD)
            ]
            if _is_tensor(leaf):
                role, base = remaining.pop(0)
                if words[0] != leaf.data_ptr:
                    raise RuntimeError(
                        "a tensor's descriptor of CuTe DSL does not begin with its address; its "
                        "calling convention is not that which this package is made for"
                    )
                places.append(_Place(start, role, words[0] - base))
                words[0] = 0
            elif isinstance(leaf, cuda.CUstream):
                stream = start
            self.words += words
        del kept
        if stream is None or remaining:
            raise RuntimeError("a kernel's arguments lack the stream, or a tensor that has a role")
        self.stream, self.places = stream, tuple(places)


class PackedLaunch:
    """A template's arguments in memory of their own, for one thread at a time."""

    def __init__(self, template: LaunchTemplate) -> None:
        # The status that the host code returns lies behind the arguments.
        self._status = len(template.words)
        self._memory = (ctypes.c_uint64 * (self._status + 1))(*template.words)
        # Written faster than the array itself.
        self._words = memoryview(self._memory).cast("B").cast("Q")
        begin = ctypes.addressof(self._memory)
        starts = (*template.starts, self._status)
        self._packed = (ctypes.c_void_p * len(starts))(
            *(begin + _WORD * start for start in starts)
        )
        self._address = ctypes.addressof(self._packed)
        self._function, self.counts = template.function, template.counts
        # Most tensors begin where their descriptor does.
        self._plain = tuple([(p.word, p.role) for p in template.places if not p.offset])
        self._shifted = tuple([tuple(p) for p in template.places if p.offset])
        self._stream = template.stream
        # Kept alive: the code belongs to the linked module.
        self._kept = template.compiled, template.linked

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on a stream of the current device. addresses: of the roles' tensors, by number.

        Raises as a call of the compiled function does where the launch fails.
        """
        words = self._words
        for word, role in self._plain:
            words[word] = addresses[role]
        for word, role, offset in self._shifted:
            words[word] = addresses[role] + offset
        words[self._stream] = stream
        self._function(self._address)
        if words[self._status]:
            _raise(words[self._status] & 0xFFFFFFFF)
