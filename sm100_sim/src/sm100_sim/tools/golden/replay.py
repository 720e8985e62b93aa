"""Runs a golden case in the simulator."""

from __future__ import annotations

import dataclasses
import mmap

import numpy as np

from sm100_sim.errors import Hang, SimulationError
from sm100_sim.launcher import Options, parameter_buffer, parsed_kernel, run_kernel
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.state.tensormap import encode

from .cases import KERNEL, Case


def placed(array: np.ndarray) -> np.ndarray:
    """A copy at the start of pages of its own, as device memory is.

    Tensor maps of some cases begin terabytes below their memory. Pages lie high enough for that;
    a heap may not.
    """
    pages = mmap.mmap(-1, max(array.nbytes, 1))
    copy = np.frombuffer(pages, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def replay(case: Case, buffers: list[np.ndarray] | None = None, **options) -> list[np.ndarray]:
    """Outputs of a case in the simulator.

    buffers: gets all buffers, for a launch that does not end. options: of `launcher.Options`.
    """
    buffers = [] if buffers is None else buffers
    buffers += [placed(array) for array in (*case.inputs, *case.outputs)]
    addresses = [buffer.__array_interface__["data"][0] for buffer in buffers]
    values = [np.uint64(address).tobytes() for address in addresses]
    for index, tensor_map in case.tensor_maps:
        address = addresses[index] + tensor_map.address
        values.append(encode(dataclasses.replace(tensor_map, address=address)))
    kernel = parsed_kernel(case.ptx, KERNEL)
    config = LaunchConfig(
        KERNEL,
        (case.grid, 1, 1),
        (case.block, 1, 1),
        (case.cluster, 1, 1),
        case.dynamic_smem,
        (),
        {},
        0,
        case.ptx,
        non_portable_cluster=False,
        moves_registers=kernel.fixes_registers,
    )
    ranges = [
        (address, address + buffer.nbytes, f"p{i}")
        for i, (address, buffer) in enumerate(zip(addresses, buffers, strict=True))
    ]
    run_kernel(config, parameter_buffer(kernel, values), sorted(ranges), Options(**options))
    return buffers[len(case.inputs) :]


def ending(case: Case, **options) -> tuple[str, list[np.ndarray], str]:
    """Return how a case ends in the simulator ("done", "hang" or "error"), its outputs, the error.

    All of its clusters are resident at once.
    """
    buffers: list[np.ndarray] = []
    try:
        return "done", replay(case, buffers, clusters=case.grid, **options), ""
    except Hang as error:
        return "hang", buffers[len(case.inputs) :], str(error)
    except SimulationError as error:
        return "error", buffers[len(case.inputs) :], str(error)
