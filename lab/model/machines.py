"""Modelled machines as the operator sees them, or held at a clock, and kernels that only move bytes
on them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any
from unittest import mock

from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.gpus.family import as_if_seen
from fa4_hd256.gpus.simulated import simulated_gpu
from sm100_sim import DEVICES, SimulatedDevice, device
from sm100_sim.timing import Machine, Values

#: The simulator's variable of the GPU that it passes for (docs/api.md).
_DEVICE = "SM100_SIM_DEVICE"

#: A B200 as the operator sees it, and one with a single CTA pair, for replays.
B200 = simulated_gpu(device("b200"))
ONE_PAIR = replace(B200, pairs=1)

#: Share of L2's time that keeps its nanoseconds where the SMs' clock changes; the rest keeps its
#: clocks. On an H200 (sm100_sim/docs/facts.md) a hop through L2 takes 377, 352 and 333
#: clocks at 1.980, 1.800 and 1.649 GHz: 114 clocks and 132 ns. A byte of all SMs' loads takes an SM
#: 0.0312 and 0.0294 clocks at 1.979 and 1.814. Shares of 0.70 and 0.69.
L2_TIME = 0.7
#: Constants in clocks that L2, or HBM behind it, decides.
_L2_CLOCKS = ("global_load", "tma_load_l2", "tma_load_hbm", "tma_store", "store_ack")


def gpu_of(machine: Machine) -> Gpu:
    """A modelled machine as the operator would see it."""
    values = machine.values()
    sms = int(values.sms)
    if machine.name in DEVICES:
        return simulated_gpu(replace(DEVICES[machine.name], sms=sms))
    return replace(
        simulated_gpu(_device_of(machine)), sms=sms, pairs=sms // 2,
        l2_bytes=int(values.l2_megabytes * 1e6), hbm_bytes_per_second=values.hbm_terabytes * 1e12,
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
    """Return the target that CuTe DSL compiles for on it, "sm_103a" for instance."""
    return _device_of(machine).target


def compiling_ours(machine: Machine) -> contextlib.AbstractContextManager[None]:
    """Compile our kernels as in a process all of whose GPUs are of the machine's kind."""
    return as_if_seen(_device_of(machine).capability)


def simulating(machine: Machine) -> contextlib.AbstractContextManager[Any]:
    """The simulator passes for the machine's GPU, so that what is compiled is for that one."""
    return mock.patch.dict(os.environ, {_DEVICE: _device_of(machine).name})


def with_load(machine: Machine, nbytes: int, clocks: float) -> Machine:
    """Return the GPU where a load of so many bytes takes so many clocks from its issue to its
    arrival, as it does beside other traffic. Raises ValueError for fewer clocks than the bytes
    alone take."""
    values = machine.values()
    latency = clocks - values.tma_issue - nbytes / values.l2_bytes_per_clock_sm
    if latency <= 0:
        raise ValueError(
            f"{machine.name}: a load of {nbytes} bytes in {clocks:.0f} clocks; accepted are more "
            f"than {clocks - latency:.0f}, which its issue and its bytes take"
        )
    one = replace(machine.constants["tma_load_l2"], value=latency, low=latency, high=latency)
    return replace(machine, constants={**machine.constants, "tma_load_l2": one})


def held_at(machine: Machine, ghz: float) -> Machine:
    """Return the GPU at that clock of its SMs: L2 follows it in part, HBM and launches do not.
    Raises ValueError unless ghz is above 0."""
    if not ghz > 0:
        raise ValueError(f"{machine.name} held at {ghz} GHz; accepted is any clock above 0")
    share = ghz / machine.values().clock_ghz
    longer = 1 - L2_TIME + L2_TIME * share
    widest = machine.constants["l2_bytes_per_clock_sm"].high

    def held(name: str, value: float) -> float:
        if name == "clock_ghz":
            return ghz
        if name in _L2_CLOCKS:
            return value * longer
        if name == "l2_bytes_per_clock_sm":
            # An SM's interface has its width whatever L2 delivers.
            return min(value / longer, widest)
        return value * share / longer if name == "l2_terabytes" else value

    constants = {
        name: replace(
            one, value=held(name, one.value), low=held(name, one.low), high=held(name, one.high)
        )
        for name, one in machine.constants.items()
    }
    sets = machine.sets and tuple(
        {name: held(name, value) for name, value in one.items()} for one in machine.sets
    )
    return replace(machine, constants=constants, sets=sets)


def memory_seconds(nbytes: float, values: Values) -> float:
    """Return the seconds of a kernel that only reads and writes, a launch included: at HBM's
    rate."""
    return nbytes / (values.hbm_terabytes * 1e12) + values.launch_us * 1e-6
