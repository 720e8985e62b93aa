"""The last launch of calls with packed sequences: rows of no sequence, and wrong lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..call.forward_problem import Problem
from ..call.memory import View
from ..kernels.mask.masking import MaskKind
from ..kernels.mask.windows import Reach
from ..kernels.rows.sequences import DS_BEGINS
from ..kernels.small.tail_rows import TailBounds, TailClass, TailTensors
from .arguments import LARGEST_LENGTH, LARGEST_WINDOW, STREAM, int32
from .catalogue import tail_spec
from .plan import PlanBuilder, aligned

#: An operand's side -> the names of its offsets and of its lengths in use.
_OFFSETS = {"q": "cu_seqlens_q", "k": "cu_seqlens_k"}
_USED = {"q": "seqused_q", "k": "seqused_k"}


def sides_of(ragged: Iterable[str]) -> tuple[str, ...]:
    """Return the sides with offsets; with lengths in use, rows are filled before the launch."""
    names = set(ragged)
    return tuple(s for s in "qk" if _OFFSETS[s] in names and _USED[s] not in names)


def class_of(problem: Problem, results: Iterable[str], lse: bool = False) -> TailClass:
    """The class for results of these sides, of which each has one of `sides_of`."""
    left, right = problem.options.window
    kind = MaskKind(left is not None, right is not None)
    names = problem.ragged
    sides = tuple(s for s in "qk" if _OFFSETS[s] in names)
    return TailClass(tuple(results), sides, lse, kind if DS_BEGINS in names else None)


def add_tail(
    builder: PlanBuilder,
    problem: Problem,
    results: Sequence[tuple[str, View]],
    lse: View | None,
    tables: Mapping[str, View],
    rows_k: int,
    longest_k: int,
    ds_tiles: int = 0,
) -> None:
    """Fill rows of results that belong to no sequence with zeros, those of lse with -inf; and all
    rows with NaN where lengths on the device contradict the call.

    results: (side, view) of each. lse: of the first, None without one. tables: ragged tensors by
    name. rows_k, longest_k, ds_tiles: as of `TailBounds`.
    """
    finished = sides_of(problem.ragged)
    results = [one for one in results if one[0] in finished]
    if not results:
        return
    own = class_of(problem, (side for side, _ in results), lse is not None)
    offsets = {_OFFSETS[side]: tables[_OFFSETS[side]] for side in own.sides}
    begins = {} if own.ds is None else {DS_BEGINS: tables[DS_BEGINS]}
    # Rows as words of 32 bits, whatever their dtype.
    words = tuple(view.view(torch.int32) for _, view in results)
    tensors = TailTensors(words, lse, **offsets, **begins)
    unseen_queries, unseen_keys, window = Reach.of(problem.options.window)
    left, right = (min(side or 0, LARGEST_WINDOW) for side in window)
    # Rows past those in use may be any number.
    longest_q, longest_k = (
        LARGEST_LENGTH if _USED[side] in problem.ragged else min(most, LARGEST_LENGTH)
        for side, most in (("q", problem.max_seqlen_q), ("k", longest_k))
    )
    bounds = TailBounds(
        problem.q_shape[1], rows_k, longest_q, longest_k, left, right, unseen_queries, unseen_keys,
        ds_tiles,
    )  # fmt: skip
    numbers = TailBounds(*map(int32, bounds))
    builder.launch(tail_spec(own, problem), (*aligned((tensors,)), numbers, STREAM))
