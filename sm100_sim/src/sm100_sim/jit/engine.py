"""Modules of LLVM IR to native code of this CPU."""

from __future__ import annotations

import functools
import threading
from typing import Any

import llvmlite.binding as llvm

from . import cache

_lock = threading.Lock()


@functools.cache
def host() -> tuple[llvm.Target, str, str]:
    """Return (target, name, features) of this CPU. Raises RuntimeError where it lacks what is
    needed."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    # Without it LLVM calls functions of a compiler's library, which no process need have.
    if not features.get("f16c", True):
        raise RuntimeError(
            f"this CPU ({llvm.get_host_cpu_name()}) has no instructions for half precision (F16C, "
            "in x86 CPUs since 2012), which the simulator's code needs; for a virtual machine "
            "choose a CPU model that has them, such as that of its host"
        )
    return llvm.Target.from_default_triple(), llvm.get_host_cpu_name(), features.flatten()


@functools.cache
def host_has(feature: str) -> bool:
    """Return True if the CPU has a feature, by LLVM's name of it (e.g. "avx512f")."""
    return f"+{feature}" in host()[2].split(",")


@functools.cache
def function_attributes() -> str:
    """Wide vectors by name: some CPUs' tuning would otherwise split them in halves."""
    width = "512" if host_has("avx512f") else "256"
    return (
        f'nounwind "prefer-vector-width"="{width}" "min-legal-vector-width"="{width}" '
        f'"frame-pointer"="none"'
    )


def target_machine(level: int) -> llvm.TargetMachine:
    """Return the compiler for this CPU; level: LLVM's code generation level, 0 to 3."""
    target, cpu, features = host()
    return target.create_target_machine(
        cpu=cpu, features=features, opt=level, jit=True, codemodel="jitdefault"
    )


def compile_module(text: str, level: int) -> tuple[llvm.ExecutionEngine, bytes]:
    """The linked code of a module and its object file."""
    with _lock:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), target_machine(level))
        return engine, _finalize(engine)


def _finalize(engine: llvm.ExecutionEngine) -> bytes:
    """Compile and link; returns the object file."""
    objects: list[bytes] = []
    engine.set_object_cache(notify_func=lambda _, code: objects.append(bytes(code)))
    engine.finalize_object()
    return objects[0]


def link(code: bytes, level: int) -> llvm.ExecutionEngine:
    """An object file that `compile_module` made, linked."""
    with _lock:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(level))
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine


def native_engine(text: str) -> llvm.ExecutionEngine:
    """Optimised code of a module in IR; attribute group #0 and declarations are completed here."""
    machine = target_machine(2)
    text = _once_declared(f"{text}\nattributes #0 = {{ {function_attributes()} }}\n")
    engine = None

    def make() -> tuple[dict[str, Any], bytes]:
        nonlocal engine
        module = llvm.parse_assembly(text)
        module.verify()
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(2))
        builder.getModulePassManager().run(module, builder)
        engine = llvm.create_mcjit_compiler(module, machine)
        return {}, _finalize(engine)

    _, code = cache.obtain(cache.entry_name(text, *host()[1:]), make)
    if engine is None:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
    return engine


def _once_declared(text: str) -> str:
    """IR with each external declaration (a line of its own) only once, in front."""
    lines = text.splitlines()
    declarations = dict.fromkeys(line for line in lines if line.startswith("declare "))
    return "\n".join([*declarations, *(line for line in lines if line not in declarations)])
