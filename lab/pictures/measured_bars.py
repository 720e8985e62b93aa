"""Measured bars of the README: backward, windows and decoding on an H200, beside two peers.

Every figure is one of the tables that lab.pictures.measured reads. Decoding waits for memory, so
its bars are bytes of keys and values per second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from lab.pictures.measured import PROVIDERS, Measurements, read_table
from lab.pictures.plot import Axes, Scale
from lab.pictures.svg import GREY, INK, Drawing, text_width

_TFLOPS, _BANDWIDTH = "TFLOPS", "TB/s"


class Group(NamedTuple):
    """Bars side by side: one row of a table, and the lines of text below them."""

    direction: str
    shape: str
    mask: str
    heads: str
    words: tuple[str, str]


@dataclass(frozen=True)
class Panel:
    """Groups of one table. highest: of the scale, in `unit`; step: between its lines."""

    title: str
    table: str
    highest: int
    step: int
    groups: tuple[Group, ...]
    unit: str = _TFLOPS


#: Of the data sheet, TB/s.
_HBM = 4.8
_LENGTHS = (("4x4096", "4k"), ("1x16384", "16k"))
_WINDOW = "window (1023, 0)"
_PANELS = (
    Panel("backward, TFLOPS", "throughput_h200_backward", 800, 200, tuple(
        Group("backward", shape, mask, "16/16", (mask, length))
        for mask in ("full", "causal")
        for shape, length in _LENGTHS
    )),
    Panel("window of 1,024 keys, TFLOPS", "throughput_h200_windows", 800, 200, tuple(
        Group(direction, shape, _WINDOW, "16/16", (direction, length))
        for direction in ("forward", "backward")
        for shape, length in _LENGTHS
    )),
    Panel(f"decode, TB/s (HBM has {_HBM})", "decode_h200", 5, 1, (
        Group("forward", "8x(1, 8192)", "full", "16/2", ("8 x 8k", "1 query")),
        Group("forward", "8x(4, 8192)", "full", "16/2", ("8 x 8k", "4 queries")),
        Group("forward", "1x(4, 131072)", "full", "32/2", ("1 x 128k", "4 queries")),
        Group("forward", "128x(1, 131072)", "full", "32/2", ("128 x 128k", "1 query")),
    ), _BANDWIDTH),
)  # fmt: skip
_PLACE = (262, 216)
_BAR = 18.0


def bars_h200() -> Drawing:
    """Draw three panels of bars: TFLOPS, and TB/s of decoding."""
    tables = [read_table(panel.table) for panel in _PANELS]
    commits = dict.fromkeys(table.origin.rsplit(" ", 1)[1] for table in tables)
    drawing = Drawing(
        960, 400, "Measured rates of backward, windows and decoding on an H200",
        "Three panels of bars: measured rates of this project, of flash-attn-4 4.0.0b36 and of "
        "cuDNN 9.19 at head_dim 256: TFLOPS of backward and windows, TB/s of keys and values of "
        "decoding. cuDNN takes no window.",
    )  # fmt: skip
    drawing.heading(
        "Measured on an H200, head_dim 256, bf16: higher is better",
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
            if row[f"{column} (TFLOPS)"] == "-":
                continue
            text, value = _rate(row, column, panel.unit)
            x = middle + (place - 1.5) * _BAR
            _, top = axes.at(0, value)
            drawing.rect(x, top, _BAR - 2, ground - top, colour)
            drawing.text((x + _BAR / 2 - 1, top - 4), text, 8.5, "middle", INK)
        drawing.lines((middle, ground + 18), group.words, 12, "middle", GREY)


def _rate(row: dict[str, str], column: str, unit: str) -> tuple[str, float]:
    """Return a bar's text and height. TB/s: of keys and values, each read once; of ours as the
    table has it, of others by their FLOP, 4 D per query head, query and key."""
    text = row[f"{column} (TFLOPS)"]
    if unit == _TFLOPS:
        return text, float(text)
    heads, heads_kv = map(int, row["heads"].split("/"))
    (queries,) = map(int, re.findall(r"x\((\d+), \d+\)", row["shape"]))
    # Two bytes each of K and V per KV head, key and column.
    rate = float(text) * heads_kv / (heads * queries)
    if column == PROVIDERS[0][0]:
        rate = float(row["K and V once, ours (TB/s)"])
    return f"{rate:.1f}", rate


def _row(table: Measurements, name: str, group: Group) -> dict[str, str]:
    """Return the row of a group. Raises ValueError if the table does not hold it once."""
    wanted = (group.direction, group.shape, group.mask, group.heads)
    keys = ("direction", "shape", "mask", "heads")
    found = [row for row in table.rows if tuple(row[key] for key in keys) == wanted]
    if len(found) != 1:
        raise ValueError(f"the table {name} has {len(found)} rows of {', '.join(wanted)}")
    return found[0]
