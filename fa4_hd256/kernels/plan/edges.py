"""Barriers as data: an mbarrier of a kernel is an edge from those who arrive to those who wait.

The only mbarriers that are no edges are those of a dynamic scheduler (`schedulers.dynamic`).

A kernel declares its edges once, in an `EdgeTable`.  From it follow the arrive counts, the shared
memory the barriers take, their initialisation, the table in the documentation, and the
`Barrier` objects through which the warp roles signal and wait.  Index and phase of a barrier
array are never handled by hand: each role keeps one `RingState` per edge.

mbarrier semantics: PTX ISA 9.7.13.15 (phase, pending count, tx-count); commit: 9.7.16.11.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from ...schedulers.carried import Carried
from ..limits import WARP_SIZE

BARRIER_BYTES = 8

#: Class of a role's own record.
Record = TypeVar("Record", bound="RingRecord")

LEADER_RANK = 0
BOTH_CTAS_MASK = 0b11


class SharedByReference:
    """Base of objects that device code uses inside dynamic loops but never replaces. The DSL
    carries every object used in a loop through it; this one carries no values, since those it holds
    are defined before the loop and do not change."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> SharedByReference:
        return self


class Signal(enum.Enum):
    """Signal of an edge, which decides the barrier's CTA and the number of arrivals."""

    TMA_PAIR = "TMA bytes of both CTAs, on the leader's barrier"
    COMMIT_PAIR = "tcgen05.commit by the leader, on both CTAs' barriers"
    COMMIT_CTA = "tcgen05.commit by a CTA that multiplies alone, on its barrier"
    TMA_CTA = "TMA bytes of the own CTA, on its barrier"
    TMA_BOTH = "TMA bytes of both CTAs, a part of each, on both CTAs' barriers"
    COPIES_CTA = "cp.async of all lanes of the producer warps, on the own CTA's barrier"
    WARPS_PAIR = "one lane of each producer warp of both CTAs, on the leader's barrier"
    WARPS_PAIR_RELEASE = "one lane of each warp of both CTAs, on the leader's barrier, releasing"
    WARPS_CTA = "one lane of each producer warp, on the own CTA's barrier"
    WARPS_BOTH = "one lane of each producer warp of both CTAs, on both CTAs' barriers, releasing"


TMA_SIGNALS = (Signal.TMA_PAIR, Signal.TMA_CTA, Signal.TMA_BOTH)
COMMIT_SIGNALS = (Signal.COMMIT_PAIR, Signal.COMMIT_CTA)
PAIR_SIGNALS = (Signal.WARPS_PAIR, Signal.WARPS_PAIR_RELEASE)
TO_ASYNC = {"from_proxy": nvvm.ProxyKind.GENERIC, "to_proxy": nvvm.ProxyKind.async_}


class RingState(Carried):
    """Next barrier of an array, and the parity of its phase; lives across loops. Equals
    cutlass.pipeline.PipelineState without its count; with two stages it advances by two XORs where
    a comparison and two selections would stand in every hot loop."""

    CARRIED = ("index", "phase")

    def __init__(self, stages: int, index: Int32, phase: Int32) -> None:
        self.stages, self.index, self.phase = stages, index, phase

    def advance(self) -> None:
        """Advance to the next barrier; the parity flips when the ring starts again."""
        if self.stages == 1:
            self.phase = self.phase ^ 1
        elif self.stages == 2:
            self.phase, self.index = self.phase ^ self.index, self.index ^ 1
        else:
            following = self.index + 1
            wraps = following == self.stages
            self.phase = self.phase ^ Int32(wraps)
            self.index = cutlass.select_(wraps, Int32(0), following)

    def copy(self) -> RingState:
        return RingState(self.stages, self.index, self.phase)


