"""One kernel by itself, launched by CuTe DSL or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import sm100_sim
from fa4_hd256.gpus.devices import gpu_of
from fa4_hd256.gpus.simulated import simulated_device
from fa4_hd256.run.compile import CompiledKernel


def launch(
    compiled: CompiledKernel, device: torch.device, arguments: Callable[[Any, int], tuple]
) -> None:
    """Run a kernel on PyTorch's current stream, or in the simulator for the CPU. arguments: (the
    GPU, CUDA stream) -> those of the compiled function."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            compiled.function(*arguments(gpu_of(device), stream))
    else:
        with simulated_device():
            sm100_sim.launch(compiled, *arguments(gpu_of(device), 0))
