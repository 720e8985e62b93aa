"""The error of the polynomial exp2, from the float32 arithmetic that the device does."""

from __future__ import annotations

import numpy as np

from fa4_hd256.softmax_emu.fit import error_curve
from fa4_hd256.softmax_emu.pattern import COEFFICIENTS
from lab.pictures.plot import Axes, Scale
from lab.pictures.svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Drawing

_BINS = 96
_COLOURS = {2: ORANGE, 3: BLUE, 4: GREEN, 5: PURPLE}
#: Half a unit in the last place, relative: what rounding P costs at most.
_ROUNDING = (("rounding P to bfloat16", 2.0**-9), ("rounding P to float16", 2.0**-12))
_LEFT, _TOP, _INNER, _TALL = 96, 92, 560, 330


def exp2_error() -> Drawing:
    """Largest relative error of each degree over [0, 1], beside what rounding P costs."""
    drawing = Drawing(
        940,
        486,
        "Relative error of the exp2 polynomials",
        "Largest relative error in each of 96 parts of the interval from 0 to 1, on a logarithmic "
        "scale, for polynomials of degree 2 to 5; from degree 3 on all of it lies below the "
        "rounding of P to bfloat16 and to float16.",
    )
    drawing.heading(
        "exp2 by polynomial: from degree 3 on, the error hides behind the rounding of P",
        "relative error of 2^f, f in [0, 1], float32 as the device evaluates it",
    )
    decades = tuple((10.0**-n, f"1e-{n}") for n in range(8, 1, -1))
    axes = Axes(
        drawing,
        (_LEFT, _TOP, _INNER, _TALL),
        Scale(0.0, 1.0, tuple((n / 4, f"{n / 4:g}") for n in range(5))),
        Scale(1e-8, 1e-2, decades, log=True),
    )
    axes.frame(x_title="f, the fraction of the exponent", y_title="relative error")
    for words, half_ulp in _ROUNDING:
        _, y = axes.at(0.0, half_ulp)
        drawing.line([(_LEFT, y), (_LEFT + _INNER, y)], INK, 1.2, "6 4")
        drawing.text((_LEFT + _INNER + 14, y + 4), f"{words}: {half_ulp:.2g}", 12.5)
    for degree, colour in _COLOURS.items():
        centres, largest = _envelope(degree)
        axes.line(centres.tolist(), largest.tolist(), colour)
        _, y = axes.at(1.0, largest[-8:].max())
        drawing.text(
            (_LEFT + _INNER + 14, y + (22 if degree == 2 else 4)),
            f"degree {degree}: {_most(degree):.2g}",
            13,
            colour=colour,
            style="bold",
        )
    drawing.text((_LEFT + _INNER + 14, _TOP + _TALL), "largest error of each", 12, colour=GREY)
    return drawing


def _envelope(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (centres, largest error) of parts of [0, 1]; nothing below the plot's lower end."""
    points, errors = error_curve(COEFFICIENTS[degree])
    part = np.minimum((points.astype(np.float64) * _BINS).astype(int), _BINS - 1)
    largest = np.zeros(_BINS)
    np.maximum.at(largest, part, np.abs(errors))
    return (np.arange(_BINS) + 0.5) / _BINS, np.maximum(largest, 1e-8)


def _most(degree: int) -> float:
    return float(np.abs(error_curve(COEFFICIENTS[degree])[1]).max())
