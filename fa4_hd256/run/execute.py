"""Run a plan: allocate, launch in order on one stream, return the results.

There is no other way to run anything: first calls and repeated ones, compiled graphs, captures of
CUDA graphs and calls in the simulator come here. An `Execution` is a plan made ready: its kernels
are compiled and loaded. Their arguments, all but addresses, are packed at the first run, and once
more for each thread that runs it meanwhile. What a repeated call does is `Execution.run` alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass.cute.runtime import from_dlpack

from ..call.memory import View
from ..gpus.devices import is_captured
from ..kernels.problem_class import TILE_COUNTER
from ..private_torch import current_device, current_stream
from . import launch
from .arguments import STREAM, Number, Slot, leaves, mapped
from .catalogue import KernelSpec
from .compile import CompiledKernel, MissingKernelError, compile_kernel, is_capturing
from .kept_tensors import made_to_keep
from .plan import Allocation, Launch, LaunchPlan, Operation
from .tile_counter import tile_counter

#: Tensors of a call in the order of its arguments, None for one that is not given.
Tensors = Sequence[torch.Tensor | None]
#: Makes a tensor, at every call a new one.
Make = Callable[[], torch.Tensor]


def execute(plan: LaunchPlan, tensors: Tensors) -> tuple[Any, ...]:
    """Run a plan once. tensors: those that it was made for, or others that lie like them."""
    return Execution(plan).run(tensors, addresses_of(tensors))


def addresses_of(tensors: Tensors) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def prepare_others(specs: Sequence[KernelSpec], device: torch.device) -> None:
    """Load kernels of other lengths, compiled unless that is forbidden."""
    for spec in specs:
        try:
            kernel = compile_kernel(spec)
        except MissingKernelError:
            continue
        launch.prepare(kernel, device)


class Execution:
    """A plan that this process can run, from any thread.

    values: arguments of the call that are no tensors, None where nobody asks for them. written:
    places of the tensors that it writes to. has_run: whether it has run to its end.
    is_differentiable: whether its call was found to be one that has gradients.
    """

    def __init__(self, plan: LaunchPlan, values: Any = None, written: tuple[int, ...] = ()) -> None:
        """Load all kernels before any is launched. Raises as `compile_kernel` does."""
        self.plan, self.values, self.written = plan, values, written
        self.has_run = self.is_differentiable = False
        device = plan.device
        allocations, self.begins = _together(plan)
        self._make = [_maker(one, device) for one in allocations]
        self._make_only_first = [_unread_maker(one, device) for one in allocations]
        operations = [step for step in plan.steps if isinstance(step, Operation)]
        results = [one.result for one in operations if one.result is not None]
        names = [*plan.inputs, *(one.name for one in allocations), *results, TILE_COUNTER]
        #: Number of each tensor that the plan names: its place in the list of addresses.
        self.numbers = {name: number for number, name in enumerate(names)}
        self.numbers |= dict.fromkeys(self.begins, self.numbers.get(_SCRATCH, 0))
        #: Zeros: places of what operations make and of the counter, filled in each run's own list.
        self._later = [0] * (len(results) + 1)
        compiled = {spec: compile_kernel(spec) for spec in plan.specs}
        if device.type == "cuda" and not is_capturing():
            # At the first step of a training run, not in the middle of it.
            prepare_others(plan.other_lengths, device)
        #: The kernel of each spec and its host code, None for the simulator.
        self._kernels = {
            spec: (kernel, launch.host_function(kernel, device))
            for spec, kernel in compiled.items()
        }
        for step in plan.launches:
            kernel = compiled[step.spec]
            if not kernel.in_process.is_checked:
                check_convention(kernel, step)
                kernel.in_process.is_checked = True
        self._index = device.index if device.type == "cuda" else None
        views = [view for step in plan.launches for view in step.views]
        self._counts = any(view.name == TILE_COUNTER for view in views)
        #: Steps with packed arguments that no thread uses now.
        self._free: list[tuple[Any, ...]] = []
        self._results = tuple([None if r is None else self.numbers[r] for r in plan.results])
        made = range(len(plan.inputs), len(plan.inputs) + len(allocations))
        are_made = all(r is None or r in made for r in self._results)
        #: Whether tensors are wanted by name: allocations alone are in their order.
        self._by_name = bool(operations) or not are_made or len(self._results) < 2
        if not self._by_name:
            # Of allocations and, last of them, None: in C.
            places = [-1 if r is None else r - len(plan.inputs) for r in self._results]
            self._results_of = operator.itemgetter(*places)

    def run(
        self, tensors: Tensors, addresses: Sequence[int], only_first: bool = False
    ) -> tuple[Any, ...]:
        """Return the plan's results. addresses: of given tensors; only_first: as of `plans.run`."""
        index, stream = self._index, 0
        if index is not None:
            if current_device() != index:
                with torch.cuda.device(index):
                    return self.run(tensors, addresses, only_first)
            stream = current_stream(index)
        allocated = [new() for new in (self._make_only_first if only_first else self._make)]
        where = [*addresses, *[tensor.data_ptr() for tensor in allocated], *self._later]
        by_number: list[Any] = []
        if self._by_name:
            present = [tensor for tensor in tensors if tensor is not None]
            by_number = [*present, *allocated, *[None] * len(self._later)]
        counter = None
        if self._counts:
            # Launches of a run share it, one after the other on their stream. One that is made for
            # a graph or a simulated launch lives until they are done.
            counter = tile_counter(self.plan.device, stream)
            where[-1] = counter.data_ptr()
        try:
            steps = self._free.pop()
        except IndexError:
            steps = self._new_steps()
        for step in steps:
            step.run(where, stream, by_number)
        # Behind an error they are dropped, and the next call packs new ones.
        self._free.append(steps)
        self.has_run = True
        if self._by_name:
            return tuple([None if r is None else by_number[r] for r in self._results])
        results: tuple[Any, ...] = self._results_of((*allocated, None))
        return results

    def _new_steps(self) -> tuple[Any, ...]:
        return tuple(
            [
                _OperationStep(step, self.numbers)
                if isinstance(step, Operation)
                else _LaunchStep(step, self)
                for step in self.plan.steps
            ]
        )


