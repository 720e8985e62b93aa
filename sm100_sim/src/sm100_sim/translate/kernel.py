"""Kernels to native code: LLVM IR per basic block, compiled in process.

``translate(kernel)`` resolves every instruction in the table, cuts the kernel into blocks, binds
the machine operations, and compiles one small function per block. The run loop and the memory
checks (``runtime``) are compiled once per process with full optimisation; the kernel's own
blocks at a low level, since their compile time is what a user waits for.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from sm100_sim.isa.emitter import Emitter
from sm100_sim.isa.table import resolve, row_of
from sm100_sim.isa.tensor.tcgen05 import check_groups
from sm100_sim.jit import cache as translation_cache
from sm100_sim.jit.engine import (
    compile_module,
    function_attributes,
    host,
    link,
    native_engine,
)
from sm100_sim.native.compiler import module_text
from sm100_sim.native.layout import Operation
from sm100_sim.ptx.parser import Instruction, Kernel, Register
from sm100_sim.state.warp import ALL_LANES

from .blocks import (
    BRANCH,
    INDEXED,
    TRAP,
    Block,
    analyse_liveness,
    build_blocks,
    loaded_registers,
    mark_spins,
)
from .native_forms import exported, operation_of
from .runtime import ALIGN_MASK, ALIGN_NONE, ALIGN_REGISTER, BLOCK_RECORD, runtime_ir

_ADDRESS_FUNCTIONS = (
    "address_shared", "address_own_shared", "address_local", "address_global", "address_generic",
)  # fmt: skip
_KERNEL_SYMBOLS = (*_ADDRESS_FUNCTIONS, "log_access")
_RUNTIME_FUNCTIONS = (
    "run",
    *_KERNEL_SYMBOLS,
    *(routine.name for routine in exported()),
)


@dataclass(frozen=True, slots=True)
class KernelCounters:
    """Execution counts that the warps of one launch share.

    blocks  uint64 (blocks, 2): times a warp ran the block, and the lanes summed
    guards  uint64 (guarded inline instructions, 2): the same for lanes whose guard held
    """

    blocks: np.ndarray
    guards: np.ndarray


class CompiledKernel:
    """A kernel ready to run.

    kernel             the parsed kernel, with blocks and register slots
    executors          executor of each machine operation by instruction index, None elsewhere
    block_instruction  the instruction at which lanes stand when their program point is block i
    run                native entry: address of a warp's context -> index of the stop kind
    r32_count, r64_count, pred_count   rows of the register files
    seconds            {"ir": ..., "llvm": ...}, the time translation took
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.instructions = kernel, kernel.instructions
        self.executors: list[Callable | None] = [None] * len(kernel.instructions)
        self.seconds: dict[str, float] = {}
        #: With the sanitizer: registers that hold data of tcgen05.ld -> numbers of those loads.
        self.watched: dict[Register, frozenset[int]] | None = None
        self._guarded: list[int] = []
        #: Owns the native code; set once it is linked.
        self._engine: Any = None
        self._target_tables: list[np.ndarray] = []
        rows = {"r32": 0, "r64": 0, "pred": 0}
        for register in kernel.registers:
            if register.slot >= 0:
                end = register.slot + (2 if register.type == "b128" else 1)
                rows[register.file] = max(rows[register.file], end)
        self.r32_count, self.r64_count, self.pred_count = rows.values()
        instructions = kernel.instructions
        self.block_instruction = [
            instructions[min(block.start, len(instructions) - 1)] for block in kernel.blocks
        ]
        self.table = np.zeros(len(kernel.blocks), BLOCK_RECORD)
        self.run: Callable[[int], int] = _runtime().run
        self._native_table: np.ndarray | None = None
        self._operations: list[Operation] = []

    def new_counters(self) -> KernelCounters:
        """Zeroed counters for one launch."""
        return KernelCounters(
            np.zeros((len(self.kernel.blocks), 2), np.uint64),
            np.zeros((max(len(self._guarded), 1), 2), np.uint64),
        )

    @property
    def native_table(self) -> np.ndarray:
        """The block table with the routines of machine operations that native code does."""
        if self._native_table is None:
            table = self.table.copy()
            for block in self.kernel.blocks:
                ending = block.terminator_instruction
                trap = block.terminator == TRAP
                found = operation_of(ending, block.index) if trap else None
                if found is not None:
                    routine, operation = found
                    self._operations.append(operation)
                    row = table[block.index]
                    row["native"] = routine_address(routine.name)
                    row["operation"] = ctypes.addressof(operation)
            self._native_table = table
        return self._native_table

    @functools.cached_property
    def labels(self) -> list[tuple[str, str]]:
        """Statistics class and full name of each instruction."""
        return [(row_of(i).statistics_class(i), i.name) for i in self.instructions]

    def executed(self, counters: KernelCounters) -> Iterator[tuple[Instruction, str, int, int]]:
        """Every instruction executed: (instruction, statistics class, warps, lanes).

        Guarded inline instructions are counted by their guard; guarded branches, exits and
        machine operations by the warps that reach them.
        """
        guards = dict(zip(self._guarded, counters.guards.tolist(), strict=False))
        for block, (warps, lanes) in zip(self.kernel.blocks, counters.blocks.tolist(), strict=True):
            if not warps:
                continue
            end = block.stop + (block.terminator_instruction is not None)
            for i in range(block.start, end):
                counted = guards.get(i, (warps, lanes))
                if counted[0]:
                    yield self.instructions[i], self.labels[i][0], *counted


