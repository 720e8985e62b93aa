"""Dynamic persistent scheduling by cluster launch control (CLC).

The grid has one cluster per tile.  A running cluster asks the hardware to cancel the launch of a
cluster that has not started yet and takes over its tile (PTX ISA, clusterlaunchcontrol).  So fast
clusters do more tiles, without a counter in memory.

Protocol, for each slot of the response ring (`cutlass.pipeline.PipelineClcFetchAsync`):

===============  ====================================================================
full barrier     one in each CTA; count 1.  A lane of the leader's scheduler warp arms it
                 in every CTA (arrive.expect_tx, 16 bytes) before the multicast try_cancel,
                 whose response completes the bytes.  Waited for by every consumer warp of
                 that CTA before it reads the response.
empty barrier    in the leader CTA; one arrival per consumer warp of BOTH CTAs after its read
                 of the response.  Waited for by the leader's scheduler warp before it arms
                 the slot again, and in `producer_tail`.
wanted barrier   in the leader CTA; count 1.  The warp that is to know the next tile first
                 arrives when it will want it soon.  Waited for by the leader's scheduler warp
                 before it makes the query; all its phases, so nothing arrives at a CTA that is
                 gone.
===============  ====================================================================

* The response is decoded from one 128-bit load; one fence orders that generic read before the
  next asynchronous write and releases the CTA's shared memory at cluster scope; then the warp
  arrives.
* No try_cancel follows an observed failure: a query is made only in an iteration that has a valid
  tile, and its response is read before the next.
* So one request is under way at a time: a tile granted after a failure would never be done.
* A failure need not mean the end of the grid (CUDA Programming Guide 4.12: a kernel of higher
  priority waits).  The cluster ends; what is left is launched later and goes on requesting.
* Every warp takes part in every response, the failed one included; phases carry across tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Int128, pipeline
from cutlass._mlir.dialects import nvvm

from .coordinates import make_work_tile
from .dynamic import LEADER, DynamicScheduler, give_back, want
from .order import TileProblem
from .protocol import CLC_SMEM_BYTES, NUM_STAGES, RESPONSE_BYTES, WorkTile


@dataclass(frozen=True)
class ClcChannel:
    """State shared by the roles: the pipeline's barriers, the barriers of wanted queries, and the
    ring of responses in SMEM."""

    pipeline: pipeline.PipelineClcFetchAsync
    wanted: pipeline.MbarrierArray
    responses: cute.Pointer


@cute.jit
def _wait_until_wanted(wanted: pipeline.MbarrierArray, state: pipeline.PipelineState) -> None:
    """Wait, in the leader CTA, until the next tile is wanted."""
    if cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) == LEADER:
        wanted.wait(state.index, state.phase)


@cute.jit
def _query(
    channel: pipeline.PipelineClcFetchAsync, state: pipeline.PipelineState, slot: cute.Pointer
) -> None:
    """Wait for the slot, arm its full barriers and issue try_cancel, in the leader CTA."""
    if cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) == LEADER:
        channel.producer_acquire(state)
        # All barriers are armed before the one elected lane issues.
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.issue_clc_query(channel.producer_get_barrier(state), slot)


# clusterlaunchcontrol.query_cancel (PTX ISA 9.7.14).  The ctaid of a request that failed is
# undefined, so it is read under the predicate; written out because the compiler takes the query
# for pure and hoists it out of a branch.
_DECODE = """{
.reg .pred cancelled;
.reg .b128 response;
ld.shared.b128 response, [{$r0}];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 cancelled, response;
selp.b32 {$w1}, 1, 0, cancelled;
mov.b32 {$w0}, 0;
@cancelled clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 {$w0}, response;
}"""


def _decode(slot: cute.Pointer) -> tuple[Int32, Boolean]:
    """Return (ctaid.x of the cancelled cluster's first CTA, whether a cluster was cancelled)."""
    first_cta, is_cancelled = cute.arch.inline_ptx(
        _DECODE, write_only_types=[Int32, Int32], read_only_args=[slot.toint()]
    )
    return first_cta, is_cancelled != 0


@cute.jit
def _wait_for_empty(channel: pipeline.PipelineClcFetchAsync, state: pipeline.PipelineState) -> None:
    """Wait, in the leader CTA, until all have read the slot's last response."""
    if cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) == LEADER:
        channel.sync_object_empty.wait(state.index, state.phase)


