"""Golden cases of atom on global and shared memory (PTX ISA 9.7.13.6): one thread per address."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import inputs as make
from ..cases import Case
from ..ptx_text import BLOCK, elementwise

_COUNT = 256
_FORMS = (
    *(f"add.{kind}" for kind in ("u32", "s32", "u64", "f32", "f64")),
    *(f"add.noftz.{kind}" for kind in ("f16", "bf16", "f16x2", "bf16x2")),
    *(f"{name}.{kind}" for name in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *(f"{name}.b{bits}" for name in ("and", "or", "xor", "exch") for bits in (32, 64)),
    *(f"cas.b{bits}" for bits in (16, 32, 64)), "inc.u32", "dec.u32",
)  # fmt: skip


def cases() -> Iterator[Case]:
    """All cases of this module: %d0 is the old value, %d1 what memory holds afterwards."""
    for form in _FORMS:
        kind = form.split(".")[-1]
        for space in ("global", "shared"):
            values = _values(form, kind)
            bits = values[0].itemsize * 8
            yield elementwise(
                "atomic", _text(f"atom.{space}.{form}", space, bits, len(values)), values,
                (bits, bits), name=f"atom.{space}.{form}", floats=kind if "f" in kind else "",
            )  # fmt: skip


def _values(form: str, kind: str) -> list[np.ndarray]:
    if "f" in kind:
        return make.operands(kind, 2, 800, _COUNT)
    bits = int(kind[1:])
    first, second = (make.integers(bits, 801 + n, _COUNT) for n in range(2))
    if form.startswith("cas"):
        # Half of the comparisons succeed.
        return [first, np.where(np.arange(_COUNT) % 2, first, second), second]
    return [first, second]


def _text(opcode: str, space: str, bits: int, sources: int) -> str:
    """Put %a into memory (global: where %d1 goes), work on it there, and read it back."""
    size = bits // 8
    if space == "global":
        place = (
            f".reg .b64 %place;\nld.param.u64 %place, [p{sources + 1}];\n"
            f"mul.wide.u32 %rd2, %index, {size};\nadd.u64 %place, %place, %rd2;\n"
        )
    else:
        place = (
            f".shared .align 8 .b8 cells[{BLOCK * size}];\n.reg .b32 %place;\n"
            "mov.u32 %word, cells;\nmov.u32 %place, %tid.x;\n"
            f"mad.lo.u32 %place, %place, {size}, %word;\n"
        )
    last = ", %c" if sources == 3 else ""
    return (
        f"{{ {place}st.{space}.b{bits} [%place], %a;\n{opcode} %d0, [%place], %b{last};\n"
        f"ld.{space}.b{bits} %d1, [%place];\n}}"
    )
