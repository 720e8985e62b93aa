"""Report of a launch, as a dataclass and as one line of JSON."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from .causes import Cause, causes_of
from .trace.records import TraceEntry

#: Number of reports of this process that `last_reports` keeps.
KEPT = 64


@dataclass(frozen=True)
class Report:
    """The result of one launch.

    grid, cluster: (x, y, z) in CTAs; block: in threads; dynamic_smem: bytes.
    instructions: class -> {"warps": warp instructions, "lanes": lane instructions}, e.g.
        "tcgen05.mma", "mufu.ex2". opcodes: the same by full PTX opcode.
    tma: {"load_bytes", "store_bytes"}, bytes of whole boxes (clipped parts included).
    clc: {"try_cancel": requests, "stolen": clusters that one of them took over, "refused": requests
        that failed although clusters were left (with a seed)}.
    resident_clusters: most at once. seed: of the schedule, None for a fixed one. schedule: its
        name. wall_seconds: of the run; translate_seconds: of its translation to native code, 0
        if this process had it already. seconds: processor time of the run by what it was spent on:
        "products" of matrices, "operands" (conversion of MMA operands and sums), "copies" by TMA,
        "instructions" (everything else in native code) and "python"; with a seed all of it is
        "python". threads: that ran clusters.
        findings: what would be wrong on hardware although the run went on, all of it; `causes` has
        them by cause. notes: what is worth a look and right on hardware, of the reading "wait-ld".
        trace: None unless requested. shared_accesses: with a trace, instruction
        index -> (bytes per lane, executions looked at, wavefronts of them), see `trace.observer`.
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
    schedule: str
    wall_seconds: float
    translate_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)
    threads: int = 1
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trace: list[TraceEntry] | None = field(default=None, repr=False)
    shared_accesses: dict[int, tuple[int, int, int]] = field(default_factory=dict, repr=False)

    def lanes(self, name: str) -> int:
        """Lane instructions executed of a class, 0 if there were none."""
        return self.instructions.get(name, {}).get("lanes", 0)

    def warps(self, name: str) -> int:
        """Warp instructions executed of a class, 0 if there were none."""
        return self.instructions.get(name, {}).get("warps", 0)

    @property
    def causes(self) -> list[Cause]:
        """The findings by cause: those that one missing edge explains are one."""
        return causes_of(self.findings)

    @property
    def warp_instructions(self) -> int:
        """Warp instructions executed in all."""
        return sum(counts["warps"] for counts in self.instructions.values())

    @property
    def warp_instructions_per_second(self) -> float:
        """The simulator's speed in this launch."""
        return self.warp_instructions / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def to_json(self) -> str:
        """One JSON object with all fields and the derived figures, without what a trace adds."""
        names = [f.name for f in fields(self) if f.name not in ("trace", "shared_accesses")]
        values = {name: getattr(self, name) for name in names}
        values["causes"] = [cause.as_dict() for cause in self.causes]
        values["warp_instructions"] = self.warp_instructions
        values["warp_instructions_per_second"] = self.warp_instructions_per_second
        return json.dumps(values)


_reports: deque[Report] = deque(maxlen=KEPT)
_collections: list[list[Report]] = []


def remember(report: Report, file: str | None) -> None:
    """Keep a report for `last_reports`, and append it to `file` if one is named."""
    _reports.append(report)
    for some in _collections:
        some.append(report)
    if file is not None:
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(report.to_json() + "\n")


@contextlib.contextmanager
def collected() -> Iterator[list[Report]]:
    """Within, the reports of all launches are added to the list."""
    some: list[Report] = []
    _collections.append(some)
    try:
        yield some
    finally:
        _collections.remove(some)


def last_reports() -> list[Report]:
    """The reports of this process, oldest first, at most 64."""
    return list(_reports)
