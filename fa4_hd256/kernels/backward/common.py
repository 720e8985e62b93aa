"""Base of the gradient kernels of every architecture.

With s = softmax_scale q k (changed or not), P = exp(s - LSE), dP = dO V^T and delta = rowsum(dO O)
- dLSE::

    dS = P (dP - delta) * slope of what changes s (`ScoreChange`)
    dV = P^T dO      dQ = softmax_scale dS K      dK = softmax_scale dS^T Q

P and dS are stored in 16 bits, unscaled, as operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...schedulers.carried import Carried
from ...schedulers.order import PackedBlocks, TileProblem
from ...schedulers.protocol import CLUSTER_SIZE
from ...softmax_emu.online import soft_cap
from ..context import KernelContext, KernelParts
from ..functions.kernel_functions import KernelFunctions, ScoreChange, ScorePlaces
from ..limits import SECTOR_BYTES
from ..operands import TmaTensor, smem_layout
from ..problem_class import CallScalars, OptionalTensors, ProblemClass
from ..rows.sequences import SequenceTensors, by_sequence, clipped_view


class SlopedChange(ScoreChange):
    """Change of a kernel's scores, with the derivative of the changed ones by the scores."""

    @property
    def has_slopes(self) -> bool:
        functions = self._functions
        return self.is_softcap or (functions is not None and functions.slope is not None)

    def apply_with_slopes(
        self, scores: cute.Tensor, scale: Float32, places: ScorePlaces | None
    ) -> cute.Tensor | None:
        """Change scores by instructions on pairs; return their slopes, None where all are 1."""
        if not self.has_slopes:
            self.apply(scores, scale, places)
            return None
        slopes = cute.make_rmem_tensor(cute.size(scores), Float32)
        if self.by_place:
            self._each(scores, scale, places, slopes)
            return slopes
        soft_cap(scores, scale)
        for i in range(0, cute.size(scores), 2):
            pair, negated = (scores[i], scores[i + 1]), (-scores[i], -scores[i + 1])
            slopes[i], slopes[i + 1] = cute.arch.fma_packed_f32x2(negated, pair, (1.0, 1.0))
        return slopes

    def apply_for_slopes(
        self, scores: cute.Tensor, scale: Float32, places: ScorePlaces | None
    ) -> Callable[[int, Float32], Float32] | None:
        """Change scores without instructions on pairs; return a function from the number of a score
        and the changed score, masked or not, to its slope; None where the slope is 1. The softcap's
        slope takes no register of its own so."""
        if self.by_place and self.has_slopes:
            slopes = cute.make_rmem_tensor(cute.size(scores), Float32)
            self._each(scores, scale, places, slopes)
            return lambda number, changed: slopes[number]
        self.apply(scores, scale, places, packed=False)
        if not self.has_slopes:
            return None
        # 0 where the score is -inf.
        return lambda number, changed: cute.arch.fmax(1.0 - changed * changed, 0.0)


class GradientFunctions(KernelFunctions):
    @property
    def change(self) -> SlopedChange:
        return SlopedChange(self.problem_class, self.score_mod)


class BackwardKernelTensors(NamedTuple):
    """Tensors that a gradient kernel reads and writes."""

    #: TMA tensors in the order of the kernel's `boxes`, of (seqlen, 256, heads, batch) or for
    #: ragged sequences of a `clipped_view` of it.
    loads: tuple[TmaTensor, ...]
    #: (2, heads, padded rows) float32: -LSE log2(e), then -delta, of each query row
    #: (`Sequences.padded_query_offset`).
    stats: cute.Tensor
    #: (seqlen, 256, heads, batch) each.
    results: tuple[cute.Tensor, ...]
    #: See `backward.ds_tiles`; None where it is not stored.
    ds: Any
    #: Ragged tensors, and what functions of the call read.
    optional: OptionalTensors


@dataclass(frozen=True)
class BackwardContext(KernelContext):
    """State that every warp role of one CTA of a gradient kernel shares. Buffers in `smem`: those
    of the kernel's `smem(memory)`, which has their shapes."""

    tensors: BackwardKernelTensors


