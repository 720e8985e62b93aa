"""What changes scores between Q K^T and the mask, and its derivative: the softcap, or a score_mod.

With s = softmax_scale * q k a score becomes softcap * tanh(s / softcap), or f(s, place, tensors) of
a function that the user wrote in CuTe DSL.  The softmax, the mask and LSE are those of what comes
of it; dS of the gradients takes the slope, its derivative with respect to s, as a factor.

NOTE [functions by key].  A problem class names a score_mod by a key, which a torch operator and the
caches can carry; `functions_of` finds its functions in this process, where `register` has put them.

NOTE [parts].  A call that is a part of another one, such as a rank's of a sequence over several,
has other places than the whole.  `key_in_part` makes the key of a function that sees those of the
whole: it reads where the part lies from one more tensor, so that one kernel does for all parts.

NOTE [places].  A score_mod gets the place of each score as Int32.  Rows of a tile past the end of a
sequence have that of the sequence's last row, so that tensors may be read by it; nobody sees what
comes of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from softmax_emu.online import soft_cap

__all__ = [
    "ALIBI", "MOST_TENSORS", "SCORE_TENSORS", "Functions", "ScoreChange", "ScoreModClass",
    "ScoreOrigin", "ScorePlaces", "Scored", "ScoresOfKernel", "functions_of", "is_in_part",
    "key_in_part", "register",
]  # fmt: skip

#: Tensors that a score_mod may read.
MOST_TENSORS = 4
#: Names of these, and of where a part lies, in the order in which kernels get them.
SCORE_TENSORS = tuple(f"score_tensor_{i}" for i in range(MOST_TENSORS + 1))


class Scored(NamedTuple):
    """Which score it is, Int32 values inside a kernel.

    head: of the queries.  query, key: counted in their sequence.  seqlen_q, seqlen_k: its lengths.
    """

    batch: Any
    head: Any
    query: Any
    key: Any
    seqlen_q: Any
    seqlen_k: Any


class Functions(NamedTuple):
    """(score, place, tensors) -> Float32 each.  slope: None where it is 1 everywhere."""

    function: Callable[..., Any]
    slope: Callable[..., Any] | None = None


@dataclass(frozen=True)
class ScoreModClass:
    """What of a score_mod is compiled in.  key: of its functions.  tensors: dtype and dimensions of
    each that it reads, such as "float32 1"."""

    key: str
    tensors: tuple[str, ...] = ()


class ScoreOrigin(NamedTuple):
    """Where a part of a call lies in it, for the places of its scores: its first batch entry, query
    head, query and key, and by how much the sequences are longer than the part's; int or Int32."""

    batch: Any = 0
    head: Any = 0
    query: Any = 0
    key: Any = 0
    more_queries: Any = 0
    more_keys: Any = 0

    def of_whole(self, place: Scored) -> Scored:
        """A place of the part, as the call has it."""
        return Scored(
            place.batch + self.batch, place.head + self.head, place.query + self.query,
            place.key + self.key, place.seqlen_q + self.more_queries,
            place.seqlen_k + self.more_keys,
        )  # fmt: skip


def _alibi(score: Float32, place: Scored, tensors: tuple) -> Float32:
    """Less slope * |distance to the key that the query is level with|; slopes of (heads,), or of
    (batch, heads)."""
    slopes = tensors[0]
    which = place.head if cute.rank(slopes) == 1 else (place.batch, place.head)
    distance = Float32(place.query + place.seqlen_k - place.seqlen_q - place.key)
    return score - slopes[which] * cute.arch.fmax(distance, -distance)


#: The key of ALiBi (arXiv 2108.12409), as the alibi_slopes of flash-attention.
ALIBI = "alibi"
_known: dict[str, Functions] = {ALIBI: Functions(_alibi)}


def register(key: str, functions: Functions) -> None:
    """Let kernels find functions by a key, which names them.

    Raises ValueError for a key that has other functions already.
    """
    known = _known.get(key)
    if known is not None and [_code(f) for f in known] != [_code(f) for f in functions]:
        raise ValueError(
            f"the key {key!r} of a score_mod names other functions already; accepted: a key for "
            "each function and slope, as ScoreMod.of derives it"
        )
    _known[key] = functions


def _code(function: Any) -> Any:
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_code, code.co_names)


#: What keys of functions that see places of a whole begin with.
_IN_PART = "in a part: "


def key_in_part(key: str) -> str:
    """Of the same functions in a part of a call, NOTE [parts].

    They have one more tensor, the last: int32 fields of a `ScoreOrigin`, (6,) or of each of the
    part's sequences (sequences, 6).
    """
    return _IN_PART + key


def is_in_part(key: str) -> bool:
    """Whether it is one of `key_in_part`."""
    return key.startswith(_IN_PART)


