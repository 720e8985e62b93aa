"""Compile kernels for their architecture's target, each once per configuration: in memory and on
disk.

Compiling needs no GPU. What is kept is all that either backend needs, so that another process
loads it without tracing or compiling anything: the relocatable host object (it holds the cubin,
the kernel's name and its signature), the PTX text and the cubin by itself. The key covers which
kernel it is, what it is specialised for, its configuration, the meaning of the sources that are
compiled in or build what is (`COMPILED_IN`), the versions of the compiler and the CPU, for which
the host object is made; so an entry never goes stale. Comments and docstrings have no part in it:
the line numbers that PTX carries for error reports and profilers are those of the sources as they
were when the kernel was compiled. An entry is read once: deleting the directory is always safe
(`native_cache` has the rules of the files).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fa4_hd256 import environment
from fa4_hd256.architectures import ARCHITECTURES, Architecture
from fa4_hd256.gpus import family

from .catalogue import KernelSpec, build
from .native_cache import NativeCache

#: Raised whenever the files of an entry or their meaning change.
FORMAT = 3

#: Folders and modules that are compiled in, or say what is compiled: device code, what it imports,
#: and the types of a kernel's arguments. What they import besides is not compiled in, or is in the
#: key itself: architecture and settings of the compiler. For a kernel of one direction nothing
#: counts whose path names the other (`OTHER`), nor for one of an architecture the folders of
#: others: neither imports anything of the other's.
COMPILED_IN = (
    "fa4_hd256/kernels",
    "fa4_hd256/run/arguments.py",
    "fa4_hd256/run/backward_arguments.py",
    "fa4_hd256/run/catalogue.py",
    "fa4_hd256/run/compile.py",
    "fa4_hd256/run/forward_arguments.py",
    "schedulers",
    "softmax_emu/by_key.py",
    "softmax_emu/coefficients.py",
    "softmax_emu/exp2.py",
    "softmax_emu/online.py",
    "softmax_emu/pattern.py",
    "softmax_emu/recompute.py",
)

#: First word of a kernel's kind -> first words of folders and modules that it has nothing of.
OTHER = {"forward": ("backward",), "backward": ("forward", "decode")}

#: Room for what the compiler writes, several times what any kernel takes.
_SCRATCH_BYTES = 16 << 20

#: How often this process compiled, loaded from disk, and found in memory.
counters: Counter[str] = Counter()

#: By what is asked for, its target and CuTe DSL's settings; all else in a key is fixed.
_memory: dict[tuple[KernelSpec, str, tuple], CompiledKernel] = {}
_lock = threading.RLock()
_files_lock = threading.RLock()


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A compiled kernel, as it is kept; the GPU and the simulator take it.

    On a GPU call `function`. The simulator uses `artifacts`, `dump_to_object`, `function_name`,
    `object_prefix` and `execution_args`, which mean what they mean on CuTe DSL's own object.
    `seconds` is what obtaining it took in this process, `compile_seconds` what compiling took in
    whichever process did it.
    """

    key: str
    host_object: bytes
    artifacts: SimpleNamespace
    function_name: str
    object_prefix: str
    compile_seconds: float
    from_disk: bool
    seconds: float

    @functools.cached_property
    def function(self) -> Any:
        """CuTe DSL's callable, linked from the host object."""
        import cutlass.cute as cute

        # A file of this process alone: the bytes that were checked are those that run.
        with room_for_files(), tempfile.NamedTemporaryFile(suffix=".o") as file:
            file.write(self.host_object)
            file.flush()
            module = cute.runtime.load_module(file.name)
        return module[self.object_prefix]

    @property
    def execution_args(self) -> Any:
        """Packs call arguments for the host code."""
        return self.function.execution_args

    @property
    def ptx(self) -> str:
        return self.artifacts.PTX

    @property
    def cubin(self) -> bytes:
        return self.artifacts.CUBIN

    def dump_to_object(self, prefix: str) -> bytes:
        """The host object. Its symbols carry `object_prefix`; raises ValueError for another."""
        if prefix != self.object_prefix:
            raise ValueError(
                f"the host object's symbols start with {self.object_prefix!r}, not {prefix!r}"
            )
        return self.host_object


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """The kernel that `spec` describes, compiled at most once.

    Raises RuntimeError if CuTe DSL is set up, by its environment variables, for something else.
    """
    settings = tuple(environment.compiler_settings().items())
    asked = spec, family.target(spec.architecture), settings
    found = _memory.get(asked)
    if found is None:
        with _lock:
            found = _memory.get(asked)
            if found is None:
                found = _memory[asked] = _obtain(cache_key(spec), spec)
                return found
    counters["memory"] += 1
    return found


def forget() -> None:
    """Empty the cache in memory; the one on disk stays."""
    with _lock:
        _memory.clear()


