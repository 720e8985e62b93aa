"""PTX text to instructions: the tokenizer and parser of the simulator.

The parser covers what NVVM and inline assembly emit for sm_100a kernels: entry parameters, shared
symbols, register declarations with nested scopes, guards, vector, memory and bracket-list operands,
immediates, special registers, labels, branch-target tables and source locations (PTX ISA 4 and 5).
It knows the syntax only; what an opcode means is the business of ``sm100_sim.isa.table``.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .declarations import (
    MAX_DEPTH,
    MAX_INSTRUCTIONS,
    Function,
    functions_of,
    module_data,
    moved,
    read_directives,
    target_of,
)

#: Shared memory starts at this offset: the hardware keeps the first KiB of a CTA for itself.
RESERVED_SHARED_BYTES = 1024
#: Address of the module's initialised bytes, such as formats of printf. Only calls read them.
MODULE_DATA_WINDOW = 0x7D00_0000_0000_0000
TYPE_BYTES = {
    "pred": 0,
    "b8": 1,
    "s8": 1,
    "u8": 1,
    "b16": 2,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}


class PtxSyntaxError(ValueError):
    """The text is not PTX that the parser understands; the message names line and statement."""


@dataclass(slots=True, eq=False)
class Register:
    """One declared register.

    ``file`` is "r32", "r64" or "pred". ``slot`` is its row in that register file of a warp (a b128
    register takes rows slot and slot + 1 of r64), or -1 while it lives in no file: the code
    generator gives slots only to registers that some other basic block or a trap reads.
    """

    name: str
    type: str
    order: int
    slot: int = -1

    @property
    def file(self) -> str:
        if self.type == "pred":
            return "pred"
        return "r64" if TYPE_BYTES[self.type] >= 8 else "r32"


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of an instruction.

    kind      meaning
    reg       a register: ``register``, ``name``, ``type`` ("b32", "b64", ...)
    pred      a predicate register, with ``negated`` for ``!p``
    imm       an immediate: ``value``; ``type`` is "int", "f32" (``value`` holds the 32-bit
              pattern) or "f64" (the 64-bit pattern)
    mem       ``[base + value]``: ``base`` is a reg, sym, or imm operand; a bracket list such as
              TMA's ``[%rd1, {%r1, %r2}]`` has its further members in ``items``
    vec       ``{a, b, ...}``: ``items``
    pair      ``a|b`` (two destinations): ``items``
    label     a branch target: ``name``, ``value`` = instruction index
    targets   the table of a ``brx.idx``: ``items`` are labels
    sym       an address: ``name``; ``type`` is "shared", "param" or "local"; ``value`` is the
              offset within that space (of the CTA's own shared memory)
    special   a special register: ``name`` such as "%tid.x"
    sink      ``_``: the result is dropped
    """

    kind: str
    name: str = ""
    type: str = ""
    value: int = 0
    base: Operand = None  # type: ignore[assignment]  # of mem alone
    items: tuple[Operand, ...] = ()
    negated: bool = False
    register: Register = None  # type: ignore[assignment]  # of reg and pred alone

    @property
    def slot(self) -> int:
        """Row in the register file; raises if the register has none."""
        if self.register is None or self.register.slot < 0:
            raise ValueError(f"operand {self.name or self.kind!r} occupies no register-file slot")
        return self.register.slot


@dataclass(slots=True)
class Instruction:
    """One instruction.

    ``opcode`` and ``modifiers`` are the dotted name split at the first dot by the parser; loading
    the kernel re-splits them at the longest prefix that the instruction table knows, and sets
    ``row`` to what is found there. ``source`` is (file, line) of the last ``.loc``, ``stack`` those
    of the calls that lead there, the innermost first. ``spin`` marks
    a try_wait whose false result leads straight back to it (set by the control-flow analysis).
    """

    index: int
    opcode: str
    modifiers: tuple[str, ...]
    guard: Operand | None
    operands: tuple[Operand, ...]
    text: str
    line: int
    source: tuple[str, int] | None = None
    stack: tuple[tuple[str, int], ...] = ()
    spin: bool = False
    row: Any = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The full dotted name, e.g. ``add.rm.ftz.f32x2``."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter: byte offset, size and alignment in the parameter buffer."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class SharedSymbol:
    """One .shared variable: byte offset within the CTA's shared memory; ``size`` 0 if dynamic."""

    name: str
    offset: int
    size: int
    align: int
    dynamic: bool


