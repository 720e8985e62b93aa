"""Base of the Hopper kernels that make gradients: clusters of two CTAs, each with a warpgroup that
loads and two that multiply."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers import WorkTile, scheduler_class
from ...backward.common import BackwardContext, BackwardEntry
from ...limits import HEAD_DIM
from ...operands import LoadTarget, SharedMemory, TmaTensor, load_tile, prefetch_tile
from ...plan.steps import Copy, Load
from ...problem_class import GradientClass
from ...ranges import traced
from ...rows.sequences import Sequence, Sequences, TilePlace
from ...scheduler_role import SchedulerRole
from ..instructions import (
    QUAD,
    WgmmaShape,
    row_of_fragment,
    rows_of,
    transpose_quad,
)
from .config import CTAS, GradientConfig

__all__ = ["BOTH_CTAS", "HopperBackward", "ScoreGradient"]

BOTH_CTAS = 0b11
RUN = 8  # columns of a row of which a quad has two per lane


class HopperBackward(BackwardEntry, SchedulerRole):
    """Base of these kernels: host code, set-up, dispatch, and how results leave.

    A kernel adds `boxes` and `problem(...)`, see `BackwardEntry`; `smem(memory)`;
    `places(context, box, work, position)`, where a box comes from (see `tma_tile`); and the role
    `gradient`.
    """

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, scheduler: Any = None
    ) -> None:
        self.plan = config.plan
        self.problem_class = gradient_class.problem
        self.dtype = self.problem_class.element_type
        self.scheduler = scheduler or scheduler_class(self.problem_class.use_clc, CTAS, counts=True)
        self.warps, self.edges = self.plan.warps, self.plan.edges
        self.steps = self.plan.steps_of(self.change.has_slopes)

    def copy_operation(self, box: str) -> Any:
        """The DSL's TMA load of one of `boxes`; of some each CTA loads half of the columns for
        both."""
        if box in self.shared_boxes():
            return cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.CopyBulkTensorTileG2SOp()

    def shared_boxes(self) -> set[str]:
        """Boxes that both CTAs load, half of the columns each, for both."""
        return {copy.box for copy in self.steps.copies if copy.is_shared}

    @cute.kernel
    def kernel(self, tensors: Any, sizes: tuple[Int32, ...], scalars: Any, order: Any):
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
                self.schedule(context)
        # Nobody may leave while the peer still signals it or loads into its memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: Any,
        sizes: tuple[Int32, ...],
        scalars: Any,
        order: Any,
    ) -> BackwardContext:
        """Lay out shared memory as the plan says and initialise the barriers.

        sizes: seqlen_q, seqlen_k, query heads for each KV head.
        """
        seqlen_q, seqlen_k, heads_per_kv = sizes
        memory = SharedMemory(allocator, self.plan.smem, self.dtype)
        return BackwardContext(
            tensors=tensors,
            barriers=self.edges.bind(memory.region("barriers", cutlass.Int64, 8)),
            sequences=Sequences(self.sequence_tensors(tensors.ragged), seqlen_q, seqlen_k),
            mask=self.problem_class.mask,
            scalars=scalars,
            heads_per_kv=heads_per_kv,
            order=order,
            channel=self.scheduler.setup(
                allocator, self.warps.scheduled_warps, scalars.tile_counter
            ),
            cta_rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
            smem=self.smem(memory),
        )

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: BackwardContext):
        """Fill what the table of steps says, in its order; one warp of each CTA."""
        first, later = (self.steps.loads_of("load", is_first) for is_first in (True, False))
        # Steps of a tile are alike behind what is loaded once per tile, where that comes first.
        alike = first[-len(later) :] == later
        begin, rest = (first[: -len(later)], 0) if alike else (first, 1)
        claims = int(self.steps.claims)
        states = self.edges.waiter_states(*(ring.freed for ring in self.steps.filled_rings))
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            own_context = context.of_tile(work)
            num_steps = self.num_steps(own_context, work)
            self.want_next_tile_if(scheduler, num_steps < claims + rest)
            if num_steps > 0:
                position = self.first_position(own_context, work)
                states = self._fill_all(own_context, begin, (work, position), states)
                self._ask_ahead(own_context, begin, (work, position), num_steps > 1)
                for step in cutlass.range(rest, num_steps, unroll=1):
                    self.want_next_tile_if(scheduler, step + claims == num_steps)
                    if cutlass.const_expr(not alike):
                        position = self.next_position(position)
                    states = self._fill_all(own_context, later, (work, position), states)
                    self._ask_ahead(own_context, later, (work, position), step + 1 < num_steps)
                    if cutlass.const_expr(alike):
                        position = self.next_position(position)
            work = scheduler.advance_to_next_work()

    def _fill_all(
        self,
        context: BackwardContext,
        loads: tuple[Load, ...],
        which: tuple[WorkTile, Any],
        states: Any,
    ) -> Any:
        """Fill the buffers of several loads.  which: (tile, position)."""
        for load in loads:
            for piece in range(load.pieces):
                states = traced("load")(self._fill)(context, load, (*which, piece), states)
        return states

    @cute.jit
    def _fill(
        self, context: BackwardContext, load: Load, which: tuple[WorkTile, Any, Any], states: Any
    ):
        """The next buffer of a ring, once it is free.  which: (tile, position, piece)."""
        ring = self.steps.ring(load.ring)
        state, loaded = states[ring.freed], context.barriers[ring.full]
        context.barriers[ring.freed].wait(state)
        loaded.expect_bytes(state)
        buffer = 0 if cutlass.const_expr(loaded.edge.stages == 1) else state.index
        for copy in load.copies:
            self.copy(context, copy, which, (loaded.pointer(state), buffer))
        states.advance(ring.freed)
        return states

    @cute.jit
    def _ask_ahead(
        self,
        context: BackwardContext,
        loads: tuple[Load, ...],
        which: tuple[WorkTile, Any],
        exists: Boolean,
    ):
        """Prefetch into L2 what some loads bring in the next step, if it exists.  which: (tile,
        position)."""
        asked = [
            copy
            for load in loads
            for copy in load.copies
            if load.asked_ahead and copy.box in self.boxes
        ]
        if cutlass.const_expr(asked):
            if exists:
                work, position = which
                following = self.next_position(position)
                for copy in asked:
                    place = self.places(context, copy.box, work, following)
                    own = self._loaded_part(context, copy, context.smem[copy.memory][None, None, 0])
                    prefetch_tile(self._source(context, copy), own, place)

    def copy(
        self,
        context: BackwardContext,
        copy: Copy,
        which: tuple[WorkTile, Any, Any],
        target: LoadTarget,
    ) -> None:
        """One copy.  which: (tile, position, piece).  target: (barrier, buffer)."""
        (work, position, _), (barrier, buffer), smem = which, target, context.smem[copy.memory]
        if copy.box in self.boxes:
            place = self.places(context, copy.box, work, position)
            self.load_box(context, copy, place, (barrier, smem[None, None, buffer]))
        else:
            place = barrier, smem[None, buffer]
            self.load_stats(context, copy.box, (work, position), place)

    def load_box(
        self,
        context: BackwardContext,
        copy: Copy,
        place: TilePlace,
        target: tuple[cute.Pointer, cute.Tensor],
    ) -> None:
        """One TMA load, of half of the columns for both CTAs where they share it.  place: see
        `tma_tile`.  target: (barrier, tensor of SMEM)."""
        barrier, smem = target
        mask = Int16(BOTH_CTAS) if copy.is_shared else None
        own = self._loaded_part(context, copy, smem)
        load_tile(
            self._source(context, copy),
            own,
            place,
            barrier,
            0,
            multicast=mask,
            is_kept=copy.is_kept,
        )

    def _source(self, context: BackwardContext, copy: Copy) -> TmaTensor:
        """Return the TMA tensor of a copy of one of `boxes`."""
        return context.tensors.loads[list(self.boxes).index(copy.box)]

    def _loaded_part(
        self, context: BackwardContext, copy: Copy, buffer: cute.Tensor
    ) -> cute.Tensor:
        """Return what this CTA's TMA load fills of a buffer, half of the columns where they share
        it, as one of one stage."""
        if copy.is_shared:
            _, rows, columns = self.boxes[copy.box]
            buffer = cute.local_tile(buffer, (rows, columns), (0, context.cta_rank))
        return cute.make_tensor(buffer.iterator, cute.append(buffer.layout, cute.make_layout(1)))

    # ---------------------------------------------------------------------------------- results

    @staticmethod
    def warpgroup() -> Int32:
        """0 or 1: which of the two warpgroups that multiply."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4

    @cute.jit
    def store(self, sums: cute.Tensor, place: tuple[cute.Tensor, Sequence, Int32, Int32]):
        """The sums of 64 rows x 256 to global memory, in the result's type.

        place: (tensor, `Sequence` of its rows, first row of the warpgroup, head).
        """
        result, sequence, first_row, head = place
        for number in cutlass.range_constexpr(2):
            row = first_row + row_of_fragment(number)
            target = result[sequence.offset + row, None, head, sequence.batch]
            _store_row(rows_of(sums)[number], target, row < sequence.length)


