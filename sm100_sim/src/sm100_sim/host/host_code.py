"""Run a compiled function's own host code on the CPU and intercept its launches.

CuTe DSL lowers a jitted function to host code that encodes the TMA descriptors, computes the
grid and calls a handful of CUDA runtime symbols. `HostProgram` dumps that host code as a
relocatable object, links it in process (LLVM MCJIT) against the callbacks of this file and
runs it with the user's arguments, so the launch configuration and the kernel parameters are
the ones a GPU would receive. Global memory is host memory: pointers stay as they are.

The layouts of `cudaLaunchConfig_t` (56 bytes) and `cudaLaunchAttribute` (72 bytes) are those of
the CUDA runtime API; the attribute numbers are `cudaLaunchAttributeID`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from sm100_sim import devices
from sm100_sim.devices import SHARED_AT_FIRST
from sm100_sim.errors import LaunchError
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.state.tensormap import encode, from_driver

from .cubin import launch_registers, loaded_cubin, moving_registers

#: cudaLaunchAttributeID values that have a meaning for a launch (CUDA runtime API).
ATTRIBUTE_NAMES = {
    2: "cooperative",
    4: "cluster_dimension",
    5: "cluster_scheduling_policy",
    6: "programmatic_stream_serialization",
    8: "priority",
    11: "preferred_cluster_dimension",
    18: "shared_memory_mode",
}
_CLUSTER, _PREFERRED_CLUSTER = 4, 11
#: cudaFuncAttribute values: most dynamic shared memory, non-portable cluster size allowed, shared
#: memory mode.
_SHARED_LIMIT, _NON_PORTABLE, _SHARED_MODE = 8, 14, 16
#: Values of cudaSharedMemoryMode that allow oversized shared memory (CUDA 13.5): allow, prefer.
_OVERSIZED = 3, 4

_SUCCESS, _INVALID_VALUE = 0, 1
_CONFIG = struct.Struct("<3I3IQQQI")
_ATTRIBUTE_BYTES = 72
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_STATIC_SHARED = re.compile(
    r"^\s*\.shared\s+(?:\.align\s+(\d+)\s+)?\.b(\d+)\s+[\w$]+(?:\[(\d+)\])?"
)


def ptx_of(compiled: Any) -> str:
    """PTX text of what `cute.compile` returned.

    Raises LaunchError if the function was compiled without keeping its PTX: the compiler
    drops the text then, and nothing that stays in the compiled object can give it back.
    """
    artifacts = getattr(compiled, "artifacts", None)
    text = getattr(artifacts, "PTX", None)
    if isinstance(text, bytes):
        text = text.decode()
    if text and ".entry" in text:
        return text
    raise LaunchError(
        f"the compiled function {getattr(compiled, 'function_name', compiled)!r} carries no PTX "
        "text. Compile it inside `with sm100_sim.keeping_ptx():`, or set "
        "CUTE_DSL_KEEP=ptx in the environment before cutlass is imported, or pass "
        "options='--keep-ptx' to cute.compile"
    )


def languages() -> list[tuple[Any, Any]]:
    """Return (environment, compile function) of CuTe DSL, and of its experimental form if that is
    installed."""
    from cutlass import cute, cutlass_dsl

    found = [(cutlass_dsl.CuTeDSL._get_dsl().envar, cute.compile)]
    with contextlib.suppress(ImportError, AttributeError):
        from cutlass.cute import experimental

        found.append((cutlass_dsl.CuteExperimentalDSL._get_dsl().envar, experimental.compile))
    return found


@contextlib.contextmanager
def keeping_ptx() -> Iterator[None]:
    """Make `cute.compile` keep the PTX text in the compiled function.

    Works after cutlass has been imported and leaves no file behind: the compiled object reads the
    text when it is built. The DSL's in-memory compile cache is bypassed meanwhile.
    """
    from cutlass import cute

    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sm100_sim_ptx_"))
        for variables, function in languages():
            # Compiling copies the setting into the default options of `cute.compile`, which
            # outlive it.
            option = function._compile_options.options[cute.KeepPTX]
            for owner, name in (
                (variables, "keep_ptx"),
                (variables, "dump_dir"),
                (option, "value"),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
            if not variables.keep_ptx:
                variables.keep_ptx, variables.dump_dir = True, directory
        yield


# ---------------------------------------------------------------- CUDA runtime callbacks


class _Runs(threading.local):
    """Stack of the host programs running in this thread (a launch may start another)."""

    def __init__(self) -> None:
        self.stack: list[Run] = []


@dataclass
class Run:
    """One call into host code: what to do at a launch, and the first error of a callback."""

    program: HostProgram
    on_launch: Callable[[LaunchConfig], None] | None = None
    error: BaseException | None = None


_runs = _Runs()
_handles: dict[int, str] = {}
_handle_numbers = itertools.count(0x5A000000, 16)
_next_prefix = itertools.count()
_callbacks: dict[str, Any] = {}
_link_lock = threading.Lock()


def next_handle() -> int:
    """A number for a library or kernel handle that was never given out before."""
    return next(_handle_numbers)


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """The callbacks of this thread belong to `run`."""
    _runs.stack.append(run)
    try:
        yield
    finally:
        _runs.stack.pop()


def store(pointer: int, value: int, kind: Any = ctypes.c_int32) -> None:
    """Write a value at a host address."""
    kind.from_address(pointer).value = value


def _library_load_data(library: int, code: int, *_: Any) -> None:
    program = _runs.stack[-1].program
    program.cubin = loaded_cubin(code)
    program.registers |= launch_registers(program.cubin)
    program.moving |= moving_registers(program.cubin)
    store(library, next_handle(), ctypes.c_uint64)


def _library_get_kernel(kernel: int, _library: int, name: int) -> None:
    text = ctypes.string_at(name).decode()
    program = _runs.stack[-1].program
    if text not in program.parameter_counts:
        raise LaunchError(
            f"the host code asks for kernel {text!r}, which its PTX does not define; "
            f"defined are {sorted(program.parameter_counts)}"
        )
    handle = program.kernel_handles.get(text)
    if handle is None:
        handle = program.kernel_handles[text] = next_handle()
        _handles[handle] = text
    store(kernel, handle, ctypes.c_uint64)


def _get_device(device: int) -> None:
    store(device, 0)


def _device_get_attribute(value: int, attribute: int, _device: int) -> None:
    attributes = devices.current().attributes
    if attribute not in attributes:
        raise LaunchError(
            f"the host code asks for CUDA device attribute {attribute}, for which "
            "sm100_sim.devices has no value"
        )
    store(value, attributes[attribute])


def _kernel_get_attribute(value: int, attribute: int, kernel: int, _device: int) -> None:
    program = _runs.stack[-1].program
    if attribute == 0:  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        store(value, 1024)
    elif attribute == 1:  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: static only
        store(value, program.static_shared)
    elif attribute == 8:  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        store(value, devices.current().attributes[97] - program.static_shared)
    else:
        raise LaunchError(
            f"the host code asks for attribute {attribute} of kernel {_handles[kernel]!r}; "
            "the simulator answers 0 (threads), 1 (static shared) and 8 (dynamic shared)"
        )


def _set_attribute(kernel: int, attribute: int, value: int, *_: int) -> None:
    """Function attributes widen limits of a kernel's launches."""
    _runs.stack[-1].program.function_attributes[kernel, attribute] = value