def translate(
    kernel: Kernel,
    keep: frozenset[str] = frozenset(),
    level: int = 0,
    sanitize: bool = False,
    ptx: str = "",
) -> CompiledKernel:
    """Compile a parsed kernel.

    keep: names of registers that stay readable after the kernel's end. level: LLVM's code
    generation level, 0 to 3. sanitize: log memory accesses for the sanitizer. ptx: the module the
    kernel is from; with it the code is looked up in the cache on disk and kept there. Blocks and
    register slots of a kernel that was translated before stay as they are, because a run may be
    using them. Raises UnknownInstruction for whatever the table does not cover.
    """
    start = time.perf_counter()
    for instruction in kernel.instructions:
        resolve(instruction)
    check_groups(kernel)
    if keep or not kernel.blocks:
        kernel.blocks = build_blocks(kernel)
        mark_spins(kernel)
        analyse_liveness(kernel, keep)
    compiled = CompiledKernel(kernel)
    if sanitize:
        compiled.watched = loaded_registers(kernel)
    for instruction in kernel.instructions:
        bind = row_of(instruction).bind
        if bind is not None:
            compiled.executors[instruction.index] = bind(instruction, kernel)
    name = ptx and translation_cache.entry_name(
        ptx, kernel.name, sorted(keep), level, sanitize, *host()[1:]
    )
    functions, engine, emitted = _native_code(compiled, name, level)
    compiled._engine = engine
    _fill_table(
        compiled, {block: engine.get_function_address(name) for block, name in functions.items()}
    )
    compiled.seconds = {"ir": emitted - start, "llvm": time.perf_counter() - emitted}
    return compiled


def _native_code(
    compiled: CompiledKernel, name: str, level: int
) -> tuple[dict[int, str], llvm.ExecutionEngine, float]:
    """Return (function of each block, linked code, time at which its IR was there).

    name: of the entry in the cache on disk, "" for code that is not kept.
    """
    emitted, engine = time.perf_counter(), None
    _offer_symbols()

    def make() -> tuple[dict[str, Any], bytes]:
        nonlocal emitted, engine
        text, functions = _module_text(compiled)
        emitted = time.perf_counter()
        engine, code = compile_module(text, level)
        return {"functions": list(functions.items()), "guarded": compiled._guarded}, code

    header, code = translation_cache.obtain(name, make) if name else make()
    compiled._guarded = header["guarded"]
    return dict(header["functions"]), engine or link(code, level), emitted


