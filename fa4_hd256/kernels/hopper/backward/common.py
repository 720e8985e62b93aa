"""Base of the Hopper kernels that make gradients: clusters of two CTAs, each with a warpgroup that
loads and two that multiply.

It has what is the same in all of them: the launch, set-up and dispatch, one TMA load, the change of
scores, and how results leave.  The roles `load` and `gradient` stand in each kernel's own file.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers.order import TileOrder, TileProblem
from ....schedulers.protocol import WorkTile
from ...backward.common import BackwardContext as Context
from ...backward.common import BackwardEntry, BackwardKernelTensors
from ...context import KernelParts, schedule, shared_fields
from ...operands import LoadTarget, SharedMemory, TmaTensor, load_tile, prefetch_tile
from ...plan.edges import RingRecord
from ...problem_class import CallScalars, GradientClass
from ...rows.sequences import Sequence, TilePlace
from ..fragments import store_row
from ..instructions import WgmmaShape, commit, fence, multiply, row_of_fragment, rows_of
from .config import GradientConfig

BOTH_CTAS = 0b11


class HopperBackward(BackwardEntry):
    """Base of these kernels.

    A kernel adds `boxes`, see `BackwardEntry`; `tiles`, which knows its tiles and their steps: a
    `KeyRows`, `QueryRows` or `LaunchTiles`; `smem(memory)`, its buffers by name; and the roles
    `load`, of one warp of each CTA, and `gradient`, of a warpgroup for 64 rows of each tile.
    score: shape of S and dP.  shared_boxes: those that both CTAs need, of which each loads half of
    the columns for both.
    """

    shared_boxes: tuple[str, ...] = ()
    tiles: Any
    score: WgmmaShape
    smem: Any
    load: Any
    gradient: Any

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        self.plan = config.plan
        self.problem_class = gradient_class.problem
        self.dtype = self.problem_class.element_type
        self.parts, self.scheduler = parts, parts.scheduler
        self.warps, self.edges = self.plan.warps, self.plan.edges
        # Slopes of scores take registers, and the MMAs follow one another.
        self.capped = self.functions.change.has_slopes

    def problem(
        self, scalars: CallScalars, operands: tuple[cute.Tensor, ...], batch: Any
    ) -> TileProblem:
        return self.tiles.problem(scalars, operands, batch)

    def copy_operation(self, box: str) -> Any:
        """The DSL's TMA load of one of `boxes`; shared ones by halves of the columns."""
        if box in self.shared_boxes:
            return cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.CopyBulkTensorTileG2SOp()

    @cute.kernel
    def kernel(
        self,
        tensors: BackwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ):
        """Set-up, then each warp runs its role, then tear-down."""
        warps = self.warps
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == warps.load:
            for tma in tensors.loads:
                cpasync.prefetch_descriptor(tma.atom)
        context = self.set_up(SmemAllocator(), tensors, sizes, scalars, order)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        if warp < warps.load:
            cute.arch.setmaxregister_increase(warps.registers_gradient)
            self.gradient(context)
        else:
            cute.arch.setmaxregister_decrease(warps.registers_other)
            if warp == warps.load:
                self.load(context)
            if warp == warps.scheduler:
                schedule(self.scheduler, context)
        # Nobody may leave while the peer still signals it or loads into its memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: BackwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> Context:
        memory = SharedMemory(allocator, self.plan.smem, self.dtype)
        return Context(
            **shared_fields(self, allocator, memory, tensors, sizes, scalars, order),
            cta_rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
            smem=self.smem(memory),
        )

    @property
    def scheduled_warps(self) -> int:
        return self.warps.scheduled_warps

    # ------------------------------------------------------------------------------------- load

    def next_buffer(self, context: Context, ring: str, states: RingRecord) -> LoadTarget:
        """Wait until a ring's next buffer is free, and expect its bytes; return (barrier, number of
        the buffer).  The state of `<ring>_free` advances when all copies have been issued."""
        state, loaded = states[f"{ring}_free"], context.barriers[f"{ring}_loaded"]
        context.barriers[f"{ring}_free"].wait(state)
        loaded.expect_bytes(state)
        return loaded.pointer(state), 0 if loaded.edge.stages == 1 else state.index

    def load_box(
        self,
        context: Context,
        box: str,
        place: TilePlace,
        barrier: cute.Pointer,
        buffer: cute.Tensor,
        evict_last: bool = False,
    ) -> None:
        """One TMA load, of half of the columns for both CTAs where they share it.  place: see
        `tma_tile`.  buffer: rows x columns of SMEM.  evict_last: see `operands.load_box`."""
        mask = Int16(BOTH_CTAS) if box in self.shared_boxes else None
        part = self._loaded_part(context, box, buffer)
        source = self._source(context, box)
        load_tile(source, part, place, barrier, 0, multicast=mask, evict_last=evict_last)

    def prefetch_box(
        self, context: Context, box: str, place: TilePlace, buffer: cute.Tensor
    ) -> None:
        """Prefetch into L2 what a load is to bring into a buffer."""
        part = self._loaded_part(context, box, buffer)
        prefetch_tile(self._source(context, box), part, place)

    def _source(self, context: Context, box: str) -> TmaTensor:
        return context.tensors.loads[list(self.boxes).index(box)]

    def _loaded_part(self, context: Context, box: str, buffer: cute.Tensor) -> cute.Tensor:
        """Return what this CTA's load fills of a buffer, as one of one stage."""
        if box in self.shared_boxes:
            _, rows, columns = self.boxes[box]
            buffer = cute.local_tile(buffer, (rows, columns), (0, context.cta_rank))
        return cute.make_tensor(buffer.iterator, cute.append(buffer.layout, cute.make_layout(1)))

    # ------------------------------------------------------------------------- scores and results

    def issue_scores(
        self,
        context: Context,
        ring: str,
        operands: tuple[cute.Tensor, cute.Tensor],
        result: cute.Tensor,
        states: RingRecord,
    ) -> None:
        """Issue S or dP, a group.  operands: A, which stays, and the ring's buffers of B."""
        a, b = operands
        state = states[f"{ring}_loaded"]
        context.barriers[f"{ring}_loaded"].wait(state)
        fence()
        multiply(self.score, result, a, b[None, None, None, state.index], False)
        commit()

    def change_scores(self, context: Context, s: cute.Tensor, work: WorkTile, position: Any) -> Any:
        """Scores of a step as the mask takes them, in place; returns what makes their slopes, see
        `SlopedChange.apply_for_slopes`."""
        if self.problem_class.negative_scale:
            s.store(-s.load())
        if not self.functions.change.exists:
            return None
        places = None
        if self.functions.change.by_place:
            locate = self.tiles.locator(context, work, position)
            places = self.functions.score_places(context, work, locate)
        return self.functions.change.apply_for_slopes(s, context.scalars.cap_scale, places)

    @cute.jit
    def store(
        self,
        sums: cute.Tensor,
        result: cute.Tensor,
        sequence: Sequence,
        first_row: Int32,
        head: Int32,
    ):
        """The sums of 64 rows x 256 to global memory.  first_row: of the warpgroup."""
        for number in cutlass.range_constexpr(2):
            row = first_row + row_of_fragment(number)
            target = result[sequence.offset + row, None, head, sequence.batch]
            store_row(rows_of(sums)[number], target, row < sequence.length)