# ---------------------------------------------------------------- packed arguments

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
    word: int
    number: int
    offset: int


class PackedArguments:
    """A launch's arguments, packed in memory of their own, for one thread at a time."""

    def __init__(self, step: Launch, numbers: Mapping[str, int], begins: Mapping[str, int]) -> None:
        """numbers: of the tensors that the plan names. begins: in bytes, of those that do not begin
        where their memory does."""
        content, starts = bytearray(), []
        #: Of the views, in their order.
        self._places: list[_Place] = []
        stream: int | None = None
        for slot in step.slots:
            start = len(content) // _WORD
            starts.append(start)
            if isinstance(slot, View):
                begin = begins.get(slot.name, 0) + slot.begin
                self._places.append(_Place(start, numbers[slot.name], begin))
            elif slot is STREAM:
                stream = start
            content += _words(slot)
        if stream is None:
            raise RuntimeError(f"the arguments of {step.spec.kind} lack the stream")
        self._stream = stream
        # The status that the host code returns lies behind the arguments.
        self._status = len(content) // _WORD
        words = struct.unpack(f"<{self._status}Q", content)
        self._memory = (ctypes.c_uint64 * (self._status + 1))(*words)
        # Written faster than the array itself.
        self._words = memoryview(self._memory).cast("B").cast("Q")
        begin = ctypes.addressof(self._memory)
        #: Of the arguments, in their order.
        self.addresses = tuple([begin + _WORD * start for start in starts])
        all_addresses = (*self.addresses, begin + _WORD * self._status)
        self._array = (ctypes.c_void_p * len(all_addresses))(*all_addresses)
        self._address = ctypes.addressof(self._array)
        # Most tensors begin where their view does.
        self._whole = tuple([(p.word, p.number) for p in self._places if not p.offset])
        self._shifted = tuple([tuple(p) for p in self._places if p.offset])

    def write(self, addresses: Sequence[int], stream: int) -> None:
        """addresses: of the plan's tensors, by number."""
        words = self._words
        for word, number in self._whole:
            words[word] = addresses[number]
        for word, number, offset in self._shifted:
            words[word] = addresses[number] + offset
        words[self._stream] = stream


