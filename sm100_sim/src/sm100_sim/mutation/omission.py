"""A sanitized run with one synchronisation instruction left out, and why that may change nothing.

Every execution of the instruction has to be accounted for by an edge that implies it: the
instruction would have told nothing new, or what it would have told is learned from another
instruction before anything needs it. That nothing needed it before is not argued here: an access
that did would be a finding, and edges of a run with a finding do not count. Whatever is not
recognised stays without an edge, and the instruction does not count as redundant.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sm100_sim.errors import SimulationError
from sm100_sim.isa.columns import Rule
from sm100_sim.isa.sync import barrier_groups, own_vote
from sm100_sim.isa.table import row_of
from sm100_sim.sanitizer.clocks import BULK, MMA, STORE
from sm100_sim.sanitizer.findings import Finding
from sm100_sim.sanitizer.hooks import GROUPS
from sm100_sim.sanitizer.memory.shadow import Access
from sm100_sim.sanitizer.sanitizer import Sanitizer
from sm100_sim.sanitizer.state import WarpState
from sm100_sim.sanitizer.watch import Reading, Watch
from sm100_sim.state.warp import predicate_writer, uniform

#: The warp executes nothing more that the instruction could order.
_EXITS = "the warp exits without an access that needs it"


class Ledger:
    """Executions of the omitted instruction, and the edges that imply them.

    executed: how many there were. settled: for how many an edge is known. denied: an execution is
    known to matter. pending: executions whose edge is still looked for, by kind and warp.
    """

    def __init__(self) -> None:
        self.executed = self.settled = 0
        self.denied = False
        self.edges: dict[str, None] = {}
        self.pending: dict[str, Counter[WarpState]] = {}

    def name(self, edge: str, count: int = 1) -> None:
        """An edge that implies `count` executions."""
        self.edges.setdefault(edge)
        self.settled += count

    def defer(self, kind: str, state: WarpState) -> None:
        """The edge of one execution by a warp is still to come."""
        self.pending.setdefault(kind, Counter())[state] += 1

    def move(self, kind: str, other: str, state: WarpState) -> None:
        """Executions of one kind are from now on of another."""
        count = self.take(kind, state)
        if count:
            self.pending.setdefault(other, Counter())[state] += count

    def take(self, kind: str, state: WarpState) -> int:
        """Return how many executions of this kind by a warp wait for their edge, and stop counting
        them."""
        return self.pending.get(kind, Counter()).pop(state, 0)

    def settle(self, kind: str, state: WarpState, edge: str) -> None:
        """The edge of those executions, if there are any."""
        count = self.take(kind, state)
        if count:
            self.name(edge, count)

    def drop(self, kind: str, state: WarpState) -> None:
        """Deny redundancy: executions of this kind by a warp matter, if there are any."""
        if self.take(kind, state):
            self.denied = True

    def verdict(self) -> str | None:
        """The edges; "" if an execution lacks one; None if there was no execution."""
        if not self.executed:
            return None
        if self.denied or self.settled != self.executed:
            return ""
        return "; ".join(self.edges)


class Caught(SimulationError):
    """Ends a run whose mutant has been found out."""


class OmittingSanitizer(Sanitizer):
    """The sanitizer of such a run; `ledger` accounts for what was left out."""

    def __init__(self, machine: Any, reading: Reading, omitted: int, known: frozenset) -> None:
        super().__init__(machine, reading)
        self.omitted, self._known = omitted, known
        self.ledger = Ledger()
        self._caught = False
        #: For each warp: index of the instruction from which it last learned an entry of its
        #: frontier.
        self._learned: dict[WarpState, np.ndarray] = {}
        #: For each warp: what omitted waits would have told it and it does not know yet.
        self._wanted: dict[WarpState, np.ndarray] = {}
        #: mbarrier -> first phase that lacks the omitted arrival.
        self._missing: dict[Any, int] = {}
        #: mbarrier -> omitted waits (warp, phase) that were passed before the phase was complete.
        self._open: dict[Any, list[tuple[WarpState, int]]] = {}
        #: CTA -> (what exited warps still lacked, None for anything; omitted waits).
        self._exits: dict[Any, list[tuple[np.ndarray | None, int]]] = {}
        #: After a relaxed wait it is a fence that acquires.
        self._relaxed_waits = any(
            "relaxed" in i.modifiers and row_of(i).rule is Rule.WAIT
            for i in machine.compiled.instructions
        )
        #: (kind, warp) -> its last fence of that kind.
        self._fences: dict[tuple[str, WarpState], str] = {}
        #: For each warp: clock of the last load that the omitted wait::ld would have waited for.
        self._loads: dict[WarpState, int] = {}
        #: For each warp: clock of the last wgmma that the omitted wait_group would have waited for.
        self._products: dict[WarpState, int] = {}

    def implied(self) -> str | None:
        """The edges that imply the omitted instruction; "" if one execution lacks one, None if
        it was not executed."""
        return self.ledger.verdict()

    def report(self, finding: Finding, key: tuple) -> None:
        super().report(finding, key)
        # Reports also come from within native code, where nothing can be raised.
        self._caught |= (finding.kind, finding.lines) not in self._known

    def begin(self, warp: Any, instruction: Any) -> WarpState:
        if self._caught:
            raise Caught("a finding tells the mutant from the kernel")
        return super().begin(warp, instruction)

    def bind_omitted(self, instruction: Any) -> Callable[[Any, int], None]:
        """Executor of the omitted instruction."""
        rule = row_of(instruction).rule
        if rule is Rule.ARRIVE:
            return self._arrive(instruction)
        if rule is Rule.WAIT:
            return self._wait(instruction)
        analyse, vote = _ANALYSES.get(rule), own_vote(instruction)

        def run(warp: Any, lanes: int) -> None:
            state = self.begin(warp, instruction)
            self.ledger.executed += 1
            if vote is not None:
                vote(warp, lanes)
            if analyse is not None:
                analyse(self, state, instruction)

        return run

    def _texts(self, indices: Iterable[int]) -> str:
        instructions = self.machine.compiled.instructions
        distinct = sorted({int(index) for index in indices if index >= 0})
        return ", ".join(_text(instructions[index]) for index in distinct)

    # ------------------------------------------------------------ waits

    def acquire(self, state: WarpState, frontier: np.ndarray | None) -> None:
        before = state.frontier.copy()
        super().acquire(state, frontier)
        learned = self._learned.setdefault(state, np.full(self.layout.size, -1))
        learned[state.frontier > before] = state.instruction.index if state.instruction else -1
        wanted = self._wanted.get(state)
        if wanted is not None and (state.frontier >= wanted).all():
            del self._wanted[state]
            sources = self._texts(learned[wanted > 0])
            self.ledger.settle("wait", state, f"learned from {sources} before anything needs it")

    def _wait(self, instruction: Any) -> Callable[[Any, int], None]:
        spaces = [p for p in instruction.name.split(".") if p.startswith("shared")]
        groups = barrier_groups(instruction.operands[1], spaces[0] if spaces else "")
        parity = uniform(instruction.operands[2], 32)
        succeed = predicate_writer(instruction.operands[0])
        by_parity = "parity" in instruction.modifiers

        def run(warp: Any, lanes: int) -> None:
            state = self.begin(warp, instruction)
            succeed(warp, lanes, lanes)
            for barrier, some in groups(warp, lanes):
                self.ledger.executed += 1
                if not by_parity:
                    continue
                if not barrier.parity_complete(parity(warp, some)):
                    self._open.setdefault(barrier, []).append((state, barrier.phase))
                elif barrier.released is None:
                    self.ledger.name(
                        "mbarrier.init: no phase has begun to be waited for, so the "
                        "wait for the one before the first passes at once"
                    )
                else:
                    self._gain(state, barrier.released)

        return run

    def completed(self, barrier: Any) -> None:
        for state, phase in self._open.pop(barrier, ()):
            if phase == barrier.phase - 1:
                self._gain(state, barrier.released)
            else:
                self.ledger.denied = True

    def _gain(self, state: WarpState, released: np.ndarray) -> None:
        """A wait that was left out would have taught `released`."""
        news = released > state.frontier
        if news.any():
            wanted = self._wanted.setdefault(state, self.layout.empty())
            np.maximum(wanted, np.where(news, released, 0), out=wanted)
            self.ledger.defer("wait", state)
            return
        learned = self._learned.get(state)
        told = released > 0
        if not told.any():
            return
        sources = "" if learned is None else self._texts(learned[told])
        self.ledger.name(
            f"known from {sources}"
            if sources
            else "program order: it tells the warp only what the warp did itself"
        )

    # ------------------------------------------------------------ arrivals

    def _arrive(self, instruction: Any) -> Callable[[Any, int], None]:
        spaces = [p for p in instruction.name.split(".") if p.startswith("shared")]
        first = instruction.operands[0].kind in ("reg", "sink")
        groups = barrier_groups(instruction.operands[first], spaces[0] if spaces else "")

        def run(warp: Any, lanes: int) -> None:
            self.begin(warp, instruction)
            for barrier, _ in groups(warp, lanes):
                self._missing.setdefault(barrier, barrier.phase)
                self.ledger.executed += 1
                self.ledger.name("nobody waits for the phase in which it would arrive")

        return run

    def waited(self, state: WarpState, barrier: Any) -> None:
        super().waited(state, barrier)
        if barrier.phase > self._missing.get(barrier, barrier.phase):
            self.ledger.denied = True

    # ------------------------------------------------------------ what others are told

    def offering(self, state: WarpState) -> None:
        ledger, release = self.ledger, f"release semantics of {_text(state.instruction)}"
        if state in self._loads and not self._in_flight(state):
            del self._loads[state]
            ledger.settle(
                "loads",
                state,
                "register dependency: the loaded data are used before the next arrive",
            )
        if state.relaxed:
            ledger.drop("fence", state)
        ledger.settle("fence", state, release)
        if not (state.relaxed or state.narrow):
            ledger.settle("shared", state, release)
        if state.relaxed or self.strict:
            # Waiting warps are not told of the accesses; a later fence may still do it.
            ledger.move("before", "untold", state)
        ledger.settle("before", state, release)
        if row_of(state.instruction).rule is not Rule.CLUSTER_ARRIVE:
            ledger.drop("stored", state)

    def ordering(self, state: WarpState, what: str) -> None:
        edge = self._fences[what, state] = _text(state.instruction)
        if what == "after":
            self.ledger.settle(
                "after", state, f"{edge}: no access before it needs what was learned"
            )
        elif what == "before":
            for kind in ("before", "untold"):
                self.ledger.settle(
                    kind,
                    state,
                    f"{edge}: it covers the same accesses before anybody needs them complete",
                )
        elif what == "shared":
            self.ledger.settle(
                "shared", state, f"{edge}: it covers the same accesses before anybody needs them"
            )
        elif what == "proxy":
            self.ledger.settle(
                "proxy", state, f"{edge}: no asynchronous access before it needs the fence"
            )
        elif what == "loads" and self._loads.pop(state, None) is not None:
            self.ledger.settle(
                "loads",
                state,
                f"{edge}: it waits for these loads, too, before anybody needs them complete",
            )

    def _since(self, kind: str, state: WarpState, nothing: str, otherwise: str) -> None:
        """The omitted fence orders nothing that the last one of its kind did not."""
        last = self._fences.get((kind, state))
        self.ledger.name(f"{last}: {nothing} since" if last else otherwise)

    def _fence(self, state: WarpState, instruction: Any) -> None:
        # The edge is a release by the same warp in the same cluster; wider fences order memory
        # that is not followed here.
        modifiers = instruction.modifiers
        narrow = "acq_rel" in modifiers and not {"gpu", "sys"}.intersection(modifiers)
        if self._relaxed_waits or not narrow:
            return
        self.ledger.defer("fence", state)

    def _fence_shared(self, state: WarpState, _: Any) -> None:
        # A relaxed arrival behind it tells nobody of the accesses; that nobody had to know before
        # the next fence of the warp is what a run without findings says.
        self.ledger.defer("shared", state)

    # ------------------------------------------------------------ tensor memory

    def _in_flight(self, state: WarpState) -> bool:
        return bool(state.loads) and state.loads[0][0] <= self._loads[state]

    def _wait_load(self, state: WarpState, _: Any) -> None:
        if state.loads:
            self._loads[state] = state.loads[-1][0]
            self.ledger.defer("loads", state)
        else:
            self.ledger.name(
                "register dependency: the loaded data have been used, or there are no loads"
            )

    def _wait_store(self, state: WarpState, _: Any) -> None:
        if state.frontier[state.store] >= state.issued[STORE]:
            self.ledger.name("no tcgen05.st is in flight")

    def _fence_before(self, state: WarpState, _: Any) -> None:
        entries = [state.load, state.store]
        if (state.published[entries] < state.frontier[entries]).any():
            self.ledger.defer("before", state)
        else:
            self._since(
                "before",
                state,
                "no tcgen05.ld or st",
                "program order: no tcgen05.ld or st by the warp before it",
            )

    def _fence_after(self, state: WarpState, _: Any) -> None:
        if not self.strict:
            self.ledger.name("the wait before it, which acquires (strictly, nothing does)")
        elif (state.frontier[self.tensor_entries] > state.ordered[self.tensor_entries]).any():
            self.ledger.defer("after", state)
        else:
            self._since(
                "after",
                state,
                "nothing was learned",
                "program order: the warp knows of no access to tensor memory but its own",
            )

    # ------------------------------------------------------------ proxies, initialisations, groups

    def _fence_proxy(self, state: WarpState, _: Any) -> None:
        layout = self.layout
        news = state.frontier[layout.proxy()] < state.frontier[layout.generic()]
        news[state.number] = state.unfenced
        if news.any():
            self.ledger.defer("proxy", state)
        else:
            self._since(
                "proxy",
                state,
                "no generic access became known",
                "proxy fences of the warps that made the accesses, before they arrived",
            )

    def _fence_init(self, state: WarpState, _: Any) -> None:
        if state.unfenced_inits:
            self.ledger.defer("inits", state)
        else:
            self._since(
                "inits",
                state,
                "no mbarrier.init by this thread",
                "program order: no mbarrier.init by this thread before it",
            )

    def fence_inits(self, state: WarpState) -> None:
        self._fences["inits", state] = _text(state.instruction)
        self.ledger.settle(
            "inits", state, f"{_text(state.instruction)} covers the initialisations, too"
        )
        super().fence_inits(state)

    def _commit_group(self, state: WarpState, instruction: Any) -> None:
        self.ledger.defer(f"group {GROUPS[row_of(instruction).rule]}", state)

    def grouping(self, state: WarpState, agent: int, commits: bool) -> None:
        if commits:
            what = "wgmmas" if agent == MMA else "copies"
            self.ledger.settle(
                f"group {agent}", state, f"its {what} join the group of {_text(state.instruction)}"
            )
        else:
            self.ledger.drop(f"group {agent}", state)

    def _wait_group(self, state: WarpState, instruction: Any) -> None:
        if state.frontier[state.bulk] < state.issued[BULK]:
            return
        if "read" in instruction.modifiers:
            self.ledger.name("the wait_group before it: it covers the same groups")
        else:
            self.ledger.defer("stored", state)

    # ------------------------------------------------------------ wgmma

    def _fence_products(self, state: WarpState, _: Any) -> None:
        # `in_flight` looks at all paths through the kernel without the fence: if a register needed
        # it, that is a finding.
        self.ledger.name(
            "another wgmma.fence: on no path is a register of the wgmmas behind it "
            "touched in between"
        )

    def _wait_products(self, state: WarpState, instruction: Any) -> None:
        groups = state.groups[MMA]
        done = len(groups) - instruction.operands[0].value
        if done <= 0 or groups[done - 1] <= state.frontier[state.mma]:
            self.ledger.name("the wgmma.wait_group before it: it covers the same groups")
        else:
            self._products[state] = max(self._products.get(state, 0), groups[done - 1])
            self.ledger.defer("products", state)

    def completing(self, state: WarpState, agent: int) -> None:
        if agent == MMA and state.frontier[state.mma] >= self._products.get(state, 0):
            self._products.pop(state, None)
            self.ledger.settle(
                "products",
                state,
                f"{_text(state.instruction)} covers the groups, too, before "
                "anything needs them complete",
            )

    # ------------------------------------------------------------ exits

    def leave(self, warp: Any) -> None:
        super().leave(warp)
        state, ledger = self.state(warp), self.ledger
        for kind in ("fence", "before"):
            ledger.settle(kind, state, "the warp exits without another arrive")
        ledger.drop("untold", state)
        ledger.settle("after", state, _EXITS)
        ledger.settle(
            "stored",
            state,
            "cp.async.bulk.wait_group.read before it: the sources have been read; the "
            "warp tells nobody of the results afterwards, and the end of the kernel "
            "makes them visible",
        )
        if state in self._loads and not self._in_flight(state):
            ledger.settle("loads", state, "register dependency: the loaded data have been used")
        self._loads.pop(state, None)
        self._leave_waits(state)

    def _leave_waits(self, state: WarpState) -> None:
        """Omitted waits of a warp that exits: what they told may still matter to its CTA's end."""
        exits = self._exits.setdefault(state.warp.cta, [])
        wanted = self._wanted.pop(state, None)
        if wanted is not None:
            exits.append((wanted, self.ledger.take("wait", state)))
        for barrier, waits in list(self._open.items()):
            kept = [wait for wait in waits if wait[0] is not state]
            if len(kept) < len(waits):
                exits.append((None, len(waits) - len(kept)))
                self._open[barrier] = kept

    def leave_cta(self, cta: Any) -> None:
        """Whoever is at work in the CTA must have been waited for by another of its warps."""
        super().leave_cta(cta)
        states = [self.state(warp) for warp in cta.warps]
        for wanted, count in self._exits.pop(cta, ()):
            sources = self._who_waits(self.cta(cta).guests, states, wanted)
            if sources is None:
                self.ledger.denied = True
            elif sources:
                self.ledger.name(f"{_EXITS}, and the end of its CTA is ordered by {sources}", count)
            else:
                self.ledger.name(f"{_EXITS}, and nobody else is at work in its CTA", count)
        for state in states:
            self._learned.pop(state, None)

    def _who_waits(
        self, guests: Iterable[Access], states: list[WarpState], wanted: np.ndarray | None
    ) -> str | None:
        """The instructions that tell warps of a CTA of its guests' completion; None: none do.

        wanted: only the guests that it tells of.
        """
        found: set[int] = set()
        for access in guests:
            if wanted is not None and not wanted[access.agent]:
                continue
            knowing = [
                state
                for state in states
                if access.clock is not None and state.frontier[access.agent] >= access.clock
            ]
            if not knowing:
                return None
            found |= {
                int(self._learned[state][access.agent])
                for state in knowing
                if state in self._learned
            }
        return self._texts(found)


