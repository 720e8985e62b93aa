"""Machines of rows that are modelled."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def modelled_machine(machine: Any) -> str:
    """Name the `machine` of figures of the timing model. machine: a
    `sm100_sim.timing.machine_constants.Machine`; a hash tells which constants."""
    content: dict[str, Any] = {
        name: (constant.value, constant.low, constant.high)
        for name, constant in sorted(machine.constants.items())
    }
    if machine.sets is not None:
        content["sets"] = machine.sets
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
    return f"{machine.name.upper()} modelled, constants {digest}"
