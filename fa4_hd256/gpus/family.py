"""The family of GPUs that the kernels run on, and what they are compiled for.

NOTE [one binary for the family].  ptxas makes the same instructions for sm_100f as for sm_100a, one
by one (test_family compares them), and refuses on sm_100f what is not in all of the family (PTX ISA
11.1.2, .target).  A cubin of sm_100f runs on every GPU of the family (CUDA programming
guide, family-specific features), so one entry in the cache serves a process with both capabilities:
CuTe DSL loads a kernel into every GPU that the process sees.

NOTE [twice the exponentials].  Units of 10.3 make twice as many exp2 a clock, but how far apart
they are issued stands in the machine code: only for a target of 10.3 ptxas puts them closer.  So a
process all of whose GPUs are such compiles for `TARGET_10_3`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from fa4_hd256 import environment

__all__ = [
    "FAMILY", "TARGET", "TARGETS", "TARGET_10_3", "as_if_seen", "describe_family", "in_family",
    "target",
]  # fmt: skip

#: What kernels are compiled for, and all targets of GPUs that its binaries run on.
TARGET, *_ = TARGETS = environment.ARCHITECTURES

#: What they are compiled for where all GPUs have compute capability 10.3.
TARGET_10_3 = "sm_103a"

#: Compute capability -> the GPUs that have it, the first of which names its rows in the tuning
#: table.  Others of the same major number (10.7, and 10.1, which became 11.0) are no members, or
#: nobody has checked the kernels' plans against them.
FAMILY = {(10, 0): ("B200", "GB200"), (10, 3): ("B300", "GB300")}


def in_family(capability: tuple[int, int]) -> bool:
    """Whether the kernels run on GPUs of this compute capability."""
    return tuple(capability) in FAMILY


#: Compute capabilities that count as those of the process's GPUs, None for what it sees.
_as_if: ContextVar[frozenset[tuple[int, int]] | None] = ContextVar("as_if_seen", default=None)


def target() -> str:
    """What this process compiles for: `TARGET_10_3` where it sees GPUs, all of 10.3, else `TARGET`;
    NOTE [twice the exponentials]."""
    seen = _as_if.get()
    if seen is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        seen = frozenset(torch.cuda.get_device_capability(index) for index in range(count))
    return TARGET_10_3 if seen == {(10, 3)} else TARGET


@contextlib.contextmanager
def as_if_seen(*capabilities: tuple[int, int]) -> Iterator[None]:
    """Inside, this thread compiles as in a process whose GPUs have these compute capabilities."""
    before = _as_if.set(frozenset(capabilities))
    try:
        yield
    finally:
        _as_if.reset(before)


def describe_family() -> str:
    """What is accepted, for errors: "B200 or GB200 (10.0), ..."."""
    return ", ".join(
        f"{' or '.join(names)} (compute capability {major}.{minor})"
        for (major, minor), names in FAMILY.items()
    )
