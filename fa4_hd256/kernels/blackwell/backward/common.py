"""What the dK/dV kernel and the dQ kernels share.

With s = softmax_scale q k (capped or not), P = exp(s - LSE), dP = dO V^T and
delta = rowsum(dO O) - dLSE::

    dS = P (dP - delta) (1 - tanh^2, with a softcap)
    dV = P^T dO      dQ = softmax_scale dS K      dK = softmax_scale dS^T Q

P and dS are kept in 16 bits, unscaled, as operands. All but `dq_product` compute S and dP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from fa4_hd256.kernels.blackwell.operands import TmaTensor, smem_layout
from fa4_hd256.kernels.blackwell.pair_kernel import CLUSTER, PairKernel
from fa4_hd256.kernels.blackwell.producers import PairProducers
from fa4_hd256.kernels.problem_class import GradientClass
from fa4_hd256.kernels.scalars import CallScalars
from fa4_hd256.kernels.sequences import clipped_view
from fa4_hd256.kernels.views import by_key, by_sequence
from schedulers import WorkTile
from softmax_emu.online import soft_cap
from softmax_emu.recompute import probabilities_from_lse, scale_for_masking

from .config import GradientConfig

__all__ = [
    "BackwardKernel",
    "BackwardTensors",
    "DS",
    "FRAGMENT",
    "heads_per_part",
    "score_gradients",
    "store_row",
    "zeros",
]

FRAGMENT = 32  # columns that one tensor-memory load moves

DS = 4  # dS among the tensors that boxes name


class BackwardTensors(NamedTuple):
    """What a kernel reads and writes.

    loads: TMA tensors in the order of the kernel's `boxes`, of (seqlen, 256, heads, batch) or for
    ragged sequences of a `clipped_view` of it.  stats: (2, heads, padded rows) float32:
    -LSE log2(e), then -delta, of each query row (`Sequences.padded_query_offset`).
    results: (seqlen, 256, heads, batch) each.  ds: TMA tensor of dS, None where it is not stored.
    """

    loads: tuple
    stats: Any
    results: tuple
    ds: Any
    ragged: Any


class BackwardKernel(PairKernel, PairProducers):
    """Base of these kernels: host code, set-up, dispatch, and P from S.

    A kernel adds `boxes`, the TMA loads by name, as (which of q, k, v, dout and ds, rows,
    columns); `problem(...)`, its tiles; `smem(memory)`; what `PairProducers` asks for; and the
    roles `gradient` and, if it `stores`, `store`.
    """

    boxes: dict[str, tuple[int, int, int]]
    stores = False

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, scheduler: Any = None
    ) -> None:
        self.plan = self.plan_of(config.plan, gradient_class)
        super().__init__(self.plan, gradient_class.problem, scheduler)
        self.ex2_pattern = config.ex2_pattern

    def plan_of(self, plan: Any, gradient_class: GradientClass) -> Any:
        """The kernel's plan for a class of calls."""
        return plan

    @cute.jit
    def __call__(
        self,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
        stats: cute.Tensor,
        results: tuple[cute.Tensor, ...],
        ds: Any,
        ragged: Any,
        scalars: CallScalars,
        stream: Any,
    ):
        """Launch.  operands: q, k, v, dout; q, dout: (batch, seqlen_q, heads, 256); k, v: (batch,
        seqlen_k, heads_kv, 256); packed sequences have a batch of 1.  stats: see `BackwardTensors`.
        results: (dq,), or (dk, dv) with heads_kv * head_parts heads.  Last stride 1, other strides
        multiples of 16 bytes.  ds: dS^T, (sequences, heads, keys, queries), the queries padded to
        whole units, None where it is not stored.  ragged: a tuple of tensors in the order of
        `problem_class.ragged`, None if there are none.
        """
        operands = tuple(by_sequence(tensor) for tensor in operands)
        results = tuple(by_sequence(tensor) for tensor in results)
        q, k, _, _ = operands
        heads_per_kv = cute.size(q, mode=[2]) // cute.size(k, mode=[2])
        batch = self.sequence_tensors(ragged).num_batches(q)
        problem = self.problem(scalars, (q, k), batch)
        if cutlass.const_expr(ds is not None):
            ds = self.ds_view(ds)
        loads = self._tma_tensors((*operands, ds))
        tensors = BackwardTensors(loads, stats, results, self.ds_tensor(ds), ragged)
        sizes = (cute.size(q, mode=[0]), cute.size(k, mode=[0]), heads_per_kv)
        sizes = tuple(Int32(size) for size in sizes)
        self.kernel(tensors, sizes, scalars, problem.device_order()).launch(
            grid=self.scheduler.grid_shape(problem, scalars.clusters),
            block=(self.warps.num_threads, 1, 1),
            cluster=CLUSTER,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _tma_tensors(self, operands: tuple) -> tuple[TmaTensor, ...]:
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        tmas = []
        for operand, rows, columns in self.boxes.values():
            tensor = operands[operand]
            view = clipped_view(tensor, rows) if self.problem_class.ragged else tensor
            layout = cute.select(smem_layout(self.dtype, rows, columns, 1), mode=[0, 1])
            info = cpasync.make_tiled_tma_atom(load, view, layout, (rows, columns))
            tmas.append(TmaTensor(info[0], info[1]))
        return tuple(tmas)

    def ds_view(self, ds: Any) -> Any:
        """dS as the kernel addresses it."""
        return by_key(ds)

    def ds_tensor(self, ds: Any) -> TmaTensor | None:
        """The TMA tensor through which the kernel stores dS, if it does."""
        return None

    def descriptors(self, tensors: BackwardTensors) -> tuple[TmaTensor, ...]:
        return tensors.loads if tensors.ds is None else (*tensors.loads, tensors.ds)

    def tma_tensor(self, context: Any, box: str) -> TmaTensor:
        """The TMA tensor of one of `boxes`."""
        return context.tensors.loads[list(self.boxes).index(box)]

    @property
    def scheduled_warps(self) -> int:
        return self.warps.scheduled_warps(self.stores)

    @cute.jit
    def run_role(self, context: Any, warp: Int32):
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
            if cutlass.const_expr(self.stores):
                if warp == warps.store:
                    self.store(context)

    def own_columns(self, context: Any, name: str, columns: int) -> Any:
        """The warp's lanes of a region, from its warpgroup's part of `columns` columns on."""
        start = self.tmem_plan[name].start + self.warpgroup() * columns
        return context.own_lanes + start

    @staticmethod
    def warpgroup() -> Int32:
        """0 or 1: which of the two warpgroups of gradient warps."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4

    def no_work(self) -> WorkTile:
        """An invalid tile."""
        return WorkTile(Int32(0), Int32(0), Int32(0), Boolean(False))

    @cute.jit
    def mask_and_cap(self, context: Any, scores: cute.Tensor, mask: tuple):
        """Softcap and mask, in place; returns 1 - tanh^2 of each score, None without a softcap.

        mask: (whether to apply it, what `mask_scores` takes).
        """
        slopes = None
        if cutlass.const_expr(self.problem_class.softcap):
            slopes = cute.make_rmem_tensor(cute.size(scores), Float32)
            soft_cap(scores, context.scalars.cap_scale)
            for i in range(0, cute.size(scores)):
                slopes[i] = 1.0 - scores[i] * scores[i]
        if mask[0]:
            self.mask_scores(scores, mask[1:])
        return slopes

    def mask_scores(self, scores: cute.Tensor, mask: tuple) -> None:
        """Scores that are not visible := -inf.  mask: (Visibility, row, first column)."""
        visibility, row, column = mask
        visibility.apply(scores, row, column)

    def exponentiate(
        self, context: Any, scores: cute.Tensor, negative_lse: Any, place: tuple[int, int]
    ) -> None:
        """scores := P, in place.  place: (first column, columns of the thread)."""
        scale_log2 = scale_for_masking(context.scalars.scale_log2)
        first, columns = (count // FRAGMENT for count in place)
        probabilities_from_lse(scores, scale_log2, negative_lse, (self.ex2_pattern, first, columns))


def heads_per_part(scalars: CallScalars, heads_per_kv: Any) -> Any:
    """Query heads of a part of a KV head's group; the last part may have fewer, or none."""
    return (heads_per_kv + scalars.head_parts - 1) // scalars.head_parts


def score_gradients(dp: cute.Tensor, factors: cute.Tensor, negative_delta: Any) -> None:
    """dp := factors * (dp - delta), dS in float32; factors: P, times the slope of the softcap.

    negative_delta: one Float32, or a register tensor with one for each column.
    """
    for i in range(0, cute.size(dp), 2):
        delta = (negative_delta, negative_delta)
        if isinstance(negative_delta, cute.Tensor):
            delta = (negative_delta[i], negative_delta[i + 1])
        pair = cute.arch.add_packed_f32x2((dp[i], dp[i + 1]), delta)
        dp[i], dp[i + 1] = cute.arch.mul_packed_f32x2(pair, (factors[i], factors[i + 1]))


def store_row(values: cute.Tensor, destination: cute.Tensor) -> None:
    """Register values, Float32, to consecutive elements of global memory, in their type."""
    rounded = cute.make_rmem_tensor(cute.size(values), destination.element_type)
    rounded.store(values.load().to(destination.element_type))
    cute.autovec_copy(rounded, destination)


def zeros(columns: int) -> cute.Tensor:
    """A register tensor of Float32 zeros."""
    values = cute.make_rmem_tensor(columns, Float32)
    values.fill(0.0)
    return values

