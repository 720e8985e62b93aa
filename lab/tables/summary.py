"""Summaries of measured tables in docs/benchmarks.md.

    python -m lab.tables.summary      # writes them into the page again

A section stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. Every figure is one of
docs/tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.tables.documents import FOLDER, read_markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
#: Tokens of a sequence as headings have them -> how a shape of 16,384 tokens has them.
_LENGTHS = {
    "512": "32x512", "1k": "16x1024", "2k": "8x2048", "4k": "4x4096", "8k": "2x8192",
    "16k": "1x16384",
}  # fmt: skip
_PEERS = ("ours", "flash-attn-4", "cuDNN")


class Line(NamedTuple):
    """A row of the summary: its words, and which row of which table it repeats."""

    words: str
    table: str
    direction: str
    shape: str
    heads: str
    mask: str


_WINDOW = "window (1023, 0)"
_OTHERS = (
    *(
        Line(f"{direction}, window of 1,024 keys, {length}", "throughput_h200_windows",
             direction, _LENGTHS[length], "16/16", _WINDOW)
        for direction in ("forward", "backward")
        for length in ("4k", "16k")
    ),
    *(
        Line(f"512 queries on 65,536 keys, heads {heads}", "throughput_h200_prefill", "forward",
             "1x(512, 65536)", heads, "causal")
        for heads in ("16/1", "8/1", "4/1")
    ),
    *(
        Line(f"{direction}, {shape.replace(', 1..', ', 1 to ')}, causal", "throughput_h200_varlen",
             direction, shape, "16/16", "causal")
        for direction in ("forward", "backward")
        for shape in (
            "packed 16x1024", "8 ragged, 1..3732, 6528 tokens", "64 ragged, 1..4002, 30044 tokens",
        )
    ),
)  # fmt: skip
_HBM = 4.8  # TB/s of an H200, its data sheet


def _rows(name: str) -> list[dict[str, str]]:
    return read_markdown((FOLDER / f"{name}.md").read_text("utf-8"))


def _row(table: str, *wanted: str) -> dict[str, str]:
    """Return the one row of a direction, shape, heads and mask. Raises ValueError for another
    number of them."""
    keys = ("direction", "shape", "heads", "mask")
    found = [row for row in _rows(table) if tuple(row[key] for key in keys) == wanted]
    if len(found) != 1:
        raise ValueError(f"{table} has {len(found)} rows of {', '.join(wanted)}")
    return found[0]


def _rates(row: dict[str, str]) -> list[str]:
    """Return the TFLOPS of `_PEERS`, the highest in bold."""
    cells = [row.get(f"{peer} (TFLOPS)", "-") for peer in _PEERS]
    best = max(float(cell) for cell in cells if cell != "-")
    return [f"**{cell}**" if cell != "-" and float(cell) == best else cell for cell in cells]


def _markdown(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _origins(*names: str) -> str:
    """Return date and commit of tables, in words."""
    found = []
    for name in names:
        text = (FOLDER / f"{name}.md").read_text("utf-8")
        match = re.search(r"commit ([\w-]+), time (\d{4}-\d\d-\d\d)", text)
        if match is None:
            raise ValueError(f"docs/tables/{name}.md names no commit and time")
        found.append(
            f"[{name.removeprefix('throughput_')}](tables/{name}.md) {match[2]}, {match[1]}"
        )
    return "Measured: " + ";\n".join(found) + "."


def dense() -> str:
    tables = {"forward": "throughput_h200", "backward": "throughput_h200_backward"}
    lines = [
        [f"{direction}, {mask}"]
        + [" / ".join(_rates(_row(table, direction, shape, "16/16", mask)))
           for shape in _LENGTHS.values()]
        for direction, table in tables.items()
        for mask in ("full", "causal")
    ]  # fmt: skip
    return f"{_markdown(['', *_LENGTHS], lines)}\n\n{_origins(*tables.values())}"


def others() -> str:
    lines = [[line.words, *_rates(_row(*line[1:]))] for line in _OTHERS]
    tables = dict.fromkeys(line.table for line in _OTHERS)
    return f"{_markdown(['other calls, TFLOPS', *_PEERS], lines)}\n\n{_origins(*tables)}"


def decode() -> str:
    lines = []
    for row in _rows("decode_h200"):
        match = re.fullmatch(r"(\d+)x\((\d), (\d+)\)", row["shape"])
        if match is None:
            raise ValueError(f"docs/tables/decode_h200.md has a shape {row['shape']!r}")
        share = float(row["K and V once, ours (TB/s)"]) / _HBM
        lines.append([
            f"{match[1]} x {int(match[3]):,}, {row['heads']}, {match[2]}", row["ours (us)"],
            f"{row['best peer (us)']}, {row['best peer']}", f"{share:.0%}".replace("%", " %"),
        ])  # fmt: skip
    heading = ["batch x keys, heads, queries", "ours, us", "best peer, us", "ours, of 4.8 TB/s"]
    return f"{_markdown(heading, lines)}\n\n{_origins('decode_h200')}"


def mha() -> str:
    """Return MHA without GQA: ours, and how many times the rate of the best peer."""
    tables = {
        "forward": "throughput_h200_mha", "backward": "throughput_h200_mha_backward",
    }  # fmt: skip
    forward, backward = map(_rows, tables.values())
    lines = []
    for first, second in zip(forward, backward, strict=True):
        if (first["shape"], first["heads"]) != (second["shape"], second["heads"]):
            raise ValueError(f"{', '.join(tables.values())} have rows of other shapes")
        cells = [f"{first['shape'].replace('..', ' to ')}, {first['heads']}"]
        for row in (first, second):
            cells += [" / ".join(_rates(row)), row["best peer / ours"]]
        lines.append(cells)
    heading = ["tokens, heads", "forward", "over the best peer", "backward", "over the best peer"]
    return f"{_markdown(heading, lines)}\n\n{_origins(*tables.values())}"


#: Name -> text of a section.
SECTIONS: dict[str, Callable[[], str]] = {
    "dense": dense, "others": others, "mha": mha, "decode": decode,
}  # fmt: skip


def with_sections(text: str) -> str:
    """Return the page with its sections written again. Raises ValueError if one is missing."""
    for name, section in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"docs/benchmarks.md has no section {name!r}")
        text = f"{before}{begin}{section()}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_sections(PAGE.read_text("utf-8")), "utf-8")
