"""The observer of a launch that runs under the sanitizer.

In the default reading, in the fixed order of warps and with asynchronous operations that take
effect at once, native code does what `watched` has routines for; otherwise every machine operation
comes to Python (`hooks`). The rules are the same.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sm100_sim.isa.columns import Rule
from sm100_sim.isa.table import row_of
from sm100_sim.run.observer import Executor, Observer
from sm100_sim.state.barriers import MBarrier
from sm100_sim.state.events import AsyncOp
from sm100_sim.translate.blocks import TRAP
from sm100_sim.translate.native_forms import operation_of

from .barriers import WatchedBarrier
from .compiled.engine import routine_address, watched_name
from .compiled.records import OperationRecord
from .findings import Finding
from .hooks import arrive_form, loads_used, wrapped
from .memory.shadow import keep_failure, raise_failure
from .sanitizer import Sanitizer
from .state import ClusterState

#: Tables of kernels (`Watch.table`), and what they point to.
_tables: weakref.WeakKeyDictionary[Any, tuple[np.ndarray, list[Any]]] = weakref.WeakKeyDictionary()
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


class Reading(NamedTuple):
    """Reading of the PTX ISA.

    strict: by the letter, where published kernels rely on less. in_order: tcgen05 instructions of
    one warp are in order beyond the pipelined pairs that the PTX ISA lists. awaits_loads: what is
    wanted is that data of a tcgen05.ld are used behind a tcgen05.wait::ld (`memory.load_waits`),
    and nothing else.
    """

    strict: bool
    in_order: bool
    awaits_loads: bool = False


#: Readings by the value of `sanitize`.
READINGS: dict[bool | str, Reading] = {
    True: Reading(False, True), "wait-ld": Reading(False, True, True),
    "strict": Reading(True, True), "strict-order": Reading(True, False),
}  # fmt: skip
#: Loops that poll memory fill the log, so they soon give way.
_BUDGET = 20_000


class Watch(Observer):
    """Looks on for the sanitizer; the kernel was translated with sanitize=True.

    reading: one of READINGS. make: the sanitizer of a machine under a reading, (machine, reading)
    -> Sanitizer. by_itself: whether native code may do operations that `watched` has routines for.
    """

    budget = _BUDGET

    def __init__(
        self, reading: Reading, make: Callable[..., Sanitizer] = Sanitizer, by_itself: bool = True
    ) -> None:
        self.reading = reading
        self._make, self._by_itself = make, by_itself
        self.machine: Any = None
        self.sanitizer: Sanitizer
        self._callbacks = [_CALLBACK(self._record_chain), _CALLBACK(self._unbalanced)]

    def attach(self, machine: Any) -> None:
        self.machine = machine
        self.sanitizer = self._make(machine, self.reading)

    # ------------------------------------------------------------ machine operations

    def around(self, executors: list[Executor | None]) -> list[Executor | None]:
        return wrapped(self.machine.compiled, executors, self.sanitizer)

    def table(self) -> np.ndarray | None:
        if (
            not self._by_itself
            or self.reading._replace(awaits_loads=False) != READINGS[True]
            or not self.machine.policy.at_once
        ):
            return None
        compiled = self.machine.compiled
        if compiled not in _tables:
            _tables[compiled] = self._watched_table(compiled)
        return _tables[compiled][0]

    def _watched_table(self, compiled: Any) -> tuple[np.ndarray, list[Any]]:
        """The block table with the watched routines of machine operations that have them, and what
        it points to."""
        table, kept = compiled.table.copy(), []
        for block in compiled.kernel.blocks:
            instruction = block.terminator_instruction
            if block.terminator != TRAP:
                continue
            found = operation_of(instruction, block.index)
            routine = found and watched_name(found[0].name, row_of(instruction).rule)
            if not routine:
                continue
            operation, (about, used) = found[1], self._describe(instruction)
            operation.watch = ctypes.addressof(about)
            kept += [operation, about, used]
            row = table[block.index]
            row["native"], row["operation"] = routine_address(routine), ctypes.addressof(operation)
        return table, kept

    def _describe(self, instruction: Any) -> tuple[OperationRecord, np.ndarray]:
        about = OperationRecord(index=instruction.index)
        used = np.array(loads_used(instruction, self.machine.compiled.watched or {}), np.uint32)
        about.used, about.used_count = used.ctypes.data, len(used)
        rule = row_of(instruction).rule
        if rule is Rule.TENSOR_LOAD:
            about.load = self.sanitizer.load_numbers[instruction.index]
        if rule is Rule.ARRIVE:
            about.relaxed, about.narrow = arrive_form(instruction, self.reading.strict)
        return about, used

    # ------------------------------------------------------------ what native code calls

    def _record_chain(self, context: int) -> None:
        try:
            state = self.sanitizer.state(self.machine.current_warp())
            self.sanitizer.actor = self.sanitizer.running = state
            self.sanitizer.flush(state)
        except BaseException as error:
            keep_failure(error)

    def _unbalanced(self, address: int) -> None:
        sanitizer = self.sanitizer
        before, warp = sanitizer.actor, self.machine.current_warp()
        try:
            if warp is not None:
                sanitizer.actor = sanitizer.state(warp)
            barrier = next(
                b
                for b in sanitizer.actor.cluster.cluster.mbarriers.values()
                if ctypes.addressof(b.record) == address
            )
            barrier.compare_arrivals()
        except BaseException as error:
            keep_failure(error)
        finally:
            sanitizer.actor = before

    # ------------------------------------------------------------ what comes and goes

    def new_mbarrier(
        self, address: int, count: int, wake: Callable[[Any], None], record: Any
    ) -> MBarrier:
        return WatchedBarrier(self.sanitizer, address, count, wake, record)

    def cluster_begins(self, cluster: Any) -> None:
        state = self.sanitizer.clusters[cluster.id] = ClusterState(self.sanitizer, cluster)
        state.record.record, state.record.unbalanced = (
            ctypes.cast(callback, ctypes.c_void_p).value for callback in self._callbacks
        )
        for warp, warp_state in state.warps.items():
            context = warp.context
            context.log = self.sanitizer.log.address
            context.uses = warp_state.uses.__array_interface__["data"][0]
            context.watch = ctypes.addressof(warp_state.record)

    def cluster_ends(self, cluster: Any) -> None:
        self.sanitizer.end_cluster(cluster.id)

    def issued(self, operation: AsyncOp) -> None:
        self.sanitizer.submit(operation)

    def warp_leaves(self, warp: Any) -> None:
        # The next warp must not be taken for who made the accesses in the log.
        raise_failure()
        self.sanitizer.running = self.sanitizer.state(warp)
        if self.sanitizer.log.waiting:
            self.sanitizer.drain()

    def warp_exits(self, warp: Any) -> None:
        self.sanitizer.leave(warp)
        if warp.cta.running == 1:
            self.sanitizer.leave_cta(warp.cta)

    def tensor_map_learned(self) -> None:
        self.sanitizer.follow_writes()

    def run_ends(self) -> None:
        raise_failure()

    def findings(self, found: list[str]) -> list[str]:
        if self.reading.awaits_loads:
            return list(self.sanitizer.loads_not_waited())
        own = [Finding("machine", text) for text in found]
        return [*own, *self.sanitizer.results()]

    def notes(self) -> list[str]:
        return self.sanitizer.notes()