class RingRecord:
    """The rings of a role, a `RingState` each, by name; lives across dynamic loops.

    A role may declare a subclass with a field for each ring: a dataclass by keyword
    (`kw_only=True`), so that no order can be wrong in silence. It is not frozen: CuTe DSL takes a
    frozen one for a constant. Without a subclass a state has the name of its edge, as
    `rings["s_done"]`.
    """

    def __init__(self, **states: RingState) -> None:
        vars(self).update(states)

    @classmethod
    def waiting(cls: type[Record], edges: EdgeTable, *names: str, **fields: str) -> Record:
        """Return the record of a role. fields: for each field of a subclass the edge whose stages
        it counts. names: edges whose states have their names.

        A role waits for that edge, and signals the other edge of the ring by the same state, before
        it advances it unless the ring has one stage.  Where it only signals a ring, it names the
        edge that it signals, and the parity is not used.
        """
        chosen = dict(zip(names, names, strict=True), **fields)
        return cls(**{field: edges[edge].waiter_state() for field, edge in chosen.items()})

    def __getitem__(self, name: str) -> RingState:
        return vars(self)[name]

    def advance(self, name: str) -> None:
        self[name].advance()

    def __extract_mlir_values__(self) -> list:
        return [v for state in vars(self).values() for v in cutlass.extract_mlir_values(state)]

    def __new_from_mlir_values__(self, values: list) -> RingRecord:
        pairs = zip(values[::2], values[1::2], strict=True)
        return type(self)(
            **{
                name: cutlass.new_from_mlir_values(state, list(pair))
                for (name, state), pair in zip(vars(self).items(), pairs, strict=True)
            }
        )


@dataclass(frozen=True)
class Edge(SharedByReference):
    """One array of mbarriers.

    name: what has been done when a phase completes.
    stages: barriers in the array, used in turn.
    signal: how it is signalled, and so in which CTA its barriers lie.
    producer: the role that arrives; on an edge `*_free` that is the role that empties the buffer.
    producer_warps: warps of one CTA that arrive (with TMA and commit, one thread does).
    consumer: the role that waits.
    initially_complete: the waiter's first pass over the stages does not block (a buffer that
        starts out free).
    guards: the data that change hands, for the documentation.
    transaction_bytes: bytes that complete a phase of a TMA edge; 0 for other signals.
    polls: whether a waiter tries without a time hint, as `EdgeTable.polling` says.
    """

    name: str
    stages: int
    signal: Signal
    producer: str
    producer_warps: int
    consumer: str
    guards: str
    initially_complete: bool = False
    transaction_bytes: int = 0
    polls: bool = False

    @property
    def arrive_count(self) -> int:
        if self.signal in (*TMA_SIGNALS, *COMMIT_SIGNALS):
            return 1
        if self.signal is Signal.COPIES_CTA:
            return WARP_SIZE * self.producer_warps
        ctas = 2 if self.signal in (*PAIR_SIGNALS, Signal.WARPS_BOTH) else 1
        return ctas * self.producer_warps

    def waiter_state(self) -> RingState:
        # The phase before the first counts as complete: waiting for its parity does not block.
        return RingState(self.stages, Int32(0), Int32(int(self.initially_complete)))

    def producer_state(self) -> RingState:
        """Return the state of a role that only signals this edge; its parity is not used."""
        return RingState(self.stages, Int32(0), Int32(1))


@dataclass(frozen=True)
class EdgeTable(SharedByReference):
    """All edges of a kernel."""

    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        names = [edge.name for edge in self.edges]
        if len(set(names)) != len(names):
            raise ValueError(f"edge names must be unique, got {names}")
        for edge in self.edges:
            if edge.stages < 1 or edge.arrive_count < 1:
                raise ValueError(f"edge {edge.name} has no stage or nobody who arrives")
            if (edge.signal in TMA_SIGNALS) != (edge.transaction_bytes > 0):
                raise ValueError(f"edge {edge.name}: exactly TMA edges carry transaction bytes")

    def __getitem__(self, name: str) -> Edge:
        return next(edge for edge in self.edges if edge.name == name)

    def polling(self, polls: bool, *hinted: str) -> EdgeTable:
        """Return this table, or where `polls` one whose waits have no time hint but for `hinted`.
        An mbarrier.try_wait suspends a thread for at most the time of its hint, CuTe DSL's 10 ms,
        or without a hint for one that the hardware chooses (PTX ISA 9.7.13.15.16)."""
        if not polls:
            return self
        return EdgeTable(tuple(replace(e, polls=e.name not in hinted) for e in self.edges))

    @property
    def num_barriers(self) -> int:
        return sum(edge.stages for edge in self.edges)

    def bind(self, storage: cute.Pointer) -> dict[str, Barrier]:
        """Initialise all barriers at `storage` (num_barriers Int64) and return them by name. Called
        by all threads of the CTA; the caller fences and synchronises the cluster after."""
        barriers, offset = {}, 0
        for edge in self.edges:
            barriers[edge.name] = Barrier(edge, storage + offset)
            offset += edge.stages
        return barriers


