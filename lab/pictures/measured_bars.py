"""Measured bars of the README: backward, windows and decoding on an H200, beside two peers.

Every figure is one of the tables that lab.pictures.measured reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lab.pictures.measured import PROVIDERS, Measurements, read_table
from lab.pictures.plot import Axes, Scale
from lab.pictures.svg import GREY, INK, Drawing, text_width

__all__ = ["bars_h200"]


class Group(NamedTuple):
    """Bars side by side: one row of a table, and the lines of text below them."""

    direction: str
    shape: str
    mask: str
    heads: str
    words: tuple[str, str]


@dataclass(frozen=True)
class Panel:
    """Groups of one table. highest: of the scale, TFLOPS; step: between its lines."""

    title: str
    table: str
    highest: int
    step: int
    groups: tuple[Group, ...]


_LENGTHS = (("4x4096", "4k"), ("1x16384", "16k"))
_WINDOW = "window (1023, 0)"
_PANELS = (
    Panel("backward", "throughput_h200_backward", 800, 200, tuple(
        Group("backward", shape, mask, "16/16", (mask, length))
        for mask in ("full", "causal")
        for shape, length in _LENGTHS
    )),
    Panel("sliding window of 1,024 keys", "throughput_h200_windows", 800, 200, tuple(
        Group(direction, shape, _WINDOW, "16/16", (direction, length))
        for direction in ("forward", "backward")
        for shape, length in _LENGTHS
    )),
    Panel("decode, batch x keys", "decode_h200", 240, 60, (
        Group("forward", "8x(1, 8192)", "full", "16/2", ("8 x 8k", "1 query")),
        Group("forward", "8x(4, 8192)", "full", "16/2", ("8 x 8k", "4 queries")),
        Group("forward", "1x(4, 131072)", "full", "32/2", ("1 x 128k", "4 queries")),
        Group("forward", "128x(1, 131072)", "full", "32/2", ("128 x 128k", "1 query")),
    )),
)  # fmt: skip
_PLACE = (262, 216)
_BAR = 18.0


def bars_h200() -> Drawing:
    """Draw three panels of bars, TFLOPS."""
    tables = [read_table(panel.table) for panel in _PANELS]
    commits = dict.fromkeys(table.origin.rsplit(" ", 1)[1] for table in tables)
    drawing = Drawing(
        960, 400, "Measured TFLOPS of backward, windows and decoding on an H200",
        "Three panels of bars: measured rates of this project, of flash-attn-4 4.0.0b36 and of "
        "cuDNN 9.19 at head_dim 256. cuDNN takes no window.",
    )  # fmt: skip
    drawing.heading(
        "Measured on an H200, head_dim 256, bf16: TFLOPS, higher is better",
        f"interleaved on one machine at the driver's clocks; commits {', '.join(commits)}",
    )
    _legend(drawing)
    for number, (panel, table) in enumerate(zip(_PANELS, tables, strict=True)):
        _draw(drawing, 52 + number * 310, panel, table)
    return drawing


def _legend(drawing: Drawing) -> None:
    x = 24.0
    for _, words, colour, _ in PROVIDERS:
        drawing.rect(x, 72, 14, 14, colour)
        drawing.text((x + 20, 84), words, 12.5)
        x += 20 + text_width(words, 12.5) + 26
    drawing.text((x, 84), "no bar: not offered", 12.5, colour=GREY)


def _draw(drawing: Drawing, left: float, panel: Panel, table: Measurements) -> None:
    ticks = tuple((float(n), str(n)) for n in range(0, panel.highest + 1, panel.step))
    count = len(panel.groups)
    axes = Axes(drawing, (left, 130, *_PLACE), Scale(0, count, ()), Scale(0, panel.highest, ticks))
    axes.frame(panel.title)
    for number, group in enumerate(panel.groups):
        row = _row(table, panel.table, group)
        middle, ground = axes.at(number + 0.5, 0)
        for place, (column, _, colour, _) in enumerate(PROVIDERS):
            text = row[f"{column} (TFLOPS)"]
            if text == "-":
                continue
            x = middle + (place - 1.5) * _BAR
            _, top = axes.at(0, float(text))
            drawing.rect(x, top, _BAR - 2, ground - top, colour)
            drawing.text((x + _BAR / 2 - 1, top - 4), text, 8.5, "middle", INK)
        drawing.lines((middle, ground + 18), group.words, 12, "middle", GREY)


def _row(table: Measurements, name: str, group: Group) -> dict[str, str]:
    """Return the row of a group. Raises ValueError if the table does not hold it once."""
    wanted = (group.direction, group.shape, group.mask, group.heads)
    keys = ("direction", "shape", "mask", "heads")
    found = [row for row in table.rows if tuple(row[key] for key in keys) == wanted]
    if len(found) != 1:
        raise ValueError(f"the table {name} has {len(found)} rows of {', '.join(wanted)}")
    return found[0]
