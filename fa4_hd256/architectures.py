"""The architectures that the operator runs on: one row each, beside one folder of `kernels`.

A row says what of the GPUs must be known before any kernel is; what the kernels are is said by
`kernels/<folder>/architecture.py` (`kernels.kernel_set`).  Nothing else names an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Architecture:
    """One architecture.

    name: as FA4_HD256_ARCH and errors have it.  folder: of its kernels.  targets: all targets of
    GPUs that its binaries run on; kernels are compiled for the first.  gpus: compute capability ->
    the GPUs that have it, the first of which names its rows in tables.  Others of the same major
    number are no members, or nobody has checked the kernels' plans against them.  simulated: the
    device that the simulator passes for.  hbm_of_sm: bytes per second of HBM for an SM where the
    driver does not say; slices of a GPU have about their share.  own_targets: compute capability ->
    what kernels are compiled for where all of the process's GPUs have it, if not the first target.
    toolkits: target -> the oldest CUDA of CuTe DSL's libraries that compiles for it, if not all do.
    """

    name: str
    folder: str
    targets: tuple[str, ...]
    gpus: Mapping[tuple[int, int], tuple[str, ...]]
    simulated: str
    hbm_of_sm: float
    own_targets: Mapping[tuple[int, int], str] = field(default_factory=dict)
    toolkits: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def describe(self) -> str:
        """Name the architecture's GPUs, for errors: "B200 or GB200 (compute capability 10.0),
        ..."."""
        return ", ".join(
            f"{' or '.join(names)} (compute capability {major}.{minor})"
            for (major, minor), names in self.gpus.items()
        )


#: The first is the default for CPU tensors.
ARCHITECTURES = (
    Architecture(
        "sm_100a",
        "blackwell",
        ("sm_100f", "sm_100a", "sm_103a", "sm_103f", "sm_107a", "sm_107f"),
        # None of these GPUs has run the kernels.  Rubin gets B200's plans: it has more shared and
        # tensor memory than they use.
        {(10, 0): ("B200", "GB200"), (10, 3): ("B300", "GB300"), (10, 7): ("Rubin",)},
        # 8 TB/s for 148 to 160 SMs in B200 to GB300; Rubin has twice that.
        simulated="b200",
        hbm_of_sm=54e9,
        own_targets={(10, 3): "sm_103a", (10, 7): "sm_107a"},
        toolkits={"sm_107a": (13, 4)},
    ),
    Architecture(
        "sm_90a",
        "hopper",
        ("sm_90a",),
        {(9, 0): ("H200", "H100", "GH200")},
        # 4.8 TB/s for the 132 SMs of an H200.
        simulated="h200",
        hbm_of_sm=36e9,
    ),
)


def named(name: str) -> Architecture:
    """The row of that name. Raises ValueError for another one."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    accepted = " or ".join(architecture.name for architecture in ARCHITECTURES)
    raise ValueError(f"the architecture is {name!r}; accepted: {accepted}")
