"""Compile kernels for their architecture's target, each once per configuration: in memory and on
disk, or take those that were built ahead of time (`prebuilt`).

Compiling needs no GPU. What is kept is all that either backend needs, so that another process
loads it without tracing or compiling anything: the relocatable host object (it holds the cubin,
the kernel's name and its signature), the PTX text and the cubin by itself. The line numbers that
PTX carries for error reports and profilers are those of the sources as they were when the kernel
was compiled. An entry is read once: deleting the directory is always safe (`native_cache` has the
rules of the files, `keys` what an entry is known by).
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from .. import environment, progress
from ..gpus import family
from . import toolkit
from .ahead import prebuilt
from .catalogue import KernelSpec
from .kernel_names import described, name_of
from .keys import cache_key, disk_cache, lasts, prebuilt_key
from .tracing import trace_and_compile

#: Room for what the compiler writes, several times what any kernel takes.
_SCRATCH_BYTES = 16 << 20

#: How often this process compiled, loaded from disk or prebuilt, and found in memory.
counters: Counter[str] = Counter()

#: By the spec, its target and CuTe DSL's settings; all else in a key is fixed.
_memory: dict[tuple[KernelSpec, str, tuple[Any, ...]], CompiledKernel] = {}
_lock = threading.RLock()
_files_lock = threading.RLock()
_linking_lock = threading.RLock()


@dataclass
class InProcess:
    """State of a kernel in this process, and what has been done with it. linked: its host object,
    (CuTe DSL's module, the callable). Whatever launches the kernel keeps the module, which owns the
    code: the callable's C function owns nothing."""

    linked: tuple[Any, Any] | None = None
    is_loaded: bool = False
    is_checked: bool = False


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A compiled kernel, as it is kept; the GPU and the simulator take it.

    On a GPU launches call what `load` returns. The simulator uses `artifacts`, `dump_to_object`,
    `function_name`, `object_prefix` and `execution_args`, which mean what they mean on CuTe DSL's
    own object. `seconds` is what obtaining it took in this process.
    """

    key: str
    host_object: bytes
    artifacts: SimpleNamespace
    function_name: str
    object_prefix: str
    from_disk: bool
    seconds: float
    in_process: InProcess = field(default_factory=InProcess, repr=False)

    @property
    def function(self) -> Any:
        """CuTe DSL's callable, linked from the host object once whichever threads ask for it first.
        `functools.cached_property` has no lock from Python 3.12 on. Two threads would link twice,
        and one library would be unloaded under the launch that uses it."""
        found = self.in_process.linked
        if found is None:
            with _linking_lock:
                found = self.in_process.linked
                if found is None:
                    found = self.in_process.linked = self._link()
        return found[1]

    def _link(self) -> tuple[Any, Any]:
        import cutlass.cute as cute

        # A file of this process alone: the bytes that were checked are those that run.
        with room_for_files(), tempfile.NamedTemporaryFile(suffix=".o") as file:
            file.write(self.host_object)
            file.flush()
            module = cute.runtime.load_module(file.name)
        return module, module[self.object_prefix]

    def load(self) -> Any:
        """Load it into the process's GPUs, and return CuTe DSL's callable for them. Raises
        RuntimeError where a graph is captured and the kernel has not been loaded before."""
        if not self.in_process.is_loaded:
            _refuse_capture(self.function_name)
        loaded = self.function.to(None)
        self.in_process.is_loaded = True
        return loaded

    @property
    def execution_args(self) -> Any:
        return self.function.execution_args

    @property
    def ptx(self) -> str:
        return self.artifacts.PTX

    @property
    def cubin(self) -> bytes:
        return self.artifacts.CUBIN

    def dump_to_object(self, prefix: str) -> bytes:
        if prefix != self.object_prefix:
            raise ValueError(
                f"the host object's symbols start with {self.object_prefix!r}, not {prefix!r}"
            )
        return self.host_object


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """The kernel that `spec` describes, compiled at most once.

    Raises RuntimeError if CuTe DSL is set up, by its environment variables, for something else, or
    while a CUDA graph is captured that needs a kernel which this process has not loaded, and
    `MissingKernelError` where nothing may be compiled.
    """
    key = _memory_key(spec)
    kernel = _memory.get(key)
    if kernel is None:
        with _lock:
            kernel = _memory.get(key)
            if kernel is None:
                kernel = _memory[key] = _obtain(spec)
                return kernel
    counters["memory"] += 1
    return kernel


def _memory_key(spec: KernelSpec) -> tuple[KernelSpec, str, tuple[Any, ...]]:
    settings = tuple(environment.compiler_settings().items())
    return spec, family.target(spec.architecture), settings


def is_ready(spec: KernelSpec) -> bool:
    """Return True if no call has to compile a kernel: it is in memory, prebuilt or on disk."""
    if _memory_key(spec) in _memory or _prebuilt_entry(spec)[1] is not None:
        return True
    return lasts(spec) and disk_cache().read(f"{cache_key(spec)}.kernel") is not None


def forget() -> None:
    with _lock:
        _memory.clear()


class MissingKernelError(RuntimeError):
    """A kernel is in no cache, and nothing may be compiled. spec: which; command: builds it."""

    def __init__(self, spec: KernelSpec, command: str, where: str | None) -> None:
        self.spec, self.command = spec, command
        self._made_of = spec, command, where
        place = "no prebuilt directory is in use" if where is None else f"{where} lacks it"
        super().__init__(
            f"nothing may be compiled, and a call needs {described(spec)}, which is not in "
            f"{disk_cache().directory}; {place}. Build it:\n{command}\nor allow compiling "
            f"({environment.JIT.name}=1, or use_prebuilt(..., jit=True))"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


def build_command(spec: KernelSpec) -> str:
    place = prebuilt.active()
    words = ["python", "-m", "fa4_hd256", "build", "--kernel", name_of(spec)]
    words += ["--arch", family.target(spec.architecture)]
    words += ["--out", "DIR" if place is None else str(place.directory)]
    return shlex.join(words)


def _obtain(spec: KernelSpec) -> CompiledKernel:
    """Take the prebuilt kernel, or load the entry from disk, else compile it; other processes wait
    meanwhile."""
    _refuse_capture(described(spec))
    start = time.perf_counter()
    key, found = _prebuilt_entry(spec)
    how = "prebuilt"
    if found is None:
        key = cache_key(spec)
        found, how = _jit_entry(key, spec)
    counters[how] += 1
    header, (host_object, ptx, cubin) = found
    return CompiledKernel(
        key=key,
        host_object=host_object,
        artifacts=SimpleNamespace(PTX=ptx.decode(), CUBIN=cubin),
        function_name=header["function_name"],
        object_prefix=header["object_prefix"],
        from_disk=how != "compiled",
        seconds=time.perf_counter() - start,
    )


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _refuse_capture(kernel: str) -> None:
    """Loading a kernel, let alone compiling it, would break a graph that is being captured."""
    if is_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and a call in it needs a kernel that this process "
            f"has not loaded: {kernel}. Make such a call before capturing, or call "
            "fa4_hd256.warm_up"
        )


_Entry = tuple[dict[str, Any], list[bytes]]


def _prebuilt_entry(spec: KernelSpec) -> tuple[str, _Entry | None]:
    """Return (key, entry) of a prebuilt kernel; None for an entry that nobody built. Raises as
    `prebuilt.active` and `Prebuilt.read`, and ValueError where a directory is in use that has no
    kernel at all for the target."""
    place = prebuilt.active()
    if place is None or not lasts(spec):
        return "", None
    target, key = family.target(spec.architecture), prebuilt_key(spec)
    if key not in place.kernels:
        # Somebody may have followed the advice of an error before.
        place = prebuilt.active(again=True) or place
    if target not in place.targets:
        raise ValueError(
            f"the kernels in {place.directory} are compiled for {', '.join(place.targets)}, but "
            f"this process needs some for {target}; add them: "
            f"{prebuilt.build_into(place.directory, '--arch', target)}"
        )
    return key, place.read(key)


def jit_entry(spec: KernelSpec) -> _Entry:
    """Return (header, parts) of a kernel, compiled if it is not in the cache, whatever is
    prebuilt."""
    key = cache_key(spec)
    header, parts, _ = disk_cache().obtain(f"{key}.kernel", lambda: _compile_entry(key, spec))
    return header, parts


def _jit_entry(key: str, spec: KernelSpec) -> tuple[_Entry, str]:
    """Return (entry, "disk" or "compiled"); `MissingKernelError` where nothing may be compiled."""
    name, place = f"{key}.kernel", prebuilt.active()
    if not prebuilt.jit_allowed():
        found = disk_cache().read(name) if lasts(spec) else None
        if found is None:
            where = None if place is None else str(place.directory)
            raise MissingKernelError(spec, build_command(spec), where)
        return found, "disk"
    if place is not None:
        warnings.warn(
            f"{place.directory} lacks a kernel that a call needs, which is compiled now: "
            f"{described(spec)}. Add it: {build_command(spec)}",
            RuntimeWarning,
            stacklevel=2,
        )
    if not lasts(spec):
        return _compile_entry(key, spec), "compiled"
    header, parts, from_disk = disk_cache().obtain(name, lambda: _compile_entry(key, spec))
    return (header, parts), "disk" if from_disk else "compiled"


def _compile_entry(key: str, spec: KernelSpec) -> tuple[dict[str, Any], list[bytes]]:
    """Compile; (header, parts) of the entry, the parts being host object, PTX and cubin. Raises
    ToolkitError as `toolkit.check`."""
    prefix = f"fa4_hd256_{key}"
    start = time.perf_counter()
    target = family.target(spec.architecture)
    toolkit.check(target)
    what = f"compiling {spec.kind} ({target})"
    with progress.step(what), room_for_files():
        compiled = trace_and_compile(spec)
        parts = [
            compiled.dump_to_object(prefix),
            _as_bytes(compiled.artifacts.PTX),
            compiled.artifacts.CUBIN,
        ]
    header = {
        "function_name": compiled.function_name,
        "object_prefix": prefix,
        "compile_seconds": time.perf_counter() - start,
        "kind": spec.kind,
        "config": repr(spec.config),
        "problem": repr(spec.problem_class),
    }
    return header, parts


@contextlib.contextmanager
def room_for_files() -> Iterator[None]:
    """Send temporary files to memory if the temporary directory is full or missing. CuTe DSL writes
    what it compiles to such files, and LLVM ends the process where a write fails. One thread at a
    time: the directory is the whole process's. Raises RuntimeError if there is no room at all."""
    places = ["/dev/shm"]
    with _files_lock:
        before = tempfile.tempdir
        with contextlib.suppress(OSError):  # raised where not even one small file fits
            places.insert(0, tempfile.gettempdir())
        place = next(filter(_has_room, places), None)
        if place is None:
            raise RuntimeError(
                f"compiling or loading a kernel takes {_SCRATCH_BYTES >> 20} MiB of disk; none of "
                f"{', '.join(places)} has that. Free some, or set TMPDIR to a directory with room"
            )
        tempfile.tempdir = place
        try:
            yield
        finally:
            tempfile.tempdir = before


def _has_room(place: str) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(place).free >= _SCRATCH_BYTES
    return False


def _as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