def _occupancy(blocks: int, *_: int) -> None:
    store(blocks, 1)


def _launch_kernel_ex(config: int, kernel: int, arguments: int) -> None:
    raw = ctypes.string_at(config, _CONFIG.size)
    gx, gy, gz, bx, by, bz, smem, stream, attributes, count = _CONFIG.unpack(raw)
    shapes, named = {}, {}
    for i in range(count):
        entry = ctypes.string_at(attributes + i * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
        number, word0, word1, word2 = struct.unpack_from("<I4x3I", entry)
        if number in (_CLUSTER, _PREFERRED_CLUSTER):
            shapes[number] = (word0, word1, word2)
        if number != _CLUSTER:
            named[ATTRIBUTE_NAMES.get(number, str(number))] = word0
    # A launch with preferred clusters finds room for them everywhere; the others are its fallback.
    cluster = shapes.get(_PREFERRED_CLUSTER) or shapes.get(_CLUSTER) or (1, 1, 1)
    call = smem, stream, kernel, arguments
    _launch((gx, gy, gz), (bx, by, bz), cluster, call, named, explicit_cluster=bool(shapes))


def _launch_kernel(kernel: int, *rest: int) -> None:
    grid, block, (arguments, smem, stream) = rest[:3], rest[3:6], rest[6:]
    _launch(grid, block, (1, 1, 1), (smem or 0, stream or 0, kernel, arguments), {})


def _launch(
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int],
    call: Sequence[int],
    attributes: dict[str, int],
    explicit_cluster: bool = False,
) -> None:
    run = _runs.stack[-1]
    smem, stream, kernel, arguments = call
    if kernel not in _handles:
        raise LaunchError(f"launch of an unknown kernel handle {kernel:#x}")
    name = _handles[kernel]
    count = run.program.parameter_counts[name]
    registers: Any = run.program.registers.get(name)
    allowed = run.program.function_attributes
    mode = attributes.get("shared_memory_mode", allowed.get((kernel, _SHARED_MODE), 0))
    pointers = (ctypes.c_uint64 * count).from_address(arguments) if count else ()
    config = LaunchConfig(
        kernel_name=name,
        grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]),
        cluster=(max(1, cluster[0]), max(1, cluster[1]), max(1, cluster[2])),
        dynamic_smem=smem,
        param_pointers=tuple(pointers),
        attributes=attributes,
        stream=stream or 0,
        ptx=run.program.ptx,
        cubin=run.program.cubin,
        registers=registers,
        shared_limit=allowed.get((kernel, _SHARED_LIMIT), SHARED_AT_FIRST),
        oversized_shared=mode in _OVERSIZED,
        non_portable_cluster=bool(allowed.get((kernel, _NON_PORTABLE))),
        explicit_cluster=explicit_cluster,
        moves_registers=name in run.program.moving or name not in run.program.registers,
    )
    if run.on_launch is not None:
        run.on_launch(config)