def _module_text(compiled: CompiledKernel) -> tuple[str, dict[int, str]]:
    """IR of all blocks that contain code, and the function name of each."""
    functions: dict[int, str] = {}
    bodies: list[str] = []
    declarations: set[str] = set()
    shared: dict[str, str] = {}
    for block in compiled.kernel.blocks:
        if block.start == block.stop:
            continue
        emitter = Emitter(f"block_{block.index}", len(compiled._guarded))
        if compiled.watched is not None:
            emitter.logging, emitter.watched = True, compiled.watched
        for i in range(block.start, block.stop):
            instruction = compiled.instructions[i]
            emitter.emit(instruction, row_of(instruction).emit)
        emitter.store_registers(block.live_out)
        if not emitter.lines:
            continue
        compiled._guarded += emitter.guarded
        functions[block.index] = emitter.name
        bodies.append(emitter.function())
        declarations |= emitter.declarations
        shared |= emitter.shared
    declarations |= {
        f"declare i32 @{name}(ptr, i32, ptr, i32, i32, i32)" for name in _ADDRESS_FUNCTIONS
    }
    if compiled.watched is not None:
        declarations.add("declare void @log_access(ptr, i32, ptr, i32, i32)")
    text = "\n".join(
        [
            *sorted(declarations),
            *shared.values(),
            *bodies,
            f"attributes #0 = {{ {function_attributes()} }}",
        ]
    )
    return text, functions


def _fill_table(compiled: CompiledKernel, addresses: dict[int, int]) -> None:
    for block in compiled.kernel.blocks:
        row = compiled.table[block.index]
        row["function"] = addresses.get(block.index, 0)
        row["kind"], row["target"] = block.terminator, block.target
        row["following"] = block.following
        ending = block.terminator_instruction
        guard = ending.guard if ending is not None else None
        row["predicate"] = -1 if guard is None else guard.register.slot
        row["invert"] = ALL_LANES if guard is not None and guard.negated else 0
        if block.terminator == BRANCH and guard is None:
            row["kind"], row["following"] = 0, block.target
        if block.terminator == INDEXED:
            targets = np.array(block.targets, np.uint32)
            compiled._target_tables.append(targets)
            row["targets"] = targets.__array_interface__["data"][0]
            row["target_count"] = len(targets)
            row["selector"] = ending.operands[0].register.slot
        row["align_kind"], row["align_value"] = _alignment(compiled, block)


def _alignment(compiled: CompiledKernel, block: Block) -> tuple[int, int]:
    """Return which lanes must have converged before the block runs: kind and value of its
    record."""
    instruction = block.aligned
    if instruction is None:
        return ALIGN_NONE, 0
    row = row_of(instruction)
    if row.bind is not None or row.member_mask is None:
        return ALIGN_MASK, ALL_LANES
    mask = instruction.operands[row.member_mask]
    if mask.kind == "imm":
        return ALIGN_MASK, mask.value & ALL_LANES
    return ALIGN_REGISTER, mask.slot


@dataclass(frozen=True, slots=True)
class _Runtime:
    engine: llvm.ExecutionEngine
    run: Callable[[int], int]
    addresses: dict[str, int]


@functools.cache
def _runtime() -> _Runtime:
    """The run loop and the memory checks, compiled once and optimised."""
    engine = native_engine(module_text(exported()) + runtime_ir())
    addresses = {name: engine.get_function_address(name) for name in _RUNTIME_FUNCTIONS}
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(addresses["run"])
    return _Runtime(engine, run, addresses)


@functools.cache
def _offer_symbols() -> None:
    """Let kernels' code be linked to the functions of the runtime that it calls."""
    for name in _KERNEL_SYMBOLS:
        llvm.add_symbol(name, routine_address(name))


def routine_address(name: str) -> int:
    """Address of a function of the runtime, native routines (`native_forms`) included."""
    return _runtime().addresses[name]
