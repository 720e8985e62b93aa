"""The Hopper forward: out = softmax(scale * Q K^T) V and LSE at head_dim 256.

A CTA works on 128 query rows, of one head or of all heads that share a KV head; two warpgroups on
64 of them each, with S, P and O in registers.  One warp loads.  In a cluster of two the CTAs work
on neighbouring rows, and each loads half of the columns of every K and V tile for both.

Timeline of one CTA; QK(i) makes S(i), PV(i) adds P(i) V(i) to O, 0' is the next tile's first step::

    load          K(0) Q K(1) V(0) K(2) V(1) ..       V(last) K(0') Q' K(1') V(0') ..
    warpgroup 0   QK(0) S(0)->P(0)  QK(1) PV(0)  QK(2) PV(1) ..   PV(last) O -> global  QK(0')
                                          S(1)->P(1)   S(2)->P(2)
    warpgroup 1   the same, for its own rows

A warpgroup issues QK(i + 1) and PV(i) together and makes P(i + 1) while PV(i) runs; nothing ties
the warpgroups together but the buffers, so that one multiplies while the other rounds or stores.

The tables of roles, barriers and SMEM: `ForwardConfig`; docs/forward.md.

NOTE [exponentials before the wait].  A warp that waits for its MMAs does nothing else, and ptxas
moves arithmetic across such a wait: half of the exponentials would come after PV, which is there to
hide them.  It does not move them across the loop of an mbarrier wait: that for the next V, which is
there by then, stands between the two.

NOTE [O leaves from registers].  A quad of lanes exchanges the words of a row until each lane has 16
bytes in a row, and stores 64 bytes of a row at a time.  No buffer is needed: Q of the next tile
arrives while the last P of this one is made.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers import TileOrder, scheduler_class
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...limits import HEAD_DIM
from ...operands import SharedMemory
from ...problem_class import ProblemClass, query_rows
from ...rows.sequences import Sequences
from ...scalars import CallScalars
from ...scheduler_role import SchedulerRole
from ..instructions import WgmmaShape
from .config import ForwardConfig
from .consumers import ForwardConsumer
from .context import HopperForwardContext
from .plan import WARPGROUP_ROWS
from .producers import ForwardProducer

__all__ = ["ForwardKernel"]


class ForwardKernel(ForwardCommon, SchedulerRole, ForwardProducer, ForwardConsumer):
    """The forward kernel for one configuration.

    config: tile shapes, stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    scheduler: a class of the `schedulers` protocol; None for that of the problem class.

    Called under `cute.compile`; see `__call__` for the arguments at run time.
    """

    def __init__(
        self, config: ForwardConfig, problem_class: ProblemClass, scheduler: Any = None
    ) -> None:
        self.config, self.problem_class = config, problem_class
        self.dtype = problem_class.element_type
        self.scheduler = scheduler or scheduler_class(
            problem_class.use_clc, config.ctas, counts=True
        )
        self.warps, self.edges, self.smem_plan = config.warps, config.edges, config.smem
        # Rows of a query.
        of_query = self.query_rows = query_rows(problem_class.packed_heads, WARPGROUP_ROWS)
        # Queries of a cluster's tile, of a CTA and of a warpgroup.
        self.tile_queries = config.tile_q // of_query
        self.block_queries = config.block_q // of_query
        self.part_queries = WARPGROUP_ROWS // of_query
        self.load_keys = config.block_kv
        self.qk = WgmmaShape(self.dtype, config.block_kv)
        self.pv = WgmmaShape(self.dtype, HEAD_DIM, a_in_registers=True, b_mn_major=True)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
    ) -> ForwardKernelTensors:
        """TMA descriptors of Q, K and V, and the plain tensors."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        boxes = (load, WARPGROUP_ROWS, HEAD_DIM), self.kv_copy(), self.kv_copy()
        q, k, v = (
            self.tma_tensor(name, view, box)
            for name, view, box in zip("qkv", operands[:3], boxes, strict=True)
        )
        return ForwardKernelTensors(q, k, v, None, operands[3], lse, optional)

    @cute.kernel
    def kernel(self, tensors: Any, sizes: tuple[Int32, ...], scalars: Any, order: Any):
        """Set-up, then each warp runs its role."""
        self.allow_next()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.warps.load:
            for tma in (tensors.q, tensors.k, tensors.v):
                cpasync.prefetch_descriptor(tma.atom)
        context = self.set_up(SmemAllocator(), tensors, sizes, scalars, order)
        cute.arch.mbarrier_init_fence()
        self._synchronise()
        if warp < self.warps.load:
            cute.arch.setmaxregister_increase(self.warps.registers_consumers)
            self.consume(context)
        else:
            cute.arch.setmaxregister_decrease(self.warps.registers_other)
            if warp == self.warps.load:
                self.load(context)
            if warp == self.warps.scheduler:
                self.schedule(context)
        # Nobody may leave while the peer still signals it.
        if cutlass.const_expr(self.config.ctas > 1):
            self._synchronise()

    def _synchronise(self) -> None:
        """All threads of the cluster."""
        if self.config.ctas > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> HopperForwardContext:
        """Lay out shared memory as the plan says and initialise the barriers."""
        memory = SharedMemory(allocator, self.smem_plan, self.dtype)
        sink, ragged = self.sink_and_ragged(tensors.optional)
        entries = self.cache_entries(tensors)
        sequences = Sequences(self.sequence_tensors(ragged), *sizes[:2], entries=entries)
        rank = Int32(0)
        if self.config.ctas > 1:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return HopperForwardContext(
            tensors=tensors,
            barriers=self.edges.bind(memory.region("barriers", cutlass.Int64, 8)),
            sequences=sequences,
            mask=self.problem_class.mask,
            scalars=scalars,
            heads_per_kv=sizes[2],
            order=order,
            channel=self.scheduler.setup(
                allocator, self.config.ctas * self.warps.scheduled_warps, scalars.tile_counter
            ),
            cta_rank=rank,
            smem=self._operands(memory),
            sink=sink,
            num_splits=sizes[3] if self.problem_class.split else None,
        )

    def _operands(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config
        rows, ctas = config.block_kv, config.ctas
        found = {"q": memory.operand("q", WARPGROUP_ROWS, HEAD_DIM, config.warpgroups)}
        for name, stages in (("k", config.k_stages), ("v", config.v_stages)):
            # Columns lie by blocks, so that half of them are a tile of their own.
            found[name] = memory.operand(name, rows, HEAD_DIM // ctas, stages * ctas)
            found[f"{name}_tiles"] = memory.operand(name, rows, HEAD_DIM, stages)
        return found

    def first_row(self, context: HopperForwardContext, work: Any, warpgroup: Any) -> Int32:
        """The first query of a warpgroup's part of a tile."""
        first = work.block * self.tile_queries + context.cta_rank * self.block_queries
        return first + warpgroup * self.part_queries
