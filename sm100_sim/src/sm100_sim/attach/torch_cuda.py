"""PyTorch's CUDA interface over CPU tensors, as the simulated device would answer.

`patches()` lists what to replace while attached: device queries, streams, events of `torch.cuda`,
tensor factories (a CUDA device becomes the CPU) and the tensor attributes that tell the device.
Every tensor counts as a CUDA tensor then; `.cuda()`, `.cpu()` and `.to(device)` copy, as a transfer
between two memories does.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils._device

from sm100_sim import devices
from sm100_sim.host.capsule import CudaCapsule

from . import graphs, streams
from .patch import ABSENT, Patch
from .scaled_mm import scaled_grouped_mm, scaled_mm

#: Bytes; the smallest block of PyTorch's caching CUDA allocator, whose blocks start at multiples.
ALLOCATION_ALIGNMENT = 512


class DeviceProperties:
    """Properties of the simulated device, as torch.cuda.get_device_properties returns them."""

    warp_size = 32
    is_integrated = is_multi_gpu_board = 0

    def __init__(self) -> None:
        device = devices.current()
        attributes = device.attributes
        self.name, (self.major, self.minor) = device.product, device.capability
        self.total_memory = device.memory_bytes
        self.multi_processor_count = device.sms
        self.max_threads_per_multi_processor = attributes[39]
        self.regs_per_multiprocessor = attributes[82]
        self.shared_memory_per_block = attributes[8]
        self.shared_memory_per_block_optin = attributes[97]
        self.shared_memory_per_multiprocessor = attributes[81]
        self.L2_cache_size = device.l2_bytes


class Stream:
    """A stream on which everything has completed: launches run synchronously."""

    device_index = 0
    priority = 0

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any
    ) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = streams.new() if stream_id is None else stream_id
        self._before: list[Stream] = []

    def synchronize(self) -> None:
        """Nothing is ever outstanding, and a stream that is captured cannot be waited for."""
        graphs.refuse_waiting("torch.cuda.Stream.synchronize", self.cuda_stream)

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event now."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Nothing is ever outstanding; waiting may join a capture, which is refused."""
        recorded = event.captured or event.recorded
        name = "torch.cuda.Stream.wait_event"
        graphs.refuse_joining(name, self.cuda_stream, event.captured, recorded)

    def wait_stream(self, stream: Stream) -> None:
        """Wait for what a stream has now."""
        inside = graphs.takes(stream.cuda_stream)
        graphs.refuse_joining("torch.cuda.Stream.wait_stream", self.cuda_stream, inside)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def __enter__(self) -> Stream:
        self._before.append(_current_stream())
        _set_stream(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _set_stream(self._before.pop())


class ExternalStream(Stream):
    """A stream by its handle."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(device, stream_id=int(stream_ptr))


class Event:
    """An event; elapsed time is this machine's wall time, not a prediction for a GPU."""

    cuda_event = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._time: float | None = None
        #: Whether it was recorded in the capture of a stream, which takes no time.
        self.captured = False

    @property
    def recorded(self) -> bool:
        """Return True if there is a time."""
        return self._time is not None

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self.captured = graphs.takes((stream or _current_stream()).cuda_stream)
        self._time = None if self.captured else time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two recorded events."""
        if self._time is None or end._time is None:
            raise RuntimeError("both events must be recorded before the elapsed time is read")
        return 1e3 * (end._time - self._time)

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""
        if self.captured:
            raise RuntimeError("torch.cuda.Event.synchronize: the event was recorded in a capture")

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for the event."""
        (stream or _current_stream()).wait_event(self)


class Capture:
    """torch.cuda.graph: captures on a stream of its own, or on the one it is given."""

    def __init__(
        self, cuda_graph: graphs.Graph, pool: Any = None, stream: Stream | None = None, **_: Any
    ) -> None:
        self._graph, self._stream = cuda_graph, stream or Stream()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stream)
            self._graph.capture_begin()
            stack.pop_all()

    def __exit__(self, *_: Any) -> None:
        self._graph.capture_end()
        self._stream.__exit__()


def _current_stream(device: Any = None) -> Stream:
    return _current[0]


