"""Bounds that the PTX ISA states for approximate functions, and how far results are from exact.

Sections 9.7.3.8 (div), 9.7.3.13 to 9.7.3.22 and 9.7.4.9, 9.7.4.10 of PTX ISA 9.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cases import Case


@dataclass(frozen=True)
class Format:
    """A binary floating-point format; `smallest` and `largest` are its normal numbers' limits."""

    words: type
    fraction: int
    infinity: int
    magnitude: int
    smallest: float
    largest: float

    def ulp(self, exact: np.ndarray) -> np.ndarray:
        """Distance of neighbours around exact values, at least that of subnormals."""
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), self.smallest)))
        return 2.0 ** (exponent - self.fraction)


FORMATS = {
    "f16": Format(np.uint16, 10, 0x7C00, 0x7FFF, 2.0**-14, 65504.0),
    "bf16": Format(np.uint16, 7, 0x7F80, 0x7FFF, 2.0**-126, 2.0**128 - 2.0**120),
    "f32": Format(np.uint32, 23, 0x7F800000, 0x7FFFFFFF, 2.0**-126, 2.0**128 - 2.0**104),
    "f64": Format(np.uint64, 52, 0x7FF << 52, 2**63 - 1, 2.0**-1022, 1.7976931348623157e308),
}


def values(array: np.ndarray, floats: str) -> np.ndarray:
    """float64 values of patterns of a format; pairs become single values."""
    form = FORMATS[floats.removesuffix("x2")]
    words: np.ndarray = np.ascontiguousarray(array).ravel().view(form.words)
    with np.errstate(invalid="ignore"):
        if floats.startswith("bf16"):
            return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        kind = np.float16 if floats.startswith("f16") else np.float32
        return words.view(kind).astype(np.float64)


@dataclass(frozen=True)
class Measure:
    """`worst`: the largest error, as text; `wrong`: the first result outside the bound."""

    worst: str
    wrong: str


@dataclass(frozen=True)
class Bound:
    """Bound that the ISA promises for a function.

    `unit` is "ulp", "relative" or "absolute"; `limit(inputs, exact)` gives the bound in it for each
    element, infinite where there is none.
    """

    function: Callable[..., np.ndarray]
    unit: str
    limit: Callable[[list[np.ndarray], np.ndarray], np.ndarray]
    text: str
    layout: Format
    flushes: bool

    def measure(self, inputs: list[np.ndarray], result: np.ndarray) -> Measure:
        """Compare results with the exact function of the inputs."""
        if self.flushes:
            inputs = [self._flushed(array) for array in inputs]
        with np.errstate(all="ignore"):
            exact = self.function(*inputs)
            error = self._error(exact, result)
            bound = self.limit(inputs, exact)
        right = self._special(exact, result)
        judged = np.isfinite(exact) & (exact != 0) & ~right & np.isfinite(bound)
        right |= judged & (error <= bound) | ~np.isfinite(bound)
        wrong = ""
        if not right.all():
            at = int(np.argmin(right))
            wrong = (
                f"{(~right).sum()} of {right.size}, first at {at}: "
                f"f({', '.join(str(array[at]) for array in inputs)}) = {exact[at]}, "
                f"given {result[at]}, error {error[at]} {self.unit}"
            )
        return Measure(self._worst(error, judged & (exact != 0)), wrong)

    def _flushed(self, array: np.ndarray) -> np.ndarray:
        return np.where(np.abs(array) < self.layout.smallest, np.copysign(0.0, array), array)

    def _error(self, exact: np.ndarray, result: np.ndarray) -> np.ndarray:
        distance = np.abs(result - exact)
        if self.unit == "ulp":
            return distance / self.layout.ulp(exact)
        if self.unit == "relative":
            # A relative bound cannot hold among subnormals, which have a fixed spacing.
            spacing = self.layout.ulp(exact)
            subnormal = np.abs(exact) < self.layout.smallest
            return np.where(subnormal & (distance <= spacing), 0, distance / np.abs(exact))
        return distance

    def _special(self, exact: np.ndarray, result: np.ndarray) -> np.ndarray:
        """Return True where an exact result demands one value alone and has got it; edges allow
        two."""
        same = (result == exact) & (np.signbit(result) == np.signbit(exact))
        right = same & (~np.isfinite(exact) | (exact == 0)) | np.isnan(exact) & np.isnan(result)
        edge = 1 - 2.0 ** -(self.layout.fraction - 1)
        right |= np.isinf(result) & (np.abs(exact) > self.layout.largest * edge)
        if self.flushes:
            right |= (result == 0) & (np.abs(exact) < self.layout.smallest / edge)
        return right

    def _worst(self, error: np.ndarray, judged: np.ndarray) -> str:
        worst = float(error[judged].max())
        if self.unit == "ulp":
            return f"{worst:.3f} ulp"
        return f"2^{math.log2(worst):.2f} {self.unit}" if worst else f"0 {self.unit}"


