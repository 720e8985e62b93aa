"""Outcome of a step of the bringup, and the machine it ran on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sm100_sim import SimulatedDevice

#: Every state of an outcome, and what it means.
STATES = {
    "passed": "compared, and equal or within the tolerance",
    "measured": "gave numbers; there is nothing to compare them with",
    "differs": "differs from what no hardware has confirmed: look at both values",
    "failed": "a wrong result",
    "fault": "the kernel or its process ended with an error",
    "hang": "did not end within its limit; its process was killed",
    "skipped": "cannot run here; the text says why",
    "not measured": "no figure can be had here; the text says why",
}
#: States that make the run's exit status 1.
BAD = ("failed", "fault", "hang")


@dataclass(frozen=True)
class Outcome:
    """state: one of `STATES`. text: one line for a reader. values: JSON values. seconds: of the
    step, set by the child."""

    state: str
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state is {self.state!r}; accepted: {', '.join(STATES)}")

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {name: value for name, value in asdict(self).items() if value or name == "state"}


@dataclass(frozen=True)
class Target:
    """Machine that the steps run on. backend: "gpu" or "simulator". capability: compute capability.
    sms: streaming multiprocessors."""

    backend: str
    name: str
    capability: tuple[int, int]
    sms: int

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Target:
        backend, name, sms = (content[key] for key in ("backend", "name", "sms"))
        return cls(backend, name, tuple(content["capability"]), sms)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "capability": list(self.capability)}

    @property
    def is_gpu(self) -> bool:
        return self.backend == "gpu"

    @property
    def has_tcgen05(self) -> bool:
        """Blackwell's data-center GPUs, and the simulator."""
        return self.capability[0] == 10

    @property
    def device(self) -> str:
        """Return the PyTorch device that holds the tensors."""
        return "cuda" if self.is_gpu else "cpu"


def simulated(device: SimulatedDevice) -> Target:
    """The simulator, as the GPU that it passes for."""
    name = f"sm100_sim, answering as a {device.name.upper()}"
    return Target("simulator", name, device.capability, device.sms)


def is_fault(error: Exception) -> bool:
    """Return True if the GPU, or the simulator in its place, ended a kernel with an error."""
    return any(kind.__name__ in ("DriverError", "SimulationError") for kind in type(error).__mro__)
