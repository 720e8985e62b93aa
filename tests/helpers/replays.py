"""Plans of calls of CPU tensors that are kept as those of CUDA tensors are, and run in the
simulator."""

from __future__ import annotations

from typing import Any

import torch

from fa4_hd256 import plans
from fa4_hd256.plans import forget_plans as forget

__all__ = ["copied", "forget", "simulated"]


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call, its tensors copied: for the same call once more."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


def simulated(monkeypatch: Any) -> list[str]:
    """Kinds of the kernels that are launched from now on by calls which found their plan."""
    launched: list[str] = []
    plain = plans._run

    def run(entry: plans.Entry, *given: Any) -> Any:
        if entry.execution is not None:
            launched.extend(launch.spec.kind for launch in entry.execution.plan.launches)
        return plain(entry, *given)

    monkeypatch.setattr(plans, "_run", run)
    monkeypatch.setattr(plans, "repeats", lambda tensors: True)
    forget()
    return launched
