"""Timeline of every warp role across the end of a tile, to scale."""

from __future__ import annotations

from lab.pictures.inputs import AFTER, BEFORE, basis, read
from lab.pictures.spans import LANES, Span
from lab.pictures.svg import BLUE, GREY, INK, ORANGE, RULE, Drawing, text_width, tint

_LEFT, _INNER, _TOP, _LANE, _BAR = 122, 960, 112, 46, 30
_SCALE = _INNER / (BEFORE + AFTER)
#: Opacity of each kind of bar.
_STRENGTH = {"QK": 0.3, "PV": 0.75, "sum": 0.12, "P": 0.5, "drain": 0.5, "rescale": 0.9}


def role_timeline() -> Drawing:
    """The forward kernel: one tile ends while the next has begun."""
    found = read("timeline")
    steps = found["steps"]
    height = _TOP + len(LANES) * _LANE + 104
    drawing = Drawing(
        _LEFT + _INNER + 32,
        height,
        "Timeline of the forward kernel across the end of a tile",
        "A lane for each role of the leader CTA; bars of the tile that ends are blue, those of the "
        "next tile orange. The tensor core pauses twice, before QK(0') and PV(0'): the "
        "next tile's first product is issued before the last one of this tile.",
    )
    drawing.heading(
        "One tile ends while the next has begun", f"forward, leader CTA, {found['problem']}"
    )
    drawing.text((24, 72), basis(), 12, colour=GREY)
    _legend(drawing)
    bottom = _TOP + len(LANES) * _LANE
    for number, lane in enumerate(LANES):
        y = _TOP + number * _LANE
        drawing.line([(_LEFT, y + _LANE - 3), (_LEFT + _INNER, y + _LANE - 3)], RULE)
        drawing.text((_LEFT - 12, y + 27), lane, 13, "end", style="bold")
    x = _LEFT + BEFORE * _SCALE
    drawing.line([(x, _TOP - 6), (x, bottom + 4)], INK, 1.2, "5 4")
    drawing.text((x, _TOP - 12), "the tile's last P V is done", 12, "middle", INK)
    spans = [Span(*row) for row in found["spans"]]
    # Moments lie over lengths.
    for span in sorted(spans, key=lambda span: span.what == "o_free"):
        _bar(drawing, span, steps)
    _scale(drawing, bottom)
    return drawing


def _bar(drawing: Drawing, span: Span, steps: int) -> None:
    begin = max(span.begin, -BEFORE)
    end = min(span.end, AFTER)
    left, width = _LEFT + (begin + BEFORE) * _SCALE, max((end - begin) * _SCALE, 2.5)
    top = _TOP + LANES.index(span.lane) * _LANE + 8
    colour = BLUE if span.tile <= 0 else ORANGE
    if span.what == "o_free":
        # A moment, not a length: O is in registers.
        x = left + width
        drawing.line([(x, top), (x, top + _BAR)], INK, 2)
        drawing.text((x + 18, top + 19), "O is free", 11.5)
        return
    strength = _STRENGTH.get(span.what, 0.3)
    drawing.rect(left, top, width, _BAR, tint(colour, strength), colour, 3)
    label = _label(span, steps)
    if label and text_width(label, 12.5) < width - 4:
        white = strength > 0.7 and colour == BLUE
        drawing.text(
            (left + width / 2, top + 20), label, 12.5, "middle", "#ffffff" if white else INK
        )


def _label(span: Span, steps: int) -> str:
    """Steps count from 0 to n - 1, the last; the next tile's have a prime."""
    back = steps - 1 - span.step
    if span.tile > 0:
        step = f"{span.step}'"
    else:
        step = f"n-{back + 1}"
    if span.tile > 1:
        step = ""
    names = {"QK": f"QK({step})", "PV": f"PV({step})", "P": f"P({step})", "K": f"K({step})",
             "V": f"V({step})", "Q": "Q'" if span.tile == 1 else "Q''", "store O": "store O",
             "drain": "O to SMEM"}  # fmt: skip
    return names.get(span.what, "")


def _legend(drawing: Drawing) -> None:
    x = 700.0
    for colour, words in ((BLUE, "this tile"), (ORANGE, "the next tile, steps 0', 1', ...")):
        drawing.rect(x, 22, 16, 12, tint(colour, 0.5), colour, 2)
        drawing.text((x + 24, 32), words, 12.5, colour=GREY)
        x += 120


def _scale(drawing: Drawing, bottom: float) -> None:
    y = bottom + 14
    for clocks in range(-BEFORE // 1000 * 1000 + 1000, AFTER + 1, 1000):
        x = _LEFT + (clocks + BEFORE) * _SCALE
        drawing.line([(x, y), (x, y + 5)], GREY)
        drawing.text((x, y + 20), f"{clocks:+d}" if clocks else "0", 11, "middle", GREY)
    drawing.line([(_LEFT, y), (_LEFT + _INNER, y)], GREY)
    drawing.text((_LEFT + _INNER / 2, y + 42), "clocks", 12, "middle", GREY)
    drawing.text(
        (_LEFT, y + 66),
        "Thin bars of the correction: a look whether any row maximum grew. Loads last from their "
        "request to the last byte.", 12, colour=GREY,
    )  # fmt: skip
