"""`launch_triton`: run a Triton kernel, compiled for the simulated device by Triton itself.

Triton asks its active driver what it compiles for and how a kernel is launched. `Driver` answers
for the simulated device and hands launches on, so `kernel[grid](...)`, heuristics and tensor
descriptors go their usual way. An autotuner takes the first configuration that fits the device:
times of the simulator say nothing about those of a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import devices
from .errors import LaunchError, MissingExtra, in_plain
from .host.arguments import tensor_ranges
from .host.cubin import launch_registers, moving_registers
from .launcher import Options, options_from, parsed_kernel, run_host_code
from .report import Report
from .settings import read_settings
from .state.launch import LaunchConfig
from .state.tensormap import encode, from_driver

#: Type in a signature of Triton -> format of `struct`; pointers are 64 bits wide.
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
#: CTAs of a cluster beyond which a launch needs the kernel's consent.
_PORTABLE_CLUSTER = 8
#: A source file in PTX: the directive with its number, and the path.
_SOURCE_FILE = re.compile(r'(\.file\s+\d+\s+)"([^"]+)"')

Run = Callable[[Callable[[Callable[[LaunchConfig], None]], None], Any], None]


@in_plain
def launch_triton(
    kernel: Any, grid: Any, *args: Any, options: Options | None = None, **meta: Any
) -> Report:
    """Run a Triton kernel in the simulator.

    kernel: a function under `triton.jit` (heuristics and autotuning included), or what
        `triton.compile` returned for the simulated device.
    grid: programs along x, y and z, or a function of the arguments that returns them.
    args, meta: as one calls `kernel[grid](*args, **meta)`. Tensors are PyTorch's on the CPU, or
        numpy arrays; they are read and written in place, and the kernel may touch no other memory.
    options: see `Options`; None takes the SM100_SIM_* variables (`settings`).

    Returns the report of the launch, of the last one if hooks launch others. Raises a
    SimulationError for whatever the kernel does wrong, MissingExtra without Triton, and Triton's
    own errors for a kernel that it does not compile.
    """
    settings, reports = read_settings(), []
    chosen = options_from(settings) if options is None else options

    def run(call: Any, arguments: Any) -> None:
        ranges = tensor_ranges(arguments)
        reports.extend(run_host_code(call, ranges, chosen, settings.report))

    if isinstance(grid, (tuple, list)):
        grid = (*grid, 1, 1)[:3]
    elif isinstance(grid, int):
        grid = (grid, 1, 1)
    with driving(run):
        kernel[grid](*map(_tensor, args), **{name: _tensor(v) for name, v in meta.items()})
    if not reports:
        raise LaunchError("the call launched no kernel")
    return reports[-1]


@contextlib.contextmanager
def driving(run: Run, stream: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Within, Triton compiles for the simulated device, and `run` is called for each launch.

    run: gets a function that calls its own argument with the launch, and the kernel's arguments.
    stream: returns the handle of the stream that kernels are launched on.
    Raises MissingExtra without Triton.
    """
    try:
        import triton
    except ModuleNotFoundError as error:
        raise MissingExtra("a Triton kernel", "triton", error) from error
    config = triton.runtime.driver
    before = config._active
    config.set_active(Driver(run, stream))
    try:
        yield
    finally:
        config._active = before


class _Array:
    """A numpy array as Triton takes tensors."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> tuple[int, ...]:
        """Return the strides in elements."""
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize


def _tensor(value: Any) -> Any:
    return _Array(value) if isinstance(value, np.ndarray) else value


class _Device(int):
    """Device number 0 as a key of Triton's kernels: every simulated device has its own."""

    target = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Device) and self.target == other.target

    def __hash__(self) -> int:
        return hash(("sm100_sim", self.target))


class _Utils:
    """Functions that Triton calls of a driver's C module."""

    @staticmethod
    def get_device_properties(_device: Any = 0) -> dict[str, int]:
        device = devices.current()
        return {
            "max_shared_mem": devices.SHARED_OPT_IN, "max_num_regs": devices.REGISTER_FILE,
            "multiprocessor_count": device.sms, "warpSize": 32, "sm_clock_rate": 1_965_000,
            "mem_clock_rate": device.memory_clock_khz, "mem_bus_width": device.memory_bus_bits,
        }  # fmt: skip

    @staticmethod
    def load_binary(name: str, cubin: bytes, _shared: int, _device: Any) -> tuple[int, ...]:
        registers = launch_registers(cubin).get(name, 0)
        return 1, 1, registers, 0, devices.MAX_THREADS

    @staticmethod
    def set_printf_fifo_size(_size: int) -> None:
        pass

    @staticmethod
    def cuOccupancyMaxActiveClusters(_function: Any, _shared: int, size: int) -> int:
        return devices.current().clusters(size)


