"""TFLOPS over the sequence length, and how far the timing model can be believed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lab.pictures.inputs import basis, read
from lab.pictures.plot import Axes, Scale, mark
from lab.pictures.svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Drawing, text_width, tint
from lab.published.flash_attention import FORWARD_256, PR_2454
from lab.published.nvidia import CUDNN_9_27, FLASH_ATTENTION_UNKNOWN, FROST_1_31, TRAINING
from lab.published.rows import Published

OURS, THEIRS = "ours", "flash-attn-4"
_LENGTHS = {512 << n: f"{(512 << n) / 1024:g}k" for n in range(9)}
_PANEL = (392, 330)
_TOP = 150


def throughput_forward() -> Drawing:
    """Forward over seqlen at 32k tokens, full and causal, beside published measurements."""
    drawing = Drawing(
        960,
        548,
        "Forward TFLOPS over the sequence length, modelled, beside published rates",
        "Two panels, full and causal attention, heads 8/8, 32,768 tokens: modelled rates of this "
        "project and of flash-attn-4 4.0.0b36 with bands over the uncertain constants, and rates "
        "of an earlier flash-attn-4 measured on a B200.",
    )
    drawing.heading(
        "Forward at head_dim 256, bf16: TFLOPS over sequence length",
        f"heads 8/8, 32,768 tokens or one sequence; lines: {basis()}",
    )
    _legend(drawing, [
        (BLUE, "line", "this project, modelled"),
        (ORANGE, "line", "flash-attn-4 4.0.0b36, modelled"),
    ])  # fmt: skip
    drawing.text((510, 82), "bands: draws of the uncertain constants", 12.5, colour=GREY)
    published = "flash-attn-4 of PR 2454 (half of exp2 emulated), measured on a B200 at 1965 MHz"
    _legend(drawing, [(INK, "diamond", published)], 104)
    for number, mask in enumerate(("full", "causal")):
        axes = _axes(drawing, 84 + number * 458, 2000)
        axes.frame(mask, "tokens a sequence", "TFLOPS" if number == 0 else "")
        _modelled(axes, "dense", "forward", mask)
        rows = [r for r in FORWARD_256 if r.build == PR_2454 and r.mask == mask]
        _marks(axes, rows, INK, "full diamond")
    return drawing


def throughput_peers() -> Drawing:
    """One causal sequence, few KV heads: forward and backward beside NVIDIA's published tables."""
    drawing = Drawing(
        960,
        568,
        "TFLOPS of one causal sequence, modelled for a B200, beside GB200 measurements",
        "Two panels, forward and backward, batch 1, heads 32/2: modelled rates of this project and "
        "of flash-attn-4 4.0.0b36 on a B200, and rates that NVIDIA measured on a GB200 with cuDNN, "
        "its CuTe DSL kernels and flash-attn-4.",
    )
    drawing.heading(
        "One causal sequence, heads 32/2, head_dim 256, bf16: TFLOPS over its length",
        f"lines: {basis()}",
    )
    _legend(drawing, [
        (BLUE, "line", "this project, modelled, B200"),
        (ORANGE, "line", "flash-attn-4 4.0.0b36, modelled, B200"),
        (GREEN, "square", "cuDNN 9.27, measured, GB200"),
    ])  # fmt: skip
    _legend(drawing, [
        (PURPLE, "circle", "CuTe DSL kernels of the cuDNN frontend 1.31, measured, GB200"),
        (RED, "triangle", "flash-attn-4 (version not said), measured, GB200"),
    ], 104)  # fmt: skip
    kinds = {
        CUDNN_9_27: (GREEN, "square"),
        FROST_1_31: (PURPLE, "circle"),
        FLASH_ATTENTION_UNKNOWN: (RED, "triangle"),
    }
    for number, direction in enumerate(("forward", "backward")):
        axes = _axes(drawing, 84 + number * 458, 2000, lengths=(2048, 32768), top=170)
        axes.frame(direction, "tokens", "TFLOPS" if number == 0 else "")
        _modelled(axes, "few KV heads", direction, "causal")
        for build, (colour, kind) in kinds.items():
            rows = [r for r in TRAINING
                    if (r.gpu, r.build, r.direction) == ("GB200", build, direction)]  # fmt: skip
            if rows:
                _marks(axes, rows, colour, kind, line=True)
    return drawing


