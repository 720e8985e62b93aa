"""Values of the columns of the instruction table, beside an opcode's semantics.

Values only. Whoever acts on a column (the sanitizer on `Rule`, native code on `NativeForm`, the
timing model on `Event`) keeps a handler for each of its values and calls `require_complete` on them
when it is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum, auto
from typing import Any


class _Text(str, Enum):
    """Members that are, and print as, their values: what enum.StrEnum is from Python 3.11 on."""

    __str__ = str.__str__

    def __format__(self, form: str) -> str:
        return str.__format__(self, form)


class Rule(Enum):
    """Rule by which the sanitizer records an executed instruction."""

    #: Reads and writes registers only.
    COMPUTES = auto()
    #: Native code logs which bytes each lane reads or writes; inline loads and stores.
    LOGGED = auto()
    #: Its object records it: an mbarrier, an asynchronous operation, a response.
    BY_OBJECTS = auto()
    #: Acts on what the sanitizer does not follow (docs/sanitizer.md, "What it does not see").
    NOT_FOLLOWED = auto()
    #: mbarriers, named barriers, the cluster barrier.
    ARRIVE = auto()
    WAIT = auto()
    INVALIDATE = auto()
    NAMED_BARRIER = auto()
    NAMED_ARRIVE = auto()
    CLUSTER_ARRIVE = auto()
    CLUSTER_WAIT = auto()
    #: Fences: between threads; of shared memory alone; of mbarrier.init; between proxies, alone and
    #: as part of an acquire or a release; of a tensor map.
    FENCE = auto()
    FENCE_SHARED = auto()
    FENCE_INIT = auto()
    FENCE_PROXY = auto()
    FENCE_PROXY_ACQUIRE = auto()
    FENCE_PROXY_RELEASE = auto()
    FENCE_MAP_ACQUIRE = auto()
    FENCE_MAP_RELEASE = auto()
    #: Tensor memory.
    FENCE_BEFORE = auto()
    FENCE_AFTER = auto()
    ALLOCATE = auto()
    DEALLOCATE = auto()
    TENSOR_LOAD = auto()
    TENSOR_STORE = auto()
    WAIT_LOADS = auto()
    WAIT_STORES = auto()
    #: Bulk groups.
    COMMIT_BULK = auto()
    WAIT_BULK = auto()
    #: cp.async.
    COPY = auto()
    COMMIT_COPIES = auto()
    WAIT_COPIES = auto()
    WAIT_ALL_COPIES = auto()
    ARRIVE_COPIES = auto()
    ATOMIC = auto()
    #: wgmma.
    WARPGROUP_MMA = auto()
    WARPGROUP_FENCE = auto()
    COMMIT_WARPGROUP = auto()
    WAIT_WARPGROUP = auto()


#: Rules of what orders: leaving it out is a mutation.
ORDERING = frozenset({
    Rule.ARRIVE, Rule.WAIT, Rule.NAMED_BARRIER, Rule.NAMED_ARRIVE, Rule.CLUSTER_ARRIVE,
    Rule.CLUSTER_WAIT, Rule.FENCE, Rule.FENCE_SHARED, Rule.FENCE_INIT, Rule.FENCE_PROXY,
    Rule.FENCE_PROXY_ACQUIRE, Rule.FENCE_PROXY_RELEASE, Rule.FENCE_MAP_ACQUIRE,
    Rule.FENCE_MAP_RELEASE, Rule.FENCE_BEFORE, Rule.FENCE_AFTER, Rule.WAIT_LOADS,
    Rule.WAIT_STORES, Rule.COMMIT_BULK, Rule.WAIT_BULK,
    Rule.COMMIT_COPIES, Rule.WAIT_COPIES, Rule.WAIT_ALL_COPIES, Rule.ARRIVE_COPIES,
    Rule.WARPGROUP_FENCE, Rule.COMMIT_WARPGROUP, Rule.WAIT_WARPGROUP,
})  # fmt: skip
#: Rules under which an asynchronous operation is recorded.
SUBMITTING = frozenset({Rule.BY_OBJECTS, Rule.COPY, Rule.ARRIVE_COPIES, Rule.WARPGROUP_MMA})


class Effect(_Text):
    """The asynchronous operation that an instruction issues; the value stands in reports."""

    NONE = ""
    MMA = "tcgen05.mma"
    COMMIT = "tcgen05.commit"
    TENSOR_COPY = "tcgen05.cp"
    TENSOR_SHIFT = "tcgen05.shift"
    TMA_LOAD = "tma.load"
    TMA_STORE = "tma.store"
    BULK = "tma.bulk"
    COPY = "cp.async"
    ARRIVE_COPIES = "cp.async.arrive"
    CANCEL = "clc.try_cancel"
    STORE = "st.async"
    REDUCE = "red.async"
    WARPGROUP_MMA = "wgmma.mma_async"


class Recorded(Enum):
    """Record that a trace keeps of an execution."""

    NOTHING = auto()
    #: A `trace.records.TraceEntry`.
    ENTRY = auto()
    #: A `TraceEntry` whose first operand is read afterwards: the result of a wait.
    RESULT = auto()
    #: A `TraceEntry` with the address in each lane: of an arrival.
    LANES = auto()


class Event(_Text):
    """Kind of an execution for the timing model, which finds its SASS by it (`events`)."""

    NONE = ""
    INIT = "init"
    WAIT = "wait"
    ARRIVE = "arrive"
    CLUSTER_ARRIVE = "cluster_arrive"
    CLUSTER_WAIT = "cluster_wait"
    BAR_SYNC = "bar_sync"
    BAR_ARRIVE = "bar_arrive"
    BAR_REDUCE = "bar_reduce"
    TMEM_LOAD = "tmem_load"
    TMEM_STORE = "tmem_store"
    TMEM_STORE_WAIT = "tmem_store_wait"
    MMA = "mma"
    COMMIT = "commit"
    TMEM_COPY = "tmem_copy"
    TMEM_SHIFT = "tmem_shift"
    TMEM_ALLOC = "tmem_alloc"
    TMA_LOAD = "tma_load"
    TMA_STORE = "tma_store"
    TMA_REDUCE = "tma_reduce"
    TMA_PREFETCH = "tma_prefetch"
    BULK_LOAD = "bulk_load"
    BULK_STORE = "bulk_store"
    BULK_REDUCE = "bulk_reduce"
    BULK_COMMIT = "bulk_commit"
    BULK_WAIT = "bulk_wait"
    COPY = "copy"
    COPY_ARRIVE = "copy_arrive"
    CLC_TRY_CANCEL = "clc_try_cancel"
    SETMAXNREG = "setmaxnreg"
    ASYNC_FENCE = "async_fence"
    STORE_ASYNC = "store_async"
    GLOBAL_ATOMIC = "global_atomic"
    LAUNCH_DEPENDENTS = "launch_dependents"
    WAIT_DEPENDENTS = "wait_dependents"
    WARPGROUP_MMA = "wgmma"
    WARPGROUP_FENCE = "wgmma_fence"
    WARPGROUP_WAIT = "wgmma_wait"


class Mix(Enum):
    """Arithmetic that ptxas leaves as it is: by it paths with the same events are told apart
    (`timing.machine_code.mixes`)."""

    EXP2 = auto()
    #: Other functions of the special function unit.
    SPECIAL = auto()
    #: Two float32 in one instruction; sums of them.
    PACKED = auto()
    PACKED_SUM = auto()
    #: Conversions to two narrow floats.
    NARROW = auto()
    SELECT = auto()
    SHUFFLE = auto()
    VOTE = auto()


#: Modifiers of loads and stores that communicate beyond a thread.
_ORDERED = frozenset({"volatile", "relaxed", "acquire", "release", "mmio", "cv", "wt"})
#: Scopes beyond a cluster.
_WIDE = frozenset({"gpu", "sys", "gl"})


class Ties(Enum):
    """Condition under which an instruction lets clusters communicate, or makes their order
    matter."""

    NEVER = auto()
    ALWAYS = auto()
    #: Unless a modifier says that the address is in shared memory.
    UNLESS_SHARED = auto()
    #: If it is to global memory.
    IF_GLOBAL = auto()
    #: If its scope is the GPU or the system.
    IF_WIDE = auto()
    #: If it is not weak, or goes past the caches, and not in shared memory.
    IF_ORDERED = auto()

    def binds(self, modifiers: Collection[str]) -> bool:
        """Return True if the instruction with these modifiers does."""
        if self is Ties.IF_GLOBAL:
            return "global" in modifiers
        if self is Ties.IF_WIDE:
            return not _WIDE.isdisjoint(modifiers)
        if self is Ties.IF_ORDERED and _ORDERED.isdisjoint(modifiers):
            return False
        if self in (Ties.UNLESS_SHARED, Ties.IF_ORDERED):
            return not names_shared(modifiers)
        return self is Ties.ALWAYS


class MemoryAccess(Enum):
    """Kind of memory access by the lanes of an inline instruction."""

    NONE = auto()
    LOAD = auto()
    STORE = auto()
    #: ldmatrix and stmatrix: shared memory, whole rows of matrices.
    MATRIX_LOAD = auto()
    MATRIX_STORE = auto()

    def is_shared(self, modifiers: Collection[str]) -> bool:
        """Return True if it is known, before anything runs, to be in shared memory."""
        if self in (MemoryAccess.MATRIX_LOAD, MemoryAccess.MATRIX_STORE):
            return True
        return self is not MemoryAccess.NONE and names_shared(modifiers)


class Jump(Enum):
    """Target of the lanes behind a branch or exit."""

    BRANCH = auto()
    #: To a target of a table.
    INDEXED = auto()
    EXIT = auto()


class NativeForm(Enum):
    """The native form of a machine operation (`translate/native_forms.py`)."""

    ARRIVE = auto()
    WAIT = auto()
    TENSOR_LOAD = auto()
    TENSOR_STORE = auto()
    #: Without effect on any state.
    ORDER = auto()
    FENCE_BEFORE = auto()
    MMA = auto()
    COMMIT = auto()
    TILE = auto()
    BULK_GROUP = auto()
    WARPGROUP_MMA = auto()


class ByModifier:
    """A column's value that depends on the modifiers.

    listed: value by modifier; the first modifier of the instruction that is listed decides.
    otherwise: where none is.
    """

    def __init__(self, listed: Mapping[str, Any], otherwise: Any) -> None:
        self._listed = dict(listed)
        self._otherwise = otherwise
        self.values = (*self._listed.values(), otherwise)

    def of(self, modifiers: Iterable[str]) -> Any:
        """The value for an instruction with these modifiers."""
        for modifier in modifiers:
            if modifier in self._listed:
                return self._listed[modifier]
        return self._otherwise


def names_shared(modifiers: Iterable[str]) -> bool:
    """Return True if a modifier names a state space of shared memory."""
    return any(modifier.startswith("shared") for modifier in modifiers)


def require_complete(
    owner: str, column: type[Enum], handled: Collection[Any], without: Collection[Any] = ()
) -> None:
    """Raise ValueError unless `handled` are exactly the values of a column, `without` aside."""
    values = set(column) - set(without)
    missing, foreign = values - set(handled), set(handled) - values
    if missing or foreign:
        raise ValueError(
            f"{owner}: {column.__name__} and what acts on it disagree; without a handler: "
            f"{sorted(map(str, missing)) or 'none'}, handled and no value that an instruction of "
            f"the table may have: {sorted(map(str, foreign)) or 'none'}"
        )