class ClcScheduler(DynamicScheduler):
    """One warp's view of the cluster's sequence of tiles."""

    cancels_clusters: ClassVar[bool] = True
    smem_bytes: ClassVar[int] = CLC_SMEM_BYTES

    @classmethod
    def grid_shape(cls, problem: TileProblem, max_active_clusters: Any) -> tuple[Any, int, int]:
        """Return one cluster per tile; running clusters cancel waiting ones."""
        return problem.num_tiles * cls.cluster_size, 1, 1

    @classmethod
    def setup(cls, allocator: Any, consumer_warps: int, counter: Any = None) -> ClcChannel:
        """Allocate barriers and responses (40 bytes a stage, with padding) and set them up."""
        barriers = allocator.allocate_array(Int64, 3 * NUM_STAGES)
        # Int128 elements, so that the pointer to any slot is known to be aligned to 16 bytes.
        responses = allocator.allocate_array(Int128, NUM_STAGES, byte_alignment=RESPONSE_BYTES)
        channel = pipeline.PipelineClcFetchAsync.create(
            num_stages=NUM_STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumer_warps),
            tx_count=RESPONSE_BYTES,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, cls.cluster_size, 1, 1)),
            defer_sync=True,
        )
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        wanted = pipeline.MbarrierArray(
            barriers + 2 * NUM_STAGES, NUM_STAGES, (pipeline.PipelineOp.AsyncThread, one)
        )
        return ClcChannel(channel, wanted, responses)

    def want_next_work(self) -> None:
        """Let the scheduler warp request the next tile, in the leader CTA; do nothing elsewhere.
        Called by one whole warp per CTA, after a valid tile, once per tile. No warp gets the next
        tile before."""
        want(self.channel.wanted, self.consumer)

    def prefetch_next_work(self) -> None:
        """Request the next tile for both CTAs once it is wanted, in the leader CTA; do nothing
        elsewhere. Called by one whole warp per CTA, after a valid tile, once per tile."""
        # The response that this warp reads next is the one that was wanted.
        _wait_until_wanted(self.channel.wanted, self.consumer)
        _query(self.channel.pipeline, self.producer, self._response(self.producer))
        self.producer.advance()

    def advance_to_next_work(self) -> WorkTile:
        """Wait for the response of the outstanding query, read it and give the slot back."""
        channel = self.channel.pipeline
        channel.consumer_wait(self.consumer)
        first_cta, is_valid = _decode(self._response(self.consumer))
        # Every lane has read the slot before the warp's one arrival allows the next write to it.
        cute.arch.sync_warp()
        # Towards the async proxy and releasing: PTX ISA 9.7.13.4, the machine code of either alone.
        nvvm.fence_proxy_sync_restrict(
            nvvm.MemOrderKind.RELEASE,
            from_proxy=nvvm.ProxyKind.GENERIC,
            to_proxy=nvvm.ProxyKind.async_,
        )
        give_back(lambda: channel.consumer_get_barrier(self.consumer), is_released=True)
        self.consumer.advance()
        return make_work_tile(first_cta // self.cluster_size, is_valid, self.order)

    def producer_tail(self) -> None:
        """Wait, in the leader CTA, until the consumers of both CTAs have given every slot back.

        The peer's arrivals come from another CTA, so this one must not exit before them. Only the
        empty barriers are waited for: acquiring the slots would arm barriers of a peer that may be
        gone.
        """
        for _ in range(NUM_STAGES):
            _wait_for_empty(self.channel.pipeline, self.producer)
            self.producer.advance()

    def _response(self, state: pipeline.PipelineState) -> cute.Pointer:
        return self.channel.responses + state.index
