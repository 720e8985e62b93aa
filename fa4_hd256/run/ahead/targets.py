"""Targets of `python -m fa4_hd256 build --arch`; nothing that takes long to load."""

from __future__ import annotations

from dataclasses import dataclass

from ...architectures import ARCHITECTURES, Architecture


@dataclass(frozen=True)
class BuildTarget:
    """Target of `--arch`: an architecture, and the compute capability of the GPUs of a process."""

    architecture: Architecture
    capability: tuple[int, int]

    @property
    def gpu(self) -> str:
        """Rows of the tuning table."""
        return self.architecture.gpus[self.capability][0]


def _targets() -> dict[str, BuildTarget]:
    found = {}
    for architecture in ARCHITECTURES:
        for capability in architecture.gpus:
            own = architecture.own_targets.get(capability)
            if own is not None:
                found[own] = BuildTarget(architecture, capability)
        first = next(c for c in architecture.gpus if c not in architecture.own_targets)
        for name in (architecture.targets[0], architecture.name):
            found[name] = BuildTarget(architecture, first)
    return found


#: By name: architectures, and what their kernels are compiled for.
TARGETS = _targets()
