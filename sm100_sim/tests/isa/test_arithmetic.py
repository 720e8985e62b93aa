"""Inline instructions against independent formulas, on random and special values.

References compute in Python integers.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import compile_body, run_warp
from single_instructions import both, evaluate, signed, words

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


TYPES = [(bits, name, value) for bits in (16, 32, 64) for name, value in both(bits)]
IDS = [name for _, name, _ in TYPES]


@pytest.mark.parametrize("bits,name,value", TYPES, ids=IDS)
def test_integer_arithmetic(bits, name, value):
    two, three = [bits] * 2, [bits] * 3

    def run(text, widths, function, result=bits):
        check_integers(text, widths, function, result)

    run(f"add.{name} %d, %s0, %s1", two, lambda a, b: a + b)
    run(f"sub.{name} %d, %s0, %s1", two, lambda a, b: a - b)
    run(f"mul.lo.{name} %d, %s0, %s1", two, lambda a, b: a * b)
    run(f"mul.hi.{name} %d, %s0, %s1", two, lambda a, b: value(a) * value(b) >> bits)
    run(f"mad.lo.{name} %d, %s0, %s1, %s2", three, lambda a, b, c: a * b + c)
    run(f"min.{name} %d, %s0, %s1", two, lambda a, b: min(value(a), value(b)))
    run(f"max.{name} %d, %s0, %s1", two, lambda a, b: max(value(a), value(b)))
    if bits < 64:
        run(f"mul.wide.{name} %d, %s0, %s1", two, lambda a, b: value(a) * value(b), 2 * bits)
        run(
            f"mad.wide.{name} %d, %s0, %s1, %s2",
            [bits, bits, 2 * bits],
            lambda a, b, c: value(a) * value(b) + c,
            2 * bits,
        )


@pytest.mark.parametrize("bits,name,value", TYPES, ids=IDS)
def test_division(bits, name, value):
    def quotient(a, b):
        a, b = value(a), value(b)
        if b == 0:
            return -1
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    def rest(a, b):
        # The ISA leaves both open for a division by zero; the hardware gives all ones (golden
        # vectors).
        return value(a) - quotient(a, b) * value(b) if b else -1

    check_integers(f"div.{name} %d, %s0, %s1", [bits] * 2, quotient, bits)
    check_integers(f"rem.{name} %d, %s0, %s1", [bits] * 2, rest, bits)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits):
    one, two = [bits], [bits] * 2
    check_integers(f"and.b{bits} %d, %s0, %s1", two, lambda a, b: a & b, bits)
    check_integers(f"or.b{bits} %d, %s0, %s1", two, lambda a, b: a | b, bits)
    check_integers(f"xor.b{bits} %d, %s0, %s1", two, lambda a, b: a ^ b, bits)
    check_integers(f"not.b{bits} %d, %s0", one, lambda a: ~a, bits)
    check_integers(f"neg.s{bits} %d, %s0", one, lambda a: -a, bits)
    check_integers(f"abs.s{bits} %d, %s0", one, lambda a: abs(signed(a, bits)), bits)
    check_integers(
        f"shl.b{bits} %d, %s0, %s1", [bits, 32], lambda a, n: a << n if n < bits else 0, bits
    )
    check_integers(
        f"shr.u{bits} %d, %s0, %s1", [bits, 32], lambda a, n: a >> n if n < bits else 0, bits
    )
    check_integers(
        f"shr.s{bits} %d, %s0, %s1", [bits, 32], lambda a, n: signed(a, bits) >> min(n, bits), bits
    )


def _funnel(a, b, n, left):
    value = b << 32 | a
    return value << n >> 32 if left else value >> n


def test_funnel_shifts():
    for left, letter in ((True, "l"), (False, "r")):
        check_integers(
            f"shf.{letter}.wrap.b32 %d, %s0, %s1, %s2",
            [32] * 3,
            lambda a, b, n, left=left: _funnel(a, b, n & 31, left),
        )
        check_integers(
            f"shf.{letter}.clamp.b32 %d, %s0, %s1, %s2",
            [32] * 3,
            lambda a, b, n, left=left: _funnel(a, b, min(n, 32), left),
        )


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits):
    def field(operand):
        # The ISA restricts it to 0..255; beyond, as the hardware does it (golden vectors).
        return operand & 255 if bits == 32 else min(operand, 255)

    def extract(a, position, length, is_signed):
        position, length = field(position), field(length)
        if length == 0:
            return 0
        if is_signed:
            top = min(position + length - 1, bits - 1)
            digits = [
                a >> min(position + n, top) & 1 if position + n <= top else a >> top & 1
                for n in range(bits)
            ]
            return sum(d << n for n, d in enumerate(digits))
        return a >> position & ((1 << length) - 1)

    def insert(a, b, position, length):
        position, length = field(position), field(length)
        mask = ((1 << length) - 1) << position & ((1 << bits) - 1)
        return b & ~mask | a << position & mask

    def leading(a, is_signed):
        if is_signed and a >> (bits - 1):
            a = ~a & ((1 << bits) - 1)
        return a.bit_length() - 1

    check_integers(
        f"bfe.u{bits} %d, %s0, %s1, %s2",
        [bits, 32, 32],
        lambda a, p, n: extract(a, p, n, False),
        bits,
    )
    check_integers(
        f"bfe.s{bits} %d, %s0, %s1, %s2",
        [bits, 32, 32],
        lambda a, p, n: extract(a, p, n, True),
        bits,
    )
    check_integers(f"bfi.b{bits} %d, %s0, %s1, %s2, %s3", [bits, bits, 32, 32], insert, bits)
    check_integers(f"bfind.u{bits} %d, %s0", [bits], lambda a: leading(a, False))
    check_integers(f"bfind.s{bits} %d, %s0", [bits], lambda a: leading(a, True))
    check_integers(
        f"bfind.shiftamt.u{bits} %d, %s0",
        [bits],
        lambda a: bits - 1 - leading(a, False) if a else -1,
    )
    check_integers(f"popc.b{bits} %d, %s0", [bits], lambda a: bin(a).count("1"))
    check_integers(f"clz.b{bits} %d, %s0", [bits], lambda a: bits - a.bit_length())
    check_integers(f"brev.b{bits} %d, %s0", [bits], lambda a: int(f"{a:0{bits}b}"[::-1], 2), bits)


def test_carry_chain_adds_and_subtracts_64_bits():
    for operation, sign in (("add", 1), ("sub", -1)):
        text = (
            f".reg .b32 %al, %ah, %bl, %bh, %l, %h;\nmov.b64 {{%al, %ah}}, %s0;\n"
            f"mov.b64 {{%bl, %bh}}, %s1;\n{operation}.cc.u32 %l, %al, %bl;\n"
            f"{operation}c.u32 %h, %ah, %bh;\nmov.b64 %d, {{%l, %h}}"
        )
        check_integers(text, [64, 64], lambda a, b, sign=sign: a + sign * b, 64)


def test_lop3_is_its_table():
    for table in (0x00, 0xFF, 0xF0, 0xCC, 0xAA, 0xE8, 0x96, 0x1B):

        def function(a, b, c, table=table):
            return sum(
                (table >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1) << n
                for n in range(32)
            )

        check_integers(f"lop3.b32 %d, %s0, %s1, %s2, {table:#x}", [32] * 3, function)


def test_prmt_modes():
    def pick(source, index, replicate=False):
        byte = source >> 8 * index & 255
        return (255 if byte >> 7 else 0) if replicate else byte

    def general(a, b, c):
        source = b << 32 | a
        return sum(pick(source, c >> 4 * n & 7, bool(c >> 4 * n & 8)) << 8 * n for n in range(4))

    modes = {
        "f4e": lambda n, k: (n + k) % 8,
        "b4e": lambda n, k: (n - k) % 8,
        "rc8": lambda n, k: n,
        "ecl": max,
        "ecr": min,
        "rc16": lambda n, k: 2 * (n & 1) + (k & 1),
    }
    check_integers("prmt.b32 %d, %s0, %s1, %s2", [32] * 3, general)
    for mode, index in modes.items():
        check_integers(
            f"prmt.b32.{mode} %d, %s0, %s1, %s2",
            [32] * 3,
            lambda a, b, c, index=index: sum(
                pick(b << 32 | a, index(c & 3, k)) << 8 * k for k in range(4)
            ),
        )


INTEGER_COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("bits,name,value", TYPES, ids=IDS)
def test_integer_comparisons(bits, name, value):
    for comparison, holds in INTEGER_COMPARISONS.items():
        check_integers(
            f"setp.{comparison}.{name} %d, %s0, %s1",
            [bits] * 2,
            lambda a, b, holds=holds: int(holds(value(a), value(b))),
            1,
        )


def test_setp_combines_and_gives_two_results():
    for how, combine in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        text = f".reg .pred %q, %x;\nsetp.lt.{how}.s32 %x|%q, %s0, %s1, %s2;\n"
        check_integers(
            text + "mov.pred %d, %x",
            [32, 32, 1],
            lambda a, b, c, f=combine: f(int(signed(a, 32) < signed(b, 32)), c & 1),
            1,
        )
        check_integers(
            text + "mov.pred %d, %q",
            [32, 32, 1],
            lambda a, b, c, f=combine: f(int(signed(a, 32) >= signed(b, 32)), c & 1),
            1,
        )


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


def test_integer_conversions():
    for to, bits in (("u32", 32), ("s32", 32), ("u64", 64), ("s64", 64), ("u16", 16)):
        for source, width in (("u32", 32), ("s32", 32), ("u16", 16), ("s16", 16), ("s64", 64)):
            take = (lambda a, w=width: signed(a, w)) if source[0] == "s" else (lambda a: a)
            check_integers(f"cvt.{to}.{source} %d, %s0", [width], take, bits)
    check_integers(
        "cvt.sat.s16.s32 %d, %s0", [32], lambda a: min(max(signed(a, 32), -32768), 32767), 16
    )
    check_integers("cvt.sat.u32.s32 %d, %s0", [32], lambda a: max(signed(a, 32), 0))
    check_integers("cvt.sat.u8.u32 %d, %s0", [32], lambda a: min(a, 255))
    check_integers("cvt.s32.s8 %d, %s0", [32], lambda a: signed(a, 8))


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
