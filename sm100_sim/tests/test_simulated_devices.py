"""The GPUs that the simulator passes for."""

from __future__ import annotations

import cuda.bindings.driver as driver
import cutlass.utils
import pytest
import torch

from sm100_sim import attached, devices


def test_the_default_is_a_b200(monkeypatch):
    monkeypatch.delenv("SM100_SIM_DEVICE", raising=False)
    device = devices.current()
    assert (device.name, device.capability, device.sms) == ("b200", (10, 0), 148)


@pytest.mark.parametrize(
    ("text", "capability", "sms", "pairs", "target"),
    [
        ("b200", (10, 0), 148, 74, "sm_100a"),
        ("gb200", (10, 0), 152, 76, "sm_100a"),
        ("b300", (10, 3), 148, 74, "sm_103a"),
        ("gb300", (10, 3), 152, 76, "sm_103a"),
        ("gb300:160", (10, 3), 160, 80, "sm_103a"),
        ("b200:19", (10, 0), 19, 9, "sm_100a"),
        ("rubin", (10, 7), 212, 106, "sm_107a"),
        ("h200", (9, 0), 132, 66, "sm_90a"),
    ],
)
def test_programs_are_told_so(monkeypatch, text, capability, sms, pairs, target):
    """PyTorch, the driver and CuTe DSL say the same."""
    from cutlass.cutlass_dsl import CuTeDSL

    monkeypatch.setenv("SM100_SIM_DEVICE", text)
    attribute = driver.CUdevice_attribute
    with attached():
        properties = torch.cuda.get_device_properties(0)
        assert properties.multi_processor_count == sms
        assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
        assert torch.cuda.get_device_capability() == capability
        assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == pairs
        for number, expected in (
            (attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, sms),
            (attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, capability[1]),
            (attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, properties.L2_cache_size),
        ):
            assert driver.cuDeviceGetAttribute(number, 0) == (0, expected)
        assert CuTeDSL._get_dsl().envar.arch == target


@pytest.mark.parametrize("text", ["h100", "b200:", "b200:0", "b200:-2", "b200 :2", "148"])
def test_names_that_are_not_known(monkeypatch, text):
    monkeypatch.setenv("SM100_SIM_DEVICE", text)
    names = "b200, gb200, b300, gb300, rubin, h200"
    with pytest.raises(ValueError, match=f"SM100_SIM_DEVICE is .*{names}, .*b200:19"):
        devices.current()
