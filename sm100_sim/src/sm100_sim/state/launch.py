"""One kernel launch as host code requests it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaunchConfig:
    """One intercepted kernel launch.

    `grid`, `block` and `cluster` are (x, y, z) in CTAs, threads and CTAs; `dynamic_smem` is in
    bytes. `param_pointers[i]` is the host address of the bytes of kernel parameter i, valid
    only while `on_launch` runs. `attributes` maps the name of every other launch attribute
    (`host_code.ATTRIBUTE_NAMES`, or its number as text) to its first 32-bit word. `ptx` is the
    module, `cubin` its machine code, empty where the host code loads none or a compressed one;
    `registers` what a thread is launched with by that code, None where it is not known;
    `moves_registers` whether it has setmaxnreg, taken for granted where it is not known.
    `shared_limit`: bytes of dynamic shared memory that the kernel's attributes allow, None for
    what its target has; `oversized_shared`: whether the shared memory mode allows more than devices
    before compute capability 10.7 have;
    `non_portable_cluster`: whether they allow clusters of more than 8 CTAs.
    `explicit_cluster`: whether a launch attribute names the shape of clusters, be it one CTA.
    """

    kernel_name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    param_pointers: tuple[int, ...]
    attributes: dict[str, int] = field(default_factory=dict)
    stream: int = 0
    ptx: str = field(default="", repr=False)
    cubin: bytes = field(default=b"", repr=False)
    registers: int | None = None
    moves_registers: bool = True
    shared_limit: int | None = None
    oversized_shared: bool = True
    non_portable_cluster: bool = True
    explicit_cluster: bool = False
