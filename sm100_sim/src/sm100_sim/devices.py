"""The GPUs that the simulator can pass for, each with the figures that programs query a driver for.

`SM100_SIM_DEVICE` names one, "b200" if it is not set; "b200:19" has 19 SMs, as a slice of one (MIG)
may have. What a device is called changes what queries answer and how many clusters are resident at
once, never how an instruction is executed.

SMs: NVIDIA's product data for B200 and GB200 (148, 152); device queries on B300 and GB300 that
others published (148, 152; the full chip has 160). L2: 126.5 MB, from such queries on B200 and
B300. Memory: the products' data sheets. H200: what the driver of one says (docs/bringup_h200.json).
Rubin: 212 SMs, as cuDNN's sources say of a GPU of compute capability 10.7, 288 GB of HBM4 at 22
TB/s, as announced; L2 is not published and is B200's here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

__all__ = ["DEVICES", "VARIABLE", "SimulatedDevice", "current", "default_device", "device", "named"]

VARIABLE = "SM100_SIM_DEVICE"

#: Limits of an SM, and of a CTA (CUDA programming guide, compute capabilities 9.0 and 10.x):
#: registers; threads; bytes of shared memory, of an SM, of a CTA with and without opting in.
REGISTER_FILE = 65_536
MAX_THREADS = 1024
SHARED_OF_AN_SM, SHARED_OPT_IN, SHARED_AT_FIRST = 233_472, 232_448, 49_152
#: Bytes of a CTA in the mode for oversized shared memory, of compute capability 10.7 (`targets`).
SHARED_OVERSIZED = 327 << 10

#: cudaDeviceAttr -> value, of those that all devices here share (CUDA runtime API).
_COMMON = {
    1: MAX_THREADS,  # max threads per block
    8: SHARED_AT_FIRST,  # max shared memory per block without opt-in
    10: 32,  # warp size
    12: REGISTER_FILE,  # registers per block
    39: 2048,  # threads per multiprocessor
    81: SHARED_OF_AN_SM,  # shared memory per multiprocessor
    82: REGISTER_FILE,  # registers per multiprocessor
    95: 1,  # cooperative launch
    97: SHARED_OPT_IN,  # shared memory per block, opt-in
    106: 32,  # blocks per multiprocessor
    111: 1024,  # shared memory reserved by the system per block
    120: 1,  # cluster launch
}
#: cudaDeviceAttr -> value, of compute capability 10.7 (CUDA 13.5; `targets`).
_RUBIN = {
    150: SHARED_OVERSIZED,  # oversized shared memory per block
}


@dataclass(frozen=True)
class SimulatedDevice:
    """One GPU. capability: compute capability. memory_clock_khz, memory_bus_bits: of its HBM, two
    transfers a clock; on Blackwell together the 8 TB/s of the data sheets."""

    name: str
    capability: tuple[int, int]
    sms: int
    memory_bytes: int
    memory_bus_bits: int = 8192
    memory_clock_khz: int = 3_906_250
    l2_bytes: int = 132_644_864

    @property
    def product(self) -> str:
        """Return the name that the device reports."""
        return f"NVIDIA {self.name.upper()} (sm100_sim)"

    @property
    def hbm_bytes_per_second(self) -> float:
        return 2e3 * self.memory_clock_khz * self.memory_bus_bits / 8

    @property
    def target(self) -> str:
        """Return the target that CuTe DSL compiles for on the device."""
        return "sm_{}{}a".format(*self.capability)

    @property
    def attributes(self) -> dict[int, int]:
        """cudaDeviceAttr -> value."""
        major, minor = self.capability
        return _COMMON | {
            16: self.sms, 36: self.memory_clock_khz, 37: self.memory_bus_bits, 38: self.l2_bytes,
            75: major, 76: minor,
        } | (_RUBIN if self.capability == (10, 7) else {})  # fmt: skip

    def clusters(self, size: int) -> int:
        """Clusters of so many CTAs that run at once, one CTA per SM; every SM finds its peers."""
        return self.sms // size


_GB = 10**9
DEVICES = {
    device.name: device
    for device in (
        SimulatedDevice("b200", (10, 0), 148, 192 * _GB),
        SimulatedDevice("gb200", (10, 0), 152, 192 * _GB),
        SimulatedDevice("b300", (10, 3), 148, 288 * _GB),
        SimulatedDevice("gb300", (10, 3), 152, 288 * _GB),
        SimulatedDevice("rubin", (10, 7), 212, 288 * _GB, 16_384, 5_371_094),
        SimulatedDevice("h200", (9, 0), 132, 150_109_880_320, 6016, 3_201_000, 62_914_560),
    )
}


def named(text: str) -> SimulatedDevice:
    """The device that `text` names, "gb200" or "gb200:19". Raises ValueError for another text."""
    match = re.fullmatch(r"(\w+)(?::([1-9]\d*))?", text)
    if match is None or match[1] not in DEVICES:
        raise ValueError(
            f"{VARIABLE} is {text!r}; accepted are {', '.join(DEVICES)}, each also with a number "
            "of SMs, as b200:19"
        )
    device = DEVICES[match[1]]
    return device if match[2] is None else replace(device, sms=int(match[2]))


def device(text: str | None = None) -> SimulatedDevice:
    """The device that `text` names, as "b200" or "b200:19" (with so many SMs); without a name the
    one that SM100_SIM_DEVICE names, where that is not set `default_device`'s, else a B200. Raises
    ValueError for another text."""
    return current() if text is None else named(text)


#: Device that the simulator passes for where SM100_SIM_DEVICE is not set.
_default: ContextVar[str] = ContextVar("default device", default="b200")


def current() -> SimulatedDevice:
    """The device of the environment. Raises ValueError as `named` does."""
    return named(os.environ.get(VARIABLE) or _default.get())


@contextlib.contextmanager
def default_device(text: str) -> Iterator[SimulatedDevice]:
    """Within, in this thread, the simulator passes for the device that `text` names unless
    SM100_SIM_DEVICE names another; the one it then is. Raises ValueError as `named` does."""
    before = _default.set(text)
    try:
        yield current()
    finally:
        _default.reset(before)
