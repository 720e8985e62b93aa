"""The report of a bringup as one HTML page: `python -m lab.bringup_page report.json`.

The page is written beside the report. It has plots, no script, and needs no other file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

from bench.bringup.machine_file import like
from bench.bringup.outcome import Target
from sm100_sim.timing import load

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:66em;margin:2em auto;padding:0 1em;
color:#1b1b1b}table{border-collapse:collapse;margin:.6em 0 1.4em}td,th{border:1px solid #ccc;
padding:.2em .6em;text-align:left;vertical-align:top}.passed{color:#176b2c}.measured{color:#1d4f91}
.failed,.fault,.hang{color:#fff;background:#b3261e}.differs{background:#ffd54a}
.skipped{color:#777}summary{cursor:pointer}text{font:12px system-ui,sans-serif}"""
_ROW, _LABEL, _WIDTH = 20, 250, 440
_COLOURS = ("#1d4f91", "#d07a00", "#5a8f29", "#8a3ffc", "#777")


def main(arguments: list[str] | None = None) -> int:
    """Write the page of a report and print its path; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bringup_page", description=__doc__)
    parser.add_argument("report", type=Path, help="report.json of `python -m bench bringup`")
    report = parser.parse_args(arguments).report
    place = report.with_suffix(".html")
    place.write_text(page(json.loads(report.read_text())))
    print(place)
    return 0


def page(content: dict[str, Any]) -> str:
    """Return the HTML text of a report's content."""
    target = content["target"]
    model = load(like(Target.from_json(target)))
    constants = {name: constant.value for name, constant in model.constants.items()}
    title = f"Bringup of {target['name']}"
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
    ]
    major, minor = target["capability"]
    parts.append(
        f"<p>{content['date']} UTC, compute capability {major}.{minor}, {target['sms']} SMs.</p>"
    )
    if content["stopped"]:
        parts.append(f"<p class=hang>Stopped: {escape(content['stopped'])}</p>")
    parts.append(_overview(content["stages"]))
    micro = content["stages"].get("micro", {}).get("steps", {})
    parts.append(_against_model(micro, constants))
    parts.append(_throughput(content["stages"].get("throughput", {}).get("steps", {})))
    parts += [_steps(name, stage) for name, stage in content["stages"].items()]
    return "\n".join(part for part in parts if part) + "\n"


def _overview(stages: dict[str, Any]) -> str:
    rows = []
    for name, stage in stages.items():
        counts = " ".join(
            f"<span class='{state.split()[0]}'>{number} {state}</span>"
            for state, number in stage["counts"].items()
        )
        rows.append(f"<tr><td><a href='#{name}'>{name}</a><td>{counts}<td>{stage['seconds']:.0f} s")
    return "<table><tr><th>stage<th>steps<th>time" + "".join(rows) + "</table>"


def _steps(name: str, stage: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(item)}<td class='{o['state'].split()[0]}'>{o['state']}"
        f"<td>{escape(o.get('text', ''))}"
        for item, o in stage["steps"].items()
    ]
    bad = any(o["state"] not in ("passed", "skipped") for o in stage["steps"].values())
    return (
        f"<details id={name}{' open' if bad else ''}><summary><b>{name}</b></summary>"
        f"<table>{''.join(rows)}</table></details>"
    )


def _svg(lines: list[str], rows: int) -> str:
    height = _ROW * (rows + 2)
    return (
        f"<svg width={_LABEL + _WIDTH + 130} height={height} role=img>" + "".join(lines) + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x={x:.1f} y={y:.1f} text-anchor={anchor}>{escape(text)}</text>"


def _against_model(steps: dict[str, Any], constants: dict[str, float]) -> str:
    """Each measured constant over the model's, on a logarithmic axis, with its quartiles."""
    rows = []
    for outcome in steps.values():
        values = outcome.get("values", {})
        model = constants.get(values.get("constant", ""))
        if outcome["state"] == "measured" and model and values["value"] > 0:
            rows.append((values["constant"], values, model))
    if not rows:
        return ""
    reach = max(1.0, max(abs(math.log2(v["value"] / m)) for _, v, m in rows))

    def place(ratio: float) -> float:
        bounded = max(-reach, min(reach, math.log2(max(ratio, 1e-9))))
        return _LABEL + _WIDTH * (0.5 + bounded / reach / 2)

    bottom = _ROW * (len(rows) + 1)
    lines = []
    for tick in range(-int(reach), int(reach) + 1):
        x = place(2.0**tick)
        lines.append(f"<line x1={x:.1f} x2={x:.1f} y1=0 y2={bottom} stroke=#ddd />")
        lines.append(_text(x, bottom + 14, f"{2.0**tick:g}x", "middle"))
    for number, (name, values, model) in enumerate(rows):
        y = _ROW * (number + 0.8)
        low, middle, high = (place(values[key] / model) for key in ("low", "value", "high"))
        lines.append(_text(_LABEL - 8, y + 4, name, "end"))
        lines.append(
            f"<line x1={low:.1f} x2={high:.1f} y1={y} y2={y} stroke=#1d4f91 stroke-width=3 />"
        )
        lines.append(f"<circle cx={middle:.1f} cy={y} r=4 fill=#1d4f91 />")
        figures = f"{values['value']:g}, model {model:g}"
        lines.append(_text(_LABEL + _WIDTH + 8, y + 4, figures))
    return "<h2>Constants: measured over the model's</h2>" + _svg(lines, len(rows))


def _throughput(steps: dict[str, Any]) -> str:
    """TFLOPS of each provider, a group of bars a case; bench's tables of ratios have none."""
    tables = [t for o in steps.values() for t in o.get("values", {}).get("tables", ())]
    parts = []
    for table in tables:
        bars = [
            (f"{row['shape']} {row['heads']} {row['mask']} {name}", name, found["tflops"])
            for row in table["rows"]
            for name, found in row.get("details", {}).items()
            if "tflops" in found
        ]
        if not bars:
            continue
        most = max(tflops for *_, tflops in bars)
        names = list(dict.fromkeys(name for _, name, _ in bars))
        lines = []
        for number, (label, name, tflops) in enumerate(bars):
            y, width = _ROW * number + 4, _WIDTH * tflops / most
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            lines.append(_text(_LABEL - 8, y + 12, label[-44:], "end"))
            lines.append(f"<rect x={_LABEL} y={y} width={width:.1f} height=14 fill={colour} />")
            lines.append(_text(_LABEL + width + 6, y + 12, f"{tflops:.0f}"))
        title = f"{table['rows'][0]['panel']}: TFLOPS"
        parts.append(f"<h2>{escape(title)}</h2>{_svg(lines, len(bars))}")
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main())
