"""What a call launched, kept for calls like it.

While a `Recording` is active in a thread, `launch.launch` notes each kernel with its packed
arguments, and forward or backward notes what is allocated and what is done at the end. All that
depends on the call's key (`fa4_hd256.eager`), so a call with the same key is `Replayed`: allocate,
write addresses, launch. Where something does not repeat, copies of operands among it, the recording
is given up and every such call takes the long way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..call.layouts import as_kernel_operand, row_operand, table_operand
from .compile import CompiledKernel
from .packed import COUNTER, LaunchTemplate, PackedLaunch, host_function, tensor_leaves
from .tile_counter import tile_counter

__all__ = [
    "Allocate", "Make", "Recording", "Replayed", "current", "give_up", "in_place",
    "made_for", "operand",
    "recording", "row_values", "table",
]  # fmt: skip

#: Tensors of a call by role, in the order of a call's tensors.
Tensors = Sequence[torch.Tensor | None]
#: From a call's tensors and those that were made, in the order of their roles, its results.
Finish = Callable[[Tensors, tuple[torch.Tensor, ...]], tuple[Any, ...]]


#: Makes tensors, new ones at every call, from a call's tensors.
Make = Callable[[Tensors], tuple[torch.Tensor, ...]]


class Allocate(NamedTuple):
    """What a call allocates or makes. roles: of it; make: it, in that order. make_first: the same
    for calls of which the first result alone is read, None where that is no other."""

    roles: tuple[str, ...]
    make: Make
    make_first: Make | None = None


class _Active(threading.local):
    recording: Recording | None = None


_active = _Active()


def current() -> Recording | None:
    """This thread's recording."""
    return _active.recording


def give_up() -> None:
    """What runs now does not repeat: this thread's recording, if there is one, is of no use."""
    if _active.recording is not None:
        _active.recording.repeats = False


def operand(tensor: torch.Tensor) -> torch.Tensor:
    """`as_kernel_operand`; a call that copies one does not repeat."""
    return in_place(tensor, as_kernel_operand(tensor))


def row_values(tensor: torch.Tensor) -> torch.Tensor:
    """`row_operand`, likewise."""
    return in_place(tensor, row_operand(tensor))


def table(tensor: torch.Tensor) -> torch.Tensor:
    """`table_operand`, likewise."""
    return in_place(tensor, table_operand(tensor))


def in_place(given: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """used, what stands for a call's tensor; a call that copies it does not repeat."""
    if used.data_ptr() != given.data_ptr():
        give_up()
    return used


def made_for(tensors: Tensors, allocate: Allocate, finish: Finish) -> dict[str, torch.Tensor]:
    """What `allocate` makes for a call with these tensors, noted where a recording is active."""
    active = _active.recording
    made = allocate.make(tensors)
    if active is not None:
        active.made(allocate, finish, made)
    return dict(zip(allocate.roles, made, strict=True))


@contextlib.contextmanager
def recording(roles: Sequence[str], tensors: Tensors) -> Iterator[Recording]:
    """Record what this thread launches inside. roles: of the call's tensors."""
    before = _active.recording
    _active.recording = Recording(tuple(roles), tuple(tensors))
    try:
        yield _active.recording
    finally:
        _active.recording = before


@dataclass
class Recording:
    """The launches of one call. roles, tensors: of its arguments, None for one not given.

    repeats: whether calls like it launch the same. allocate, finish: what goes before and after.
    """

    roles: tuple[str, ...]
    tensors: tuple[torch.Tensor | None, ...]
    repeats: bool = True
    allocate: Allocate | None = None
    finish: Finish | None = None
    _known: dict[str, int] = field(default_factory=dict)
    _given: tuple[str, ...] = ()
    _templates: list[LaunchTemplate] = field(default_factory=list)
    _device: torch.device | None = None

    def __post_init__(self) -> None:
        for role, tensor in zip(self.roles, self.tensors, strict=True):
            if tensor is not None:
                self._known[role] = tensor.data_ptr()
        self._given = tuple(self._known)

    def made(self, allocate: Allocate, finish: Finish, made: tuple[torch.Tensor, ...]) -> None:
        """Note what was made for this call, and how."""
        self.allocate, self.finish = allocate, finish
        known = zip(allocate.roles, (tensor.data_ptr() for tensor in made), strict=True)
        self._known |= dict(known)

    def launched(
        self, compiled: CompiledKernel, device: torch.device, values: tuple, roles: Sequence[str]
    ) -> None:
        """Note a launch. values: its arguments; roles: of the tensors among them, in order; a
        counter of tiles behind them needs none."""
        function = host_function(compiled, device)
        if function is None or not roles or not self.repeats or self.allocate is None:
            self.repeats = False
            return
        leaves = tensor_leaves(values)
        if len(leaves) == len(roles) + 1:
            roles = (*roles, COUNTER)
        self._device = device
        numbers = {role: i for i, role in enumerate((*self._given, *self.allocate.roles, COUNTER))}
        bases = [
            (numbers[role], leaf.data_ptr if role == COUNTER else self._known[role])
            for role, leaf in zip(roles, leaves, strict=True)
        ]
        counts = COUNTER in roles
        self._templates.append(LaunchTemplate(compiled, function, values, bases, counts))

    def replayed(self) -> Replayed | None:
        """For calls like this one; None where they do not repeat it."""
        if not self.repeats or self.allocate is None or self.finish is None:
            return None
        assert self._device is not None
        return Replayed(self._device, self.allocate, self.finish, self._templates)


class Replayed:
    """The launches of a call that was recorded, for others of the same key, of any thread."""

    def __init__(
        self,
        device: torch.device,
        allocate: Allocate,
        finish: Finish,
        templates: list[LaunchTemplate],
    ) -> None:
        self._device, self._make, self._finish = device, allocate.make, finish
        self._make_first = allocate.make_first or allocate.make
        self._index = device.index if device.type == "cuda" else None
        self._templates = tuple(templates)
        #: Sets of packed arguments that no thread uses now.
        self._free: list[tuple[PackedLaunch, ...]] = []

    def run(
        self, tensors: Tensors, addresses: Sequence[int], first: bool = False
    ) -> tuple[Any, ...]:
        """The results of a call. addresses: of its tensors that are given. first: only the first
        result is read."""
        made = self._make_first(tensors) if first else self._make(tensors)
        where = [*addresses, *[tensor.data_ptr() for tensor in made], 0]
        index = self._index
        if index is None:
            self._launch(where, 0)
        elif torch._C._cuda_getDevice() == index:
            self._launch(where, torch._C._cuda_getCurrentRawStream(index))
        else:
            with torch.cuda.device(index):
                self._launch(where, torch._C._cuda_getCurrentRawStream(index))
        return self._finish(tensors, made)

    def _launch(self, addresses: list[int], stream: int) -> None:
        """addresses: of all roles; of the counter, the last one, whatever it be."""
        try:
            packed = self._free.pop()
        except IndexError:
            packed = tuple([PackedLaunch(template) for template in self._templates])
        kept = None  # a counter made for a graph lives until its launch is captured
        for launch in packed:
            if launch.counts:
                kept = tile_counter(self._device, stream)
                addresses[-1] = kept.data_ptr()
            launch.launch(addresses, stream)
        self._free.append(packed)
