"""Functions of a call as its kernels know them: softcap, score_mod and mask_mod.

Scores are changed between Q K^T and the mask.  With s = softmax_scale * q k a score becomes
softcap * tanh(s / softcap), or f(s, place, tensors) of a score_mod that the user wrote in CuTe DSL.
The softmax, the mask and LSE use the changed score; dS of the gradients is multiplied by the slope,
its derivative with respect to s.

A mask_mod says what is seen in the partial tiles of a block mask, instead of bits.  The lists of
the block mask are those of `block_mask` and `backward.block_mask`, with `FULL` and `NOTHING` as
there; any other number is of a tile whose scores the mask_mod is evaluated for.

NOTE [places].  Functions get the place of each score as Int32.  Rows of a tile past the end of a
sequence have that of the sequence's last row, so that tensors may be read by it; nobody sees what
comes of these.  For a mask_mod keys past the end, which nobody sees, are the last key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...softmax_emu.online import soft_cap
from ..context import KernelContext as Context
from ..mask.block_mask import FULL, NOTHING
from ..mask.masking import WORD_BITS
from ..plan.edges import SharedByReference


class Functions(NamedTuple):
    """Functions that a key names.  slope: derivative of a score_mod, None where it is 1
    everywhere."""

    function: Callable[..., Any]
    slope: Callable[..., Any] | None = None


#: Function from the number of a score to its (query head, query, key).
Locate = Callable[[int], tuple[Int32, Int32, Int32]]


class Scored(NamedTuple):
    """Place of a score, Int32. head: of the queries. query, key: counted in their sequence."""

    batch: Any
    head: Any
    query: Any
    key: Any
    seqlen_q: Any
    seqlen_k: Any


class ScoreOrigin(NamedTuple):
    """Position of a part of a call in it, for the places of its scores: its first batch entry,
    query head, query and key, and by how much the sequences are longer than the part's; int or
    Int32."""

    batch: Any = 0
    head: Any = 0
    query: Any = 0
    key: Any = 0
    more_queries: Any = 0
    more_keys: Any = 0

    def of_whole(self, place: Scored) -> Scored:
        """A place of the part, as the call has it."""
        return Scored(
            place.batch + self.batch,
            place.head + self.head,
            place.query + self.query,
            place.key + self.key,
            place.seqlen_q + self.more_queries,
            place.seqlen_k + self.more_keys,
        )


class ScorePlaces:
    """Places of the scores of a register tensor.

    batch: their batch entry; lengths: (seqlen_q, seqlen_k) of it.  locate: number of a score ->
    (query head, query, key).  keys_exist: static; where they may not, they are the last one, NOTE
    [places].  tensors: those of the call.  origin: of a part of a call.
    """

    def __init__(
        self,
        batch: Int32,
        lengths: tuple[Int32, Int32],
        locate: Locate,
        keys_exist: bool,
        tensors: tuple[cute.Tensor, ...],
        origin: ScoreOrigin | None = None,
    ) -> None:
        self.tensors = tensors
        self._batch, self._lengths, self._locate = batch, lengths, locate
        self._keys_exist, self._origin = keys_exist, origin

    @property
    def seqlen_k(self) -> Int32:
        return self._lengths[1]

    def key(self, number: int) -> Int32:
        return self._locate(number)[2]

    def at(self, number: int) -> Scored:
        (seqlen_q, seqlen_k), batch = self._lengths, self._batch
        head, query, key = self._locate(number)
        query = cutlass.min(query, seqlen_q - 1)
        if not self._keys_exist:
            key = cutlass.min(key, seqlen_k - 1)
        place = Scored(batch, head, query, key, seqlen_q, seqlen_k)
        if self._origin is not None:
            place = self._origin.of_whole(place)
        return Scored(*map(Int32, place))


class ScoreChange:
    """Change of a kernel's scores: softcap, score_mod or none; all of it static."""

    def __init__(self, problem_class: Any, functions: Functions | None) -> None:
        self.is_softcap, self._functions = problem_class.softcap, functions
        self._key = "" if functions is None else problem_class.score_mod.key

    @property
    def exists(self) -> bool:
        return self.is_softcap or self.by_place

    @property
    def by_place(self) -> bool:
        return self._functions is not None

    def apply(
        self, scores: cute.Tensor, scale: Float32, places: ScorePlaces | None, packed: bool = True
    ) -> None:
        """Change scores in place, before any mask. scores: register tensor of Float32; scale:
        `CallScalars.cap_scale`; places: of them, None where it does not depend on these; packed:
        see `soft_cap`."""
        if self.is_softcap:
            soft_cap(scores, scale, packed=packed)
        elif self.by_place:
            self._each(scores, scale, places, None)

    def _each(
        self,
        scores: cute.Tensor,
        scale: Float32,
        places: ScorePlaces | None,
        slopes: cute.Tensor | None,
    ) -> None:
        """The functions of a score_mod, score by score."""
        assert places is not None and self._functions is not None
        function, slope = self._functions
        for i in range(cute.size(scores)):
            given = scores[i] * scale, places.at(i), places.tensors
            if slopes is not None:
                assert slope is not None
                slopes[i] = self._float(slope(*given), "slope")
            scores[i] = self._float(function(*given), "function")

    def _float(self, value: Any, name: str) -> Float32:
        try:
            return Float32(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the {name} of the score_mod {self._key!r} returns {type(value).__name__}; "
                "accepted: a Float32 of CuTe DSL"
            ) from error