def _raise(status: int) -> NoReturn:
    from cutlass.base_dsl.runtime import cuda as helpers

    raise helpers.create_cuda_runtime_error(status, helpers.cudart.cudaError_t)


def check_convention(compiled: CompiledKernel, step: Launch) -> None:
    """Compare a kernel's packed arguments with CuTe DSL's own. Raises RuntimeError."""
    of_views: list[torch.Tensor] = []
    arguments = mapped(step.arguments, _small)
    values = mapped(arguments, lambda slot: value_of(_in_memory(slot, of_views)))
    addresses, adapted = compiled.execution_args.generate_execution_args(values, {})
    slots = tuple(leaves(arguments))
    packed = [_content(slot, address) for slot, address in zip(slots, addresses)]
    expected = [_words(slot) for slot in slots]
    for index, tensor in zip([i for i, s in enumerate(slots) if isinstance(s, View)], of_views):
        expected[index] = tensor.data_ptr().to_bytes(_WORD, "little") + expected[index][_WORD:]
    del adapted
    if len(slots) != len(addresses) or packed != expected:
        raise RuntimeError(
            f"CuTe DSL packs {len(addresses)} arguments of {compiled.function_name}, not as the "
            f"{len(slots)} of this package; its calling convention is not that of the version that "
            "this package is made for"
        )


def _small(slot: Slot) -> Slot:
    if isinstance(slot, View):
        return View.contiguous(slot.name, (1,) * slot.ndim, slot.dtype)
    return slot


def _in_memory(slot: Slot, of_views: list[torch.Tensor]) -> Slot | torch.Tensor:
    if not isinstance(slot, View):
        return slot
    of_views.append(torch.zeros(slot.shape, dtype=slot.dtype, device="cpu"))
    return of_views[-1]


def value_of(slot: Slot | torch.Tensor) -> Any:
    if isinstance(slot, torch.Tensor):
        described = from_dlpack(slot.detach(), assumed_align=slot.element_size())
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


# ---------------------------------------------------------------- steps


class _OperationStep:
    """Work of PyTorch's."""

    def __init__(self, operation: Operation, numbers: dict[str, int]) -> None:
        self._reads = [numbers[name] for name in operation.reads]
        self._function = operation.run
        self._result = None if operation.result is None else numbers[operation.result]

    def run(self, where: list[int], stream: int, by_number: list[Any]) -> None:
        output = self._function(*[by_number[number] for number in self._reads])
        if self._result is not None:
            assert output is not None
            by_number[self._result], where[self._result] = output, output.data_ptr()


class _LaunchStep(PackedArguments):
    """A launch: of a kernel's host code on a GPU, in the simulator for CPU tensors."""

    def __init__(self, step: Launch, of: Execution) -> None:
        super().__init__(step, of.numbers, of.begins)
        # The code of the host function belongs to the kernel's linked module.
        self._kernel, self._function = of._kernels[step.spec]
        self._views = step.views

    def run(self, where: list[int], stream: int, by_number: list[Any]) -> None:
        self.write(where, stream)
        if self._function is not None:
            self._function(self._address)
            status = self._words[self._status]
            if status:
                _raise(status & 0xFFFFFFFF)
            return
        views = zip(self._views, self._places, strict=True)
        memory = [_extent(v, where[at.number] + at.offset) for v, at in views if v.numel()]
        launch.simulate(self._kernel, self.addresses, sorted(memory))


