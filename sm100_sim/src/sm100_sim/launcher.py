"""`launch`: run what `cute.compile` returned, on this machine's CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import devices
from .errors import LaunchError, SimulationError, in_plain
from .host.arguments import tensor_ranges
from .host.program import program_of
from .isa import load_table
from .ptx.declarations import assembly_lines
from .ptx.parser import Kernel, parse_module
from .report import Report, remember
from .run.blas import single_threaded
from .run.grid import Grid, clusters_are_independent
from .run.machine import Machine
from .run.observer import Observer
from .run.together import run_together
from .settings import Settings, read_settings
from .state.events import EagerPolicy, LazyPolicy, RandomPolicy
from .state.launch import LaunchConfig
from .state.memory import GlobalMemory
from .state.tmem import LANES
from .state.warp import aligned_zeros
from .targets import limits_of
from .trace.records import Trace
from .translate.kernel import CompiledKernel, translate
from .words import shown

#: Bytes that the state of the clusters resident by default may take.
STATE_LIMIT = 1 << 30

#: Modules, and translated kernels, that a process keeps of those it has run; those used least
#: recently go.  Each takes some 10 MB; to read one again from the disk takes half a second.
KEPT_KERNELS = 64
_lock = threading.RLock()


@dataclass(frozen=True)
class Options:
    """Options of running kernels; see `launch` for the meaning of each. None: as many clusters as
    the device holds, as many threads as cores. observe: called with the `LaunchConfig` of each
    launch and its report. padded: loads may read behind a tensor up to the multiple of 512 bytes to
    which PyTorch's allocator rounds it on a GPU. Raises ValueError for a value that is not
    accepted."""

    clusters: int | None = None
    seed: int | None = None
    schedule: str = "eager"
    progress: Callable[[int, int], None] | None = None
    trace: bool = False
    sanitize: bool | str = False
    observe: Callable[[LaunchConfig, Report], None] | None = None
    threads: int | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        for name, least in (("clusters", 1), ("threads", 1), ("seed", 0)):
            number = getattr(self, name)
            if number is None:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(
                    f"{name} is {shown(number)}; accepted: whole numbers from {least} on"
                )
        for name, accepted in (
            ("sanitize", (False, True, "wait-ld", "strict", "strict-order")),
            ("schedule", ("eager", "lazy")),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, str)) or value not in accepted:
                names = ", ".join(map(shown, accepted))
                raise ValueError(f"{name} is {shown(value)}; accepted: {names}")

    def policy(self) -> EagerPolicy:
        """A new policy; a seed wins over `schedule`."""
        if self.seed is not None:
            return RandomPolicy(self.seed)
        return EagerPolicy() if self.schedule == "eager" else LazyPolicy()


def options_from(settings: Settings, **given: Any) -> Options:
    """Options of the environment, and over them what is given and not None."""
    known = {
        "clusters": settings.clusters, "seed": settings.seed, "sanitize": settings.sanitize,
        "threads": settings.threads, "padded": settings.padded,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    return Options(**(known | given))


@in_plain
def launch(
    compiled: Any,
    *args: Any,
    clusters: int | None = None,
    seed: int | None = None,
    sanitize: bool | str | None = None,
    schedule: str = "eager",
    progress: Callable[[int, int], None] | None = None,
    trace: bool = False,
    threads: int | None = None,
    **kwargs: Any,
) -> Report:
    """Run a compiled CuTe DSL function in the simulator.

    compiled: what `cute.compile` returned, its PTX kept (`keeping_ptx`).
    args, kwargs: what one would call it with; tensors are CPU tensors through from_dlpack and are
        read and written in place. A kernel may touch these tensors and no other memory.
    clusters: how many are resident at once. Default: as many as the device holds (one CTA per SM;
        `devices`), fewer if their state would take more than 1 GiB.
    seed: an adversarial schedule (random warp order, asynchronous operations early or late, waits
        that fail spuriously); the same seed gives the same run.
    sanitize: look for races and lifetime errors; they are in the report's findings
        (docs/sanitizer.md); "strict" and "strict-order": by the letter of the PTX ISA. Two
        to three times slower (docs/simulator.md has measurements); with a seed, the lazy schedule
        or the letter of the ISA more, because all operations then run in Python.
    schedule: without a seed, whether asynchronous operations take effect when they are issued
        ("eager") or when nothing else can go on ("lazy").
    progress: called with (clusters done, clusters in all).
    trace: keep every asynchronous and synchronisation instruction in the report.
    threads: most clusters that run at the same time, on as many threads. Default: the cores this
        process may use. Only kernels whose clusters do not communicate use more than one, and
        only without seed, trace and sanitizer; nothing but the time depends on it.
    clusters, seed, sanitize and threads default to the SM100_SIM_* variables (`settings`).

    Returns the report of the launch; of the last one if the function launches several kernels
    (`last_reports()` has all). Raises a SimulationError for whatever the kernel does wrong,
    LaunchError if nothing is launched, ValueError for wrong options.
    """
    settings = read_settings()
    options = options_from(
        settings, clusters=clusters, seed=seed, schedule=schedule, progress=progress, trace=trace,
        sanitize=sanitize, threads=threads,
    )  # fmt: skip
    ranges = tensor_ranges(args, kwargs)
    program = program_of(compiled)
    reports = run_host_code(
        lambda on_launch: program.run(args, on_launch, kwargs), ranges, options, settings.report
    )
    if not reports:
        raise LaunchError("the compiled function launched no kernel")
    return reports[-1]


@in_plain
def launch_packed(
    compiled: Any,
    arguments: Sequence[int],
    memory: list[tuple[int, int, str]],
    **options: Any,
) -> Report:
    """`launch` of arguments that the caller has packed as the compiled function's host code takes
    them.

    arguments: the address of each. memory: (first byte, past the last one, name) of the host memory
    that the kernels may touch, in address order. options: as of `launch`.

    Returns and raises as `launch` does.
    """
    settings, program = read_settings(), program_of(compiled)
    reports = run_host_code(
        lambda on_launch: program.run_packed(list(arguments), on_launch),
        memory,
        options_from(settings, **options),
        settings.report,
    )
    if not reports:
        raise LaunchError("the compiled function launched no kernel")
    return reports[-1]


def run_host_code(
    call: Callable[[Callable[[LaunchConfig], None]], None],
    ranges: list[tuple[int, int, str]],
    options: Options,
    report_file: str | None = None,
) -> list[Report]:
    """Run host code and, in the simulator, every kernel it launches.

    call: runs the host code and calls its argument for each launch. ranges: (start, end, name) of
    the host memory the kernels may touch. report_file: as SM100_SIM_REPORT. Returns a report for
    each launch, in order.
    """
    reports: list[Report] = []

    def on_launch(config: LaunchConfig) -> None:
        try:
            reports.append(_run_config(config, ranges, options))
        except (SimulationError, KeyboardInterrupt) as ended:
            error: Any = ended
            error.kernel = config.kernel_name
            raise
        remember(reports[-1], report_file)
        if options.observe is not None:
            options.observe(config, reports[-1])

    call(on_launch)
    return reports


def parsed_kernel(ptx: str, name: str) -> Kernel:
    """The kernel `name` of a PTX module, which is parsed once while it is kept.

    Raises LaunchError if the module has no such kernel.
    """
    with _lock:
        kernels = _parsed(ptx)
    if name not in kernels:
        raise LaunchError(f"the PTX has no kernel {name!r}; it has {sorted(kernels)}")
    return kernels[name]


def translated_kernel(ptx: str, name: str, sanitize: bool = False) -> CompiledKernel:
    """The kernel `name` of a PTX module in native code, translated once while it is kept.

    sanitize: the variant that logs memory accesses. Both variants share the parsed kernel.
    """
    with _lock:
        return _translated(ptx, name, sanitize)


@functools.lru_cache(maxsize=KEPT_KERNELS)
def _parsed(ptx: str) -> dict[str, Kernel]:
    load_table()
    kernels, lines = parse_module(ptx), assembly_lines(ptx)
    for kernel in kernels.values():
        kernel.assembly_lines = lines
    return kernels


@functools.lru_cache(maxsize=KEPT_KERNELS)
def _translated(ptx: str, name: str, sanitize: bool) -> CompiledKernel:
    return translate(parsed_kernel(ptx, name), sanitize=sanitize, ptx=ptx)


def forget_kernels() -> None:
    """Let go of the kernels that this process has parsed and translated."""
    with _lock:
        _parsed.cache_clear()
        _translated.cache_clear()


def run_kernel(
    config: LaunchConfig,
    parameters: np.ndarray,
    ranges: list[tuple[int, int, str]],
    options: Options | None = None,
) -> Report:
    """Run the kernel `config.kernel_name` of the module `config.ptx`.

    parameters: uint8, the parameter buffer (see `parameter_buffer`). ranges: (start, end, name) of
    the host memory it may touch. Raises as `launch` does.
    """
    options = options or Options()
    start = time.perf_counter()
    logged = bool(options.sanitize) or options.trace
    compiled = translated_kernel(config.ptx, config.kernel_name, logged)
    translated = time.perf_counter()
    trace = Trace() if options.trace else None
    memory = GlobalMemory(ranges, parameters, options.padded)
    machine = make_machine(compiled, config, memory, options, observers_of(options, trace))
    others = [
        make_machine(compiled, config, memory, options, (), machine.grid)
        for _ in range(_threads(machine, options) - 1)
    ]
    with single_threaded():
        if others:
            _run_in_threads([machine, *others])
        else:
            machine.run()
    seconds = time.perf_counter() - translated
    report = _report(machine, trace, translated - start, seconds)
    return dataclasses.replace(report, threads=1 + len(others))


def observers_of(options: Options, trace: Trace | None = None) -> tuple[Observer, ...]:
    """Return the observers of a launch that the options request; trace: what is filled, or None.

    The code of an observer is imported only when it is requested.
    """
    found: list[Observer] = []
    if options.sanitize:
        from .sanitizer import READINGS, Watch

        found.append(Watch(READINGS[options.sanitize]))
    if trace is not None:
        from .trace.observer import Tracer

        # The sanitizer has the log of accesses for itself.
        found.append(Tracer(trace, ports=not options.sanitize))
    return tuple(found)


def make_machine(
    compiled: CompiledKernel,
    config: LaunchConfig,
    memory: GlobalMemory,
    options: Options,
    observers: Iterable[Observer] = (),
    grid: Grid | None = None,
) -> Machine:
    """A machine for one launch; with `grid` for some of its clusters, those it takes from there."""
    resident = options.clusters or default_clusters(compiled, config)
    machine = Machine(compiled, config, memory, resident, options.policy(), observers, grid)
    if grid is None:
        machine.grid.progress = options.progress
    return machine


def _threads(machine: Machine, options: Options) -> int:
    """Threads that run clusters: one unless nobody looks on, the order of warps is fixed and the
    clusters are independent."""
    wanted = options.threads or _cores()
    most = min(wanted, machine.resident)
    if most == 1 or machine.observers or machine.policy.random_order:
        return 1
    return most if clusters_are_independent(machine.compiled.instructions) else 1


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_in_threads(machines: list[Machine]) -> None:
    for machine in machines:
        machine.limit = 1
    run_together(machines)
    for other in machines[1:]:
        machines[0].absorb(other)


def default_clusters(compiled: CompiledKernel, config: LaunchConfig) -> int:
    """Clusters resident at once unless requested otherwise.

    As many as the device holds (one CTA per SM), but no more than fit in STATE_LIMIT bytes.
    """
    size = math.prod(config.cluster)
    registers = 128 * compiled.r32_count + 256 * compiled.r64_count
    warps = -(-math.prod(config.block) // 32)
    shared = compiled.kernel.dynamic_shared_offset + config.dynamic_smem
    columns = limits_of(compiled.kernel.target).columns
    cluster_bytes = size * (warps * registers + shared + 4 * columns * LANES)
    return max(1, min(devices.current().clusters(size), STATE_LIMIT // cluster_bytes))


def parameter_buffer(kernel: Kernel, values: list[bytes]) -> np.ndarray:
    """The kernel's parameters as one uint8 buffer; `values[i]` are the bytes of parameter i.

    It starts on a 64-byte boundary, because TMA descriptors lie in it.
    """
    if len(values) != len(kernel.params):
        raise LaunchError(f"{len(values)} parameters given, {kernel.name} has {len(kernel.params)}")
    buffer = aligned_zeros((max(kernel.param_bytes, 1),), np.uint8)
    for param, value in zip(kernel.params, values, strict=True):
        if len(value) != param.size:
            raise LaunchError(f"parameter {param.name} has {param.size} bytes, given {len(value)}")
        buffer[param.offset : param.offset + param.size] = np.frombuffer(value, np.uint8)
    return buffer


def _run_config(config: LaunchConfig, ranges: list, options: Options) -> Report:
    start = time.perf_counter()
    kernel = parsed_kernel(config.ptx, config.kernel_name)
    values = [
        ctypes.string_at(pointer, param.size)
        for param, pointer in zip(kernel.params, config.param_pointers, strict=True)
    ]
    seconds = time.perf_counter() - start
    report = run_kernel(config, parameter_buffer(kernel, values), ranges, options)
    return dataclasses.replace(report, translate_seconds=report.translate_seconds + seconds)


def _report(
    machine: Machine, trace: Trace | None, translate_seconds: float, seconds: float
) -> Report:
    config, counters = machine.config, machine.counters
    classes: dict[str, dict[str, int]] = {}
    opcodes: dict[str, dict[str, int]] = {}
    labels = machine.compiled.labels
    for instruction, _, warps, lanes in machine.executed():
        for table, key in zip((classes, opcodes), labels[instruction.index], strict=True):
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
            name: counters[f"tma.{name.replace('_', ' ')}"]
            for name in ("load_bytes", "store_bytes")
        },
        clc={name: counters[f"clc.{name}"] for name in ("try_cancel", "stolen", "refused")},
        resident_clusters=machine.resident,
        seed=machine.policy.seed,
        schedule=machine.policy.name,
        wall_seconds=seconds,
        translate_seconds=translate_seconds,
        seconds=machine.seconds,
        findings=machine.all_findings(),
        notes=[note for observer in machine.observers for note in observer.notes()],
        trace=None if trace is None else trace.entries,
        shared_accesses={} if trace is None else trace.shared_accesses,
    )
