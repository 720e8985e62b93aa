"""Golden cases of cvt: every form that the simulator translates and sm_90a has (9.7.9.22)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import inputs as make
from ..cases import Case
from ..ptx_text import elementwise

_COUNT = 512
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_TO_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _from_float32()
    yield from _between_floats()
    yield from _float_to_integer()
    yield from _integer_to_float()
    yield from _integer_to_integer()


def _case(text: str, inputs: list[np.ndarray], width: int = 32, floats: str = "") -> Case:
    sources = ", ".join(f"%{name}" for name, _ in zip("ab", inputs))
    return elementwise("convert", f"{text} %d, {sources}", inputs, (width,), floats=floats)


def _near_ties() -> np.ndarray:
    """float32 patterns at and next to the ties of bf16, f16 and tf32, of all magnitudes."""
    values = make.floats(110, _COUNT)
    low = make.scrambled(111, _COUNT)
    tie = np.array([1 << 15, 1 << 12, 1 << 12 | 1 << 13, 1 << 16], np.uint32)
    bits = tie[(low % np.uint64(4)).astype(np.intp)]
    keep = ~(bits * np.uint32(2) - np.uint32(1))
    offset = (low >> np.uint64(8)) % np.uint64(3)
    return (values & keep | bits) + offset.astype(np.uint32) - np.uint32(1)


def _from_float32() -> Iterator[Case]:
    """Half precisions, packed pairs and tf32, with their modifiers; NaN results are canonical."""
    first = np.concatenate((make.SPECIAL_F32, make.floats(100, _COUNT), _near_ties()))
    second = first[::-1].copy()
    for rounding in ("rn", "rz"):
        for rest in ("", ".relu", ".satfinite", ".relu.satfinite"):
            for kind in ("f16", "bf16"):
                yield _case(f"cvt.{rounding}{rest}.{kind}.f32", [first], 16)
                yield _case(f"cvt.{rounding}{rest}.{kind}x2.f32", [first, second])
        for rest in ("", ".relu"):
            yield _case(f"cvt.{rounding}{rest}.tf32.f32", [first])
    yield _case("cvt.rna.tf32.f32", [first])
    for kind in ("f16",):
        yield _case(f"cvt.rn.sat.{kind}.f32", [first], 16)
        yield _case(f"cvt.rz.ftz.{kind}.f32", [first], 16)
        yield _case(f"cvt.rn.ftz.{kind}.f32", [first], 16)


def _between_floats() -> Iterator[Case]:
    single = np.concatenate((make.SPECIAL_F32, make.floats(101, _COUNT)))
    double = make.doubles(102, _COUNT)
    every = make.all_halves()[::5]
    for rest in ("", ".sat", ".ftz", ".ftz.sat"):
        yield _case(f"cvt{rest}.f32.f16", [every], 32, "f32")
    yield _case("cvt.f32.bf16", [every], 32, "f32")
    yield _case("cvt.f64.f16", [every], 64, "f64")
    for rest in ("", ".ftz"):
        yield _case(f"cvt{rest}.f64.f32", [single], 64, "f64")
    for rest in (".sat", ".ftz.sat"):
        yield _case(f"cvt{rest}.f32.f32", [single], 32, "f32")
    for rounding in ("rn", "rz", "rm", "rp"):
        for rest in ("", ".ftz", ".sat"):
            yield _case(f"cvt.{rounding}{rest}.f32.f64", [double], 32, "f32")
    for rounding in ("rn", "rz"):
        yield _case(f"cvt.{rounding}.f16.f64", [double], 16, "f16")
    for rounding in _TO_INTEGRAL:
        for rest in ("", ".ftz", ".sat"):
            yield _case(f"cvt.{rounding}{rest}.f32.f32", [single], 32, "f32")
        yield _case(f"cvt.{rounding}.f16.f16", [every], 16, "f16")
        yield _case(f"cvt.{rounding}.f64.f64", [double], 64, "f64")


def _spread(kind: str) -> np.ndarray:
    """Patterns of a float type around integers, halves and the limits of the integer types."""
    steps = np.arange(512, dtype=np.float64)
    limits = 2.0 ** np.array([7, 8, 15, 16, 31, 32, 63, 64])
    values = np.concatenate(
        (
            steps / 2 - 128,
            steps / 4 - 64,
            -limits,
            limits,
            limits - 0.5,
            limits * (1 - 2.0**-23),
            -limits * (1 + 2.0**-22),
            limits - 1,
        )
    )
    if kind == "f64":
        return np.concatenate((values.view(np.uint64), make.doubles(120, _COUNT)))
    with np.errstate(over="ignore"):
        if kind == "f16":
            return np.concatenate(
                (values.astype(np.float16).view(np.uint16), make.halves(kind, 121, _COUNT))
            )
        single = values.astype(np.float32).view(np.uint32)
    if kind == "bf16":
        return np.concatenate(
            ((single >> np.uint32(16)).astype(np.uint16), make.halves(kind, 121, _COUNT))
        )
    return np.concatenate((single, make.SPECIAL_F32, make.floats(122, _COUNT)))


def _float_to_integer() -> Iterator[Case]:
    for source in ("f32", "f16", "bf16", "f64"):
        values = _spread(source)
        for to in _INTEGERS:
            if source == "bf16" and to[1:] == "8":
                continue  # not in the ISA
            width = 32 if to[1:] == "8" else int(to[1:])
            for rounding in _TO_INTEGRAL:
                yield _case(f"cvt.{rounding}.{to}.{source}", [values], width)
            if source == "f32":
                yield _case(f"cvt.rpi.ftz.{to}.f32", [values], width)


def _integer_source(kind: str) -> np.ndarray:
    return make.integers(int(kind[1:]), 130, _COUNT)


def _integer_to_float() -> Iterator[Case]:
    for source in _INTEGERS:
        values = [_integer_source(source)]
        wide = source[1:] == "64"
        for rounding in ("rn",) if wide else ("rn", "rz", "rm", "rp"):
            yield _case(f"cvt.{rounding}.f32.{source}", values)
        yield _case(f"cvt.rn.f64.{source}", values, 64)
        if not wide:
            for rounding in ("rn", "rz"):
                yield _case(f"cvt.{rounding}.f16.{source}", values, 16)
                if source[1:] != "8":
                    yield _case(f"cvt.{rounding}.bf16.{source}", values, 16)
            yield _case(f"cvt.rn.sat.f32.{source}", values)


def _holds(to: str, source: str) -> bool:
    """Return True if every value of an integer type is one of another; .sat is refused then."""
    bits, source_bits = int(to[1:]), int(source[1:])
    if to[0] == source[0]:
        return bits >= source_bits
    return to[0] == "s" and bits > source_bits


def _integer_to_integer() -> Iterator[Case]:
    for source in _INTEGERS:
        values = [_integer_source(source)]
        for to in _INTEGERS:
            bits = int(to[1:])
            width = 32 if bits == 8 else bits
            yield _case(f"cvt.{to}.{source}", values, width)
            if not _holds(to, source):
                yield _case(f"cvt.sat.{to}.{source}", values, width)
    for to in ("u16", "s16"):
        yield elementwise(
            "convert",
            f"cvt.{to}.u32 %d, %a",
            [_integer_source("u32")],
            (32,),
            name=f"cvt.{to}.u32 into 32 bits",
        )