def _extent(view: View, begin: int) -> tuple[int, int, str]:
    last = sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True))
    return begin, begin + (last + 1) * view.element_size(), view.name


# ---------------------------------------------------------------- memory


def maker(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, is_zero: bool = False
) -> Callable[[], torch.Tensor]:
    """Return the maker of contiguous tensors of a shape, of zeros or of anything. It calls
    `torch.empty_like`, or zeros_like, on one element expanded to the shape: PyTorch reads shape,
    dtype and device of a tensor in half the time that they take as arguments from Python."""
    if is_captured(device):
        # What is made now is of the graph's own memory, which nothing may keep.
        make = torch.zeros if is_zero else torch.empty
        return functools.partial(make, tuple(shape), dtype=dtype, device=device)
    like = torch.zeros_like if is_zero else torch.empty_like
    model = _element(dtype, device).expand(tuple(shape))
    return functools.partial(like, model, memory_format=torch.contiguous_format)


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return made_to_keep(lambda: torch.empty((), dtype=dtype, device=device), device)


def new_tensor(allocation: Allocation, device: torch.device) -> torch.Tensor:
    return _maker(allocation, device)()


def _maker(allocation: Allocation, device: torch.device) -> Make:
    size = math.prod(allocation.shape)
    is_zero = allocation.fills == ((0, size, 0.0),)
    make = maker(allocation.shape, allocation.dtype, device, is_zero)
    if is_zero or not allocation.fills:
        return make
    fills = allocation.fills

    def filled() -> torch.Tensor:
        made = make()
        for begin, end, value in fills:
            made.as_strided((end - begin,), (1,), begin).fill_(value)
        return made

    def filled_with_one() -> torch.Tensor:
        return make().fill_(fills[0][2])

    is_whole = len(fills) == 1 and fills[0][:2] == (0, size)
    return filled_with_one if is_whole else filled


#: Name, greatest size and alignment, in bytes, of the memory of `_together`.
_SCRATCH, MOST_SCRATCH, _SCRATCH_ALIGNMENT = "scratch", 1 << 24, 512


def _together(plan: LaunchPlan) -> tuple[list[Allocation], dict[str, int]]:
    """Return the allocations with one in place of all that kernels alone write and read, and the
    first byte of each of these in it. To allocate takes longer than to launch. Large memory stays
    apart, since one block for all may not be there where two are."""
    named = {*plan.results}
    for step in plan.steps:
        named |= {*step.reads} if isinstance(step, Operation) else set()
    begins: dict[str, int] = {}
    size = 0
    for one in plan.allocations:
        if not (one.may_be_shared or one.fills or one.name in named):
            begins[one.name] = size
            size += math.prod(one.shape) * one.dtype.itemsize
            size += -size % _SCRATCH_ALIGNMENT
    if len(begins) < 2 or size > MOST_SCRATCH:
        return [*plan.allocations], {}
    others = [one for one in plan.allocations if one.name not in begins]
    return [*others, Allocation(_SCRATCH, (size,), torch.uint8)], begins


#: Elements of float32 of the memory that calls write to and nobody reads, 1 MiB, and it by device.
UNREAD_ELEMENTS = 1 << 18
_unread: dict[int | None, torch.Tensor] = {}


def _unread_maker(allocation: Allocation, device: torch.device) -> Make:
    """Return the maker of memory that no caller reads: the device's own, if it is large enough.
    Kernels of any stream write to that at any time. It is not made while a CUDA graph is captured,
    whose memory nothing may keep."""
    is_small = math.prod(allocation.shape) <= UNREAD_ELEMENTS and not allocation.fills
    if device.type != "cuda" or not (is_small and allocation.may_be_shared):
        return _maker(allocation, device)
    if device.index not in _unread:
        if torch.cuda.is_current_stream_capturing():
            return _maker(allocation, device)
        _unread[device.index] = made_to_keep(
            lambda: torch.empty(UNREAD_ELEMENTS, dtype=torch.float32, device=device), device
        )
    shared = _unread[device.index]
    return lambda: shared
