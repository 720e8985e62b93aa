"""A machine that runs under the sanitizer."""

from __future__ import annotations

from typing import Any

from sm100_sim.run.machine import Machine
from sm100_sim.run.residency import Cluster, Cta, ResidentWarp
from sm100_sim.state.barriers import MBarrier
from sm100_sim.state.events import AsyncOp

from .barriers import WatchedBarrier
from .findings import Finding
from .hooks import wrapped
from .sanitizer import Sanitizer
from .state import ClusterState


class SanitizedMachine(Machine):
    """`machine.Machine` with a sanitizer; the kernel was translated with sanitize=True."""

    strict = False
    in_order = True
    sanitizer_type = Sanitizer
    #: Loops that poll memory fill the log, so they soon give way.
    budget = 20_000

    def __init__(self, compiled: Any, *arguments: Any) -> None:
        super().__init__(compiled, *arguments)
        self.sanitizer = self.sanitizer_type(self, self.strict)
        trace, plain = self._executors, compiled.executors
        self._executors = self._hooked()
        if self.trace is not None:
            # With a trace, its note comes before the sanitizer's.
            self._executors = [
                hooked if traced is plain[i.index] else traced
                for i, traced, hooked in zip(
                    compiled.block_instruction, trace, self._executors, strict=True
                )
            ]

    def _hooked(self) -> list[Any]:
        """Executors by block, each followed by the sanitizer."""
        hooked = wrapped(self.compiled, self.sanitizer)
        return [hooked[i.index] for i in self.compiled.block_instruction]

    def new_mbarrier(self, cta: Cta, address: int, count: int) -> MBarrier:
        return WatchedBarrier(self.sanitizer, address, count, self.wake)

    def follow_writes(self) -> None:
        """The launch has written to a range of global memory for the first time."""

    def _begin(self, number: int) -> Cluster:
        cluster = super()._begin(number)
        state = self.sanitizer.clusters[cluster.id] = ClusterState(self.sanitizer, cluster)
        for warp, warp_state in state.warps.items():
            warp.context.log = self.sanitizer.log.address
            warp.context.uses = warp_state.uses.__array_interface__["data"][0]
        return cluster

    def _run_warp(self, warp: ResidentWarp) -> None:
        self.sanitizer.running = self.sanitizer.state(warp)
        super()._run_warp(warp)
        # The next warp must not be taken for who made the accesses in the log.
        if self.sanitizer.log.waiting:
            self.sanitizer.drain()

    def submit(self, operation: AsyncOp) -> None:
        self.sanitizer.submit(operation)
        super().submit(operation)

    def _exit(self, warp: ResidentWarp) -> None:
        self.sanitizer.leave(warp)
        if warp.cta.running == 1:
            self.sanitizer.leave_cta(warp.cta)
        super()._exit(warp)

    def _end_cluster(self, cluster: Cluster) -> None:
        super()._end_cluster(cluster)
        self.sanitizer.end_cluster(cluster.id)

    def executed_indices(self) -> set[int]:
        """Indices of the instructions that were executed."""
        return {instruction.index for instruction, *_ in self.executed()}

    def all_findings(self) -> list[str]:
        """Findings of the machine itself and of the sanitizer."""
        own = [Finding("machine", text) for text in self.findings]
        return [*own, *self.sanitizer.results()]


class StrictMachine(SanitizedMachine):
    """The same by the letter of the PTX ISA."""

    strict = True


class StrictOrderMachine(StrictMachine):
    """And only the pipelined pairs of tcgen05 instructions that the PTX ISA lists are in order."""

    in_order = False


#: Machines by what `sanitize` asks for.
READINGS: dict[bool | str, type[SanitizedMachine]] = {
    True: SanitizedMachine, "strict": StrictMachine, "strict-order": StrictOrderMachine,
}  # fmt: skip
