"""Limits of a launch: shape, registers, shared memory, parameters."""

from __future__ import annotations

import math
from typing import Any

from sm100_sim.devices import MAX_THREADS, REGISTER_FILE, SHARED_OPT_IN
from sm100_sim.errors import LaunchError
from sm100_sim.isa.sync import most_asked
from sm100_sim.state.barriers import MAX_REGISTERS, most_registers, whole_granules
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.targets import limits_of

#: Threads in z; CTAs in x, y and z (CUDA Programming Guide, "Technical Specifications per Compute
#: Capability").
MAX_BLOCK_Z = 64
MAX_GRID = 2**31 - 1, 65535, 65535
MAX_CLUSTER = 16
#: CTAs of a cluster without a function attribute.
PORTABLE_CLUSTER = 8
#: Bytes of a kernel's parameters (CUDA 12.1 and later).
MAX_PARAMETERS = 32_764


def check_launch(compiled: Any, config: LaunchConfig, threads: int, shared_bytes: int) -> None:
    """Raise LaunchError for what the hardware or the driver would refuse.

    threads: of a CTA; shared_bytes: of a CTA, static, dynamic and the system's.
    """
    kernel = compiled.kernel
    _check_shared(kernel, config, shared_bytes)
    if any(g % c for g, c in zip(config.grid, config.cluster, strict=True)):
        raise LaunchError(f"grid {config.grid} is not a multiple of cluster {config.cluster}")
    if any(size > most for size, most in zip(config.grid, MAX_GRID, strict=True)):
        raise LaunchError(
            f"grid {config.grid}; accepted are up to {MAX_GRID[0]} CTAs in x and {MAX_GRID[1]} "
            "in y and z"
        )
    if not 1 <= math.prod(config.cluster) <= MAX_CLUSTER:
        raise LaunchError(f"cluster {config.cluster}; accepted are up to {MAX_CLUSTER} CTAs")
    if math.prod(config.cluster) > PORTABLE_CLUSTER and not config.non_portable_cluster:
        raise LaunchError(
            f"cluster {config.cluster}; more than {PORTABLE_CLUSTER} CTAs need the function "
            "attribute cudaFuncAttributeNonPortableClusterSizeAllowed"
        )
    if not 1 <= threads <= MAX_THREADS or not math.prod(config.grid):
        raise LaunchError(f"grid {config.grid} of blocks {config.block} cannot be launched")
    if config.block[2] > MAX_BLOCK_Z:
        raise LaunchError(f"block {config.block}; threads in z: up to {MAX_BLOCK_Z}")
    if kernel.reqntid is not None and tuple(kernel.reqntid) != tuple(config.block):
        raise LaunchError(
            f"block {config.block} for a kernel compiled for blocks of {kernel.reqntid}"
        )
    if kernel.maxntid is not None and threads > math.prod(kernel.maxntid):
        raise LaunchError(
            f"block {config.block} for a kernel compiled for blocks of up to {kernel.maxntid}"
        )
    registers = registers_at_launch(compiled, config)
    if whole_granules(registers) > most_registers(threads):
        raise LaunchError(
            f"{threads} threads with {registers} registers each, as the kernel was compiled; an SM "
            f"has {REGISTER_FILE}"
        )
    if kernel.param_bytes > MAX_PARAMETERS:
        raise LaunchError(
            f"{kernel.param_bytes} bytes of parameters; accepted are up to {MAX_PARAMETERS}"
        )


def _check_shared(kernel: Any, config: LaunchConfig, shared_bytes: int) -> None:
    """Raise LaunchError for more shared memory than the target has, or than was allowed."""
    limits = limits_of(kernel.target)
    allowed = limits.shared_of_a_cta if config.shared_limit is None else config.shared_limit
    if config.dynamic_smem > allowed:
        raise LaunchError(
            f"{config.dynamic_smem} bytes of dynamic shared memory; the kernel may have "
            f"{allowed}: set cudaFuncAttributeMaxDynamicSharedMemorySize first"
        )
    if shared_bytes > limits.shared_of_an_sm:
        raise LaunchError(
            f"{shared_bytes} bytes of shared memory a CTA, the system's 1024 included; "
            f"the limit is {limits.shared_of_an_sm}"
        )
    own = kernel.shared_bytes + config.dynamic_smem
    if own > SHARED_OPT_IN and not config.oversized_shared:
        raise LaunchError(
            f"{own} bytes of shared memory a CTA; more than {SHARED_OPT_IN} need the shared memory "
            "mode CU_SHARED_MEMORY_MODE_ALLOW_OVERSIZED_SHARED_MEMORY, as an attribute of the "
            "function or the launch"
        )


def registers_at_launch(compiled: Any, config: LaunchConfig) -> int:
    """Registers of each thread at launch; the hardware allots whole granules of them.

    The kernel's own number where its machine code is known; else the most that its PTX lets ptxas
    give it, which is what kernels that use setmaxnreg are compiled for. That is no more than the
    largest setmaxnreg.inc requests (seen of ptxas 13.0 and on an H200).
    """
    kernel, known = compiled.kernel, config.registers
    if known is not None:
        return known
    threads = math.prod(kernel.reqntid or kernel.maxntid or config.block)
    most = min(most_registers(threads, kernel.min_ctas_per_sm), MAX_REGISTERS)
    asked = most_asked(compiled.instructions)
    return min(kernel.max_registers or most, asked or MAX_REGISTERS)
