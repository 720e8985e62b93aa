"""Online softmax where each thread holds keys of a transposed score tile, each for some rows.

Tensor memory delivers S^T = K Q^T with a key per lane and a query row per column: a thread has one
score of every row.  wgmma leaves a thread two keys of a quarter of the rows.  All threads need the
offsets of their rows, and a row's maximum and sum go over lanes and warps.  The definitions are
those of `online`: p = 2^(c s - c m), and m moves, for a row by itself, only where c * (true maximum
- m) exceeds the threshold.  Whether any does is tested without the maxima: by the largest exponent
that a thread has.  The maxima themselves are taken where the answer is yes, which most tiles do
without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .exp2 import (
    exp2_hardware,
    exp2_polynomial_pair,
    exp2_polynomial_scalars,
    exp2_row_factor,
    maximum3,
)
from .online import OnlineSoftmax
from .pattern import FRAGMENT_COLUMNS, Ex2Pattern

WARP_SIZE = 32


class KeySoftmax:
    """State of a thread's rows: their offsets, alike in all threads, and the sums of this thread's
    keys; both register tensors of Float32 that live across dynamic loops.

    For each tile: `exceeds`, of each key; where that holds in any thread `raise_maxima` in all;
    then `exponentiate`.  After the last `sums` are added up over the threads, and `finish` makes
    the reciprocal and LSE of a row.
    """

    def __init__(self, row: OnlineSoftmax, rows: int, headroom: float = 0.0) -> None:
        self.row, self.rows, self.headroom = row, rows, headroom
        self.offsets = cute.make_rmem_tensor(rows, Float32)
        self.sums = cute.make_rmem_tensor(rows, Float32)

    @classmethod
    def create(
        cls,
        scale_log2: Float32,
        pattern: Ex2Pattern,
        rescale_threshold: float,
        dtype: Any,
        rows: int,
        headroom: float = 0.0,
        packed: bool = True,
    ) -> KeySoftmax:
        """A softmax with empty state.  rows: an even number; headroom: p of a maximum that has just
        moved is 2^headroom, so that a P whose type has few exponents keeps small p, too; at most
        rescale_threshold, which still bounds p; the others as of `OnlineSoftmax.create`."""
        row = OnlineSoftmax.create(scale_log2, pattern, rescale_threshold, dtype, packed)
        softmax = cls(row, rows, headroom)
        softmax.reset()
        return softmax

    def reset(self) -> None:
        self.row.reset()
        for row in range(self.rows):
            self.offsets[row], self.sums[row] = self.row.offset, Float32(0.0)

    def exceeds(self, scores: cute.Tensor) -> Boolean:
        """Return True if some row's maximum must move for a score of this thread's key. scores:
        register tensor of Float32, one of each row; masked ones -inf."""
        pairs = [self._exponents(scores, row) for row in range(0, self.rows, 2)]
        largest = pairs[0][0]
        for first, second in pairs:
            if self.row.is_packed:
                largest = maximum3(largest, first, second)
            else:
                largest = cute.arch.fmax(largest, cute.arch.fmax(first, second))
        return largest > Float32(self.row.rescale_threshold)

    def raise_maxima(self, maxima: cute.Tensor, factors: cute.Tensor, first_row: int = 0) -> None:
        """Take a tile's maxima into the state; factors: filled with what O is to be multiplied
        with, exactly 1 where a maximum was kept. maxima, factors: register tensors of Float32, one
        of each row from `first_row` on; maxima alike in all threads."""
        scale = self.row.scale_log2
        for number in range(cute.size(maxima)):
            row = first_row + number
            old = self.offsets[row]
            # Rounding is monotone, see `exceeds`, so that this is the largest of its exponents.
            exponent = cute.math.fma(maxima[number], scale, old)
            moves = exponent > Float32(self.row.rescale_threshold)
            offset = self.row.offset_of(maxima[number])
            if self.headroom:
                offset = offset + Float32(self.headroom)
            new = cutlass.select_(moves, offset, old)
            factor = exp2_row_factor(new - old)
            self.offsets[row], factors[number] = new, factor
            self.sums[row] = self.sums[row] * factor

    def exponentiate(
        self, scores: cute.Tensor, probabilities: cute.Tensor | None, weight: Float32 | None = None
    ) -> None:
        """Write p of this thread's key: float32 into the sums and in place of the scores, and
        rounded into `probabilities`. probabilities: register tensor of `dtype`, one of each row;
        None where the caller rounds. weight: what p counts in the sums, of this key; None for 1."""
        pattern, fragments = self.row.pattern, -(-self.rows // FRAGMENT_COLUMNS)
        polynomial = exp2_polynomial_pair if self.row.is_packed else exp2_polynomial_scalars
        for row in range(0, self.rows, 2):
            x0, x1 = self._exponents(scores, row)
            fragment, column = divmod(row, FRAGMENT_COLUMNS)
            if pattern.is_emulated(fragment, column, fragments):
                p0, p1 = polynomial(x0, x1, pattern.degree)
            else:
                p0, p1 = exp2_hardware(x0), exp2_hardware(x1)
            sums = self.sums[row], self.sums[row + 1]
            if not self.row.is_packed:
                sums = tuple(
                    total + p if weight is None else cute.math.fma(p, weight, total)
                    for total, p in zip(sums, (p0, p1), strict=True)
                )
            elif weight is None:
                sums = cute.arch.add_packed_f32x2(sums, (p0, p1))
            else:
                sums = cute.arch.fma_packed_f32x2((p0, p1), (weight, weight), sums)
            self.sums[row], self.sums[row + 1] = sums
            scores[row], scores[row + 1] = p0, p1
        if probabilities is not None:
            probabilities.store(scores.load().to(self.row.dtype))

    def offset_in(self, row: Int32) -> Float32:
        """The offset of a row whose number is known at run time."""
        offset = self.offsets[0]
        for number in range(1, self.rows):
            offset = cutlass.select_(row == number, self.offsets[number], offset)
        return offset

    def finish(
        self, total: Float32, offset: Float32, sink_log2: Float32 | None
    ) -> tuple[Float32, Float32]:
        """Return (1 / l, LSE) of a row; total: its sum over all keys; sink_log2: as of
        `OnlineSoftmax.finish`."""
        self.row.row_sum, self.row.offset = total, offset
        return self.row.finish(sink_log2)

    def _exponents(self, scores: cute.Tensor, row: int) -> tuple[Float32, Float32]:
        """c * s - c * m of two rows."""
        scale = self.row.scale_log2
        if not self.row.is_packed:
            return tuple(cute.math.fma(scores[i], scale, self.offsets[i]) for i in (row, row + 1))
        return cute.arch.fma_packed_f32x2(
            (scores[row], scores[row + 1]),
            (scale, scale),
            (self.offsets[row], self.offsets[row + 1]),
        )

    def __extract_mlir_values__(self) -> list:
        """Return no values: the state that lives across loops is memory, and stays where it is."""
        return []

    def __new_from_mlir_values__(self, values: list) -> KeySoftmax:
        return self


def reduce_over_lanes(
    values: cute.Tensor, operation: Callable[[Float32, Float32], Float32]
) -> list[Float32]:
    """The values of all lanes of a warp combined, row by row; each lane gets some of the rows.

    values: register tensor of Float32, one of each row, whose number is a power of two.  Of these
    a lane gets rows / 32, from `first_row_of_lane` on; of fewer rows than lanes neighbours get the
    same.  Each exchange halves what is left, so that all take about as many shuffles as rows.
    """
    left = [values[row] for row in range(cute.size(values))]
    lane = cute.arch.lane_idx()
    distance = WARP_SIZE // 2
    while distance:
        half = len(left) // 2
        if half:
            is_upper = (lane & distance) != 0
            sent = [cutlass.select_(is_upper, left[i], left[i + half]) for i in range(half)]
            retained = [cutlass.select_(is_upper, left[i + half], left[i]) for i in range(half)]
        else:
            sent = retained = left
        left = [
            operation(value, cute.arch.shuffle_sync_bfly(other, offset=distance))
            for value, other in zip(retained, sent, strict=True)
        ]
        distance //= 2
    return left


def first_row_of_lane(rows: int) -> Int32:
    """The first of the rows that this lane gets of `reduce_over_lanes`."""
    return cute.arch.lane_idx() * rows // WARP_SIZE