def _set_stream(stream: Stream | None) -> None:
    """Let operators run on a stream; None leaves the one they run on."""
    if stream is not None:
        _current[0] = stream
        streams.set_current(stream.cuda_stream)


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before = _current_stream()
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)


def _synchronize(device: Any = None) -> None:
    graphs.refuse_waiting("torch.cuda.synchronize")


@contextlib.contextmanager
def _context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _no_graphs(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "make_graphed_callables is not simulated; capture with torch.cuda.graph, or call directly"
    )


def _profile(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.profiler.profile that follows the host where it is told to follow a GPU."""

    @functools.wraps(original)
    def profile(**kwargs: Any) -> Any:
        if kwargs.get("activities") is not None:
            kwargs["activities"] = [torch.profiler.ProfilerActivity.CPU]
        return original(**kwargs)

    return profile


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


_DEFAULT_STREAM = Stream(stream_id=streams.DEFAULT)
_current = [_DEFAULT_STREAM]
_CUDA_FUNCTIONS: dict[str, Any] = {
    "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None,
    "_lazy_init": lambda: None, "device_count": lambda: 1, "current_device": lambda: 0,
    "set_device": lambda device: None, "synchronize": _synchronize,
    "get_device_name": lambda device=None: devices.current().product,
    "get_device_capability": lambda device=None: devices.current().capability,
    "get_device_properties": lambda device=None: DeviceProperties(),
    "is_bf16_supported": lambda *_, **__: True,
    "current_stream": _current_stream, "default_stream": lambda device=None: _DEFAULT_STREAM,
    "set_stream": _set_stream, "stream": _stream, "device": _context,
    "Stream": Stream, "ExternalStream": ExternalStream, "Event": Event,
    "CUDAGraph": graphs.Graph, "graph": Capture,
    "is_current_stream_capturing": graphs.is_capturing,
    "graph_pool_handle": lambda: (0, 0), "make_graphed_callables": _no_graphs,
    "manual_seed": _seed, "manual_seed_all": _seed,
    "empty_cache": lambda: None, "ipc_collect": lambda: None,
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_allocated": lambda device=None: 0, "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0, "max_memory_reserved": lambda device=None: 0,
    "mem_get_info": lambda device=None: (devices.current().memory_bytes,) * 2,
}  # fmt: skip


def is_cuda(device: Any) -> bool:
    """Return True if a device argument names a CUDA device (an integer does)."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or isinstance(device, str) and device.startswith("cuda")


def _placed(tensor: Any) -> Any:
    """A new tensor, moved to an address that device memory of PyTorch could have.

    PyTorch's CUDA allocator gives multiples of 512 bytes, and kernels rely on that: TMA descriptors
    in global memory need 128. Its CPU allocator gives 64.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    storage = tensor.untyped_storage()
    if storage.data_ptr() % ALLOCATION_ALIGNMENT == 0:
        return tensor
    memory = np.empty(storage.nbytes() + ALLOCATION_ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALLOCATION_ALIGNMENT
    moved = torch.from_numpy(memory[first : first + storage.nbytes()]).untyped_storage()
    moved.copy_(storage)
    empty = torch.tensor([], dtype=tensor.dtype)
    tensor.data = empty.set_(moved, tensor.storage_offset(), tensor.size(), tensor.stride())
    return tensor


def _factory(function: Callable[..., Any], like: bool = False) -> Callable[..., Any]:
    """A tensor factory whose CUDA device, and pinned memory, become ordinary CPU memory.

    like: without a device it makes a tensor where its first argument lies: on the CUDA device.
    """

    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        device = is_cuda(kwargs.get("device"))
        if device:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        result = function(*args, **kwargs)
        return _placed(result) if device or like and kwargs.get("device") is None else result

    return create


def _set_default_device(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device: original("cpu" if is_cuda(device) else device)


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = "device" in kwargs and kwargs["device"] is not None
        placed = bool(args) and isinstance(args[0], (torch.device, str, int))
        if named:
            kwargs["device"] = "cpu"
        if placed:
            args = ("cpu", *args[1:])
        result = original(self, *args, **kwargs)
        if not (named or placed):
            return result
        return _placed(self.clone() if result is self else result)

    return to


def _transfer(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(original)(lambda self, *args, **kwargs: _placed(self.clone()))


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that copies its tensor, or returns it as it is."""

    @functools.wraps(original)
    def copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(self, *args, **kwargs)
        return result if result is self else _placed(result)

    return copy


def _dlpack(self: torch.Tensor, **_: Any) -> Any:
    if self.requires_grad:
        raise BufferError("a tensor that requires grad has no DLPack export; use detach()")
    return CudaCapsule(self).__dlpack__()


def _attribute(value: Any) -> property:
    return property(lambda self: value)


def patches() -> Iterator[Patch]:
    """Yield the patches that make `torch` look as if it had the simulated device."""
    _set_stream(_DEFAULT_STREAM)
    for name, value in _CUDA_FUNCTIONS.items():
        yield Patch(torch.cuda, name, value)
    # Annotations for a profiler, which a build of PyTorch for the CPU refuses.
    for name in ("range_push", "range_pop", "mark"):
        yield Patch(torch.cuda.nvtx, name, lambda *_: 0)
    yield Patch(torch.profiler, "profile", _profile(torch.profiler.profile))
    like = {
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like,
        torch.randn_like, torch.randint_like}  # fmt: skip
    constructors = torch.utils._device._device_constructors() | like
    for module in (torch, torch.fft, torch.signal.windows):
        for name in dir(module):
            function = getattr(module, name, None)
            if (
                callable(function)
                and getattr(function, "__hash__", None)
                and function in constructors
            ):
                yield Patch(module, name, _factory(function, function in like))
    yield Patch(torch, "_scaled_mm", scaled_mm(torch._scaled_mm))
    grouped = torch._scaled_grouped_mm_v2
    yield Patch(torch, "_scaled_grouped_mm_v2", scaled_grouped_mm(grouped))
    yield Patch(torch, "set_default_device", _set_default_device(torch.set_default_device))
    tensor = torch.Tensor
    for name in (
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "new_empty_strided",
    ):
        yield Patch(tensor, name, _factory(getattr(tensor, name), like=True))
    yield Patch(torch, "clone", _copying(torch.clone))
    for name in ("clone", "contiguous"):
        yield Patch(tensor, name, _copying(getattr(tensor, name)))
    yield Patch(tensor, "to", _to(tensor.to))
    yield Patch(tensor, "cuda", _transfer(tensor.cuda))
    yield Patch(tensor, "cpu", _transfer(tensor.cpu))
    yield Patch(tensor, "pin_memory", lambda self, device=None: self)
    yield Patch(tensor, "record_stream", lambda self, stream: None)
    yield Patch(tensor, "is_cuda", _attribute(True))
    yield Patch(tensor, "is_cpu", _attribute(False))
    yield Patch(tensor, "device", _attribute(torch.device("cuda", 0)))
    yield Patch(tensor, "get_device", lambda self: 0)
    yield Patch(tensor, "__dlpack__", _dlpack)
    yield Patch(tensor, "__dlpack_device__", lambda self: CudaCapsule(self).__dlpack_device__())
    # This class's functions in C would tell that tensors lie on the CPU; without it __dlpack__ is
    # called.
    yield Patch(tensor, "__dlpack_c_exchange_api__", ABSENT)


def register_custom_operators() -> None:
    """Let operators that were registered for CUDA alone run on CPU tensors."""
    from torch._library.custom_ops import OPDEFS

    for operator in list(OPDEFS.values()):
        function = operator._backend_fns.get("cuda")
        if (
            function is not None
            and "cpu" not in operator._backend_fns
            and None not in operator._backend_fns
        ):
            operator.register_kernel("cpu")(function)


def custom_op(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.library.custom_op that registers for the CPU whatever names CUDA."""

    @functools.wraps(original)
    def define(name: str, fn: Any = None, /, **kwargs: Any) -> Any:
        devices = kwargs.get("device_types")
        if devices is not None:
            given = [devices] if isinstance(devices, str) else list(devices)
            if "cuda" in given and "cpu" not in given:
                kwargs["device_types"] = [*given, "cpu"]
        return original(name, fn, **kwargs)

    return define
