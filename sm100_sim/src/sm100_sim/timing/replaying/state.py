"""The tables that a replay works on: columns by name, and `Model`, which holds them all.

numba passes integer tables from function to function without counting references, and compiles
what works on them fast; so the engine's modules have names of columns in place of objects.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..machine_code.resources import Action, Instructions, Latency, Pipe

FAR = 1 << 60
PIPES = len(Pipe)
BULK_GROUPS = 64
QUEUE = 4096
SLOTS = 4
_NO_PIPE = int(Pipe.NONE)
_NONE = np.int64(0)

#: Reasons why a warp does not issue: a latency class of a scoreboard, or one of these.
REASONS = (
    *(latency.name.lower() for latency in Latency),
    "stall count", "mbarrier", "named barrier", "cluster barrier", "bulk group", "issue slot",
    "pipe", "store queue", "products",
)  # fmt: skip
(_STALL, _MBARRIER, _NAMED, _CLUSTER, _BULK, _ISSUE_SLOT, _PIPE, _STORE_QUEUE,
 _PRODUCTS) = range(len(Latency), len(REASONS))  # fmt: skip

#: Resources of an SM whose busy clocks are counted.
BUSY = ("tensor core", "shared memory port", "TMA unit", "L2 to SM", "tensor memory read",
        "tensor memory write", "load and store unit", "SM to L2")  # fmt: skip
_TENSOR, _SHARED, _TMA, _LINK, _TM_READ, _TM_WRITE, _LSU, _UP = range(len(BUSY))

_nothing, _init, _wait, _arrive, _c_arrive, _c_wait, _bar_sync, _bar_arrive = (
    int(a) for a in (Action.NONE, Action.INIT, Action.WAIT, Action.ARRIVE, Action.CLUSTER_ARRIVE,
                     Action.CLUSTER_WAIT, Action.BAR_SYNC, Action.BAR_ARRIVE)
)  # fmt: skip
_tm_load, _tm_store, _tm_store_wait, _mma, _commit, _load, _store = (
    int(a) for a in (Action.TMEM_LOAD, Action.TMEM_STORE, Action.TMEM_STORE_WAIT, Action.MMA,
                     Action.COMMIT, Action.TMA_LOAD, Action.TMA_STORE)
)  # fmt: skip
(_bulk_commit, _bulk_wait, _shared, _cancel, _copy, _copy_arrive, _fence, _g_load, _g_store,
 _cta_fence, _product, _product_wait, _store_async) = (
    int(a) for a in (Action.BULK_COMMIT, Action.BULK_WAIT, Action.SHARED, Action.TRY_CANCEL,
                     Action.COPY, Action.COPY_ARRIVE, Action.FENCE, Action.GLOBAL_LOAD,
                     Action.GLOBAL_STORE, Action.FENCE_CTA, Action.PRODUCT, Action.PRODUCT_WAIT,
                     Action.STORE_ASYNC)
)  # fmt: skip
_OPERAND_READ, _BARRIER_TEST, _TMEM_LOAD, _TMEM_STORE, _GLOBAL_LOAD, _FENCE_CTA, _FENCE_GPU = (
    int(kind) for kind in (Latency.OPERAND_READ, Latency.BARRIER_TEST, Latency.TMEM_LOAD,
                           Latency.TMEM_STORE, Latency.GLOBAL_LOAD, Latency.FENCE_CTA,
                           Latency.FENCE_GPU)
)  # fmt: skip

# Columns of Model.code: the fields of `Instructions`.
(_C_PIPE, _C_INTERVAL, _C_LATENCY, _C_STALL, _, _C_SETS, _C_FREES, _C_WAITS, _C_ACTION,
 _C_WAVEFRONTS, _C_BYTES) = range(len(Instructions._fields))  # fmt: skip
# Entries of Model.clock: latencies by class, then these.
(_K_MUFU_INTERVAL, _K_BRANCH, _K_ARRIVE, _K_WAKE, _K_REMOTE, _K_NAMED, _K_CLUSTER, _K_MMA_ISSUE,
 _K_MMA_EXTRA, _K_PREFETCH, _K_TMA_ISSUE, _K_TMA_LOAD, _K_TMA_STORE, _K_CLC,
 _K_NAMED_WARP, _K_FENCE_SYS, _K_BEHIND_LOADS, _K_DEPTH, _K_ACK,
 CLOCKS) = range(len(Latency), len(Latency) + 20)  # fmt: skip
_COLUMN_RATE, _LINK_RATE, _STORE_RATE, _IN_ORDER, RATES = range(5)
# Columns of Model.warp. Two rows of six scoreboards: clock of release, reason to give for a wait.
(FIRST, LAST, SM, SLOT_OF, _POSITION, _READY, _REASON, _BLOCKED, _WAIT_BAR, _WAIT_PARITY,
 _WAIT_BOARD, _WAIT_EVENT, _STORED, _GROUP_READ, _GROUP_DONE, _GROUPS, _PREVIOUS, _EARLIEST, _ROUND,
 _HELD, _COPIED, _FENCED, _BOARDS) = range(23)  # fmt: skip
_LAST, _SM, _SLOT_OF = LAST, SM, SLOT_OF
_WHYS = _BOARDS + 6
WARP_COLUMNS = _WHYS + 6
# Columns of Model.slot: clocks from which pipes and the two ports of tensor memory are free.
_PORTS = PIPES
USED_PIPE = PIPES + 2
ISSUED, START, STOP, SLOT_COLUMNS = range(USED_PIPE + PIPES, USED_PIPE + PIPES + 4)
_USED_PIPE, _ISSUED, _START, _STOP = USED_PIPE, ISSUED, START, STOP
# Columns of Model.unit: clocks from which it is free, clocks used, the tensor core's queue:
# operations taken and queued, when the last MMA is done, its event.
USED_UNIT = len(BUSY)
# Then from when the unit of named barriers takes another arrival, until when TMA writes and reads,
# and warps load.
(_HEAD, _TAIL, _DRAINED, _LATEST, _NAMED_UNIT, _TMA_WRITES, _TMA_READS, _LOADED,
 UNIT_COLUMNS) = range(2 * USED_UNIT, 2 * USED_UNIT + 9)  # fmt: skip
_USED_UNIT = USED_UNIT
# Columns of Model.event.
STARTED, DONE, CAUSE = range(3)
_STARTED, _DONE, _CAUSE = STARTED, DONE, CAUSE
# Entries of Model.counts, the first two those of `signals`.
(_SIGNALLED, _ORDER, _CLUSTER_ARRIVED, _CLUSTER_ROUND, _CLUSTER_CLOCK, RUNNING,
 COUNTS) = range(7)  # fmt: skip
_RUNNING = RUNNING
_NOT, _NAMED_BLOCK, _CLUSTER_BLOCK, _PRODUCT_BLOCK = range(4)


class Model(NamedTuple):
    """All tables, int64 unless noted; rows by columns.

    path: element of the paths by (instruction number, event or -1). code: instruction by the
    fields of `Instructions`. action, targets: as in `Program`. clock: latencies and other clocks;
    rate: float64, units a clock. warp, slot, unit: state of warps, issue slots and SMs, the columns
    FIRST and following. member: warps ordered by slot. barrier: mbarrier by (expected, pending,
    bytes, phase, event of the completion). signal: heap of (clock, order, barrier, arrivals, bytes,
    event). port: see `shared_port`. groups: (warps, BULK_GROUPS, 2), when
    a bulk group has been read and is done. named: warps arrived by barrier. queue: (SMs, QUEUE, 2),
    operations of the tensor core: clock from which it may start, event. crew, warpgroup, lined_up,
    taken: see `products`. counts: scalars.

    Results: issued: element of the paths by (clock of its issue, main reason for the clocks before
    it, as in REASONS). event: clock at which an operation began in its unit, at which it signalled,
    and the event that released a wait (-1: it did not block).
    stalls: warp by REASONS, in clocks.
    """

    path: np.ndarray
    code: np.ndarray
    action: np.ndarray
    targets: np.ndarray
    clock: np.ndarray
    rate: np.ndarray
    warp: np.ndarray
    slot: np.ndarray
    unit: np.ndarray
    member: np.ndarray
    barrier: np.ndarray
    signal: np.ndarray
    port: np.ndarray
    groups: np.ndarray
    named: np.ndarray
    queue: np.ndarray
    crew: np.ndarray
    warpgroup: np.ndarray
    lined_up: np.ndarray
    taken: np.ndarray
    counts: np.ndarray
    issued: np.ndarray
    event: np.ndarray
    stalls: np.ndarray
