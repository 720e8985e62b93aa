"""The barriers of a kernel, drawn from its table of edges: who signals whom, and for what."""

from __future__ import annotations

from fa4_hd256.kernels.plan.edges import Edge, EdgeTable, Signal
from lab.pictures.svg import BLUE, GREEN, GREY, INK, ORANGE, RULE, Drawing, text_width, tint

_ROW, _TOP = 34, 132
_NAMES, _FIRST, _LAST = 24, 216, 580
_WORDS = 642
_WIDTH = 980
_SIGNALS = {
    Signal.TMA_PAIR: (BLUE, "TMA bytes"),
    Signal.TMA_CTA: (BLUE, "TMA bytes"),
    Signal.COMMIT_PAIR: (ORANGE, "tcgen05.commit"),
    Signal.WARPS_PAIR: (GREEN, "arrivals of warps"),
    Signal.WARPS_PAIR_RELEASE: (GREEN, "arrivals of warps"),
    Signal.WARPS_CTA: (GREEN, "arrivals of warps"),
}


def barrier_graph(title: str, edges: EdgeTable) -> Drawing:
    """A column for each role, a row for each edge, an arrow from who signals to who waits."""
    roles = _roles(edges)
    rows = len(edges.edges)
    drawing = Drawing(
        _WIDTH,
        _TOP + rows * _ROW + 66,
        f"{title}: barriers",
        "A column for each warp role and a row for each array of mbarriers, with an arrow from the "
        "role that signals to the role that waits.",
    )
    below = f"{edges.num_barriers} mbarriers in {rows} arrays; the arrow goes from who signals to "
    drawing.heading(f"{title}: barriers", below + "who waits")
    step = (_LAST - _FIRST) / (len(roles) - 1)
    places = {role: _FIRST + number * step for number, role in enumerate(roles)}
    bottom = _TOP + rows * _ROW - 8
    for role, x in places.items():
        drawing.line([(x, 104), (x, bottom)], RULE, 2)
        drawing.rect(x - 43, 78, 86, 27, tint(GREY, 0.12), GREY, 5)
        drawing.text((x, 96), role, 12.5, "middle", style="bold")
    drawing.text((_NAMES, 96), "edge, buffers", 12, colour=GREY)
    drawing.text((_WORDS, 96), "what changes hands", 12, colour=GREY)
    for row, edge in enumerate(edges.edges):
        _edge(drawing, edge, places, _TOP + row * _ROW)
    _legend(drawing, bottom + 38)
    return drawing


def _roles(edges: EdgeTable) -> list[str]:
    found: dict[str, None] = {}
    for edge in edges.edges:
        found[edge.producer] = None
    for edge in edges.edges:
        found.update(dict.fromkeys(edge.consumer.split(", ")))
    return list(found)


def _edge(drawing: Drawing, edge: Edge, places: dict[str, float], y: float) -> None:
    colour, _ = _SIGNALS[edge.signal]
    stages = f" x {edge.stages}" if edge.stages > 1 else ""
    drawing.text((_NAMES, y + 4), edge.name + stages, 12.5, style="mono")
    begin = places[edge.producer]
    dash = "6 4" if edge.initially_complete else ""
    ends = [places[name] for name in edge.consumer.split(", ")]
    for end in ends:
        drawing.arrow([(begin, y), (end, y)], colour, 2, dash)
    drawing.circle((begin, y), 4, colour)
    count = edge.arrive_count
    if count > 1:
        middle, words = (begin + ends[0]) / 2, f"{count} arrivals"
        half = text_width(words, 10.5) / 2 + 3
        drawing.rect(middle - half, y - 16, 2 * half, 12, "#ffffff")
        drawing.text((middle, y - 6), words, 10.5, "middle", GREY)
    drawing.text((_WORDS, y + 4), edge.guards, 12.5, colour=INK)


def _legend(drawing: Drawing, y: float) -> None:
    x = 24.0
    for colour, words in dict.fromkeys(_SIGNALS.values()):
        drawing.arrow([(x, y - 4), (x + 34, y - 4)], colour, 2)
        drawing.text((x + 42, y), words, 12, colour=GREY)
        x += 180
    drawing.arrow([(x, y - 4), (x + 40, y - 4)], GREY, 2, "6 4")
    drawing.text((x + 48, y), "complete at the start: a buffer that begins free", 12, colour=GREY)
