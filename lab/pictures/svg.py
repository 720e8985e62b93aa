"""A small writer of SVG: shapes and text at given places, the same text from every machine.

Coordinates are pixels, y downwards, rounded to a tenth. No font of the machine is read: widths come
from a table of DejaVu Sans, which is wider than what most readers have, so that what fits here fits
there. Every picture has a white ground, and a title and a description for readers who cannot see
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Point = tuple[float, float]

# Okabe and Ito's palette, which people with any common colour vision tell apart.
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY = "#cc79a7", "#56b4e9"
# Text, secondary text, lines of frames and grids, quiet fill.
INK, GREY, RULE = "#1b1f24", "#59636e", "#d0d7de"

SANS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MONO = "SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

#: Advance widths of DejaVu Sans for the characters 32 to 126, in hundredths of the font size.
_WIDTHS = (
    32, 40, 46, 84, 64, 95, 78, 27, 39, 39, 50, 84, 32, 36, 32, 34, 64, 64, 64, 64, 64, 64, 64, 64,
    64, 64, 34, 34, 84, 84, 84, 53, 100, 68, 69, 70, 77, 63, 58, 77, 75, 29, 29, 66, 56, 86, 75, 79,
    60, 79, 69, 63, 61, 73, 68, 99, 69, 61, 69, 39, 34, 39, 84, 50, 50, 61, 63, 55, 63, 62, 35, 63,
    63, 28, 28, 58, 28, 97, 63, 61, 63, 63, 41, 52, 39, 63, 59, 82, 59, 59, 52, 64, 34, 64, 84,
)  # fmt: skip
_OTHERS = {"·": 32, "→": 84, "←": 84, "≤": 84, "ᵀ": 40, "²": 40}
_MONO_WIDTH = 0.61
_BOLD = 1.2


def text_width(text: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """Pixels that a line of text takes, or a little more."""
    if mono:
        return _MONO_WIDTH * size * len(text)
    hundredths = sum(
        _WIDTHS[ord(c) - 32] if 32 <= ord(c) < 127 else _OTHERS.get(c, 84) for c in text
    )
    return hundredths / 100 * size * (_BOLD if bold else 1.0)


def tint(colour: str, share: float) -> str:
    """A colour mixed with white; share: of the colour, 0 to 1."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)


@dataclass(frozen=True)
class TextBox:
    """Box of a line of text: left, top, right, bottom."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: TextBox) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class Drawing:
    """A picture of width x height pixels. title, description: for readers who cannot see it. texts:
    the places of all lines of text, for a test that none covers another."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self.texts: list[TextBox] = []
        self._parts: list[str] = []

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{SANS}">'
        )
        words = (f"<title>{escape(self.title)}</title>", f"<desc>{escape(self.description)}</desc>")
        ground = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        return "\n".join([head, *words, ground, *self._parts, "</svg>"]) + "\n"

    def rect(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 0.0,
        thick: float = 1.0,
    ) -> None:
        corner = f' rx="{_n(radius)}"' if radius else ""
        line = f' stroke="{stroke}" stroke-width="{_n(thick)}"' if stroke != "none" else ""
        self._parts.append(
            f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(width)}" height="{_n(height)}"'
            f'{corner} fill="{fill}"{line}/>'
        )

    def circle(self, centre: Point, radius: float, fill: str, stroke: str = "none") -> None:
        line = f' stroke="{stroke}" stroke-width="1.5"' if stroke != "none" else ""
        x, y = centre
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"{line}/>'
        )

    def polygon(self, points: Sequence[Point], fill: str, stroke: str = "none") -> None:
        line = f' stroke="{stroke}" stroke-width="1.5"' if stroke != "none" else ""
        self._parts.append(f'<polygon points="{_points(points)}" fill="{fill}"{line}/>')

    def line(
        self, points: Sequence[Point], stroke: str = INK, thick: float = 1.0, dash: str = ""
    ) -> None:
        """A line through the points. dash: lengths of strokes and gaps, "5 3" say."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{_points(points)}" fill="none" stroke="{stroke}" '
            f'stroke-width="{_n(thick)}" stroke-linejoin="round"{dashed}/>'
        )

    def arrow(
        self, points: Sequence[Point], stroke: str = INK, thick: float = 1.5, dash: str = ""
    ) -> None:
        (x0, y0), (x1, y1) = points[-2], points[-1]
        length = math.hypot(x1 - x0, y1 - y0)
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        head, half = 4 + 2.5 * thick, 2 + 1.3 * thick
        base = x1 - ux * head, y1 - uy * head
        self.line([*points[:-1], base], stroke, thick, dash)
        self.polygon(
            [
                (x1, y1),
                (base[0] - uy * half, base[1] + ux * half),
                (base[0] + uy * half, base[1] - ux * half),
            ],
            stroke,
        )

    def text(
        self,
        place: Point,
        text: str,
        size: float = 13,
        anchor: str = "start",
        colour: str = INK,
        style: str = "",
    ) -> None:
        """A line of text whose baseline begins, is centred or ends at `place`. anchor: "start",
        "middle" or "end". style: words of "bold", "italic", "mono", "up"; up: rotated by 90
        degrees, to be read from below."""
        words = style.split()
        x, y = place
        self._note_box(place, text, size, anchor, words)
        more = f' text-anchor="{anchor}"' if anchor != "start" else ""
        more += ' font-weight="bold"' if "bold" in words else ""
        more += ' font-style="italic"' if "italic" in words else ""
        more += f' font-family="{MONO}"' if "mono" in words else ""
        more += f' transform="rotate(-90 {_n(x)} {_n(y)})"' if "up" in words else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{colour}"{more}>'
            f"{escape(text)}</text>"
        )

    def lines(
        self,
        place: Point,
        texts: Sequence[str],
        size: float = 13,
        anchor: str = "start",
        colour: str = INK,
        style: str = "",
    ) -> None:
        for number, text in enumerate(texts):
            self.text(
                (place[0], place[1] + number * size * 1.35), text, size, anchor, colour, style
            )

    def box(
        self,
        place: tuple[float, float, float, float],
        texts: Sequence[str],
        colour: str,
        size: float = 13,
    ) -> None:
        """A box (left, top, width, height) with centred lines of text, the first one bold."""
        left, top, width, height = place
        self.rect(left, top, width, height, tint(colour, 0.14), colour, 6, 1.5)
        first = top + height / 2 - (len(texts) - 1) * size * 0.675 + size * 0.36
        for number, text in enumerate(texts):
            self.text(
                (left + width / 2, first + number * size * 1.35),
                text,
                size if number == 0 else size - 1,
                "middle",
                INK if number == 0 else GREY,
                "bold" if number == 0 else "",
            )

    def heading(self, text: str, below: str = "") -> None:
        """The picture's own title, and a line below it."""
        self.text((24, 32), text, 18, style="bold")
        if below:
            self.text((24, 53), below, 13, colour=GREY)

    def _note_box(
        self, place: Point, text: str, size: float, anchor: str, words: list[str]
    ) -> None:
        width = text_width(text, size, "mono" in words, "bold" in words)
        before = {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        x, y = place
        above, below = 0.74 * size, 0.2 * size
        if "up" in words:
            found = TextBox(text, x - above, y - width + before, x + below, y + before)
        else:
            found = TextBox(text, x - before, y - above, x - before + width, y + below)
        self.texts.append(found)


def _n(value: float) -> str:
    """A coordinate: one decimal, none where it is whole."""
    text = f"{value:.1f}"
    text = text[:-2] if text.endswith(".0") else text
    return "0" if text == "-0" else text


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
