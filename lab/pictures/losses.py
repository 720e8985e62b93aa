"""Losses of a training with each attention, and how far apart they are.

What `python -m bench training --json FILE` measured is kept in data/losses.json, which
`python -m lab pictures --losses FILE` writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measure.training import SMOOTHED, smoothed
from bench.tables.results import read_json
from lab.pictures import inputs
from lab.pictures.plot import Axes, Scale, mark
from lab.pictures.svg import BLUE, GREY, INK, ORANGE, Drawing, text_width

#: Pictures that show what is kept here.
MEASURED = ("training-losses",)
EXACT = "SDPA float32"
#: Attentions that are drawn, with colour and dashes: one that covers another lets it through.
LINES: dict[str, tuple[str, str]] = {
    EXACT: (INK, ""), "ours": (BLUE, ""), "flash-attn-4": (ORANGE, "9 6"),
}  # fmt: skip
#: Steps from one that is kept to the next.
EVERY = 5
#: Layout of a panel: left edges, width; of losses and of differences (top, height).
_LEFT, _WIDTH = (84, 548), 376
_LOSS, _APART = (138, 220), (430, 170)


def keep(source: Path) -> None:
    """Write data/losses.json from results of `bench training`. Raises ValueError where these have
    no losses of what is drawn."""
    found = kept(source.read_text("utf-8"))
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["rows"])
    text = f'{{\n "origin": {json.dumps(found["origin"])},\n "rows": [\n{rows}\n ]\n}}\n'
    (inputs.DATA / "losses.json").write_text(text, "utf-8")


def read_losses() -> dict[str, Any]:
    """Return the stored losses: `kept` has its form."""
    found: dict[str, Any] = json.loads((inputs.DATA / "losses.json").read_text("utf-8"))
    return found


def kept(text: str) -> dict[str, Any]:
    """{"origin": machine and commit, "rows": of each seed and attention that is drawn its "seed",
    "attention", "steps", "losses", means over `SMOOTHED` steps, and but for float32's "apart",
    (step, difference) where it is farthest from that}.

    text: JSON of `bench training`. Raises ValueError for another one.
    """
    rows, origin = _of_results(text)
    found = [row for row in rows if row["attention"] in LINES]
    of_seeds: dict[int, set[str]] = {}
    for row in found:
        of_seeds.setdefault(row["seed"], set()).add(row["attention"])
    if len(of_seeds) != len(_LEFT) or any(names != set(LINES) for names in of_seeds.values()):
        raise ValueError(
            f"losses of {sorted(of_seeds.items())}; accepted: of {len(_LEFT)} seeds, each of "
            f"{', '.join(LINES)}"
        )
    return {"origin": origin, "rows": found}


def _of_results(text: str) -> tuple[list[dict[str, Any]], str]:
    (table,) = read_json(text)
    rows = []
    for row in table.rows:
        if row["status"] != "ok":
            continue
        means = smoothed(row["losses"])
        steps = [1, *range(EVERY, len(means) + 1, EVERY)]
        found = _row(row["seed"], row["attention"], steps, [means[n - 1] for n in steps])
        if row["at"] is not None:
            found["apart"] = [row["at"], round(row["apart"], 4)]
        rows.append(found)
    return rows, f"{table.rows[0]['machine']}, commit {table.environment['commit']}"


def _row(
    seed: int, attention: str, steps: Sequence[int], losses: Sequence[float]
) -> dict[str, Any]:
    rounded = [round(float(loss), 4) for loss in losses]
    return {"seed": seed, "attention": attention, "steps": list(steps), "losses": rounded}


def training_losses() -> Drawing:
    """Loss over the step for each seed, and below it what separates ours and flash-attn-4 from
    PyTorch in float32."""
    found = read_losses()
    drawing = Drawing(
        960, 684, "Loss of a training with each attention, and how far apart they are",
        "For each of two seeds the loss over 500 steps with attention of PyTorch in float32, of "
        "this project and of flash-attn-4, which lie on one another, and below it the difference "
        "of the latter two from float32.",
    )  # fmt: skip
    drawing.heading(
        "A training with each attention: loss over the step",
        f"measured on {found['origin']}; nats a token, means over {SMOOTHED} steps",
    )
    _legend(drawing)
    of_seeds: dict[int, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        of_seeds.setdefault(row["seed"], {})[row["attention"]] = row
    highest = max(abs(row["apart"][1]) for row in found["rows"] if "apart" in row)
    for left, (seed, rows) in zip(_LEFT, of_seeds.items(), strict=True):
        is_first = left == _LEFT[0]
        _losses(drawing, left, rows, f"seed {seed}", is_first)
        _differences(drawing, left, rows, highest)
    return drawing


def _legend(drawing: Drawing) -> None:
    x = 24.0
    for name, (colour, dash) in LINES.items():
        drawing.line([(x, 84), (x + 30, 84)], colour, 2.6, dash)
        drawing.text((x + 38, 88), name, 12.5)
        x += 38 + text_width(name, 12.5) + 28
    mark(drawing, (x + 6, 84), "diamond", "#ffffff", GREY)
    drawing.text((x + 20, 88), "the largest difference of all steps", 12.5)


def _steps(rows: Mapping[str, dict[str, Any]]) -> Scale:
    last = rows[EXACT]["steps"][-1]
    return Scale(0, last, tuple((float(n), str(n)) for n in range(0, last + 1, 100)))


def _losses(
    drawing: Drawing, left: float, rows: Mapping[str, dict[str, Any]], title: str, named: bool
) -> None:
    losses = [loss for name in LINES for loss in rows[name]["losses"]]
    low, high = min(losses) - 0.3, max(losses) + 0.3
    y = Scale(low, high, tuple((float(n), str(n)) for n in range(math.ceil(low), int(high) + 1)))
    axes = Axes(drawing, (left, _LOSS[0], _WIDTH, _LOSS[1]), _steps(rows), y)
    axes.frame(title, "", "loss" if named else "")
    for name, (colour, dash) in LINES.items():
        row = rows[name]
        axes.line(row["steps"], row["losses"], colour, 2.2, dash)


def _differences(
    drawing: Drawing, left: float, rows: Mapping[str, dict[str, Any]], highest: float
) -> None:
    """highest: of all differences, which all panels have room for."""
    end = 0.01 * (int(highest * 1.15 / 0.01) + 1)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.5) if end / s < 5)
    count = int(end / step + 1e-9)
    ticks = tuple((n * step, f"{n * step:+.2f}" if n else "0") for n in range(-count, count + 1))
    place = left, _APART[0], _WIDTH, _APART[1]
    axes = Axes(drawing, place, _steps(rows), Scale(-end, end, ticks))
    axes.frame("less that of SDPA in float32", "step")
    exact = dict(zip(rows[EXACT]["steps"], rows[EXACT]["losses"], strict=True))
    for name, (colour, dash) in LINES.items():
        if name == EXACT:
            continue
        row, apart = rows[name], tuple(rows[name]["apart"])
        pairs = zip(row["steps"], row["losses"], strict=True)
        points = sorted({apart, *((n, loss - exact[n]) for n, loss in pairs if n != apart[0])})
        xs, ys = zip(*points, strict=True)
        axes.line(xs, ys, colour, 2.0, dash)
        axes.marks([apart[0]], [apart[1]], colour, "diamond")
    words = ", ".join(
        f"{name} {row['apart'][1]:+.3f} at step {row['apart'][0]}"
        for name, row in rows.items() if name != EXACT
    )  # fmt: skip
    below = _APART[0] + _APART[1] + 62
    drawing.text((left + _WIDTH / 2, below), f"farthest: {words}", 12, "middle", GREY)
