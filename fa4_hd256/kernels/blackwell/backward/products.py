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

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean
from cutlass.cute.nvgpu import cpasync, tcgen05

from ....schedulers import WorkTile
from ...backward.ds_tiles import DS_BLOCK, DS_TILE, DS_TILE_ELEMENTS
from ...backward.product_tiles import ProductTiles, Walk
from ...limits import HEAD_DIM
from ...operands import LoadTarget, TmaTensor, load_tile
from ...rows.sequences import Sequence
from ..instructions import MmaShape, mma_chain
from ..operands import mn_major_operand
from .context import BlackwellBackwardContext
from .ds_operands import BOX, BY_KEYS, BY_QUERIES, tma_view
from .row_result import RowResult

__all__ = ["ProductsKernel"]


class ProductsKernel(ProductTiles, RowResult):
    """Both GEMMs for one configuration; arguments of a call: `BlackwellBackward.__call__`. Tiles:
    `ProductTiles`."""

    result = "sum"
    is_scaled = True
    boxes = {
        "q": (0, DS_TILE, HEAD_DIM // 2),
        "k": (1, DS_TILE, HEAD_DIM // 2),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape = MmaShape(DS_BLOCK, HEAD_DIM, self.is_bf16, b_mn_major=True)
        self.shapes = {"sum": shape}
        self.layouts = {"dS": BY_QUERIES, "X": mn_major_operand(DS_TILE)}
        #: Shape of dQ; its A is `BY_KEYS`.
        self.shape_by_keys = replace(shape, a_mn_major=True)

    def tma_tensors(self, operands: tuple[cute.Tensor, ...], ds: Any) -> tuple[TmaTensor, ...]:
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        layout = cute.make_layout(BOX, stride=(BOX[1], 1))
        info = cpasync.make_tiled_tma_atom(load, tma_view(ds), layout, BOX)
        return (*super().tma_tensors(operands, ds), TmaTensor(info[0], info[1]))

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        stages = self.plan.stages
        ds = cute.make_layout((*BOX, stages), stride=(BOX[1], 1, DS_TILE_ELEMENTS))
        return {
            "ds": cute.make_tensor(memory.region("ds", self.dtype, 128), ds),
            "rows": memory.operand("rows", DS_TILE, HEAD_DIM // 2, stages),
        }

    def places(
        self, context: BlackwellBackwardContext, content: str, work: Any, position: Walk
    ) -> tuple[tuple[tuple[WorkTile, Walk], ...], ...]:
        """Return (work, position) for either copy, see `copy`."""
        return (((work, position),) * len(content.split()),)

    def copy(
        self,
        context: BlackwellBackwardContext,
        copy: Any,
        place: tuple[WorkTile, Walk],
        target: LoadTarget,
    ) -> None:
        """Load this CTA's 128 x 128 of dS, or its half of the columns of 128 rows of Q or K."""
        if copy.content == "dS":
            self._load_ds(context, place, target)
        else:
            self._load_rows(context, place, target)

    def _load_ds(
        self, context: BlackwellBackwardContext, place: tuple[WorkTile, Walk], target: LoadTarget
    ) -> None:
        (_, position), (barrier, stage) = place, target
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
    def _load_rows(
        self, context: BlackwellBackwardContext, place: tuple[WorkTile, Walk], target: LoadTarget
    ):
        (work, position), (barrier, stage) = place, target
        smem, row, rank = context.smem["rows"], position.column * DS_TILE, context.cta_rank
        if position.tile.of_keys:
            source = context.sequences.query(work.batch), row, rank, position.head
            load_tile(self.tma_tensor(context, "q"), smem, source, barrier, stage)
        else:
            head = position.head // context.heads_per_kv
            source = context.sequences.key(work.batch), row, rank, head
            load_tile(self.tma_tensor(context, "k"), smem, source, barrier, stage)

    def multiply(
        self,
        context: BlackwellBackwardContext,
        work: Any,
        chain: tuple[Any, Any, Any, Any],
        accumulate: Boolean,
    ) -> None:
        """See `PairProducers.multiply`: dS reduced over queries for dK, over keys for dQ."""
        _, result, (ds, _), (rows, _) = chain
        self._multiply(context, work, (result, ds, rows), accumulate)

    @cute.jit
    def _multiply(
        self,
        context: BlackwellBackwardContext,
        work: Any,
        places: tuple[Any, Any, Any],
        accumulate: Boolean,
    ):
        result, ds, rows = places
        layout = self.layouts["X"]
        b = layout.lower_word(rows), layout
        if self.tile(context, work).of_keys:
            a = BY_QUERIES.lower_word(ds), BY_QUERIES
            mma_chain(self.shapes["sum"], result, a, b, accumulate)
        else:
            a = BY_KEYS.lower_word(ds), BY_KEYS
            mma_chain(self.shape_by_keys, result, a, b, accumulate)

    @cute.jit
    def gradient(self, context: BlackwellBackwardContext):
        """The result of every tile to global memory."""
        states = self.edges.waiter_states("sum_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile, has_steps = self.tile(context, work), self.num_steps(context, work) > 0
            dk, dq = context.tensors.results
            if tile.of_keys:
                rows = context.sequences.key(work.batch)
                states = self._finish(context, (dk, rows, tile), has_steps, states)
            else:
                rows = context.sequences.query(work.batch)
                states = self._finish(context, (dq, rows, tile), has_steps, states)
            work = scheduler.advance_to_next_work()

    @cute.jit
    def _finish(
        self,
        context: BlackwellBackwardContext,
        result: tuple[cute.Tensor, Sequence, Any],
        has_steps: Boolean,
        states: Any,
    ):
        """result: (tensor, `Sequence` of its rows, tile)."""
        tensor, rows, tile = result
        first_row = tile.block * DS_BLOCK + context.cta_rank * DS_TILE
        place = tensor, rows, first_row, tile.head
        if has_steps:
            states = self.drain_to(context, place, states)
        else:
            # The last part of a group may have fewer heads than others: of those it has not there
            # is no dQ.
            if tile.of_keys | (tile.num_heads > 0):
                self.zero(place)
        return states
