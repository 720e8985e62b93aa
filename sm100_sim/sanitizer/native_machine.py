"""The sanitizer on the machine whose clusters run in native code.

Only in the fixed order of warps and where asynchronous operations take effect at once; other
schedules, and stricter readings, have `machine.SanitizedMachine`. The rules are the same.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from sm100_sim.isa.columns import Rule
from sm100_sim.isa.table import row_of
from sm100_sim.native.compiler import module_text
from sm100_sim.native.layout import Barrier, Context
from sm100_sim.native.products import CHAIN_IN_PYTHON
from sm100_sim.run.native_machine import NativeMachine
from sm100_sim.run.residency import Cluster, Cta, ResidentWarp
from sm100_sim.state.barriers import MBarrier
from sm100_sim.translate.blocks import TRAP
from sm100_sim.translate.kernel import native_engine
from sm100_sim.translate.native_forms import operation_of

from .barriers import WatchedBarrier
from .draining import drain_log
from .hooks import arrive_form, loads_used
from .machine import READINGS, SanitizedMachine
from .records import OperationRecord
from .sanitizer import Sanitizer
from .shadow import keep_failure, raise_failure
from .state import WarpState
from .watched import WATCHED, WATCHED_ORDERS

Executor = Callable[[Any, int], Any]
#: Tables of kernels (`_watched_table`).
_tables: weakref.WeakKeyDictionary[Any, tuple[np.ndarray, list[Any]]] = weakref.WeakKeyDictionary()
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


class NativeSanitizer(Sanitizer):
    """The sanitizer of such a machine."""

    def drain(self) -> None:
        # Native code has gone from warp to warp since Python was asked last.
        current = self.machine.current_warp()
        if current is not None:
            self.running = current
        state = self.running
        self._join(state)
        # Python does what native code leaves to it, and that goes on behind it.
        while self.log.waiting:
            if not self.log.failed and _drain()(state.warp.address):
                break
            self._note_all(state, self.log.first())
        raise_failure()

    def flush(self, state: WarpState, run: Any = None) -> None:
        if run is None and 0 < state.warp.context.chain_length < CHAIN_IN_PYTHON:
            before = state.instruction
            state.instruction, run = self.machine.native_chain(state.warp)
            super().flush(state, run)
            state.instruction = before
        else:
            super().flush(state, run)


class NativeSanitizedMachine(SanitizedMachine, NativeMachine):
    """`SanitizedMachine` in native code as far as `watched` reaches."""

    sanitizer_type = NativeSanitizer

    def __init__(self, compiled: Any, *arguments: Any) -> None:
        super().__init__(compiled, *arguments)
        if compiled not in _tables:
            _tables[compiled] = self._watched_table()
        self._table, *_ = _tables[compiled]
        self._callbacks = [_CALLBACK(self._record_chain), _CALLBACK(self._unbalanced)]

    def _hooked(self) -> list[Executor | None]:
        return [
            execute and self._in_step(instruction, execute)
            for instruction, execute in zip(
                self.compiled.block_instruction, super()._hooked(), strict=True
            )
        ]

    def _watched_table(self) -> tuple[np.ndarray, list[Any]]:
        """The block table with the watched routines of machine operations that have them, and what
        it points to."""
        table, kept = self.compiled.table.copy(), []
        for block in self.compiled.kernel.blocks:
            instruction = block.terminator_instruction
            if block.terminator != TRAP:
                continue
            found = operation_of(instruction, block.index)
            routine = found and _watched_name(found[0].name, row_of(instruction).rule)
            if not routine:
                continue
            operation, (about, used) = found[1], self._describe(instruction)
            operation.watch = ctypes.addressof(about)
            kept += [operation, about, used]
            row = table[block.index]
            row["native"], row["operation"] = _address_of(routine), ctypes.addressof(operation)
        return table, kept

    def _describe(self, instruction: Any) -> tuple[OperationRecord, np.ndarray]:
        about = OperationRecord(index=instruction.index)
        used = np.array(loads_used(instruction, self.compiled.watched or {}), np.uint32)
        about.used, about.used_count = used.ctypes.data, len(used)
        rule = row_of(instruction).rule
        if rule is Rule.TENSOR_LOAD:
            about.load = self.sanitizer.load_numbers[instruction.index]
        if rule is Rule.ARRIVE:
            about.relaxed, about.narrow = arrive_form(instruction, self.strict)
        return about, used

    # ------------------------------------------------------------ what native code asks for

    def current_warp(self) -> WarpState | None:
        """The warp that runs."""
        cluster = self._cluster
        if cluster is None or not cluster.ready.record.current:
            return None
        number = Context.from_address(cluster.ready.record.current).number
        return self.sanitizer.clusters[cluster.id].by_number[number]

    def native_chain(self, warp: ResidentWarp) -> tuple[Any, list]:
        """The accumulator chain that native code holds for a warp."""
        return self._chain(warp)

    def _record_chain(self, context: int) -> None:
        try:
            number = Context.from_address(context).number
            state = self.sanitizer.clusters[self._cluster.id].by_number[number]
            self.sanitizer.actor = self.sanitizer.running = state
            self.sanitizer.flush(state)
        except BaseException as error:
            keep_failure(error)

    def _unbalanced(self, address: int) -> None:
        record = Barrier.from_address(address)
        after = record.phase, record.pending
        try:
            barrier = next(
                b for b in self._cluster.mbarriers.values()
                if ctypes.addressof(b.record) == address
            )
            # Reports tell of the phase that the arrivals belong to.
            record.phase, record.pending = record.phase - 1, 0
            self.sanitizer.actor = self.current_warp()
            self.sanitizer.unbalanced(barrier)
        except BaseException as error:
            keep_failure(error)
        finally:
            record.phase, record.pending = after

    # ------------------------------------------------------------ as in the other machines

    def new_mbarrier(self, cta: Cta, address: int, count: int) -> MBarrier:
        cluster = cta.cluster
        wake = functools.partial(self._wake_barrier, cluster)
        record = cluster.ready.new_barrier(address)
        return WatchedBarrier(self.sanitizer, address, count, wake, record)

    def _begin(self, number: int) -> Cluster:
        cluster = super()._begin(number)
        state = self.sanitizer.clusters[cluster.id]
        state.record.record, state.record.unbalanced = (
            ctypes.cast(callback, ctypes.c_void_p).value for callback in self._callbacks
        )
        for warp, warp_state in state.warps.items():
            warp.context.watch = ctypes.addressof(warp_state.record)
        return cluster

    def _learn(self, pointer: int) -> None:
        super()._learn(pointer)
        self.follow_writes()

    def follow_writes(self) -> None:
        """Leave loads from memory that the launch has written to to Python."""
        for i in range(self.native.map_count):
            self._maps[i].written = self.sanitizer.writes.has_plane(self._maps[i].address)

    def _operate(self, warp: ResidentWarp) -> bool:
        raise_failure()
        return super()._operate(warp)

    def _stop(self, warp: ResidentWarp, kind: int) -> None:
        self._leave_warp(warp)
        super()._stop(warp, kind)

    def _exit_lanes(self, warp: ResidentWarp) -> None:
        self._leave_warp(warp)
        if warp.live != warp.present:
            super()._exit_lanes(warp)

    def _leave_warp(self, warp: ResidentWarp) -> None:
        """Record what a warp has accessed before another one runs."""
        raise_failure()
        if self.sanitizer.log.waiting:
            self.sanitizer.running = self.sanitizer.state(warp)
            self.sanitizer.drain()

    def run(self) -> None:
        super().run()
        raise_failure()


def _watched_name(routine: str, rule: Rule) -> str:
    """Name of the watched routine for an instruction that has `routine`; "" for none."""
    found = WATCHED.get(routine) or WATCHED_ORDERS.get(rule)
    return found.name if found is not None else ""


def machine_for(reading: bool | str, native: bool) -> type[SanitizedMachine]:
    """The machine for what `sanitize` asks for; native: for the fixed order of warps, with
    asynchronous operations that take effect at once."""
    kind = READINGS[reading]
    return NativeSanitizedMachine if native and kind is SanitizedMachine else kind


@functools.cache
def _engine() -> Any:
    return native_engine(module_text((*WATCHED.values(), *WATCHED_ORDERS.values(), drain_log)))


@functools.cache
def _drain() -> Callable[[int], int]:
    """`draining.drain_log`."""
    return ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint64)(_address_of(drain_log.name))


def _address_of(name: str) -> int:
    return _engine().get_function_address(name)
