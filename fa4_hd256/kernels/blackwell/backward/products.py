"""The GEMMs of a stored dS in one launch: dK = softmax_scale dS^T Q, dQ = softmax_scale dS K.

A tile is 256 rows of one result: keys of a part of a KV head's query heads, or queries of one head.
One step adds the product of 256 x 128 elements of dS, 128 x 128 of each CTA, and 128 rows of Q or
K, of which each CTA loads half of the columns.  A tile of dS is the same image for both
(`backward.ds_tiles`); its descriptor says which side is reduced over.

Timeline of one CTA (the MMA warp is the leader's); X is Q or K, 0' the next tile's first step::

    load      dS(0) X(0) dS(1) X(1) ..    | dS(0') X(0') ..
    mma       sum(0) sum(1) ..            | sum(0') ..
    gradient                              | sum -> dK or dQ in global memory

Accumulators alternate between tiles, so a tile's result leaves while the next one is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean
from cutlass.cute.nvgpu import cpasync, tcgen05

from ....schedulers.protocol import WorkTile
from ...backward.ds_tiles import DS_BLOCK, DS_TILE, DS_TILE_ELEMENTS, RUN, RUN_STRIDE
from ...backward.gemm_tiles import GemmTiles, ResultTile, Walk
from ...context import CLAIM_STEPS, KernelParts, want_next_tile_if
from ...limits import ELEMENT_BYTES, HEAD_DIM
from ...operands import LoadTarget, SharedMemory, TmaTensor, load_tile
from ...plan.edges import RingRecord, RingState
from ...problem_class import GradientClass, ProblemClass
from ...ranges import traced
from ...rows.sequences import Sequence
from ..instructions import (
    MmaShape,
    OperandLayout,
    fence_after_thread_sync,
    mma_chain,
    mn_major_operand,
)
from ..pair_kernel import await_buffer
from ..tmem import tmem_buffer
from .common import BlackwellBackward
from .common import BlackwellBackwardContext as Context
from .config import GradientConfig
from .row_result import ResultPlace, RowResult

BY_ROWS = mn_major_operand(DS_TILE)  # 128 rows of Q or K, reduced over

#: Rows and columns of the box in which TMA copies a tile; its bytes stay in their order.
BOX = (256, 64)

#: Core matrices: of the next 8 keys, and of the next 8 queries.
NEXT_KEYS, NEXT_QUERIES = 8 * RUN * ELEMENT_BYTES, RUN_STRIDE * ELEMENT_BYTES
SLICES = range(DS_TILE // 16)  # of K = 16

#: A tile as an operand that is reduced over queries (K-major), and over keys (MN-major).  Without a
#: swizzle the leading offset is that of the next core matrix along the sum.
BY_QUERIES = OperandLayout(
    NEXT_QUERIES, NEXT_KEYS, tuple(i * 2 * NEXT_QUERIES for i in SLICES), is_swizzled=False
)
BY_KEYS = OperandLayout(
    NEXT_KEYS, NEXT_QUERIES, tuple(i * 2 * NEXT_KEYS for i in SLICES), is_swizzled=False
)


@dataclass(kw_only=True)
class SumRings(RingRecord):
    """Buffers that the MMA warp uses next: of dS and rows, and of the sum."""

    step: RingState
    sum: RingState


@dataclass(frozen=True)
class SumTiles(GemmTiles):
    problem_class: ProblemClass


class ProductsKernel(BlackwellBackward):
    """Both GEMMs; arguments: `BackwardEntry.__call__`. Tiles: `GemmTiles`."""

    tiles: SumTiles
    boxes = {"q": (0, DS_TILE, HEAD_DIM // 2), "k": (1, DS_TILE, HEAD_DIM // 2)}

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = SumTiles(self.problem_class)
        stages = self.plan.accumulators
        self.result = RowResult("sum", self.tmem_plan, is_scaled=True, stages=stages)
        # dS is reduced over queries for dK, over keys for dQ.
        self.shape_of_dk = MmaShape(DS_BLOCK, HEAD_DIM, self.is_bf16, b_mn_major=True)
        self.shape_of_dq = replace(self.shape_of_dk, a_mn_major=True)

    def tma_tensors(self, operands: tuple[cute.Tensor, ...], ds: Any) -> tuple[TmaTensor, ...]:
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        layout = cute.make_layout(BOX, stride=(BOX[1], 1))
        info = cpasync.make_tiled_tma_atom(load, _tma_view(ds), layout, BOX)
        return (*super().tma_tensors(operands, ds), TmaTensor(info[0], info[1]))

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        stages = self.plan.stages
        ds = cute.make_layout((*BOX, stages), stride=(BOX[1], 1, DS_TILE_ELEMENTS))
        return {
            "ds": cute.make_tensor(memory.region("ds", self.dtype, 128), ds),
            "rows": memory.operand("rows", DS_TILE, HEAD_DIM // 2, stages),
        }

    # ------------------------------------------------------------ load

    @cute.jit
    def load(self, context: Context):
        """Fetch dS and rows of Q or K for each step; each CTA loads its own share of both."""
        free = self.edges["step_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            # A look-up of the sequence in each step would take longer than the step's MMAs.
            tile_context = context.of_tile(work)
            num_steps = self.num_steps(tile_context, work)
            want_next_tile_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                position = self.tiles.first_position(tile_context, work)
                for step in cutlass.range(num_steps, unroll=1):
                    want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                    free = self._load_step(tile_context, work, position, free)
                    position = position.following()
            work = scheduler.advance_to_next_work()
        context.barriers["step_free"].wait_for_all(free)

    @traced("load")
    @cute.jit
    def _load_step(self, context: Context, work: WorkTile, position: Walk, free: RingState):
        """Load dS and rows into the next buffers, whose bytes complete on one barrier."""
        target = await_buffer(context, "step", free)
        self._load_ds(context, position, target)
        self._load_rows(context, work, position, target)
        free.advance()
        return free

    def _load_ds(self, context: Context, position: Walk, target: LoadTarget) -> None:
        barrier, stage = target
        number, source = position.ds_number(context.cta_rank), context.tensors.loads[-1]
        to_smem, from_global = cpasync.tma_partition(
            source.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(context.smem["ds"], 0, 2),
            cute.group_modes(source.tensor[None, None, number, position.head], 0, 2),
        )
        cute.copy(source.atom, from_global, to_smem[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def _load_rows(self, context: Context, work: WorkTile, position: Walk, target: LoadTarget):
        """Load this CTA's half of the columns of 128 rows of Q or K."""
        smem, row, rank = context.smem["rows"], position.column * DS_TILE, context.cta_rank
        if position.tile.of_keys:
            source = context.sequences.query(work.batch), row, rank, position.head
            load_tile(self.tma_tensor(context, "q"), smem, source, *target)
        else:
            head = position.head // context.heads_per_kv
            source = context.sequences.key(work.batch), row, rank, head
            load_tile(self.tma_tensor(context, "k"), smem, source, *target)

    # ------------------------------------------------------------ mma

    @cute.jit
    def mma(self, context: Context):
        """Issue sum(0) to sum(n - 1) of each tile; one warp of the leader CTA."""
        sum_free, sum_done = context.barriers["sum_free"], context.barriers["sum_done"]
        rings = SumRings.waiting(self.edges, step="step_loaded", sum="sum_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                sum_free.wait(rings.sum)
                for step in cutlass.range(num_steps, unroll=1):
                    rings = self._sum(context, work, step > 0, rings)
                sum_done.commit(rings.sum)
                rings.sum.advance()
            work = scheduler.advance_to_next_work()
        sum_free.wait_for_all(rings.sum)

    @traced("sum")
    @cute.jit
    def _sum(self, context: Context, work: WorkTile, adds: Boolean, rings: SumRings):
        """Issue sum += dS^T Q for dK, or dS K for dQ, of a step; a tile's first one overwrites."""
        context.barriers["step_loaded"].wait(rings.step)
        fence_after_thread_sync()
        ds = context.smem["ds"][None, None, rings.step.index].iterator
        rows = context.smem["rows"][None, None, rings.step.index].iterator
        result = tmem_buffer(context.tmem, self.tmem_plan, "sum", rings.sum)
        b = BY_ROWS.lower_word(rows), BY_ROWS
        if self.tiles.tile(context, work).of_keys:
            a = BY_QUERIES.lower_word(ds), BY_QUERIES
            mma_chain(self.shape_of_dk, result, a, b, adds)
        else:
            a = BY_KEYS.lower_word(ds), BY_KEYS
            mma_chain(self.shape_of_dq, result, a, b, adds)
        context.barriers["step_free"].commit(rings.step)
        rings.step.advance()
        return rings

    # ------------------------------------------------------------ gradient

    @cute.jit
    def gradient(self, context: Context):
        """The result of every tile to global memory."""
        states = RingRecord.waiting(self.edges, "sum_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile, has_steps = self.tiles.tile(context, work), self.num_steps(context, work) > 0
            dk, dq = context.tensors.results
            if tile.of_keys:
                rows = context.sequences.key(work.batch)
                states = self._finish(context, dk, rows, tile, has_steps, states)
            else:
                rows = context.sequences.query(work.batch)
                states = self._finish(context, dq, rows, tile, has_steps, states)
            work = scheduler.advance_to_next_work()

    @cute.jit
    def _finish(
        self,
        context: Context,
        result: cute.Tensor,
        rows: Sequence,
        tile: ResultTile,
        has_steps: Boolean,
        states: RingRecord,
    ):
        """Store the result of a tile, or zeros."""
        first_row = tile.block * DS_BLOCK + context.cta_rank * DS_TILE
        place = ResultPlace(result, rows, first_row, tile.head)
        if has_steps:
            states = self.result.drain(context, place, states)
        else:
            # The last part of a group may have fewer heads than others: of those it has not there
            # is no dQ.
            if tile.of_keys | (tile.num_heads > 0):
                self.result.store_zeros(place)
        return states


def _tma_view(ds: cute.Tensor) -> cute.Tensor:
    """dS, see `backward.ds_tiles`, as (rows, columns, tiles of a query head, heads) of `BOX`."""
    (rows, columns), (heads, units, of_unit, _) = BOX, ds.shape
    layout = cute.make_layout(
        (rows, columns, units * of_unit, heads), stride=(columns, 1, DS_TILE_ELEMENTS, ds.stride[0])
    )
    return cute.make_tensor(ds.iterator, layout)
