"""The stages of the bringup, in order."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BringupStage:
    """name: stable, docs refer to it. limit: seconds of a step. batch: whether steps share a
    process while they succeed; a step that fails ends its process in any case. settles: what is
    known once the stage has passed. checked: whether the machine is tested after a step that went
    wrong."""

    name: str
    limit: float
    batch: bool
    settles: str
    checked: bool = True

    @property
    def module(self) -> Any:
        """items(target) -> names of the steps; missing(target) -> why the stage cannot run, or "",
        in a module of a stage that needs something; run(item, target, note) -> Outcome, note(text)
        saying which kernel is next."""
        return importlib.import_module(f"{__package__}.{self.name}")


STAGES = tuple(
    BringupStage(name, limit, batch, settles)
    for name, limit, batch, settles in (
        ("machine", 60, True, "what the figures below belong to: GPU, driver, clocks, other users"),
        ("golden", 30, True, "single instructions: that the simulator and this GPU agree, bit for "
                             "bit"),
        ("rules", 20, True, "rules of the machine that no manual promises: kernels that keep and "
                            "that break them"),
        ("micro", 60, True, "the constants of the timing model: latencies, intervals, rates"),
        ("kernels", 600, False, "each kernel, then masks, lengths and schedulers, against float64"),
        ("sanitizer", 600, False, "memory errors and races that results do not show"),
        ("sharing", 600, False, "that two processes may share the GPU"),
        ("graph", 120, False, "that calls may be captured into CUDA graphs"),
        ("decoding", 600, False, "that KV splits may be joined by a kernel launched beside them"),
        ("host", 120, False, "what a call costs the host"),
        ("choices", 120, False, "which of two configurations is the faster one here"),
        ("throughput", 1200, False, "how fast the kernels are, beside others' in one process"),
    )
)  # fmt: skip

#: Not part of a run: whether the GPU still answers after a hang, and planted failures.
HIDDEN = (
    BringupStage("answers", 60, True, "whether the machine still computes", False),
    BringupStage("planted", 10, True, "that a hang, a fault and a wrong result are told apart",
                 False),
)  # fmt: skip


def named(name: str) -> BringupStage:
    """The stage of that name; raises ValueError listing those there are."""
    for stage in (*STAGES, *HIDDEN):
        if stage.name == name:
            return stage
    raise ValueError(f"stage {name!r} is not known; there are {', '.join(r.name for r in STAGES)}")
