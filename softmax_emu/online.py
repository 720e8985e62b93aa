"""Online softmax over key tiles that arrive one after the other.

A thread holds a whole row of a score tile in registers (as tcgen05.ld 32x32b delivers it), or four
neighbouring lanes share a row, each with some of its columns (as wgmma leaves it).  For scores s of
tile after tile, with c = softmax_scale * log2(e) >= 0::

    m    row_max: a running maximum of s, allowed to lag behind the true one
    p    = 2^(c * s - c * m)                         written to P in bf16 or fp16
    l    row_sum: sum of p over all tiles, in float32, of the unrounded p on every path
    O    = P V, accumulated by the tensor core
    factor = 2^(c * (m_old - m_new)) rescales l (here) and O (by the caller) when m moves

out = O / l and LSE = c * m * ln 2 + ln l are exact whatever m is, because p, l and O carry the
same offset.  So m is only moved when c * (true maximum - m) exceeds `rescale_threshold`
(FlashAttention-4, arXiv 2603.05451): P then reaches at most 2^threshold, and most tiles need no
rescaling of O.  With `p_log2` p, l and O all carry a factor of 2^p_log2 more, which brings P into
the range of a type of few exponents.  Where a caller needs the true maximum of s, `largest` holds
it beside m.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .exp2 import (
    exp2_hardware,
    exp2_polynomial_pair,
    exp2_polynomial_scalars,
    exp2_row_factor,
    maximum3,
    multiply_rounded,
)
from .pattern import Ex2Pattern

# The smallest normal float32.  A scale of 0 is replaced by it: scores then vanish in every finite
# product below 2^100, while a masked score of -inf still gives -inf and not 0 * inf = NaN.
SMALLEST_SCALE = 2.0**-126

# The maximum starts at a finite value instead of -inf, so that no difference of maxima is NaN and
# the loop needs no test for rows that have seen no key: -2^100 or, for a large scale, the score
# whose logit is -2^126 in log2 units, below which logits cannot be told from none.
LOWEST_MAXIMUM = -(2.0**100)
LOWEST_LOGIT = -(2.0**126)

# 2^30 + 1 to the fourth power is finite, and so is its reciprocal; 2 / (1 + 2^30) is nothing to 1.
LARGEST_TANH_EXPONENT = 30.0

# P must stay finite in its own type: 2^(threshold + p_log2), with room for rounding.  The largest
# e4m3 is 448, 2^8.8.
_LARGEST_THRESHOLD = {cutlass.BFloat16: 64.0, cutlass.Float16: 15.0, cutlass.Float8E4M3FN: 8.0}

_NUM_MAX_CHAINS = 4
_NUM_SUM_CHAINS = 4


class OnlineSoftmax:
    """State and arithmetic of one row; lives across dynamic loops.

    The state is row_max, row_sum, offset and, where the true maximum is tracked, largest.

    For each tile: `update_max`, then `exponentiate` for every fragment of its columns, then
    `accumulate_sum`; `finish` after the last.  Rows without any visible key end with
    (inverse 0, LSE -inf).  A NaN among the scores makes its row's sum NaN on the hardware path;
    the polynomial path maps it to 0.
    """

    def __init__(
        self,
        constants: tuple[Float32, Float32],
        settings: tuple[Any, ...],
        state: tuple[Float32, ...],
    ) -> None:
        self.scale_log2, self.lowest_max = self._constants = constants
        self._settings = settings
        self.pattern, self.rescale_threshold, self.dtype, self.is_packed, *more = settings
        self.lanes, self.p_log2 = more
        self.row_max, self.row_sum, self.offset, *largest = state
        # The true maximum of all scores so far, where it is tracked.
        self.largest = largest[0] if largest else None

    @classmethod
    def create(
        cls,
        scale_log2: Float32,
        pattern: Ex2Pattern,
        rescale_threshold: float,
        dtype: Any,
        packed: bool = True,
        lanes: int = 1,
        tracks_largest: bool = False,
        p_log2: float = 0.0,
    ) -> OnlineSoftmax:
        """A softmax with empty state.

        scale_log2: softmax_scale * log2(e), at least 0, Float32 (0 is served as 2^-126).
        rescale_threshold: in log2 units, static; 0 moves the maximum whenever it grows.
        dtype: of P, cutlass.BFloat16, cutlass.Float16 or cutlass.Float8E4M3FN.
        packed: two scores an instruction (f32x2), and maxima of three, neither of which sm_90 has;
            static.
        lanes: neighbouring lanes of a warp that share a row, static, a power of two.  They agree
            about the maximum; each sums its own columns, and `finish` adds the sums up.
        tracks_largest: keep the true maximum for `largest_logit`, static.
        p_log2: P is 2^p_log2 times as large, static.

        Raises ValueError for another dtype, or a threshold with which P could overflow it.
        """
        if dtype not in _LARGEST_THRESHOLD:
            raise ValueError(f"P must be BFloat16, Float16 or Float8E4M3FN, got {dtype}")
        largest = _LARGEST_THRESHOLD[dtype] - p_log2
        if not 0 <= rescale_threshold <= largest:
            raise ValueError(
                f"rescale_threshold is {rescale_threshold}; accepted for {dtype} are 0 to "
                f"{largest} (P reaches 2^{'(threshold + p_log2)' if p_log2 else 'threshold'})"
            )
        scale = cute.arch.fmax(Float32(scale_log2), SMALLEST_SCALE)
        lowest = cute.arch.fmax(LOWEST_LOGIT * cute.arch.rcp_approx(scale), LOWEST_MAXIMUM)
        settings = (pattern, float(rescale_threshold), dtype, packed, lanes, float(p_log2))
        softmax = cls((scale, lowest), settings, (lowest,) * (4 if tracks_largest else 3))
        softmax.reset()
        return softmax

    def reset(self) -> None:
        self.row_max, self.row_sum = self.lowest_max, Float32(0.0)
        self.offset = self.offset_of(self.lowest_max)
        if self.largest is not None:
            self.largest = self.lowest_max

    def update_max(self, scores: cute.Tensor) -> Float32:
        """Take a tile's scores into the maximum; return the factor for O (and apply it to l).
        scores: register tensor of Float32, an even number of columns, masked ones -inf. The factor
        is exactly 1 where the maximum was kept, and 0 with a row's first visible key; never NaN."""
        return self.move_max(self.tile_max(scores))

    def tile_max(self, scores: cute.Tensor) -> Float32:
        """Return the larger of the maximum and all scores of a tile, or of this thread's part of
        one."""
        return self._tile_max(scores, self.row_max)

    def move_max(self, new: Float32) -> Float32:
        """Take a tile's maximum into the maximum; return the factor as `update_max` does.  new: the
        larger of the maximum and all scores."""
        old = self.row_max
        if self.largest is not None:
            # `new` is a score, or an older maximum that is below one.
            self.largest = cute.arch.fmax(self.largest, new)
        if cutlass.const_expr(self.rescale_threshold > 0):
            keep = (new - old) * self.scale_log2 <= self.rescale_threshold
            new = cutlass.select_(keep, old, new)
        # These are the rounded offsets of `exponentiate`, so the factor is consistent with p.
        offset = self.offset_of(new)
        factor = exp2_row_factor(offset - self.offset)
        self.row_max, self.offset = new, offset
        self.row_sum = self.row_sum * factor
        return factor

    def exponentiate(
        self,
        scores: cute.Tensor,
        probabilities: cute.Tensor | None,
        fragment_index: int,
        num_fragments: int,
    ) -> None:
        """p of one fragment: float32 in place of the scores, and rounded into `probabilities`.

        scores: register tensor of 32 Float32, or an even number below.  probabilities: register
        tensor of as many elements of `dtype`, or of a 32-bit type that holds as many (lower columns
        in the lower bits); None where the caller rounds.  fragment_index,
        num_fragments: static; they select the pattern's columns.
        """
        polynomial = exp2_polynomial_pair if self.is_packed else exp2_polynomial_scalars
        for column in range(0, cute.size(scores), 2):
            x0, x1 = self._exponents(scores[column], scores[column + 1])
            if self.pattern.is_emulated(fragment_index, column, num_fragments):
                p0, p1 = polynomial(x0, x1, self.pattern.degree)
            else:
                p0, p1 = exp2_hardware(x0), exp2_hardware(x1)
            scores[column], scores[column + 1] = p0, p1
        if probabilities is None:
            return
        if cutlass.const_expr(probabilities.element_type.width == 32):
            probabilities = cute.recast_tensor(probabilities, self.dtype)
        probabilities.store(scores.load().to(self.dtype))

    def accumulate_sum(self, probabilities: cute.Tensor) -> None:
        """Add the float32 p of a tile, or of a part of it, to the row sum. probabilities: register
        tensor of Float32, an even number of columns, as `exponentiate` left it: unrounded, on every
        path alike. The factor was applied by `update_max`."""
        columns = cute.size(probabilities)
        pairs = [(probabilities[i], probabilities[i + 1]) for i in range(0, columns, 2)]
        chains = pairs[:_NUM_SUM_CHAINS]
        chains[0] = self._add((self.row_sum, Float32(0.0)), chains[0])
        for number, pair in enumerate(pairs[_NUM_SUM_CHAINS:]):
            chain = number % len(chains)
            chains[chain] = self._add(chains[chain], pair)
        while len(chains) > 1:
            last = chains.pop()
            half = len(chains) // 2
            chains[half] = self._add(chains[half], last)
        self.row_sum = chains[0][0] + chains[0][1]

    def finish(self, sink_log2: Float32 | None = None) -> tuple[Float32, Float32]:
        """Return (1 / l, LSE in natural log); (0, -inf) for a row without visible key.

        sink_log2: logit of a sink, times log2(e), or None.  It takes part in l and LSE like a key
        whose value is 0; a row without visible key then has LSE = the sink's logit, -inf too. A
        logit of +inf takes everything: (0, +inf).
        """
        row_sum, offset = self._over_lanes(self.row_sum, lambda a, b: a + b), self.offset
        if cutlass.const_expr(sink_log2 is not None):
            # Relative to the larger of the two, since the sink may exceed every score by far.
            is_empty = row_sum == Float32(0.0)
            score_log2 = cutlass.select_(is_empty, Float32(-math.inf), -offset)
            # Finite where there is neither key nor sink: a difference of infinities is no number.
            largest = cute.arch.fmax(cute.arch.fmax(score_log2, sink_log2), Float32(LOWEST_LOGIT))
            shrink = exp2_row_factor(score_log2 - largest)
            # The difference of the largest sink and itself is no number either, if it is +inf.
            of_sink = cutlass.select_(sink_log2 == largest, Float32(0.0), sink_log2 - largest)
            total = row_sum * shrink + exp2_row_factor(of_sink)
            lse = (largest + cute.math.log2(total, approx=True, ftz=True)) * math.log(2.0)
            is_void = total == Float32(0.0)
            inverse = cutlass.select_(is_void, Float32(0.0), shrink * cute.arch.rcp_approx(total))
            return inverse, cutlass.select_(is_void, Float32(-math.inf), lse)
        is_empty = row_sum == Float32(0.0)
        inverse = cutlass.select_(is_empty, Float32(0.0), cute.arch.rcp_approx(row_sum))
        log2_sum = cute.math.log2(row_sum, approx=True, ftz=True)
        lse = (log2_sum - offset) * Float32(math.log(2.0))
        return inverse, cutlass.select_(is_empty, Float32(-math.inf), lse)

    def largest_logit(self) -> Float32:
        """Return the greatest score times the scale, in natural units; -inf without visible key. A
        sink takes no part. A NaN among the scores is passed over, as max does (PTX ISA 9.7.3)."""
        logit = self.largest * self.scale_log2 * math.log(2.0)
        is_empty = self.largest <= self.lowest_max
        return cutlass.select_(is_empty, Float32(-math.inf), logit)

    def _exponents(self, s0: Float32, s1: Float32) -> tuple[Float32, Float32]:
        """c * s - c * m of two scores."""
        return _fused((s0, s1), (self.scale_log2,) * 2, (self.offset,) * 2, self.is_packed)

    def _add(
        self, a: tuple[Float32, Float32], b: tuple[Float32, Float32]
    ) -> tuple[Float32, Float32]:
        """Sums of two pairs, element by element."""
        _, add = _pairwise(self.is_packed)
        return add(a, b)

    def _tile_max(self, scores: cute.Tensor, old: Float32) -> Float32:
        """max(old, all scores) in independent chains, by three-input maxima where these exist."""
        columns = cute.size(scores)
        if not self.is_packed:
            chains = [scores[i] for i in range(_NUM_MAX_CHAINS)]
            for column in range(_NUM_MAX_CHAINS, columns):
                chain = column % _NUM_MAX_CHAINS
                chains[chain] = cute.arch.fmax(chains[chain], scores[column])
            largest = cute.arch.fmax(
                cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3])
            )
            return cute.arch.fmax(old, self._over_lanes(largest, cute.arch.fmax))
        chains = [maximum3(old, scores[0], scores[1])]
        chains += [cute.arch.fmax(scores[i], scores[i + 1]) for i in range(2, 8, 2)]
        for number, column in enumerate(range(8, columns, 2)):
            chain = number % _NUM_MAX_CHAINS
            chains[chain] = maximum3(chains[chain], scores[column], scores[column + 1])
        largest = cute.arch.fmax(maximum3(chains[0], chains[1], chains[2]), chains[3])
        return self._over_lanes(largest, cute.arch.fmax)

    def _over_lanes(self, value: Float32, operation: Any) -> Float32:
        """The values of the lanes that share a row, combined; the same in all of them."""
        if self.lanes > 1:
            return cute.arch.warp_reduction(value, operation, threads_in_group=self.lanes)
        return value

    def offset_of(self, row_max: Float32) -> Float32:
        """-c * m + p_log2, the addend of the folded scale, rounded; finite for the lowest maximum
        too.

        So a fully masked row gives p = 2^-inf = 0 and not NaN.  The packed multiplication
        (mul.rn.f32x2), or one written out (mul.rn.f32), is never contracted into an fma, so that p,
        the factors and LSE all use the same rounded number and its rounding error cancels in O / l
        and LSE.
        """
        negative_scale = -self.scale_log2
        if cutlass.const_expr(self.p_log2 != 0):
            return cute.math.fma(row_max, negative_scale, Float32(self.p_log2))
        if not self.is_packed:
            return multiply_rounded(row_max, negative_scale)
        offset, _ = cute.arch.mul_packed_f32x2((row_max, row_max), (negative_scale, negative_scale))
        return offset

    @property
    def _state(self) -> tuple[Float32, ...]:
        state = self.row_max, self.row_sum, self.offset
        return state if self.largest is None else (*state, self.largest)

    def __extract_mlir_values__(self) -> list:
        return [value for part in self._state for value in cutlass.extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values: list) -> OnlineSoftmax:
        state = tuple(
            cutlass.new_from_mlir_values(field, [value])
            for field, value in zip(self._state, values, strict=True)
        )
        return OnlineSoftmax(self._constants, self._settings, state)


