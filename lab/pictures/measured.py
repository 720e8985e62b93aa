"""Measured TFLOPS over the sequence length on an H200, beside flash-attn-4 and cuDNN.

The figures are those of docs/tables, which `python -m lab tables NAME --write` measures again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lab.pictures.plot import Axes, Scale, mark
from lab.pictures.svg import BLUE, GREEN, GREY, ORANGE, Drawing, text_width
from lab.tables.documents import FOLDER, read_markdown

#: Direction -> table of docs/tables.
_TABLES = {"forward": "throughput_h200", "backward": "throughput_h200_backward"}
#: Column of the tables, legend, colour, symbol.
PROVIDERS = (
    ("ours", "this project", BLUE, "full circle"),
    ("flash-attn-4", "flash-attn-4 4.0.0b36", ORANGE, "triangle"),
    ("cuDNN", "cuDNN 9.19", GREEN, "square"),
)
_HEADS = "16/16"
_LENGTHS = (512, 16384)
_PANEL = (392, 250)
_HIGHEST = 800


@dataclass(frozen=True)
class Measurements:
    """Rows of one table, column -> text; origin: GPU and commit."""

    rows: Sequence[dict[str, str]]
    origin: str


def read_table(name: str) -> Measurements:
    """Read a table of docs/tables. Raise ValueError if it holds no measured rows."""
    text = (FOLDER / f"{name}.md").read_text("utf-8")
    rows = read_markdown(text)
    origin = re.search(r"^Measured: ([^,]*),.*?commit (\w{7})", text, re.MULTILINE)
    if not rows or origin is None:
        raise ValueError(f"docs/tables/{name}.md holds no measured table")
    return Measurements(rows, f"{origin[1]}, commit {origin[2]}")


def throughput_h200() -> Drawing:
    """Draw forward and backward, full and causal, for 16,384 tokens."""
    tables = {direction: read_table(name) for direction, name in _TABLES.items()}
    drawing = Drawing(
        960, 776, "Measured TFLOPS over the sequence length on an H200",
        "Four panels, forward and backward, full and causal attention, heads 16/16, 16,384 tokens: "
        "measured rates of this project, of flash-attn-4 4.0.0b36 and of cuDNN 9.19.",
    )  # fmt: skip
    sources = "; ".join(f"{direction}: {table.origin}" for direction, table in tables.items())
    drawing.heading(
        "Measured on an H200, head_dim 256, bf16: TFLOPS over sequence length",
        f"heads {_HEADS}, 16,384 tokens; {sources}",
    )
    _legend(drawing)
    for row, (direction, table) in enumerate(tables.items()):
        for column, mask in enumerate(("full", "causal")):
            axes = _axes(drawing, 84 + column * 458, 140 + row * 328)
            title = "tokens in a sequence" if row else ""
            axes.frame(f"{direction}, {mask}", title, "" if column else "TFLOPS")
            _lines(axes, table, mask)
    return drawing


def _axes(drawing: Drawing, left: float, top: float) -> Axes:
    low, high = _LENGTHS
    ticks = []
    while low <= high:
        ticks.append((float(low), f"{low / 1024:g}k"))
        low *= 2
    x = Scale(_LENGTHS[0] / 1.12, high * 1.12, tuple(ticks), log=True)
    y = Scale(0, _HIGHEST, tuple((float(n), str(n)) for n in range(0, _HIGHEST + 1, 200)))
    return Axes(drawing, (left, top, *_PANEL), x, y)


def _lines(axes: Axes, table: Measurements, mask: str) -> None:
    """Draw one line per provider. Raise ValueError if the table lacks the rows."""
    rows = [row for row in table.rows if (row["heads"], row["mask"]) == (_HEADS, mask)]
    if not rows:
        raise ValueError(f"no rows of heads {_HEADS}, {mask}, in {table.origin}")
    lengths = [int(row["shape"].split("x")[1]) for row in rows]
    for column, _, colour, symbol in reversed(PROVIDERS):
        rates = [float(row[f"{column} (TFLOPS)"]) for row in rows]
        axes.line(lengths, rates, colour, 2.6)
        axes.marks(lengths, rates, colour, symbol)


def _legend(drawing: Drawing) -> None:
    x, y = 24.0, 90
    for _, words, colour, symbol in PROVIDERS:
        fill = colour if symbol.startswith("full ") else "#ffffff"
        drawing.line([(x, y - 4), (x + 26, y - 4)], colour, 2.6)
        mark(drawing, (x + 13, y - 4), symbol.removeprefix("full "), fill, colour)
        drawing.text((x + 34, y), words, 12.5)
        x += 34 + text_width(words, 12.5) + 28
    how = "all at the driver's clocks, interleaved on one machine"
    drawing.text((x, y), how, 12.5, colour=GREY)
