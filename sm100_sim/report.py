"""What a launch did, as a dataclass and as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: How many reports of this process `last_reports` keeps.
KEPT = 64


@dataclass(frozen=True)
class TraceEntry:
    """One machine operation in the order of execution.

    number: position in the launch. cta: index (x, y, z). opcode and text: the PTX instruction.
    """

    number: int
    cta: tuple[int, int, int]
    warp: int
    opcode: str
    text: str
    line: int
    lanes: int


@dataclass(frozen=True)
class Report:
    """The result of one launch.

    instructions: class -> {"warps": warp instructions, "lanes": lane instructions}, e.g.
        "tcgen05.mma", "mufu.ex2". opcodes: the same by full PTX opcode.
    tma: bytes loaded and stored through bulk copies. clc: try_cancel requests and clusters that
        were cancelled and so executed by another one. resident_clusters: at once.
    findings: what the sanitizer found. trace: None unless asked for.
    """

    kernel: str
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem: int
    instructions: dict[str, dict[str, int]]
    opcodes: dict[str, dict[str, int]]
    tma: dict[str, int]
    clc: dict[str, int]
    resident_clusters: int
    seed: int | None
    wall_seconds: float
    translate_seconds: float
    warp_instructions_per_second: float
    findings: list[str] = field(default_factory=list)
    trace: list[TraceEntry] | None = field(default=None, repr=False)

    def lanes(self, name: str) -> int:
        """Lane instructions executed of a class, 0 if there were none."""
        return self.instructions.get(name, {}).get("lanes", 0)

    def warps(self, name: str) -> int:
        """Warp instructions executed of a class, 0 if there were none."""
        return self.instructions.get(name, {}).get("warps", 0)

    def to_json(self) -> str:
        """One JSON object; the trace is left out."""
        values = asdict(self) if self.trace is None else asdict(_without_trace(self))
        del values["trace"]
        return json.dumps(values)


def _without_trace(report: Report) -> Report:
    values = {name: getattr(report, name) for name in report.__dataclass_fields__}
    return Report(**(values | {"trace": None}))


_reports: list[Report] = []


def remember(report: Report, file: str | None) -> None:
    """Keep a report for `last_reports`, and append it to `file` if one is named."""
    _reports.append(report)
    del _reports[:-KEPT]
    if file is not None:
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(report.to_json() + "\n")


def last_reports() -> list[Report]:
    """The reports of this process, oldest first, at most 64."""
    return list(_reports)
