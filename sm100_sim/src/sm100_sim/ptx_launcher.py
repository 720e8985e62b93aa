"""`launch_ptx`: run a kernel of a PTX module, without a compiler or host code around it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import LaunchError, in_plain
from .host.arguments import tensor_ranges
from .launcher import Options, options_from, parsed_kernel, run_host_code
from .ptx.parser import Param
from .report import Report
from .settings import read_settings
from .state.launch import LaunchConfig
from .state.tensormap import TensorMap, encode
from .words import shown

Extent = int | tuple[int, ...]


@in_plain
def launch_ptx(
    ptx: str,
    kernel: str,
    arguments: Sequence[Any],
    *,
    grid: Extent = 1,
    block: Extent,
    cluster: Extent = 1,
    dynamic_smem: int = 0,
    options: Options | None = None,
) -> Report:
    """Run the kernel `kernel` of a PTX module in the simulator.

    ptx: the module's text, for sm_90a or any target of the sm_100 and sm_103 family.
    arguments: one for each parameter. An array (numpy, or a CPU tensor of PyTorch or CuTe DSL) is
        passed as its address, and read and written in place; the kernel may touch these arrays and
        no other memory. A numpy scalar or bytes (a TMA descriptor, a struct) are passed as they
        are, an int in the parameter's size, a float as float32 or float64 by that size.
    grid, cluster: CTAs; block: threads; each a number or up to three, x first.
    dynamic_smem: bytes of dynamic shared memory of a CTA. What a host has to request first, such
        as more than 48 KiB or a cluster of more than 8 CTAs, counts as requested.
    options: see `Options`; None takes the SM100_SIM_* variables (`settings`).

    Without machine code, registers are the most that the kernel's directives allow, and setmaxnreg
    has an effect where ptxas would keep it: with .maxnreg or .minnctapersm.

    Returns the report of the launch. Raises PtxSyntaxError (a ValueError) for text that is no PTX,
    LaunchError for a kernel, arguments or a shape that the module does not have, TypeError for an
    argument of another kind, and another SimulationError for whatever the kernel does wrong.
    """
    settings = read_settings()
    parsed = parsed_kernel(ptx, kernel)
    if len(arguments) != len(parsed.params):
        raise LaunchError(
            f"{len(arguments)} arguments given, {kernel} has {len(parsed.params)} parameters: "
            f"{', '.join(param.name for param in parsed.params) or 'none'}"
        )
    values = [
        ctypes.create_string_buffer(_bytes(value, param), param.size)
        for value, param in zip(arguments, parsed.params, strict=True)
    ]
    config = LaunchConfig(
        kernel, _extent("grid", grid), _extent("block", block), _extent("cluster", cluster),
        dynamic_smem, tuple(map(ctypes.addressof, values)), ptx=ptx,
        moves_registers=parsed.fixes_registers,
    )  # fmt: skip
    arrays = [getattr(v, "mapped", v) for v in arguments if not isinstance(v, np.generic)]
    (report,) = run_host_code(
        lambda on_launch: on_launch(config),
        tensor_ranges(arrays),
        options_from(settings) if options is None else options,
        settings.report,
    )
    return report


#: Type of an array -> that of its descriptor.
_ELEMENTS = {
    "uint8": "u8", "int8": "u8", "uint16": "u16", "int16": "u16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "float32": "f32", "float64": "f64",
    "bfloat16": "bf16",
}  # fmt: skip


class _Descriptor(bytes):
    """The bytes of a TMA descriptor. mapped: the array that it describes."""

    mapped: Any


def tensor_map(
    array: Any, box: Sequence[int], *, swizzle: int = 0, dtype: str | None = None
) -> bytes:
    """Return the TMA descriptor (CUtensorMap) of a contiguous array, an argument of `launch_ptx`.

    The kernel may then touch the array. box: elements of a tile, in the order of the array's shape.
    swizzle: its span in bytes, 0, 32, 64 or 128. dtype: the descriptor's element type ("bf16"),
    where the array's own does not say it. Raises TensorMapError (a SimulationError) for what
    `cuTensorMapEncodeTiled` does not accept, and LaunchError for an array that is not contiguous or
    whose type has no descriptor.
    """
    name = str(array.dtype).removeprefix("torch.")
    shape, size = tuple(array.shape), _item_bytes(array)
    ((start, end, _),) = tensor_ranges([array])
    if end - start != size * math.prod(shape):
        raise LaunchError(f"an array of shape {shape} for a tensor map is not contiguous")
    if dtype is None and name not in _ELEMENTS:
        raise LaunchError(f"type {name} has no TMA descriptor; accepted: {', '.join(_ELEMENTS)}")
    strides = [size]
    for extent in reversed(shape):
        strides.append(strides[-1] * extent)
    ones = (1,) * len(shape)
    described = TensorMap(
        start, dtype or _ELEMENTS[name], shape[::-1], tuple(strides[1:-1]), tuple(box)[::-1], ones,
        swizzle, l2_promotion=128, version=0,
    )  # fmt: skip
    made = _Descriptor(encode(described))
    made.mapped = array
    return made


def _item_bytes(array: Any) -> int:
    return array.itemsize if hasattr(array, "itemsize") else array.element_size()


def _extent(name: str, value: Extent) -> tuple[int, int, int]:
    sizes = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise LaunchError(
            f"{name} is {shown(value)}; accepted: one to three whole numbers from 1 on"
        )
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _bytes(value: Any, param: Param) -> bytes:
    """An argument as the bytes of its parameter."""
    if isinstance(value, np.generic):
        found = value.tobytes()
    elif isinstance(value, bytes):
        found = value
    elif isinstance(value, int):
        try:
            return int(value).to_bytes(param.size, "little", signed=value < 0)
        except OverflowError as error:
            raise LaunchError(
                f"{value} does not fit parameter {param.name} of {param.size} bytes"
            ) from error
    elif isinstance(value, float) and param.size in (4, 8):
        found = np.dtype(f"f{param.size}").type(value).tobytes()
    elif hasattr(value, "__array_interface__"):
        found = value.__array_interface__["data"][0].to_bytes(8, "little")
    elif hasattr(value, "data_ptr"):
        pointer = value.data_ptr
        found = int(pointer() if callable(pointer) else pointer).to_bytes(8, "little")
    else:
        raise TypeError(
            f"parameter {param.name} got a {type(value).__name__}; accepted: arrays, numpy "
            "scalars, int, float (of 4 or 8 bytes) and bytes"
        )
    if len(found) != param.size:
        raise LaunchError(
            f"parameter {param.name} has {param.size} bytes; {type(value).__name__} has "
            f"{len(found)}"
        )
    return found
