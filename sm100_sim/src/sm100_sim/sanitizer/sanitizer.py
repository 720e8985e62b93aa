"""Happens-before detection: which accesses are ordered, and which only happened to be.

Every access is recorded where the program issues it, with the frontier of whoever issues it
(`clocks`), in the shadow of the memory it touches (`shadow`). It must be ordered after the accesses
that it conflicts with; what is not ordered is a finding, whatever the schedule of this run was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sm100_sim.errors import LaunchError
from sm100_sim.isa.columns import Effect, MemoryAccess, require_complete
from sm100_sim.isa.table import row_of
from sm100_sim.run.in_step import has_native_chain, native_chain
from sm100_sim.state.events import AsyncOp
from sm100_sim.translate.access_log import AccessLog
from sm100_sim.translate.blocks import tensor_loads

from . import findings
from .barriers import WatchedBarrier
from .clocks import AGENTS_OF_A_WARP, BULK, COPY, GENERIC, MMA, WAIT, Layout
from .compiled.engine import native_drain
from .compiled.tracking import BARRIER, FRESH
from .findings import Finding
from .launch_control import Responses
from .memory import footprints, load_waits
from .memory.flags import Flags
from .memory.global_memory import GlobalWrites
from .memory.in_flight import hazards_of
from .memory.shadow import Access, raise_failure, signal_detail
from .memory.tensor_maps import TensorMaps
from .state import ClusterState, CtaState, WarpState
from .stretches import Stretches

#: Kinds of access that go through the async proxy to shared memory.
_ASYNC = frozenset(("tma", "mma", "bulk", "clc", "wgmma"))
#: Kinds that go through the generic proxy.
_GENERIC = frozenset(("generic", "atomic", "copy", "stored", "reduced"))
#: Kinds of copies that are not tensor or bulk copies, by operation.
_KINDS = {Effect.STORE: "stored", Effect.REDUCE: "reduced", Effect.CANCEL: "clc"}
#: What a CTA does before it exits.
_TRAILING = "wait for it, or keep the CTA alive with a trailing cluster barrier"
_ORDERED_ACCESS = frozenset({"acquire", "release", "relaxed", "volatile", "mmio"})


#: Pairs of tcgen05 instructions of one thread that execute in order, beside two MMAs of one
#: accumulator, shape and kind (PTX ISA 9.3, "tcgen05 memory consistency model").
_PIPELINED = frozenset((
    (Effect.TENSOR_COPY, Effect.MMA), (Effect.TENSOR_SHIFT, Effect.MMA),
    (Effect.MMA, Effect.TENSOR_SHIFT), (Effect.TENSOR_SHIFT, Effect.TENSOR_COPY),
))  # fmt: skip


def _pipelined(before: tuple, after: tuple) -> bool:
    """Return True if the PTX ISA lists the pair as executing in the order of its issue."""
    if before[0] == after[0] == Effect.MMA:
        return before == after
    return (before[0], after[0]) in _PIPELINED


def _is_ordered(instruction: Any) -> bool:
    """Return True if an instruction is a load or store that orders others."""
    logged = row_of(instruction).access is not MemoryAccess.NONE
    return logged and not _ORDERED_ACCESS.isdisjoint(instruction.modifiers)


class Completion:
    """Actor of an asynchronous operation that takes effect: it publishes what its issuer knew.

    accesses: shared address of an mbarrier -> the access that its signal completes.
    """

    def __init__(self, state: WarpState, accesses: dict[int, Access]) -> None:
        self.state, self.cluster, self.number = state, state.cluster, state.number
        self.warp, self.instruction = state.warp, state.instruction
        self.frontier = state.frontier.copy()
        self.accesses = accesses
        state.advance()


class Sanitizer:
    """State and rules of the sanitizer for one launch.

    actor: the WarpState or Completion that acts now. found: the findings by what they are about.
    omitted: index of an instruction that is left out (`omission`), -1 for none.
    strict: the letter of the PTX ISA, where published kernels rely on less (docs/sanitizer.md).
    in_order: whether tcgen05 instructions of one warp are ordered beyond the pipelined pairs that
    the PTX ISA lists. awaits_loads: whether notes list the loads whose data no wait::ld covers.
    """

    omitted = -1

    def __init__(self, machine: Any, reading: Any) -> None:
        self.machine = machine
        self.strict, self.in_order, self.awaits_loads = reading
        ctas = math.prod(machine.config.cluster)
        self.layout = Layout(ctas, -(-machine.threads // 32))
        self.tensor_entries = self.layout.tensor()
        instructions = machine.compiled.instructions
        loads = [i.index for i in tensor_loads(instructions)]
        self.load_count = len(loads)
        #: Index of a tcgen05.ld -> its number among them.
        self.load_numbers = {index: number for number, index in enumerate(loads)}
        self.log = AccessLog(self.drain)
        self.actor: WarpState | Completion | None = None
        self.clusters: dict[int, ClusterState] = {}
        self.running: WarpState | None = None
        self.found: dict[tuple, Finding] = {}
        self.writes = GlobalWrites(self, machine.memory)
        self.flags = Flags(self)
        self.maps = TensorMaps(self)
        self.responses = Responses(self)
        #: Index of a wgmma.mma_async -> (CTA coordinates, warp) of its first execution.
        self.products: dict[int, tuple[Any, int]] = {}
        #: For each instruction, 1 for a load or store that orders others.
        self.ordered = np.array([_is_ordered(i) for i in instructions], np.uint8)

    def refuse(self, count: int) -> LaunchError:
        """The error for a CTA with more mbarriers than frontiers have entries for."""
        return LaunchError(f"the sanitizer follows {count} mbarriers of a CTA, this one has more")

    @functools.cached_property
    def _stretches(self) -> Stretches:
        return Stretches(self.machine.compiled.instructions)

    def report(self, finding: Finding, key: tuple) -> None:
        """Keep a finding, one for each key."""
        known = self.found.setdefault((finding.kind, *key), finding)
        if known is finding:
            finding.stretches = tuple(self._stretches.of(site.index) for site in finding.sites)
        else:
            known.again(finding)

    # ------------------------------------------------------------ rules

    def judge(
        self, before: Any, access: Access, frontier: np.ndarray, where: str, reached: bool
    ) -> None:
        """Report a pair that native code does not find ordered (`tracking.check`), unless it is.

        before: an Access, FRESH or BARRIER; frontier: of the issuer of `access`; reached: `before`
        is known to be complete, but a proxy fence is missing.
        """
        if before in (FRESH, BARRIER):
            if before == BARRIER or access.kind != "dealloc":
                key = (access.instruction.index,) if access.instruction else ()
                self.report(findings.unready(before, access, where), key)
        elif reached or not self._in_pipeline(before, access, frontier):
            key = tuple(a.instruction and a.instruction.index for a in (before, access))
            self.report(findings.race(before, access, where, reached), key)

    def _in_pipeline(self, before: Access, access: Access, frontier: np.ndarray) -> bool:
        """Return True if program order alone orders two accesses of tcgen05 instructions."""
        pair, same_warp = (before.kind, access.kind), before.warp == access.warp
        if pair == ("mma", "mma") and _pipelined(before.order, access.order):
            # One queue: MMAs of a CTA pair execute in the order in which they are issued.
            issuer = AGENTS_OF_A_WARP * before.warp + GENERIC
            return same_warp or int(frontier[issuer]) >= before.issued
        return pair == ("ld", "st") and same_warp and self.running.has_used(before.clock)

    def needs_fence(self, before: Access, access: Access, frontier: np.ndarray) -> bool:
        """Return True if a generic access is not visible to the async proxy, where it has to be."""
        if before.kind not in _GENERIC or access.kind not in _ASYNC:
            return False
        # A read before an asynchronous overwrite needs order only, but for CLC responses.
        if not before.write and access.kind != "clc":
            return False
        return int(frontier[self.layout.agents + before.warp]) < before.issued

    # ------------------------------------------------------------ warps

    def begin(self, warp: Any, instruction: Any) -> WarpState:
        """A warp executes a machine operation: first comes what it did natively."""
        raise_failure()
        state = self.state(warp)
        self.actor = self.running = state
        self._join(state)
        if self.log.waiting:
            self.drain()
        state.instruction = instruction
        if state.loads:
            state.finish_loads(False)
        return state

    def state(self, warp: Any) -> WarpState:
        """The sanitizer's state of a warp."""
        return self.clusters[warp.cta.cluster.id].warps[warp]

    def cta(self, cta: Any) -> CtaState:
        """The sanitizer's state of a CTA."""
        return self.clusters[cta.cluster.id].ctas[cta.rank]

    def acquire(self, state: WarpState, frontier: np.ndarray | None) -> None:
        """A wait has succeeded. What was issued before it did not know yet."""
        self.flush(state)
        state.take(frontier)

    def drain(self) -> None:
        """Record the native accesses of the running warp."""
        # Native code may have gone from warp to warp since Python ran last.
        warp = self.machine.current_warp()
        if warp is not None:
            self.running = self.state(warp)
        state = self.running
        self._join(state)
        # Python does what native code leaves to it, and that goes on behind it.
        while self.log.waiting:
            if not self.log.failed and native_drain()(state.warp.address):
                break
            self._note_all(state, self.log.first())
        raise_failure()

    def _join(self, state: WarpState) -> None:
        """Take in the result of the barrier that a warp has passed last."""
        if state.joining is not None:
            self.acquire(state, state.joining.frontier)
            state.joining = None

    def _note_all(self, state: WarpState, records: np.ndarray) -> None:
        """Record accesses that native code has logged."""
        for logged in self.log.accesses(records):
            self._note(state, *logged)

    def _note(
        self, state: WarpState, index: int, write: bool, width: int, addresses: np.ndarray
    ) -> None:
        cluster = state.cluster.record
        state.instruction = self.machine.compiled.instructions[index]
        offsets = addresses - np.uint64(cluster.memory)
        inside = offsets < np.uint64(cluster.bytes)
        if inside.any():
            places = offsets[inside].astype(np.int64)
            self._shared(state, places, width, write, cluster.row)
        if self.ordered[index]:
            flags, modifiers = np.unique(addresses).tolist(), state.instruction.modifiers
            if write:
                self.flags.publish(state, flags, "release" in modifiers)
            else:
                self.flags.learn(state, flags, "acquire" in modifiers)
        elif not inside.all():
            act = self.writes.store if write else self.writes.load
            act(state, addresses[~inside], width)

    def _shared(
        self, state: WarpState, offsets: np.ndarray, width: int, write: bool, row: int
    ) -> None:
        """A native access to shared memory at `offsets` into the cluster's array."""
        kind = "atomic" if self.ordered[state.instruction.index] else "generic"
        ranks = offsets // row
        first = int(ranks[0])
        ranks_used = (first,) if (ranks == first).all() else np.unique(ranks).tolist()
        for rank in ranks_used:
            inside = offsets if len(ranks_used) == 1 else offsets[ranks == rank]
            cells = (inside - rank * row) >> 2
            if width > 4:
                cells = (cells[:, None] + np.arange(width // 4)).reshape(-1)
            cta = state.cluster.ctas[rank]
            access = state.access(kind, write)
            if cta.cta is not state.warp.cta:
                self.meet(state, rank)
                cta.visit(access)
            shape = cta.smem.plane.shape[1]
            cta.smem.touch((cells // shape, cells % shape), access, state.frontier)

    def meet(self, state: WarpState, rank: int) -> None:
        """A warp reaches into a CTA of its cluster, which must be known to have started."""
        if state.record.met >> rank & 1:
            return
        if state.frontier[self.layout.generic_of(rank)].any():
            state.record.met |= 1 << rank
            return
        text = (
            f"{self._place(state)} reaches into CTA rank {rank}, which is not known to have "
            "started; a cluster barrier must come first"
        )
        self._report_at("peer-not-met", text, state)

    def leave(self, warp: Any) -> None:
        """A warp has exited."""
        state = self.begin(warp, None)
        self.flush(state)
        cta = self.cta(warp.cta)
        np.maximum(cta.last, state.frontier, out=cta.last)

    def leave_cta(self, cta: Any) -> None:
        """The last warp of a CTA has exited: nobody may be at work in it any more."""
        state = self.cta(cta)
        self.responses.leave(cta)
        for access in state.guests:
            if access.clock is None or state.last[access.agent] < access.clock:
                text = (
                    f"CTA {cta.ctaid} exits while it may still be in use: "
                    f"{findings.describe(access)} is not known to be complete by any of its warps; "
                    f"{_TRAILING}"
                )
                index = access.instruction.index if access.instruction else None
                finding = Finding("exit-too-early", text, findings.sites(access), "",
                                  findings.parties(access), _TRAILING)  # fmt: skip
                self.report(finding, (index,))
        for barrier in cta.barriers.values():
            self._barrier_ends(barrier, cta)

    def _barrier_ends(self, barrier: WatchedBarrier, cta: Any) -> None:
        place = f"CTA {cta.ctaid} exits: {barrier.describe()}"
        key = (barrier.address & 0xFFFFFF,)
        if barrier.transactions < 0:
            text = f"{place}; more bytes arrived than were expected"
            self.report(Finding("transactions-at-exit", text, about="mbarrier"), key)
        elif barrier.transactions > 0 and barrier.signalled:
            # A producer that only waits for empty slots at its end expects bytes, too; then none
            # of them has arrived.
            text = f"{place}; fewer bytes arrived than were expected"
            self.report(Finding("transactions-at-exit", text, about="mbarrier"), key)
        self._check_roles(barrier, place, self.clusters[cta.cluster.id])

    def _check_roles(self, barrier: WatchedBarrier, place: str, state: ClusterState) -> None:
        """Check that the warps that share an arrive have all arrived or none, in a phase that is
        left open.

        A role as a whole may be ahead of the others at the end of a kernel.
        """
        arrived = set(np.flatnonzero(barrier.arrivals).tolist())
        for index, warps in barrier.roles.items():
            if barrier.phase and arrived & warps and not warps <= arrived:
                instruction = self.machine.compiled.instructions[index]
                absent = ", ".join(
                    f"CTA {warp.cta.ctaid} warp {warp.index}"
                    for warp in (state.by_number[n].warp for n in sorted(warps - arrived))
                )
                text = (
                    f"{place}; of the warps that arrive at `{instruction.text}` (PTX line "
                    f"{instruction.line}), {absent} did not arrive in this phase and others did"
                )
                missing = state.by_number[min(warps - arrived)].warp
                at = findings.site(instruction, missing.cta.ctaid, missing.index)
                finding = Finding("arrivals-unbalanced", text, (at,), "mbarrier")
                self.report(finding, (barrier.address & 0xFFFFFF,))

    def unbalanced(self, barrier: WatchedBarrier) -> None:
        """Other warps made the arrivals of this phase than those of the first one.

        The warp that initialises a barrier of empty slots may complete its first phase itself, so
        that the slots count as free; the second phase is the one to compare with then.
        """
        now, usual = barrier.arrivals, barrier.usual
        more = np.flatnonzero(now > usual).tolist()
        if not more:
            return
        initialiser = barrier.initialised[0]
        if (
            barrier.phase == 1
            and np.flatnonzero(usual).tolist() == [initialiser]
            and not now[initialiser]
        ):
            usual[:] = now
            return
        warps = self.actor.cluster.by_number
        counts = ", ".join(
            f"CTA {warps[n].warp.cta.ctaid} warp {warps[n].warp.index} arrives {now[n]} times in "
            f"this phase and {usual[n]} times in the first"
            for n in more
        )
        text = f"{barrier.describe()}: {counts}; the roles disagree on how often they arrive"
        finding = Finding("arrivals-unbalanced", text, about="mbarrier")
        self.report(finding, (barrier.address & 0xFFFFFF,))

    # ------------------------------------------------------------ barriers

    def barrier_begins(self, barrier: WatchedBarrier) -> None:
        """mbarrier.init by the acting warp."""
        state: Any = self.actor
        barrier.initialise(state.number, state.clock)
        state.unfenced_inits.append(barrier)
        state.record.inits = 1
        cells = slice((barrier.address & 0xFFFFFF) >> 2, ((barrier.address & 0xFFFFFF) >> 2) + 2)
        self.cta(state.warp.cta).flat[cells] = BARRIER

    def barrier_ends(self, state: WarpState, barrier: WatchedBarrier) -> None:
        """mbarrier.inval: the bytes are ordinary memory again."""
        first = (barrier.address & 0xFFFFFF) >> 2
        self.cta(state.warp.cta).flat[first : first + 2] = FRESH
        state.cluster.clock_base[barrier.agent] = barrier.clock

    def fence_inits(self, state: WarpState) -> None:
        """A fence after mbarrier.init makes it visible to other CTAs and to the async proxy."""
        for barrier in state.unfenced_inits:
            barrier.fenced = True
        state.unfenced_inits.clear()
        state.record.inits = 0

    def use_barrier(self, barrier: WatchedBarrier, remotely: bool) -> None:
        """The acting warp uses a barrier; `remotely`: from another CTA or by the async proxy."""
        state = self.actor if isinstance(self.actor, WarpState) else self.actor.state
        warp, clock = barrier.initialised
        entry = AGENTS_OF_A_WARP * warp + GENERIC
        if int(state.frontier[entry]) < clock:
            missing = "no barrier leads from the initialisation to this use"
        elif remotely and not barrier.fenced:
            missing = (
                "fence.mbarrier_init.release.cluster (or fence.proxy.async) must follow the "
                "initialisation, because other CTAs or asynchronous copies use the barrier"
            )
        else:
            return
        text = (
            f"mbarrier at shared offset {barrier.address & 0xFFFFFF:#x} of CTA rank "
            f"{barrier.address >> 24}, used by {self._place(state)}: {missing}"
        )
        self._report_at("barrier-not-visible", text, state, missing)

    def arrives(self, barrier: WatchedBarrier) -> None:
        """An arrival: the actor publishes what it knows."""
        actor = self.actor
        rank = barrier.address >> 24
        if isinstance(actor, Completion):
            np.maximum(barrier.gathering, actor.frontier, out=barrier.gathering)
            state, frontier = actor.state, actor.frontier
        else:
            state, frontier = actor, actor.frontier
            foreign = rank != state.warp.cta.rank
            self.use_barrier(barrier, foreign)
            if not (foreign and state.narrow):
                state.offer(barrier.gathering)
            if foreign:
                self._visit_barrier(state.access("arrive", True), state, rank)
        if barrier.phase and not self._observed(barrier, frontier) and not barrier.skipped:
            barrier.skipped = True
            text = (
                f"arrival at the {barrier.describe()}, by {self._place(actor)}, although no wait "
                "for the phase before is known to it: a waiter may miss that phase and take a "
                "later one for it"
            )
            self._report_at("phase-not-observed", text, actor)

    def _visit_barrier(self, access: Access, state: WarpState, rank: int) -> None:
        if rank != state.warp.cta.rank:
            self.meet(state, rank)
            state.cluster.ctas[rank].visit(access)

    def _observed(self, barrier: WatchedBarrier, frontier: np.ndarray) -> bool:
        return any(
            int(frontier[AGENTS_OF_A_WARP * warp + WAIT]) >= barrier.observed[warp]
            for warp in np.flatnonzero(barrier.observed).tolist()
        )

    def signals(self, barrier: WatchedBarrier) -> None:
        """Bytes of a copy have arrived."""
        actor = self.actor
        if not isinstance(actor, Completion):
            return
        access = actor.accesses.get(barrier.address)
        if access is not None:
            access.complete(barrier.agent, barrier.clock)
            np.maximum(barrier.gathering, actor.frontier, out=barrier.gathering)
            barrier.gathering[barrier.agent] = barrier.clock

    def waited(self, state: WarpState, barrier: WatchedBarrier) -> None:
        """A wait of a warp has succeeded."""
        self.use_barrier(barrier, False)
        self.acquire(state, barrier.released)
        state.frontier[state.wait] += 1
        barrier.observed[state.number] = int(state.frontier[state.wait])
        phase = barrier.phase - 1
        before = int(barrier.last_waits[state.number])
        barrier.last_waits[state.number] = phase
        if phase - before >= 3 and (phase - before) % 2:
            last = f"phase {before}" if before >= 0 else "none"
            text = (
                f"{self._place(state)} waits for the {barrier.describe()} and passes with phase "
                f"{phase}, having last passed with {last}: the phase it waited for has been "
                "overtaken and its parity aliases"
            )
            self._report_at("phase-skipped", text, state)

    def _report_at(
        self, kind: str, text: str, state: WarpState | Completion, missing: str = ""
    ) -> None:
        """A finding about what the instruction of a warp does to a barrier or another CTA."""
        instruction, warp = state.instruction, state.warp
        where = instruction, warp.cta.ctaid, warp.index
        seen = (findings.party("", *where),)
        finding = Finding(kind, text, (findings.site(*where),), "", seen, missing)
        self.report(finding, (instruction.index,))

    @staticmethod
    def _place(state: WarpState | Completion) -> str:
        return findings.place(state.instruction, state.warp.cta.ctaid, state.warp.index)

    # ------------------------------------------------------------ asynchronous operations

    def submit(self, operation: AsyncOp) -> None:
        """Record an operation as it is issued, and follow it until it takes effect."""
        state = self.state(operation.touches.warp)
        state.instruction = operation.touches.instruction
        _SUBMITTED[operation.kind](self, state, operation)

    def _chain(self, state: WarpState, operation: AsyncOp) -> None:
        """MMAs on one accumulator."""
        self.flush(state, operation.touches.mmas)
        state.recorded = 0

    def _recorded_by_hooks(self, state: WarpState, operation: AsyncOp) -> None:
        """cp.async and wgmma: hooks have recorded them, for each warp where it issues them."""

    def _arrive_copies(self, state: WarpState, operation: AsyncOp) -> None:
        completion = Completion(state, {})
        completion.frontier[state.copy] = state.issued[COPY]
        self._follow(operation, completion)

    def _tensor_copy(self, state: WarpState, operation: AsyncOp) -> None:
        """tcgen05.cp and shift: ordered with the MMAs of their thread, and committed like them."""
        reads = state.asynchronous(MMA, "mma", False)
        results = Access(state, reads.agent, reads.clock, "mma", True)
        reads.order = results.order = (operation.kind,)
        frontier = state.for_tensor()
        for cta, column, count, lanes, chunks in operation.touches.cells:
            shadow = self.cta(cta)
            shadow.visit(reads)
            if chunks is not None:
                shadow.smem.touch(np.unique(chunks), reads, frontier)
            granules = np.unique(lanes // footprints.LANES_OF_A_GRANULE)
            shadow.tmem.touch((slice(column, column + count), granules), results, frontier)

    def _commit(self, state: WarpState, operation: AsyncOp) -> None:
        completion = Completion(state, {})
        completion.frontier[state.mma] = state.issued[MMA]
        for address in operation.touches.commits:
            barrier = state.cluster.cluster.mbarrier(address)
            self.use_barrier(barrier, True)
            access = Access(state, state.mma, state.issued[MMA], "arrive", True)
            self._visit_barrier(access, state, address >> 24)
        self._follow(operation, completion)

    def _copy(self, state: WarpState, operation: AsyncOp) -> None:
        touches = operation.touches
        kind = _KINDS.get(operation.kind, "tma")
        accesses: dict[int, Access] = {}
        for cta, offset, size, signal in touches.writes:
            barrier = state.cluster.cluster.mbarrier(signal)
            self.use_barrier(barrier, True)
            access = accesses.get(signal)
            if access is None:
                access = accesses[signal] = Access(state, barrier.agent, None, kind, True)
                access.detail = signal_detail(signal)
            if kind == "clc":
                self.responses.request(state, cta, offset, access)
            self._touch_bytes(cta, offset, size, access, state.frontier)
        for cta, offset, size in touches.reads:
            source = Access(state, -1, None, kind, False)
            if accesses:
                source = next(iter(accesses.values()))
            self._touch_bytes(cta, offset, size, source, state.frontier)
        if touches.loaded is not None:
            self.writes.fetch(state, touches.loaded)
        if touches.descriptor:
            self.maps.use(state, touches.descriptor, list(accesses.values()))
        self._follow(operation, Completion(state, accesses))

    def _bulk_store(self, state: WarpState, operation: AsyncOp) -> None:
        touches = operation.touches
        access = state.asynchronous(BULK, "bulk", False)
        for cta, offset, size in touches.reads:
            self._touch_bytes(cta, offset, size, access, state.frontier)
        if touches.stored is not None:
            self.writes.copy(state, touches.stored, access.clock)
        if touches.descriptor:
            self.maps.use(state, touches.descriptor, [access])

    def _touch_bytes(
        self, cta: Any, offset: int, size: int, access: Access, frontier: np.ndarray
    ) -> None:
        self.meet(self.running, cta.rank)
        state = self.cta(cta)
        state.visit(access)
        if offset % 16 or size % 16:
            cells = np.arange(offset >> 2, offset + size + 3 >> 2)
            state.smem.touch((cells // 4, cells % 4), access, frontier)
        else:
            state.smem.touch(slice(offset >> 4, offset + size >> 4), access, frontier)

    def _follow(self, operation: AsyncOp, completion: Completion) -> None:
        """Let the completion act while the operation takes effect."""
        perform = operation.perform

        def acting() -> None:
            before, self.actor = self.actor, completion
            try:
                perform()
            finally:
                self.actor = before

        operation.perform = acting

    # ------------------------------------------------------------ MMAs

    def offering(self, state: WarpState) -> None:
        """A warp is about to publish what it knows; for `omission` to look at."""

    def ordering(self, state: WarpState, what: str) -> None:
        """A warp waits for loads, or executes a tcgen05.fence, a fence.proxy.async or a release
        fence of shared memory alone; for `omission`.

        what: "loads", "before", "after", "proxy" or "shared".
        """

    def completed(self, barrier: WatchedBarrier) -> None:
        """A phase is complete; for `omission`."""

    def grouping(self, state: WarpState, agent: int, commits: bool) -> None:
        """A warp commits a group of an agent, or waits for one; for `omission` to look at."""

    def completing(self, state: WarpState, agent: int) -> None:
        """A warp has waited for groups that are done; for `omission` to look at."""

    def flush(self, state: WarpState, run: Any = None) -> None:
        """Record the MMAs of the warp's open chain that have not been recorded."""
        instruction = state.instruction
        if run is None and has_native_chain(state.warp):
            state.instruction, run = native_chain(state.warp)
        elif run is None:
            chain = state.warp.cta.tmem.open_chains.get(state.warp.index)
            if not chain:
                return
            state.instruction, run = chain
        fresh = run[state.recorded :]
        state.recorded = len(run)
        if fresh:
            self._record(state, fresh)
        state.instruction = instruction

    def _record(self, state: WarpState, run: list) -> None:
        reads = state.asynchronous(MMA, "mma", False)
        results = Access(state, reads.agent, reads.clock, "mma", True)
        head, what = run[0], run[0].descriptor
        reads.order = results.order = (Effect.MMA, head.d, what.m, what.n, what.kind)
        frontier = state.for_tensor()
        for cta, space, region in footprints.mma_operands(run):
            shadow = self.cta(cta)
            shadow.visit(reads)
            memory = shadow.smem if space == "smem" else shadow.tmem
            memory.touch(region, reads, frontier)
        for cta, region in footprints.mma_results(run[0]):
            memory = self.cta(cta).tmem
            if run[0].accumulate:
                memory.update(region, results, frontier)
            else:
                memory.touch(region, results, frontier)

    def follow_writes(self) -> None:
        """Leave loads from memory that the launch has written to to Python."""
        for tile_map in self.machine.native.maps:
            tile_map.written = self.writes.has_plane(tile_map.address)

    def end_cluster(self, number: int) -> None:
        """All CTAs of a cluster have exited: its state goes."""
        self.clusters.pop(number, None)

    def results(self) -> Iterator[Finding]:
        """The findings, in the order in which they were made; those of registers come last."""
        yield from self.found.values()
        if self.products:
            yield from self._register_findings()

    def loads_not_waited(self) -> Iterator[Finding]:
        """Return the findings of the reading "wait-ld", which has no others."""
        overtaken = (f.sites[0].index for f in self.found.values() if f.kind == "load-in-flight")
        return load_waits.found(self.machine, self.omitted, self._stretches, frozenset(overtaken))

    def notes(self) -> list[str]:
        """Return what is worth a look and no finding."""
        return load_waits.notes(self.machine, self.omitted) if self.awaits_loads else []

    def _register_findings(self) -> Iterator[Finding]:
        """Yield what `in_flight` finds of the wgmmas and other instructions that were executed."""
        executed = self.machine.executed_indices()
        for hazard in hazards_of(self.machine.compiled, self.omitted):
            where = self.products.get(hazard.product.index)
            if where and (hazard.other is None or hazard.other.index in executed):
                yield findings.registers(hazard, *where)


#: Recorder of each asynchronous operation as it is issued.
_SUBMITTED = {
    Effect.MMA: Sanitizer._chain, Effect.COMMIT: Sanitizer._commit,
    Effect.TENSOR_COPY: Sanitizer._tensor_copy, Effect.TENSOR_SHIFT: Sanitizer._tensor_copy,
    Effect.TMA_LOAD: Sanitizer._copy, Effect.TMA_STORE: Sanitizer._bulk_store,
    Effect.BULK: Sanitizer._copy, Effect.COPY: Sanitizer._recorded_by_hooks,
    Effect.ARRIVE_COPIES: Sanitizer._arrive_copies, Effect.CANCEL: Sanitizer._copy,
    Effect.STORE: Sanitizer._copy, Effect.REDUCE: Sanitizer._copy,
    Effect.WARPGROUP_MMA: Sanitizer._recorded_by_hooks,
}  # fmt: skip
require_complete("sanitizer.sanitizer", Effect, _SUBMITTED, without=(Effect.NONE,))
