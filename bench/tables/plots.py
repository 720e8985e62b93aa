"""Drawing of result tables with matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

import io
import itertools
import textwrap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .table import BASIS, Table

#: Suffixes of files that matplotlib writes without another program.
SUFFIXES = (".eps", ".jpg", ".pdf", ".png", ".ps", ".svg", ".svgz", ".tif", ".webp")
NO_MATPLOTLIB = "a plot needs matplotlib, which is not installed: pip install matplotlib"

_WIDTH, _HEIGHT = 7.0, 3.6
#: Inches above and below a panel of bars, which lie on their sides, and of each bar.
_AROUND_BARS, _BAR = 1.1, 0.13
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


class _Point(NamedTuple):
    """A value at a label; error: what its error bar adds below and above, None without one."""

    label: Any
    value: float
    error: tuple[float, float] | None


@dataclass
class _Panel:
    """Axes of their own and what they show: points of each series (None: the only one)."""

    table: Table
    name: str
    series: dict[str | None, list[_Point]] = field(default_factory=dict)
    labels: dict[Any, int] = field(default_factory=dict)
    bases: set[str | None] = field(default_factory=set)

    @property
    def title(self) -> str:
        """Return what the panel shows, and that its figures are modelled where any is."""
        title = f"{self.table.title}, {self.name}" if self.name else self.table.title
        if "modelled" not in self.bases:
            return title
        return f"{title} ({'modelled' if len(self.bases) == 1 else 'in part modelled'})"

    @property
    def has_bars(self) -> bool:
        return self.table.plot is not None and self.table.plot.kind == "bar"

    @property
    def inches(self) -> tuple[float, float]:
        """Return width and height."""
        if self.has_bars:
            longest = max(len(str(label)) for label in self.labels)
            bars = len(self.labels) * (len(self.series) + 0.4)
            return _WIDTH + max(0.0, 0.055 * longest - 2.0), _AROUND_BARS + _BAR * bars
        return max(_WIDTH, 0.3 * len(self.labels)), _HEIGHT


def _panels(table: Table) -> list[_Panel]:
    plot = table.plot
    if plot is None:
        raise ValueError(f"nothing says how to draw {table.title!r}")
    names = (plot.y,) if isinstance(plot.y, str) else plot.y
    found: dict[str, _Panel] = {}
    for row, name in itertools.product(table.rows, names):
        if row.get(name) is None:
            continue
        error = None
        if plot.low is not None and plot.high is not None:
            error = max(0.0, row[name] - row[plot.low]), max(0.0, row[plot.high] - row[name])
        single_x = isinstance(plot.x, str)
        label = row[plot.x] if single_x else ", ".join(str(row[part]) for part in plot.x)
        series = str(row[plot.series]) if plot.series else name if len(names) > 1 else None
        of_panel = "" if plot.panel is None else str(row[plot.panel])
        panel = found.setdefault(of_panel, _Panel(table, of_panel))
        panel.series.setdefault(series, []).append(_Point(label, row[name], error))
        panel.labels.setdefault(label, len(panel.labels))
        panel.bases.add(row.get(BASIS))
    return list(found.values())


def draw_tables(tables: list[Table], target: Any, form: str | None) -> None:
    """Draw one figure with axes for each panel of each table; arguments as `results.draw`."""
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
    """Draw one figure, panels below one another."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(NO_MATPLOTLIB) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    widths, heights = zip(*(panel.inches for panel in panels))
    with matplotlib.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(panels), 1, squeeze=False, layout="constrained",
            figsize=(max(widths), sum(heights)), height_ratios=heights,
        )  # fmt: skip
        try:
            for axis, panel in zip(axes[:, 0], panels):
                _draw_panel(axis, panel)
                lines = textwrap.wrap(panel.title, round(_TITLE_LETTERS * max(widths)))
                axis.set_title("\n".join(lines), fontsize=9, pad=16)
            figure.savefig(target, format=form)
        finally:
            plt.close(figure)


def _draw_panel(axis: Any, panel: _Panel) -> None:
    plot, labels = panel.table.plot, panel.labels
    assert plot is not None
    texts = [str(label) for label in labels]
    # Lines over numbers have a scale, all else has a place for each label.
    is_scale = not panel.has_bars and all(isinstance(label, (int, float)) for label in labels)
    width = 0.8 / len(panel.series)
    for number, (name, points) in enumerate(panel.series.items()):
        values = [point.value for point in points]
        errors: Any = None if plot.low is None else list(zip(*(point.error for point in points)))
        if panel.has_bars:
            at = [labels[point.label] + (number + 0.5) * width - 0.4 for point in points]
            axis.barh(at, values, width, xerr=errors, label=name, capsize=2)
        else:
            at = [point.label if is_scale else labels[point.label] for point in points]
            axis.errorbar(at, values, errors, label=name, marker="o", markersize=3, capsize=2)
    if panel.has_bars:
        axis.set_yticks(range(len(labels)), texts, fontsize=6.5)
        axis.invert_yaxis()
        axis.set_xlabel(_unit(panel.table))
    else:
        axis.set_ylabel(_unit(panel.table))
        if is_scale and isinstance(plot.x, str):
            axis.set_xlabel(_heading(panel.table, plot.x))
        else:
            axis.set_xticks(range(len(labels)), texts, fontsize=6, rotation=90)
    axis.grid(axis="x" if panel.has_bars else "y", alpha=0.3)
    if list(panel.series) != [None]:
        # Above the panel, where it covers nothing; below the title, which stands at the left.
        axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 0.99), frameon=False,
                    ncols=len(panel.series))  # fmt: skip


def _unit(table: Table) -> str:
    assert table.plot is not None
    y = table.plot.y
    if isinstance(y, str):
        return _heading(table, y)
    return next((column.unit for column in table.columns if column.name in y), "")


def _heading(table: Table, name: str) -> str:
    return next((c.heading for c in table.columns if c.name == name), name.replace("_", " "))
