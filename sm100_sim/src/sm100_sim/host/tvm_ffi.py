"""Host code of functions compiled with --enable-tvm-ffi.

Such a function's object exports `__tvm_ffi_<name>`, which checks its arguments, sets the device and
calls the same host code as a plain function's. It is linked like `HostProgram` links a plain one;
the calls into tvm-ffi itself go to the installed library, and tensors are handed over as CUDA
tensors, because that is what the compiled checks require.
"""

from __future__ import annotations

import ctypes
import struct
import types
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm

from sm100_sim.errors import LaunchError

from .capsule import CudaCapsule
from .host_code import CALLBACKS, HostProgram, LaunchConfig, Run, next_handle, running, store

_SHT_SYMTAB = 2
_P, _I = ctypes.c_void_p, ctypes.c_int32


def undefined_symbols(content: bytes) -> set[str]:
    """Names that an ELF64 object refers to and does not define (ELF-64 object file format)."""
    (sections,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<2H", content, 58)
    headers = [struct.unpack_from("<2I4Q2I2Q", content, sections + i * size) for i in range(count)]
    names = set()
    for header in headers:
        if header[1] != _SHT_SYMTAB:
            continue
        strings = headers[header[6]][4]
        for at in range(header[4] + 24, header[4] + header[5], 24):
            name, _, _, section = struct.unpack_from("<I2BH", content, at)
            if section == 0 and name:
                end = content.index(b"\0", strings + name)
                names.add(content[strings + name : end].decode())
    return names - {"_GLOBAL_OFFSET_TABLE_"}


def _initialise_once(state: int, init: int, load: int, _set_error: int) -> None:
    """cuda_dialect_init_library_once: run the module's own load functions at the first call."""
    slot = ctypes.c_uint64.from_address(state)
    if slot.value:
        return
    library, device, result = ctypes.c_void_p(), _I(0), _I(0)
    pointer = ctypes.c_void_p(ctypes.addressof(library))
    for function, values in ((init, (pointer, result)), (load, (pointer, device, result))):
        packed = (_P * len(values))(*(ctypes.addressof(value) for value in values))
        ctypes.CFUNCTYPE(None, _P)(function)(packed)
    slot.value = next_handle()


def _nothing(*_: Any) -> None:
    """Unloading libraries and choosing a device mean nothing here."""


_SYMBOLS: dict[str, tuple[Callable, tuple]] = {
    "cuda_dialect_init_library_once": (_initialise_once, (_P, _P, _P, _P)),
    "cuda_dialect_unload_library_once": (_nothing, (_P,)),
    "_cudaSetDevice": (_nothing, (_I,)),
    "_cudaGetDeviceCount": (lambda count: store(count, 1), (_P,)),
}
CALLBACKS.update(_SYMBOLS)


class TvmFfiProgram(HostProgram):
    """The linked host code of a function compiled with --enable-tvm-ffi."""

    def _link(self, compiled: Any) -> None:
        import cutlass.cute.runtime as cute_runtime
        import tvm_ffi
        from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support

        content = _aot_support.export_module_to_bytes(
            compiled.ir_module, format="o", opt_level=3, enable_pic=True
        )
        paths = cute_runtime.find_runtime_libraries(enable_tvm_ffi=True)
        libraries = [ctypes.CDLL(path) for path in paths]
        self._add_library_symbols(undefined_symbols(content), libraries)
        self._link_object(content)
        entry = self._engine.get_function_address(f"__tvm_ffi_{compiled.function_name}")
        if not entry:
            raise LaunchError(f"the host object does not define __tvm_ffi_{compiled.function_name}")
        function = tvm_ffi.Function.__from_extern_c__(entry, keep_alive_object=self._engine)
        self._positional = lambda *values: function(*(_argument(value) for value in values))
        self._callable = _with_keywords(compiled, self._positional)

    def _add_library_symbols(self, names: set[str], libraries: list[ctypes.CDLL]) -> None:
        for name in names - set(CALLBACKS):
            found = [library for library in libraries if hasattr(library, name)]
            if found:
                llvm.add_symbol(name, ctypes.cast(getattr(found[0], name), _P).value)
            elif not llvm.address_of_symbol(name):
                raise LaunchError(
                    f"the host code of this function calls {name}, which the simulator does not "
                    "offer"
                )

    def _load(self) -> None:
        """The entry loads its library itself, through cuda_dialect_init_library_once."""

    def run(
        self,
        args: tuple[Any, ...],
        on_launch: Callable[[LaunchConfig], None],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run the host code; see `HostProgram.run`. Torch tensors are accepted as they are."""
        keywords = kwargs or {}
        # Before 4.5 CuTe DSL took no pointers here.
        if hasattr(self.execution_args, "convert_python_pointer_args_for_tvm_ffi"):
            args, keywords = self.execution_args.convert_python_pointer_args_for_tvm_ffi(
                args, keywords
            )
        self._launch(on_launch, lambda: self._callable(*args, **keywords))

    def run_positional(
        self, args: tuple[Any, ...], on_launch: Callable[[LaunchConfig], None]
    ) -> None:
        """Call the tvm-ffi function itself: every parameter by position, pointers as integers."""
        self._launch(on_launch, lambda: self._positional(*args))

    def _launch(self, on_launch: Callable[[LaunchConfig], None], call: Callable[[], Any]) -> None:
        run = Run(self, on_launch)
        with running(run):
            try:
                call()
            except Exception:
                if run.error is None:
                    raise
        if run.error is not None:
            raise run.error


def _with_keywords(compiled: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` behind the wrapper that tvm-ffi made for keywords and defaults, if there is one.

    The wrapper is generated code that calls a global of its own; it gets another one.
    """
    wrapper = getattr(compiled, "_kwargs_wrapper", None)
    if wrapper is None:
        return function
    from tvm_ffi.utils import kwargs_wrapper

    names = {**wrapper.__globals__, kwargs_wrapper._INTERNAL_TARGET_FUNC: function}
    copy = types.FunctionType(wrapper.__code__, names, wrapper.__name__, wrapper.__defaults__)
    copy.__kwdefaults__ = wrapper.__kwdefaults__
    return copy


def _argument(value: Any) -> Any:
    """Torch tensors as CUDA tensors of tvm-ffi, also inside tuples and lists."""
    import torch
    import tvm_ffi

    if isinstance(value, torch.Tensor):
        return tvm_ffi.from_dlpack(CudaCapsule(value))
    if isinstance(value, (tuple, list)):
        return tuple(_argument(part) for part in value)
    return value
