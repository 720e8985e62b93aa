"""Masks evaluated inside the kernels, in the partial tiles of a block mask: by a mask_mod, which
the user wrote in CuTe DSL, instead of bits.

The lists of the block mask are those of `block_mask` and `backward.block_mask`, with `FULL` and
`NOTHING` as there; any other number is of a tile whose scores the mask_mod is evaluated for, and
there are no bits.  Places are those of `score_change`, NOTE [places]: rows past the end of a
sequence are evaluated as its last one, and keys past the end, which nobody sees, as the last key.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ..mask.block_mask import FULL, NOTHING
from ..mask.masking import WORD_BITS
from .score_change import ScorePlaces
from .user_functions import FunctionClass, FunctionKind

__all__ = ["MASK_MOD", "MASK_TENSORS", "MaskFunction", "times_asked", "truth_of"]

MASK_MOD = FunctionKind("mask_mod", "MaskMod", "(batch, head, query, key, tensors)")
#: Names of the tensors that a mask_mod reads, in the order in which kernels get them.
MASK_TENSORS = MASK_MOD.tensors


class MaskFunction:
    """mask_mod of a kernel, if it has one; all of it static."""

    def __init__(self, asked: FunctionClass | None) -> None:
        self._key = "" if asked is None else asked.key
        self._function = None if asked is None else MASK_MOD.functions_of(asked.key).function

    @property
    def exists(self) -> bool:
        return self._function is not None

    def hide(self, scores: cute.Tensor, places: ScorePlaces, number: Int32) -> None:
        """Set scores that are not seen to -inf.

        scores: register tensor of Float32.  places: of them, with the mask_mod's tensors.  number:
        of the listed tile, not `FULL`.
        """
        assert self._function is not None
        limit = cutlass.select_(number == NOTHING, Int32(0), places.seqlen_k)
        for first in range(0, cute.size(scores), WORD_BITS):
            numbers = range(first, min(first + WORD_BITS, cute.size(scores)))
            word = Uint32(0)
            for i in numbers:
                place = places.at(i)
                given = place.batch, place.head, place.query, place.key, places.tensors
                truth = truth_of(self._function(*given), f"the mask_mod {self._key!r}")
                is_seen = truth & (places.key(i) < limit)
                word = cutlass.select_(is_seen, word | Uint32(1 << (i - first)), word)
            word = _as_it_is(word)
            for i in numbers:
                is_seen = (word & Uint32(1 << (i - first))) != 0
                scores[i] = cutlass.select_(is_seen, scores[i], Float32(-math.inf))


def times_asked(number: Int32) -> Int32:
    """Return how often the mask_mod is evaluated in a listed tile of this number: 0 if it is
    `FULL`, else 1.

    NOTE [a loop that runs once].  Under a branch ptxas executes the function in every step, each of
    its instructions under a predicate, however many there are; a loop it leaves out where it does
    not run.  So the function stands in one, and neither compiler knows how often that runs.
    """
    return Int32(_as_it_is(Uint32(number != FULL)))


def truth_of(value: Any, name: str = "a mask_mod") -> Boolean:
    """Return the result of a mask_mod as a Boolean. Raises TypeError for another kind."""
    try:
        return Boolean(value)
    except Exception as error:
        raise TypeError(
            f"{name} returns {type(value).__name__}; accepted: a Boolean of CuTe DSL"
        ) from error


def _as_it_is(word: Uint32) -> Uint32:
    """Return the word by an instruction that neither compiler looks into."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word]
    )