def accuracy_of_the_model() -> Drawing:
    """Modelled over published TFLOPS: every row that `lab validate` counts."""
    low, high = 540, 2240
    drawing = Drawing(
        900,
        744,
        "Modelled over published TFLOPS",
        "Each point is a published rate of a kernel that is compiled and replayed here, and what "
        "the timing model says of that very kernel at the clock that is fitted to half of the rows "
        "of its lab and GPU.",
    )
    drawing.heading(
        "Published rates, and the model of the very same kernels",
        "unthrottled rows that `python -m lab validate` counts, at one fitted clock for each lab "
        "and GPU",
    )
    drawing.text((24, 72), basis(), 12, colour=GREY)
    scale = Scale(low, high, tuple((float(n), str(n)) for n in range(600, high, 200)))
    axes = Axes(drawing, (92, 120, 560, 560), scale, scale)
    corners = [axes.at(x, y) for x, y in ((low, low), (high, high))]
    for share in (0.2, 0.1):
        top = high / (1 + share)
        band = [axes.at(low, low * (1 + share)), axes.at(top, high), axes.at(high, high),
                axes.at(high, high * (1 - share)), axes.at(low / (1 - share), low),
                axes.at(low, low)]  # fmt: skip
        drawing.polygon(band, tint(GREY, 0.08 if share == 0.2 else 0.16))
    axes.frame("", "published TFLOPS", "modelled TFLOPS")
    drawing.line(corners, INK, 1.4)
    x, y = axes.at(1850, 1850)
    drawing.text((x + 12, y + 46), "within 10 %", 11.5, colour=GREY)
    drawing.text((x + 30, y + 86), "within 20 %", 11.5, colour=GREY)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read("accuracy")["rows"]:
        groups[row["kind"]].append(row)
    styles = ((BLUE, "circle"), (ORANGE, "triangle"), (PURPLE, "square"), (GREEN, "diamond"))
    for number, ((name, rows), (colour, kind)) in enumerate(zip(sorted(groups.items()), styles)):
        axes.marks([r["published"] for r in rows], [r["fitted"] for r in rows], colour, kind)
        errors = sorted(abs(r["fitted"] / r["published"] - 1) for r in rows)
        middle = len(errors) // 2
        median = (errors[middle] + errors[-middle - 1]) / 2
        place = (672, 136 + 62 * number)
        mark(drawing, (place[0] + 6, place[1] - 4), kind, "#ffffff", colour)
        drawing.lines((place[0] + 22, place[1]), [name, f"{len(rows)} rows",
                      f"median error {median:.1%}"], 12.5)  # fmt: skip
    return drawing


def _axes(
    drawing: Drawing,
    left: float,
    highest: float,
    lengths: tuple[int, int] = (512, 131072),
    top: float = _TOP,
) -> Axes:
    x = Scale(
        lengths[0] / 1.12,
        lengths[1] * 1.12,
        tuple((n, t) for n, t in _LENGTHS.items() if lengths[0] <= n <= lengths[1]),
        True,
    )
    y = Scale(0, highest, tuple((float(n), f"{n:,}") for n in range(0, int(highest) + 1, 500)))
    return Axes(drawing, (left, top, *_PANEL), x, y)


def _modelled(axes: Axes, group: str, direction: str, mask: str) -> None:
    """Bands, then lines: ours drawn through, the other dashed over it."""
    rows = read("rates")["rows"]
    lines = []
    for provider, colour in ((THEIRS, ORANGE), (OURS, BLUE)):
        found = [
            row for row in rows
            if row["group"] == group and (row["provider"], row["direction"], row["mask"])
            == (provider, direction, mask)
        ]  # fmt: skip
        if not found:
            raise ValueError(f"rates.json holds no {direction} of {provider}, {group}, {mask}")
        xs = [row["seqlen"] for row in found]
        axes.band(xs, [r["tflops_low"] for r in found], [r["tflops_high"] for r in found], colour)
        lines.append((xs, [row["tflops"] for row in found], colour))
    # Ours shows through the dashes where the two agree.
    for (xs, ys, colour), dash in zip(reversed(lines), ("", "9 6"), strict=True):
        axes.line(xs, ys, colour, 2.6, dash)


def _marks(
    axes: Axes, rows: Sequence[Published], colour: str, kind: str, line: bool = False
) -> None:
    xs, ys = [row.seqlen for row in rows], [row.tflops for row in rows]
    if line:
        axes.line(xs, ys, colour, 1.2, "3 3")
    axes.marks(xs, ys, colour, kind)


def _legend(drawing: Drawing, entries: Sequence[tuple[str, str, str]], y: float = 82) -> None:
    x = 24.0
    for colour, kind, words in entries:
        if kind == "line":
            drawing.rect(x, y - 10, 26, 12, tint(colour, 0.22))
            drawing.line(
                [(x, y - 4), (x + 26, y - 4)], colour, 2.6, "9 6" if colour == ORANGE else ""
            )
        else:
            mark(drawing, (x + 13, y - 4), kind, colour if kind == "diamond" else "#ffffff", colour)
        drawing.text((x + 34, y), words, 12.5)
        x += 34 + text_width(words, 12.5) + 28