@dataclass(slots=True)
class Kernel:
    """One entry function.

    Static shared symbols follow the KiB that the hardware reserves; ``dynamic_shared_offset`` is
    where the launch's dynamic shared memory starts after them. ``blocks`` and register slots are
    filled when the code generator loads the kernel. ``local_bytes`` is the stack of one lane.
    ``module_data``: the module's initialised bytes, whose addresses count from MODULE_DATA_WINDOW.
    ``fixes_registers``: whether .maxnreg or .minnctapersm says what a launch has; from kernels with
    neither ptxas drops setmaxnreg (`host.cubin.moving_registers` reads it from machine code).
    ``assembly_lines``: of inline assembly (`declarations.assembly_lines`), where that is known.
    ``target``: what the module is compiled for, "sm_100a" for instance.
    """

    name: str
    params: list[Param]
    shared: dict[str, SharedSymbol]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    blocks: list = field(default_factory=list)
    reqntid: tuple[int, int, int] | None = None
    explicit_cluster: bool = False
    maxntid: tuple[int, int, int] | None = None
    min_ctas_per_sm: int = 1
    max_registers: int | None = None
    fixes_registers: bool = False
    local_bytes: int = 0
    dynamic_shared_offset: int = RESERVED_SHARED_BYTES
    module_data: bytes = b""
    assembly_lines: frozenset[int] | None = None
    target: str = ""

    @property
    def param_bytes(self) -> int:
        """Size of the parameter buffer in bytes."""
        return max((p.offset + p.size for p in self.params), default=0)

    @property
    def shared_bytes(self) -> int:
        """Bytes between the reserved KiB and the dynamic shared memory: the static symbols."""
        return self.dynamic_shared_offset - RESERVED_SHARED_BYTES


