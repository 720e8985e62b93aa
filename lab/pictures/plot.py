"""Axes for pictures: a frame with scales, grid and ticks, and what is drawn in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.pictures.svg import GREY, INK, RULE, Drawing, Point, tint


@dataclass(frozen=True)
class Scale:
    """One axis. low, high: ends; ticks: (value, text). log: equal ratios take equal places."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return (value - low) / (high - low)


@dataclass(frozen=True)
class Axes:
    """A frame of a drawing: place is (left, top, width, height) of what lies inside."""

    drawing: Drawing
    place: tuple[float, float, float, float]
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> Point:
        left, top, width, height = self.place
        return left + width * self.x.share(x), top + height * (1 - self.y.share(y))

    def frame(self, title: str = "", x_title: str = "", y_title: str = "") -> None:
        """Grid, ticks, titles."""
        drawing, (left, top, width, height) = self.drawing, self.place
        for value, text in self.y.ticks:
            _, y = self.at(self.x.low, value)
            drawing.line([(left, y), (left + width, y)], RULE)
            drawing.text((left - 8, y + 4), text, 12, "end", GREY)
        for value, text in self.x.ticks:
            x, _ = self.at(value, self.y.low)
            drawing.line([(x, top + height), (x, top + height + 5)], GREY)
            drawing.text((x, top + height + 19), text, 12, "middle", GREY)
        drawing.line([(left, top + height), (left + width, top + height)], GREY, 1.2)
        if title:
            drawing.text((left, top - 12), title, 14, style="bold")
        if x_title:
            drawing.text((left + width / 2, top + height + 40), x_title, 12.5, "middle", INK)
        if y_title:
            drawing.text((left - 52, top + height / 2), y_title, 12.5, "middle", INK, "up")

    def band(
        self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], colour: str
    ) -> None:
        """The area between two lines."""
        upper = [self.at(x, y) for x, y in zip(xs, highs, strict=True)]
        lower = [self.at(x, y) for x, y in zip(xs, lows, strict=True)]
        self.drawing.polygon([*upper, *reversed(lower)], tint(colour, 0.22))

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        colour: str,
        thick: float = 2.2,
        dash: str = "",
    ) -> None:
        points = [self.at(x, y) for x, y in zip(xs, ys, strict=True)]
        self.drawing.line(points, colour, thick, dash)

    def marks(self, xs: Sequence[float], ys: Sequence[float], colour: str, kind: str) -> None:
        """kind: "circle", "square", "diamond" or "triangle", filled white with a coloured edge;
        with "full " in front filled with the colour."""
        fill = colour if kind.startswith("full ") else "#ffffff"
        shape = kind.removeprefix("full ")
        for value in zip(xs, ys, strict=True):
            mark(self.drawing, self.at(*value), shape, fill, colour)


def mark(drawing: Drawing, centre: Point, shape: str, fill: str, edge: str) -> None:
    x, y = centre
    if shape == "circle":
        drawing.circle(centre, 4, fill, edge)
    elif shape == "square":
        drawing.polygon(
            [(x - 4, y - 4), (x + 4, y - 4), (x + 4, y + 4), (x - 4, y + 4)], fill, edge
        )
    elif shape == "diamond":
        drawing.polygon([(x, y - 5.5), (x + 5.5, y), (x, y + 5.5), (x - 5.5, y)], fill, edge)
    elif shape == "triangle":
        drawing.polygon([(x, y - 5), (x + 5, y + 4), (x - 5, y + 4)], fill, edge)
    else:
        raise ValueError(f"symbol {shape!r}; accepted are circle, square, diamond, triangle")
