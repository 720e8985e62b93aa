"""Dynamic persistent scheduling by a counter in global memory, where there is no cluster launch
control.

As many clusters as run at once are launched.  Each begins with the tile of its own number; for the
next one its leader counts on: the n-th count of all clusters is tile number (clusters + n).  So
fast clusters do more tiles.

NOTE [who zeroes the counter].  Nobody has to.  A cluster counts once for every tile that it does,
and once more in vain, which stands for its first tile, that nobody counted: as often as there are
tiles, in all.  The count is atom.inc with the wrap-around at that number (PTX ISA 9.7.14.6), so the
last one leaves 0 for the next launch, without a kernel or a memset before it.  It must be 0 once,
and of one launch at a time.

Protocol, for each slot of a ring of tile numbers:

===============  ====================================================================
full barrier     one in each CTA; count 1.  The leader's scheduler warp arrives when the number is
                 in shared memory; in clusters of several CTAs it announces the bytes of a store
                 to each (st.async), which completes them.  Waited for by every consumer warp.
empty barrier    in the leader CTA; one arrival per consumer warp of all CTAs after its read.
                 Waited for by the leader's scheduler warp before it writes the slot again,
                 and in clusters of several CTAs in `producer_tail`.
wanted barrier   in the leader CTA; count 1, as in `clc`.
===============  ====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, pipeline

from .coordinates import make_work_tile
from .dynamic import LEADER, DynamicScheduler, give_back, want
from .order import TileOrder, TileProblem
from .protocol import COUNTER_SMEM_BYTES, NUM_STAGES, WorkTile, cluster_index, of_clusters
from .static import StaticPersistentScheduler

#: Stands in the ring for the end of the tiles.
NO_TILE = -1


@dataclass(frozen=True)
class CounterChannel:
    """State shared by the roles: barriers, the ring of tile numbers in SMEM, the counter's
    address."""

    full: pipeline.MbarrierArray
    empty: pipeline.MbarrierArray
    wanted: pipeline.MbarrierArray
    numbers: cute.Tensor
    counter: Int64


_COUNT = "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};"

# To the same places of the CTA of rank r2 (PTX ISA 9.7.9, mapa; 9.7.14, st.async).
_STORE = """{
.reg .b32 number, full;
mapa.shared::cluster.u32 number, {$r0}, {$r2};
mapa.shared::cluster.u32 full, {$r1}, {$r2};
mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [full], 4;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [number], {$r3}, [full];
}"""


@cute.jit
def _fetch(
    channel: CounterChannel, order: TileOrder, slot: Int32, cluster_size: cutlass.Constexpr
) -> None:
    """Count, and put the number of the next tile into the ring; run by the leader's scheduler
    warp."""
    lane = cute.arch.lane_idx()
    number = Int32(0)
    if lane == 0:
        _, clusters = cluster_index(cluster_size)
        count = cute.arch.inline_ptx(
            _COUNT, write_only_types=[Int32], read_only_args=[channel.counter, order.num_tiles - 1]
        )
        # Compared first: the sum could pass 2**31.
        number = Int32(NO_TILE)
        if count < order.num_tiles - clusters:
            number = count + clusters
    full = channel.full.get_barrier(slot)
    if cutlass.const_expr(cluster_size == 1):
        if lane == 0:
            channel.numbers[slot] = number
            cute.arch.mbarrier_arrive(full)
    else:
        number = cute.arch.shuffle_sync(number, 0)
        if lane < cluster_size:
            place = (channel.numbers.iterator + slot).toint()
            cute.arch.inline_ptx(
                _STORE, read_only_args=[Int32(place), Int32(full.toint()), lane, number]
            )


@cute.jit
def _prefetch(scheduler: Any) -> None:
    """Fetch the next tile once it is wanted and its slot is free, in the leader CTA."""
    channel, size = scheduler.channel, scheduler.cluster_size
    is_leader = Boolean(True)
    if cutlass.const_expr(size > 1):
        is_leader = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) == LEADER
    if is_leader:
        channel.wanted.wait(scheduler.consumer.index, scheduler.consumer.phase)
        channel.empty.wait(scheduler.producer.index, scheduler.producer.phase)
        _fetch(channel, scheduler.order, scheduler.producer.index, size)


@cute.jit
def _wait_for_empty(scheduler: Any) -> None:
    """Wait, in the leader CTA, until all have read the slot's last number."""
    if cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) == LEADER:
        scheduler.channel.empty.wait(scheduler.producer.index, scheduler.producer.phase)


class CounterScheduler(DynamicScheduler):
    """One warp's view of the cluster's sequence of tiles."""

    smem_bytes: ClassVar[int] = COUNTER_SMEM_BYTES

    @classmethod
    def grid_shape(cls, problem: TileProblem, max_active_clusters: Any) -> tuple[Any, int, int]:
        """Return the grid: the clusters that run at once, at most one per tile. Each has a first
        tile, or the count would not come out."""
        return of_clusters(StaticPersistentScheduler, cls.cluster_size).grid_shape(
            problem, max_active_clusters
        )

    @classmethod
    def setup(cls, allocator: Any, consumer_warps: int, counter: Any = None) -> CounterChannel:
        """Allocate barriers and numbers (28 bytes a stage) and set the barriers up.

        counter: one int32 in global memory, 0; NOTE [who zeroes the counter].
        """
        barriers = allocator.allocate_array(Int64, 3 * NUM_STAGES)
        numbers = allocator.allocate_array(Int32, NUM_STAGES)

        def ring(index: int, arrivals: int) -> pipeline.MbarrierArray:
            group = pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals)
            return pipeline.MbarrierArray(
                barriers + index * NUM_STAGES, NUM_STAGES, (pipeline.PipelineOp.AsyncThread, group)
            )

        return CounterChannel(
            ring(0, 1),
            ring(1, consumer_warps),
            ring(2, 1),
            cute.make_tensor(numbers, cute.make_layout(NUM_STAGES)),
            counter.iterator.toint(),
        )

    def want_next_work(self) -> None:
        """Let the scheduler warp count, in the leader CTA; do nothing elsewhere. Called by one
        whole warp per CTA, after a valid tile, once per tile."""
        if self.cluster_size > 1:
            want(self.channel.wanted, self.consumer)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.channel.wanted.get_barrier(self.consumer.index))

    def prefetch_next_work(self) -> None:
        """Count once the next tile is wanted, in the leader CTA; do nothing elsewhere. Called by
        one whole warp per CTA, after a valid tile, once per tile."""
        _prefetch(self)
        self.producer.advance()

    def advance_to_next_work(self) -> WorkTile:
        """Wait for the next number, read it and give the slot back."""
        channel, slot = self.channel, self.consumer.index
        channel.full.wait(slot, self.consumer.phase)
        number = channel.numbers[slot]
        # Every lane has read the slot before the warp's one arrival allows the next write to it.
        cute.arch.sync_warp()
        if self.cluster_size > 1:
            give_back(lambda: channel.empty.get_barrier(slot))
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(channel.empty.get_barrier(slot))
        self.consumer.advance()
        return make_work_tile(number, number >= 0, self.order)

    def producer_tail(self) -> None:
        """Wait, in the leader CTA, until the consumers of all CTAs have given every slot back, as
        in `clc`. A cluster of one CTA has nobody to wait for."""
        if self.cluster_size > 1:
            for _ in range(NUM_STAGES):
                _wait_for_empty(self)
                self.producer.advance()
