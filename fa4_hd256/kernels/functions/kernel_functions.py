"""Functions of a call as its kernels know them: score_mod and mask_mod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from ..context import KernelContext
from ..plan.edges import SharedByReference
from .mask_function import MASK_MOD, MASK_TENSORS, MaskFunction
from .score_change import SCORE_MOD, SCORE_TENSORS, Locate, ScoreChange, ScorePlaces
from .user_functions import FunctionKind

__all__ = ["FUNCTION_KINDS", "FUNCTION_TENSORS", "KernelFunctions", "check_unchanged"]

#: In the order in which kernels get what their functions read.
FUNCTION_KINDS: tuple[FunctionKind, ...] = (SCORE_MOD, MASK_MOD)
FUNCTION_TENSORS = (*SCORE_TENSORS, *MASK_TENSORS)


def check_unchanged(problem_class: Any) -> None:
    """`FunctionKind.check_unchanged` of the functions of a kernel, if it has any."""
    for kind in FUNCTION_KINDS:
        asked = getattr(problem_class, kind.argument, None)
        if asked is not None:
            kind.check_unchanged(asked.key)


@dataclass(frozen=True)
class KernelFunctions(SharedByReference):
    """Functions of a kernel that computes scores.

    What its score_mod reads, then what its mask_mod does, lies behind all others of the `optional`
    tensors of the kernel.
    """

    problem_class: Any

    @property
    def change(self) -> ScoreChange:
        """Return the change of the kernel's scores."""
        return ScoreChange(self.problem_class.softcap, self.problem_class.score_mod)

    @property
    def mask_function(self) -> MaskFunction:
        """Return the function that says which scores of listed tiles are seen, if bits do not."""
        return MaskFunction(self.problem_class.mask_mod)

    @property
    def asks_places(self) -> bool:
        """Return True if something depends on where scores lie."""
        return self.change.by_place or self.mask_function.exists

    def score_places(
        self,
        context: KernelContext,
        work: Any,
        locate: Locate,
        keys_exist: bool = False,
    ) -> ScorePlaces | None:
        """Return the `ScorePlaces` of a tile's scores, for what changes them; None where nothing
        that does depends on these."""
        if not self.change.by_place:
            return None
        return self._places_for(context, work, locate, keys_exist, 0)

    def mask_places(self, context: KernelContext, work: Any, locate: Locate) -> ScorePlaces:
        """Return the places of a tile's scores for the mask_mod."""
        return self._places_for(context, work, locate, False, 1)

    def _places_for(
        self,
        context: KernelContext,
        work: Any,
        locate: Locate,
        keys_exist: bool,
        kind: int,
    ) -> ScorePlaces:
        batch = context.batch(work)
        first_page = context.first_page(batch)
        if first_page is not None:
            locate = _behind(locate, first_page.hidden)
        lengths = context.sequences.query(batch).length, context.sequences.key(batch).length
        left = list(context.tensors.optional or ())
        own: tuple[cute.Tensor, ...] = ()
        for asked in (self.problem_class.mask_mod, self.problem_class.score_mod)[: 2 - kind]:
            count = 0 if asked is None else len(asked.tensors)
            own = tuple(left[len(left) - count :])
            left = left[: len(left) - count]
        return ScorePlaces(batch, lengths, locate, keys_exist, own, context.scalars.score_origin)


def _behind(locate: Locate, hidden: Any) -> Locate:
    """Return places whose keys are counted from a sequence's first one, behind `hidden` keys of its
    first page; a hidden key has the place of the first one."""

    def located(number: int) -> tuple[Any, Any, Any]:
        head, query, key = locate(number)
        return head, query, cutlass.max(key - hidden, 0)

    return located
