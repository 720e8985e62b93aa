"""Functions of a call that is a part of another one: their keys, and what these name.

NOTE [parts].  A call that is a part of another one, such as a rank's of a sequence over several,
has other places than the whole.  Functions of the keys made here see those of the whole: they read
where the part lies from one more tensor, the last, so that one kernel does for all parts.

A mask_mod is evaluated where the lists of the whole say so, and tiles of a part need not be tiles
of the whole: one of them may meet full, empty and partial ones of these.  `PartTiles` names the
tile of the whole that a score is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..mask.block_mask import FULL, MASK_TILE, NOTHING
from .kernel_functions import Scored, ScoreOrigin, truth_of
from .user_functions import MASK_MOD, SCORE_MOD

#: Prefix of the keys of such functions.
_IN_PART = "in a part: "
_FIELDS = range(len(ScoreOrigin._fields))


def key_in_part(key: str) -> str:
    """Return the key of the same functions in a part of a call, NOTE [parts].

    Their last tensor is int32: of a score_mod fields of a `ScoreOrigin`, (6,) or of each of the
    part's sequences (sequences, 6); of a mask_mod these, (6,), or a `PartTiles`.
    """
    return _IN_PART + key


class PartTiles:
    """Position of a part, and the tiles of the whole that it meets.

    tensor: (1 or batch, 1 or heads, tiles of queries, 6 + tiles of keys), fields of a `ScoreOrigin`
    before each row of tiles.  Of these the first are those that the part's first query and key are
    in; batch entries and heads are the part's.  A tile is `FULL`, below that if it is empty, or any
    number above `NOTHING`: there the function is evaluated.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.origin = ScoreOrigin(*(tensor[0, 0, 0, field] for field in _FIELDS))

    def at(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        """The tile of a place in the part."""
        entry, own_head = (
            cutlass.min(place, cute.size(self._tensor, mode=[mode]) - 1)
            for mode, place in enumerate((batch, head))
        )
        row, column = (
            (first + place) // MASK_TILE - first // MASK_TILE
            for first, place in ((self.origin.query, query), (self.origin.key, key))
        )
        return self._tensor[entry, own_head, row, len(_FIELDS) + column]


def _scores(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_whole(score: Float32, place: Scored, tensors: tuple[cute.Tensor, ...]) -> Any:
        *own, origins = tensors
        if cute.rank(origins) == 1:
            origin = ScoreOrigin(*(origins[field] for field in _FIELDS))
        else:
            origin = ScoreOrigin(*(origins[place.batch, field] for field in _FIELDS))
        return function(score, origin.of_whole(place), tuple(own))

    return of_whole


def _mask(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_whole(
        batch: Any, head: Any, query: Any, key: Any, tensors: tuple[cute.Tensor, ...]
    ) -> Any:
        *own, part = tensors
        in_part = Scored(batch, head, query, key, 0, 0)
        if cute.rank(part) == 1:
            place = ScoreOrigin(*(part[field] for field in _FIELDS)).of_whole(in_part)
            return function(place.batch, place.head, place.query, place.key, tuple(own))
        tiles = PartTiles(part)
        place, tile = tiles.origin.of_whole(in_part), tiles.at(batch, head, query, key)
        is_seen = function(place.batch, place.head, place.query, place.key, tuple(own))
        return (tile == FULL) | ((tile > NOTHING) & truth_of(is_seen))

    return of_whole


SCORE_MOD.derive(_IN_PART, _scores)
MASK_MOD.derive(_IN_PART, _mask)
