"""The GEMMs of a stored dS in one launch: dK = softmax_scale dS^T Q, dQ = softmax_scale dS K.

A tile is 256 rows of one result, 128 of each CTA, 64 of each warpgroup: keys of a part of a KV
head's query heads, or queries of one head.  One step adds the product of 128 x 128 elements of dS
of each CTA and 128 rows of Q or K, which both CTAs need: each loads half of their columns for both.
A tile of dS is the same image for both results (`backward.ds_tiles`); its descriptor says which
side is reduced over.  Which tile is what: `backward.product_tiles`.

Timeline of one CTA; X is Q or K, in two pieces of 64 rows, 0' the next tile's first step::

    load         dS(1) X(1) dS(2) X(2) ..          | dS(0') X(0') ..
    warpgroups   sum(0) in 2 sum(1) in 2 ..        -> dK or dQ in global memory | sum(0') ..

A warpgroup issues the GEMM of a piece before it waits for that of the piece before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from ....schedulers import WorkTile
from ...backward.common import BackwardContext
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
from ...backward.product_tiles import ProductTiles, Walk
from ...limits import HEAD_DIM
from ...operands import LoadTarget
from ...plan.steps import Copy
from ...ranges import traced
from ...rows.sequences import Sequence
from ..instructions import (
    ROWS,
    WgmmaShape,
    commit,
    fence,
    multiply,
    transposed,
    wait,
)
from .common import HopperBackward
from .config import PIECE_ROWS, PIECES

__all__ = ["ProductsKernel"]

SLICES = PIECE_ROWS // 16  # of K = 16


class ProductsKernel(ProductTiles, HopperBackward):
    """Both GEMMs for one configuration; arguments of a call: `BackwardEntry.__call__`. Tiles:
    `ProductTiles`."""

    boxes = {
        "q": (0, PIECE_ROWS, HEAD_DIM // 2),
        "k": (1, PIECE_ROWS, HEAD_DIM // 2),
    }

    def shared_boxes(self) -> set[str]:
        """Both: X is one of them."""
        return set(self.boxes)

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        plan, ds = self.plan, memory.region("ds", self.dtype, 1024)
        return {
            "rows": memory.operand("rows", PIECE_ROWS, HEAD_DIM, plan.rows_stages),
            "ds": cute.make_tensor(ds, cute.make_layout((DS_TILE_ELEMENTS, plan.ds_stages))),
        }

    def copy(
        self,
        context: BackwardContext,
        copy: Copy,
        which: tuple[WorkTile, Walk, Int32],
        target: LoadTarget,
    ) -> None:
        """One copy.  which: (tile, position, piece).  target: (barrier, buffer)."""
        if copy.box == "ds":
            self._load_ds(context, which[1], target)
        else:
            self._load_rows(context, copy, which, target)

    @cute.jit
    def _load_rows(
        self,
        context: BackwardContext,
        copy: Copy,
        which: tuple[WorkTile, Walk, Int32],
        target: LoadTarget,
    ):
        """Load this CTA's half of the columns of 64 rows of Q or K, for both."""
        (work, position, piece), (barrier, index), rank = which, target, context.cta_rank
        smem = context.smem["rows"][None, None, index]
        row = position.column * DS_TILE + piece * PIECE_ROWS
        if position.tile.of_keys:
            place = context.sequences.query(work.batch), row, rank, position.head
            self.load_box(context, replace(copy, box="q"), place, (barrier, smem))
        else:
            head = position.head // context.heads_per_kv
            place = context.sequences.key(work.batch), row, rank, head
            self.load_box(context, replace(copy, box="k"), place, (barrier, smem))

    def _load_ds(self, context: BackwardContext, position: Walk, target: LoadTarget) -> None:
        """Load this CTA's 128 x 128 of dS: 32 KiB as they lie."""
        barrier, stage = target
        ds, number = context.tensors.ds, position.ds_number(context.cta_rank)
        number = within_head(ds, number, context.sequences.tensors)
        first = tile_of(ds, number + position.head * tiles_of_head(ds)).iterator
        source = cute.make_tensor(first, cute.make_layout(DS_TILE_ELEMENTS))
        atom = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), self.dtype, num_bits_per_copy=8 * DS_TILE_BYTES
        )
        with cute.arch.elect_one():
            cute.copy(atom, source, context.smem["ds"][None, stage], mbar_ptr=barrier)

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: BackwardContext):
        """One warpgroup: its 64 rows of every tile."""
        states = self.edges.waiter_states("ds_loaded", "rows_loaded", "ds_free", "rows_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        dk, dq = context.tensors.results
        sums = self._shape(True).accumulator()
        while work.is_valid:
            tile, num_steps = self.tile(context, work), self.num_steps(context, work)
            row = tile.block * DS_BLOCK + context.cta_rank * DS_TILE + self.warpgroup() * ROWS
            if tile.of_keys:
                states = self._sum(context, num_steps, (sums, True), states)
                place = dk, context.sequences.key(work.batch), row, tile.head
                self._finish(context, sums, place)
            else:
                states = self._sum(context, num_steps, (sums, False), states)
                # The last part of a group may have fewer heads than others: of those it has not
                # there is no dQ.
                if tile.num_heads > 0:
                    place = dq, context.sequences.query(work.batch), row, tile.head
                    self._finish(context, sums, place)
            work = scheduler.advance_to_next_work()

    def _shape(self, of_keys: bool) -> WgmmaShape:
        return WgmmaShape(self.dtype, HEAD_DIM, a_mn_major=not of_keys, b_mn_major=True)

    def _operands(self, context: BackwardContext, of_keys: bool) -> tuple[cute.Tensor, cute.Tensor]:
        """dS of this warpgroup's rows, and the rows it is multiplied with."""
        shape = self._shape(of_keys)
        # Rows, then what is reduced over.
        sizes: tuple[Any, Any] = (ROWS, (RUN, DS_TILE // RUN))
        strides: tuple[Any, Any] = (RUN, (1, RUN_STRIDE))
        if not of_keys:
            sizes, strides = ((RUN, ROWS // RUN), DS_TILE), ((1, RUN_STRIDE), RUN)
        first = self.warpgroup() * (ROWS * RUN if of_keys else ROWS // RUN * RUN_STRIDE)
        layout = cute.make_layout(
            (*sizes, self.plan.ds_stages), stride=(*strides, DS_TILE_ELEMENTS)
        )
        ds = cute.make_tensor((context.smem["ds"].iterator + first).align(128), layout)
        return shape.a_operand(ds), shape.b_operand(transposed(context.smem["rows"]))

    @cute.jit
    def _sum(
        self,
        context: BackwardContext,
        num_steps: Int32,
        result: tuple[cute.Tensor, Boolean],
        states: Any,
    ):
        """The GEMM of a tile.  result: (registers, whether it is of dK)."""
        sums, of_keys = result
        operands = (sums, *self._operands(context, of_keys), self._shape(of_keys))
        if num_steps > 0:
            states = self._issue(context, operands, 0, states, False)
            for _ in cutlass.range(1, num_steps, unroll=1):
                states = self._issue(context, operands, 1, states)
                wait(1)
                states = self._release(context, ("rows",), states)
                states = self._issue(context, operands, 0, states)
                wait(1)
                states = self._release(context, ("rows", "ds"), states)
            states = self._issue(context, operands, 1, states)
            wait(1)
            states = self._release(context, ("rows",), states)
            wait(0)
            states = self._release(context, ("rows", "ds"), states)
        else:
            sums.fill(0.0)
        return states

    @cute.jit
    def _issue(
        self,
        context: BackwardContext,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor, WgmmaShape],
        piece: int,
        states: Any,
        accumulate: bool = True,
    ):
        """The MMA of a piece, as a group of its own."""
        sums, ds, rows, shape = operands
        if cutlass.const_expr(piece == 0):
            context.barriers["ds_loaded"].wait(states["ds_loaded"])
        context.barriers["rows_loaded"].wait(states["rows_loaded"])
        of_ds = ds[None, None, None, states["ds_loaded"].index]
        own = cute.local_tile(of_ds, (cute.size(of_ds, mode=[0]), 1, SLICES), (0, 0, piece))
        fence()
        multiply(shape, sums, own, rows[None, None, None, states["rows_loaded"].index], accumulate)
        commit()
        states.advance("rows_loaded")
        if cutlass.const_expr(piece == PIECES - 1):
            states.advance("ds_loaded")
        return states

    @staticmethod
    def _release(context: BackwardContext, names: tuple[str, ...], states: Any) -> Any:
        """The oldest buffers that this warp holds."""
        for name in names:
            context.barriers[f"{name}_free"].arrive(states[f"{name}_free"])
            states.advance(f"{name}_free")
        return states

    @traced("drain sum")
    @cute.jit
    def _finish(
        self,
        context: BackwardContext,
        sums: cute.Tensor,
        place: tuple[cute.Tensor, Sequence, Int32, Int32],
    ):
        """Store softmax_scale times the sums to global memory; place: see `store`."""
        sums.store(sums.load() * context.scalars.softmax_scale)
        self.store(sums, place)
