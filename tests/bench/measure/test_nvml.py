"""Clock and power by NVML, without a GPU: requests to the library and its answers."""

import ctypes

import pytest

from bench.measure import nvml
from bench.measure.nvml import Nvml


class Library:
    """NVML of one GPU, which reports 1980 MHz and 612.5 W; `missing`: what it does not support."""

    def __init__(self, missing=()):
        self.missing, self.asked = missing, []

    def __getattr__(self, name):
        def call(*arguments):
            self.asked.append((name, arguments))
            if name in self.missing:
                return 3
            if name == "nvmlSystemGetDriverVersion":
                arguments[0].value = b"580.1"
            elif name in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage"):
                value = 1980 if name == "nvmlDeviceGetClockInfo" else 612_500
                arguments[-1]._obj.value = value
            return 0

        return call


def test_clock_power_and_driver(monkeypatch):
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    found = Nvml("GPU-12ab")
    assert found.driver_version() == "580.1"
    assert (found.sm_clock_mhz(), found.power_watts()) == (1980.0, 612.5)
    asked = dict(library.asked)
    assert asked["nvmlDeviceGetHandleByUUID"][0] == b"GPU-12ab"
    # NVML_CLOCK_SM of nvml.h.
    assert asked["nvmlDeviceGetClockInfo"][1].value == 1


def test_what_a_gpu_does_not_report(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(["nvmlDeviceGetPowerUsage"]))
    found = Nvml("GPU-12ab")
    assert (found.sm_clock_mhz(), found.power_watts()) == (1980.0, None)


def test_a_gpu_that_it_does_not_know(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(["nvmlDeviceGetHandleByUUID"]))
    with pytest.raises(nvml.NvmlError, match="nvmlDeviceGetHandleByUUID: nvmlReturn_t 3"):
        Nvml("GPU-12ab")
