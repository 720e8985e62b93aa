"""One HTML page of a run: each finding as a happens-before picture, both stacks, the timeline.

The picture has a column for each of the two warps, with the machine operations around the accesses
as the trace has them, and an arrow from each arrival to the wait that it completes. Ordinary loads
and stores are in no trace: an access stands where its PTX line says, behind the last operation
before it, in the picture and in the timeline.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from sm100_sim.causes import Cause, executed_by, place_name, shortened, source_text
from sm100_sim.terminal import short_name
from sm100_sim.trace.records import TraceEntry

from .outcome import Outcome
from .summary import looked_for

#: Operations shown before and after an access; operations and warps of a timeline.
_AROUND, _LENGTH, _WARPS = 4, 300, 32
_WIDTH, _ROW = 330, 46
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}
body{color:#1b1f24}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em;border-top:1px solid #d0d7de;padding-top:1em}
code,pre{font:13px ui-monospace,monospace}pre{background:#f6f8fa;padding:.8em;overflow-x:auto}
table{border-collapse:collapse}td,th{padding:.2em .8em .2em 0;text-align:left;vertical-align:top}
.missing{color:#a40e26}.quiet{color:#59636e}svg text{font-family:system-ui,sans-serif}
"""
#: Kind of operation -> (words in its opcode, colour).
_KINDS = {
    "waits": (("wait", "bar.sync", "barrier.cluster.wait"), "#cce3f0"),
    "signals": (("arrive", "commit", "expect_tx"), "#0072b2"),
    "copies": (("cp.", "bulk"), "#009e73"),
    "products": (("mma",), "#d55e00"),
    "tensor memory": (("tcgen05",), "#cc79a7"),
    "other": (("",), "#8c959f"),
}


class _Row(NamedTuple):
    """A box of the picture: its column, when it was, and its text. is_access: of the finding."""

    column: int
    number: float
    text: str
    is_access: bool
    entry: TraceEntry | None = None


class _Mark(NamedTuple):
    """A box of the timeline: when it was, whose, and of which instruction."""

    number: float
    warp: int
    opcode: str
    line: int


def page(outcome: Outcome) -> str:
    """Return the page as HTML that needs no other file."""
    body = ["<h1>sm100_sim</h1>", f"<p>{html.escape(looked_for())}</p>"]
    for failure in outcome.failures:
        body.append(f"<h2>{type(failure).__name__}</h2><pre>{html.escape(str(failure))}</pre>")
    number = 0
    for name, causes in outcome.causes().items():
        traces = (r.trace for r in outcome.kernels().get(name, ()) if r.trace)
        entries = [entry for entry in next(traces, []) if entry.line]  # no exits of warps
        for cause in causes:
            number += 1
            body.append(_section(number, name, cause, entries))
    if not number and not outcome.failures:
        body.append("<p>Nothing was found.</p>")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>sm100_sim</title>"
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _section(number: int, name: str, cause: Cause, entries: Sequence[TraceEntry]) -> str:
    head, *_ = str(cause).splitlines()
    finding: Any = cause.findings[0]
    parties = getattr(finding, "parties", ())
    missing = shortened(getattr(finding, "missing", str(finding)))
    parts = [
        f"<h2 id=finding-{number}>{number}. {html.escape(head)}</h2>",
        f"<p class=quiet>in <code title='{html.escape(name)}'>{html.escape(short_name(name))}"
        "</code></p>",
    ]
    labels = ("first", "second") if len(parties) > 1 else ("at",)
    parts += [_stack(label, party) for label, party in zip(labels, parties, strict=False)]
    parts.append(f"<p class=missing><b>missing:</b> {html.escape(missing)}</p>")
    if parties and parties[0].cta:
        parts += [_picture(parties, entries), _timeline(parties, entries)]
    return "".join(parts)


def _stack(label: str, party: Any) -> str:
    """An access with its source lines, the innermost first."""
    places = [party.source, *party.stack] if party.source else []
    rows = "".join(
        f"<tr><td><code>{html.escape(place_name(*place))}</code>"
        f"<td><code>{html.escape(source_text(*place))}</code>" for place in places
    )  # fmt: skip
    what = f"{party.what}, " if party.what else ""
    return (
        f"<p><b>{label}:</b> {html.escape(what)}{executed_by(party)}: "
        f"<code>{html.escape(shortened(party.text))}</code></p><table>{rows}</table>"
    )


