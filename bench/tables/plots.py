"""Drawing of result tables with matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .table import Table

_PANEL_INCHES = (7.0, 3.6)
#: Letters that fit side by side below one panel.
_LABEL_LETTERS = 100


def draw_tables(tables: list[Table], target: Any, form: str | None) -> None:
    """One figure with axes for each panel of each table; arguments as `results.draw`."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "a plot needs matplotlib, which is not installed: pip install 'fa4-hd256[bench]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = []
    for table in tables:
        points = _points(table)
        for name in dict.fromkeys(point.panel for point in points):
            panels.append((table, name, [point for point in points if point.panel == name]))
    if not panels:
        raise ValueError("nothing to plot: no row has the figure that is drawn")
    width, height = _PANEL_INCHES
    most = max(len(_labels(points)) for _, _, points in panels)
    figure, axes = plt.subplots(
        len(panels), 1, squeeze=False, layout="constrained",
        figsize=(max(width, 0.3 * most), height * len(panels)),
    )
    try:
        for axis, (table, name, points) in zip(axes[:, 0], panels):
            _draw_panel(axis, table, points)
            axis.set_title(f"{table.title}, {name}" if name else table.title, fontsize=9)
        figure.savefig(target, format=form)
    finally:
        plt.close(figure)


@dataclass(frozen=True)
class _Point:
    """One value to draw: of a series (None: there is one only) at a label, with its error bar."""

    panel: str
    series: str | None
    label: Any
    y: float
    errors: tuple[float, float] | None


def _points(table: Table) -> list[_Point]:
    plot, found = table.plot, []
    names = (plot.y,) if isinstance(plot.y, str) else plot.y
    for row in table.rows:
        for name in names:
            if row.get(name) is None:
                continue
            series = row[plot.series] if plot.series else name if len(names) > 1 else None
            errors = None
            if plot.low is not None:
                errors = max(0.0, row[name] - row[plot.low]), max(0.0, row[plot.high] - row[name])
            panel = "" if plot.panel is None else str(row[plot.panel])
            series = None if series is None else str(series)
            found.append(_Point(panel, series, _label(table, row), row[name], errors))
    return found


def _label(table: Table, row: dict) -> Any:
    x = table.plot.x
    return row[x] if isinstance(x, str) else ", ".join(str(row[name]) for name in x)


def _labels(points: list[_Point]) -> list:
    return list(dict.fromkeys(point.label for point in points))


def _draw_panel(axis: Any, table: Table, points: list[_Point]) -> None:
    plot, labels = table.plot, _labels(points)
    places = {label: i for i, label in enumerate(labels)}
    numeric = plot.kind == "line" and all(isinstance(label, (int, float)) for label in labels)
    names = list(dict.fromkeys(point.series for point in points))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        drawn = [point for point in points if point.series == name]
        y = [point.y for point in drawn]
        errors = None if plot.low is None else list(zip(*(point.errors for point in drawn)))
        if plot.kind == "bar":
            x = [places[point.label] + (number + 0.5) * width - 0.4 for point in drawn]
            axis.bar(x, y, width, yerr=errors, label=name, capsize=2)
        else:
            x = [point.label if numeric else places[point.label] for point in drawn]
            axis.errorbar(x, y, yerr=errors, label=name, marker="o", markersize=3, capsize=2)
    if numeric:
        axis.set_xscale("log", base=2) if plot.log_x else None
        axis.set_xlabel(_heading(table, plot.x))
    else:
        texts = [str(label) for label in labels]
        upright = len(texts) > 6 or sum(map(len, texts)) > _LABEL_LETTERS
        axis.set_xticks(range(len(texts)), texts, fontsize=6, rotation=90 if upright else 0)
    units = [c.unit for c in table.columns if c.name in plot.y]
    axis.set_ylabel(_heading(table, plot.y) if isinstance(plot.y, str) else units[0])
    axis.grid(axis="y", alpha=0.3)
    if names != [None]:
        axis.legend(fontsize=7)


def _heading(table: Table, name: str) -> str:
    return next((c.heading for c in table.columns if c.name == name), name.replace("_", " "))
