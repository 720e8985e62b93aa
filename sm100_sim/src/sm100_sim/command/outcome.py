"""Outcome of a run, from which its files are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from sm100_sim.causes import Cause, causes_of
from sm100_sim.report import Report

from .summary import found_by_kernel


@dataclass
class Outcome:
    """Outcome of a run. reports: of its launches; failures: errors that ended others; modules:
    kernel
    -> PTX of the module it was launched from."""

    reports: list[Report] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)

    def kernels(self) -> dict[str, list[Report]]:
        """The reports of each kernel."""
        found: dict[str, list[Report]] = {name: [] for name in self.modules}
        for report in self.reports:
            found.setdefault(report.kernel, []).append(report)
        return found

    def causes(self) -> dict[str, list[Cause]]:
        """The findings of each kernel by cause."""
        found = found_by_kernel(self.kernels(), self.failures)
        return {name: causes_of(findings) for name, findings in found.items()}