def _placed(party: Any, column: int, entries: Sequence[TraceEntry], after: float) -> list[_Row]:
    """The access and the operations of its warp around it, behind `after` if it can be."""
    own = [e for e in entries if e.ctaid == tuple(party.cta) and e.warp == party.warp]
    exact = [k for k, e in enumerate(own) if e.line == party.line]
    found = exact or [
        k for k, e in enumerate(own)
        if e.line < party.line and (k + 1 == len(own) or own[k + 1].line > party.line)
    ]  # fmt: skip
    later = [k for k in found if own[k].number >= after]
    place = later[0] if later and after else found[-1] if found else len(own) - 1
    name = place_name(*party.source) if party.source else f"PTX line {party.line}"
    number = own[place].number + (0.0 if exact else 0.5) if own else after + 0.5
    rows = [_Row(column, number, f"{party.what}  {name}", True)]
    around = own[max(0, place + 1 - _AROUND) : place + 1 + _AROUND]
    return rows + [_Row(column, e.number, _short(e), False, e) for e in around
                   if not (exact and e is own[place])]  # fmt: skip


def _short(entry: TraceEntry) -> str:
    opcode = ".".join(entry.opcode.split(".")[:3])
    address = _barrier(entry)
    return f"{opcode} {address:#x}" if address else opcode


def _barrier(entry: TraceEntry) -> int:
    """Shared address of the mbarrier of an operation, 0 if it has none."""
    if "mbarrier" not in entry.opcode and "commit" not in entry.opcode:
        return 0
    numbers = [value for value in entry.operands[:2] if isinstance(value, int) and value > 1]
    return numbers[0] & 0xFFFFFF if numbers else 0


def _picture(parties: Sequence[Any], entries: Sequence[TraceEntry]) -> str:
    """The two warps, what orders them, and the edge that is missing, as SVG."""
    pair = parties[:2]
    same = len(pair) == 1 or (pair[0].cta, pair[0].warp) == (pair[1].cta, pair[1].warp)
    rows = _placed(pair[0], 0, entries, 0.0)
    first = rows[0]
    if len(pair) > 1:
        rows += _placed(pair[1], 0 if same else 1, entries, first.number)
    known = {(row.column, row.number): row for row in reversed(rows)}
    ordered = sorted(known.values(), key=lambda row: (row.number, not row.is_access))
    levels = {row: 60 + _ROW * place for place, row in enumerate(ordered)}
    height = 80 + _ROW * len(ordered)
    parts = [
        f"<svg width={2 * _WIDTH + 80} height={height} role=img><title>happens-before</title>"
        "<defs><marker id=a viewBox='0 0 8 8' refX=8 refY=4 markerWidth=7 markerHeight=7 "
        "orient=auto><path d='M0 0L8 4L0 8z' fill=context-stroke /></marker></defs>"
    ]
    for column, party in enumerate(pair[:1] if same else pair):
        x = 20 + column * (_WIDTH + 40) + _WIDTH // 2
        parts.append(f"<text x={x} y=30 text-anchor=middle font-weight=bold>CTA {party.cta} "
                     f"warp {party.warp}</text>")  # fmt: skip
        own = [levels[row] for row in ordered if row.column == column]
        parts.append(f"<line x1={x} x2={x} y1={own[0]} y2={own[-1]} stroke=#8c959f />")
    parts += [_box(row, level) for row, level in levels.items()]
    parts += _edges(ordered, levels)
    accesses = [row for row in ordered if row.is_access]
    if len(accesses) > 1:
        parts.append(_arrow(accesses[0], accesses[1], levels, "#d55e00", "stroke-dasharray='6 4'"))
    return "".join([*parts, "</svg>"])


def _box(row: _Row, y: int) -> str:
    x = 20 + row.column * (_WIDTH + 40)
    fill, edge = ("#f7dfcc", "#d55e00") if row.is_access else ("#f6f8fa", "#8c959f")
    return (
        f"<rect x={x} y={y - 14} width={_WIDTH} height=28 rx=6 fill={fill} stroke={edge} />"
        f"<text x={x + _WIDTH // 2} y={y + 4} text-anchor=middle font-size=12>"
        f"{html.escape(row.text[:48])}</text>"
    )


