"""Golden cases of instructions that exchange data within a warp (PTX ISA 9.7.9.6, 9.7.13)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import inputs as make
from ..cases import HEADER, KERNEL, Case
from ..ptx_text import elementwise

_WARPS = 16
_COUNT = 32 * _WARPS


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _shuffles()
    yield from _votes()
    yield from _matches()
    yield from _reductions()
    yield from _matrices()


def _uniform(values: list[int]) -> np.ndarray:
    """One value per warp, repeated over its lanes: uint32 (_COUNT,)."""
    rows = [values[warp % len(values)] for warp in range(_WARPS)]
    return np.repeat(np.array(rows, np.uint32), 32)


def _shuffles() -> Iterator[Case]:
    value = make.scrambled(200, _COUNT).astype(np.uint32)
    lanes = make.integers(32, 201, _COUNT)
    uniform = _uniform([0, 1, 2, 4, 8, 16, 31, 5, 17, 32, 33, 63])
    # c: segment mask in bits 8-12, clamp in bits 0-4; the last ones are unusual.
    clamps = _uniform(
        [
            0x1F,
            0x0,
            0x101F,
            0x1000,
            0x181F,
            0x1C03,
            0x1E1F,
            0x1800,
            0x0F,
            0x1F1F,
            0x10F,
            0x1400,
            0xFFFFFFFF,
        ]
    )
    for mode in ("up", "down", "bfly", "idx"):
        for name, b in (("uniform", uniform), ("lane", lanes)):
            yield elementwise(
                "warp", f"shfl.sync.{mode}.b32 %d0|%d1, %a, %b, %c, 0xffffffff", [value, b, clamps],
                (32, 1), name=f"shfl.sync.{mode}.b32 {name}")  # fmt: skip
        # Segments of 16 lanes: what is read from a lane that does not take part is undefined.
        segment = _uniform([0x1000 if mode == "up" else 0x101F])
        yield elementwise(
            "warp", _halves(f"shfl.sync.{mode}.b32 %d0|%d1, %a, %b, %c, MASK"),
            [value, uniform & np.uint32(15), segment], (32, 1), name=f"shfl.sync.{mode} halves",
        )  # fmt: skip


def _halves(text: str) -> str:
    """`text` executed by lanes 0-15 and by lanes 16-31 apart, each with its own MASK."""
    return (
        "{ .reg .pred %high; .reg .b32 %lane; mov.u32 %lane, %laneid;\n"
        "setp.ge.u32 %high, %lane, 16;\n@%high bra HIGH;\n"
        f"{text.replace('MASK', '0x0000ffff')};\nbra DONE;\nHIGH:\n"
        f"{text.replace('MASK', '0xffff0000')};\nDONE:\nbar.warp.sync 0xffffffff;\n}}"
    )


def _predicates() -> np.ndarray:
    """uint8 (_COUNT,): warps with no, all, one, half and random lanes set."""
    bits = [0, 0xFFFFFFFF, 1, 1 << 31, 0xFFFF, 0xFFFF0000, 0x55555555, 0xFFFFFFFE]
    bits += [int(v) for v in make.scrambled(210, _WARPS - len(bits)) & np.uint64(0xFFFFFFFF)]
    return np.array([word >> lane & 1 for word in bits for lane in range(32)], np.uint8)


def _votes() -> Iterator[Case]:
    condition = _predicates()
    for mode in ("all", "any", "uni"):
        text = f"vote.sync.{mode}.pred %d, %a, MASK"
        yield elementwise("warp", text.replace("MASK", "0xffffffff"), [condition], (1,))
        yield elementwise("warp", _halves(text), [condition], (1,), name=f"vote.{mode} halves")
    text = "vote.sync.ballot.b32 %d, %a, MASK"
    yield elementwise("warp", text.replace("MASK", "0xffffffff"), [condition])
    yield elementwise("warp", _halves(text), [condition], name="vote.ballot halves")
    text = "elect.sync %d0|%d1, MASK"
    words = [make.integers(32, 211, _COUNT)]
    yield elementwise("warp", text.replace("MASK", "0xffffffff"), words, (32, 1))
    yield elementwise("warp", _halves(text), words, (32, 1), name="elect halves")


def _matches() -> Iterator[Case]:
    values = (make.scrambled(220, _COUNT) % np.uint64(5)).astype(np.uint32)
    values[:64] = 7
    wide = values.astype(np.uint64) << np.uint64(30)
    for bits, source in ((32, values), (64, wide)):
        yield elementwise("warp", f"match.any.sync.b{bits} %d, %a, 0xffffffff", [source])
        yield elementwise(
            "warp", f"match.all.sync.b{bits} %d0|%d1, %a, 0xffffffff", [source], (32, 1)
        )
        yield elementwise(
            "warp",
            _halves(f"match.any.sync.b{bits} %d, %a, MASK"),
            [source],
            name=f"match.any.b{bits} halves",
        )


def _reductions() -> Iterator[Case]:
    values = [make.integers(32, 230, _COUNT)]
    forms = [f"{name}.{sign}32" for name in ("add", "min", "max") for sign in "us"]
    for form in (*forms, "and.b32", "or.b32", "xor.b32"):
        text = f"redux.sync.{form} %d, %a, MASK"
        yield elementwise("warp", text.replace("MASK", "0xffffffff"), values)
        yield elementwise("warp", _halves(text), values, name=f"redux.{form} halves")


# ldmatrix and stmatrix: lane i holds the address of row i; the rows lie in shuffled order.

_ROWS = np.array([int(v) for v in np.argsort(make.scrambled(240, 32), kind="stable")], np.uint32)


def _matrix_ptx(text: str, count: int, store: bool) -> str:
    """One warp: p0 holds 256 words for shared memory, p1 the lanes' row numbers, p2 the result.

    A load stores its `count` registers, a store stores all of shared memory.
    """
    registers = ", ".join(f"%m{i}" for i in range(count))
    vector = f"{{{registers}}}"
    begin = (
        f"{HEADER}.visible .entry {KERNEL}(.param .u64 p0, .param .u64 p1, .param .u64 p2)\n{{\n"
        ".shared .align 128 .b8 tile[1024];\n"
        ".reg .b32 %r<8>, %m<4>;\n.reg .b64 %rd<8>;\n.reg .pred %more;\n"
        "ld.param.u64 %rd1, [p0];\nld.param.u64 %rd2, [p1];\nld.param.u64 %rd3, [p2];\n"
        "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd4, %r1, 4;\nadd.u64 %rd2, %rd2, %rd4;\n"
        "add.u64 %rd3, %rd3, %rd4;\nadd.u64 %rd1, %rd1, %rd4;\nmov.u32 %r2, tile;\n"
    )
    lines = []
    if store:
        lines += [f"ld.global.u32 %m{i}, [%rd1+{128 * i}];" for i in range(count)]
    else:
        lines += [
            f"ld.global.u32 %r3, [%rd1+{128 * i}];\nshl.b32 %r4, %r1, 2;\n"
            f"add.u32 %r4, %r4, %r2;\nst.shared.u32 [%r4+{128 * i}], %r3;"
            for i in range(8)
        ]
    if store:
        lines += ["shl.b32 %r4, %r1, 2;\nadd.u32 %r4, %r4, %r2;\nmov.u32 %r3, 0xeeeeeeee;"]
        lines += [f"st.shared.u32 [%r4+{128 * i}], %r3;" for i in range(8)]
    lines.append("bar.sync 0;\nld.global.u32 %r5, [%rd2];\nmad.lo.u32 %r5, %r5, 32, %r2;")
    if store:
        lines.append(f"{text} [%r5], {vector};\nbar.sync 0;")
        lines += [
            f"ld.shared.u32 %r3, [%r4+{128 * i}];\nst.global.u32 [%rd3+{128 * i}], %r3;"
            for i in range(8)
        ]
    else:
        lines.append(f"{text} {vector}, [%r5];")
        lines += [f"st.global.u32 [%rd3+{128 * i}], %m{i};" for i in range(count)]
    return begin + "\n".join(lines) + "\nret;\n}\n"


def _matrices() -> Iterator[Case]:
    words = make.scrambled(241, 256).astype(np.uint32)
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            for name in ("ldmatrix", "stmatrix"):
                text = f"{name}.sync.aligned.m8n8.x{count}{trans}.shared.b16"
                size = 256 if name == "stmatrix" else 32 * count
                yield Case(
                    f"matrix/{text}",
                    "matrix",
                    _matrix_ptx(text, count, name == "stmatrix"),
                    (words, _ROWS),
                    (np.zeros(size, np.uint32),),
                    block=32,
                )
