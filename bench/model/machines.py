"""Modelled machines as the operator sees them, and kernels that only move bytes on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.gpus.family import as_if_seen
from fa4_hd256.run.launch import simulated_gpu
from sm100_sim import DEVICES, SimulatedDevice, device
from sm100_sim.timing import Machine, Values

#: The simulator's variable of the GPU that it passes for (docs/environment.md).
_DEVICE = "SM100_SIM_DEVICE"

#: A B200 as the operator sees it, and one with a single CTA pair, for replays.
B200 = simulated_gpu(device("b200"))
ONE_PAIR = replace(B200, pairs=1)


def gpu_of(machine: Machine) -> Gpu:
    """A modelled machine as the operator would see it."""
    values = machine.values()
    sms = int(values.sms)
    if machine.name in DEVICES:
        return simulated_gpu(replace(DEVICES[machine.name], sms=sms))
    return replace(
        B200, sms=sms, pairs=sms // 2, l2_bytes=int(values.l2_megabytes * 1e6),
        hbm_bytes_per_second=values.hbm_terabytes * 1e12,
    )  # fmt: skip


def _device_of(machine: Machine) -> SimulatedDevice:
    """The device of that name; of another name, the first that kernels are compiled for in the same
    way. Raises ValueError if there is none."""
    alike = [one for one in DEVICES.values() if one.target == machine.architecture]
    found = DEVICES.get(machine.name) or next(iter(alike), None)
    if found is None:
        accepted = ", ".join(sorted({one.target for one in DEVICES.values()}))
        raise ValueError(
            f"{machine.name}: kernels compiled for {machine.architecture} cannot be run here; "
            f"accepted are machines of {accepted}"
        )
    return found


def target_of(machine: Machine) -> str:
    """What CuTe DSL compiles for on it, "sm_103a" for instance."""
    return _device_of(machine).target


def compiling_ours(machine: Machine) -> contextlib.AbstractContextManager[None]:
    """Inside, our kernels are compiled as in a process all of whose GPUs are of the machine's
    kind."""
    return as_if_seen(_device_of(machine).capability)


@contextlib.contextmanager
def simulating(machine: Machine) -> Iterator[None]:
    """The simulator passes for the machine's GPU, so that what is compiled is for that one."""
    saved = os.environ.get(_DEVICE)
    os.environ[_DEVICE] = _device_of(machine).name
    try:
        yield
    finally:
        if saved is None:
            del os.environ[_DEVICE]
        else:
            os.environ[_DEVICE] = saved


def memory_seconds(nbytes: float, values: Values) -> float:
    """Of a kernel that only reads and writes, a launch included: at HBM's rate."""
    return nbytes / (values.hbm_terabytes * 1e12) + values.launch_us * 1e-6
