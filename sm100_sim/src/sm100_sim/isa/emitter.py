"""Writes LLVM IR for the straight-line code of one basic block.

Every PTX register is a vector of 32 lanes. Inside a block, values are SSA names; a register is
loaded from the warp's register file at its first use, and what other blocks read is stored at the
block's end in the active lanes only. Inactive lanes therefore hold arbitrary values in between,
which is harmless: whatever has an effect (memory, faults, counters, votes) is masked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container

from sm100_sim.ptx.parser import Instruction, Operand, Register
from sm100_sim.state.warp import SPECIAL_INDEX, TID_OFFSET, Context

from .table import unknown

LANES = 32
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "float": 32, "double": 64}
_SUFFIX = {
    "i1": "i1",
    "i8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "half": "f16",
    "float": "f32",
    "double": "f64",
}
_AS_INTEGER = {"half": "i16", "float": "i32", "double": "i64"}
_INTERLEAVE = ", ".join(f"i32 {lane}, i32 {lane + LANES}" for lane in range(LANES))


def context_offset(name: str) -> int:
    """Byte offset of a field of the context structure."""
    return getattr(Context, name).offset


def splat(kind: str, value: int) -> str:
    """Constant vector of an integer type."""
    if kind == "i1":
        return f"splat (i1 {'true' if value & 1 else 'false'})"
    bits = _BITS[kind]
    value &= (1 << bits) - 1
    return f"splat ({kind} {value - (1 << bits) if value >> (bits - 1) else value})"


class Emitter:
    """The function of one block: its lines, and the SSA names that registers have in it.

    A type is named by its lane: "i1", "i8", "i16", "i32", "i64", "half", "float", "double".
    Registers of up to 32 bits are held as i32 (zero-extended) or float, 64-bit ones as i64,
    double, or as a pair of 32-bit halves, which keeps packing and unpacking free of code.
    """

    def __init__(self, name: str, guard_base: int) -> None:
        self.name, self.names = name, 0
        self.lines: list[str] = []
        self.values: dict[Register, dict[str, str]] = {}
        self.defined: dict[Register, None] = {}
        self.declarations: set[str] = set()
        #: Functions of the module that blocks call, by name; see `module_function`.
        self.shared: dict[str, str] = {}
        self.constants: dict[tuple[str, int], str] = {}
        self.fields: dict[str, str] = {}
        #: Instruction that is being emitted; there is none before the first.
        self.instruction: Instruction = None  # type: ignore[assignment]
        self.guard: str | None = None
        self.guard_base = guard_base
        self.guarded: list[int] = []
        self.carry: str | None = None
        self.scratch_needed = False
        #: Sanitizer: whether accesses to memory are logged, and which loads from tensor memory
        #: (by number) each register comes from, so that the first use of their data is noted.
        self.logging = False
        self.watched: dict[Register, frozenset[int]] = {}
        self._noted: set[int] = set()

    # Building blocks.

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def name_for(self, text: str) -> str:
        """Emit ``%n = text`` and return %n."""
        self.names += 1
        name = f"%v{self.names}"
        self.lines.append(f"  {name} = {text}")
        return name

    def binary(self, operation: str, kind: str, a: str, b: str) -> str:
        return self.name_for(f"{operation} <32 x {kind}> {a}, {b}")

    def compare(self, predicate: str, kind: str, a: str, b: str) -> str:
        """icmp or fcmp by ``predicate`` ("ult", "sgt", "eq", or float ones such as "olt")."""
        operation = "icmp" if kind in ("i1", "i8", "i16", "i32", "i64") else "fcmp"
        return self.name_for(f"{operation} {predicate} <32 x {kind}> {a}, {b}")

    def select(self, condition: str, kind: str, a: str, b: str) -> str:
        return self.name_for(f"select <32 x i1> {condition}, <32 x {kind}> {a}, <32 x {kind}> {b}")

    def cast(self, operation: str, value: str, source: str, target: str) -> str:
        if source == target:
            return value
        text = f"{operation} <32 x {source}> {{}} to <32 x {target}>".format
        if (operation, source, target) == ("trunc", "i64", "i32"):
            return self.shared_function(
                "low_words", lambda body, wide: body.name_for(text(wide)), value,
                kind=source, result=target,
            )  # fmt: skip
        return self.name_for(text(value))

    def intrinsic(
        self, name: str, kind: str, *values: str, extra: str = "", result: str | None = None
    ) -> str:
        """Call ``llvm.<name>`` overloaded on the 32-lane vector of ``kind``.

        ``extra`` is a trailing immediate argument such as "i1 false"; ``result`` names a result
        type that differs from ``kind`` (and then both are part of the overloaded name).
        """
        vector, to = f"<32 x {kind}>", result or kind
        suffix = f"v32{_SUFFIX[kind]}"
        suffix = f"v32{_SUFFIX[to]}.{suffix}" if result else suffix
        arguments = [f"{vector} {value}" for value in values]
        types = [vector] * len(values)
        if extra:
            arguments.append(extra)
            types.append(extra.split()[0])
        full = f"@llvm.{name}.{suffix}"
        self.declarations.add(f"declare <32 x {to}> {full}({', '.join(types)})")
        return self.name_for(f"call <32 x {to}> {full}({', '.join(arguments)})")

    def module_function(
        self, name: str, result: str, parameters: str, build: Callable[[Emitter], str]
    ) -> str:
        """The name of a function that the module has once and blocks call.

        For what kernels use hundreds of times: what is inline is compiled each time. build: emits
        the body and returns the result, "" for none.
        """
        if name not in self.shared:
            body = Emitter(name, 0)
            value = build(body)
            self.shared |= body.shared
            self.shared[name] = "\n".join(
                [
                    f"define internal {result} @{name}({parameters}) #0 {{",
                    *body.lines,
                    f"  ret {result} {value}".rstrip(),
                    "}",
                ]
            )
            self.declarations |= body.declarations
        return f"@{name}"

    def shared_function(
        self,
        name: str,
        build: Callable[..., str],
        *operands: str,
        kind: str = "float",
        result: str = "float",
    ) -> str:
        """Call of a `module_function` of lanes; build(emitter, *parameters) emits its body.

        kind, result: types of the operands and of the result.
        """
        parameters = [f"%p{n}" for n in range(len(operands))]
        function = self.module_function(
            name,
            f"<32 x {result}>",
            ", ".join(f"<32 x {kind}> {p}" for p in parameters),
            lambda body: build(body, *parameters),
        )
        arguments = ", ".join(f"<32 x {kind}> {operand}" for operand in operands)
        return self.name_for(f"call <32 x {result}> {function}({arguments})")

    def gather(self, kind: str, pointers: str, mask: str, align: int) -> str:
        """Lanes of integers loaded through pointers; 0 in those not in the mask."""
        name = f"@llvm.masked.gather.v32{kind}.v32p0"
        self.declarations.add(
            f"declare <32 x {kind}> {name}(<32 x ptr>, i32, <32 x i1>, <32 x {kind}>)"
        )
        return self.name_for(
            f"call <32 x {kind}> {name}(<32 x ptr> {pointers}, i32 {align}, <32 x i1> {mask}, "
            f"<32 x {kind}> zeroinitializer)"
        )

    def scatter(self, kind: str, value: str, pointers: str, mask: str, align: int) -> None:
        """Lanes of integers of the mask stored through pointers."""
        name = f"@llvm.masked.scatter.v32{kind}.v32p0"
        self.declarations.add(f"declare void {name}(<32 x {kind}>, <32 x ptr>, i32, <32 x i1>)")
        self.line(
            f"call void {name}(<32 x {kind}> {value}, <32 x ptr> {pointers}, i32 {align}, "
            f"<32 x i1> {mask})"
        )

    def float_constant(self, pattern: int, kind: str = "float") -> str:
        """Vector of the float (or half, double) whose bits are ``pattern``."""
        key = (kind, pattern)
        if key not in self.constants:
            integer = _AS_INTEGER[kind]
            self.constants[key] = self.cast("bitcast", splat(integer, pattern), integer, kind)
        return self.constants[key]

    def field(self, name: str) -> str:
        """Pointer field of the context, loaded once per block."""
        if name not in self.fields:
            self.fields[name] = self.name_for(f"load ptr, ptr {self.field_pointer(name)}")
        return self.fields[name]

    def field_pointer(self, name: str) -> str:
        return self.name_for(f"getelementptr inbounds i8, ptr %context, i64 {context_offset(name)}")

    def scalar_field(self, name: str, kind: str = "i32") -> str:
        return self.name_for(f"load {kind}, ptr {self.field_pointer(name)}")

    def broadcast(self, kind: str, scalar: str) -> str:
        """Vector with the same scalar in every lane."""
        single = self.name_for(f"insertelement <32 x {kind}> poison, {kind} {scalar}, i32 0")
        return self.name_for(
            f"shufflevector <32 x {kind}> {single}, <32 x {kind}> poison, "
            f"<32 x i32> zeroinitializer"
        )

    # Register values.

    def _row(self, register: Register) -> str:
        if register.slot < 0:
            raise ValueError(f"register {register.name} has no slot in block {self.name}")
        size = {"r32": 4 * LANES, "r64": 8 * LANES, "pred": 4}[register.file]
        base = self.field({"pred": "preds"}.get(register.file, register.file))
        return self.name_for(f"getelementptr inbounds i8, ptr {base}, i64 {register.slot * size}")

    def _load(self, register: Register) -> dict[str, str]:
        forms = self.values.get(register)
        if forms is None:
            row = self._row(register)
            if register.file == "pred":
                mask = self.name_for(f"load i32, ptr {row}")
                forms = {"i1": self.name_for(f"bitcast i32 {mask} to <32 x i1>")}
            elif register.file == "r32":
                forms = {"i32": self.name_for(f"load <32 x i32>, ptr {row}, align 64")}
            else:
                forms = {"row": row}
                if register.type == "b128":
                    upper = self.name_for(f"getelementptr inbounds i8, ptr {row}, i64 256")
                    forms["upper"] = self.name_for(f"load <32 x i64>, ptr {upper}, align 64")
            self.values[register] = forms
        return forms

    def _form(self, register: Register, kind: str) -> str:
        """The register's value as ``kind``: i1, i32, float, i64 or double."""
        forms = self._load(register)
        if kind in forms:
            return forms[kind]
        if kind == "i64" and "row" in forms:
            forms[kind] = self.name_for(f"load <32 x i64>, ptr {forms['row']}, align 64")
        elif kind == "i64" and "double" not in forms:
            forms[kind] = self.interleave(
                self._half(forms, "low", "i32"), self._half(forms, "high", "i32")
            )
        else:
            source = {"i32": "float", "float": "i32", "i64": "double", "double": "i64"}[kind]
            if source not in forms:
                self._form(register, source)
            forms[kind] = self.cast("bitcast", forms[source], source, kind)
        return forms[kind]

    def interleave(self, low: str, high: str) -> str:
        """64-bit lanes from the i32 vectors of their halves (little-endian)."""
        wide = self.name_for(
            f"shufflevector <32 x i32> {low}, <32 x i32> {high}, <64 x i32> <{_INTERLEAVE}>"
        )
        return self.name_for(f"bitcast <64 x i32> {wide} to <32 x i64>")

    def _half(self, forms: dict[str, str], which: str, kind: str) -> str:
        key = f"{which}.{kind}"
        if key in forms:
            return forms[key]
        other = "float" if kind == "i32" else "i32"
        if f"{which}.{other}" in forms:
            forms[key] = self.cast("bitcast", forms[f"{which}.{other}"], other, kind)
            return forms[key]
        if "row" in forms:
            forms[f"{which}.i32"] = self._half_of_row(forms["row"], which)
            return self._half(forms, which, kind)
        if "i64" not in forms:
            forms["i64"] = self.cast("bitcast", forms["double"], "double", "i64")
        value = forms["i64"]
        if which == "high":
            value = self.binary("lshr", "i64", value, splat("i64", 32))
        forms[f"{which}.i32"] = self.cast("trunc", value, "i64", "i32")
        return self._half(forms, which, kind)

    def _half_of_row(self, row: str, which: str) -> str:
        """Load the low or high halves of a row of 64-bit lanes as i32 lanes."""
        lanes = ", ".join(f"i32 {2 * lane + (which == 'high')}" for lane in range(LANES))

        def build(body: Emitter) -> str:
            wide = body.name_for("load <64 x i32>, ptr %row, align 64")
            return body.name_for(
                f"shufflevector <64 x i32> {wide}, <64 x i32> poison, <32 x i32> <{lanes}>"
            )

        function = self.module_function(f"{which}_halves", "<32 x i32>", "ptr %row", build)
        return self.name_for(f"call <32 x i32> {function}(ptr {row})")

    def get(self, op: Operand, kind: str) -> str:
        """The operand as a vector of ``kind``.

        Narrower integers than the register take its low bits; wider ones than 32 bits from a
        32-bit register are zero-extended.
        """
        if op.kind == "imm":
            return self._immediate(op, kind)
        if op.kind in ("reg", "pred"):
            self._note_use(op.register)
            return self._register_value(op, kind)
        if op.kind == "special":
            return self.convert(self.special(op), "i32", kind)
        if op.kind == "sym":
            return self.convert(self.symbol(op), "i32", kind)
        raise unknown(self.instruction, f"operand of kind {op.kind!r} where a value must stand")

    def _note_use(self, register: Register) -> None:
        """Sanitizer: data that tcgen05.ld returned are used here; copying them is no use."""
        loads = self.watched.get(register)
        if loads and self.instruction.opcode != "mov":
            for load in sorted(loads - self._noted):
                row = self.name_for(
                    f"getelementptr inbounds i8, ptr {self.field('uses')}, i64 {load}"
                )
                self.line(f"store i8 1, ptr {row}")
                self._noted.add(load)

    def _register_value(self, op: Operand, kind: str) -> str:
        register = op.register
        if register.file == "pred":
            if kind != "i1":
                raise unknown(self.instruction, f"predicate {op.name} where a value must stand")
            value = self._form(register, "i1")
            if op.negated:
                return self.binary("xor", "i1", value, splat("i1", 1))
            return value
        if register.file == "r64":
            if kind in ("i64", "double"):
                return self._form(register, kind)
            if kind in ("i32", "float"):
                return self._half(self._load(register), "low", kind)
            return self.convert(self._half(self._load(register), "low", "i32"), "i32", kind)
        if kind in ("i32", "float"):
            return self._form(register, kind)
        return self.convert(self._form(register, "i32"), "i32", kind)

    def convert(self, value: str, source: str, kind: str) -> str:
        """Reinterpret the low bits of integer lanes as ``kind``, zero-extending if wider."""
        integer = _AS_INTEGER.get(kind, kind)
        if _BITS[integer] < _BITS[source]:
            value = self.cast("trunc", value, source, integer)
        elif _BITS[integer] > _BITS[source]:
            value = self.cast("zext", value, source, integer)
        return self.cast("bitcast", value, integer, kind)

    def _immediate(self, op: Operand, kind: str) -> str:
        pattern = self.immediate_bits(op, _BITS[kind])
        if kind in _AS_INTEGER:
            return self.float_constant(pattern, kind)
        return splat(kind, pattern)

    def immediate_bits(self, op: Operand, bits: int) -> int:
        """Bit pattern of an immediate for a use of ``bits`` bits."""
        if op.type == "f64" and bits == 32:
            return struct.unpack(
                "<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", op.value))[0])
            )[0]
        if op.type == "f32" and bits == 64:
            return struct.unpack(
                "<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", op.value))[0])
            )[0]
        return op.value & ((1 << bits) - 1)

    def halves(self, op: Operand, kind: str) -> tuple[str, str]:
        """Low and high 32 bits of a 64-bit operand, as i32 or float vectors."""
        if op.kind == "imm":
            pattern = self.immediate_bits(op, 64)
            low, high = pattern & 0xFFFFFFFF, pattern >> 32
            if kind == "float":
                return self.float_constant(low), self.float_constant(high)
            return splat("i32", low), splat("i32", high)
        if op.kind == "reg" and op.register.file == "r64":
            self._note_use(op.register)
            forms = self._load(op.register)
            return self._half(forms, "low", kind), self._half(forms, "high", kind)
        raise unknown(self.instruction, f"operand {op.name} is not 64 bits wide")

    def set(self, op: Operand, kind: str, value: str) -> None:
        """Define a register; a sink drops the value. Narrow integers are zero-extended."""
        if op.kind == "sink":
            return
        if op.kind not in ("reg", "pred"):
            raise unknown(self.instruction, f"operand of kind {op.kind!r} as a destination")
        register = op.register
        if _BITS[kind] < 32 and kind != "i1":
            value, kind = (
                self.convert(value, _AS_INTEGER.get(kind, kind), "i32")
                if kind in ("i8", "i16")
                else self._widen_half(value),
                "i32",
            )
        expected = {"pred": 1, "r32": 32, "r64": 64}[register.file]
        if _BITS[kind] == 32 and expected == 64:
            value, kind = self.cast("zext", self._as_integer(value, kind), "i32", "i64"), "i64"
        if _BITS[kind] != expected:
            raise unknown(self.instruction, f"destination {op.name} has the wrong width")
        if self.guard is not None:
            value = self.select(self.guard, kind, value, self._form(register, kind))
        self._define(register, {kind: value})

    def _as_integer(self, value: str, kind: str) -> str:
        return self.cast("bitcast", value, kind, _AS_INTEGER.get(kind, kind))

    def _widen_half(self, value: str) -> str:
        return self.convert(self.cast("bitcast", value, "half", "i16"), "i16", "i32")

    def set_halves(self, op: Operand, kind: str, low: str, high: str) -> None:
        """Define a 64-bit register from its 32-bit halves."""
        if op.kind == "sink":
            return
        register = op.register
        if register is None or register.file != "r64":
            raise unknown(self.instruction, f"destination {op.name} is not 64 bits wide")
        if self.guard is not None:
            forms = self._load(register)
            old = self._half(forms, "low", kind), self._half(forms, "high", kind)
            low = self.select(self.guard, kind, low, old[0])
            high = self.select(self.guard, kind, high, old[1])
        self._define(register, {f"low.{kind}": low, f"high.{kind}": high})

    def set_wide(self, op: Operand, low: str, high: str) -> None:
        """Define a 128-bit register from two i64 vectors."""
        if self.guard is not None:
            old = self._load(op.register)
            low = self.select(self.guard, "i64", low, self._form(op.register, "i64"))
            high = self.select(self.guard, "i64", high, old["upper"])
        self._define(op.register, {"i64": low, "upper": high})

    def wide(self, op: Operand) -> tuple[str, str]:
        """Low and high 64 bits of a 128-bit register."""
        forms = self._load(op.register)
        return self._form(op.register, "i64"), forms["upper"]

    def _define(self, register: Register, forms: dict[str, str]) -> None:
        self.values[register] = forms
        self.defined[register] = None

    # Special registers, symbols, lane masks.

    def special(self, op: Operand) -> str:
        """A special register as i32 lanes (clock64 and globaltimer: see ``clock``)."""
        name = op.name
        if name in SPECIAL_INDEX:
            pointer = self._special_pointer(4 * SPECIAL_INDEX[name])
            return self.broadcast("i32", self.name_for(f"load i32, ptr {pointer}"))
        if name.startswith("%tid."):
            offset = 4 * (TID_OFFSET + LANES * "xyz".index(name[-1]))
            pointer = self._special_pointer(offset)
            return self.name_for(f"load <32 x i32>, ptr {pointer}, align 4")
        lane_tables = {
            "%laneid": range(32),
            "%lanemask_eq": (1 << lane for lane in range(32)),
            "%lanemask_lt": ((1 << lane) - 1 for lane in range(32)),
            "%lanemask_le": ((2 << lane) - 1 for lane in range(32)),
            "%lanemask_gt": (-(2 << lane) for lane in range(32)),
            "%lanemask_ge": (-(1 << lane) for lane in range(32)),
        }
        if name in lane_tables:
            return self.lane_constants(lane_tables[name])
        if name in ("%clock", "%clock_hi", "%globaltimer_lo", "%globaltimer_hi"):
            value = self.clock()
            if name.endswith("hi"):
                value = self.binary("lshr", "i64", value, splat("i64", 32))
            return self.cast("trunc", value, "i64", "i32")
        raise unknown(self.instruction, f"special register {name} is not implemented")

    def lane_constants(self, values) -> str:
        """Constant i32 vector with one value per lane."""
        body = ", ".join(f"i32 {(v & 0xFFFFFFFF) - ((v & 0x80000000) << 1)}" for v in values)
        return self.cast("bitcast", f"<{body}>", "i32", "i32")

    def _special_pointer(self, offset: int) -> str:
        return self.name_for(
            f"getelementptr inbounds i8, ptr {self.field('specials')}, i64 {offset}"
        )

    def clock(self) -> str:
        """A clock that advances with every reading, the same in every run (i64 lanes)."""
        pointer = self.field_pointer("clock")
        old = self.name_for(f"load i64, ptr {pointer}")
        new = self.name_for(f"add i64 {old}, 64")
        self.line(f"store i64 {new}, ptr {pointer}")
        return self.broadcast("i64", new)

    def symbol(self, op: Operand) -> str:
        """Address of a symbol in its own space, as i32 lanes."""
        if op.type in ("param", "local"):
            return splat("i32", op.value)
        base = self.scalar_field("shared_base")
        return self.broadcast("i32", self.name_for(f"or i32 {base}, {op.value}"))

    def executing(self) -> str:
        """Lanes that execute the instruction, as <32 x i1>: active and not guarded off."""
        if self.guard is None:
            return "%active"
        return self.binary("and", "i1", "%active", self.guard)

    def executing_mask(self) -> str:
        """Return the mask of executing lanes as an i32 scalar."""
        if self.guard is None:
            return "%active_mask"
        return self.name_for(f"bitcast <32 x i1> {self.executing()} to i32")

    # Instructions and the function around them.

    def emit(self, instruction: Instruction, emit) -> None:
        """Write one inline instruction, with its guard and the counter of a guarded one."""
        self.instruction, self.guard = instruction, None
        if instruction.guard is not None:
            self.guard = self.get(instruction.guard, "i1")
            self._count_guarded(instruction)
        emit(self, instruction)

    def _count_guarded(self, instruction: Instruction) -> None:
        counters = self.field("guard_counters")
        offset = 16 * (self.guard_base + len(self.guarded))
        self.guarded.append(instruction.index)
        mask = self.executing_mask()
        self.declarations.add("declare i32 @llvm.ctpop.i32(i32)")
        lanes = self.name_for(f"call i32 @llvm.ctpop.i32(i32 {mask})")
        any_lane = self.name_for(f"icmp ne i32 {mask}, 0")
        for step, value, kind in ((0, any_lane, "i1"), (8, lanes, "i32")):
            pointer = self.name_for(
                f"getelementptr inbounds i8, ptr {counters}, i64 {offset + step}"
            )
            old = self.name_for(f"load i64, ptr {pointer}")
            wide = self.name_for(f"zext {kind} {value} to i64")
            new = self.name_for(f"add i64 {old}, {wide}")
            self.line(f"store i64 {new}, ptr {pointer}")

    def store_registers(self, live_out: Container[Register]) -> None:
        """Store the registers that other blocks read, in the active lanes."""
        self.guard = None
        for register in self.defined:
            if register not in live_out:
                continue
            row = self._row(register)
            if register.file == "pred":
                self._store_predicate(register, row)
            elif register.file == "r32":
                self._masked_store("i32", self._form(register, "i32"), row)
            elif not {"i64", "double"} & self.values[register].keys():
                self._store_halves(self.values[register], row)
            else:
                self._masked_store("i64", self._form(register, "i64"), row)
                if register.type == "b128":
                    upper = self.name_for(f"getelementptr inbounds i8, ptr {row}, i64 256")
                    self._masked_store("i64", self.values[register]["upper"], upper)

    def _store_predicate(self, register: Register, row: str) -> None:
        new = self.name_for(f"bitcast <32 x i1> {self._form(register, 'i1')} to i32")
        old = self.name_for(f"load i32, ptr {row}")
        changed = self.name_for(f"xor i32 {new}, {old}")
        changed = self.name_for(f"and i32 {changed}, %active_mask")
        self.line(f"store i32 {self.name_for(f'xor i32 {old}, {changed}')}, ptr {row}")

    def _store_halves(self, forms: dict[str, str], row: str) -> None:
        """Store a 64-bit register that is held as halves."""

        def build(body: Emitter) -> str:
            body._store_lanes("i64", body.interleave("%low", "%high"))
            return ""

        function = self.module_function(
            "store_halves", "void", "ptr %row, i32 %mask, <32 x i32> %low, <32 x i32> %high", build
        )
        low, high = (self._half(forms, which, "i32") for which in ("low", "high"))
        self.line(
            f"call void {function}(ptr {row}, i32 %active_mask, <32 x i32> {low}, "
            f"<32 x i32> {high})"
        )

    def _masked_store(self, kind: str, value: str, row: str) -> None:
        """Store lanes of integers, the active ones."""

        def build(body: Emitter) -> str:
            body._store_lanes(kind, "%value")
            return ""

        function = self.module_function(
            f"store_{kind}", "void", f"ptr %row, i32 %mask, <32 x {kind}> %value", build
        )
        self.line(f"call void {function}(ptr {row}, i32 %active_mask, <32 x {kind}> {value})")

    def _store_lanes(self, kind: str, value: str) -> None:
        """Store the lanes of %mask to %row: the parameters of a function of the module."""
        active = self.name_for("bitcast i32 %mask to <32 x i1>")
        name = f"@llvm.masked.store.v32{kind}.p0"
        self.declarations.add(f"declare void {name}(<32 x {kind}>, ptr, i32, <32 x i1>)")
        self.line(f"call void {name}(<32 x {kind}> {value}, ptr %row, i32 64, <32 x i1> {active})")

    def function(self) -> str:
        """The finished function definition."""
        head = [
            f"define void @{self.name}(ptr %context, i32 %active_mask) #0 {{",
            "  %active = bitcast i32 %active_mask to <32 x i1>",
        ]
        if self.scratch_needed:
            head.append("  %scratch = alloca [32 x i64], align 64")
        return "\n".join([*head, *self.lines, "  ret void", "}"])