@cute.jit
def _poll(barrier: cute.Pointer, phase: Int32) -> None:
    """Block until a phase is complete, by attempts without a time hint."""
    is_complete = cute.arch.mbarrier_try_wait(barrier, phase)
    while not is_complete:
        is_complete = cute.arch.mbarrier_try_wait(barrier, phase)


class Barrier(SharedByReference):
    """An edge bound to its barriers in shared memory."""

    def __init__(self, edge: Edge, storage: cute.Pointer) -> None:
        operation = {
            Signal.TMA_PAIR: pipeline.PipelineOp.TmaLoad,
            Signal.TMA_CTA: pipeline.PipelineOp.TmaLoad,
            Signal.TMA_BOTH: pipeline.PipelineOp.TmaLoad,
            Signal.COPIES_CTA: pipeline.PipelineOp.AsyncLoad,
            Signal.COMMIT_PAIR: pipeline.PipelineOp.TCGen05Mma,
            Signal.COMMIT_CTA: pipeline.PipelineOp.TCGen05Mma,
        }.get(edge.signal, pipeline.PipelineOp.AsyncThread)
        group = pipeline.CooperativeGroup(pipeline.Agent.Thread, edge.arrive_count)
        self.edge = edge
        self._array = pipeline.MbarrierArray(
            storage, edge.stages, (operation, group), edge.transaction_bytes, name=edge.name
        )

    def pointer(self, state: Any) -> cute.Pointer:
        """The barrier of a stage; TMA loads of both CTAs complete on the leader's."""
        return self._array.get_barrier(state.index)

    def wait(self, state: Any) -> None:
        if self.edge.polls:
            _poll(self._array.get_barrier(state.index), state.phase)
        else:
            self._array.wait(state.index, state.phase)

    def wait_for_all(self, state: RingState) -> None:
        """Block until the last phase of every stage is complete, and advance past them: a role's
        end, where signals on their way to this CTA's barriers must arrive before it exits."""
        for _ in range(self.edge.stages):
            self.wait(state)
            state.advance()

    def expect_bytes(self, state: Any) -> None:
        """Arrive, expecting the transaction bytes of one stage; by a warp of the barrier's CTA."""
        self._array.arrive_and_expect_tx(state.index, self.edge.transaction_bytes)

    def arrive_copies(self, state: Any) -> None:
        """Let each lane arrive when its cp.async issued so far are complete; by all lanes."""
        self._array.arrive(state.index, None)

    def commit(self, state: Any) -> None:
        """Signal all CTAs that multiply together when MMAs issued so far are done."""
        if self.edge.signal is Signal.COMMIT_CTA:
            self._array.arrive(state.index, None, tcgen05.CtaGroup.ONE)
        else:
            self._array.arrive(state.index, BOTH_CTAS_MASK, tcgen05.CtaGroup.TWO)

    def arrive(self, state: Any, is_converged: bool = False) -> None:
        """One arrival of this warp, called by all its lanes.

        The warp barrier orders what the other lanes did before the elected lane's arrival; it is
        left out after an instruction that the whole warp completes together (is_converged), as
        tcgen05.wait is.
        An arrival at cluster scope is relaxed: one that releases costs a memory barrier of the
        whole GPU, several hundred clocks (sm100_sim/docs/facts.md).  An edge that hands over
        tensor memory only has the order of the tcgen05 waits and fences (9.7.16.6.4); one of shared
        memory releases that alone (9.7.13.4), for a pair's MMAs together with the proxy fence.
        """
        if not is_converged:
            cute.arch.sync_warp()
        pointer = self._array.get_barrier(state.index)
        if cutlass.const_expr(self.edge.signal is Signal.WARPS_PAIR_RELEASE):
            nvvm.fence_proxy_sync_restrict(nvvm.MemOrderKind.RELEASE, **TO_ASYNC)
        with cute.arch.elect_one():
            if cutlass.const_expr(self.edge.signal in PAIR_SIGNALS):
                cute.arch.mbarrier_arrive(
                    pointer, LEADER_RANK, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER
                )
            elif cutlass.const_expr(self.edge.signal is Signal.WARPS_BOTH):
                nvvm.fence_sync_restrict(nvvm.MemOrderKind.RELEASE)
                for rank in range(2):
                    cute.arch.mbarrier_arrive(
                        pointer, rank, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER
                    )
            else:
                cute.arch.mbarrier_arrive(pointer)
