"""The backward's first kernel: what every row of dO, O and LSE comes down to, two floats.

stats[0]: -LSE * log2(e), so that the probabilities are exp2(score + stats[0]).
stats[1]: -delta, where delta = sum over the columns of dO * O, less the gradient of LSE.  With P
the probabilities and dP = dO V^T, the gradient of the scores is P * (dP - delta): the softmax's
part is P * (dP - rowsum(P * dP)), where rowsum(P * dP) = rowsum(dO * O), and dLSE/dS = P
(FlashAttention, arXiv 2205.14135, appendix B; arXiv 2307.08691, 3.1.2).  Both are negated, ready
to be added two at a time.

With a gate of the result, out = sigmoid(gate) * O, the gradient of out is brought to that of O:
dO = sigmoid(gate) * dout, which is written, and since dO * O = dout * out delta stays as it is.
dgate = dout * out * (1 - sigmoid(gate)), summed over the columns where a gate has one value of a
row.

A row that sees no key, and every row with which a sequence is filled up to a multiple of
`PADDING`, gets -inf and 0: its probabilities and its gradients vanish without a mask.

The kernel is bound by memory, 1 KiB per row: a warp reads a row with 16 bytes per lane, and each
lane keeps the sum of one row, so that LSE and the results move as whole sectors.  At 38 registers
per thread on Hopper, allocated as 40, six CTAs of 8 warps share an SM, with 2 KiB in flight for
each warp.  With four rows at a time a thread has 24 bytes of stack there, and the kernel takes 9 %
longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from ..limits import WARP_SIZE
from ..plan.edges import SharedByReference
from ..problem_class import GATE_OF_HEADS, CallScalars
from ..rows.lanes import LANE_COLUMNS, lane_columns, load_lane_columns
from ..rows.output_gate import by_rows, row_of_gate, sigmoid
from ..rows.sequences import PADDING, Sequence, Sequences, SequenceTensors, by_sequence

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class PreprocessClass:
    """Facts of a call that are compiled into the preprocess kernel. dtype: of out and dout.
    lse_gradient: the gradient of the LSE is given. ragged: which of cu_seqlens_q and seqused_q are
    given. out_gate: as of `ProblemClass`."""

    dtype: torch.dtype
    lse_gradient: bool = False
    ragged: tuple[str, ...] = ()
    out_gate: str = ""
    use_clc: ClassVar[bool] = False
    #: Names of the `CallScalars` that the kernel gets.
    scalars: ClassVar[tuple[str, ...]] = ("max_seqlen_q",)


@dataclass(frozen=True)
class PreprocessConfig:
    """num_warps: warps of a CTA. rows_per_warp: rows of one warp, one per lane at most.
    rows_at_once: rows of one iteration of the loop, whose loads depend on nothing in it. Raises
    ValueError where the rows of a CTA do not divide `PADDING`."""

    num_warps: int = 8
    rows_per_warp: int = 16
    rows_at_once: int = 2

    def __post_init__(self) -> None:
        if PADDING % self.tile_rows or self.rows_per_warp > WARP_SIZE:
            raise ValueError(
                f"{self.num_warps} warps of {self.rows_per_warp} rows; accepted: at most "
                f"{WARP_SIZE} rows a warp, and warps * rows a divisor of {PADDING}"
            )
        if self.rows_per_warp % self.rows_at_once:
            raise ValueError(
                f"rows_at_once is {self.rows_at_once}; accepted: a divisor of {self.rows_per_warp}"
            )

    @property
    def tile_rows(self) -> int:
        return self.num_warps * self.rows_per_warp


class PreprocessRows(NamedTuple):
    """Tensors of rows that the preprocess kernel reads: out, dout (batch, seqlen_q, heads, 256);
    lse, and dlse where the problem class has it, else None: (batch, heads, seqlen_q) float32, any
    strides.

    With a gate: gate, that of out, as the forward has it; do, like out, and dgate, like gate, which
    it writes. Else None.
    """

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    gate: Any = None
    do: Any = None
    dgate: Any = None


@dataclass(frozen=True)
class _Context(SharedByReference):
    rows: PreprocessRows
    stats: Any
    head: Int32


class PreprocessKernel:
    """Launch with `__call__`, under `cute.compile`."""

    def __init__(self, config: PreprocessConfig, problem_class: PreprocessClass) -> None:
        self.config = config
        self.problem_class = problem_class

    @cute.jit
    def __call__(
        self,
        rows: PreprocessRows,
        stats: cute.Tensor,
        ragged: SequenceTensors | None,
        scalars: CallScalars,
        stream: Any,
    ) -> None:
        """rows: last stride 1 and other strides multiples of 16 bytes for out and dout; packed
        sequences have a batch of 1. stats: (2, heads, `padded_rows`) float32. ragged: None if there
        are none."""
        sequences = SequenceTensors() if ragged is None else ragged
        out, dout = (by_sequence(tensor) for tensor in (rows.out, rows.dout))
        batch = sequences.num_batches(out)
        seqlen_q, _, heads, _ = out.shape
        tile_rows = self.config.tile_rows
        blocks = (scalars.max_seqlen_q + (PADDING - 1)) // PADDING * (PADDING // tile_rows)
        sizes = tuple(Int32(size) for size in (seqlen_q, heads, blocks))
        form = self.problem_class.out_gate
        gates: tuple[cute.Tensor, ...] = ()
        if cutlass.const_expr(form):
            gates = by_rows(form, rows.gate), by_sequence(rows.do), by_rows(form, rows.dgate)
        rows = PreprocessRows(out, dout, rows.lse, rows.dlse, *gates)
        self.kernel(rows, stats, sequences, sizes).launch(
            grid=(heads * blocks * batch, 1, 1),
            block=(self.config.num_warps * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        rows: PreprocessRows,
        stats: cute.Tensor,
        tensors: SequenceTensors,
        sizes: tuple[Int32, Int32, Int32],
    ) -> None:
        """One CTA: `tile_rows` rows of one head; neighbouring CTAs read neighbouring heads."""
        config = self.config
        seqlen_q, heads, blocks = sizes
        index, _, _ = cute.arch.block_idx()
        head = index % heads
        block = index // heads % blocks
        batch = index // heads // blocks
        sequences = Sequences(tensors, seqlen_q, Int32(0))
        sequence = sequences.query(batch)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first = block * config.tile_rows + warp * config.rows_per_warp
        if first < (sequence.length + (PADDING - 1)) // PADDING * PADDING:
            context = _Context(rows, stats, head)
            delta = self._row_sums(context, sequence, first)
            lane = cute.arch.lane_idx()
            if lane < config.rows_per_warp:
                to = sequences.padded_query_offset(batch) + first + lane
                self._store(context, sequence, first + lane, (delta, to))

    @cute.jit
    def _row_sums(self, context: _Context, sequence: Sequence, first: Int32) -> Float32:
        """rowsum(dO * O) of row first + lane, in the lanes below `rows_per_warp`."""
        config, lane = self.config, cute.arch.lane_idx()
        last = cutlass.max(sequence.length - 1, 0)
        mine = Float32(0.0)
        for start in cutlass.range(0, config.rows_per_warp, config.rows_at_once, unroll=1):
            # A row past the end is replaced by the last one: no branch parts the loads.
            indices = [
                sequence.offset + cutlass.min(first + start + i, last)
                for i in range(config.rows_at_once)
            ]
            pairs = [
                tuple(
                    load_lane_columns(tensor[row, None, context.head, sequence.batch], lane)
                    for tensor in (context.rows.out, context.rows.dout)
                )
                for row in indices
            ]
            for i, (out, dout) in enumerate(pairs):
                product = out.load().to(Float32) * dout.load().to(Float32)
                total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
                is_mine = lane == start + i
                total = cute.arch.warp_reduction_sum(total)
                if cutlass.const_expr(self.problem_class.out_gate):
                    if first + start + i < sequence.length:
                        place = indices[i], context.head, sequence.batch
                        self._through_gate(context, place, (dout, product), total)
                mine = cutlass.select_(is_mine, total, mine)
        return mine

    def _through_gate(
        self,
        context: _Context,
        place: tuple[Int32, Int32, Int32],
        of_lane: tuple[cute.Tensor, Any],
        total: Float32,
    ) -> None:
        """Write dO and the gradient of the gate of a row. place: (row, head, batch entry); of_lane:
        (dout, dout * out) of this lane's columns; total: the sum of the latter over the row."""
        (dout, product), rows, lane = of_lane, context.rows, cute.arch.lane_idx()
        form, (row, head, batch) = self.problem_class.out_gate, place
        of_row, is_of_heads = row_of_gate(form, rows.gate, *place), form == GATE_OF_HEADS
        own = [of_row] * LANE_COLUMNS if is_of_heads else load_lane_columns(of_row, lane)
        gates = [own[i].to(Float32) for i in range(LANE_COLUMNS)]
        scaled = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        scaled.store(dout.load().to(Float32))
        for i, gate in enumerate(gates):
            scaled[i] = scaled[i] * sigmoid(gate)
        self._store_columns(scaled, rows.do[row, None, head, batch], lane)
        # 1 - sigmoid(x) is sigmoid(-x), without a difference of near numbers.
        if cutlass.const_expr(is_of_heads):
            # Every lane writes the same.
            dgate = total * sigmoid(-gates[0])
            rows.dgate[row, head, batch] = dgate.to(rows.dgate.element_type)
        else:
            scaled.store(product)
            for i, gate in enumerate(gates):
                scaled[i] = scaled[i] * sigmoid(-gate)
            self._store_columns(scaled, rows.dgate[row, None, head, batch], lane)

    def _store_columns(self, values: cute.Tensor, target: cute.Tensor, lane: Int32) -> None:
        rounded = cute.make_rmem_tensor(LANE_COLUMNS, target.element_type)
        rounded.store(values.load().to(target.element_type))
        cute.autovec_copy(rounded, lane_columns(target, lane))

    @cute.jit
    def _store(
        self, context: _Context, sequence: Sequence, row: Int32, result: tuple[Float32, Int32]
    ) -> None:
        delta, to = result
        rows, head = context.rows, context.head
        negative_lse, negative_delta = Float32(-math.inf), Float32(0.0)
        if row < sequence.length:
            batch, place = sequence.batch, sequence.offset + row
            lse = rows.lse[batch, head, place, 0]
            if lse != -math.inf:
                negative_lse = lse * -LOG2_E
                negative_delta = -delta
                if cutlass.const_expr(self.problem_class.lse_gradient):
                    negative_delta = rows.dlse[batch, head, place, 0] - delta
        context.stats[0, head, to] = negative_lse
        context.stats[1, head, to] = negative_delta