def _numbers(kind: Any, address: int, count: int) -> tuple[int, ...]:
    return tuple((kind * count).from_address(address)) if count else ()


def _encode_tiled(target: int, kind: int, rank: int, address: int, *rest: int) -> None:
    """cuTensorMapEncodeTiled, as the CUDA driver API describes it."""
    sizes, strides, box, steps, *enumerators = rest
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    arrays = (
        _numbers(wide, sizes, rank),
        _numbers(wide, strides, rank - 1),
        _numbers(narrow, box, rank),
        _numbers(narrow, steps, rank),
    )
    content = encode(from_driver(address or 0, arrays, (kind, *enumerators)))
    ctypes.memmove(target, content, len(content))


def _assert_success(code: int) -> None:
    """The host code ends the process on an error; here the error is raised after the call."""
    if code:
        raise LaunchError(f"the host code met CUDA error {code}")


_P, _I, _Q = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64
#: CUDA runtime symbol -> its implementation and argument types; complete before the first link.
CALLBACKS: dict[str, tuple[Callable[..., None], tuple]] = {
    "_cudaLibraryLoadData": (_library_load_data, (_P, _P, _P, _P, _I, _P, _P, _I)),
    "_cudaLibraryGetKernel": (_library_get_kernel, (_P, _P, _P)),
    "_cudaGetDevice": (_get_device, (_P,)),
    "_cudaDeviceGetAttribute": (_device_get_attribute, (_P, _I, _I)),
    "_cuKernelGetAttribute": (_kernel_get_attribute, (_P, _I, _P, _I)),
    "_cudaFuncSetAttribute": (_set_attribute, (_P, _I, _I)),
    "_cudaKernelSetAttributeForDevice": (_set_attribute, (_P, _I, _I, _I)),
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (_occupancy, (_P, _P, _I, _Q)),
    "_cudaLaunchKernelEx": (_launch_kernel_ex, (_P, _P, _P)),
    "_cuTensorMapEncodeTiled": (_encode_tiled, (_P, _I, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I)),
    "cuda_dialect_assert_success": (_assert_success, (_I,)),
    "_cudaLaunchKernel": (_launch_kernel, (_P, _I, _I, _I, _I, _I, _I, _P, _Q, _P)),
}


def _guarded(function: Callable[..., None]) -> Callable[..., int]:
    """Turn exceptions of `function` into a CUDA error code, kept to be raised after the call.

    An exception must not cross the native frames of the host code; a second callback of a
    failed run does nothing, so the first error is the one reported.
    """

    def callback(*args: Any) -> int:
        if not _runs.stack or _runs.stack[-1].error is not None:
            return _INVALID_VALUE
        run = _runs.stack[-1]
        try:
            function(*args)
        except BaseException as error:  # re-raised by HostProgram._call
            run.error = error
            return _INVALID_VALUE
        return _SUCCESS

    return callback


