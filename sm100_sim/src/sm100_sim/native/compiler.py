"""Native routines (`language`) to LLVM IR."""

from __future__ import annotations

import ast
import inspect
import platform
import struct
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

from .language import External, Native, Pointer, Scalar, Signature, boolean, f32, field_type, u64

_INTEGER = ("signed", "unsigned")
_ARITHMETIC = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and", ast.BitOr: "or",
    ast.BitXor: "xor", ast.LShift: "shl",
}  # fmt: skip
_COMPARISONS = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip


class NativeError(TypeError):
    """A construct that native routines do not have, or types that do not fit."""


class Value(NamedTuple):
    """A typed LLVM value; a literal has type None and its Python number as text."""

    type: Any
    text: Any


def signature(routine: Native) -> tuple[dict[str, Any], Any]:
    """Parameters by name, and the result (None for none)."""
    function = routine.function
    names = {
        name: eval(text, function.__globals__) if isinstance(text, str) else text
        for name, text in function.__annotations__.items()
    }
    result = names.pop("return", None)
    return names, result


def module_text(exported: Iterable[Native]) -> str:
    """IR of the routines and of all that they call; only `exported` ones are visible outside."""
    exported = list(exported)
    pending, done, declared = list(exported), {}, set()
    while pending:
        routine = pending.pop()
        if routine.name in done:
            continue
        body = _Routine(routine)
        linkage = "" if routine in exported else "internal "
        done[routine.name] = body.text(linkage)
        pending += body.called
        declared |= body.declared
    return "\n".join([*sorted(declared), *done.values()])


