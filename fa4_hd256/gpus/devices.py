"""Facts of the GPU that works on tensors.

NOTE [pairs that fit].  The driver says how many CTA pairs are resident at once.  SMs come in
groups.  In a group with an odd number, and in a slice of a GPU (MIG), an SM may have no peer.
"""

from __future__ import annotations

import functools
import warnings

import torch

from . import driver, simulated
from .gpu import Gpu, of_capability


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU that tensors on this device are worked on by; the simulator's for the CPU."""
    if device.type == "cuda":
        return cuda_gpu(device)
    with simulated.simulated_device() as device_of_simulator:
        return simulated.simulated_gpu(device_of_simulator)


def cuda_gpu(device: torch.device) -> Gpu:
    """Return a CUDA device's figures, cached. Raises ValueError if it holds no CTA pair."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_gpu(index)


@functools.cache
def _cuda_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    sms = properties.multi_processor_count
    try:
        pairs, hbm = driver.resident_pairs(index), driver.hbm_bytes_per_second(index)
    except driver.DriverError as error:
        warnings.warn(
            f"the driver does not say how many CTA pairs cuda:{index} holds ({error}); calls take "
            f"half of its {sms} SMs",
            RuntimeWarning,
            stacklevel=3,
        )
        pairs, hbm = sms // 2, 0.0
    capability = properties.major, properties.minor
    if not hbm:
        architecture = of_capability(capability)
        hbm = sms * architecture.hbm_of_sm if architecture else 0.0
    return Gpu(capability, sms, pairs, properties.L2_cache_size, hbm)


def is_captured(device: torch.device) -> bool:
    """Return True if this thread's calls on a device go into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
