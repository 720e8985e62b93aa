"""Clock and power of a GPU by NVML, the library that comes with the driver."""

from __future__ import annotations

import ctypes
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
#: nvmlClockType_t, NVML_CLOCK_SM.
_CLOCK_SM = 1
_TEXT_BYTES = 96


class NvmlError(RuntimeError):
    """A call of NVML failed; says which and how."""


class Nvml:
    """NVML API reference, "Device Queries" and "System Queries"."""

    def __init__(self, uuid: str) -> None:
        """uuid: of the GPU, as NVML writes it ("GPU-..."). Raises OSError where there is no NVML,
        NvmlError for a GPU that it does not know."""
        self._library = ctypes.CDLL(_LIBRARY)
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def driver_version(self) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode()

    def sm_clock_mhz(self) -> float | None:
        """Return the clock, None where the GPU does not report it."""
        return self._number("nvmlDeviceGetClockInfo", ctypes.c_int(_CLOCK_SM))

    def power_watts(self) -> float | None:
        """Return the power, None where the GPU does not report it."""
        found = self._number("nvmlDeviceGetPowerUsage")
        return None if found is None else found / 1e3

    def _number(self, name: str, *arguments: Any) -> float | None:
        found = ctypes.c_uint()
        try:
            self._call(name, self._handle, *arguments, ctypes.byref(found))
        except NvmlError:
            return None
        return float(found.value)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NvmlError(f"{name}: nvmlReturn_t {status}")
