"""A sanitized run with one synchronisation instruction left out, and why that may change nothing.

For every execution of the instruction it is noted what it would have added. Where that is nothing,
or is learned from another instruction before anything needs it, the other edge is named; the
instruction is redundant only if every execution has such an edge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from sm100_sim.isa.sync import barrier_groups
from sm100_sim.warp import predicate_writer, uniform

from .clocks import BULK, STORE
from .machine import SanitizedMachine
from .sanitizer import Sanitizer
from .state import WarpState


class OmittingSanitizer(Sanitizer):
    """The sanitizer of such a run.

    edges: what implied the deleted instruction. unnamed: executions for which nothing did.
    """

    def __init__(self, machine: Any, strict: bool) -> None:
        super().__init__(machine, strict)
        self.omitted = machine.omitted
        self.edges: dict[str, None] = {}
        self.unnamed = 0
        self._learned: dict[int, np.ndarray] = {}
        self._wanted: dict[int, np.ndarray] = {}
        self._loads: dict[int, int] = {}
        self._fences: set[int] = set()
        self._groups: set[int] = set()
        self._afters: set[int] = set()
        self._inits: set[int] = set()
        self._proxies: set[int] = set()
        #: mbarrier -> first phase that lacks the omitted arrival.
        self._missing: dict[Any, int] = {}
        #: mbarrier -> waits (warp, phase) that were passed before the phase was complete.
        self._open: dict[Any, list[tuple[WarpState, int]]] = {}

    def implied(self) -> str:
        """The edges that imply the omitted instruction; empty if one execution lacks one."""
        if self.unnamed or any((self._wanted, self._loads, self._fences, self._groups,
                                self._afters, self._inits, self._proxies, self._open)):
            return ""
        return "; ".join(self.edges) or "never needed: nothing that it orders follows"

    def bind_omitted(self, instruction: Any) -> Callable[[Any, int], None]:
        """Executor of the omitted instruction."""
        name = instruction.name
        if name.startswith("mbarrier.arrive"):
            return self._arrive(instruction)
        if name.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            return self._wait(instruction)
        analyse = next(
            (method for prefix, method in _ANALYSES.items() if name.startswith(prefix)), None
        )

        def run(warp: Any, lanes: int) -> None:
            state = self.begin(warp, instruction)
            if analyse is None:
                self.unnamed += 1
            else:
                analyse(self, state)

        return run

    def _name(self, edge: str) -> None:
        self.edges.setdefault(edge)

    # ------------------------------------------------------------ waits

    def acquire(self, state: WarpState, frontier: np.ndarray | None) -> None:
        before = state.frontier.copy()
        super().acquire(state, frontier)
        learned = self._learned.setdefault(state.number, np.full(self.layout.size, -1))
        learned[state.frontier > before] = state.instruction.index if state.instruction else -1
        wanted = self._wanted.get(state.number)
        if wanted is not None and (state.frontier >= wanted).all():
            del self._wanted[state.number]
            if state.instruction is not None:
                self._name(f"learned from `{state.instruction.text}` (PTX line "
                           f"{state.instruction.line}) before anything needs it")

    def _wait(self, instruction: Any) -> Callable[[Any, int], None]:
        spaces = [p for p in instruction.name.split(".") if p.startswith("shared")]
        groups = barrier_groups(instruction.operands[1], spaces[0] if spaces else "")
        parity = uniform(instruction.operands[2], 32)
        succeed = predicate_writer(instruction.operands[0])
        by_parity = ".parity" in instruction.name

        def run(warp: Any, lanes: int) -> None:
            state = self.begin(warp, instruction)
            succeed(warp, lanes, lanes)
            for barrier, some in groups(warp, lanes):
                if not by_parity:
                    self.unnamed += 1
                elif not barrier.parity_complete(parity(warp, some)):
                    self._open.setdefault(barrier, []).append((state, barrier.phase))
                elif barrier.released is None:
                    self._name("the barrier is fresh, so the wait passes at once")
                else:
                    self._gain(state, barrier.released)

        return run

    def _arrive(self, instruction: Any) -> Callable[[Any, int], None]:
        spaces = [p for p in instruction.name.split(".") if p.startswith("shared")]
        first = instruction.operands[0].kind in ("reg", "sink")
        groups = barrier_groups(instruction.operands[first], spaces[0] if spaces else "")

        def run(warp: Any, lanes: int) -> None:
            self.begin(warp, instruction)
            for barrier, _ in groups(warp, lanes):
                self._missing.setdefault(barrier, barrier.phase)
            self._name("no wait for the phase of the barrier in which it would arrive follows")

        return run

    def waited(self, state: WarpState, barrier: Any) -> None:
        super().waited(state, barrier)
        if barrier.phase > self._missing.get(barrier, barrier.phase):
            self.unnamed += 1

    def completed(self, barrier: Any) -> None:
        for state, phase in self._open.pop(barrier, ()):
            if phase == barrier.phase - 1:
                self._gain(state, barrier.released)
            else:
                self.unnamed += 1

    def _gain(self, state: WarpState, released: np.ndarray) -> None:
        news = released > state.frontier
        if news.any():
            wanted = self._wanted.setdefault(state.number, self.layout.empty())
            np.maximum(wanted, np.where(news, released, 0), out=wanted)
            return
        learned = self._learned.get(state.number)
        sources = [] if learned is None else learned[(released > 0) & (learned >= 0)]
        instructions = self.machine.compiled.instructions
        for index in np.unique(sources).astype(int).tolist():
            i = instructions[index]
            self._name(f"known from `{i.text}` (PTX line {i.line})")

    # ------------------------------------------------------------ tensor memory and fences

    def offering(self, state: WarpState) -> None:
        pending = self._loads.get(state.number)
        if pending is not None and not (state.loads and state.loads[0][0] <= pending):
            del self._loads[state.number]
            self._name("register dependency: the loaded data are used before the next arrive")
        if state.number in self._fences:
            self._fences.discard(state.number)
            if state.relaxed or self.strict:
                self.unnamed += 1
            else:
                self._name(f"release semantics of `{state.instruction.text}` (PTX line "
                           f"{state.instruction.line})")

    def _wait_load(self, state: WarpState) -> None:
        if state.loads:
            self._loads[state.number] = state.loads[-1][0]
        else:
            self._name("register dependency: the loaded data have been used")

    def _wait_store(self, state: WarpState) -> None:
        if state.frontier[state.store] < state.issued[STORE]:
            self.unnamed += 1
        else:
            self._name("no tcgen05.st is in flight")

    def _fence_before(self, state: WarpState) -> None:
        if (state.published[[state.load, state.store]]
                < state.frontier[[state.load, state.store]]).any():
            self._fences.add(state.number)
        else:
            self._name("no tcgen05.ld or st since the fence before")

    def _fence_after(self, state: WarpState) -> None:
        if not self.strict:
            self._name("the wait before it, which acquires (strictly, nothing does)")
        elif (state.frontier[self.tensor_entries] > state.ordered[self.tensor_entries]).any():
            self._afters.add(state.number)
        else:
            self._name("nothing was learned since the fence before")

    def ordering(self, state: WarpState, what: str) -> None:
        edge = f"`{state.instruction.text}` (PTX line {state.instruction.line})"
        if what == "after" and state.number in self._afters:
            self._afters.discard(state.number)
            self._name(f"{edge}: no access before it needs what was learned")
        if what == "proxy" and state.number in self._proxies:
            self._proxies.discard(state.number)
            self._name(f"{edge}: no asynchronous access before it needs the fence")
        if what == "loads" and self._loads.pop(state.number, None) is not None:
            self._name(f"{edge}: it waits for these loads, too, before anybody needs them complete")

    def _fence_proxy(self, state: WarpState) -> None:
        layout = self.layout
        news = state.frontier[layout.proxy()] < state.frontier[layout.generic()]
        news[state.number] = state.unfenced
        if news.any():
            self._proxies.add(state.number)
        else:
            self._name("nothing generic since the fence before")

    def _fence_init(self, state: WarpState) -> None:
        if state.unfenced_inits:
            self._inits.add(state.number)
        else:
            self._name("no mbarrier.init by this thread since the fence before")

    def fence_inits(self, state: WarpState) -> None:
        if state.number in self._inits:
            self._inits.discard(state.number)
            self._name(f"`{state.instruction.text}` (PTX line {state.instruction.line}) covers the "
                       "initialisations, too")
        super().fence_inits(state)

    def _fence(self, state: WarpState) -> None:
        self._fences.add(state.number)

    def _commit_group(self, state: WarpState) -> None:
        self._groups.add(state.number)

    def grouping(self, state: WarpState, commits: bool) -> None:
        if state.number in self._groups:
            self._groups.discard(state.number)
            if commits:
                self._name(f"its copies join the group of `{state.instruction.text}` (PTX line "
                           f"{state.instruction.line})")
            else:
                self.unnamed += 1

    def _wait_group(self, state: WarpState) -> None:
        if state.frontier[state.bulk] >= state.issued[BULK]:
            self._name("cp.async.bulk.wait_group.read before it: the sources have been read, and "
                       "the end of the kernel makes the results visible")
        else:
            self.unnamed += 1

    def leave(self, warp: Any) -> None:
        super().leave(warp)
        number = self.state(warp).number
        self._fences.discard(number)
        if self._loads.pop(number, None) is not None and self.state(warp).loads:
            self.unnamed += 1
        for barrier, waits in list(self._open.items()):
            self._open[barrier] = [wait for wait in waits if wait[0].number != number]
            if len(self._open[barrier]) < len(waits):
                self._name("the warp exits before it needs what the wait would tell it")
            if not self._open[barrier]:
                del self._open[barrier]
        if number in self._afters:
            self._afters.discard(number)
            self._name("the warp exits without an access that needs what was learned")
        if self._wanted.pop(number, None) is not None:
            self._name("the warp exits before it needs what the wait would tell it")


_ANALYSES = {
    "tcgen05.wait::ld": OmittingSanitizer._wait_load,
    "tcgen05.wait::st": OmittingSanitizer._wait_store,
    "tcgen05.fence::before": OmittingSanitizer._fence_before,
    "tcgen05.fence::after": OmittingSanitizer._fence_after,
    "fence.proxy.async": OmittingSanitizer._fence_proxy,
    "fence.mbarrier_init": OmittingSanitizer._fence_init,
    "fence.acq_rel": OmittingSanitizer._fence,
    "cp.async.bulk.commit_group": OmittingSanitizer._commit_group,
    "cp.async.bulk.wait_group": OmittingSanitizer._wait_group,
}


class OmittingMachine(SanitizedMachine):
    """A machine that leaves out the instruction with index `omitted`."""

    sanitizer_type = OmittingSanitizer
    omitted = -1


@functools.cache
def machine_without(index: int, strict: bool) -> type[OmittingMachine]:
    """The machine for one mutant."""
    return type("OmittingMachine", (OmittingMachine,), {"omitted": index, "strict": strict})