# Parsing.

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(\[\s*\d*\s*\])?\s*;")
_CALL = re.compile(r"(?:\(\s*(\w+)\s*\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?$")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr[\s.\w]*?)?"
    r"\s+([\w$]+)(?:\[(\d+)\])?\s*$"
)
_STATEMENT = re.compile(
    r"\s*(?:(?P<brace>[{}])|(?P<line>\.(?:loc|file)\b[^\n]*)|(?P<label>[\w$]+)\s*:(?!:)"
    r"|(?P<text>[^;{}]+(?:\{[^{}]*\}[^;{}]*)*);)"
)
_GUARD = re.compile(r"@\s*(!?)\s*([\w$%]+)\s+")
_OPERAND = re.compile(r"\s*((?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+?)\s*(?:,|$)")
_MEMORY_BASE = re.compile(r"^([\w$%.]+)\s*(?:([+-])\s*(-?\w+))?$")
_INTEGER = re.compile(r"^-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"^-?\d+\.\d*(?:[eE][+-]?\d+)?$")
_FAMILY = re.compile(r"^(.*?)(\d+)$")
_DECLARED = re.compile(r"([\w$%]+)(?:<(\d+)>)?")
_FAMILY_LIMIT = 1 << 20
#: The end of an inlined function, in its own scope.
_RETURN = Operand("label", "$return")


def _integer(text: str) -> int:
    digits = text.rstrip("U").lstrip("-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    value = int(digits, 8) if octal else int(digits, 0)
    return -value if text[0] == "-" else value


def parse_module(text: str) -> dict[str, Kernel]:
    """Parse a PTX module into its entry functions by name.

    Raises PtxSyntaxError for text that does not parse or names that are not declared.
    """
    files = {int(number): name for number, name in _FILE.findall(text)}
    # Comments vanish but line breaks stay, so that positions still give line numbers.
    text = _COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    entries = list(_ENTRY.finditer(text))
    module_text = text[: entries[0].start()] if entries else text
    module_shared = _SHARED.findall(module_text)
    data, target = module_data(module_text), target_of(module_text)
    functions = functions_of(text) if ".func" in text else {}
    kernels = {}
    for entry in entries:
        parser = _KernelParser(text, line_starts, files, functions)
        parser.define_data(data)
        kernel = parser.parse(entry, module_shared)
        kernel.target = target
        kernels[kernel.name] = kernel
    return kernels


def _parse_params(text: str) -> list[Param]:
    params, offset = [], 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = _PARAM.match(declaration)
        if match is None or match[2] not in TYPE_BYTES:
            raise PtxSyntaxError(f"parameter declaration {declaration!r} is not understood")
        align, kind, name, count = match.groups()
        size = TYPE_BYTES[kind] * int(count or 1)
        alignment = int(align or TYPE_BYTES[kind])
        offset = -(-offset // alignment) * alignment
        params.append(Param(name, offset, size, alignment))
        offset += size
    return params


class _Scope:
    """Names declared between one pair of braces."""

    __slots__ = ("parent", "operands", "families", "labels", "tables", "declared")

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.operands: dict[str, Operand] = {}
        self.families: dict[str, tuple[int, str, int]] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.declared: dict[str, tuple[str, int]] = {}

    def chain(self) -> Iterator[_Scope]:
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class _KernelParser:
    """Parses one entry function; holds the position, the scopes and the source location."""

    def __init__(
        self, text: str, line_starts: list[int], files: dict[int, str],
        functions: dict[str, Function],
    ) -> None:  # fmt: skip
        self.text, self.line_starts, self.files = text, line_starts, files
        self.functions = functions
        #: Functions that are being inlined, and the places that each call comes from.
        self.calls: list[tuple[str, tuple]] = [("", ())]
        self.module = self.scope = _Scope(None)
        self.source: tuple[str, int] | None = None
        self.stack: tuple[tuple[str, int], ...] = ()
        self.inlined: dict[tuple[str, ...], tuple[str, ...] | None] = {}
        self.unresolved: list[tuple[int, _Scope]] = []
        self.declarations = 0
        self.call_parameters: set[str] = set()
        self.local_bytes = 0
        self.data = b""

    def define_data(self, data: dict[str, bytes]) -> None:
        """Make the module's initialised byte arrays known by name."""
        for name, content in data.items():
            value = MODULE_DATA_WINDOW + len(self.data)
            self.scope.operands[name] = Operand("imm", name, "int", value)
            self.data += content + bytes(1)

    def parse(self, entry: re.Match, module_shared: list[tuple]) -> Kernel:
        self.kernel = kernel = Kernel(
            entry[1], _parse_params(entry[2] or ""), {}, module_data=self.data
        )
        read_directives(kernel, entry[3])
        self.shared_declarations = list(module_shared)
        self.scope = _Scope(self.module)
        for param in kernel.params:
            self.scope.operands[param.name] = Operand("sym", param.name, "param", param.offset)
        # Shared symbols get their offsets at the end; bodies may declare more, so find them first.
        end = self._body_end(entry.end())
        self.shared_declarations += _SHARED.findall(self.text, entry.end(), end)
        self._place_shared()
        self._parse_body(entry.end())
        self._resolve_labels()
        kernel.local_bytes = -(-self.local_bytes // 16) * 16
        return kernel

    def _body_end(self, position: int) -> int:
        following = _ENTRY.search(self.text, position)
        return following.start() if following else len(self.text)

    def _place_shared(self) -> None:
        kernel, offset, dynamic = self.kernel, RESERVED_SHARED_BYTES, []
        for align, kind, name, count in self.shared_declarations:
            alignment = int(align or TYPE_BYTES[kind])
            count = count.strip("[] ") if count else "1"
            if not count:
                dynamic.append((name, alignment))
                continue
            offset = -(-offset // alignment) * alignment
            size = TYPE_BYTES[kind] * int(count)
            kernel.shared[name] = SharedSymbol(name, offset, size, alignment, False)
            offset += size
        alignment = max((align for _, align in dynamic), default=16)
        kernel.dynamic_shared_offset = -(-offset // alignment) * alignment
        for name, align in dynamic:
            kernel.shared[name] = SharedSymbol(name, kernel.dynamic_shared_offset, 0, align, True)
        for symbol in kernel.shared.values():
            self.module.operands[symbol.name] = Operand("sym", symbol.name, "shared", symbol.offset)

    def _line(self, position: int) -> int:
        return bisect_right(self.line_starts, position)

    def _error(self, why: str, position: int, statement: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"line {self._line(position)}: {why}: {' '.join(statement.split())}")

    def _parse_body(self, position: int) -> None:
        depth, match_at, text = 1, _STATEMENT.match, self.text
        while depth:
            match = match_at(text, position)
            if match is None:
                raise self._error("not a PTX statement", position, text[position : position + 80])
            kind, position = match.lastgroup, match.end()
            if kind == "text":
                statement = match["text"]
                if statement[0] == ".":
                    self._directive(statement, match.start("text"))
                else:
                    self._instruction(statement, match.start("text"))
            elif kind == "brace":
                depth += 1 if match["brace"] == "{" else -1
                outer = self.scope.parent or self.scope
                self.scope = _Scope(self.scope) if match["brace"] == "{" else outer
            elif kind == "label":
                self._label(match["label"], match.start())
            else:
                self._location(match["line"])

    def _label(self, name: str, position: int) -> None:
        if name in self.scope.labels:
            raise self._error("label declared twice in one scope", position, name)
        self.scope.labels[name] = len(self.kernel.instructions)

    def _location(self, directive: str) -> None:
        if directive.startswith(".loc"):
            place, *options = directive.split(",")
            at = tuple(place.split()[1:])
            outer = next((o.split()[1:] for o in options if "inlined_at" in o), None)
            self.inlined[at] = None if outer is None else tuple(outer)
            self.source, self.stack = self._place(at), ()
            below = self.inlined[at]
            while below is not None and len(self.stack) < MAX_DEPTH:
                self.stack = (*self.stack, self._place(below))
                below = self.inlined.get(below)
            self.stack += self.calls[-1][1]

    def _place(self, at: tuple[str, ...]) -> tuple[str, int]:
        return self.files.get(int(at[0]), f"file {at[0]}"), int(at[1])

    def _directive(self, statement: str, position: int) -> None:
        name, _, rest = statement.partition(" ")
        name, rest = (name.split()[0], rest or statement[len(name.split()[0]) :])
        if name == ".reg":
            self._declare_registers(rest, position, statement)
        elif name == ".branchtargets":
            target = next(
                (
                    label
                    for label, index in reversed(self.scope.labels.items())
                    if index == len(self.kernel.instructions)
                ),
                None,
            )
            if target is None:
                raise self._error("a branch-target table needs a label", position, statement)
            self.scope.tables[target] = tuple(part.strip() for part in rest.split(","))
        elif name == ".local":
            self._declare_local(statement, position)
        elif name == ".param":
            # Parameters and results of a call: registers, or local memory for what is no scalar.
            if "[" in rest:
                self._declare_local(statement.replace(".param", ".local", 1), position)
            else:
                rest = re.sub(r"\.align\s+\d+", "", rest).strip()
                self.call_parameters.update(rest.replace(",", " ").split()[1:])
                self._declare_registers(rest, position, statement)
        elif name not in (".pragma", ".shared", ".callprototype"):
            raise self._error("directive not supported in a kernel body", position, statement)

    def _declare_registers(self, rest: str, position: int, statement: str) -> None:
        kind, _, names = rest.strip().partition(" ")
        kind = kind.split()[0].lstrip(".")
        names = names or rest.strip()[len(kind) + 1 :]
        if kind not in TYPE_BYTES:
            raise self._error(f"register type .{kind} is not supported", position, statement)
        for name, count in _DECLARED.findall(names):
            self.declarations += 1
            if count:
                self.scope.families[name] = (int(count), kind, self.declarations)
            else:
                self.scope.declared[name] = (kind, self.declarations)

    def _declare_local(self, statement: str, position: int) -> None:
        match = re.match(
            r"\.local\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", statement
        )
        if match is None:
            raise self._error("local declaration is not understood", position, statement)
        align, kind, name, count = match.groups()
        alignment = int(align or TYPE_BYTES[kind])
        offset = -(-self.local_bytes // alignment) * alignment
        self.local_bytes = offset + TYPE_BYTES[kind] * int(count or 1)
        self.scope.operands[name] = Operand("sym", name, "local", offset)

    def _instruction(self, statement: str, position: int) -> None:
        guard, body = None, statement
        if statement[0] == "@":
            match = _GUARD.match(statement)
            if match is None:
                raise self._error("guard is not understood", position, statement)
            guard = self._named(match[2], statement)
            if match[1]:
                guard = Operand("pred", guard.name, "pred", negated=True, register=guard.register)
            body = statement[match.end() :]
        name, *rest = body.split(None, 1)
        opcode, *modifiers = name.split(".")
        index = len(self.kernel.instructions)
        if opcode in ("bra", "brx"):
            operands = self._branch_operands(rest[0] if rest else "", opcode, statement)
            self.unresolved.append((index, self.scope))
        elif opcode == "call":
            modifiers, operands = self._call(rest[0] if rest else "", statement)
            if modifiers[0] in self.functions:
                self._inline(self.functions[modifiers[0]], guard, operands, position)
                return
        elif opcode == "ret" and len(self.calls) > 1:
            opcode, modifiers, operands = "bra", ["uni"] * (guard is None), (_RETURN,)
            self.unresolved.append((index, self.scope))
        elif modifiers[:1] == ["param"] and opcode in ("ld", "st"):
            opcode, modifiers, operands = self._parameter(opcode, modifiers, rest[0], statement)
        else:
            operands = self._operands(rest[0], statement) if rest else ()
        self.kernel.instructions.append(
            Instruction(
                index,
                opcode,
                tuple(modifiers),
                guard,
                operands,
                " ".join(statement.split()),
                self._line(position),
                self.source,
                self.stack,
            )
        )

    def _inline(
        self, function: Function, guard: Operand | None, actual: tuple[Operand, ...], position: int
    ) -> None:
        """Parse a function's body in place of a call of it."""
        statement = f"call of {function.name}"
        if guard is not None:
            raise self._error("a guarded call of a function is not supported", position, statement)
        if any(name == function.name for name, _ in self.calls) or len(self.calls) > MAX_DEPTH:
            raise self._error("calls are inlined, recursion is not supported", position, statement)
        if len(self.kernel.instructions) > MAX_INSTRUCTIONS:
            raise self._error("inlined calls make the kernel too long", position, statement)
        values = actual if len(actual) == len(function.formals) else actual[1:]
        if len(values) != len(function.formals):
            raise self._error("its arguments are not those declared", position, statement)
        state = self.scope, self.source, self.stack
        self.scope = scope = _Scope(self.module)
        scope.operands.update(zip(function.formals, values, strict=True))
        self.calls.append((function.name, (self.source, *self.stack) if self.source else ()))
        self._parse_body(function.body)
        scope.labels[_RETURN.name] = len(self.kernel.instructions)
        self.calls.pop()
        self.scope, self.source, self.stack = state

    def _call(self, text: str, statement: str) -> tuple[list[str], tuple[Operand, ...]]:
        """Return (the function's name, result or sink and arguments) of a direct call."""
        match = _CALL.match(text.strip())
        if match is None:
            return ["?"], ()
        result, name, arguments = match.groups()
        names = [result or "_", *(part.strip() for part in (arguments or "").split(","))]
        try:
            return [name], tuple(self._operand(part, statement) for part in names if part)
        except PtxSyntaxError:
            return [name], ()

    def _parameter(
        self, opcode: str, modifiers: list[str], text: str, statement: str
    ) -> tuple[str, list[str], tuple[Operand, ...]]:
        """ld.param and st.param: moves, if the parameter is that of a call in this body."""
        operands = self._operands(text, statement)
        is_load = opcode == "ld"
        place = operands[is_load]
        base = place.base
        if base is not None and base.type == "local":
            return opcode, ["local", *modifiers[1:]], operands
        if base is not None and not place.value and base.name in self.call_parameters:
            value = operands[not is_load]
            opcode, modifiers = moved(modifiers[-1], TYPE_BYTES[base.type], is_load)
            return opcode, modifiers, (value, base) if is_load else (base, value)
        return opcode, modifiers, operands

    def _branch_operands(self, rest: str, opcode: str, statement: str) -> tuple[Operand, ...]:
        names = [part.strip() for part in rest.split(",")]
        label = Operand("label", names[-1])
        if opcode == "bra":
            return (label,)
        return (self._operand(names[0], statement), label)

    def _operands(self, text: str, statement: str) -> tuple[Operand, ...]:
        if "{" in text or "[" in text:
            parts = [match[1] for match in _OPERAND.finditer(text.strip())]
        else:
            parts = [part.strip() for part in text.split(",")]
        return tuple([self._operand(part, statement) for part in parts])

    def _operand(self, text: str, statement: str) -> Operand:
        known = self.scope.operands.get(text)
        if known is not None:
            return known
        first = text[0] if text else ""
        if first == "{":
            return Operand("vec", items=self._operands(text[1:-1], statement))
        if first == "[":
            return self._memory(text[1:-1].strip(), statement)
        if "|" in text:
            return Operand(
                "pair",
                items=tuple(self._operand(part.strip(), statement) for part in text.split("|")),
            )
        if first.isdigit() or first == "-":
            operand = self._number(text, statement)
        elif first == "!":
            plain = self._named(text[1:].strip(), statement)
            operand = Operand("pred", plain.name, "pred", negated=True, register=plain.register)
        else:
            return self._named(text, statement)
        self.scope.operands[text] = operand
        return operand

    def _memory(self, text: str, statement: str) -> Operand:
        head, *rest = [match[1] for match in _OPERAND.finditer(text)]
        match = _MEMORY_BASE.match(head)
        if match is None:
            raise PtxSyntaxError(f"memory operand [{text}] is not understood: {statement}")
        base, sign, offset = match.groups()
        value = _integer(offset) * (-1 if sign == "-" else 1) if offset else 0
        return Operand(
            "mem",
            value=value,
            base=self._operand(base, statement),
            items=tuple(self._operand(part, statement) for part in rest),
        )

    def _number(self, text: str, statement: str) -> Operand:
        if _INTEGER.match(text):
            return Operand("imm", text, "int", _integer(text))
        if text[:2] in ("0f", "0F") and len(text) == 10:
            return Operand("imm", text, "f32", int(text[2:], 16))
        if text[:2] in ("0d", "0D") and len(text) == 18:
            return Operand("imm", text, "f64", int(text[2:], 16))
        if _FLOAT.match(text):
            bits = struct.unpack("<Q", struct.pack("<d", float(text)))[0]
            return Operand("imm", text, "f64", bits)
        raise PtxSyntaxError(f"number {text!r} is not understood: {statement}")

    def _named(self, name: str, statement: str) -> Operand:
        """A register, symbol, special register or constant by name, the innermost scope first."""
        family = _FAMILY.match(name)
        for scope in self.scope.chain():
            operand = scope.operands.get(name)
            if operand is not None:
                return operand
            if name in scope.declared:
                kind, order = scope.declared[name]
                return self._new_register(scope, name, kind, order * _FAMILY_LIMIT)
            if family is not None and family[1] in scope.families:
                count, kind, order = scope.families[family[1]]
                number = int(family[2])
                if number < count and str(number) == family[2]:
                    return self._new_register(scope, name, kind, order * _FAMILY_LIMIT + number)
        if name == "_":
            operand = Operand("sink", name)
        elif name == "WARP_SZ":
            operand = Operand("imm", name, "int", 32)
        elif name.startswith("%"):
            operand = Operand("special", name)
        else:
            raise PtxSyntaxError(f"name {name!r} is not declared: {' '.join(statement.split())}")
        self.scope.operands[name] = operand
        return operand

    def _new_register(self, scope: _Scope, name: str, kind: str, order: int) -> Operand:
        register = Register(name, kind, order)
        self.kernel.registers.append(register)
        operand = Operand("pred" if kind == "pred" else "reg", name, kind, register=register)
        scope.operands[name] = operand
        return operand

    def _resolve_labels(self) -> None:
        for index, scope in self.unresolved:
            instruction = self.kernel.instructions[index]
            *values, label = instruction.operands
            if instruction.opcode == "brx":
                names = next(
                    (s.tables[label.name] for s in scope.chain() if label.name in s.tables), None
                )
                if names is None:
                    raise PtxSyntaxError(
                        f"no branch-target table {label.name!r}: {instruction.text}"
                    )
                items = tuple(self._label_operand(name, scope, instruction) for name in names)
                target = Operand("targets", label.name, items=items)
            else:
                target = self._label_operand(label.name, scope, instruction)
            instruction.operands = (*values, target)

    def _label_operand(self, name: str, scope: _Scope, instruction: Instruction) -> Operand:
        for level in scope.chain():
            if name in level.labels:
                return Operand("label", name, value=level.labels[name])
        raise PtxSyntaxError(f"label {name!r} is not declared: {instruction.text}")
