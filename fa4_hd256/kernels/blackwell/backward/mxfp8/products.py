"""The GEMMs of a stored dS in mxfp8: `backward.products` with block-scaled MMAs.

A tile of dS holds codes for both, and their scales by keys, for dK, and by queries, for dQ
(`backward.mxfp8_ds`).  Q and K have their blocks along the rows, which are reduced over.  There is
one accumulator, since scales need a place behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from .....schedulers.protocol import WorkTile
from ....backward.ds_tiles import DS_BLOCK, DS_TILE
from ....backward.gemm_tiles import Walk
from ....backward.mxfp8_ds import CODE_BYTES, FOR_DK, FOR_DQ, RUN_BYTES, RUN_CODES, TILE_ELEMENTS
from ....block_scales import ATOM_BYTES, ATOMS
from ....context import KernelParts
from ....limits import ELEMENT_BYTES
from ....operands import LoadTarget, SharedMemory, TmaTensor, load_tile
from ....problem_class import GradientClass
from ....ranges import traced
from ...instructions import Mma, MmaShape, OperandLayout, fence_after_thread_sync, mn_major_operand
from ...scale_tiles import scale_buffers
from ...scaled_mma import ScaledMma, copy_scales
from ...tmem import tmem_buffer
from ..common import BlackwellBackward
from ..config import GradientConfig
from ..products import ProductsKernel, SumRings, SumTiles
from ..row_result import RowResult
from .dv import SLICE_ROWS
from .scaled import ROW_ELEMENTS, load_scales_of, operand_views, scale_tensors
from .scaled import Mxfp8BackwardContext as Context

#: Rows and columns, of 16 bits, of the box in which TMA copies codes of a tile; their bytes stay in
#: their order.
BOX = (DS_TILE, DS_TILE // ELEMENT_BYTES)
CODE_ELEMENTS, ATOM_ELEMENTS = CODE_BYTES // ELEMENT_BYTES, ATOM_BYTES // ELEMENT_BYTES

#: Core matrices: of the next 8 keys, and of the next 16 queries.
NEXT_KEYS, NEXT_QUERIES = 8 * RUN_CODES, RUN_BYTES
SLICES = range(DS_TILE // SLICE_ROWS)
#: Codes as an operand that is reduced over queries (K-major), and over keys (MN-major): a slice has
#: two runs of 16 queries, or four of 8 keys.
BY_QUERIES = OperandLayout(
    NEXT_QUERIES, NEXT_KEYS, tuple(i * 2 * NEXT_QUERIES for i in SLICES), is_swizzled=False
)
BY_KEYS = OperandLayout(
    NEXT_KEYS, NEXT_QUERIES, tuple(i * 4 * NEXT_KEYS for i in SLICES), is_swizzled=False
)


class ProductsMxfp8Kernel(BlackwellBackward):
    """Both GEMMs in mxfp8; the arguments are `ProductsKernel`'s, with `scaled` operands."""

    context_class = Context
    tiles: SumTiles
    load: Any = ProductsKernel.load
    _load_step: Any = ProductsKernel._load_step
    mma: Any = ProductsKernel.mma
    gradient: Any = ProductsKernel.gradient
    _finish: Any = ProductsKernel._finish
    boxes = {"q_t": (4, DS_TILE, ROW_ELEMENTS // 2), "k_t": (5, DS_TILE, ROW_ELEMENTS // 2)}

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = SumTiles(self.problem_class)
        self.result = RowResult("sum", self.tmem_plan, is_scaled=True)
        rows = mn_major_operand(DS_TILE, SLICE_ROWS)
        shape = MmaShape(DS_BLOCK, 2 * ROW_ELEMENTS, False, b_mn_major=True, is_e4m3=True)
        self.scaled_dk = ScaledMma.of(Mma(shape, BY_QUERIES, rows))
        self.scaled_dq = ScaledMma.of(Mma(replace(shape, a_mn_major=True), BY_KEYS, rows))

    def operand_views(self, operands: tuple[cute.Tensor, ...]) -> tuple[cute.Tensor, ...]:
        return operand_views(operands)

    def tma_tensors(self, operands: tuple[cute.Tensor, ...], ds: Any) -> tuple[TmaTensor, ...]:
        loads = *super().tma_tensors(operands, ds), *scale_tensors(self.boxes, operands)
        return *loads, *(_tma_view(ds, is_scale) for is_scale in (False, True))

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        stages = self.plan.stages
        ds = cute.make_layout((*BOX, stages), stride=(BOX[1], 1, CODE_ELEMENTS))
        scales = cute.make_layout((1, ATOM_ELEMENTS, stages), stride=(0, 1, ATOM_ELEMENTS))
        return {
            "ds": cute.make_tensor(memory.region("ds", self.dtype, 128), ds),
            "ds_scales": cute.make_tensor(memory.region("ds_scales", self.dtype, 128), scales),
            "rows": memory.operand("rows", DS_TILE, ROW_ELEMENTS // 2, stages),
            "row_scales": scale_buffers(memory, "row_scales", stages),
        }

    # ------------------------------------------------------------ load

    def _load_ds(self, context: Context, position: Walk, target: LoadTarget) -> None:
        """Load this CTA's 128 x 128 of dS, and the scales of the result."""
        (barrier, stage), number = target, position.ds_number(context.cta_rank)
        atom = cutlass.select_(position.tile.of_keys, Int32(FOR_DK), Int32(FOR_DQ))
        loads = context.tensors.loads[-2:]
        for name, which, source in zip(("ds", "ds_scales"), (0, atom), loads):
            to_smem, from_global = cpasync.tma_partition(
                source.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(context.smem[name], 0, 2),
                cute.group_modes(source.tensor[None, None, which, number, position.head], 0, 2),
            )
            cute.copy(source.atom, from_global, to_smem[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def _load_rows(self, context: Context, work: WorkTile, position: Walk, target: LoadTarget):
        """Load this CTA's half of the columns of 128 rows of Q or K, and the scales of all."""
        row, rank = position.column * DS_TILE, context.cta_rank
        smem, scales = context.smem["rows"], (context.smem["row_scales"], target)
        if position.tile.of_keys:
            sequence, head = context.sequences.query(work.batch), position.head
            load_tile(self.tma_tensor(context, "q_t"), smem, (sequence, row, rank, head), *target)
            load_scales_of(context, self.boxes, "q_t", (sequence, row, head), work, scales)
        else:
            sequence = context.sequences.key(work.batch)
            head = position.head // context.heads_per_kv
            load_tile(self.tma_tensor(context, "k_t"), smem, (sequence, row, rank, head), *target)
            load_scales_of(context, self.boxes, "k_t", (sequence, row, head), work, scales)

    # ------------------------------------------------------------ mma

    @traced("sum")
    @cute.jit
    def _sum(self, context: Context, work: WorkTile, adds: Boolean, rings: SumRings):
        """Issue sum += dS^T Q for dK, or dS K for dQ, of a step; a tile's first one overwrites."""
        context.barriers["step_loaded"].wait(rings.step)
        fence_after_thread_sync()
        smem, stage = context.smem, rings.step.index
        tmem, places = context.tmem.toint(), []
        for name, atoms in (("ds_scales", 1), ("row_scales", ATOMS)):
            places.append(tmem + self.tmem_plan[name].start)
            copy_scales(places[-1], smem[name][None, None, stage].iterator, atoms)
        result = tmem_buffer(context.tmem, self.tmem_plan, "sum", rings.sum)
        a, b = (smem[name][None, None, stage].iterator for name in ("ds", "rows"))
        if self.tiles.tile(context, work).of_keys:
            self.scaled_dk.issue_scaled(result, a, b, adds, (places[0], places[1]))
        else:
            self.scaled_dq.issue_scaled(result, a, b, adds, (places[0], places[1]))
        context.barriers["step_free"].commit(rings.step)
        rings.step.advance()
        return rings


def _tma_view(ds: cute.Tensor, is_scale: bool) -> TmaTensor:
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    rows, columns = (1, ATOM_ELEMENTS) if is_scale else BOX
    heads, units, of_unit, _ = ds.shape
    layout = cute.make_layout(
        (rows, columns, 2 if is_scale else 1, units * of_unit, heads),
        stride=(columns, 1, rows * columns, TILE_ELEMENTS, ds.stride[0]),
    )
    first = ds.iterator + (CODE_ELEMENTS if is_scale else 0)
    view = cute.make_tensor(first.align(16), layout)
    box = cute.make_layout((rows, columns), stride=(columns, 1))
    info = cpasync.make_tiled_tma_atom(load, view, box, (rows, columns))
    return TmaTensor(info[0], info[1])
