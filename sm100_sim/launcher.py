"""`launch`: run what `cute.compile` returned, on this machine's CPU."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .codegen import CompiledKernel, translate
from .errors import LaunchError
from .events import EagerPolicy, LazyPolicy, RandomPolicy
from .host import HostProgram, LaunchConfig, tensor_ranges
from .isa import load_table
from .machine import Machine
from .memory import GlobalMemory
from .ptx import parse_module
from .report import Report, TraceEntry, remember
from .settings import read_settings

#: SMs of a B200, and the most clusters resident at once unless asked otherwise: more of them
#: cost memory (about 1 MiB a CTA) and change no result.
NUM_SMS = 148
DEFAULT_RESIDENT = 16

_programs: weakref.WeakKeyDictionary[Any, HostProgram] = weakref.WeakKeyDictionary()
_modules: dict[str, dict[str, Any]] = {}
_translated: dict[tuple[str, str], CompiledKernel] = {}
_lock = threading.RLock()


def launch(
    compiled: Any,
    *args: Any,
    clusters: int | None = None,
    seed: int | None = None,
    sanitize: bool | None = None,
    schedule: str = "eager",
    progress: Callable[[int, int], None] | None = None,
    trace: bool = False,
) -> Report:
    """Run a compiled CuTe DSL function in the simulator; returns the last launch's report.

    compiled: what `cute.compile` returned. args: what one would call it with; tensors are CPU
        tensors through from_dlpack, and are read and written in place.
    clusters: resident at once (default: as many as a B200 holds, at most 16).
    seed: an adversarial schedule; the same seed gives the same run.
    sanitize: check for races and lifetime errors.
    schedule: without a seed, "eager" or "lazy": when asynchronous operations are performed.
    progress: called with (clusters done, clusters in all).
    trace: keep every machine operation in the report.
    clusters, seed and sanitize default to the SM100_SIM_* environment variables.

    Raises a SimulationError for whatever the kernel does wrong, ValueError for bad arguments,
    NotImplementedError for sanitize.
    """
    settings = read_settings()
    seed = settings.seed if seed is None else seed
    if settings.sanitize if sanitize is None else sanitize:
        raise NotImplementedError(
            "the sanitizer is not implemented; pass sanitize=False and unset SM100_SIM_SANITIZE"
        )
    resident = settings.clusters if clusters is None else clusters
    if resident is not None and (not isinstance(resident, int) or resident < 1):
        raise ValueError(f"clusters is {resident!r}; accepted are whole numbers from 1 on")
    options = (_policy(schedule, seed), resident, progress, trace)
    reports: list[Report] = []

    def on_launch(config: LaunchConfig) -> None:
        reports.append(_run(config, tensor_ranges(args), options))
        remember(reports[-1], settings.report)

    _program(compiled).run(args, on_launch)
    if not reports:
        raise LaunchError("the compiled function launched no kernel")
    return reports[-1]


def _policy(schedule: str, seed: int | None) -> EagerPolicy:
    if seed is not None:
        return RandomPolicy(seed)
    if schedule not in ("eager", "lazy"):
        raise ValueError(f"schedule is {schedule!r}; accepted are 'eager' and 'lazy'")
    return EagerPolicy() if schedule == "eager" else LazyPolicy()


def _program(compiled: Any) -> HostProgram:
    with _lock:
        program = _programs.get(compiled)
        if program is None:
            program = _programs[compiled] = HostProgram(compiled)
        return program


def _kernel(config: LaunchConfig) -> CompiledKernel:
    """The translated kernel, once per PTX text and name in this process."""
    key = (config.ptx, config.kernel_name)
    with _lock:
        if key not in _translated:
            load_table()
            if config.ptx not in _modules:
                _modules[config.ptx] = parse_module(config.ptx)
            _translated[key] = translate(_modules[config.ptx][config.kernel_name])
        return _translated[key]


def _run(config: LaunchConfig, ranges: list, options: tuple) -> Report:
    policy, resident, progress, traced = options
    start = time.perf_counter()
    compiled = _kernel(config)
    translated = time.perf_counter()
    size = config.cluster[0] * config.cluster[1] * config.cluster[2]
    if resident is None:
        resident = max(1, min(NUM_SMS // size, DEFAULT_RESIDENT))
    memory = GlobalMemory(ranges, _parameters(compiled.kernel, config))
    trace: list | None = [] if traced else None
    machine = Machine(compiled, config, memory, resident, policy, progress, trace)
    machine.run()
    return _report(machine, translated - start, time.perf_counter() - translated)


def _parameters(kernel: Any, config: LaunchConfig) -> np.ndarray:
    """The kernel's parameter buffer, as the host code handed it over; 64-byte aligned, since TMA
    descriptors lie in it."""
    size = max((p.offset + p.size for p in kernel.params), default=0)
    raw = np.zeros(size + 64, np.uint8)
    shift = -raw.__array_interface__["data"][0] % 64
    buffer = raw[shift : shift + max(size, 1)]
    for param, pointer in zip(kernel.params, config.param_pointers, strict=True):
        content = (ctypes.c_uint8 * param.size).from_address(pointer)
        buffer[param.offset : param.offset + param.size] = content
    return buffer


def _report(machine: Machine, translate_seconds: float, seconds: float) -> Report:
    config, counters = machine.config, machine.counters
    classes: dict[str, dict[str, int]] = {}
    opcodes: dict[str, dict[str, int]] = {}
    total = 0
    for instruction, name, warps, lanes in machine.compiled.executed(machine.counts):
        total += warps
        for table, key in ((classes, name), (opcodes, instruction.name)):
            entry = table.setdefault(key, {"warps": 0, "lanes": 0})
            entry["warps"] += warps
            entry["lanes"] += lanes
    return Report(
        kernel=config.kernel_name,
        grid=config.grid,
        cluster=config.cluster,
        block=config.block,
        dynamic_smem=config.dynamic_smem,
        instructions=classes,
        opcodes=opcodes,
        tma={
            "load_bytes": counters["tma.load bytes"],
            "store_bytes": counters["tma.store bytes"],
        },
        clc={"try_cancel": counters["clc.try_cancel"], "stolen": counters["clc.stolen"]},
        resident_clusters=machine.resident,
        seed=machine.policy.seed,
        wall_seconds=seconds,
        translate_seconds=translate_seconds,
        warp_instructions_per_second=total / seconds if seconds > 0 else 0.0,
        trace=_trace(machine.trace),
    )


def _trace(recorded: list | None) -> list[TraceEntry] | None:
    if recorded is None:
        return None
    return [
        TraceEntry(number, cta, warp, i.opcode, i.text, i.line, lanes)
        for number, cta, warp, i, lanes in recorded
    ]
