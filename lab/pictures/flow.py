"""Data flow through the kernels of the backward, and through the MMAs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from lab.pictures.svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Drawing, Point, tint


class _Box(NamedTuple):
    """left, top, width, height."""

    left: float
    top: float
    width: float
    height: float

    @property
    def left_side(self) -> Point:
        return self.left, self.top + self.height / 2

    @property
    def right_side(self) -> Point:
        return self.left + self.width, self.top + self.height / 2

    @property
    def top_side(self) -> Point:
        return self.left + self.width / 2, self.top

    @property
    def bottom_side(self) -> Point:
        return self.left + self.width / 2, self.top + self.height


def backward_flow() -> Drawing:
    """Draw the flow from dO to dQ, dK and dV: three kernels, and dS in global memory between two of
    them."""
    gib = BackwardConfig().ds_bytes >> 30
    drawing = Drawing(
        1100,
        500,
        "Data flow of the backward",
        "The preprocess kernel makes LSE in log2 units and delta from LSE, O and dO. The kernel of "
        "dV makes P and dS from two products, adds dV with a third and stores dS. The last kernel "
        "multiplies dS with Q for dK and with K for dQ.",
    )
    drawing.heading(
        "The backward: three kernels, five products, no atomics",
        f"chunk by chunk, so that dS takes at most {gib} GiB (`BackwardConfig.ds_bytes`)",
    )
    _stage(drawing, (24, 80, 186, 396), ["preprocess", "reads O, dO, LSE"], GREY)
    _stage(
        drawing,
        (238, 80, 580, 396),
        ["dV and dS", "256 keys stay, 128 queries pass in a step; reads Q, K, V, dO"],
        BLUE,
    )
    _stage(drawing, (846, 80, 230, 396), ["dK and dQ", "256 rows stay; reads Q, K"], ORANGE)
    lse = _tensor(drawing, (44, 142, 146, 40), "LSE in log2")
    delta = _tensor(drawing, (44, 388, 146, 40), "delta")
    scores = _work(drawing, (260, 206, 150, 54), ["Sᵀ = K Qᵀ"], BLUE)
    dp = _work(drawing, (260, 306, 150, 54), ["dPᵀ = V dOᵀ"], BLUE)
    p = _work(drawing, (454, 206, 164, 54), ["P = 2^(c S - LSE)"], GREEN)
    ds = _work(drawing, (454, 306, 164, 54), ["dS = P (dP - delta)"], GREEN)
    dv = _work(drawing, (662, 206, 136, 54), ["dV += Pᵀ dO"], BLUE)
    dk = _work(drawing, (872, 142, 178, 54), ["dK += dSᵀ Q"], ORANGE)
    stored = _tensor(drawing, (872, 388, 178, 54), "dS, global memory")
    dq = _work(drawing, (872, 250, 178, 54), ["dQ += dS K"], ORANGE)
    _route(drawing, [lse.right_side, (p.top_side[0], lse.right_side[1]), p.top_side])
    x = ds.bottom_side[0]
    _route(drawing, [delta.right_side, (x - 30, delta.right_side[1]), (x - 30, ds.bottom_side[1])])
    for begin, end in ((scores, p), (dp, ds), (p, dv)):
        _route(drawing, [begin.right_side, end.left_side], GREEN)
    _route(drawing, [p.bottom_side, ds.top_side], GREEN)
    _route(
        drawing,
        [(x + 30, ds.bottom_side[1]), (x + 30, stored.left_side[1]), stored.left_side],
        GREEN,
    )
    _route(drawing, [stored.top_side, dq.bottom_side], GREEN)
    _route(
        drawing,
        [
            (left := stored.left + 10, stored.top),
            (left, below := dq.bottom_side[1] + 30),
            (858, below),
            (858, dk.left_side[1]),
            dk.left_side,
        ],
        GREEN,
    )
    drawing.text((x + 42, stored.left_side[1] - 8), "stored once, from registers", 12, colour=GREY)
    drawing.text((238 + 18, 460), "blue: tensor core; green: warps, in registers", 12, colour=GREY)
    return drawing


def _stage(
    drawing: Drawing, place: tuple[float, float, float, float], words: Sequence[str], colour: str
) -> None:
    left, top, width, height = place
    drawing.rect(left, top, width, height, tint(colour, 0.06), colour, 10, 1.2)
    for number, text in enumerate(words):
        drawing.text(
            (left + 16, top + 26 + 18 * number),
            text,
            14 if number == 0 else 12,
            colour=INK if number == 0 else GREY,
            style="" if number else "bold",
        )


def _tensor(drawing: Drawing, place: tuple[float, float, float, float], name: str) -> _Box:
    box = _Box(*place)
    drawing.rect(*box, tint(PURPLE, 0.22), PURPLE, 0, 1.5)
    drawing.text(
        (box.left + box.width / 2, box.top + box.height / 2 + 5), name, 13.5, "middle", style="bold"
    )
    return box


def _work(
    drawing: Drawing, place: tuple[float, float, float, float], words: Sequence[str], colour: str
) -> _Box:
    drawing.box(place, words, colour, 13)
    return _Box(*place)


def _route(drawing: Drawing, points: Sequence[Point], colour: str = GREY) -> None:
    drawing.arrow(points, colour, 1.6)
