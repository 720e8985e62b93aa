"""Drawing of result tables with matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

from typing import Any

from .results import Table

_PANEL_INCHES = (7.0, 3.6)


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

    panels = [
        (table, name, rows) for table in tables for name, rows in _panels(table) if rows
    ]
    if not panels:
        raise ValueError("nothing to plot: no row has the figure that is drawn")
    width, height = _PANEL_INCHES
    most = max(len(_labels(table, rows)) for table, _, rows in panels)
    figure, axes = plt.subplots(
        len(panels), 1, squeeze=False, layout="constrained",
        figsize=(max(width, 0.45 * most), height * len(panels)),
    )
    try:
        for axis, (table, name, rows) in zip(axes[:, 0], panels):
            _draw_panel(axis, table, rows)
            axis.set_title(f"{table.title}, {name}" if name else table.title, fontsize=9)
        figure.savefig(target, format=form)
    finally:
        plt.close(figure)


def _panels(table: Table) -> list[tuple[str, list[dict]]]:
    """(name, rows that can be drawn) of each axes."""
    plot, rows = table.plot, [r for r in table.rows if r.get(table.plot.y) is not None]
    if plot.panel is None:
        return [("", rows)]
    names = dict.fromkeys(row[plot.panel] for row in rows)
    return [(str(name), [r for r in rows if r[plot.panel] == name]) for name in names]


def _label(table: Table, row: dict) -> Any:
    x = table.plot.x
    return row[x] if isinstance(x, str) else ", ".join(str(row[name]) for name in x)


def _labels(table: Table, rows: list[dict]) -> list:
    return list(dict.fromkeys(_label(table, row) for row in rows))


def _draw_panel(axis: Any, table: Table, rows: list[dict]) -> None:
    plot, labels = table.plot, _labels(table, rows)
    places = {label: i for i, label in enumerate(labels)}
    numeric = plot.kind == "line" and all(isinstance(label, (int, float)) for label in labels)
    names = [None] if plot.series is None else dict.fromkeys(row[plot.series] for row in rows)
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        drawn = [row for row in rows if name is None or row[plot.series] == name]
        y = [row[plot.y] for row in drawn]
        errors = None
        if plot.low is not None:
            errors = [
                [max(0.0, value - row[plot.low]) for value, row in zip(y, drawn)],
                [max(0.0, row[plot.high] - value) for value, row in zip(y, drawn)],
            ]
        label = None if name is None else str(name)
        if plot.kind == "bar":
            x = [places[_label(table, row)] + (number + 0.5) * width - 0.4 for row in drawn]
            axis.bar(x, y, width, yerr=errors, label=label, capsize=2)
        else:
            x = [_label(table, row) if numeric else places[_label(table, row)] for row in drawn]
            axis.errorbar(x, y, yerr=errors, label=label, marker="o", markersize=3, capsize=2)
    if numeric:
        axis.set_xscale("log", base=2) if plot.log_x else None
        axis.set_xlabel(_heading(table, plot.x))
    else:
        axis.set_xticks(range(len(labels)), [str(label) for label in labels], fontsize=6,
                        rotation=90 if len(labels) > 6 else 0)
    axis.set_ylabel(_heading(table, plot.y))
    axis.grid(axis="y", alpha=0.3)
    if plot.series is not None:
        axis.legend(fontsize=7)


def _heading(table: Table, name: str) -> str:
    return next((c.heading for c in table.columns if c.name == name), name.replace("_", " "))
