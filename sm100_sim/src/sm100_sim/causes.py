"""Findings by cause: which of them one missing edge explains, and how a cause is printed.

Findings are one for each pair of instructions, and a loop that reads a buffer is many of them. They
have one cause if they are about the same memory and their sites lie in the same stretches of the
kernel: no synchronisation stands between the sites of one stretch, so what orders one orders all.
Copies of a loop's body, such as a first iteration that was peeled off, have stretches of their own:
findings are of one cause, too, if one of their sites lies in the same stretch and at the other the
same warps execute the same opcode. Accesses that nothing orders are found in both orders, as a race
and, for instance, as a read of bytes in flight: these count as one.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .terminal import painted

#: Kinds that say that two accesses are not ordered. Of them which access came first is chance.
_UNORDERED = frozenset((
    "race", "store-in-flight", "load-in-flight", "mma-in-flight", "copy-in-flight",
    "bulk-store-in-flight",
))  # fmt: skip
#: Runs of numbers that one line of a cause lists.
SHOWN = 8
_REGISTERS = re.compile(r"\{([^{},]+), (?:[^{},]+, ){6,}([^{},]+)\}")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Cause:
    """Findings of one cause.

    kinds: theirs, the first found first. about: the memory, "" if it is something else. findings:
    those with different instructions, in the order in which they were found. times: how often they
    were found in all. ctas, warps: (x, y, z) and index of all that had a part in one. lines: the
    PTX lines.
    """

    kinds: tuple[str, ...]
    about: str
    findings: tuple[str, ...]
    times: int
    ctas: tuple[tuple[int, ...], ...]
    warps: tuple[int, ...]
    lines: tuple[int, ...]

    def __str__(self) -> str:
        """Return `shown` without colours."""
        return self.shown()

    def shown(self, colour: bool = False) -> str:
        """Return what and how much of it in one line, then one finding: the first access, the
        second and the missing edge, a line each."""
        count = len(self.findings)
        what = painted(" and ".join(self.kinds), "red", colour)
        what += f" in {self.about}" if self.about else ""
        parts = (
            f"{count} finding{'s' * (count > 1)}",
            f"seen {self.times} times" * (self.times > count),
            _ctas(self.ctas),
            ranges("warp", self.warps),
            ranges("PTX line", self.lines),
        )
        head = f"{what}: {', '.join(filter(None, parts))}"
        return "\n".join([head, *finding_lines(self.findings[0], colour)])

    def as_dict(self) -> dict[str, Any]:
        """Return the cause as JSON values; findings by their text."""
        return {
            "kinds": list(self.kinds),
            "about": self.about,
            "findings": list(self.findings),
            "times": self.times,
            "ctas": [list(cta) for cta in self.ctas],
            "warps": list(self.warps),
            "lines": list(self.lines),
        }


def causes_of(findings: Iterable[str]) -> list[Cause]:
    """The causes of a kernel's findings (a report's, or an error's), the first found first.

    Findings of several launches of one kernel may be given together. What has no sites, such as
    notes of the machine itself, is one cause if it differs in numbers alone.
    """
    found = list(findings)
    group_of = list(range(len(found)))
    first: dict[Any, int] = {}

    def root(number: int) -> int:
        while group_of[number] != number:
            number = group_of[number]
        return number

    for number, finding in enumerate(found):
        for link in _links(finding):
            low, high = sorted((root(first.setdefault(link, number)), root(number)))
            group_of[high] = low
    groups: dict[int, list[str]] = {}
    for number, finding in enumerate(found):
        groups.setdefault(root(number), []).append(finding)
    return [_cause(group) for group in groups.values()]


def finding_lines(finding: Any, colour: bool = False) -> list[str]:
    """A finding for people: "first", "second" and "missing", each with its place; what is no pair
    of accesses has "at" and "missing", or only "what"."""
    parties = getattr(finding, "parties", ())
    missing = getattr(finding, "missing", str(finding))
    labels = ("first", "second") if len(parties) > 1 else ("at",)
    rows = [(label, _party(one, colour)) for label, one in zip(labels, parties, strict=False)]
    rows.append(("missing" if parties else "what", shortened(missing)))
    return [painted(f"{label}:".ljust(9), "cyan", colour) + text for label, text in rows]


def _party(party: Any, colour: bool) -> str:
    """An access in one line: its source line and text if they are known, else the instruction."""
    opcode = shortened(party.text)
    who = executed_by(party)
    does = f"{party.what}, " if party.what else ""
    if party.source is None:
        return f"`{opcode}` ({does}{who})"
    code = source_text(*party.source)
    where = painted(place_name(*party.source), "bold", colour)
    via = "".join(f" < {place_name(*outer)}" for outer in party.stack[-1:])
    name = re.sub(r"^@\S+\s+", "", opcode).split()[0]
    return f"{where}{via}: {code + '  ' if code else ''}({does}{name} at {who})"


def executed_by(party: Any) -> str:
    """Return the PTX line of an access and, where that is known, its CTA and warp."""
    who = f", CTA {party.cta} warp {party.warp}" if party.cta else ""
    return f"PTX line {party.line}{who}"


def source_text(file: str, line: int) -> str:
    """Return a line of a source file without its indentation, "" if the file is not there."""
    return linecache.getline(file, line).strip()


def place_name(file: str, line: int) -> str:
    """Return a place in a file as short as can be told apart: below the working directory, or with
    its last two folders."""
    below = os.path.relpath(file) if os.path.isabs(file) else file
    if below.startswith(".."):
        parts = file.split(os.sep)
        below = file if len(parts) <= 5 else os.sep.join(("...", *parts[-3:]))
    return f"{below}:{line}"


def listed(causes: Iterable[Cause], colour: bool = False) -> str:
    """The causes as numbered paragraphs."""
    paragraphs = []
    for number, cause in enumerate(causes, 1):
        head, *rest = cause.shown(colour).splitlines()
        paragraphs.append("\n".join([f"  {number}. {head}", *(f"     {line}" for line in rest)]))
    return "\n".join(paragraphs)


def _links(finding: Any) -> Iterator[Any]:
    """Yield keys of a finding: findings of one cause share at least one of them."""
    stretches = getattr(finding, "stretches", ())
    if not stretches:
        yield _NUMBER.sub("", finding)
        return
    if finding.kind == "barrier-not-visible":  # one fence behind the initialisation serves all
        yield finding.kind, finding.missing
    unordered = finding.kind in _UNORDERED
    rule = "unordered" if unordered else finding.kind, finding.about
    yield *rule, frozenset(stretches) if unordered else stretches
    if len(stretches) == 2:
        parties = [
            (site.opcode, frozenset(warps))
            for site, warps in zip(finding.sites, finding.warps, strict=True)
        ]
        for party, stretch in zip(parties, stretches, strict=True):
            yield *rule, frozenset(parties), party, stretch


def _cause(group: Sequence[Any]) -> Cause:
    different: dict[Any, Any] = {}
    for finding in group:
        at = getattr(finding, "lines", ())
        different.setdefault((finding.kind, at) if at else str(finding), finding)

    def seen(name: str) -> tuple:
        """Members of the sets that each finding has by site."""
        sets = [some for finding in group for some in getattr(finding, name, ())]
        return tuple(sorted(set().union(*sets)))

    lines = {line for finding in group for line in getattr(finding, "lines", ())}
    return Cause(
        tuple(dict.fromkeys(getattr(finding, "kind", "machine") for finding in group)),
        getattr(group[0], "about", ""), tuple(different.values()),
        sum(getattr(finding, "times", 1) for finding in group),
        seen("ctas"), seen("warps"), tuple(sorted(lines)),
    )  # fmt: skip


def shortened(finding: str) -> str:
    """Return a text without the middle of long lists of registers."""
    return _REGISTERS.sub(r"{\1, ..., \2}", finding)


def _ctas(ctas: Sequence[tuple[int, ...]]) -> str:
    if len(ctas) < 2:
        return f"CTA {ctas[0]}" if ctas else ""
    low, high = (tuple(side(axis) for axis in zip(*ctas, strict=True)) for side in (min, max))
    return f"{len(ctas)} CTAs from {low} to {high}"


def ranges(what: str, numbers: Sequence[int]) -> str:
    """Sorted numbers, neighbours as a range: "warps 0-3, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:SHOWN]]
    if len(runs) > SHOWN:
        texts.append(f"... {numbers[-1]}")
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(texts)}" if texts else ""
