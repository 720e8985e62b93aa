"""Division of a forward into launches: the keys of query tiles into splits (`splits`), the queries
of the last wave by themselves (`last_wave`)."""

from __future__ import annotations

from typing import NamedTuple

from ..gpus.devices import Gpu
from .forward_problem import Problem
from .last_wave import last_wave
from .splits import divided

__all__ = ["ForwardPart", "divide_forward"]


class ForwardPart(NamedTuple):
    """Queries of a forward that one launch computes, and a second one if their keys are split.

    problem: of these queries, with the number of KV splits. queries: which of each sequence; None
    for all.
    """

    problem: Problem
    queries: range | None = None


def divide_forward(problem: Problem, num_splits: int, gpu: Gpu) -> tuple[ForwardPart, ...]:
    """Return the parts of a forward in the order of their launches; keys of the last one alone are
    split. num_splits: see `splits.divided`, whose errors this raises."""
    last = last_wave(problem, num_splits, gpu)
    if last is None:
        return (ForwardPart(divided(problem, num_splits, gpu)),)
    first, rest = last.problems(problem)
    begin, end = last.queries, problem.q_shape[1]
    return ForwardPart(first, range(begin)), ForwardPart(rest, range(begin, end))