def _always(limit: float) -> Callable[[list[np.ndarray], np.ndarray], np.ndarray]:
    return lambda inputs, exact: np.full(exact.shape, limit)


def _sine_limit(inputs: list[np.ndarray], exact: np.ndarray) -> np.ndarray:
    x = np.abs(inputs[0])
    two_pi = np.float32(2 * math.pi)
    return np.select([x <= two_pi, x <= 50 * two_pi], [2.0**-20.5, 2.0**-14.7], np.inf)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b as div.approx defines it: by more than 2^126 zero, or NaN for an infinite dividend."""
    large = (np.abs(b) > 2.0**126) & np.isfinite(b)
    return np.where(large, a * np.copysign(0.0, b), a / b)


def _logarithm_error(bound: Bound) -> Bound:
    """lg2: absolute in (0.5, 2), relative elsewhere; both limits are 2^-22."""

    class Mixed(Bound):
        def _error(self, exact: np.ndarray, result: np.ndarray) -> np.ndarray:
            return np.abs(result - exact) / np.maximum(1.0, np.abs(exact))

    return Mixed(
        bound.function, "absolute or relative", bound.limit, bound.text, bound.layout, bound.flushes
    )


def bound_of(case: Case) -> Bound:
    """The ISA's bound for an approximate case."""
    opcode = case.name.split("/")[1]
    parts = opcode.split(".")
    name, kind = parts[0], case.floats.removesuffix("x2")
    two_ulp = ("ulp", _always(2.0), "2 ulp")
    table: dict[tuple[str, str], tuple[Callable, str, Callable, str]] = {
        ("ex2", "f32"): (np.exp2, *two_ulp),
        ("ex2", "f16"): (np.exp2, "relative", _always(2.0**-9.9), "2^-9.9 relative"),
        ("ex2", "bf16"): (np.exp2, "relative", _always(2.0**-7), "2^-7 relative"),
        ("rcp", "f32"): (np.reciprocal, "ulp", _always(1.0), "1 ulp"),
        ("rsqrt", "f32"): (lambda x: 1 / np.sqrt(x), "relative", _always(2.0**-22.9),
                           "2^-22.9 relative"),
        ("sqrt", "f32"): (np.sqrt, "relative", _always(2.0**-23), "2^-23 relative"),
        ("lg2", "f32"): (np.log2, "", _always(2.0**-22),
                         "2^-22 absolute in (0.5, 2), relative elsewhere"),
        ("sin", "f32"): (np.sin, "absolute", _sine_limit, "2^-20.5 absolute, 2^-14.7 from 2 pi on"),
        ("cos", "f32"): (np.cos, "absolute", _sine_limit, "2^-20.5 absolute, 2^-14.7 from 2 pi on"),
        ("tanh", "f32"): (np.tanh, "relative", _always(2.0**-11), "2^-11 relative"),
        ("tanh", "f16"): (np.tanh, "absolute", _always(2.0**-10.987), "2^-10.987 absolute"),
        ("tanh", "bf16"): (np.tanh, "absolute", _always(2.0**-8), "2^-8 absolute"),
        ("div", "f32"): (_quotient if parts[1] == "approx" else np.divide, *two_ulp),
    }  # fmt: skip
    bound = Bound(*table[name, kind], FORMATS[kind], "ftz" in parts)
    return _logarithm_error(bound) if name == "lg2" else bound
