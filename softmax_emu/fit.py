"""Minimax polynomials for 2^f on [0, 1], as float32 coefficients for a float32 fma Horner scheme.

Two steps.  First the real coefficients that minimise the largest relative error with p(0) = 1
exactly, by linear programming: minimise t under -t <= p(f) / 2^f - 1 <= t on Chebyshev nodes.
Then the coefficients are rounded to float32 and a local search over neighbouring float32 values
minimises the error of the polynomial as the device evaluates it, roundings included.

p(0) = 1 makes 2^n exact for whole n, so the largest probability of a row is exactly 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .reference_twin import horner, round_to_bfloat16

DEGREES = (2, 3, 4, 5)

_NODES = 1200
# Points of the search, of the final measurement, and coefficient steps tried at a time.
_SEARCH_POINTS = 1 << 13
_MEASURE_POINTS = 1 << 20
_MAX_ROUNDS = 60


@dataclass(frozen=True)
class Fit:
    """Coefficients (c0 first, each a float32) and the errors of the float32 evaluation.

    `max_relative_error` is max |p(f) / 2^f - 1|; `max_ulp_error` the same distance in float32
    ulps of the result (2^-23 on [1, 2)); the last two are the relative errors after p is rounded
    to bf16 or fp16, to be compared with the half ulps 2^-8 and 2^-11 that any result suffers.
    """

    degree: int
    coefficients: tuple[float, ...]
    max_relative_error: float
    max_ulp_error: float
    max_relative_error_bfloat16: float
    max_relative_error_float16: float

    def as_dict(self) -> dict:
        return {
            "degree": self.degree,
            "coefficients": list(self.coefficients),
            "max_relative_error": self.max_relative_error,
            "max_ulp_error": self.max_ulp_error,
            "max_relative_error_bfloat16": self.max_relative_error_bfloat16,
            "max_relative_error_float16": self.max_relative_error_float16,
        }


def minimax(degree: int) -> np.ndarray:
    """Real minimax coefficients (degree + 1 float64, the first exactly 1), relative error. Raises
    ModuleNotFoundError without scipy, which solves the linear program."""
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ModuleNotFoundError(
            "a fit needs scipy, which is not installed: pip install scipy", name="scipy"
        ) from error
    nodes = (1 - np.cos(np.pi * np.arange(_NODES + 1) / _NODES)) / 2
    powers = nodes[:, None] ** np.arange(1, degree + 1) / np.exp2(nodes)[:, None]
    remainder = 1 - 1 / np.exp2(nodes)
    # The unknowns, c1.. and t, are scaled so that t is of order 1 for the solver's tolerances.
    scale = 10.0 ** -(degree + 1)
    ones = np.ones((len(nodes), 1)) * scale
    result = linprog(
        np.eye(degree + 1)[-1],
        A_ub=np.block([[powers, -ones], [-powers, -ones]]),
        b_ub=np.concatenate([remainder, -remainder]),
        bounds=[(None, None)] * degree + [(0, None)],
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if not result.success:
        raise RuntimeError(f"linear program of degree {degree} not solved: {result.message}")
    return np.concatenate([[1.0], result.x[:-1]])


def _points(count: int) -> np.ndarray:
    """float32 arguments: uniform on [0, 1] with both ends, and a tail towards 0."""
    tail = np.exp2(-np.arange(1, 60, dtype=np.float64))
    return np.unique(np.concatenate([np.arange(count + 1) / count, tail]).astype(np.float32))


def _largest_error(coefficients: np.ndarray, points: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(horner(points, coefficients).astype(np.float64) / exact - 1).max())


def _search(coefficients: np.ndarray) -> np.ndarray:
    """Steepest descent over float32 neighbours of c1..., one or two coefficients at a time."""
    points = _points(_SEARCH_POINTS)
    exact = np.exp2(points.astype(np.float64))
    best = coefficients.astype(np.float32)
    best_error = _largest_error(best, points, exact)
    indices = range(1, len(best))
    # Higher coefficients matter less, so their useful steps are larger: powers of two in ulps.
    steps = [sign * 2**power for power in range(5) for sign in (1, -1)]
    moves: list[tuple[tuple[int, int], ...]]
    moves = [((index, step),) for index in indices for step in steps]
    moves += [
        ((i, step_i), (j, step_j))
        for i, j in itertools.combinations(indices, 2)
        for step_i, step_j in itertools.product((1, -1, 2, -2), repeat=2)
    ]
    for _ in range(_MAX_ROUNDS):
        candidates = []
        for move in moves:
            bits = best.view(np.int32).copy()
            for index, step in move:
                bits[index] += step
            candidate = bits.view(np.float32)
            candidates.append((_largest_error(candidate, points, exact), candidate.tobytes()))
        error, raw = min(candidates)
        if error >= best_error:
            return best
        best, best_error = np.frombuffer(raw, np.float32), error
    return best


def error_curve(
    coefficients: tuple[float, ...], count: int = 4096
) -> tuple[np.ndarray, np.ndarray]:
    """Return (f, p(f) / 2^f - 1) on `count` + 1 or more float32 points of [0, 1]."""
    points = _points(count)
    exact = np.exp2(points.astype(np.float64))
    return points, horner(points, coefficients).astype(np.float64) / exact - 1


def measure(coefficients: tuple[float, ...]) -> Fit:
    """The errors of given coefficients over 2^20 points of [0, 1]."""
    points = _points(_MEASURE_POINTS)
    exact = np.exp2(points.astype(np.float64))
    value = horner(points, coefficients)
    wide = value.astype(np.float64)
    # The result 2 at f = 1 is measured in the ulps of [1, 2) too.
    return Fit(
        degree=len(coefficients) - 1,
        coefficients=tuple(float(c) for c in coefficients),
        max_relative_error=float(np.abs(wide / exact - 1).max()),
        max_ulp_error=float((np.abs(wide - exact) * 2.0**23).max()),
        max_relative_error_bfloat16=float(np.abs(round_to_bfloat16(value) / exact - 1).max()),
        max_relative_error_float16=float(
            np.abs(value.astype(np.float16).astype(np.float64) / exact - 1).max()
        ),
    )


def fit(degree: int) -> Fit:
    """Fit, round, search and measure.  Raises ValueError for a degree outside 2 to 5."""
    if degree not in DEGREES:
        raise ValueError(f"degree is {degree}; accepted are {', '.join(map(str, DEGREES))}")
    coefficients = _search(minimax(degree))
    return measure(tuple(float(c) for c in coefficients))
