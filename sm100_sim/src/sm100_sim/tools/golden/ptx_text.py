"""Elementwise golden kernels: thread i applies one instruction to element i of its inputs."""

from __future__ import annotations

import numpy as np

from .cases import HEADER, KERNEL, Case

#: Register type and memory type by width; predicates travel as 32-bit words 0 and 1.
_REGISTERS = {1: "pred", 16: "b16", 32: "b32", 64: "b64"}
_NAMES = "abce"
BLOCK = 128


def declare(inputs: int, outputs: int, maps: int = 0) -> str:
    """The kernel's parameter list: p0, p1, ... addresses, then t0, ... descriptors."""
    params = [f".param .u64 p{i}" for i in range(inputs + outputs)]
    params += [f".param .align 64 .b8 t{i}[128]" for i in range(maps)]
    return f".visible .entry {KERNEL}({', '.join(params)})"


def _load(name: str, index: int, width: int, memory: int) -> str:
    size = memory // 8
    where = (
        f"ld.param.u64 %rd1, [p{index}];\nmul.wide.u32 %rd2, %index, {size};\n"
        "add.u64 %rd1, %rd1, %rd2;\n"
    )
    if width == 1:
        return f"{where}ld.global.u32 %word, [%rd1];\nsetp.ne.u32 %{name}, %word, 0;\n"
    return f"{where}ld.global.b{memory} %{name}, [%rd1];\n"


def elementwise_ptx(text: str, sources: tuple[int, ...], results: tuple[int, ...]) -> str:
    """The module of an elementwise kernel.

    text: instructions on %a, %b, %c, %e (sources) and %d, or %d0, %d1, ... (results). sources,
    results: their widths in bits (1 for a predicate).
    """
    names = ["d"] if len(results) == 1 else [f"d{i}" for i in range(len(results))]
    lines = [f".reg .{_REGISTERS[w]} %{n};" for n, w in zip(_NAMES, sources)]
    lines += [f".reg .{_REGISTERS[w]} %{n};" for n, w in zip(names, results, strict=True)]
    lines.append(".reg .b32 %index, %word, %number;\n.reg .b64 %rd<4>;")
    lines.append(
        "mov.u32 %index, %ctaid.x;\nmov.u32 %word, %ntid.x;\nmov.u32 %number, %tid.x;\n"
        "mad.lo.u32 %index, %index, %word, %number;"
    )
    for i, width in enumerate(sources):
        lines.append(_load(_NAMES[i], i, width, max(width, 32) if width == 1 else width))
    lines.append(text if text.rstrip().endswith(("}", ";")) else f"{text};")
    for i, (name, width) in enumerate(zip(names, results, strict=True)):
        memory = 32 if width == 1 else width
        lines.append(
            f"ld.param.u64 %rd1, [p{len(sources) + i}];\n"
            f"mul.wide.u32 %rd2, %index, {memory // 8};\nadd.u64 %rd1, %rd1, %rd2;"
        )
        if width == 1:
            lines.append(f"selp.u32 %word, 1, 0, %{name};\nst.global.u32 [%rd1], %word;")
        else:
            lines.append(f"st.global.b{memory} [%rd1], %{name};")
    body = "\n".join(lines)
    return f"{HEADER}{declare(len(sources), len(results))}\n{{\n{body}\nret;\n}}\n"


def elementwise(
    group: str,
    text: str,
    inputs: list[np.ndarray],
    results: tuple[int, ...] = (32,),
    *,
    name: str = "",
    floats: str = "",
    approximate: bool = False,
) -> Case:
    """A case that applies `text` to each row of `inputs` (uint8 arrays stand for predicates).

    All inputs are cut to the same whole number of blocks. The name is the group and the opcode.
    """
    count = min(len(array) for array in inputs) // BLOCK * BLOCK
    widths = tuple(1 if array.dtype == np.uint8 else array.itemsize * 8 for array in inputs)
    stored = tuple(
        array[:count].astype(np.uint32) if width == 1 else array[:count]
        for array, width in zip(inputs, widths, strict=True)
    )
    kinds = {1: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}
    outputs = tuple(np.zeros(count, kinds[width]) for width in results)
    return Case(
        name=f"{group}/{name or text.split()[0]}", group=group,
        ptx=elementwise_ptx(text, widths, results), inputs=stored, outputs=outputs,
        grid=count // BLOCK, block=BLOCK, floats=floats, approximate=approximate,
    )  # fmt: skip
