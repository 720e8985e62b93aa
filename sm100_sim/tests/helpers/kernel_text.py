"""Runs kernels given as PTX text on the whole machine.

    report = run_kernel_text(body, arrays=[out], grid=(4, 1, 1), cluster=(2, 1, 1))

The kernel's parameters are the arrays' addresses, `p0`, `p1`, ... (.u64); its dynamic shared memory
is the symbol `smem`.
"""

from __future__ import annotations

import numpy as np

from sm100_sim import LaunchConfig
from sm100_sim.launcher import Options, parameter_buffer, parsed_kernel, run_kernel
from sm100_sim.report import Report

REGISTERS = ".reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .b128 %q<4>;\n"


def kernel_text(body: str, arrays: int, target: str = "sm_100a") -> str:
    """A module whose one kernel `test` has `body` between its register declarations and ret."""
    params = ", ".join(f".param .u64 p{i}" for i in range(arrays))
    loads = "".join(f"ld.param.u64 %rd{8 + i}, [p{i}];\n" for i in range(arrays))
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n"
        ".extern .shared .align 1024 .b8 smem[];\n"
        f".visible .entry test({params})\n{{\n{REGISTERS}{loads}{body}\nret;\n}}\n"
    )


def run_kernel_text(
    body: str,
    arrays: list[np.ndarray] | tuple = (),
    *,
    grid=(1, 1, 1),
    block=(32, 1, 1),
    cluster=(1, 1, 1),
    dynamic_smem: int = 4096,
    registers: int | None = None,
    explicit_cluster: bool = False,
    **options,
) -> Report:
    """Launch `body`; parameter i is the address of arrays[i], already loaded into %rd(8 + i).

    registers: a thread, at launch; None: as many as fit. explicit_cluster: also of one CTA.
    """
    config = LaunchConfig(
        "test",
        grid,
        block,
        cluster,
        dynamic_smem,
        (),
        ptx=kernel_text(body, len(arrays)),
        registers=registers,
        explicit_cluster=explicit_cluster,
    )
    return run_configured(config, arrays, **options)


def run_configured(config: LaunchConfig, arrays: list[np.ndarray] | tuple, **options) -> Report:
    """Launch the kernel of `config.ptx`; its parameters are the arrays' addresses."""
    pointers = [array.__array_interface__["data"][0] for array in arrays]
    kernel = parsed_kernel(config.ptx, config.kernel_name)
    parameters = parameter_buffer(kernel, [np.uint64(p).tobytes() for p in pointers])
    ranges = [
        (pointer, pointer + array.nbytes, f"p{i}")
        for i, (pointer, array) in enumerate(zip(pointers, arrays, strict=True))
    ]
    return run_kernel(config, parameters, ranges, Options(**options))