class MaskFunction:
    """mask_mod of a kernel, if it has one; all of it static."""

    def __init__(self, problem_class: Any, functions: Functions | None) -> None:
        self._function = None if functions is None else functions.function
        self._key = "" if functions is None else problem_class.mask_mod.key

    @property
    def exists(self) -> bool:
        return self._function is not None

    def hide(self, scores: cute.Tensor, places: ScorePlaces, number: Int32) -> None:
        """Set scores that are not seen to -inf. scores: register tensor of Float32. places: of
        them, with the mask_mod's tensors. number: of the listed tile, not `FULL`."""
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


@dataclass(frozen=True)
class KernelFunctions(SharedByReference):
    """Functions of a kernel that computes scores. score_mod, mask_mod: the user's, None without
    one."""

    problem_class: Any
    score_mod: Functions | None
    mask_mod: Functions | None

    @property
    def change(self) -> ScoreChange:
        return ScoreChange(self.problem_class, self.score_mod)

    @property
    def mask_function(self) -> MaskFunction:
        return MaskFunction(self.problem_class, self.mask_mod)

    @property
    def asks_places(self) -> bool:
        return self.change.by_place or self.mask_function.exists

    def score_places(
        self, context: Context, work: Any, locate: Locate, keys_exist: bool = False
    ) -> ScorePlaces | None:
        """Return the `ScorePlaces` of a tile, None where no change depends on these."""
        if not self.change.by_place:
            return None
        own = context.tensors.optional.score_tensors
        return self._places_for(context, work, locate, keys_exist, own)

    def mask_places(self, context: Context, work: Any, locate: Locate) -> ScorePlaces:
        own = context.tensors.optional.mask_tensors
        return self._places_for(context, work, locate, False, own)

    def _places_for(
        self,
        context: Context,
        work: Any,
        locate: Locate,
        keys_exist: bool,
        own: tuple[cute.Tensor, ...],
    ) -> ScorePlaces:
        """own: what the function reads."""
        batch = context.batch(work)
        first_page = context.first_page(batch)
        if first_page is not None:
            locate = _behind(locate, first_page.hidden)
        lengths = context.sequences.query(batch).length, context.sequences.key(batch).length
        return ScorePlaces(batch, lengths, locate, keys_exist, own, context.scalars.score_origin)


def _behind(locate: Locate, hidden: Any) -> Locate:
    """Return places with keys behind `hidden` ones; a hidden key has the first's place."""

    def located(number: int) -> tuple[Any, Any, Any]:
        head, query, key = locate(number)
        return head, query, cutlass.max(key - hidden, 0)

    return located
