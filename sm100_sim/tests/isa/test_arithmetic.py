"""Inline instructions that no golden vector has, against independent formulas, on random and
special values. What an H200 has recorded of others is in tests/tools/test_golden.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import compile_body, run_warp
from single_instructions import evaluate, float_words, signed, words

from sm100_sim.errors import UnknownInstruction


def check_integers(
    instruction: str, widths: list[int], function, result: int = 32, seed: int = 1
) -> None:
    """``function`` maps Python ints (register patterns) to the result, taken modulo its width."""
    sources = [words(width, seed + n) for n, width in enumerate(widths)]
    got = evaluate(instruction, sources, widths, result)
    for row, value in enumerate(got):
        arguments = [int(source[row]) for source in sources]
        want = function(*arguments) & ((1 << result) - 1)
        assert int(value) == want, (instruction, [hex(a) for a in arguments], hex(value), hex(want))


def test_selections():
    check_integers("selp.b32 %d, %s0, %s1, %s2", [32, 32, 1], lambda a, b, p: a if p & 1 else b)
    check_integers(
        "selp.b64 %d, %s0, %s1, !%s2", [64, 64, 1], lambda a, b, p: b if p & 1 else a, 64
    )
    check_integers(
        "slct.b32.s32 %d, %s0, %s1, %s2", [32] * 3, lambda a, b, c: a if signed(c, 32) >= 0 else b
    )
    check_integers(
        "set.gt.u32.s32 %d, %s0, %s1",
        [32] * 2,
        lambda a, b: -1 if signed(a, 32) > signed(b, 32) else 0,
    )


def test_packing_and_unpacking():
    check_integers("mov.b64 %d, {%s0, %s1}", [32, 32], lambda a, b: b << 32 | a, 64)
    check_integers("mov.b32 %d, {%s0, %s1}", [16, 16], lambda a, b: b << 16 | a)
    check_integers(".reg .b32 %x;\nmov.b64 {%x, %d}, %s0", [64], lambda a: a >> 32)
    check_integers("mov.b64 {%d, _}, %s0", [64], lambda a: a)
    check_integers(".reg .b16 %x;\nmov.b32 {%x, %d}, %s0", [32], lambda a: a >> 16, 16)
    check_integers(
        ".reg .b128 %q;\nmov.b128 %q, {%s0, %s1};\nmov.b128 {_, %d}, %q",
        [64, 64],
        lambda a, b: b,
        64,
    )
    check_integers(
        "mov.b64 %d, {%s0, %s1, %s2, %s3}",
        [16] * 4,
        lambda a, b, c, d: a | b << 16 | c << 32 | d << 48,
        64,
    )


def test_guard_keeps_the_old_value():
    check_integers(
        "mov.b32 %d, %s1;\n@%s2 add.u32 %d, %s0, 1",
        [32, 32, 1],
        lambda a, b, p: a + 1 if p & 1 else b,
    )
    check_integers(
        "mov.b64 %d, {%s0, %s1};\n@!%s2 mov.b64 %d, {%s1, %s0}",
        [32, 32, 1],
        lambda a, b, p: b << 32 | a if p & 1 else a << 32 | b,
        64,
    )


def as_float(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.uint32).view(np.float32)


def same_float(got: np.ndarray, want: np.ndarray) -> None:
    """Bitwise equality, all NaNs alike."""
    got, want = np.asarray(got, np.uint32), np.asarray(want, np.float32).view(np.uint32)
    nan = np.isnan(as_float(got)) & np.isnan(as_float(want))
    wrong = np.flatnonzero((got != want) & ~nan)
    assert not wrong.size, (wrong[0], hex(got[wrong[0]]), hex(want[wrong[0]]))


def flushed(values: np.ndarray) -> np.ndarray:
    values = np.array(values, np.float32)
    small = np.abs(values) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), values), values).astype(np.float32)


@pytest.mark.parametrize(
    "operation,mode",
    [("add", "rn"), ("add", "rm"), ("mul", "rn"), ("fma", "rn"), ("sub", "rn"), ("fma", "rz")],
)
def test_f32x2_does_each_half_like_f32(operation, mode):
    count = 3 if operation == "fma" else 2
    halves = [[float_words(50 + 2 * n), float_words(51 + 2 * n)] for n in range(count)]
    packed = [
        low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32) for low, high in halves
    ]
    operands = ", ".join(f"%s{n}" for n in range(count))
    for ftz in ("", ".ftz"):
        got = evaluate(f"{operation}.{mode}{ftz}.f32x2 %d, {operands}", packed, [64] * count, 64)
        for half in (0, 1):
            single = evaluate(
                f"{operation}.{mode}{ftz}.f32 %d, {operands}",
                [pair[half] for pair in halves],
                [32] * count,
            )
            part = (got >> np.uint64(32 * half)).astype(np.uint32)
            same_float(part, as_float(single))


def _extreme(values, larger: bool, keep_nan: bool):
    """PTX min or max of Python float32 values."""
    numbers = [v for v in values if not np.isnan(v)]
    if not numbers or keep_nan and len(numbers) < len(values):
        return np.float32(np.nan)
    return sorted(numbers, key=lambda v: (v, not np.signbit(v)))[-1 if larger else 0]


@pytest.mark.parametrize("count", [2, 3])
def test_min_max(count):
    sources = [float_words(80 + n) for n in range(count)]
    operands = ", ".join(f"%s{n}" for n in range(count))
    rows = list(zip(*(as_float(s) for s in sources), strict=True))
    for name in ("min", "max"):
        for modifier in ("", ".NaN"):
            got = evaluate(f"{name}{modifier}.f32 %d, {operands}", sources, [32] * count)
            same_float(got, [_extreme(row, name == "max", bool(modifier)) for row in rows])
    got = evaluate(f"max.ftz.f32 %d, {operands}", sources, [32] * count)
    same_float(got, [_extreme(flushed(np.array(row)), True, False) for row in rows])
    assert (got[np.isnan(as_float(got))] == 0x7FFFFFFF).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_factors_of_a_float_sum(kind):
    """fma.f32.bf16 and its like: every product and sum here is exact in float64, then rounded."""
    a, b, c = (np.random.default_rng(n).normal(size=64).astype(np.float32) for n in range(3))
    a, b = (v.astype(np.float16).astype(np.float32) for v in (a, b))
    if kind == "bf16":
        a, b = (as_float(v.view(np.uint32) & 0xFFFF0000) for v in (a, b))
    halves = [
        v.view(np.uint32) >> 16 if kind == "bf16" else v.astype(np.float16).view(np.uint16)
        for v in (a, b)
    ]
    halves = [v.astype(np.uint32) for v in halves]
    floats = c.view(np.uint32)
    got = evaluate(f"fma.rn.f32.{kind} %d, %s0, %s1, %s2", [*halves, floats], [16, 16, 32])
    same_float(got, (a.astype(np.float64) * b + c).astype(np.float32))
    got = evaluate(f"add.rn.f32.{kind} %d, %s0, %s1", [halves[0], floats], [16, 32])
    same_float(got, (a.astype(np.float64) + c).astype(np.float32))


# Address instructions.


def test_shared_addresses_carry_the_rank_and_survive_generic_windows():
    body = """
    .reg .b32 %s, %m, %c; .reg .b64 %l, %g, %b; .reg .pred %p, %q;
    mov.b32 %s, buffer;
    cvt.u64.u32 %l, %s;
    cvta.shared.u64 %g, %l;
    cvta.to.shared::cluster.u64 %b, %g;
    mapa.shared::cluster.u32 %m, %s, 3;
    isspacep.shared %p, %g;
    isspacep.global %q, %g;
    """
    run = run_warp(
        body,
        {},
        ["%s", "%g", "%b", "%m", "%p", "%q"],
        head=".shared .align 16 .b8 buffer[64];",
        specials={"%cluster_ctarank": 1},
    )
    assert set(run["%s"]) == {0x01000400} and set(run["%m"]) == {0x03000400}
    assert set(run["%b"]) == {0x01000400} and run["%g"][0] >> 56 == 0x7F
    assert run["%p"] == 0xFFFFFFFF and run["%q"] == 0


def test_special_registers():
    body = (
        ".reg .b32 %x, %y, %l, %c; mov.u32 %x, %tid.x; mov.u32 %y, %tid.y;"
        "mov.u32 %l, %laneid; mov.u32 %c, %ctaid.z;"
    )
    run = run_warp(
        body,
        {},
        ["%x", "%y", "%l", "%c"],
        index=1,
        specials={"%ntid.x": 24, "%ntid.y": 4, "%ctaid.z": 7},
    )
    thread = 32 + np.arange(32)
    assert (run["%x"] == thread % 24).all() and (run["%y"] == thread // 24).all()
    assert (run["%l"] == np.arange(32)).all() and set(run["%c"]) == {7}


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.b32 %d, %s0",
        "add.rx.f32 %d, %s0, %s0",
        "shl.u32 %d, %s0, 1",
        "ld.shared.v3.b32 %d, [%s0]",
        "mul.s32 %d, %s0, %s0",
        "cvt.f32.s64.rn %d, %s0",
    ],
)
def test_unknown_instructions_are_named(text):
    with pytest.raises(UnknownInstruction) as caught:
        compile_body(f".reg .b32 %d, %s0;\n{text};")
    assert text in str(caught.value)