def _text(instruction: Any) -> str:
    return f"`{instruction.text}` (PTX line {instruction.line})"


#: Analysis of an instruction that is left out; rules that are not here are never redundant.
_ANALYSES: dict[Rule, Callable[[OmittingSanitizer, WarpState, Any], None]] = {
    Rule.WAIT_LOADS: OmittingSanitizer._wait_load,
    Rule.WAIT_STORES: OmittingSanitizer._wait_store,
    Rule.FENCE_BEFORE: OmittingSanitizer._fence_before,
    Rule.FENCE_AFTER: OmittingSanitizer._fence_after,
    Rule.FENCE_PROXY: OmittingSanitizer._fence_proxy,
    Rule.FENCE_PROXY_ACQUIRE: OmittingSanitizer._fence_proxy,
    Rule.FENCE_PROXY_RELEASE: OmittingSanitizer._fence_proxy,
    Rule.FENCE_INIT: OmittingSanitizer._fence_init,
    Rule.FENCE: OmittingSanitizer._fence,
    Rule.FENCE_SHARED: OmittingSanitizer._fence_shared,
    Rule.COMMIT_BULK: OmittingSanitizer._commit_group,
    Rule.COMMIT_WARPGROUP: OmittingSanitizer._commit_group,
    Rule.WAIT_BULK: OmittingSanitizer._wait_group,
    Rule.WARPGROUP_FENCE: OmittingSanitizer._fence_products,
    Rule.WAIT_WARPGROUP: OmittingSanitizer._wait_products,
}


def watch_without(index: int, reading: Reading, known: frozenset = frozenset()) -> Watch:
    """The observer of one mutant: the instruction with that index is left out.

    known: kinds and PTX lines of the kernel's own findings; any other ends the run.
    """
    return Watch(reading, functools.partial(OmittingSanitizer, omitted=index, known=known), False)
