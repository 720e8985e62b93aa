"""Random instructions on a thread's own registers, and the frame that loads and stores these.

A register file is a letter: r and w hold 32 and 64 bits of integers, h 16 bits; f and d are float32
and float64; e and g are f16 and bf16, x and y pairs of them; p are predicates. NaN payloads are
left open by the PTX ISA, so what leaves a float file for an integer one is made canonical before
(capital letters F, D, E, G, X, Y in the table).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from .program import WORDS, Piece, Writer

#: Register type and 32-bit words of a register, by file.
FILES = {
    "r": ("b32", 1), "w": ("b64", 2), "h": ("b16", 1), "f": ("b32", 1), "d": ("b64", 2),
    "e": ("b16", 1), "g": ("b16", 1), "x": ("b32", 1), "y": ("b32", 1), "p": ("pred", 1),
}  # fmt: skip

# Each line: opcode (braces hold alternatives), destination, sources. # is an immediate of 8 bits; %
# and ^ are one of 0 to 40 and of 0 to 31, or a register; | is odd, as divisors and what is negated
# must be; & is a register's low five bits. lab/fuzzer.md says what ptxas makes of other operands.
_TABLE = {
    "integer": """
    {add,sub}.{u32,s32} r rr
    {add,sub}.sat.s32 r rr
    mul.{lo,hi}.{u32,s32} r rr
    mad.{lo,hi}.{u32,s32} r rrr
    {mul24}.{lo,hi}.{u32,s32} r rr
    {mad24}.{lo,hi}.{u32,s32} r rrr
    sad.{u32,s32} r rrr
    {div,rem}.{u32,s32} r r|
    {min,max}.{u32,s32} r rr
    {min,max}.relu.s32 r rr
    {neg,abs}.s32 r |
    {and,or,xor}.b32 r rr
    {not,cnot}.b32 r r
    lop3.b32 r rrr#
    shl.b32 r r%
    shr.{b32,u32,s32} r r%
    shf.{l,r}.{wrap,clamp}.b32 r rr%
    bfe.{u32,s32} r r^^
    bfi.b32 r rr^^
    {bfind,bfind.shiftamt}.{u32,s32} r r
    {popc,clz,brev}.b32 r r
    prmt.b32 r rrr
    prmt.b32.{f4e,b4e,rc8,ecl,ecr,rc16} r rrr
    {bmsk.clamp,bmsk.wrap}.b32 r %%
    szext.{wrap,clamp}.{u32,s32} r r%
    dp4a.{u32,s32}.{u32,s32} r rrr
    dp2a.{lo,hi}.{u32,s32}.{u32,s32} r rrr
    setp.{eq,ne,lt,le,gt,ge}.{u32,s32} p rr
    setp.{lo,ls,hi,hs}.u32 p rr
    setp.{eq,ne,lt,le,gt,ge}.{and,or,xor}.{u32,s32} p rrp
    set.{eq,lt,ge}.{u32,s32}.{u32,s32} r rr
    {and,or,xor}.pred p pp
    not.pred p p
    selp.b32 r rrp
    slct.b32.s32 r rrr
    mov.b32 r r
    """,
    "wide": """
    {add,sub}.{u64,s64} w ww
    mul.{lo,hi}.{u64,s64} w ww
    mad.lo.{u64,s64} w www
    mul.wide.{u32,s32} w rr
    mad.wide.{u32,s32} w rrw
    sad.{u64,s64} w www
    {div,rem}.{u64,s64} w w|
    {min,max}.{u64,s64} w ww
    {neg,abs}.s64 w |
    {and,or,xor}.b64 w ww
    {not,cnot}.b64 w w
    shl.b64 w w%
    shr.{b64,u64,s64} w w%
    bfe.{u64,s64} w w^^
    bfi.b64 w ww^^
    {bfind,bfind.shiftamt}.{u64,s64} r w
    {popc,clz}.b64 r w
    brev.b64 w w
    setp.{eq,ne,lt,le,gt,ge}.{u64,s64} p ww
    selp.b64 w wwp
    slct.b64.s32 w wwr
    cvt.{u64.u32,s64.s32,s64.s16,u64.u8,s64.s8} w r
    cvt.{u32,s32}.u64 r w
    cvt.sat.{u32,s32}.{u64,s64} r w
    """,
    "short": """
    {add,sub}.{u16,s16} h hh
    mul.{lo,hi}.{u16,s16} h hh
    mad.lo.{u16,s16} h hhh
    mul.wide.{u16,s16} r hh
    mad.wide.{u16,s16} r hhr
    {div,rem}.{u16,s16} h h|
    {min,max}.{u16,s16} h hh
    {neg,abs}.s16 h |
    {and,or,xor}.b16 h hh
    {not,cnot}.b16 h h
    shl.b16 h h&
    shr.{b16,u16,s16} h h&
    sad.{u16,s16} h hhh
    setp.{eq,ne,lt,le,gt,ge}.{u16,s16} p hh
    selp.b16 h hhp
    cvt.{u16,s16}.{u32,s32} h r
    cvt.sat.{u16,s16}.{u32,s32} h r
    cvt.{u32,s32}.{u16,s16} r h
    cvt.{u32.u8,s32.s8} r h
    cvt.{u16.u8,s16.s8} h r
    cvt.sat.{u8,s8}.s32 r r
    """,
    "float": """
    {add,sub,mul}.{rn,rz,rm,rp}.f32 f ff
    {add,sub,mul}.{rn,rz,rm,rp}.{ftz,sat,ftz.sat}.f32 f ff
    fma.{rn,rz,rm,rp}.f32 f fff
    fma.{rn,rz,rm,rp}.{ftz,sat,ftz.sat}.f32 f fff
    {neg,abs}.f32 f f
    {neg,abs}.ftz.f32 f f
    {min,max}.f32 f ff
    {min,max}.{ftz,NaN,ftz.NaN}.f32 f ff
    {min,max}.{xorsign.abs,NaN.xorsign.abs,ftz.xorsign.abs}.f32 f FF
    copysign.f32 f Ff
    {div.rn,div.rn.ftz}.f32 f ff
    {rcp.rn,sqrt.rn,rcp.rn.ftz,sqrt.rn.ftz}.f32 f f
    testp.{finite,infinite,number,notanumber,normal,subnormal}.f32 p f
    setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f32 p ff
    setp.{lt,ge,neu}.ftz.f32 p ff
    setp.{eq,lt,geu}.{and,or,xor}.f32 p ffp
    set.{eq,lt,geu,nan}.{u32,s32}.f32 r ff
    set.{lt,gt,neu}.{f32,ftz.f32}.f32 f ff
    selp.f32 f ffp
    slct.{f32,ftz.f32}.f32 f ffF
    slct.b32.f32 r rrF
    cvt.{rni,rzi,rmi,rpi}.{f32,ftz.f32,sat.f32}.f32 f f
    cvt.{rni,rzi,rmi,rpi}.{u32,s32,ftz.u32,ftz.s32}.f32 r f
    cvt.{rni,rzi,rmi,rpi}.{u16,s16,u8,s8}.f32 r f
    cvt.{rn,rz,rm,rp}.f32.{u32,s32} f r
    mov.b32 f r
    mov.b32 r F
    """,
    "double": """
    {add,sub,mul,div}.rn.f64 d dd
    fma.rn.f64 d ddd
    {rcp.rn,sqrt.rn,neg,abs}.f64 d d
    {min,max}.f64 d dd
    copysign.f64 d Dd
    setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f64 p dd
    selp.f64 d ddp
    cvt.{rni,rzi,rmi,rpi}.{u32,s32}.f64 r d
    cvt.{rni,rzi,rmi,rpi}.{u64,s64}.f64 w d
    cvt.{rni,rzi,rmi,rpi}.f64.f64 d d
    cvt.rn.f64.{u64,s64} d w
    cvt.f64.f32 d f
    cvt.{rn,rz,rm,rp}.{f32,ftz.f32,sat.f32}.f64 f d
    mov.b64 d w
    mov.b64 w D
    """,
    "half": """
    {add,sub,mul}.rn.f16 e ee
    {add,sub,mul}.rn.{sat,ftz,ftz.sat}.f16 e ee
    fma.rn.{f16,sat.f16,ftz.f16,relu.f16} e eee
    {neg,abs}.f16 e e
    {min,max}.{f16,NaN.f16} e ee
    {min,max}.xorsign.abs.f16 e EE
    {add,sub,mul}.rn.bf16 g gg
    fma.rn.{bf16,relu.bf16} g ggg
    {neg,abs}.bf16 g g
    {min,max}.{bf16,NaN.bf16} g gg
    {add,sub,mul}.rn.f16x2 x xx
    {add,sub,mul}.rn.{sat,ftz,ftz.sat}.f16x2 x xx
    fma.rn.{f16x2,sat.f16x2,ftz.f16x2,relu.f16x2} x xxx
    {neg,abs}.f16x2 x x
    {min,max}.{f16x2,NaN.f16x2} x xx
    {add,sub,mul}.rn.bf16x2 y yy
    fma.rn.{bf16x2,relu.bf16x2} y yyy
    {neg,abs}.bf16x2 y y
    {min,max}.{bf16x2,NaN.bf16x2} y yy
    setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f16 p ee
    setp.{eq,ne,lt,ge,neu,nan}.bf16 p gg
    cvt.{rn,rz}.{f16,relu.f16}.f32 e f
    cvt.{rn,rz}.{bf16,relu.bf16}.f32 g f
    cvt.{f32,ftz.f32,sat.f32}.f16 f e
    cvt.f32.bf16 f g
    cvt.{rn,rz}.{f16x2,relu.f16x2}.f32 x ff
    cvt.{rn,rz}.{bf16x2,relu.bf16x2}.f32 y ff
    cvt.{rni,rzi,rmi,rpi}.{s32,u32}.f16 r e
    cvt.{rn,rz}.f16.{s32,u32} e r
    cvt.rn.bf16.{s32,u32} g r
    mov.b32 x r
    mov.b32 y r
    mov.b32 r X
    mov.b32 r Y
    """,
}  # fmt: skip

#: Comparisons that may set a second predicate.
_TWO_RESULTS = re.compile(r"setp.*[sufb](32|64)$")
#: ptxas 13.0 drops the guard of testp, and of the conversion to float in set.
_UNGUARDED = re.compile(r"testp|set\..*f32\.f32$")
#: Files that each set of instructions needs.
_NEEDS = {
    "integer": "rp", "wide": "rwp", "short": "rhp", "float": "rfp", "double": "rwfdp",
    "half": "rfegxyp",
}  # fmt: skip
_COUNTS = {"r": 6, "w": 3, "h": 3, "f": 4, "d": 3, "e": 3, "g": 3, "x": 3, "y": 3, "p": 4}


@dataclass(frozen=True)
class Form:
    """One opcode with the files of its operands."""

    opcode: str
    destination: str
    sources: str


def _expand(opcode: str) -> list[str]:
    parts = re.split(r"\{([^}]*)\}", opcode)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(some) for some in itertools.product(*choices)]


def _forms(name: str) -> list[list[Form]]:
    lines = []
    for line in _TABLE[name].strip().splitlines():
        opcode, destination, sources = line.split()
        lines.append([Form(text, destination, sources) for text in _expand(opcode)])
    return lines


FORMS = {name: _forms(name) for name in _TABLE}


class Registers:
    """The registers of a program's threads and the instructions that may work on them. sets: names
    of `_TABLE`. The frame declares, loads and stores the registers."""

    def __init__(self, writer: Writer, sets: tuple[str, ...]) -> None:
        self.writer, self.sets = writer, sets
        needed = set("rp").union(*(_NEEDS[name] for name in sets))
        self.files = {file: _COUNTS[file] for file in FILES if file in needed}
        self.words = sum(FILES[file][1] * count for file, count in self.files.items())

    def pick(self, file: str) -> str:
        return f"%{file}{self.writer.random.randrange(self.files[file])}"

    def head(self, out: str) -> str:
        """Declare all registers and fill them from p0; %out is the thread's place in `out`."""
        lines = [f".reg .{FILES[file][0]} %{file}<{count}>;" for file, count in self.files.items()]
        lines.append(f"""{self.writer.declarations()}.reg .b32 %index, %thread, %lane, %i<{WORDS}>;
.reg .b64 %in, %out, %step;
.reg .b16 %half<4>;
mov.u32 %thread, %tid.x;
mov.u32 %lane, %laneid;
mov.u32 %index, %ctaid.x;
mov.u32 %i0, %ntid.x;
mad.lo.u32 %index, %index, %i0, %thread;
ld.param.u64 %in, [p0];
mul.wide.u32 %step, %index, {4 * WORDS};
add.u64 %in, %in, %step;
ld.global.v4.b32 {{%i0, %i1, %i2, %i3}}, [%in];
ld.global.v4.b32 {{%i4, %i5, %i6, %i7}}, [%in+16];
ld.param.u64 %out, [{out}];
mul.wide.u32 %step, %index, 4;
add.u64 %out, %out, %step;""")
        lines += [self._fill(file, k) for file, count in self.files.items() for k in range(count)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _fill(file: str, k: int) -> str:
        word, other = f"%i{(k + ord(file)) % WORDS}", f"%i{(k + ord(file) + 3) % WORDS}"
        kind = FILES[file][0]
        if kind == "pred":
            return f"setp.lt.s32 %p{k}, {word}, {other};"
        if kind == "b64":
            return f"mov.b64 %{file}{k}, {{{word}, {other}}};"
        if kind == "b16":
            return f"cvt.u16.u32 %{file}{k}, {word};"
        return f"mov.b32 %{file}{k}, {word};"

    def tail(self, threads: int) -> str:
        """Store every register; word k of thread i is at word k * threads + i of p1."""
        lines, place = [], 0
        for file, count in self.files.items():
            for k in range(count):
                text, names = self._stored(file, k)
                lines.append(text)
                for name in names:
                    lines.append(f"st.global.b32 [%out+{4 * threads * place}], {name};\n")
                    place += 1
        return "".join(lines) + "ret;\n"

    def _stored(self, file: str, k: int) -> tuple[str, tuple[str, ...]]:
        """Instructions that put a register into 32-bit ones, and the names of these."""
        if file == "p":
            return f"selp.u32 %i0, 1, 0, %p{k};\n", ("%i0",)
        name = f"%{file}{k}"
        text = ""
        if file in "fdegxy":
            text, name = canonical(self.writer, file, name)
        if FILES[file][0] == "b64":
            return f"{text}mov.b64 {{%i0, %i1}}, {name};\n", ("%i0", "%i1")
        if FILES[file][0] == "b16":
            return f"{text}cvt.u32.u16 %i0, {name};\n", ("%i0",)
        return text, (name,)

    def instruction(self) -> Piece:
        choose = self.writer.random
        if "integer" in self.sets and self.writer.chance(0.03):
            return self._carry_chain()
        form = choose.choice(choose.choice(FORMS[choose.choice(self.sets)]))
        before, sources = "", []
        for position, file in enumerate(form.sources):
            text, name = self._source(form, file, position)
            before += text
            sources.append(name)
        destination = self.pick(form.destination)
        if form.destination == "p" and _TWO_RESULTS.match(form.opcode) and self.writer.chance(0.2):
            destination += f"|{self._other(destination)}"
        prefix = ""
        if self.writer.chance(0.2) and not _UNGUARDED.match(form.opcode):
            prefix = f"@{choose.choice(('', '!'))}{self.pick('p')} "
        return Piece(f"{before}{prefix}{form.opcode} {destination}, {', '.join(sources)};\n")

    def _other(self, register: str) -> str:
        rest = [f"%p{k}" for k in range(self.files["p"]) if f"%p{k}" != register]
        return self.writer.random.choice(rest)

    def _source(self, form: Form, file: str, position: int) -> tuple[str, str]:
        """Instructions that prepare a source operand, and its name."""
        choose = self.writer.random
        if file == "#":
            return "", str(choose.randrange(256))
        if file in "%^":
            most = 41 if file == "%" else 32
            return "", str(choose.randrange(most)) if self.writer.chance(0.4) else self.pick("r")
        if file == "&":
            low = self.writer.register("b32")
            return f"and.b32 {low}, {self.pick('r')}, 31;\n", low
        if file == "|":
            file = form.destination
            odd = self.writer.register(FILES[file][0])
            bits = FILES[file][0]
            return f"or.{bits} {odd}, {self.pick(file)}, 1;\n", odd
        if file.isupper():
            return canonical(self.writer, file.lower(), self.pick(file.lower()))
        if file in "rw" and position and self.writer.chance(0.15):
            return "", str(choose.choice((0, 1, 2, 31, 32, 255, 65536, 0x7FFFFFFF)))
        if file == "p" and self.writer.chance(0.2) and form.opcode.startswith("setp"):
            return "", f"!{self.pick('p')}"
        return "", self.pick(file)

    def _carry_chain(self) -> Piece:
        a, b, c = (self.pick("r") for _ in range(3))
        name = self.writer.random.choice(("add", "sub"))
        return Piece(
            f"{name}.cc.u32 {a}, {b}, {c};\n{name}c.cc.u32 {b}, {c}, {a};\n"
            f"{name}c.u32 {c}, {a}, 0;\n"
        )


def canonical(writer: Writer, file: str, name: str) -> tuple[str, str]:
    """Instructions that copy a float register with every NaN the same, and the copy's name."""
    nan, copy = writer.register("pred"), writer.register(FILES[file][0])
    if file == "f":
        return (
            f"testp.notanumber.f32 {nan}, {name};\nselp.b32 {copy}, 0x7fffffff, {name}, {nan};\n"
        ), copy
    if file == "d":
        return (
            f"setp.nan.f64 {nan}, {name}, {name};\nselp.b64 {copy}, 0x7fffffffffffffff, "
            f"{name}, {nan};\n"
        ), copy
    kind = {"e": "f16", "g": "bf16", "x": "f16", "y": "bf16"}[file]

    def half(register: str, to: str) -> str:
        return (
            f"setp.nan.{kind} {nan}, {register}, {register};\n"
            f"selp.b16 {to}, 0x7fff, {register}, {nan};\n"
        )

    if file in "eg":
        return half(name, copy), copy
    low, high = writer.register("b16"), writer.register("b16")
    return (
        f"mov.b32 {{{low}, {high}}}, {name};\n{half(low, low)}{half(high, high)}"
        f"mov.b32 {copy}, {{{low}, {high}}};\n"
    ), copy