def soft_cap(scores: cute.Tensor, cap_scale: Float32, packed: bool = True) -> None:
    """scores := tanh(scores * cap_scale), for a softcap; before any mask.

    scores: register tensor of Float32, a multiple of four.  The scale of the softmax is then
    softcap * log2(e).  tanh(x) is computed as 1 - 2 / (1 + 2^(2 x log2 e)), whose absolute error of
    some 2^-22 the softcap multiplies; tanh.approx, with a relative error of 2^-11, would be seen in
    LSE.  Four denominators share a reciprocal, since its unit is exp2's, which a softcap keeps
    busy as it is.  So a NaN among four scores is one of all of them.

    packed: two scores an instruction (f32x2), which sm_90 does not have; the same bits without.
    """
    multiply, add = _pairwise(packed)
    doubled = (cap_scale * Float32(2.0 * math.log2(math.e)),) * 2
    one, minus_two = (Float32(1.0),) * 2, (Float32(-2.0),) * 2
    for column in range(0, cute.size(scores), 4):
        low, high = (
            _tanh_denominators(multiply((scores[column + i], scores[column + i + 1]), doubled), add)
            for i in (0, 2)
        )
        products = multiply(low, high)
        inverse = cute.arch.rcp_approx(products[0] * products[1])
        # Inverse of each product; then of each factor: that times the other factor.
        inverses = inverse * products[1], inverse * products[0]
        for i, others in ((0, high), (2, low)):
            pair = multiply(inverses, others)
            pair = _fused(pair, minus_two, one, packed)
            scores[column + i], scores[column + i + 1] = pair


_Pair = tuple[Float32, Float32]


def _pairwise(packed: bool) -> tuple[Callable[[_Pair, _Pair], _Pair], ...]:
    if packed:
        return cute.arch.mul_packed_f32x2, cute.arch.add_packed_f32x2
    return (lambda a, b: (a[0] * b[0], a[1] * b[1]), lambda a, b: (a[0] + b[0], a[1] + b[1]))


def _fused(a: _Pair, b: _Pair, c: _Pair, packed: bool) -> _Pair:
    """a b + c of pairs, rounded once."""
    if packed:
        return cute.arch.fma_packed_f32x2(a, b, c)
    return cute.math.fma(a[0], b[0], c[0]), cute.math.fma(a[1], b[1], c[1])


def _tanh_denominators(exponents: _Pair, add: Callable[[_Pair, _Pair], _Pair]) -> _Pair:
    """1 + 2^x of two; where x is too large for a product of four of them, tanh is 1 already."""
    powers = (exp2_hardware(cute.arch.fmin(x, LARGEST_TANH_EXPONENT, nan=True)) for x in exponents)
    return add(tuple(powers), (Float32(1.0),) * 2)
