"""Golden cases of integer and floating-point instructions (PTX ISA 9.7.1 to 9.7.8)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .. import inputs as make
from ..cases import Case
from ..ptx_text import elementwise

_COUNT = 640
_ROUNDINGS = ("rn", "rz", "rm", "rp")
_COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "equ",
    "neu",
    "ltu",
    "leu",
    "gtu",
    "geu",
    "num",
    "nan",
)


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _approximations()
    yield from _float32()
    yield from _smallest()
    yield from _double()
    yield from _half()
    yield from _extremes()
    yield from _comparisons()
    yield from _integers()
    yield from _bits()
    yield from _fields()


def _ftz(text: str) -> tuple[str, str]:
    return text.replace("{ftz}", ""), text.replace("{ftz}", ".ftz")


def _approximations() -> Iterator[Case]:
    two_pi = 2 * math.pi
    ranges = {
        "ex2": (-160.0, 135.0),
        "rcp": (-100.0, 100.0),
        "rsqrt": (0.0, 100.0),
        "sqrt": (0.0, 100.0),
        "lg2": (0.25, 4.0),
        "sin": (-two_pi, two_pi),
        "cos": (-two_pi, two_pi),
    }
    for name, (low, high) in ranges.items():
        values = make.approximation_inputs(low, high)
        if name in ("sin", "cos"):
            values = np.concatenate((values, make.sweep(-100 * math.pi, 100 * math.pi, 1024)))
        for text in _ftz(f"{name}.approx{{ftz}}.f32 %d, %a"):
            yield elementwise("approximate", text, [values], floats="f32", approximate=True)
    values = make.approximation_inputs(-10.0, 10.0)
    yield elementwise(
        "approximate", "tanh.approx.f32 %d, %a", [values], floats="f32", approximate=True
    )
    halves = make.all_halves()[::8]
    halves = np.concatenate(
        (
            make.SPECIAL_F16.astype(np.uint16),
            halves,
            make.SPECIAL_BF16.astype(np.uint16),
            halves + np.uint16(5),
        )
    )
    for text in ("ex2.approx.f16", "ex2.approx.ftz.bf16", "tanh.approx.f16", "tanh.approx.bf16"):
        kind = text.split(".")[-1]
        yield elementwise(
            "approximate", f"{text} %d, %a", [halves], (16,), floats=kind, approximate=True
        )
        pairs = halves.astype(np.uint32) | halves[::-1].astype(np.uint32) << np.uint32(16)
        yield elementwise(
            "approximate", f"{text}x2 %d, %a", [pairs], floats=f"{kind}x2", approximate=True
        )
    for kind in ("approx", "full"):
        for text in _ftz(f"div.{kind}{{ftz}}.f32 %d, %a, %b"):
            yield elementwise(
                "approximate",
                text,
                make.operands("f32", 2, 5, 2048),
                floats="f32",
                approximate=True,
            )


def _float32() -> Iterator[Case]:
    one, two, three = (make.operands("f32", n, 20 + n, _COUNT) for n in (1, 2, 3))
    for rounding in _ROUNDINGS:
        for rest in ("", ".ftz", ".sat", ".ftz.sat"):
            for name in ("add", "sub", "mul"):
                yield elementwise(
                    "float32", f"{name}.{rounding}{rest}.f32 %d, %a, %b", two, floats="f32"
                )
            yield elementwise(
                "float32", f"fma.{rounding}{rest}.f32 %d, %a, %b, %c", three, floats="f32"
            )
    for text in ("add{ftz}.f32", "div.rn{ftz}.f32", "copysign.f32"):
        for form in _ftz(text) if "{" in text else (text,):
            yield elementwise("float32", f"{form} %d, %a, %b", two, floats="f32")
    for text in ("rcp.rn{ftz}.f32", "sqrt.rn{ftz}.f32", "neg{ftz}.f32", "abs{ftz}.f32"):
        for form in _ftz(text):
            yield elementwise("float32", f"{form} %d, %a", one, floats="f32")
    for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        yield elementwise("float32", f"testp.{what}.f32 %d, %a", one, (1,))


def _around_smallest(one: int, smallest: int) -> list[np.ndarray]:
    """Factors near 1 and near the smallest normal number, and signed zeros.

    Their products lie within a few units of the smallest normal number on both sides, exactly or
    only before rounding: they show when .ftz takes a result for subnormal.
    """
    number = np.arange(_COUNT, dtype=np.uint32)
    kind = np.uint32 if one > 0xFFFF else np.uint16
    sign = (number % 3 == 0).astype(np.uint32) * np.uint32(0x80000000 if one > 0xFFFF else 0x8000)
    first = (np.uint32(one) - number % 32) | sign
    second = np.uint32(smallest) + number // 32 % 20
    return [first.astype(kind), second.astype(kind), (sign * (number & 1)).astype(kind)]


def _smallest() -> Iterator[Case]:
    for kind, one, least in (("f32", 0x3F800000, 0x00800000), ("f16", 0x3C00, 0x0400)):
        values = _around_smallest(one, least)
        for rounding in _ROUNDINGS if kind == "f32" else ("rn",):
            for rest in ("", ".ftz"):
                text = f"{rounding}{rest}.{kind}"
                yield elementwise(
                    "smallest",
                    f"mul.{text} %d, %a, %b",
                    values[:2],
                    (values[0].itemsize * 8,),
                    floats=kind,
                )
                yield elementwise(
                    "smallest",
                    f"fma.{text} %d, %a, %b, %c",
                    values,
                    (values[0].itemsize * 8,),
                    floats=kind,
                )
    words = make.operands("f64", 1, 33, _COUNT)[0]
    near = (words & np.uint64((1 << 30) - 1)) + np.uint64(0x380FFFFFE0000000)
    yield elementwise("smallest", "cvt.rn.ftz.f32.f64 %d, %a", [near], floats="f32")
    halves = [
        value.astype(np.uint32) | value[::-1].astype(np.uint32) << np.uint32(16)
        for value in _around_smallest(0x3C00, 0x0400)
    ]
    yield elementwise("smallest", "mul.rn.ftz.f16x2 %d, %a, %b", halves[:2], floats="f16x2")


def _double() -> Iterator[Case]:
    one, two, three = (make.operands("f64", n, 30 + n, 512) for n in (1, 2, 3))
    for name in ("add.rn", "sub.rn", "mul.rn", "div.rn", "min", "max"):
        yield elementwise("float64", f"{name}.f64 %d, %a, %b", two, (64,), floats="f64")
    yield elementwise("float64", "fma.rn.f64 %d, %a, %b, %c", three, (64,), floats="f64")
    for name in ("rcp.rn", "sqrt.rn", "neg", "abs"):
        yield elementwise("float64", f"{name}.f64 %d, %a", one, (64,), floats="f64")


def _half() -> Iterator[Case]:
    for kind in ("f16", "bf16", "f16x2", "bf16x2"):
        width = 32 if kind.endswith("x2") else 16
        one, two, three = (make.operands(kind, n, 40 + n, _COUNT) for n in (1, 2, 3))
        rests = ("", ".sat", ".ftz", ".ftz.sat") if kind.startswith("f16") else ("",)
        for rest in rests:
            for name in ("add", "sub", "mul"):
                yield elementwise(
                    "half", f"{name}.rn{rest}.{kind} %d, %a, %b", two, (width,), floats=kind
                )
        for rest in (*rests, ".relu", *((".ftz.relu",) if len(rests) > 1 else ())):
            yield elementwise(
                "half", f"fma.rn{rest}.{kind} %d, %a, %b, %c", three, (width,), floats=kind
            )
        for name in ("neg", "abs"):
            yield elementwise("half", f"{name}.{kind} %d, %a", one, (width,), floats=kind)


def _extremes() -> Iterator[Case]:
    """min and max: NaN results are canonical, so every bit counts."""
    for kind in ("f32", "f16", "bf16", "f16x2", "bf16x2"):
        width = 32 if kind == "f32" or kind.endswith("x2") else 16
        values = make.operands(kind, 2, 50, _COUNT)
        rests = ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"]
        if kind == "f32":
            rests += [f".ftz{rest}" for rest in rests]
        for rest in rests:
            for name in ("min", "max"):
                yield elementwise("minmax", f"{name}{rest}.{kind} %d, %a, %b", values, (width,))


def _comparisons() -> Iterator[Case]:
    for kind in ("f32", "f16", "bf16", "f64"):
        values = make.operands(kind, 2, 60, 512)
        for name in _COMPARISONS:
            yield elementwise("compare", f"setp.{name}.{kind} %d, %a, %b", values, (1,))
    values = make.operands("f32", 2, 61, 512)
    for name in ("lt", "geu"):
        yield elementwise("compare", f"setp.{name}.ftz.f32 %d, %a, %b", values, (1,))
        yield elementwise("compare", f"set.{name}.u32.f32 %d, %a, %b", values)
        yield elementwise("compare", f"set.{name}.f32.f32 %d, %a, %b", values)
    third = (make.integers(32, 62, 512) & np.uint32(1)).astype(np.uint8)
    for how in ("and", "or", "xor"):
        yield elementwise(
            "compare", f"setp.lt.{how}.f32 %d0|%d1, %a, %b, %c", [*values, third], (1, 1)
        )
    for bits in (16, 32, 64):
        integers = [make.integers(bits, 63 + n, 512) for n in range(2)]
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            for sign in "us":
                yield elementwise("compare", f"setp.{name}.{sign}{bits} %d, %a, %b", integers, (1,))
        for name in ("lo", "ls", "hi", "hs"):
            yield elementwise("compare", f"setp.{name}.u{bits} %d, %a, %b", integers, (1,))
    words = [make.integers(32, 66 + n, 512) for n in range(3)]
    yield elementwise("compare", "slct.u32.s32 %d, %a, %b, %c", words)
    yield elementwise("compare", "slct.u32.f32 %d, %a, %b, %c", [*words[:2], make.floats(69, 512)])
    yield elementwise(
        "compare", "slct.ftz.u32.f32 %d, %a, %b, %c", [*words[:2], make.floats(69, 512)]
    )


def _integers() -> Iterator[Case]:
    for bits in (16, 32, 64):
        values = [make.integers(bits, 70 + n, _COUNT) for n in range(3)]
        for sign in "us":
            kind, two = f"{sign}{bits}", values[:2]
            for name in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
                yield elementwise("integer", f"{name}.{kind} %d, %a, %b", two, (bits,))
            for name in ("mad.lo", "mad.hi", "sad"):
                yield elementwise("integer", f"{name}.{kind} %d, %a, %b, %c", values, (bits,))
            if bits < 64:
                wide = [*two, make.integers(2 * bits, 74, _COUNT)]
                yield elementwise("integer", f"mul.wide.{kind} %d, %a, %b", two, (2 * bits,))
                yield elementwise("integer", f"mad.wide.{kind} %d, %a, %b, %c", wide, (2 * bits,))
        for name in ("neg", "abs"):
            yield elementwise("integer", f"{name}.s{bits} %d, %a", values[:1], (bits,))
    words = [make.integers(32, 75 + n, _COUNT) for n in range(3)]
    for name in ("add.sat", "sub.sat", "min.relu", "max.relu", "mul24.lo", "mul24.hi"):
        yield elementwise("integer", f"{name}.s32 %d, %a, %b", words[:2])
    for name in ("mul24.lo", "mul24.hi"):
        yield elementwise("integer", f"{name}.u32 %d, %a, %b", words[:2])
    for sign in "us":
        for part in ("lo", "hi"):
            yield elementwise("integer", f"mad24.{part}.{sign}32 %d, %a, %b, %c", words)
    for name in ("add", "sub"):
        text = f"{name}.cc.u32 %d0, %a, %b; {name}c.cc.u32 %d1, %c, %e; {name}c.u32 %d2, 0, 0;"
        yield elementwise(
            "integer",
            text,
            [*words, make.integers(32, 78, _COUNT)],
            (32, 32, 32),
            name=f"{name}.cc chain",
        )


def _bits() -> Iterator[Case]:
    for bits in (16, 32, 64):
        a, b = (make.integers(bits, 80 + n, _COUNT) for n in range(2))
        amounts = make.integers(32, 82, _COUNT)
        for name in ("and", "or", "xor"):
            yield elementwise("bits", f"{name}.b{bits} %d, %a, %b", [a, b], (bits,))
        for name in ("not", "cnot"):
            yield elementwise("bits", f"{name}.b{bits} %d, %a", [a], (bits,))
        yield elementwise("bits", f"shl.b{bits} %d, %a, %b", [a, amounts], (bits,))
        for kind in "bus":
            yield elementwise("bits", f"shr.{kind}{bits} %d, %a, %b", [a, amounts], (bits,))
        if bits > 16:
            for name in ("popc", "clz"):
                yield elementwise("bits", f"{name}.b{bits} %d, %a", [a])
            yield elementwise("bits", f"brev.b{bits} %d, %a", [a], (bits,))
            for name in ("bfind", "bfind.shiftamt"):
                for sign in "us":
                    yield elementwise("bits", f"{name}.{sign}{bits} %d, %a", [a])
    words = [make.integers(32, 83 + n, _COUNT) for n in range(3)]
    for table in (0x00, 0x01, 0x1B, 0x3C, 0x6A, 0x80, 0x96, 0xB8, 0xCA, 0xE8, 0xF8, 0xFE, 0xFF):
        yield elementwise(
            "bits", f"lop3.b32 %d, %a, %b, %c, {table:#x}", words, name=f"lop3.b32 {table:#x}"
        )
    for direction in "lr":
        for mode in ("clamp", "wrap"):
            yield elementwise("bits", f"shf.{direction}.{mode}.b32 %d, %a, %b, %c", words)


def _fields() -> Iterator[Case]:
    """Bit fields and byte permutations; positions and lengths also lie beyond the width."""
    for bits in (32, 64):
        a, b = (make.integers(bits, 90 + n, _COUNT) for n in range(2))
        position, length = (
            (make.scrambled(92 + n, _COUNT) % np.uint64(80)).astype(np.uint32) for n in range(2)
        )
        position[::17] = make.integers(32, 94, len(position[::17]))
        length[::19] = make.integers(32, 95, len(length[::19]))
        for sign in "us":
            yield elementwise(
                "bits", f"bfe.{sign}{bits} %d, %a, %b, %c", [a, position, length], (bits,)
            )
        yield elementwise(
            "bits", f"bfi.b{bits} %d, %a, %b, %c, %e", [a, b, position, length], (bits,)
        )
    words = [make.scrambled(96 + n, _COUNT).astype(np.uint32) for n in range(3)]
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield elementwise("bits", f"prmt.b32{mode} %d, %a, %b, %c", words)