class _Routine:
    """The translation of one routine."""

    def __init__(self, routine: Native) -> None:
        self.routine = routine
        self.globals = routine.function.__globals__
        self.parameters, self.result = signature(routine)
        self.lines: list[str] = []
        self.entry: list[str] = []
        self.locals: dict[str, tuple[Any, str]] = {}
        self.loops: list[tuple[str, str]] = []
        self.called: list[Native] = []
        self.declared: set[str] = set()
        self.names = 0
        self.node: ast.AST | None = None

    def text(self, linkage: str) -> str:
        """The function definition."""
        source = textwrap.dedent(inspect.getsource(self.routine.function))
        definition: Any = ast.parse(source).body[0]
        for name, kind in self.parameters.items():
            slot = self.local(name, kind)
            self.entry.append(f"  store {kind.llvm} %p.{name}, ptr {slot}")
        for statement in definition.body:
            self.statement(statement)
        if self.result is None:
            self.emit("ret void")
        else:
            self.emit("unreachable")
        arguments = ", ".join(f"{kind.llvm} %p.{name}" for name, kind in self.parameters.items())
        result = "void" if self.result is None else self.result.llvm
        head = f"define {linkage}{result} @{self.routine.name}({arguments}) #0 {{"
        return "\n".join(
            [head, "entry:", *self.entry, "  br label %l.start", "l.start:", *self.lines, "}"]
        )

    # Building blocks.

    def fail(self, why: str) -> NativeError:
        line = getattr(self.node, "lineno", 0)
        return NativeError(f"{self.routine.name}, line {line} of its source: {why}")

    def emit(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def name(self, text: str) -> str:
        self.names += 1
        self.emit(f"%v{self.names} = {text}")
        return f"%v{self.names}"

    def label(self) -> str:
        self.names += 1
        return f"l{self.names}"

    def begin(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def local(self, name: str, kind: Any) -> str:
        slot = f"%s.{name}"
        self.locals[name] = (kind, slot)
        self.entry.append(f"  {slot} = alloca {kind.llvm}")
        return slot

    # Statements.

    def statement(self, node: ast.stmt) -> None:
        self.node = node
        method = getattr(self, "do_" + type(node).__name__, None)
        if method is None:
            raise self.fail(f"{type(node).__name__} is not part of the language")
        method(node)

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.value(node.value)

    def do_Pass(self, node: ast.Pass) -> None:
        """Nothing."""

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name) or node.value is None:
            raise self.fail("an annotation stands where a name is given a value, and nowhere else")
        kind = eval(ast.unparse(node.annotation), self.globals)
        name = node.target.id
        if name not in self.locals:
            self.local(name, kind)
        elif self.locals[name][0] != kind:
            raise self.fail(f"{name} has another type already")
        self.assign(node.target, self.value(node.value))

    def do_Assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        self.assign(target, self.value(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        old = self.value(node.target)
        self.assign(node.target, self.binary(node.op, old, self.value(node.value)))

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            if target.id not in self.locals:
                if value.type is None:
                    raise self.fail(f"a literal does not tell the type of {target.id}: annotate")
                self.local(target.id, value.type)
            kind, place = self.locals[target.id]
        else:
            kind, place = self.place(target)
        self.emit(f"store {kind.llvm} {self.fit(value, kind)}, ptr {place}")

    def place(self, node: ast.expr) -> tuple[Any, str]:
        """Return (type, address) of a field or an element."""
        if isinstance(node, ast.Attribute):
            base = self.value(node.value)
            if not isinstance(base.type, Pointer) or isinstance(base.type.target, Scalar):
                raise self.fail(f".{node.attr} of something that is no structure")
            offset, kind, _ = field_type(base.type.target, node.attr)
            return kind, self.name(f"getelementptr inbounds i8, ptr {base.text}, i64 {offset}")
        if isinstance(node, ast.Subscript):
            base, index = self.value(node.value), self.value(node.slice)
            return base.type.target, self.element(base, index)
        raise self.fail("this cannot be assigned to")

    def element(self, base: Value, index: Value) -> str:
        if not isinstance(base.type, Pointer):
            raise self.fail("only pointers have elements")
        text = self.text_of(self.cast(index, u64))
        if base.type.size == 1:
            return self.name(f"getelementptr inbounds i8, ptr {base.text}, i64 {text}")
        if isinstance(base.type.target, (Scalar, Pointer)):
            kind = base.type.target.llvm
            return self.name(f"getelementptr inbounds {kind}, ptr {base.text}, i64 {text}")
        bytes_ = self.name(f"mul i64 {text}, {base.type.size}")
        return self.name(f"getelementptr inbounds i8, ptr {base.text}, i64 {bytes_}")

    def do_Return(self, node: ast.Return) -> None:
        if self.result is None:
            self.emit("ret void")
        elif node.value is None:
            raise self.fail(f"a {self.result.llvm} is returned, and no value is given")
        else:
            self.emit(f"ret {self.result.llvm} {self.fit(self.value(node.value), self.result)}")
        self.begin(self.label())

    def do_If(self, node: ast.If) -> None:
        then, other, end = self.label(), self.label(), self.label()
        self.branch(node.test, then, other)
        self.begin(then)
        self.block(node.body)
        self.emit(f"br label %{end}")
        self.begin(other)
        self.block(node.orelse)
        self.emit(f"br label %{end}")
        self.begin(end)

    def branch(self, test: ast.expr, then: str, other: str) -> None:
        if isinstance(test, ast.BoolOp):
            is_and = isinstance(test.op, ast.And)
            for part in test.values[:-1]:
                following = self.label()
                self.branch(part, following if is_and else then, other if is_and else following)
                self.begin(following)
            self.branch(test.values[-1], then, other)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.branch(test.operand, other, then)
        else:
            self.emit(f"br i1 {self.truth(self.value(test))}, label %{then}, label %{other}")

    def do_While(self, node: ast.While) -> None:
        test, body, end = self.label(), self.label(), self.label()
        self.emit(f"br label %{test}")
        self.begin(test)
        self.branch(node.test, body, end)
        self.begin(body)
        self.loops.append((test, end))
        self.block(node.body)
        self.loops.pop()
        self.emit(f"br label %{test}")
        self.begin(end)

    def do_For(self, node: ast.For) -> None:
        """Compile `for name in range({first,} end)`: a u64 counter."""
        call = node.iter
        if not (
            isinstance(call, ast.Call)
            and getattr(call.func, "id", "") == "range"
            and 1 <= len(call.args) <= 2
            and isinstance(node.target, ast.Name)
        ):
            raise self.fail("loops run over range(end) or range(first, end)")
        bounds = [self.fit(self.cast(self.value(a), u64), u64) for a in call.args]
        first, last = bounds if len(bounds) == 2 else ("0", bounds[0])
        name = node.target.id
        if name not in self.locals:
            self.local(name, u64)
        slot = self.locals[name][1]
        self.emit(f"store i64 {first}, ptr {slot}")
        test, body, step, end = self.label(), self.label(), self.label(), self.label()
        self.emit(f"br label %{test}")
        self.begin(test)
        counter = self.name(f"load i64, ptr {slot}")
        self.emit(
            f"br i1 {self.name(f'icmp ult i64 {counter}, {last}')}, label %{body}, label %{end}"
        )
        self.begin(body)
        self.loops.append((step, end))
        self.block(node.body)
        self.loops.pop()
        self.emit(f"br label %{step}")
        self.begin(step)
        counter = self.name(f"load i64, ptr {slot}")
        self.emit(f"store i64 {self.name(f'add nuw nsw i64 {counter}, 1')}, ptr {slot}")
        self.emit(f"br label %{test}")
        self.begin(end)

    def do_Break(self, node: ast.Break) -> None:
        self.emit(f"br label %{self.loops[-1][1]}")
        self.begin(self.label())

    def do_Continue(self, node: ast.Continue) -> None:
        self.emit(f"br label %{self.loops[-1][0]}")
        self.begin(self.label())

    # Expressions.

    def value(self, node: ast.expr) -> Value:
        method = getattr(self, "of_" + type(node).__name__, None)
        if method is None:
            raise self.fail(f"{type(node).__name__} is not part of the language")
        return method(node)

    def fit(self, value: Value, kind: Any) -> str:
        """Text of a value where `kind` must stand."""
        if value.type == kind:
            return value.text
        if value.type is not None:
            raise self.fail(f"{value.type} where {kind} must stand")
        if isinstance(kind, Pointer):
            if value.text == 0:
                return "null"
            raise self.fail("a number where a pointer must stand")
        if kind.kind == "float":
            bits = struct.unpack("<Q", struct.pack("<d", float(value.text)))[0]
            return f"0x{bits:016X}"
        return str(int(value.text))

    def text_of(self, value: Value) -> str:
        return self.fit(value, value.type)

    def truth(self, value: Value) -> str:
        if value.type == boolean:
            return value.text
        if value.type is None:
            return "true" if value.text else "false"
        if isinstance(value.type, Pointer):
            return self.name(f"icmp ne ptr {value.text}, null")
        return self.name(f"icmp ne {value.type.llvm} {value.text}, 0")

    def of_Constant(self, node: ast.Constant) -> Value:
        if isinstance(node.value, bool):
            return Value(boolean, "true" if node.value else "false")
        return Value(None, node.value)

    def of_Name(self, node: ast.Name) -> Value:
        if node.id in self.locals:
            kind, slot = self.locals[node.id]
            return Value(kind, self.name(f"load {kind.llvm}, ptr {slot}"))
        constant = self.globals.get(node.id)
        if isinstance(constant, int):
            return Value(None, constant)
        raise self.fail(f"{node.id} is neither a variable nor an integer constant")

    def of_Attribute(self, node: ast.Attribute) -> Value:
        kind, place = self.place(node)
        in_place = field_type(self._structure(node), node.attr)[2]
        if in_place:
            return Value(kind, place)
        return Value(kind, self.name(f"load {kind.llvm}, ptr {place}"))

    def _structure(self, node: ast.Attribute) -> Any:
        lines, names = self.lines, self.names
        self.lines = []
        found = self.value(node.value).type.target
        self.lines, self.names = lines, names
        return found

    def of_Subscript(self, node: ast.Subscript) -> Value:
        kind, place = self.place(node)
        if not isinstance(kind, (Scalar, Pointer)):
            return Value(Pointer(kind), place)
        return Value(kind, self.name(f"load {kind.llvm}, ptr {place}"))

    def of_BinOp(self, node: ast.BinOp) -> Value:
        return self.binary(node.op, self.value(node.left), self.value(node.right))

    def binary(self, operation: ast.operator, a: Value, b: Value) -> Value:
        if a.type is None and b.type is None:
            return Value(
                None,
                eval(
                    compile(
                        ast.Expression(
                            ast.fix_missing_locations(
                                ast.BinOp(ast.Constant(a.text), operation, ast.Constant(b.text))
                            )
                        ),
                        "",
                        "eval",
                    )
                ),
            )
        if isinstance(a.type, Pointer) and isinstance(operation, ast.Add):
            return Value(a.type, self.element(a, b))
        kind = a.type if b.type is None else b.type
        left, right = self.fit(a, kind), self.fit(b, kind)
        if kind.kind == "float":
            name = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul"}[type(operation)]
        elif type(operation) in _ARITHMETIC:
            name = _ARITHMETIC[type(operation)]
        else:
            unsigned = kind.kind == "unsigned"
            name = {
                ast.RShift: "lshr" if unsigned else "ashr",
                ast.FloorDiv: "udiv" if unsigned else "",
                ast.Mod: "urem" if unsigned else "",
            }[type(operation)]
        if not name:
            raise self.fail("division of signed integers")
        return Value(kind, self.name(f"{name} {kind.llvm} {left}, {right}"))

    def of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            truth = self.truth(self.value(node.operand))
            return Value(boolean, self.name(f"xor i1 {truth}, true"))
        value = self.value(node.operand)
        if value.type is None:
            return Value(None, -value.text if isinstance(node.op, ast.USub) else ~value.text)
        if isinstance(node.op, ast.Invert):
            return Value(value.type, self.name(f"xor {value.type.llvm} {value.text}, -1"))
        return Value(value.type, self.name(f"sub {value.type.llvm} 0, {value.text}"))

    def of_Compare(self, node: ast.Compare) -> Value:
        if len(node.ops) != 1:
            raise self.fail("comparisons have two sides")
        a, b = self.value(node.left), self.value(node.comparators[0])
        kind = a.type if b.type is None else b.type
        name = _COMPARISONS[type(node.ops[0])]
        if isinstance(kind, Scalar) and kind.kind == "float":
            text = f"fcmp o{name}"
        elif name in ("eq", "ne"):
            text = f"icmp {name}"
        else:
            signed = isinstance(kind, Scalar) and kind.kind == "signed"
            text = f"icmp {'s' if signed else 'u'}{name}"
        return Value(
            boolean, self.name(f"{text} {kind.llvm} {self.fit(a, kind)}, {self.fit(b, kind)}")
        )

    def of_BoolOp(self, node: ast.BoolOp) -> Value:
        yes = ast.Constant(True)
        return self.of_IfExp(ast.IfExp(node, yes, ast.Constant(False)))

    def of_IfExp(self, node: ast.IfExp) -> Value:
        then, other, end = self.label(), self.label(), self.label()
        self.names += 1
        slot = f"%t{self.names}"
        self.branch(node.test, then, other)
        self.begin(then)
        first = self.value(node.body)
        mark = len(self.lines)
        self.begin(other)
        second = self.value(node.orelse)
        kind = first.type if second.type is None else second.type
        if kind is None:
            raise self.fail("two literals do not tell the type of a conditional expression")
        self.entry.append(f"  {slot} = alloca {kind.llvm}")
        self.emit(f"store {kind.llvm} {self.fit(second, kind)}, ptr {slot}")
        self.emit(f"br label %{end}")
        self.lines[mark:mark] = [
            f"  store {kind.llvm} {self.fit(first, kind)}, ptr {slot}",
            f"  br label %{end}",
        ]
        self.begin(end)
        return Value(kind, self.name(f"load {kind.llvm}, ptr {slot}"))

    # Calls.

    def of_Call(self, node: ast.Call) -> Value:
        function: Any = node.func
        if isinstance(function, ast.Subscript):
            kind = eval(ast.unparse(function), self.globals)
            return self.cast(self.value(node.args[0]), kind)
        builtin = getattr(self, "call_" + function.id, None)
        if builtin is not None:
            return builtin(*node.args)
        target = self.globals.get(function.id)
        if isinstance(target, Scalar):
            return self.cast(self.value(node.args[0]), target)
        if isinstance(target, Native):
            self.called.append(target)
            parameters, result = signature(target)
            kinds = tuple(parameters.values())
        elif isinstance(target, External):
            result, kinds = target.result, target.parameters
        else:
            raise self.fail(f"{function.id} is no native routine")
        return self._call(f"@{target.name}", result, kinds, node.args)

    def _call(self, target: str, result: Any, kinds: tuple, nodes: list[ast.expr]) -> Value:
        if len(kinds) != len(nodes):
            raise self.fail(f"{target} takes {len(kinds)} arguments")
        arguments = ", ".join(
            f"{kind.llvm} {self.fit(self.value(node), kind)}"
            for kind, node in zip(kinds, nodes, strict=True)
        )
        if result is None:
            self.emit(f"call void {target}({arguments})")
            return Value(None, 0)
        return Value(result, self.name(f"call {result.llvm} {target}({arguments})"))

    def cast(self, value: Value, kind: Any) -> Value:
        source = value.type
        if source is None:
            return Value(kind, self.fit(value, kind))
        if source == kind:
            return value
        if isinstance(kind, Pointer):
            if isinstance(source, Pointer):
                return Value(kind, value.text)
            return Value(kind, self.name(f"inttoptr {source.llvm} {value.text} to ptr"))
        if isinstance(source, Pointer):
            return Value(kind, self.name(f"ptrtoint ptr {value.text} to {kind.llvm}"))
        if kind == boolean:
            return Value(boolean, self.truth(value))
        name = self._conversion(source, kind)
        if not name:
            return Value(kind, value.text)
        return Value(kind, self.name(f"{name} {source.llvm} {value.text} to {kind.llvm}"))

    def _conversion(self, source: Scalar, kind: Scalar) -> str:
        if kind.kind == "float":
            return "sitofp" if source.kind == "signed" else "uitofp"
        if source.kind == "float":
            return "fptosi" if kind.kind == "signed" else "fptoui"
        if source.bits == kind.bits:
            return ""
        if source.bits > kind.bits:
            return "trunc"
        return "sext" if source.kind == "signed" else "zext"

    def _intrinsic(self, name: str, node: ast.expr, extra: str = "") -> Value:
        value = self.value(node)
        kind = value.type.llvm
        self.declared.add(f"declare {kind} @llvm.{name}.{kind}({kind}{', i1' if extra else ''})")
        return Value(
            value.type, self.name(f"call {kind} @llvm.{name}.{kind}({kind} {value.text}{extra})")
        )

    def call_popcount(self, node: ast.expr) -> Value:
        return self._intrinsic("ctpop", node)

    def call_trailing_zeros(self, node: ast.expr) -> Value:
        return self._intrinsic("cttz", node, ", i1 false")

    def call_copy(self, target: ast.expr, source: ast.expr, size: ast.expr) -> Value:
        self.declared.add("declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        to, start = self.value(target), self.value(source)
        count = self.fit(self.value(size), u64)
        self.emit(
            f"call void @llvm.memcpy.p0.p0.i64(ptr {to.text}, ptr {start.text}, "
            f"i64 {count}, i1 false)"
        )
        return Value(None, 0)

    def call_fill(self, target: ast.expr, byte: ast.expr, size: ast.expr) -> Value:
        self.declared.add("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
        to, value = self.value(target), self.value(byte)
        count = self.fit(self.value(size), u64)
        self.emit(
            f"call void @llvm.memset.p0.i64(ptr {to.text}, i8 {value.text}, i64 {count}, i1 false)"
        )
        return Value(None, 0)

    def call_stack(self, kind: ast.expr, count: ast.expr) -> Value:
        element = eval(ast.unparse(kind), self.globals)
        number = eval(ast.unparse(count), self.globals)
        self.names += 1
        slot = f"%t{self.names}"
        self.entry.append(f"  {slot} = alloca [{number} x {element.llvm}], align 64")
        return Value(Pointer(element), slot)

    def call_invoke(self, signature: ast.expr, target: ast.expr, *nodes: ast.expr) -> Value:
        kind: Signature = eval(ast.unparse(signature), self.globals)
        address = self.value(target)
        pointer = address.text
        if not isinstance(address.type, Pointer):
            pointer = self.name(f"inttoptr i64 {self.fit(address, u64)} to ptr")
        return self._call(pointer, kind.result, kind.parameters, list(nodes))

    def call_cycles(self) -> Value:
        # The cycle counter of other processors is not for users.
        x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
        name = "@llvm.readcyclecounter" if x86 else "@llvm.readsteadycounter"
        self.declared.add(f"declare i64 {name}()")
        return Value(u64, self.name(f"call i64 {name}()"))

    def call_bits_of(self, node: ast.expr) -> Value:
        value = self.value(node)
        kind: Any = f32 if value.type.kind in _INTEGER else Scalar("i32", 32, "unsigned")
        return Value(kind, self.name(f"bitcast {value.type.llvm} {value.text} to {kind.llvm}"))

    def call_widen_bf16(self, target: ast.expr, source: ast.expr) -> Value:
        raw = self.name(f"load <8 x i16>, ptr {self.value(source).text}, align 2")
        wide = self.name(f"zext <8 x i16> {raw} to <8 x i32>")
        words = self.name(f"shl <8 x i32> {wide}, <{', '.join(['i32 16'] * 8)}>")
        self.emit(f"store <8 x i32> {words}, ptr {self.value(target).text}, align 4")
        return Value(None, 0)

    def call_widen_f16(self, target: ast.expr, source: ast.expr) -> Value:
        raw = self.name(f"load <8 x half>, ptr {self.value(source).text}, align 2")
        wide = self.name(f"fpext <8 x half> {raw} to <8 x float>")
        self.emit(f"store <8 x float> {wide}, ptr {self.value(target).text}, align 4")
        return Value(None, 0)

    def call_half_to_float(self, node: ast.expr) -> Value:
        half = self.name(f"bitcast i16 {self.value(node).text} to half")
        return Value(f32, self.name(f"fpext half {half} to float"))
