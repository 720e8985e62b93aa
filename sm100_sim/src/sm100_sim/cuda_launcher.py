"""`launch_cuda`: compile CUDA C++ by NVRTC, for the simulated device, and run a kernel of it.

NVRTC is a library of the CUDA toolkit that comes as a wheel, too (nvidia-cuda-nvrtc, the extra
`cuda`); it needs no GPU. The headers of the toolkit (cuda_fp16.h, cuda/barrier, ...) are bundled
with it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import devices
from .errors import CompileError, MissingExtra
from .ptx_launcher import launch_ptx
from .report import Report
from .settings import read_settings

#: Files of NVRTC, the newest first.
_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")


class CompiledCuda(NamedTuple):
    """Result of NVRTC: the PTX of a source, and the mangled names of the requested kernels."""

    ptx: str
    names: dict[str, str]


def launch_cuda(
    source: str | Path,
    kernel: str,
    arguments: Sequence[Any],
    *,
    flags: Sequence[str] = (),
    **launch: Any,
) -> Report:
    """Compile CUDA C++ and run one of its kernels in the simulator.

    source: the text, or the Path of a file.
    kernel: its name as in C++, with its namespace and template arguments: "scale", "gemm<128, 2>".
    arguments: as of `launch_ptx`. flags: further options of NVRTC, such as "-DTILE=64".
    launch: `grid`, `block`, `cluster`, `dynamic_smem` and `options` of `launch_ptx`.

    Returns and raises as `launch_ptx` does; CompileError with NVRTC's messages for a source that
    does not compile, MissingExtra without NVRTC.
    """
    compiled = compile_cuda(source, [kernel], flags=flags)
    return launch_ptx(compiled.ptx, compiled.names[kernel], arguments, **launch)


def compile_cuda(
    source: str | Path, kernels: Sequence[str], *, flags: Sequence[str] = ()
) -> CompiledCuda:
    """Compile CUDA C++ to PTX for the simulated device, with line information.

    Arguments and errors are those of `launch_cuda`.
    """
    path = Path(source) if isinstance(source, Path) else None
    text = path.read_text(encoding="utf-8") if path else str(source)
    # Line information names the file as it is called here.
    name = str(path) if path else "source.cu"
    capability = "{}{}a".format(*devices.current().capability)
    chosen = [f"--gpu-architecture=compute_{capability}", "-lineinfo", "--std=c++17", *flags]
    if path:
        chosen.append(f"--include-path={path.resolve().parent}")
    return _compiled(text, name, tuple(kernels), tuple(chosen))


@functools.lru_cache(maxsize=16)
def _compiled(
    text: str, name: str, kernels: tuple[str, ...], flags: tuple[str, ...]
) -> CompiledCuda:
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), name.encode(), 0, None, None))  # fmt: skip
    try:
        for kernel in kernels:
            _check(library.nvrtcAddNameExpression(program, kernel.encode()))
        given = [*flags, *_headers(library)]
        array = (ctypes.c_char_p * len(given))(*(flag.encode() for flag in given))
        if library.nvrtcCompileProgram(program, len(given), array):
            raise CompileError(f"NVRTC does not compile {name}:\n{_text(program, 'ProgramLog')}")
        names = {}
        for kernel in kernels:
            lowered = ctypes.c_char_p()
            _check(library.nvrtcGetLoweredName(
                program, kernel.encode(), ctypes.byref(lowered)))  # fmt: skip
            names[kernel] = (lowered.value or b"").decode()
        return CompiledCuda(_text(program, "PTX"), names)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> str:
    """Return a text of a program: its "PTX" or "ProgramLog"."""
    library, size = _library(), ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode(errors="replace").strip()


def _check(status: int) -> None:
    if status:
        library = _library()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")


def _headers(library: Any) -> list[str]:
    """Flags that name the toolkit's headers, unpacked once into the directory of the cache."""
    if not hasattr(library, "nvrtcInstallBundledHeaders"):
        return []
    major, minor = nvrtc_version()
    base = read_settings().cache_directory or os.path.join(
        tempfile.gettempdir(), f"sm100_sim-{os.geteuid()}"
    )
    return [f"--use-bundled-headers={base}/nvrtc-{major}.{minor}"]


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC. Raises MissingExtra if it is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@functools.cache
def _library() -> Any:
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    missing = ModuleNotFoundError("no NVRTC", name="nvidia-cuda-nvrtc")
    raise MissingExtra("CUDA C++", "cuda", missing)


def _candidates() -> Iterable[str]:
    """Yield where NVRTC may lie: in wheels of NVIDIA's, then wherever the linker looks."""
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec else ():
        for folder in ("cu13/lib", "cuda_nvrtc/lib"):
            yield from (os.path.join(base, folder, name) for name in _LIBRARIES)
    yield from _LIBRARIES
