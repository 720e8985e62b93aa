"""Slopes of what changes scores, which gradients take: `functions.kernel_functions`."""

from __future__ import annotations

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32

from ...softmax_emu.online import soft_cap
from ..functions.kernel_functions import KernelFunctions, ScoreChange, ScorePlaces


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
