"""The family of GPUs that the kernels run on, and the one target they are compiled for.

NOTE [one binary for the family].  ptxas makes the same instructions for sm_100f as for sm_100a, one
by one (test_family compares them), and refuses on sm_100f what is not in all of the family (PTX ISA
11.1.2, .target).  A cubin of sm_100f runs on every GPU of the family (CUDA programming
guide, family-specific features), so one entry in the cache serves a process with both capabilities:
CuTe DSL loads a kernel into every GPU that the process sees.
"""

from __future__ import annotations

from fa4_hd256 import environment

__all__ = ["FAMILY", "TARGET", "TARGETS", "describe_family", "in_family"]

#: What kernels are compiled for, and all targets of GPUs that its binaries run on.
TARGET, *_ = TARGETS = environment.ARCHITECTURES

#: Compute capability -> the GPUs that have it, the first of which names its rows in the tuning
#: table.  Others of the same major number (10.7, and 10.1, which became 11.0) are no members, or
#: nobody has checked the kernels' plans against them.
FAMILY = {(10, 0): ("B200", "GB200"), (10, 3): ("B300", "GB300")}


def in_family(capability: tuple[int, int]) -> bool:
    """Whether the kernels run on GPUs of this compute capability."""
    return tuple(capability) in FAMILY


def describe_family() -> str:
    """What is accepted, for errors: "B200 or GB200 (10.0), ..."."""
    return ", ".join(
        f"{' or '.join(names)} (compute capability {major}.{minor})"
        for (major, minor), names in FAMILY.items()
    )
