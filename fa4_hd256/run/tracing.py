"""A kernel traced and compiled for its target, past every cache."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import inspect
import tempfile
from collections.abc import Iterator
from typing import Any, get_args

from .. import environment
from ..architectures import ARCHITECTURES
from ..gpus import family
from ..kernels.functions.user_functions import FUNCTION_KINDS
from ..package_name import is_of_package
from .building import build
from .catalogue import KernelSpec


def check_unchanged(problem_class: Any) -> None:
    for kind in FUNCTION_KINDS:
        asked = getattr(problem_class, kind.argument, None)
        if asked is not None:
            kind.check_unchanged(asked.key)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in the body.

    A trace makes objects by the million, and most of them live until its end. Python would look
    through these, and through those of the whole process, again and again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def trace_and_compile(spec: KernelSpec) -> Any:
    """Trace and compile, past every cache; returns what `cute.compile` returned. Line information
    is kept, so that the simulator and profilers can name the Python line. Raises ValueError for
    functions of the user's that changed since their key was derived."""
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, GenerateLineInfo, GPUArch, KeepCUBIN, KeepPTX

    check_unchanged(spec.problem_class)
    kernel, arguments = build(spec)
    target = family.target(spec.architecture)
    with targeting(target), tempfile.TemporaryDirectory(prefix="fa4_hd256_") as scratch:
        options = (
            GPUArch(target),
            GenerateLineInfo(True),
            KeepPTX(),
            KeepCUBIN(),
            DumpDir(scratch),
        )
        compiled = cute.compile[options](kernel, *arguments)
        # Read while the files are there: the object may refer to them lazily.
        if not compiled.artifacts.PTX or not compiled.artifacts.CUBIN:
            raise RuntimeError(
                f"CuTe DSL {importlib.metadata.version('nvidia-cutlass-dsl')} returned no PTX or "
                "no cubin; unset CUTE_DSL_DRYRUN and CUTE_DSL_NO_CACHE if they are set"
            )
    _name_no_module(compiled.execution_args)
    return compiled


def _name_no_module(arguments: Any) -> None:
    """Drop this package's own classes from a signature. The host object holds the signature as a
    pickle, and a copy of the package under another name loads the object. Launches read the
    annotations of numbers and pointers alone."""
    kept = [
        parameter.replace(annotation=inspect.Parameter.empty)
        if _is_own(parameter.annotation)
        else parameter
        for parameter in arguments.signature.parameters.values()
    ]
    arguments.signature = arguments.signature.replace(parameters=kept)


def _is_own(annotation: Any) -> bool:
    home = str(getattr(annotation, "__module__", ""))
    return is_of_package(home) or any(map(_is_own, get_args(annotation)))


@contextlib.contextmanager
def targeting(target: str) -> Iterator[None]:
    """Make CuTe DSL trace for a target, whatever GPU is there, for the body only. Raises
    RuntimeError where the user's settings for CuTe DSL ask for something else."""
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
