"""Functions of a call whose packed sequences are one dense row: their keys, and what these name.

Such functions have one more tensor, the last, int32 (rows of q, 5): of each query the number of its
sequence, where its queries and its keys begin in the row, and how many these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from .kernel_functions import Scored, truth_of
from .user_functions import MASK_MOD, SCORE_MOD

#: Prefix of the keys of such functions.
_IN_ROW = "in a row: "


class SequenceOfQuery(NamedTuple):
    """Columns of the tensor, or an entry of it."""

    number: Any
    begin_q: Any
    begin_k: Any
    seqlen_q: Any
    seqlen_k: Any

    @classmethod
    def at(cls, rows: Any, query: Any) -> SequenceOfQuery:
        return cls(*(rows[query, column] for column in range(len(cls._fields))))


def key_in_row(key: str) -> str:
    """Return the key of a score_mod with places in sequences, or mask_mod bounded by them."""
    return _IN_ROW + key


def _in_sequences(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_sequence(score: Any, place: Scored, tensors: tuple[cute.Tensor, ...]) -> Any:
        *own, rows = tensors
        of_query = SequenceOfQuery.at(rows, place.query)
        # Keys of other sequences, which it does not see, are the nearest one's.
        key = cutlass.max(cutlass.min(place.key - of_query.begin_k, of_query.seqlen_k - 1), 0)
        # Rows behind the last sequence are clamped, too.
        query = cutlass.max(cutlass.min(place.query - of_query.begin_q, of_query.seqlen_q - 1), 0)
        inside = Scored(
            of_query.number, place.head, query, key, of_query.seqlen_q, of_query.seqlen_k
        )
        return function(score, inside, tuple(own))

    return of_sequence


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    def seen(batch: Any, head: Any, query: Any, key: Any, tensors: tuple[cute.Tensor, ...]) -> Any:
        *own, rows = tensors
        of_query = SequenceOfQuery.at(rows, query)
        behind = key - of_query.begin_k
        inside = (behind >= 0) & (behind < of_query.seqlen_k)
        return truth_of(function(batch, head, query, key, tuple(own))) & inside

    return seen


SCORE_MOD.derive(_IN_ROW, _in_sequences)
MASK_MOD.derive(_IN_ROW, _bounded)
