"""The decode kernel for K and V in NVFP4: `config` NOTE [NVFP4].

Four warps bring Q, K and V to float16: Q where it lies (`scaled`), K and V^T to tensor memory
(`nvfp4_operands`), in the order of the MMAs::

    queries    Q'                       | Q''
    load       K(1) V(0) K(2) V(1) ..   | K(0')    V(last) K(1')  V(0') ..
    convert    K(1) V(0) K(2) V(1) ..   | Q' K(0') V(last) K(1')  V(0') ..
    mma        QK(1) PV(0) QK(2) PV(1)..| QK(0')   PV(last) QK(1') PV(0') ..
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from ....schedulers.protocol import WorkTile
from ...context import KernelParts
from ...forward.context import ForwardKernelTensors
from ...forward.nvfp4_words import CODE_COLUMNS, SCALE_COLUMNS, copy_scales, with_block_scales
from ...limits import HEAD_DIM
from ...operands import SharedMemory, TmaTensor
from ...plan.edges import RingRecord, RingState
from ...problem_class import OptionalTensors, ProblemClass
from ...ranges import traced
from ...rows.lanes import lane_columns
from ...rows.sequences import columns_of
from ..instructions import (
    Mma,
    MmaShape,
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
    k_major_operand,
)
from ..pair_kernel import await_buffer
from ..tmem import tmem_buffer, tmem_load
from . import scaled
from .config import BLOCK_KV, HALF, HALVES, MMA_K, DecodeConfig
from .context import BlackwellDecodeContext, DecodeLoadRings
from .context import BlackwellE4m3DecodeContext as Context
from .kernel import DecodeKernel, KvTile, p_layout
from .nvfp4_operands import HALF_COLUMNS, store_keys, store_values, value_column


class DecodeNvfp4Kernel(DecodeKernel):
    """See the module's docstring; the arguments are those of `DecodeKernel`."""

    kv_bytes: Any = Fraction(1, 2)
    halves_apart = False
    context_class = Context
    operand_ring = "operand"
    run_other_role = scaled.run_other_role
    _load_q = scaled.load_q
    _bring_q = scaled.bring_q
    _create = scaled.create
    _tile_state = scaled.tile_state
    _begin_tile = scaled.begin_tile
    _end_tile = scaled.end_tile
    _load_scores = scaled.load_scores
    _load_half = scaled.load_half
    _weigh = scaled.weigh
    _scaled_inverse = scaled.scaled_inverse

    def __init__(
        self, config: DecodeConfig, problem_class: ProblemClass, parts: KernelParts
    ) -> None:
        super().__init__(config, problem_class, parts)
        scaled.prepare(self, top_exponent=14)

    @property
    def operand_dtype(self) -> Any:
        return cutlass.Float16

    def make_mmas(self) -> None:
        rows, ctas = self.config.rows, self.ctas
        negate = self.problem_class.negative_scale
        shape = MmaShape(BLOCK_KV, rows, False, negate_a=negate, ctas=ctas)
        self.qk = [Mma(shape, TmemOperand.contiguous(HEAD_DIM), k_major_operand(rows))]
        shape = replace(shape, m=HALF, b_mn_major=True, negate_a=False)
        keys = TmemOperand.contiguous(BLOCK_KV).step_columns
        self.pv = [
            Mma(
                shape,
                TmemOperand(tuple(half * HALF_COLUMNS + column for column in keys)),
                p_layout(MMA_K),
            )
            for half in HALVES
        ]

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: OptionalTensors
    ) -> ForwardKernelTensors:
        load, (q, k, v, out) = cpasync.CopyBulkTensorTileG2SOp(), operands
        q = self.tma_tensor("q", q, (load, self.config.rows, HEAD_DIM))
        k, v = (
            self.loaded_tensor(name, view, (load, BLOCK_KV, CODE_COLUMNS))
            for name, view in (("k", k), ("v", v))
        )
        found = ForwardKernelTensors(q, k, v, None, out, lse, optional)
        return with_block_scales(self, found, load, BLOCK_KV)

    def descriptors(self, tensors: ForwardKernelTensors) -> tuple[TmaTensor, ...]:
        operands = tensors.q, tensors.k, tensors.v
        if self.gathers:
            return operands
        return *operands, tensors.optional.k_block_scale, tensors.optional.v_block_scale

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config

        def words(region: str) -> cute.Tensor:
            return cute.make_tensor(memory.region(region, Uint32, 1024), cute.make_layout(1))

        stages = config.half_stages
        return scaled.smem(self, memory) | {
            "q": memory.operand("q", config.rows, HEAD_DIM, config.q_stages, self.operand_dtype),
            "kv": memory.operand("kv", BLOCK_KV, CODE_COLUMNS, stages),
            "kv_scales": memory.operand("kv_scales", BLOCK_KV, SCALE_COLUMNS, stages),
            "kv_words": words("kv"),
            "scale_words": words("kv_scales"),
        }

    # ------------------------------------------------------------ load

    @traced("load")
    def _load_tile(
        self,
        context: BlackwellDecodeContext,
        work: WorkTile,
        kv_tile: KvTile,
        name: str,
        rings: DecodeLoadRings,
    ) -> DecodeLoadRings:
        head = work.head // context.heads_per_kv
        place = self.keys.rows(context, work, kv_tile), self.keys.first_row(kv_tile), 0, head
        target = await_buffer(context, "kv", rings.kv)
        scales = getattr(context.tensors.optional, f"{name}_block_scale")
        buffers = context.smem["kv_scales"]
        self.keys.load(getattr(context.tensors, name), context.smem["kv"], place, target)
        if self.gathers:
            context.barriers["scales_free"].wait(rings.kv)
            copy_scales(scales, buffers[None, None, rings.kv.index].iterator, kv_tile, head)
            context.barriers["scales_loaded"].arrive_copies(rings.kv)
        else:
            self.keys.load(scales, buffers, place, target)
        rings.kv.advance()
        return rings

    # ------------------------------------------------------------ convert

    @cute.jit
    def convert(self, context: Context):
        """Bring Q and K(0) to float16, then K(i + 1) before V(i); Q and K(0) of the next tile
        before the last V of this one. One loop over the steps of all tiles: each conversion is
        thousands of instructions, and stands in the kernel once."""
        waited = "rows_loaded", "factors_free", "kv_loaded", "operand_free"
        states = RingRecord.waiting(self.edges, *waited)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        step, num_steps = Int32(0), self._steps(context, work)
        # V of the step before is still to come.
        has_values = Boolean(False)
        while work.is_valid | has_values:
            has_keys = step < num_steps
            if has_keys:
                if step == 0:
                    states = self._bring_q(context, states)
                states = self._convert_tile(context, "k", states)
            if has_values:
                states = self._convert_tile(context, "v", states)
            step += 1
            if step >= num_steps:
                if has_keys:
                    work = scheduler.advance_to_next_work()
                else:
                    scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
                step, num_steps = Int32(0), self._steps(context, work)
            has_values = has_keys
        # The last commits arrive at this CTA's barriers.
        context.barriers["operand_free"].wait_for_all(states["operand_free"])

    @cute.jit
    def _steps(self, context: Context, work: WorkTile):
        steps = Int32(0)
        if work.is_valid:
            steps = self.num_steps(context, work)
        return steps

    @traced("convert")
    @cute.jit
    def _convert_tile(self, context: Context, name: str, states: RingRecord):
        """Bring a tile of K or V to float16 in tensor memory."""
        barriers, loaded, free = context.barriers, states["kv_loaded"], states["operand_free"]
        barriers["kv_loaded"].wait(loaded)
        if cutlass.const_expr(self.gathers):
            barriers["scales_loaded"].wait(loaded)
        barriers["operand_free"].wait(free)
        fence_after_thread_sync()
        start, distance = self.tmem_plan.buffers("operand", free.stages)
        address = context.warp_lanes + (start + free.index * distance)
        if cutlass.const_expr(name == "k"):
            store_keys(context.smem, loaded.index, address)
        else:
            store_values(context.smem, loaded.index, address)
        barriers["kv_free"].arrive(loaded)
        if cutlass.const_expr(self.gathers):
            barriers["scales_free"].arrive(loaded)
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        barriers["operand_loaded"].arrive(free)
        states.advance("kv_loaded")
        states.advance("operand_free")
        return states

    def _store_row(
        self, context: Context, row: tuple[Any, Any], elements: list[Float32], stage: Int32
    ) -> None:
        """Store this lane's elements of a row where they were loaded."""
        values = cute.make_rmem_tensor(len(elements), Float32)
        for number, element in enumerate(elements):
            values[number] = element
        rounded = cute.make_rmem_tensor(len(elements), self.operand_dtype)
        rounded.store(values.load().to(self.operand_dtype))
        target = context.smem["q"][row, None, stage]
        cute.autovec_copy(rounded, lane_columns(target, cute.arch.lane_idx()))

    # ------------------------------------------------------------ mma

    def _operand(self, context: BlackwellDecodeContext, state: RingState) -> Int32:
        return tmem_buffer(context.tmem, self.tmem_plan, "operand", state)

    # ------------------------------------------------------------ softmax

    def _load_sum(self, address: Any) -> cute.Tensor:
        """Load a lane's rows."""
        values = cute.make_rmem_tensor(self.group.count, Float32)
        tmem_load(address, values, self.group.count)
        cute.arch.fence_view_async_tmem_load()
        return values

    def _store_probabilities(
        self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor
    ) -> None:
        probabilities = cute.make_rmem_tensor(self.group.count, self.operand_dtype)
        softmax.exponentiate(scores, probabilities, softmax.weights[0])
        column = context.smem["p"][None, self._number_in_group(), 0]
        cute.autovec_copy(probabilities, columns_of(column, context.first_row, self.group.count))

    def _column(self, half: int) -> Int32:
        return value_column(self._number_in_group(), half)
