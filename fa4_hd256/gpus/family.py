"""The GPUs that kernels run on, and what they are compiled for.

NOTE [one binary for the family].  ptxas makes the same instructions for sm_100f as for sm_100a, one
by one (test_family compares them), and refuses on sm_100f what is not in all of the family (PTX ISA
11.1.2, .target).  A cubin of sm_100f runs on every GPU of the family (CUDA programming
guide, family-specific features), so one entry in the cache serves a process with both capabilities:
CuTe DSL loads a kernel into every GPU that the process sees.

NOTE [twice the exponentials].  Units of 10.3 make twice as many exp2 a clock, but how far apart
they are issued stands in the machine code: only for a target of 10.3 ptxas puts them closer.  So a
process whose GPUs of the architecture are all such compiles for sm_103a.  In the same way one whose
GPUs are all of 10.7 compiles for sm_107a: CuTe DSL's libraries of CUDA 12 do not know that GPU, and
ptxas makes other instructions for it of the same PTX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from .. import environment
from ..architectures import Architecture
from .gpu import describe_family, of_capability

#: Compute capabilities that stand in for those of the process's GPUs; None: those that it sees.
_as_if: ContextVar[frozenset[tuple[int, int]] | None] = ContextVar("as_if_seen", default=None)


def architecture_of(device: torch.device) -> Architecture:
    """Return the architecture whose kernels work on tensors of a device. A GPU's compute capability
    tells it. For the CPU it is what the simulator is to run (`environment.architecture`). Raises
    ValueError for any other device."""
    if device.type == "cpu":
        return environment.architecture()
    accepted = (
        f"accepted: CUDA tensors on a {describe_family()}, or CPU tensors, for which the compiled "
        "kernel runs in the simulator"
    )
    if device.type != "cuda":
        raise ValueError(f"q, k and v are on device {device}; {accepted}")
    capability = torch.cuda.get_device_capability(device)
    architecture = of_capability(capability)
    if architecture is None:
        raise ValueError(
            f"q, k and v are on {device}, a {torch.cuda.get_device_name(device)} with compute "
            f"capability {capability[0]}.{capability[1]}; {accepted}"
        )
    return architecture


def target(architecture: Architecture) -> str:
    """Return the compile target of an architecture's kernels in this process.

    If all of the process's GPUs of the architecture have one compute capability with a target of
    its own, it is that one, else the architecture's first: NOTE [twice the exponentials].
    """
    capabilities = _as_if.get()
    if capabilities is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        capabilities = frozenset(torch.cuda.get_device_capability(i) for i in range(count))
    seen = [c for c in capabilities if c in architecture.gpus]
    own = architecture.own_targets.get(seen[0]) if len(seen) == 1 else None
    return own or architecture.targets[0]


@contextlib.contextmanager
def as_if_seen(*capabilities: tuple[int, int]) -> Iterator[None]:
    """Compile, in this thread, as in a process whose GPUs have these compute capabilities."""
    before = _as_if.set(frozenset(capabilities))
    try:
        yield
    finally:
        _as_if.reset(before)


#: Return the compute capabilities that `as_if_seen` gives this thread, None outside of it.
as_seen: Callable[[], frozenset[tuple[int, int]] | None] = _as_if.get