class Driver:
    """A driver of Triton for the simulated device; see `driving` for `run` and `stream`."""

    utils = _Utils()

    def __init__(self, run: Run, stream: Callable[[], int]) -> None:
        self.run, self.stream, self.measuring = run, stream, False
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        raise LaunchError(f"the simulator has no C type for {kind!r}")

    def get_current_device(self) -> int:
        device = _Device(0)
        device.target = devices.current().target
        return device

    def set_current_device(self, _device: Any) -> None:
        pass

    def get_current_stream(self, _device: Any = 0) -> int:
        return self.stream()

    def get_device_capability(self, _device: Any = 0) -> tuple[int, int]:
        return devices.current().capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = devices.current().capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return self._no_time

    def _no_time(self, kernel_call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list:
        """Compile a configuration and see whether it fits the device; nothing is run."""
        self.measuring = True
        try:
            kernel_call()
        finally:
            self.measuring = False
        return [0.0] * len(quantiles or (1,))

    def get_empty_cache_for_benchmark(self) -> Any:
        return np.zeros(1, np.int32)

    def clear_cache(self, _cache: Any) -> None:
        pass


class _Launcher:
    """Launches one compiled kernel, as Triton's own launcher does it on a GPU."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = list(source.signature.values())
        self.metadata = metadata
        ptx, self.cubin = _code_of(source.name, metadata.hash)
        kernel = getattr(source, "fn", None)  # None: compiled from a file of Triton's IR
        self.ptx = ptx if kernel is None else _from_here(ptx, kernel.fn.__code__.co_filename)

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        import triton

        stream, _function, _packed, launch_metadata, enter, leave, *args = rest
        driver = triton.runtime.driver.active
        if driver.measuring or not x * y * z:
            return
        if enter is not None:
            enter(launch_metadata)
        config, arguments = self._config((x, y, z), stream, args)
        driver.run(lambda on_launch: on_launch(config), arguments)
        if leave is not None:
            leave(launch_metadata)

    def _config(
        self, grid: tuple[int, int, int], stream: int, args: Sequence[Any]
    ) -> tuple[LaunchConfig, Any]:
        """The launch, and what the kernel may touch: its arguments and its scratch memory."""
        meta, cubin, name = self.metadata, self.cubin, self.metadata.name
        kernel = parsed_kernel(self.ptx, name)
        values = list(_packed_arguments(self.signature, args, self._descriptors()))
        scratch = [self._scratch(kind, math.prod(grid)) for kind in ("global", "profile")]
        values += [struct.pack("<Q", a.ctypes.data if a.size else 0) for a in scratch]
        if [len(value) for value in values] != [param.size for param in kernel.params]:
            raise LaunchError(
                f"{name} has parameters of {[p.size for p in kernel.params]} bytes, its signature "
                f"gives {list(map(len, values))}: an unknown version of Triton's calling convention"
            )
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        registers: Any = launch_registers(cubin).get(name)
        config = LaunchConfig(
            name, (grid[0] * meta.num_ctas, *grid[1:]), (32 * meta.num_warps, 1, 1),
            (meta.num_ctas, 1, 1), meta.shared, tuple(map(ctypes.addressof, buffers)), ptx=self.ptx,
            cubin=cubin, registers=registers, explicit_cluster=meta.num_ctas > 1,
            non_portable_cluster=meta.num_ctas > _PORTABLE_CLUSTER,
            moves_registers=name in moving_registers(cubin), stream=stream,
        )  # fmt: skip
        return config, (*args, *scratch, buffers)

    def _scratch(self, kind: str, programs: int) -> np.ndarray:
        """Memory that the kernel is given beside its arguments, for tensor maps that it makes."""
        size = (getattr(self.metadata, f"{kind}_scratch_size", 0) or 0) * programs
        size *= self.metadata.num_ctas
        align = max(getattr(self.metadata, f"{kind}_scratch_align", 1) or 1, 1)
        raw = np.zeros(size + align, np.uint8)
        start = -raw.ctypes.data % align
        return raw[start : start + size]

    def _descriptors(self) -> Iterator[Any]:
        """Yield what the compiler says of each tensor descriptor, None if it takes none apart."""
        known = getattr(self.metadata, "tensordesc_meta", None)
        while True:
            yield from known or (None,)


def _code_of(name: str, key: str) -> tuple[str, bytes]:
    """PTX and cubin that Triton has kept under `key`. Raises LaunchError if it keeps no PTX."""
    from triton.runtime.cache import get_cache_manager

    group = get_cache_manager(key).get_group(f"{name[:150]}.json") or {}
    files = {path.rpartition(".")[2]: path for path in group.values()}
    if "ptx" not in files:
        raise LaunchError(
            f"Triton has kept no PTX of {name}; unset TRITON_STORE_BINARY_ONLY, and compile it "
            "for a GPU of NVIDIA's"
        )
    return Path(files["ptx"]).read_text(), Path(files["cubin"]).read_bytes()


def _from_here(ptx: str, kernel_file: str) -> str:
    """Return the PTX with the paths of its sources as they are in this process.

    Triton's cache goes by a kernel's text, not by its path: the PTX may be of another checkout,
    which has changed since or is gone. `kernel_file` is the file that the kernel was read from now;
    sources that were beside it then are sought beside it now.
    """
    here = Path(kernel_file).parts
    shared = {path: _common_tail(Path(path).parts, here) for _, path in _SOURCE_FILE.findall(ptx)}
    kept = max(shared, key=lambda path: shared[path], default=kernel_file)
    if kept == kernel_file or not shared[kept]:
        return ptx
    before = Path(*Path(kept).parts[: -shared[kept]])
    now = Path(*here[: -shared[kept]])

    def renamed(found: re.Match[str]) -> str:
        path = Path(found[2])
        moved = now / path.relative_to(before) if path.is_relative_to(before) else path
        return f'{found[1]}"{moved if moved.exists() else path}"'

    return _SOURCE_FILE.sub(renamed, ptx)


def _common_tail(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many parts at the end of two paths are equal."""
    pairs = zip(reversed(first), reversed(second))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _packed_arguments(
    signature: Sequence[Any], args: Sequence[Any], descriptors: Iterator[Any]
) -> Iterator[bytes]:
    """Yield the bytes of each of the kernel's parameters; constexprs have none."""
    for kind, value in zip(signature, args, strict=True):
        if isinstance(kind, tuple):
            yield from _packed_arguments(kind, value, descriptors)
        elif kind.startswith("tensordesc"):
            yield from _packed_descriptor(value, next(descriptors))
        elif kind != "constexpr":
            yield _packed(kind, value)


def _packed(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        pointer = value.data_ptr() if hasattr(value, "data_ptr") else value
        return struct.pack("<Q", pointer or 0)
    if kind == "nvTmaDesc":
        return bytes(value)
    if kind == "bf16":  # the upper half of a float32, rounded to nearest even
        (word,) = struct.unpack("<I", struct.pack("<f", value))
        return struct.pack("<H", (word + 0x7FFF + (word >> 16 & 1)) >> 16)
    if kind not in _FORMATS:
        raise LaunchError(f"an argument of Triton's type {kind!r} is not known to the simulator")
    return struct.pack("<" + _FORMATS[kind], value)


def _packed_descriptor(value: Any, meta: dict[str, Any] | None) -> Iterator[bytes]:
    """A tensor descriptor: as a CUtensorMap or in its parts, then shape and strides."""
    shape, strides = list(value.shape), list(value.strides)
    if meta is None:
        yield struct.pack("<Q", value.base.data_ptr())
        yield from (struct.pack("<q", n) for n in (*shape, *strides))
        yield from (struct.pack("<?", flag) for flag in (
            value.padding == "nan", value.round_f32_to_tf32))  # fmt: skip
    else:
        yield _tensor_map(value, meta)
    yield from (struct.pack("<i", n) for n in shape)
    yield from (struct.pack("<q", n) for n in strides)


def _tensor_map(value: Any, meta: dict[str, Any]) -> bytes:
    """The CUtensorMap of a descriptor, as Triton's own launcher has the driver encode it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, TMA_TF32

    kind = TMA_TF32 if value.round_f32_to_tf32 else TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    shape, box = list(value.shape), list(meta["block_size"])
    if meta["fp4_padded"]:
        shape[-1] *= 2
    wide = [meta["elem_size"] * step for step in value.strides]
    arrays = (
        tuple(reversed(shape)), tuple(reversed(wide[:-1])), tuple(reversed(box)), (1,) * len(box),
    )  # fmt: skip
    interleave, promotion, fill = 0, 2, value.padding == "nan"
    made = from_driver(
        value.base.data_ptr(), arrays, (kind, interleave, meta["swizzle"], promotion, int(fill))
    )
    return encode(made)
