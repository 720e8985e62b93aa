"""Golden cases of what random programs found (docs/golden.md).

Each shows one thing that the simulator did otherwise or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .. import inputs as make
from ..cases import HEADER, Case
from ..ptx_text import declare
from .tma import Tensor, bulk_case, store_case

_THREADS = 128


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _wrapping()
    yield from _registers()


def _wrapping() -> Iterator[Case]:
    """Reductions that count up to a bound, or down from it."""
    t = Tensor("u32", (42, 7, 9), (16, 6, 1)).describe()
    for operation in ("inc", "dec"):
        case = store_case("3d u32", t, 440, operation)
        # Bounds around the values, which are small: some wrap, others do not.
        places, tiles = case.inputs
        small = (make.scrambled(441, case.outputs[0].size) % np.uint64(7)).astype(np.uint32)
        yield replace(
            case,
            name=f"found/tensor {operation}",
            group="found",
            inputs=(places, tiles % np.uint32(6)),
            outputs=(small,),
        )
        form = f".{operation}.u32"
        case = bulk_case(
            form,
            "",
            lambda seed, count: (make.scrambled(seed, count) % np.uint64(6)).astype(np.uint32),
        )
        yield replace(case, name=f"found/bulk {operation}", group="found")


def _registers_ptx(moves: str) -> str:
    """One warpgroup, launched with 86 registers per thread; each thread then stores a mark."""
    return (
        f"{HEADER}{declare(0, 1)}\n.reqntid {_THREADS}, 1, 1\n.maxnreg 86\n{{\n"
        ".reg .b32 %r<3>;\n.reg .b64 %rd<3>;\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd0, %r0, 4;\n"
        f"ld.param.u64 %rd1, [p0];\nadd.u64 %rd1, %rd1, %rd0;\n{moves}"
        "st.global.u32 [%rd1], %r0;\nret;\n}\n"
    )


def _registers() -> Iterator[Case]:
    """setmaxnreg.dec may leave at most the kernel's own number, inc no fewer than there are."""
    for name, moves, faults in (
        ("dec below the kernel's own", (("dec", 80),), False),
        ("dec within the granule", (("dec", 88),), True),
        ("dec upwards", (("dec", 40), ("dec", 48)), True),
        ("inc downwards", (("dec", 40), ("inc", 64), ("inc", 56)), True),
    ):
        text = "".join(f"setmaxnreg.{kind}.sync.aligned.u32 {count};\n" for kind, count in moves)
        yield Case(
            f"found/{name}",
            "found",
            _registers_ptx(text),
            (),
            (np.zeros(_THREADS, np.uint32),),
            faults=faults,
        )