def cache_key(spec: KernelSpec) -> str:
    """Hexadecimal key. No length, batch or number of KV heads is in it: those are dynamic."""
    parts = {
        "format": FORMAT,
        "architecture": family.target(spec.architecture),
        "kind": spec.kind,
        "problem": repr(spec.problem_class),
        "config": repr(spec.config),
        "sources": _source_digest(spec.kind.partition("_")[0], spec.architecture),
        "compiler": importlib.metadata.version("nvidia-cutlass-dsl"),
        "compiler_settings": environment.compiler_settings(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_features(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _cpu_features() -> list[str]:
    """Features of the CPU: CuTe DSL makes host code for the CPU that it runs on.

    As Linux names them; no two CPUs are told apart where it names none.
    """
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return sorted(value.split())
    return []


@functools.cache
def _source_digest(direction: str, architecture: Architecture) -> str:
    return disk_cache().meaning(compiled_sources(direction, architecture))


def compiled_sources(
    direction: str, architecture: Architecture, root: Path = Path(__file__).parents[2]
) -> list[tuple[str, bytes]]:
    """(path below `root`, content) of the sources in `COMPILED_IN` that kernels of a direction,
    the first word of their kind, and an architecture are made of."""
    other = OTHER.get(direction, ())
    folders = tuple(
        f"fa4_hd256/kernels/{a.folder}/" for a in ARCHITECTURES if a is not architecture
    )
    paths: list[Path] = []
    for place in (root / part for part in COMPILED_IN):
        paths += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    names = {path.relative_to(root).as_posix(): path for path in paths}
    return [
        (name, path.read_bytes())
        for name, path in names.items()
        if not any(part.startswith(other) for part in name.split("/"))
        and not name.startswith(folders)
    ]


def disk_cache() -> NativeCache:
    """The kernels on disk."""
    return NativeCache(
        environment.cache_directory(), "compiled kernels", environment.CACHE_DIR.name
    )


def _obtain(key: str, spec: KernelSpec) -> CompiledKernel:
    """Load the entry from disk, else compile it; other processes wait meanwhile."""
    start = time.perf_counter()
    header, parts, from_disk = disk_cache().obtain(
        f"{key}.kernel", lambda: _compile_entry(key, spec)
    )
    counters["disk" if from_disk else "compiled"] += 1
    host_object, ptx, cubin = parts
    return CompiledKernel(
        key=key,
        host_object=host_object,
        artifacts=SimpleNamespace(PTX=ptx.decode(), CUBIN=cubin),
        function_name=header["function_name"],
        object_prefix=header["object_prefix"],
        compile_seconds=header["compile_seconds"],
        from_disk=from_disk,
        seconds=time.perf_counter() - start,
    )


def _compile_entry(key: str, spec: KernelSpec) -> tuple[dict[str, Any], list[bytes]]:
    """Compile; (header, parts) of the entry, the parts being host object, PTX and cubin."""
    prefix = f"fa4_hd256_{key}"
    start = time.perf_counter()
    with room_for_files():
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
    """Inside, temporary files go to memory if the temporary directory is full or missing.

    CuTe DSL writes what it compiles to such files, and LLVM ends the process where a write fails.
    One thread at a time: the place is the whole process's. Raises RuntimeError if there is no room
    at all.
    """
    with _files_lock:
        yield from _room_for_files()


def _room_for_files() -> Iterator[None]:
    before = tempfile.tempdir
    places = ["/dev/shm"]
    with contextlib.suppress(OSError):  # raised where not even one small file fits
        places.insert(0, tempfile.gettempdir())
    for place in places:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(place).free >= _SCRATCH_BYTES:
                break
    else:
        raise RuntimeError(
            f"compiling or loading a kernel takes {_SCRATCH_BYTES >> 20} MiB of disk; none of "
            f"{', '.join(places)} has that. Free some, or set TMPDIR to a directory with room"
        )
    tempfile.tempdir = place
    try:
        yield
    finally:
        tempfile.tempdir = before


def _as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def trace_and_compile(spec: KernelSpec) -> Any:
    """Trace and compile, past every cache; returns what `cute.compile` returned.

    Line information is kept, so that the simulator and profilers can name the Python line.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, GenerateLineInfo, GPUArch, KeepCUBIN, KeepPTX

    kernel, arguments = build(spec)
    target = family.target(spec.architecture)
    with targeting(target), tempfile.TemporaryDirectory(prefix="fa4_hd256_") as scratch:
        options = (
            GPUArch(target), GenerateLineInfo(True), KeepPTX(), KeepCUBIN(),
            DumpDir(scratch),
        )  # fmt: skip
        compiled = cute.compile[options](kernel, *arguments)
        # Read while the files are there: the object may refer to them lazily.
        if not compiled.artifacts.PTX or not compiled.artifacts.CUBIN:
            raise RuntimeError(
                f"CuTe DSL {importlib.metadata.version('nvidia-cutlass-dsl')} returned no PTX or "
                "no cubin; unset CUTE_DSL_DRYRUN and CUTE_DSL_NO_CACHE if they are set"
            )
    return compiled


@contextlib.contextmanager
def targeting(target: str) -> Iterator[None]:
    """Make CuTe DSL trace for a target, whatever GPU is there, for the body only.

    Raises RuntimeError where the user's settings for CuTe DSL ask for something else.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    requested = environment.requested_architecture()
    accepted = next((a.targets for a in ARCHITECTURES if target in a.targets), (target,))
    if requested not in (None, *accepted):
        raise RuntimeError(
            f"CUTE_DSL_ARCH is {requested}, but these kernels are compiled for {target}; "
            f"unset CUTE_DSL_ARCH, or set it to one of {', '.join(accepted)}"
        )
    settings = CuTeDSL._get_dsl().envar
    if settings.enable_tvm_ffi:
        raise RuntimeError(
            "CUTE_DSL_ENABLE_TVM_FFI is set, but these kernels are called through CuTe DSL's own "
            "convention; unset CUTE_DSL_ENABLE_TVM_FFI"
        )
    settings.arch = target
    try:
        yield
    finally:
        del settings.arch


def versions() -> dict[str, str]:
    """Versions that a bug report needs."""
    names = ("fa4-hd256", "torch", "nvidia-cutlass-dsl", "numpy", "scipy", "llvmlite")
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
