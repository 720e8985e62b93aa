"""Base of the dynamic schedulers: one warp of the leader CTA requests answers into a ring that all
warps of the cluster read.

Each slot has three barriers, full, empty and wanted: `clc` and `counter` say who arrives at them
and who waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass._mlir.dialects import nvvm

from .carried import Carried
from .coordinates import make_work_tile
from .order import TileOrder
from .protocol import CLUSTER_SIZE, NUM_STAGES, WorkTile, cluster_index

# The CTA of the cluster whose scheduler warp sends the requests.
LEADER = 0


@cute.jit
def want(wanted: pipeline.MbarrierArray, state: pipeline.PipelineState) -> None:
    """Arrive once for the warp, in the leader CTA."""
    if cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) == LEADER:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(wanted.get_barrier(state.index))


def give_back(empty: Callable[[], cute.Pointer], is_released: bool = False) -> None:
    """One arrival of a warp at the leader's empty barrier of a slot that all its lanes read.
    is_released: a fence of the whole warp, behind the reads, has released its shared memory."""
    with cute.arch.elect_one():
        if not is_released:
            # The hand-off crosses CTAs and concerns shared memory alone: a release that left global
            # memory in would wait for the whole GPU to see it (PTX ISA 9.7.13.4).
            nvvm.fence_sync_restrict(nvvm.MemOrderKind.RELEASE)
        cute.arch.mbarrier_arrive(empty(), LEADER, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)


class DynamicScheduler(Carried):
    """One warp's view of the cluster's sequence of tiles.  channel: what the roles share, as
    `setup` of the scheduler returns it."""

    CARRIED = ("consumer", "producer")
    needs_scheduler_warp: ClassVar[bool] = True
    cancels_clusters: ClassVar[bool] = False
    cluster_size: ClassVar[int] = CLUSTER_SIZE

    def __init__(
        self,
        order: TileOrder,
        channel: Any,
        consumer: pipeline.PipelineState,
        producer: pipeline.PipelineState,
    ) -> None:
        self.order = order
        self.channel = channel
        self.consumer = consumer
        self.producer = producer

    @classmethod
    def create(cls, order: TileOrder, channel: Any) -> Any:
        """The scheduler of one warp; `channel` is what `setup` returned."""
        consumer = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, NUM_STAGES)
        producer = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, NUM_STAGES)
        return cls(order, channel, consumer, producer)

    def initial_work(self) -> WorkTile:
        """Tile number `cluster index`; where each tile has a cluster, that of its own launch."""
        index, _ = cluster_index(self.cluster_size)
        return make_work_tile(Int32(index), Boolean(True), self.order)