def _register_symbols() -> None:
    """Bind the CUDA runtime symbols for every object linked from now on (once a process)."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, (function, types) in CALLBACKS.items():
        if name in _callbacks:
            continue
        callback = _callbacks[name] = ctypes.CFUNCTYPE(_I, *types)(_guarded(function))
        llvm.add_symbol(name, ctypes.cast(callback, _P).value)


# ---------------------------------------------------------------- the linked program


def _static_shared_bytes(ptx: str) -> int:
    """Bytes of statically declared shared memory in a PTX module (`.extern` arrays excluded)."""
    total = 0
    for line in ptx.splitlines():
        match = _STATIC_SHARED.match(line)
        if match:
            align, bits, count = (int(group or 1) for group in match.groups())
            size = bits // 8 * count
            align = max(align, bits // 8)
            total = (total + align - 1) // align * align + size
    return total


class HostProgram:
    """The linked host code of one compiled function. `program.program_of` has the one of an object.

    Linking takes tens of milliseconds and is done once per compiled object.
    """

    def __init__(self, compiled: Any) -> None:
        """Link the host code of `compiled`.

        Raises LaunchError if the object holds no PTX, is of a kind whose host code cannot be
        dumped, or its host code needs a symbol that the simulator does not offer.
        """
        # A jitted function that launches nothing runs on the host alone, on a GPU machine, too.
        self._launches = getattr(compiled, "has_gpu_module", True)
        self.ptx = ptx_of(compiled) if self._launches else ""
        self.cubin = b""
        self.registers: dict[str, int] = {}
        #: (kernel handle, cudaFuncAttribute) -> value that the host code has set.
        self.function_attributes: dict[tuple[int, int], int] = {}
        self.moving: set[str] = set()
        self.parameter_counts = {
            name: parameters.count(".param") for name, parameters in _ENTRY.findall(self.ptx)
        }
        self.static_shared = _static_shared_bytes(self.ptx)
        self.kernel_handles: dict[str, int] = {}
        # CuTe DSL before 4.5 calls them args_spec.
        self.execution_args: Any = getattr(
            compiled, "execution_args", getattr(compiled, "args_spec", None)
        )
        if not hasattr(compiled, "dump_to_object") or self.execution_args is None:
            raise LaunchError(
                f"cannot run host code of a {type(compiled).__name__}; pass what cute.compile "
                "returned for a @cute.jit function"
            )
        # A function restored from a file brings an object whose symbols have their prefix already.
        own = getattr(compiled, "object_prefix", None)
        self._prefix = own or f"sm100sim{next(_next_prefix)}"
        self._link(compiled)
        self._load()

    def _link(self, compiled: Any) -> None:
        self._link_object(compiled.dump_to_object(self._prefix))
        entry = f"_mlir_{self._prefix}__mlir_ciface_{compiled.function_name}"
        self._entry = self._function(entry)

    def _link_object(self, content: bytes) -> None:
        with _link_lock:
            _register_symbols()
            machine = llvm.Target.from_default_triple().create_target_machine(
                opt=0, jit=True, codemodel="jitdefault"
            )
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(content))
            self._engine.finalize_object()

    def _function(self, symbol: str) -> Callable[[Any], None]:
        address = self._engine.get_function_address(symbol)
        if not address:
            raise LaunchError(f"the host object does not define {symbol!r}")
        return ctypes.CFUNCTYPE(None, _P)(address)

    def _load(self) -> None:
        """Run the module's own load functions, if it has kernels; they fill its kernel handles."""
        if not self._launches:
            return
        library, device, result = ctypes.c_void_p(), _I(0), _I(0)
        library_pointer = ctypes.c_void_p(ctypes.addressof(library))
        slots = {
            "cuda_init": (library_pointer, result),
            "cuda_load_to_device": (library_pointer, device, result),
        }
        for name, values in slots.items():
            packed = (_P * len(values))(*(ctypes.addressof(value) for value in values))
            function = self._function(f"_mlir_{self._prefix}_{name}")
            self._call(function, packed, result, Run(self))

    def _call(self, function: Any, packed: Any, result: Any, run: Run) -> None:
        with running(run):
            function(packed)
        if run.error is not None:
            raise run.error
        if result.value != _SUCCESS:
            raise LaunchError(
                f"the host code returned CUDA error {result.value} without a launch failing; "
                "its own output says why (a kernel that asks for too much shared memory, say)"
            )

    def run(
        self,
        args: tuple[Any, ...],
        on_launch: Callable[[LaunchConfig], None],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run the host code on `args` and `kwargs`; call `on_launch` for each kernel launch.

        The arguments are those one would call the compiled function with. An exception of
        `on_launch` ends the host code and is raised here; wrong arguments raise the DSL's own
        errors.
        """
        values, adapted = self.execution_args.generate_execution_args(args, kwargs or {})
        self.run_packed(values, on_launch)
        del adapted  # keeps the storage behind `values` alive until the call has returned

    def run_packed(self, values: list[Any], on_launch: Callable[[LaunchConfig], None]) -> None:
        """`run` on arguments that the DSL has already turned into addresses."""
        result = _I(0)
        packed = (_P * (len(values) + 1))()
        for i, value in enumerate(values):
            packed[i] = value.value if isinstance(value, ctypes.c_void_p) else int(value)
        packed[len(values)] = ctypes.addressof(result)
        self._call(self._entry, packed, result, Run(self, on_launch))