def _edges(rows: Sequence[_Row], levels: dict[_Row, int]) -> list[str]:
    """Arrows from arrivals to the waits of the other column that they complete."""
    found = []
    for row in rows:
        if row.entry is None or _kind(row.entry.opcode) != "waits":
            continue
        address = _barrier(row.entry)
        before = [
            other for other in rows
            if other.column != row.column and other.number < row.number and other.entry
            and (_barrier(other.entry) == address and _kind(other.entry.opcode) == "signals"
                 if address else other.entry.text == row.entry.text)
        ]  # fmt: skip
        if before:
            found.append(_arrow(before[-1], row, levels, "#0072b2"))
    return found


def _arrow(start: _Row, end: _Row, levels: dict[_Row, int], colour: str, more: str = "") -> str:
    xs = [20 + row.column * (_WIDTH + 40) for row in (start, end)]
    if start.column == end.column:
        x = xs[0] + _WIDTH
        y, bottom = levels[start], levels[end]
        bend = f"M{x} {y}C{x + 50} {y} {x + 50} {bottom} {x} {bottom}"
        return f"<path d='{bend}' fill=none stroke={colour} marker-end=url(#a) {more} />"
    x1, x2 = (xs[0] + _WIDTH, xs[1]) if xs[0] < xs[1] else (xs[0], xs[1] + _WIDTH)
    return (
        f"<line x1={x1} y1={levels[start]} x2={x2} y2={levels[end]} stroke={colour} "
        f"stroke-width=2 marker-end=url(#a) {more} />"
    )


def _kind(opcode: str) -> str:
    return next(name for name, (words, _) in _KINDS.items() if any(w in opcode for w in words))


def _marks(parties: Sequence[Any], entries: Sequence[TraceEntry]) -> list[_Mark]:
    """The machine operations of a CTA, and the accesses to it that are none, in their order."""
    cta = tuple(parties[0].cta)
    own = [e for e in entries if e.ctaid == cta]
    marks = [_Mark(e.number, e.warp, e.opcode, e.line) for e in own]
    traced, after = {(e.warp, e.line) for e in own}, 0.0
    for party in parties[:2]:
        after = _placed(party, 0, entries, after)[0].number
        if tuple(party.cta) == cta and (party.warp, party.line) not in traced:
            opcode = next(word for word in party.text.split() if not word.startswith("@"))
            marks.append(_Mark(after, party.warp, opcode, party.line))
    return sorted(marks, key=lambda mark: mark.number)


def _timeline(parties: Sequence[Any], entries: Sequence[TraceEntry]) -> str:
    """The operations of the CTA's warps, in the order in which they took effect."""
    own = _marks(parties, entries)
    lines = {party.line for party in parties}
    middle = next((k for k, e in enumerate(own) if e.line in lines), 0)
    own = own[max(0, middle - _LENGTH // 2) :][:_LENGTH]
    warps = sorted({e.warp for e in own})[:_WARPS]
    step = 900 / len(own)
    parts = [f"<svg width=980 height={20 * len(warps) + 40} role=img><title>timeline</title>"]
    for k, entry in enumerate(own):
        if entry.warp not in warps:
            continue
        y = 10 + 20 * warps.index(entry.warp)
        edge = " stroke=#a40e26 stroke-width=2" if entry.line in lines else ""
        parts.append(
            f"<rect x={70 + k * step:.1f} y={y} width={max(step - 0.5, 1):.1f} height=15 "
            f"fill={_KINDS[_kind(entry.opcode)][1]}{edge}><title>{html.escape(entry.opcode)}, PTX "
            f"line {entry.line}</title></rect>"
        )
    parts += [f"<text x=0 y={22 + 20 * k} font-size=12>warp {w}</text>"
              for k, w in enumerate(warps)]  # fmt: skip
    parts += [
        f"<rect x={70 + 130 * k} y={20 * len(warps) + 18} width=10 height=10 fill={colour} />"
        f"<text x={84 + 130 * k} y={20 * len(warps) + 27} font-size=12>{name}</text>"
        for k, (name, (_, colour)) in enumerate(_KINDS.items())
    ]
    return f"<p class=quiet>timeline, in the order of the run</p>{''.join(parts)}</svg>"
