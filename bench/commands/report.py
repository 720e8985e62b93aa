"""`python -m bench report DIR`: one self-contained HTML page from the JSON results in a directory.

Every `*.json` file there that another command wrote with --json is shown: all plots first, then the
tables with their notes and environment. The page needs no other file and no network.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bench.tables.plots import draw_panels
from bench.tables.results import read_json
from bench.tables.table import BASIS, MACHINE, Column, Table

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem;
       color: #1b1f24; background: #fff }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block;
        overflow-x: auto }
th, td { border: 1px solid #d0d7de; padding: 2px 8px; text-align: left; white-space: nowrap }
th { background: #f6f8fa } td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f8fa; padding: 8px; overflow-x: auto; font-size: 12px }
nav { columns: 2; font-size: 14px } nav ul { margin: 0 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(34rem, 1fr)); gap: 1.5rem }
figure { margin: 0; border: 1px solid #d0d7de; border-radius: 6px; padding: 10px;
         overflow-x: auto }
figcaption { font-size: 13px; color: #59636e } img { max-width: 100% }
summary { cursor: pointer; color: #59636e }
.basis { border-radius: 4px; padding: 0 6px; font-size: 12px }
.measured { background: #d3f5d8 } .modelled { background: #ffeac2 }
.computed { background: #dbe9ff }
"""

#: Rows up to which a table is open when the page is.
_SHORT = 24


def collect(directory: Path) -> tuple[list[tuple[str, Table]], dict[str, str]]:
    """Return (file name, table) of each result in a directory, and why other files are left out.
    Raises ValueError if it is no directory or holds no result."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory")
    tables: list[tuple[str, Table]] = []
    others: dict[str, str] = {}
    for path in sorted(directory.glob("*.json")):
        try:
            tables += [(path.name, table) for table in read_json(path.read_text())]
        except ValueError as error:
            others[path.name] = str(error)
    if not tables:
        raise ValueError(
            f"{directory} holds no result; write some there, for example with "
            f"`python -m bench throughput --json {directory}/throughput.json`"
        )
    return tables, others


def page(tables: Sequence[tuple[str, Table]], others: Mapping[str, str]) -> str:
    """Return the HTML page: every plot, then every table."""
    figures, sections, links = [], [], []
    for number, (name, table) in enumerate(tables):
        title = escape(f"{table.command}: {table.title}")
        links.append(f'<li><a href="#t{number}">{title}</a></li>')
        figures += _figures(table, number)
        sections.append(f'<h2 id="t{number}">{title}</h2>{_section(name, table)}')
    left_out = "".join(
        f"<p>{escape(name)} is left out: {escape(reason)}</p>" for name, reason in others.items()
    )
    plots = f'<div class="plots">{"".join(figures)}</div>' if figures else "<p>None.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>fa4-hd256: results</title><style>{_STYLE}</style></head><body>"
        "<h1>fa4-hd256: results</h1><p>Every row says whether it was measured, modelled (by the "
        "timing model, without a GPU) or computed (from a closed form or the compiled code), and "
        f"on what.</p>{left_out}<h2>Plots</h2>{plots}"
        f"<h2>Tables</h2><nav><ul>{''.join(links)}</ul></nav>{''.join(sections)}</body></html>\n"
    )


def _figures(table: Table, number: int) -> list[str]:
    """Return each panel of the plot with the origin of its rows; why there is none, where one was
    meant."""
    if table.plot is None or not table.rows:
        return []
    try:
        panels = draw_panels(table)
    except ValueError as error:
        return [f"<p>{escape(str(error))}</p>"]
    origins = dict.fromkeys(f"{_badge(row[BASIS])} {escape(row[MACHINE])}" for row in table.rows)
    return [
        f'<figure><img alt="{escape(title)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"><figcaption>'
        f'{" ".join(origins)}; <a href="#t{number}">the table</a></figcaption></figure>'
        for title, drawn in panels
    ]


def _badge(basis: str) -> str:
    return f'<span class="basis {escape(basis)}">{escape(basis)}</span>'


def _section(name: str, table: Table) -> str:
    """Return the table, opened where it is short, its notes and environment."""
    is_open = " open" if len(table.rows) <= _SHORT else ""
    header = [escape(column.heading) for column in table.columns] + [BASIS, "on"]
    lines = ["".join(f"<th>{cell}</th>" for cell in header)]
    for row in table.rows:
        cells = [_cell(column, row[column.name]) for column in table.columns]
        origin = f"<td>{_badge(row[BASIS])}</td><td>{escape(row[MACHINE])}</td>"
        lines.append("".join(cells) + origin)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    notes = "".join(
        f"<pre>{escape(note)}</pre>" if "\n" in note else f"<p>{escape(note)}</p>"
        for note in table.notes
    )
    versions = ", ".join(f"{key} {value}" for key, value in table.environment.items())
    return (
        f"<details{is_open}><summary>{len(table.rows)} rows</summary><table>{body}</table>"
        f"</details>{notes}<p><small>{escape(name)}: {escape(versions)}</small></p>"
    )


def _cell(column: Column, value: object) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = ' class="number"' if is_number else ""
    return f"<td{kind}>{escape(column.cell(value))}</td>"


def main(arguments: argparse.Namespace) -> int:
    """Write the page, and say where it is and what it leaves out."""
    tables, others = collect(arguments.directory)
    target = arguments.output or arguments.directory / "report.html"
    target.write_text(page(tables, others))
    for name, reason in others.items():
        print(f"{name} is left out: {reason}")
    print(f"page: {target}, {len(tables)} tables")
    return 0
