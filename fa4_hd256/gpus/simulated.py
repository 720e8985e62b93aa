"""The simulator that CPU tensors run in: the package, and the device that it passes for.

This module needs neither PyTorch nor CuTe DSL.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .. import environment
from .gpu import Gpu


def simulator() -> ModuleType:
    """The package `sm100_sim`. Raises ImportError, with what to do, where it is not installed."""
    try:
        # In a checkout the simulator's folder passes for an empty package of this name.
        from sm100_sim import device  # noqa: F401
    except ImportError as error:
        if error.name != "sm100_sim":
            raise
        text = f"CPU tensors run in the simulator: {environment.NO_SIMULATOR}, or use a CUDA device"
        raise ImportError(text, name="sm100_sim") from None
    return sys.modules["sm100_sim"]


@contextlib.contextmanager
def simulated_device() -> Iterator[Any]:
    """The simulator's device, which within is one of the architecture that CPU tensors take. Raises
    ValueError where the user's setting names one of another."""
    architecture = environment.architecture()
    with simulator().default_device(architecture.simulated) as device:
        if device.capability not in architecture.gpus:
            major, minor = device.capability
            raise ValueError(
                f"the simulator passes for a {device.name} (compute capability {major}.{minor}, "
                f"SM100_SIM_DEVICE), but {environment.ARCHITECTURE.name} is {architecture.name}, "
                f"{architecture.describe()}; accepted: a device of these, such as "
                f"{architecture.simulated}, or another architecture"
            )
        yield device


def simulated_gpu(device: Any) -> Gpu:
    """A `sm100_sim.SimulatedDevice` as the operator sees it."""
    return Gpu(
        device.capability,
        device.sms,
        device.clusters(2),
        device.l2_bytes,
        device.hbm_bytes_per_second,
    )
