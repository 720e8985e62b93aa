"""Protocol of every tile scheduler, on the host and in the kernel.

Host: `grid_shape(problem, max_active_clusters)` gives the launch grid.  Kernel, once by all threads
of the CTA, before the cluster barrier of the kernel's set-up: `channel = Scheduler.setup(allocator,
consumer_warps, counter)`; then every warp role makes its own scheduler and runs the same loop,
whatever the kind::

    scheduler = Scheduler.create(order, channel)
    work = scheduler.initial_work()
    while work.is_valid:
        ...
        work = scheduler.advance_to_next_work()

One warp of the leader CTA, the scheduler warp, additionally calls `prefetch_next_work()` at the
head of the loop's body and `producer_tail()` after the loop.  One more warp of that CTA decides
when the query goes out: it calls `want_next_work()` once in the loop's body. A tile that is claimed
early is kept from clusters that are done before this one.  Where there is nothing to prefetch all
three are empty, and `needs_scheduler_warp` is False.

Coordinates are in CLUSTER units: all CTAs of a cluster always get the same tile; a CTA derives its
part from its rank in the cluster.  A cluster has `CLUSTER_SIZE` CTAs unless the class is one that
`of_clusters` made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import cutlass.cute as cute
from cutlass import Boolean, Int32

from .carried import Carried
from .order import TileOrder, TileProblem

# CTAs of one cluster, along x, unless a kernel has others; a pair that shares its tensor-core
# instructions.
CLUSTER_SIZE = 2

BARRIER_BYTES = 8
# One answer is read by slow roles while the next is already on its way.
NUM_STAGES = 2
# Of an answer: a clusterlaunchcontrol response (PTX ISA: a .b128 opaque handle), or a number.
RESPONSE_BYTES, NUMBER_BYTES = 16, 4
#: Shared memory of the dynamic schedulers, with padding: three barriers and an answer a stage.
CLC_SMEM_BYTES = NUM_STAGES * (3 * BARRIER_BYTES + RESPONSE_BYTES) + 16
COUNTER_SMEM_BYTES = NUM_STAGES * (3 * BARRIER_BYTES + NUMBER_BYTES)


@dataclass
class WorkTile(Carried):
    """One unit of work of a cluster: a block of rows of one head, or of a group of heads, of one
    batch entry.

    block: its number; what a block is, is the kernel's: query rows in the forward and dQ, keys in
    dK and dV.  Lives across dynamic loops.  The coordinates mean nothing where `is_valid`
    is False.
    """

    block: Int32
    head: Int32
    batch: Int32
    is_valid: Boolean

    CARRIED = ("block", "head", "batch", "is_valid")


def cluster_index(cluster_size: int) -> tuple[Int32, Int32]:
    """Return (index of this cluster, clusters in the grid) for the one-dimensional grids used
    here."""
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    return cta // cluster_size, num_ctas // cluster_size


@functools.cache
def of_clusters(scheduler: Any, cluster_size: int) -> Any:
    """The scheduler's class for clusters of so many CTAs."""
    if scheduler.cluster_size == cluster_size:
        return scheduler
    name = f"{scheduler.__name__}OfClustersOf{cluster_size}"
    return type(name, (scheduler,), {"cluster_size": cluster_size})


class TileScheduler(Protocol):
    """The protocol; see the module's docstring for how a kernel uses it."""

    # True if some warp of the leader CTA must call prefetch_next_work and producer_tail.
    needs_scheduler_warp: ClassVar[bool]

    # Running clusters cancel the launch of others (PTX ISA 9.7.14).
    cancels_clusters: ClassVar[bool]

    # CTAs of a cluster; see `of_clusters`.
    cluster_size: ClassVar[int]

    # Shared memory that `setup` allocates, with padding, in bytes.
    smem_bytes: ClassVar[int]

    @classmethod
    def grid_shape(cls, problem: TileProblem, max_active_clusters: Any) -> tuple[Any, int, int]:
        """The launch grid in CTAs; `max_active_clusters` as the device can hold at once."""

    @classmethod
    def setup(cls, allocator: Any, consumer_warps: int, counter: Any = None) -> Any:
        """Allocate and initialise what the roles share; called by all threads of all CTAs.

        `allocator` is a `cutlass.memory.SmemAllocator`; `consumer_warps` counts every warp of
        the cluster that runs the work loop, the scheduler warps included.  `counter` is a tensor of
        one int32 in global memory, for a scheduler that counts there.  The caller must fence the
        barrier initialisation and synchronise the cluster afterwards.
        """

    @classmethod
    def create(cls, order: TileOrder, channel: Any) -> TileScheduler:
        """The scheduler of one warp; `channel` is what `setup` returned."""

    def initial_work(self) -> WorkTile:
        """The first tile of this cluster."""

    def advance_to_next_work(self) -> WorkTile:
        """The next tile; called by all lanes of a warp together, not after an invalid tile."""

    def want_next_work(self) -> None:
        """Let the scheduler warp request the next tile; after a valid tile, once per tile."""

    def prefetch_next_work(self) -> None:
        """Request the next tile, once it is wanted; only after a valid tile, once per tile."""

    def producer_tail(self) -> None:
        """Wait until nobody uses what the scheduler warp produced, so that its CTA may exit."""
