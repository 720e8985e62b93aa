"""Plans of calls of CPU tensors that are kept as those of CUDA tensors are, and run in the
simulator."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch

from fa4_hd256 import plans
from fa4_hd256.gpus.simulated import simulated_device
from fa4_hd256.plans import forget_plans as forget
from fa4_hd256.run import launch
from fa4_hd256.run.execute import Execution
from sm100_sim.host.host_code import Run
from sm100_sim.host.program import program_of
from sm100_sim.launcher import Options, run_host_code

__all__ = ["as_on_a_gpu", "copied", "forget", "simulated"]


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call, its tensors copied: for the same call once more."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


def simulated(monkeypatch: Any) -> list[str]:
    """Kinds of the kernels that are launched from now on by calls which found their plan."""
    launched: list[str] = []
    plain = plans._run

    def run(kind: plans.Kind, execution: Execution, *given: Any) -> Any:
        if execution.has_run:
            launched.extend(launch.spec.kind for launch in execution.plan.launches)
        return plain(kind, execution, *given)

    monkeypatch.setattr(plans, "_run", run)
    monkeypatch.setattr(plans, "repeats", lambda tensors: True)
    forget()
    return launched


def as_on_a_gpu(monkeypatch: Any) -> list[int]:
    """Let kernels be called as on a GPU from now on: their host code with one address, that of the
    packed arguments. Return the addresses."""
    called: list[int] = []

    def host_function(compiled: Any, device: torch.device) -> Callable[[int], None]:
        program = program_of(compiled)

        def call(address: int) -> None:
            called.append(address)

            def run(on_launch: Callable) -> None:
                program._call(program._entry, address, ctypes.c_int32(0), Run(program, on_launch))

            with simulated_device():
                run_host_code(run, _memory(), Options())

        return call

    monkeypatch.setattr(launch, "host_function", host_function)
    forget()
    return called


def _memory() -> list[tuple[int, int, str]]:
    """Return the memory of all tensors of the process."""
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
