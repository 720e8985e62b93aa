"""Tiles of keys and the steps of queries that meet them: what kernels of dK or dV share.

A tile is `plan.tile_rows` keys of a part of a KV head's query heads, a step `plan.step_columns`
queries of one of these heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...schedulers.order import TileProblem, section_heads_for
from ...schedulers.protocol import WorkTile
from ..limits import HEAD_DIM
from ..mask.block_mask import MASK_TILE
from .block_mask import BlockList, least_section
from .common import BackwardContext as Context
from .common import Step, heads_of_part, heads_per_part
from .ds_tiles import BLOCK_TILES, StoredDs


class ListedStep(Step):
    """A step of a list with as many steps as tiles of queries, which knows this tile and has loaded
    the next one's. listed: what the list says at a place."""

    CARRIED = (*Step.CARRIED, "tile", "next_tile")

    def __init__(
        self, step: Step, listed: Callable[[Int32], Int32], tile: Int32, next_tile: Int32
    ) -> None:
        super().__init__(step.head, step.index, step.span)
        self.listed, self.tile, self.next_tile = listed, tile, next_tile

    @classmethod
    def first(cls, step: Step, block_list: BlockList) -> ListedStep:
        """Start from the first step of a tile. The list is read at places that depend on the lane,
        by what is 0: NOTE [numbers of a thread] of `block_mask`."""
        zero = cute.arch.shuffle_sync(Int32(0), cute.arch.lane_idx())

        def listed(place: Int32) -> Int32:
            return block_list.tile(place + zero)

        return cls(step, listed, listed(step.index), listed(step.following().index))

    def following(self) -> ListedStep:
        step = super().following()
        next_tile = self.listed(step.following().index)
        return ListedStep(step, self.listed, self.next_tile, next_tile)


class KeyTiles:
    """Tiles of keys of a kernel, which owns them.  A tile's head counts parts of KV heads:
    KV head * head_parts + part.
    """

    plan: Any
    problem_class: Any
    rows_of: str | None = "k"

    def problem(self, scalars: Any, operands: tuple[cute.Tensor, ...], batch: Any) -> TileProblem:
        """The tiles: some keys of a part of a KV head each."""
        q, k = operands
        heads = cute.size(k, mode=[2])
        heads_per_kv = cute.size(q, mode=[2]) // heads
        longest = cutlass.min(cute.size(q, mode=[0]), scalars.max_seqlen_q)
        rows = cutlass.min(longest, 1 << 16) * heads_per_part(scalars, heads_per_kv)
        tile_keys = self.plan.tile_rows
        return TileProblem(
            (scalars.max_seqlen_k + tile_keys - 1) // tile_keys,
            heads * scalars.head_parts,
            batch,
            section_heads_for(
                num_heads_per_kv=1,
                num_pairs=heads * scalars.head_parts * batch,
                kv_bytes_per_head=cutlass.min(rows, 1 << 20) * (4 * HEAD_DIM),
                l2_bytes=scalars.l2_bytes,
                unequal_lengths=self.problem_class.has_unequal_tiles,
                least=least_section(self.problem_class, scalars.clusters),
            ),
            # The transposed mask: its bounds change sides.
            later_blocks_first=self.problem_class.bounded_left,
        )

    def transposed(self, context: Context, work: Any) -> Any:
        """Return the queries that see each key, as a transposed visibility."""
        step_queries = self.plan.step_columns
        return context.visibility(work, step_queries).transposed(step_queries)

    def block_list(self, context: Context, work: Any) -> BlockList:
        return BlockList.of(context.sequences.tensors, work.batch, work.block)

    def query_tile(self, context: Context, work: Any, step: Step) -> Int32:
        if isinstance(step, ListedStep):
            return step.tile
        if self.problem_class.lists_steps:
            return self.block_list(context, work).steps_tile(step.index, self.tile_steps)
        return step.index

    def row_of_ds(self, context: Context, work: Any) -> Int32:
        """Return the offset from a step's index, counted in tiles, to the number of this CTA's dS
        tile behind a query head's first; of a kernel whose tiles are blocks of keys."""
        stored = StoredDs.of(context, work)
        if self.problem_class.lists_steps:
            return stored.first + self.block_list(context, work).ds_row(context.cta_rank)
        return stored.row(work.block * BLOCK_TILES + context.cta_rank)

    @property
    def tile_steps(self) -> int:
        return MASK_TILE // self.plan.step_columns

    def num_steps(self, context: Context, work: Any) -> Int32:
        if cutlass.const_expr(self.problem_class.lists_steps):
            steps = self.block_list(context, work).written * self.tile_steps
            return steps * heads_of_part(context, work.head)[1]
        tile_keys = self.plan.tile_rows
        steps = self.transposed(context, work).num_tiles(work.block * tile_keys, tile_keys)
        return steps * heads_of_part(context, work.head)[1]

    def first_position(self, context: Context, work: Any) -> Step:
        """The first step of a tile; in a list, its index there."""
        if cutlass.const_expr(self.problem_class.lists_steps):
            end = self.block_list(context, work).written * self.tile_steps
            return Step(heads_of_part(context, work.head)[0], Int32(0), (Int32(0), end))
        tile_keys = self.plan.tile_rows
        tile = (work.block * tile_keys, tile_keys)
        steps = self.transposed(context, work).tile_range(tile, tile)
        return Step(heads_of_part(context, work.head)[0], steps.begin, (steps.begin, steps.end))

    def next_position(self, step: Step) -> Step:
        return step.following()

    @cute.jit
    def load_stats(
        self,
        context: Context,
        name: str,
        place: tuple[WorkTile, Any],
        target: tuple[cute.Pointer, cute.Tensor],
    ) -> None:
        """-LSE or -delta of a step's rows, by a bulk copy of each CTA (PTX ISA 9.7.9.25.4). place:
        (tile, step). target: (barrier, tensor of SMEM)."""
        (work, step), (barrier, destination), queries = place, target, self.plan.step_columns
        offset = context.sequences.padded_query_offset(work.batch)
        row = offset + self.query_tile(context, work, step) * queries
        rows = context.tensors.stats[0 if name == "lse" else 1, step.head, None]
        source = cute.make_tensor((rows.iterator + row).align(16), cute.make_layout(queries))
        bits = queries * Float32.width
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=bits)
        with cute.arch.elect_one():
            cute.copy(atom, source, destination, mbar_ptr=barrier)