class BackwardEntry:
    """Base: host code of a kernel that makes gradients, whose clusters have two CTAs.

    A kernel has `boxes`, the TMA loads by name, as (which of q, k, v and dout, rows, columns);
    `copy_operation(box)`, how one is loaded; `problem(scalars, (q, k), batch)`, its tiles; `warps`,
    `scheduler`, and `kernel(tensors, sizes, scalars, order)`.  rows_of: "q" or "k" where a tile is
    `plan.tile_rows` rows of that operand.
    """

    rows_of: str | None = None
    plan: Any
    boxes: dict[str, tuple[int, int, int]]
    problem_class: ProblemClass
    parts: KernelParts
    scheduler: Any
    warps: Any
    problem: Any
    kernel: Any

    @property
    def functions(self) -> GradientFunctions:
        functions: GradientFunctions = self.parts.functions
        return functions

    @cute.jit
    def __call__(
        self,
        operands: tuple[cute.Tensor, ...],
        stats: cute.Tensor,
        results: tuple[cute.Tensor, ...],
        ds: Any,
        optional: OptionalTensors | None,
        scalars: CallScalars,
        stream: Any,
    ):
        """Launch.  Arguments: `run.argument_types`, NOTE [arguments of the backward].  Last stride
        1, other strides multiples of 16 bytes, of results 32."""
        optional = OptionalTensors() if optional is None else optional
        sequences = optional.ragged
        operands = self.operand_views(operands)
        results = tuple(by_sequence(tensor, SECTOR_BYTES) for tensor in results)
        q, k = operands[:2]
        heads_per_kv = cute.size(q, mode=[2]) // cute.size(k, mode=[2])
        batch = sequences.num_batches(q)
        problem = self.problem(scalars, (q, k), batch)
        problem = self.in_a_row(problem, scalars, (q, k), sequences)
        loads = self.tma_tensors(operands, ds)
        tensors = BackwardKernelTensors(loads, stats, results, ds, optional)
        sizes = (cute.size(q, mode=[0]), cute.size(k, mode=[0]), heads_per_kv)
        sizes = tuple(Int32(size) for size in sizes)
        self.kernel(tensors, sizes, scalars, problem.device_order()).launch(
            grid=self.scheduler.grid_shape(problem, scalars.clusters),
            block=(self.warps.num_threads, 1, 1),
            cluster=(CLUSTER_SIZE, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def in_a_row(
        self,
        problem: TileProblem,
        scalars: CallScalars,
        operands: tuple[cute.Tensor, ...],
        sequences: SequenceTensors,
    ) -> TileProblem:
        """The problem; packed sequences with blocks in a row have tiles of rows of one operand."""
        if self.rows_of is None:
            return problem
        side = "qk".index(self.rows_of)
        offsets = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)[side]
        if offsets is None:
            return problem
        blocks = PackedBlocks(offsets, self.plan.tile_rows)
        return problem.in_a_row(blocks, cute.size(operands[side], mode=[0]))

    def operand_views(self, operands: tuple[cute.Tensor, ...]) -> tuple[cute.Tensor, ...]:
        """Return the operands as loads take them, q and k first: `by_sequence`."""
        return tuple(by_sequence(tensor) for tensor in operands)

    def copy_operation(self, box: str) -> Any:
        """The DSL's TMA load of one of `boxes`."""
        raise NotImplementedError

    def tma_tensors(self, operands: tuple[cute.Tensor, ...], ds: Any) -> tuple[TmaTensor, ...]:
        tmas = []
        for box, (operand, rows, columns) in self.boxes.items():
            operation, tensor = self.copy_operation(box), operands[operand]
            view = clipped_view(tensor, rows) if self.problem_class.is_clipped else tensor
            layout = cute.select(smem_layout(rows, columns, 1), mode=[0, 1])
            info = cpasync.make_tiled_tma_atom(operation, view, layout, (rows, columns))
            tmas.append(TmaTensor(info[0], info[1]))
        return tuple(tmas)


class Step(Carried):
    """Queries of one query head that a tile of keys meets: (head, which of them, counted in the
    kernel's steps); lives across loops. span: [begin, end) of the steps of each head, which a loop
    over them does not change."""

    CARRIED: ClassVar[tuple[str, ...]] = ("head", "index")

    def __init__(self, head: Int32, index: Int32, span: tuple[Int32, Int32]) -> None:
        self.head, self.index, self.span = head, index, span

    def following(self) -> Step:
        """The next step of the head, else the first of the next head."""
        begin, end = self.span
        wraps = self.index + 1 == end
        head = self.head + Int32(wraps)
        return Step(head, cutlass.select_(wraps, begin, self.index + 1), self.span)


def heads_per_part(scalars: CallScalars, heads_per_kv: Any) -> Any:
    """Query heads of a part of a KV head's group; the last part may have fewer, or none."""
    return (heads_per_kv + scalars.head_parts - 1) // scalars.head_parts


def heads_of_part(context: BackwardContext, head: Int32) -> tuple[Int32, Int32]:
    """Return (first query head, how many) of a part.  head: KV head * head_parts + part."""
    per_part = heads_per_part(context.scalars, context.heads_per_kv)
    kv_head, part = head // context.scalars.head_parts, head % context.scalars.head_parts
    begin = part * per_part
    count = cutlass.max(cutlass.min(per_part, context.heads_per_kv - begin), 0)
    return kv_head * context.heads_per_kv + begin, count