def _in_part(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_whole(score: Float32, place: Scored, tensors: tuple) -> Any:
        *own, origins = tensors
        fields = range(len(ScoreOrigin._fields))
        if cute.rank(origins) == 1:
            origin = ScoreOrigin(*(origins[field] for field in fields))
        else:
            origin = ScoreOrigin(*(origins[place.batch, field] for field in fields))
        return function(score, origin.of_whole(place), tuple(own))

    return of_whole


def functions_of(key: str) -> Functions:
    """Those of a key.  Raises ValueError for one that this process does not know."""
    if is_in_part(key):
        function, slope = functions_of(key.removeprefix(_IN_PART))
        return Functions(_in_part(function), None if slope is None else _in_part(slope))
    if key not in _known:
        raise ValueError(
            f"this process knows no score_mod {key!r}; make the ScoreMod of this key first, as the "
            "process did whose call this was"
        )
    return _known[key]


class ScorePlaces:
    """Where the scores of a register tensor lie.

    batch: their batch entry; lengths: (seqlen_q, seqlen_k) of it.  locate: number of a score ->
    (query head, query, key).  keys_exist: static; where they may not, they are the last one, NOTE
    [places].  tensors: those of the call.  origin: of a part of a call.
    """

    def __init__(
        self, batch: Int32, lengths: tuple[Int32, Int32], locate: Callable[[int], tuple],
        keys_exist: bool, tensors: tuple, origin: ScoreOrigin | None = None,
    ) -> None:  # fmt: skip
        self.tensors = tensors
        self._batch, self._lengths, self._locate = batch, lengths, locate
        self._keys_exist, self._origin = keys_exist, origin

    def at(self, number: int) -> Scored:
        """The place of a score."""
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
    """What changes the scores of a kernel; all of it static."""

    def __init__(self, softcap: bool, asked: ScoreModClass | None) -> None:
        self.is_softcap = softcap
        self._key = "" if asked is None else asked.key
        self._functions = None if asked is None else functions_of(asked.key)

    @property
    def exists(self) -> bool:
        return self.is_softcap or self.by_place

    @property
    def by_place(self) -> bool:
        """Whether it depends on the scores' places."""
        return self._functions is not None

    @property
    def has_slopes(self) -> bool:
        """Whether its derivative is not 1 everywhere."""
        functions = self._functions
        return self.is_softcap or (functions is not None and functions.slope is not None)

    def apply(
        self, scores: cute.Tensor, scale: Float32, places: ScorePlaces | None, packed: bool = True
    ) -> None:
        """Change scores in place, before any mask.

        scores: register tensor of Float32; scale: `CallScalars.cap_scale`; places: of them, None
        where it does not depend on these; packed: see `soft_cap`.
        """
        if self.is_softcap:
            soft_cap(scores, scale, packed=packed)
        elif self.by_place:
            self._each(scores, scale, places, None)

    def apply_with_slopes(
        self, scores: cute.Tensor, scale: Float32, places: ScorePlaces | None
    ) -> cute.Tensor | None:
        """The same, by instructions on pairs; returns the slope of each score, None where it is 1.
        """
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
        """The same without such instructions; returns what makes the slope of a score from its
        number and what became of it, masked or not; None where it is 1.

        The softcap's slope takes no register of its own so.
        """
        if self.by_place and self.has_slopes:
            slopes = cute.make_rmem_tensor(cute.size(scores), Float32)
            self._each(scores, scale, places, slopes)
            return lambda number, changed: slopes[number]
        self.apply(scores, scale, places, packed=False)
        if not self.has_slopes:
            return None
        # 0 where the score is -inf.
        return lambda number, changed: cute.arch.fmax(1.0 - changed * changed, 0.0)

    def _each(
        self, scores: cute.Tensor, scale: Float32, places: ScorePlaces | None,
        slopes: cute.Tensor | None,
    ) -> None:  # fmt: skip
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


class ScoresOfKernel:
    """Mixed into a kernel that computes scores, which has `problem_class` and the tensors of its
    score_mod behind all others of `optional_of(tensors)`."""

    problem_class: Any

    @property
    def change(self) -> ScoreChange:
        """What changes its scores."""
        return ScoreChange(self.problem_class.softcap, self.problem_class.score_mod)

    def optional_of(self, tensors: Any) -> Any:
        """A tuple of tensors among a kernel's, None if there are none."""
        raise NotImplementedError

    def score_places(
        self, context: Any, work: Any, locate: Callable[[int], tuple], keys_exist: bool = False
    ) -> ScorePlaces | None:
        """Of scores of a tile, see `ScorePlaces`; None where nothing depends on these."""
        if not self.change.by_place:
            return None
        batch = context.batch(work)
        lengths = context.sequences.query(batch).length, context.sequences.key(batch).length
        count = len(self.problem_class.score_mod.tensors)
        tensors = tuple(self.optional_of(context.tensors) or ())
        own = tensors[len(tensors) - count :]
        return ScorePlaces(batch, lengths, locate, keys_exist, own, context.scalars.score_origin)
