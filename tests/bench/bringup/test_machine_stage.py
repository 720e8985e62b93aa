"""The stage of the machine tells of the GPU that the steps run on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.bringup.stages import machine

pytestmark = pytest.mark.simulator


def test_nvidia_smi_is_asked_of_the_gpu_that_cuda_chose(monkeypatch):
    """The place on the bus identifies the GPU: CUDA_VISIBLE_DEVICES may leave the last one of a
    machine."""
    asked = []

    def call(name, length, device):
        assert (name, device) == ("cuDeviceGetPCIBusId", "the device")
        return b"0000:DB:00.0".ljust(length, b"\0")

    def ask(*arguments):
        asked.append(arguments[-1])
        return None if "vbios" in arguments[0] else "12"

    monkeypatch.setattr(machine, "gpu", lambda: SimpleNamespace(call=call, device="the device"))
    monkeypatch.setattr(machine, "_ask", ask)
    found = machine._smi()
    assert set(asked) == {"--id=0000:DB:00.0"}
    assert found.values["driver_version"] == "12" and "vbios_version" not in found.values
