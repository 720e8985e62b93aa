"""Runs a piece of PTX on one warp, without the rest of the machine.

result = run_warp(".reg .b32 %a, %b, %d;  add.s32 %d, %a, %b;", {"%a": x, "%b": 3}, ["%d"])
result["%d"]        # uint32 (32,)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from sm100_sim.isa import load_table
from sm100_sim.native import loop
from sm100_sim.ptx.parser import Instruction, parse_module
from sm100_sim.state.warp import DEFAULT_BUDGET, FAULT_KINDS, Environment, Fault, Warp
from sm100_sim.translate.kernel import CompiledKernel, KernelCounters, translate

MAX_STOPS = 1000
_KINDS = {loop.TRAP: "trap", loop.EXIT: "exit", loop.OUT_OF_BUDGET: "yield", loop.FAULT: "fault",
          loop.BLOCKED: "blocked", loop.DIVERGENCE: "divergence"}  # fmt: skip


@dataclass(frozen=True)
class Stop:
    """Reason why native code stopped: `kind` as in `sm100_sim.native.loop`, the instruction and the
    lanes of a trap, a fault or a divergence."""

    kind: str
    instruction: Instruction | None = None
    lanes: int = 0
    fault: Fault | None = None


def resume(warp: Warp, budget: int = DEFAULT_BUDGET) -> Stop:
    """Run from the lowest program point among runnable lanes until the warp must stop."""
    context, compiled = warp.context, warp.compiled
    context.budget = budget
    kind = _KINDS[compiled.run(ctypes.addressof(context))]
    if kind == "fault":
        fault = Fault(
            FAULT_KINDS[context.fault_kind],
            context.fault_lane,
            context.fault_address,
            context.fault_width,
        )
        instruction = compiled.instructions[context.fault_instruction]
        return Stop(kind, instruction, 1 << context.fault_lane, fault)
    if kind in ("trap", "divergence"):
        return Stop(kind, compiled.block_instruction[context.stop_block], context.stop_lanes)
    return Stop(kind)


@dataclass
class WarpRun:
    """A finished run: final registers by name, the warp, its stops and execution counts."""

    warp: Warp
    compiled: CompiledKernel
    counters: KernelCounters
    stops: list[Stop] = field(default_factory=list)

    def __getitem__(self, name: str) -> np.ndarray | int:
        """uint32 or uint64 (32,); uint64 (2, 32) for b128; a lane mask for a predicate."""
        register = next(r for r in self.compiled.kernel.registers if r.name == name)
        if register.file == "pred":
            return int(self.warp.preds[register.slot])
        if register.type == "b128":
            return self.warp.r64[register.slot : register.slot + 2].copy()
        file = self.warp.r64 if register.file == "r64" else self.warp.r32
        return file[register.slot].copy()

    def floats(self, name: str) -> np.ndarray:
        """float32 (32,), or float32 (32, 2) of a packed pair."""
        values = self[name].view(np.float32)
        return values.reshape(32, 2) if values.size == 64 else values

    def count(self, statistics_class: str) -> tuple[int, int]:
        """Return (warps, lanes) executed of a statistics class."""
        rows = [
            (w, n)
            for _, name, w, n in self.compiled.executed(self.counters)
            if name == statistics_class
        ]
        return sum(w for w, _ in rows), sum(n for _, n in rows)


def kernel_text(body: str, params: str = "", head: str = "") -> str:
    """A module with one kernel ``test`` around ``body``."""
    return (
        f".version 8.8\n.target sm_100a\n.address_size 64\n{head}\n"
        f".visible .entry test({params})\n{{\n{body}\nret;\n}}\n"
    )


def compile_body(
    body: str, keep: tuple[str, ...] = (), params: str = "", head: str = ""
) -> CompiledKernel:
    """Translate ``body``; the registers in ``keep`` stay readable at the end."""
    load_table()
    return translate(parse_module(kernel_text(body, params, head))["test"], frozenset(keep))


def run_warp(
    body: str,
    inputs: dict | None = None,
    outputs: list[str] | tuple = (),
    *,
    params: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    ranges: list[tuple[int, int, int]] = (),
    specials: dict[str, int] | None = None,
    **options,
) -> WarpRun:
    """Compile and run ``body`` on one warp until it exits.

    inputs: register -> value (int, array of 32, or a lane mask for predicates); set before the
    run. outputs: registers to keep. params: parameter buffer (declare parameters with the option
    ``param_text``). shared: uint8 (CTAs, bytes). ranges: (start, end, writable) of global memory.
    ``executor(warp, stop)`` handles traps in place of the bound executors; ``head`` is module text.
    A fault, or a stop that is not a trap, yield or exit, ends the run.
    """
    compiled = compile_body(
        body, (*(inputs or {}), *outputs), options.get("param_text", ""), options.get("head", "")
    )
    return run_compiled(
        compiled,
        inputs or {},
        environment(params, shared, ranges),
        specials,
        options.get("executor"),
        options.get("index", 0),
    )


def environment(
    params: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    ranges: list[tuple[int, int, int]] = (),
) -> Environment:
    """Make the environment of a warp; see `run_warp`."""
    if shared is None:
        shared = np.zeros((1, 4096), np.uint8)
    return Environment(
        shared,
        np.full(len(shared), shared.shape[1], np.uint32),
        np.array(ranges, np.uint64).reshape(-1, 3),
        np.zeros(16, np.uint8) if params is None else params,
    )


def run_compiled(
    compiled: CompiledKernel,
    inputs: dict,
    environment: Environment,
    specials: dict[str, int] | None = None,
    executor: Callable | None = None,
    index: int = 0,
) -> WarpRun:
    """Run one warp of an already translated kernel, of a block of 32 threads of the CTA of rank 0,
    of which there is no more."""
    specials = {"%ntid.x": 32, **(specials or {})}
    counters = compiled.new_counters()
    warp = Warp(compiled, SimpleNamespace(rank=0), index, environment, specials, counters)
    registers = {register.name: register for register in compiled.kernel.registers}
    for name, value in inputs.items():
        _set(warp, registers[name], value)
    run = WarpRun(warp, compiled, counters)
    for _ in range(MAX_STOPS):
        stop = resume(warp)
        run.stops.append(stop)
        if stop.kind == "trap":
            if executor is not None:
                executor(warp, stop)
            else:
                waiting = compiled.executors[stop.instruction.index](warp, stop.lanes)
                assert waiting is None, f"{stop.instruction.text} waits"
        elif stop.kind != "yield":
            return run
    raise AssertionError(f"the warp did not finish within {MAX_STOPS} stops")


def _set(warp: Warp, register, value) -> None:
    if register.file == "pred":
        warp.preds[register.slot] = value
        return
    file = warp.r64 if register.file == "r64" else warp.r32
    value = np.asarray(value)
    if value.dtype.kind == "f" or value.dtype.kind == "i" and value.ndim:
        value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
    if value.ndim == 0:
        value = int(value) & (2**64 - 1 if register.file == "r64" else 2**32 - 1)
    file[register.slot] = value
