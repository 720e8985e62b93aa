"""Drawing of result tables with matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass
from typing import Any

from .table import BASIS, Plot, Table

#: Suffixes of files that matplotlib writes without another program.
SUFFIXES = (".eps", ".jpg", ".pdf", ".png", ".ps", ".svg", ".svgz", ".tif", ".webp")
NO_MATPLOTLIB = "a plot needs matplotlib, which is not installed: pip install matplotlib"

_PANEL_INCHES = (7.0, 3.6)
#: Heights of a panel of bars, which lie on their sides: above and below them, and each bar.
_AROUND_INCHES, _BAR_INCHES = 1.1, 0.13
#: Letters of a title that fit into an inch.
_TITLE_LETTERS = 12
#: Okabe and Ito's colours, which people with any common colour vision tell apart; quiet axes.
_STYLE: Any = {
    "axes.prop_cycle": "cycler('color', ['0072b2', 'e69f00', '009e73', 'd55e00', 'cc79a7', "
                       "'56b4e9', '59636e'])",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "svg.hashsalt": "bench",
}  # fmt: skip


def draw_tables(tables: list[Table], target: Any, form: str | None) -> None:
    """One figure with axes for each panel of each table; arguments as `results.draw`."""
    panels = [panel for table in tables for panel in _panels(table)]
    if not panels:
        raise ValueError("nothing to plot: no row has the figure that is drawn")
    _draw(panels, target, form)


def draw_panels(table: Table) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of each panel of a table by itself. Raises ValueError without
    matplotlib."""
    found = []
    for panel in _panels(table):
        target = io.BytesIO()
        _draw([panel], target, "svg")
        found.append((panel.title, target.getvalue()))
    return found


def _draw(panels: list[_Panel], target: Any, form: str | None) -> None:
    """One figure, panels below one another."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(NO_MATPLOTLIB) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = max(panel.width for panel in panels)
    heights = [panel.height for panel in panels]
    with matplotlib.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(panels),
            1,
            squeeze=False,
            layout="constrained",
            figsize=(width, sum(heights)),
            height_ratios=heights,
        )
        try:
            for axis, panel in zip(axes[:, 0], panels):
                _draw_panel(axis, panel)
                lines = textwrap.wrap(panel.title, round(_TITLE_LETTERS * width))
                axis.set_title("\n".join(lines), fontsize=9, pad=16)
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
    basis: str | None


@dataclass(frozen=True)
class _Panel:
    """Panel: axes of its own and what they show."""

    table: Table
    name: str
    points: list[_Point]

    @property
    def title(self) -> str:
        """Return what the panel shows, and that its figures are modelled where any is."""
        title = f"{self.table.title}, {self.name}" if self.name else self.table.title
        bases = {point.basis for point in self.points}
        if "modelled" not in bases:
            return title
        return f"{title} ({'modelled' if len(bases) == 1 else 'in part modelled'})"

    @property
    def has_bars(self) -> bool:
        return _plot(self.table).kind == "bar"

    @property
    def series(self) -> list[str | None]:
        return list(dict.fromkeys(point.series for point in self.points))

    @property
    def width(self) -> float:
        width, _ = _PANEL_INCHES
        if self.has_bars:
            longest = max(len(str(label)) for label in _labels(self.points))
            return width + max(0.0, 0.055 * longest - 2.0)
        return max(width, 0.3 * len(_labels(self.points)))

    @property
    def height(self) -> float:
        if self.has_bars:
            bars = len(_labels(self.points)) * (len(self.series) + 0.4)
            return _AROUND_INCHES + _BAR_INCHES * bars
        return _PANEL_INCHES[1]


def _panels(table: Table) -> list[_Panel]:
    points = _points(table)
    names = dict.fromkeys(point.panel for point in points)
    return [_Panel(table, name, [p for p in points if p.panel == name]) for name in names]


def _plot(table: Table) -> Plot:
    if table.plot is None:
        raise ValueError(f"nothing says how to draw {table.title!r}")
    return table.plot


def _points(table: Table) -> list[_Point]:
    plot, found = _plot(table), []
    names = (plot.y,) if isinstance(plot.y, str) else plot.y
    for row in table.rows:
        for name in names:
            if row.get(name) is None:
                continue
            series = row[plot.series] if plot.series else name if len(names) > 1 else None
            errors = None
            if plot.low is not None and plot.high is not None:
                errors = max(0.0, row[name] - row[plot.low]), max(0.0, row[plot.high] - row[name])
            panel = "" if plot.panel is None else str(row[plot.panel])
            series = None if series is None else str(series)
            label, basis = _label(table, row), row.get(BASIS)
            found.append(_Point(panel, series, label, row[name], errors, basis))
    return found


def _label(table: Table, row: dict) -> Any:
    x = _plot(table).x
    return row[x] if isinstance(x, str) else ", ".join(str(row[name]) for name in x)


def _labels(points: list[_Point]) -> list:
    return list(dict.fromkeys(point.label for point in points))


def _draw_panel(axis: Any, panel: _Panel) -> None:
    table, points = panel.table, panel.points
    plot, labels = _plot(table), _labels(points)
    numeric = plot.kind == "line" and all(isinstance(label, (int, float)) for label in labels)
    unit, texts = _unit(table), [str(label) for label in labels]
    if panel.has_bars:
        _draw_bars(axis, panel)
        axis.set_yticks(range(len(labels)), texts, fontsize=6.5)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
    else:
        _draw_lines(axis, panel, numeric)
        axis.set_ylabel(unit)
        if numeric and isinstance(plot.x, str):
            axis.set_xscale("log", base=2) if plot.log_x else None
            axis.set_xlabel(_heading(table, plot.x))
        else:
            axis.set_xticks(range(len(labels)), texts, fontsize=6, rotation=90)
    axis.grid(axis="x" if panel.has_bars else "y", alpha=0.3)
    if panel.series != [None]:
        # Above the panel, where it covers nothing; below the title, which stands at the left.
        axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 0.99), frameon=False,
                    ncols=len(panel.series))  # fmt: skip


def _errors(panel: _Panel, points: list[_Point]) -> list[tuple[float, ...]] | None:
    """Return the error bars as matplotlib takes them: below, above."""
    if _plot(panel.table).low is None:
        return None
    return list(zip(*(point.errors for point in points)))


def _draw_bars(axis: Any, panel: _Panel) -> None:
    places = {label: i for i, label in enumerate(_labels(panel.points))}
    width = 0.8 / len(panel.series)
    for number, name in enumerate(panel.series):
        drawn = [point for point in panel.points if point.series == name]
        at = [places[point.label] + (number + 0.5) * width - 0.4 for point in drawn]
        values, errors = [point.y for point in drawn], _errors(panel, drawn)
        axis.barh(at, values, width, xerr=errors, label=name, capsize=2)


def _draw_lines(axis: Any, panel: _Panel, numeric: bool) -> None:
    places = {label: i for i, label in enumerate(_labels(panel.points))}
    for name in panel.series:
        drawn = [point for point in panel.points if point.series == name]
        x = [point.label if numeric else places[point.label] for point in drawn]
        axis.errorbar(
            x,
            [point.y for point in drawn],
            yerr=_errors(panel, drawn),
            label=name,
            marker="o",
            markersize=3,
            capsize=2,
        )


def _unit(table: Table) -> str:
    y = _plot(table).y
    if isinstance(y, str):
        return _heading(table, y)
    return next((column.unit for column in table.columns if column.name in y), "")


def _heading(table: Table, name: str) -> str:
    return next((c.heading for c in table.columns if c.name == name), name.replace("_", " "))
