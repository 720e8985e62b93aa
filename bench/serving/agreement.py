"""Agreement of two engines' answers, and of their probabilities over the same tokens.

Greedy tokens of two correct engines part sooner or later: rounding decides between two tokens that
are equally likely, and everything behind that follows another text. So three things are compared:
the tokens; the log-probabilities of generated tokens up to the first difference, where both engines
have decoded the same text; and those of a given text, which both engines read as a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Generated(NamedTuple):
    """Tokens that an engine generated, and the log-probability of each, by request."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class Scored(NamedTuple):
    """Log-probabilities of the tokens of given texts, and the likeliest token at each place."""

    logprobs: list[list[float]]
    best: list[list[int]]


class Agreement(NamedTuple):
    """Agreement of two engines.

    equal: requests whose tokens are all equal, of so many. first: tokens before the first
    difference, the mean over requests that have one; None if none has. decoded, decoded_max: mean
    and largest difference of log-probabilities before it. scored, scored_max: those of given texts;
    best: share of places where the likeliest token is the same.
    """

    equal: int
    requests: int
    first: float | None
    decoded: float
    decoded_max: float
    scored: float
    scored_max: float
    best: float


def agreement(one: tuple[Generated, Scored], other: tuple[Generated, Scored]) -> Agreement:
    """Compare two engines over the same requests and texts. Raises ValueError if they answered
    other requests, or with other numbers of tokens."""
    (generated, scored), (generated_b, scored_b) = one, other
    firsts = [_first(a, b) for a, b in _pairs(generated.tokens, generated_b.tokens)]
    decoded = [
        abs(x - y)
        for (a, b), first in zip(_pairs(generated.logprobs, generated_b.logprobs), firsts)
        for x, y in zip(a[:first], b[:first])
    ]
    given = [
        abs(x - y) for a, b in _pairs(scored.logprobs, scored_b.logprobs) for x, y in zip(a, b)
    ]
    same = [x == y for a, b in _pairs(scored.best, scored_b.best) for x, y in zip(a, b)]
    apart = [first for first in firsts if first is not None]
    return Agreement(
        len(firsts) - len(apart), len(firsts), sum(apart) / len(apart) if apart else None,
        _mean(decoded), max(decoded, default=0.0), _mean(given), max(given, default=0.0),
        _mean(same),
    )  # fmt: skip


def _first(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the place of the first difference, None if there is none."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), None)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _pairs(one: Sequence[list], other: Sequence[list]) -> Iterator[tuple[list, list]]:
    """Yield the answers to each request. Raises ValueError if their lengths differ."""
    lengths = [[len(answer) for answer in answers] for answers in (one, other)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"answers of {lengths[0]} and of {lengths[1]} tokens; accepted: equal")
    yield from zip(one, other)
