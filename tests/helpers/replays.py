"""Launches from packed arguments, in the simulator: what a GPU does with them, done on CPU tensors.

`simulated(monkeypatch)` makes calls of CPU tensors repeat as those of CUDA tensors do. The kernels
then run from the addresses that were packed, and no other ones.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch

from fa4_hd256.eager import forget_calls as forget
from fa4_hd256.run import packed
from fa4_hd256.run.simulated import simulated_device
from sm100_sim.host.host_code import Run
from sm100_sim.host.program import program_of
from sm100_sim.launcher import Options, run_host_code

__all__ = ["copied", "forget", "simulated"]


def _ranges() -> list[tuple[int, int, str]]:
    """All memory of the process's tensors."""
    found = set()
    for thing in gc.get_objects():
        if type(thing) not in (torch.Tensor, torch.nn.Parameter):
            continue
        # A sparse one has no storage, nor has one that torch.func wraps, or a batch of gradients.
        functorch = torch._C._functorch
        if functorch.is_functorch_wrapped_tensor(thing) or functorch.is_legacy_batchedtensor(thing):
            continue
        if thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes():
                found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), "tensor"))
    return sorted(found)


def _host_code(compiled: Any, launched: list[str]) -> Callable[[int], None]:
    program = program_of(compiled)

    def call(address: int) -> None:
        def run(on_launch: Callable) -> None:
            program._call(program._entry, address, ctypes.c_int32(0), Run(program, on_launch))

        with simulated_device():
            reports = run_host_code(run, _ranges(), Options())
        launched.extend(report.kernel for report in reports)

    return call


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call, its tensors copied: for the same call once more."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


def simulated(monkeypatch: Any) -> list[str]:
    """Names of the kernels that are launched from packed arguments from now on."""
    launched: list[str] = []
    monkeypatch.setattr(packed, "stand_in", lambda compiled: _host_code(compiled, launched))
    forget()
    return launched
