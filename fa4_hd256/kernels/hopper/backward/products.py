"""The GEMMs of a stored dS in one launch: dK = softmax_scale dS^T Q, dQ = softmax_scale dS K.

A tile is 256 rows of one result, 128 of each CTA, 64 of each warpgroup: keys of a part of a KV
head's query heads, or queries of one head.  One step adds the product of 128 x 128 elements of dS
of each CTA and 128 rows of Q or K, which both CTAs need: each loads half of their columns for both.
A tile of dS is the same image for both results (`backward.ds_tiles`); its descriptor says which
side is reduced over.  Which tile is what: `backward.gemm_tiles`.

Timeline of one CTA; X is Q or K, in two pieces of 64 rows, 0' the next tile's first step::

    load         dS(1) X(1) dS(2) X(2) ..          | dS(0') X(0') ..
    warpgroups   sum(0) in 2 sum(1) in 2 ..        -> dK or dQ in global memory | sum(0') ..

A warpgroup issues the GEMM of a piece before it waits for that of the piece before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ....schedulers.order import TileProblem
from ....schedulers.protocol import WorkTile
from ...backward.common import BackwardContext as Context
from ...backward.ds_tiles import (
    DS_BLOCK,
    DS_TILE,
    DS_TILE_BYTES,
    DS_TILE_ELEMENTS,
    RUN,
    RUN_STRIDE,
    tile_of,
    tiles_of_head,
    within_head,
)
from ...backward.gemm_tiles import GemmTiles, Walk
from ...context import CLAIM_STEPS, KernelParts, want_next_tile_if
from ...limits import HEAD_DIM
from ...operands import SharedMemory
from ...plan.edges import RingRecord
from ...problem_class import CallScalars, GradientClass, ProblemClass
from ...ranges import traced
from ...rows.sequences import Sequence, SequenceTensors
from ..instructions import (
    ROWS,
    WgmmaShape,
    commit,
    fence,
    multiply,
    this_warpgroup,
    transposed,
    wait,
)
from .common import HopperBackward
from .config import PIECE_ROWS, PIECES, GradientConfig

SLICES = PIECE_ROWS // 16  # of K = 16


@dataclass(frozen=True)
class LaunchTiles(GemmTiles):
    problem_class: ProblemClass


class Gemm(NamedTuple):
    """A GEMM: its sum in registers, and the descriptors of dS and of the rows."""

    sums: cute.Tensor
    ds: cute.Tensor
    rows: cute.Tensor
    shape: WgmmaShape


class ProductsKernel(HopperBackward):
    """Both GEMMs; arguments: `BackwardEntry.__call__`. Tiles: `GemmTiles`."""

    #: X is one of them.
    shared_boxes = ("q", "k")

    boxes = {"q": (0, PIECE_ROWS, HEAD_DIM // 2), "k": (1, PIECE_ROWS, HEAD_DIM // 2)}

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = LaunchTiles(self.problem_class)

    def in_a_row(
        self,
        problem: TileProblem,
        scalars: CallScalars,
        operands: tuple[cute.Tensor, ...],
        sequences: SequenceTensors,
    ) -> TileProblem:
        offsets = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        if None in offsets:
            return problem
        return self.tiles.in_a_row(problem, scalars, operands, offsets)

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        plan, ds = self.plan, memory.region("ds", self.dtype, 1024)
        return {
            "rows": memory.operand("rows", PIECE_ROWS, HEAD_DIM, plan.rows_stages),
            "ds": cute.make_tensor(ds, cute.make_layout((DS_TILE_ELEMENTS, plan.ds_stages))),
        }

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: Context):
        """Each step's dS, and its rows of Q or K in pieces; one warp of each CTA."""
        states = RingRecord.waiting(self.edges, "ds_free", "rows_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            num_steps = self.tiles.num_steps(tile_context, work)
            want_next_tile_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                position = self.tiles.first_position(tile_context, work)
                for step in cutlass.range(0, num_steps, unroll=1):
                    want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                    states = self._load_ds(tile_context, position, states)
                    for piece in cutlass.range_constexpr(PIECES):
                        states = self._load_rows(tile_context, work, position, piece, states)
                    position = position.following()
            work = scheduler.advance_to_next_work()

    @traced("load")
    def _load_ds(self, context: Context, position: Walk, states: RingRecord) -> RingRecord:
        """Load this CTA's 128 x 128 of dS: 32 KiB as they lie."""
        barrier, buffer = self.next_buffer(context, "ds", states)
        ds, number = context.tensors.ds, position.ds_number(context.cta_rank)
        number = within_head(ds, number, context.sequences.tensors)
        first = tile_of(ds, number + position.head * tiles_of_head(ds)).iterator
        source = cute.make_tensor(first, cute.make_layout(DS_TILE_ELEMENTS))
        atom = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), self.dtype, num_bits_per_copy=8 * DS_TILE_BYTES
        )
        with cute.arch.elect_one():
            cute.copy(atom, source, context.smem["ds"][None, buffer], mbar_ptr=barrier)
        states.advance("ds_free")
        return states

    @traced("load")
    @cute.jit
    def _load_rows(
        self, context: Context, work: WorkTile, position: Walk, piece: int, states: RingRecord
    ):
        """Load this CTA's half of the columns of 64 rows of Q or K, for both."""
        barrier, buffer = self.next_buffer(context, "rows", states)
        smem, rank = context.smem["rows"][None, None, buffer], context.cta_rank
        row = position.column * DS_TILE + piece * PIECE_ROWS
        if position.tile.of_keys:
            place = context.sequences.query(work.batch), row, rank, position.head
            self.load_box(context, "q", place, barrier, smem, evict_last=True)
        else:
            head = position.head // context.heads_per_kv
            place = context.sequences.key(work.batch), row, rank, head
            self.load_box(context, "k", place, barrier, smem, evict_last=True)
        states.advance("rows_free")
        return states

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: Context):
        """One warpgroup: its 64 rows of every tile."""
        states = RingRecord.waiting(self.edges, "ds_loaded", "rows_loaded", "ds_free", "rows_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        dk, dq = context.tensors.results
        sums = self._shape(True).accumulator()
        while work.is_valid:
            tile, num_steps = self.tiles.tile(context, work), self.tiles.num_steps(context, work)
            row = tile.block * DS_BLOCK + context.cta_rank * DS_TILE + this_warpgroup() * ROWS
            if tile.of_keys:
                states = self._sum(context, num_steps, sums, True, states)
                keys = context.sequences.key(work.batch)
                self._finish(context, sums, dk, keys, row, tile.head)
            else:
                states = self._sum(context, num_steps, sums, False, states)
                # The last part of a group may have fewer heads than others: of those it has not
                # there is no dQ.
                if tile.num_heads > 0:
                    queries = context.sequences.query(work.batch)
                    self._finish(context, sums, dq, queries, row, tile.head)
            work = scheduler.advance_to_next_work()

    def _shape(self, of_keys: bool) -> WgmmaShape:
        return WgmmaShape(self.dtype, HEAD_DIM, a_mn_major=not of_keys, b_mn_major=True)

    def _operands(self, context: Context, of_keys: bool) -> tuple[cute.Tensor, cute.Tensor]:
        shape = self._shape(of_keys)
        # Rows, then what is reduced over.
        sizes: tuple[Any, Any] = (ROWS, (RUN, DS_TILE // RUN))
        strides: tuple[Any, Any] = (RUN, (1, RUN_STRIDE))
        if not of_keys:
            sizes, strides = ((RUN, ROWS // RUN), DS_TILE), ((1, RUN_STRIDE), RUN)
        first = this_warpgroup() * (ROWS * RUN if of_keys else ROWS // RUN * RUN_STRIDE)
        layout = cute.make_layout(
            (*sizes, self.plan.ds_stages), stride=(*strides, DS_TILE_ELEMENTS)
        )
        ds = cute.make_tensor((context.smem["ds"].iterator + first).align(128), layout)
        return shape.a_operand(ds), shape.b_operand(transposed(context.smem["rows"]))

    @cute.jit
    def _sum(
        self,
        context: Context,
        num_steps: Int32,
        sums: cute.Tensor,
        of_keys: bool,
        states: RingRecord,
    ):
        """The GEMM of a tile, of dK or else of dQ."""
        gemm = Gemm(sums, *self._operands(context, of_keys), self._shape(of_keys))
        if num_steps > 0:
            states = self._issue(context, gemm, 0, states, False)
            for _ in cutlass.range(1, num_steps, unroll=1):
                states = self._issue(context, gemm, 1, states)
                wait(1)
                states = self._release(context, ("rows",), states)
                states = self._issue(context, gemm, 0, states)
                wait(1)
                states = self._release(context, ("rows", "ds"), states)
            states = self._issue(context, gemm, 1, states)
            wait(1)
            states = self._release(context, ("rows",), states)
            wait(0)
            states = self._release(context, ("rows", "ds"), states)
        else:
            sums.fill(0.0)
        return states

    @cute.jit
    def _issue(
        self, context: Context, gemm: Gemm, piece: int, states: RingRecord, accumulate: bool = True
    ):
        """The MMA of a piece, as a group of its own."""
        sums, ds, rows, shape = gemm
        if cutlass.const_expr(piece == 0):
            context.barriers["ds_loaded"].wait(states["ds_loaded"])
        context.barriers["rows_loaded"].wait(states["rows_loaded"])
        of_ds = ds[None, None, None, states["ds_loaded"].index]
        a = cute.local_tile(of_ds, (cute.size(of_ds, mode=[0]), 1, SLICES), (0, 0, piece))
        fence()
        multiply(shape, sums, a, rows[None, None, None, states["rows_loaded"].index], accumulate)
        commit()
        states.advance("rows_loaded")
        if cutlass.const_expr(piece == PIECES - 1):
            states.advance("ds_loaded")
        return states

    @staticmethod
    def _release(context: Context, names: tuple[str, ...], states: RingRecord) -> RingRecord:
        """The oldest buffers that this warp holds."""
        for name in names:
            context.barriers[f"{name}_free"].arrive(states[f"{name}_free"])
            states.advance(f"{name}_free")
        return states

    @traced("drain sum")
    @cute.jit
    def _finish(
        self,
        context: Context,
        sums: cute.Tensor,
        result: cute.Tensor,
        sequence: Sequence,
        first_row: Int32,
        head: Int32,
    ):
        sums.store(sums.load() * context.scalars.softmax_scale)
        self.store(sums, result, sequence, first_row, head)
