"""Machines of rows that are modelled or read from compiled code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from typing import Any


def compiler_machine() -> str:
    """Name the `machine` of figures read from compiled code."""
    from fa4_hd256.architectures import ARCHITECTURES
    from fa4_hd256.gpus.family import target

    of = target(ARCHITECTURES[0])
    return f"{of}, nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}"


def modelled_machine(machine: Any) -> str:
    """Name the `machine` of figures of the timing model.

    machine: a `sm100_sim.timing.machine_constants.Machine`; a hash tells which constants.
    """
    content: dict[str, Any] = {
        name: (constant.value, constant.low, constant.high)
        for name, constant in sorted(machine.constants.items())
    }
    if machine.sets is not None:
        content["sets"] = machine.sets
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
    return f"{machine.name.upper()} modelled, constants {digest}"
