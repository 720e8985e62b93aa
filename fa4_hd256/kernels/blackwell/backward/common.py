"""Base of the pair kernels that make gradients; all but `products` compute S and dP."""

from __future__ import annotations

from typing import Any, cast

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from ....schedulers import TileOrder, WorkTile
from ....softmax_emu.pattern import Ex2Pattern
from ....softmax_emu.recompute import probabilities_from_lse, scale_for_masking
from ...backward.common import BackwardEntry, BackwardKernelTensors
from ...operands import TmaTensor
from ...problem_class import GradientClass
from ...scalars import CallScalars
from ..instructions import (
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..pair_kernel import PairKernel
from .config import GradientConfig
from .context import BlackwellBackwardContext

__all__ = [
    "BlackwellBackward",
    "FRAGMENT",
    "multiply_by",
    "score_gradients",
    "store_row",
    "warpgroup",
    "zeros",
]

FRAGMENT = 32  # columns that one tensor-memory load moves


class BlackwellBackward(BackwardEntry, PairKernel):
    """Base of these kernels: host code, set-up, dispatch, and P from S.

    A kernel adds `boxes` and `problem(...)`, see `BackwardEntry`; `smem(memory)`; and its roles.
    """

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, scheduler: Any = None
    ) -> None:
        self.plan = config.plan
        super().__init__(self.plan, gradient_class.problem, scheduler)
        self.ex2_pattern = config.ex2_pattern

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: BackwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> BlackwellBackwardContext:
        """`PairKernel.set_up`."""
        common = super().set_up(allocator, tensors, sizes, scalars, order)
        return BlackwellBackwardContext(**vars(common))

    def copy_operation(self, box: str) -> Any:
        """The DSL's TMA load of one of `boxes`, whose bytes complete on the leader's barrier."""
        return cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)

    def descriptors(self, tensors: BackwardKernelTensors) -> tuple[TmaTensor, ...]:
        return tensors.loads

    def tma_tensor(self, context: BlackwellBackwardContext, box: str) -> TmaTensor:
        """The TMA tensor of one of `boxes`."""
        return context.tensors.loads[list(self.boxes).index(box)]

    def load(self, context: BlackwellBackwardContext) -> None:
        """Role of one warp of each CTA: fetch what the MMAs need."""
        raise NotImplementedError

    def mma(self, context: BlackwellBackwardContext) -> None:
        """Role of one warp of the leader CTA: issue the MMAs of both."""
        raise NotImplementedError

    def gradient(self, context: BlackwellBackwardContext) -> None:
        """Role of two warpgroups of each CTA: everything else."""
        raise NotImplementedError

    @cute.jit
    def run_role(self, context: BlackwellBackwardContext, warp: Int32):
        """The role of this warp, with its register budget."""
        warps = self.warps
        if warp < warps.mma:
            cute.arch.setmaxregister_increase(warps.registers_gradient)
            self.gradient(context)
        else:
            cute.arch.setmaxregister_decrease(warps.registers_other)
            if warp == warps.mma:
                if context.cta_rank == 0:
                    self.mma(context)
            if warp == warps.load:
                self.load(context)
            if warp == warps.scheduler:
                self.schedule(context)

    def own_columns(self, context: BlackwellBackwardContext, name: str, columns: int) -> Any:
        """The warp's lanes of a region, from its warpgroup's part of `columns` columns on."""
        start = self.tmem_plan[name].start + warpgroup() * columns
        return context.own_lanes + start

    def no_work(self) -> WorkTile:
        """An invalid tile."""
        return WorkTile(Int32(0), Int32(0), Int32(0), Boolean(False))

    def take_scores(
        self, context: BlackwellBackwardContext, scores: cute.Tensor, load: Any, states: Any
    ) -> Any:
        """S of one step to registers; its buffer goes back to the MMA warp.

        scores: as many as a thread has columns of its warpgroup.  load: of `blackwell.tmem`.
        """
        context.barriers["s_done"].wait(states["s_done"])
        fence_after_thread_sync()
        load(self.own_columns(context, "s", cute.size(scores)), scores)
        cute.arch.fence_view_async_tmem_load()
        fence_before_thread_sync()
        context.barriers["s_free"].arrive(states["s_done"], is_converged=True)
        states.advance("s_done")
        return states

    @cute.jit
    def change_and_mask(
        self,
        context: BlackwellBackwardContext,
        scores: cute.Tensor,
        places: Any,
        mask: tuple[Any, ...],
    ):
        """Change the scores, and mask them, in place; return the slope of each score, None where
        that is 1.

        places: see `ScoreChange.apply`.  mask: (whether to apply it, what `mask_scores` takes).
        """
        slopes = None
        if cutlass.const_expr(self.change.exists):
            slopes = self.change.apply_with_slopes(scores, context.scalars.cap_scale, places)
        if mask[0]:
            self.mask_scores(scores, mask[1:])
        return slopes

    def mask_scores(self, scores: cute.Tensor, mask: tuple[Any, ...]) -> None:
        """Scores that are not visible := -inf.  mask: (Visibility, row, first column)."""
        visibility, row, column = mask
        visibility.apply(scores, row, column)

    def exponentiate(
        self,
        context: BlackwellBackwardContext,
        scores: cute.Tensor,
        negative_lse: Any,
        place: tuple[int, int],
    ) -> None:
        """scores := P, in place.  place: (first column, columns of the thread)."""
        scale_log2 = scale_for_masking(context.scalars.scale_log2)
        first, columns = (count // FRAGMENT for count in place)
        pattern = cast(Ex2Pattern, self.ex2_pattern)
        probabilities_from_lse(scores, scale_log2, negative_lse, (pattern, first, columns))


def score_gradients(dp: cute.Tensor, factors: cute.Tensor, negative_delta: Any) -> None:
    """dp := factors * (dp - delta), dS in float32; factors: P, times the slope of the score.

    negative_delta: one Float32, or a register tensor with one for each column.
    """
    for i in range(0, cute.size(dp), 2):
        delta = (negative_delta, negative_delta)
        if isinstance(negative_delta, cute.Tensor):
            delta = (negative_delta[i], negative_delta[i + 1])
        pair = cute.arch.add_packed_f32x2((dp[i], dp[i + 1]), delta)
        dp[i], dp[i + 1] = cute.arch.mul_packed_f32x2(pair, (factors[i], factors[i + 1]))


def multiply_by(values: cute.Tensor, factors: cute.Tensor) -> None:
    """values *= factors, register tensors of an even number of Float32 (mul.rn.f32x2)."""
    for i in range(0, cute.size(values), 2):
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(
            (values[i], values[i + 1]), (factors[i], factors[i + 1])
        )


def store_row(values: cute.Tensor, destination: cute.Tensor) -> None:
    """Register values, Float32, to consecutive elements of global memory, in their type."""
    rounded = cute.make_rmem_tensor(cute.size(values), destination.element_type)
    rounded.store(values.load().to(destination.element_type))
    cute.autovec_copy(rounded, destination)


def warpgroup() -> Int32:
    """Return which of the two warpgroups of gradient warps this thread is in, 0 or 1."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4


def zeros(columns: int) -> cute.Tensor:
    """A register tensor of Float32 zeros."""
    values = cute.make_rmem_tensor(columns, Float32)
    values.fill(0.0)
    return values
