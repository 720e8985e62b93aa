"""Host code of a compiled kernel: loaded for a GPU, where `execute` calls it, or run in the
simulator for CPU tensors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import environment
from ..architectures import ARCHITECTURES
from ..gpus import simulated
from ..gpus.devices import cuda_gpu
from ..gpus.family import architecture_of, of_capability, target
from .compile import CompiledKernel
from .tile_counter import tile_counter

#: Seconds of a simulated run after which the progress bar appears.
PROGRESS_AFTER = 3.0


def host_function(compiled: CompiledKernel, device: torch.device) -> Callable[[int], Any] | None:
    """The host code of a kernel, loaded into the process's GPUs: a function of the address of the
    packed arguments. None for the CPU, whose kernels `simulate` runs. Raises RuntimeError for one
    that is not loaded while a CUDA graph is captured."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device), _every_gpu_can_take_it(device):
        # NOTE [host code]: CuTe DSL's compiled host function takes the address of an array of
        # addresses, one for each argument; `execute.PackedArguments` makes that array.
        function: Callable[[int], Any] = compiled.load().capi_func
        return function


def simulate(
    compiled: CompiledKernel, addresses: Sequence[int], memory: list[tuple[int, int, str]]
) -> None:
    """Simulate a kernel. memory: (first byte, past the last one, name) of all it may touch."""
    with _progress() as report, simulated.simulated_device():
        simulated.simulator().launch_packed(compiled, addresses, memory, progress=report)


def prepare(compiled: CompiledKernel, device: torch.device) -> None:
    """Load a kernel into the process's GPUs before a capture; nothing for the CPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            with _every_gpu_can_take_it(device):
                compiled.load()
            tile_counter(device, torch.cuda.current_stream().cuda_stream)


@contextlib.contextmanager
def _every_gpu_can_take_it(device: torch.device) -> Iterator[None]:
    """Name other GPUs in an error: CuTe DSL loads a kernel into all that the process sees."""
    try:
        yield
    except Exception as error:
        architecture = architecture_of(device)
        seen = {i: _capability(i) for i in range(torch.cuda.device_count())}
        others = [
            f"cuda:{i} ({a}.{b})" for i, (a, b) in seen.items() if (a, b) not in architecture.gpus
        ]
        if not others:
            raise
        raise RuntimeError(
            f"{error}\nCuTe DSL loads a kernel into every GPU that the process sees, also into "
            f"{', '.join(others)}, which cannot take it; hide such GPUs by CUDA_VISIBLE_DEVICES"
        ) from error


def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def describe_gpus() -> str:
    """Return targets and GPUs of the process for a bug report, a line each."""
    lines = [f"kernels are compiled for {target(a)}: {a.describe()}" for a in ARCHITECTURES]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        name, capability = torch.cuda.get_device_name(index), _capability(index)
        found = "not in the family"
        if of_capability(capability):
            try:
                found = cuda_gpu(torch.device("cuda", index)).describe()
            except (RuntimeError, ValueError) as error:
                found = f"cannot be used: {error}"
        lines.append(f"cuda:{index}: {name}, {'.'.join(map(str, capability))}: {found}")
    return "\n".join(lines)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    if not environment.progress_wanted():
        yield None
        return
    from tqdm import tqdm

    start, bar = time.monotonic(), None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            if time.monotonic() - start < PROGRESS_AFTER or done >= total:
                return
            bar = tqdm(total=total, desc="simulating", unit="cluster", leave=False)
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()