class ScoreGradient(HopperBackward):
    """Base of those that compute scores, and one sum of a tile in registers.

    A kernel adds `locator(context, work, position)`, which makes of an element's number its (query
    head, query, key); `_operands(context)`; `_steps(context, which, tensors, states)`, the sum of
    one tile; and `_finish(context, work, sums)`.  holds: edges whose oldest buffer it keeps count
    of.
    """

    holds: tuple[str, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Slopes of scores take registers, and the MMAs follow one another.
        self.capped = self.change.has_slopes
        self.score = WgmmaShape(self.dtype, self.plan.step_columns)
        self.sum = WgmmaShape(self.dtype, HEAD_DIM, a_in_registers=True, b_mn_major=True)

    def change_scores(
        self, context: BackwardContext, s: cute.Tensor, work: Any, position: Any
    ) -> Any:
        """Scores of a step as the mask takes them, in place; returns what makes their slopes, see
        `ScoreChange.apply_for_slopes`."""
        if self.problem_class.negative_scale:
            s.store(-s.load())
        if not self.change.exists:
            return None
        places = None
        if self.change.by_place:
            places = self.score_places(context, work, self.locator(context, work, position))
        return self.change.apply_for_slopes(s, context.scalars.cap_scale, places)

    @cute.jit
    def gradient(self, context: BackwardContext):
        """One warpgroup: its 64 rows of every tile."""
        waited = (ring.full for ring in self.steps.rings)
        states = self.edges.waiter_states(*waited, *self.holds)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        operands, sums = self._operands(context), self.sum.accumulator()
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            sums.fill(0.0)
            if num_steps > 0:
                states = self._steps(context, (work, num_steps), (operands, sums), states)
            self._finish(context, work, sums)
            work = scheduler.advance_to_next_work()


@cute.jit
def _store_row(values: cute.Tensor, target: cute.Tensor, exists: Boolean):
    """A quad's row of 256, of which each lane has two of every eight columns, to its place.

    The quad exchanges them, so that a lane has all of every fourth run of eight: 16 bytes in a row,
    or 32 of float32.
    """
    lane = cute.arch.lane_idx() % QUAD
    words = 2 * target.element_type.width // 32  # of a lane's two columns
    for first in cutlass.range_constexpr(0, HEAD_DIM // RUN, QUAD):
        rounded = cute.make_rmem_tensor((2, QUAD), target.element_type)
        part = cute.make_rmem_tensor((2, QUAD), Float32)
        for i in cutlass.range_constexpr(2 * QUAD):
            part[i] = values[2 * first + i]
        rounded.store(part.load().to(target.element_type))
        bits = cute.recast_tensor(rounded, Uint32)
        exchanged = cute.make_rmem_tensor((words, QUAD), Uint32)
        for word in cutlass.range_constexpr(words):
            column = [bits[word + words * run] for run in range(QUAD)]
            for i, value in enumerate(transpose_quad(column, lane)):
                exchanged[word, i] = value
        place = (target.iterator + (first + lane) * RUN).align(16)
        place = cute.recast_ptr(place, dtype=Uint32)
        if exists:
            cute.autovec_copy(exchanged, cute.make_tensor(place, exchanged.layout))
