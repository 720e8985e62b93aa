"""The instruction table: a row without a hole for every opcode, and nothing beside the table."""

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from kernel_text import kernel_text, run_kernel_text
from project import DOCS, PACKAGE

from sm100_sim.isa import columns, load_table, table
from sm100_sim.isa.columns import (
    ByModifier,
    Effect,
    Event,
    NativeForm,
    Recorded,
    Rule,
    Ties,
    require_complete,
)
from sm100_sim.isa.shared import shared_address, submit
from sm100_sim.isa.table import IncompleteRow, effect_of, machine_op, rows, split_modifiers
from sm100_sim.launcher import forget_kernels, parsed_kernel
from sm100_sim.mutation.score import synchronisation
from sm100_sim.ptx.parser import parse_module
from sm100_sim.sanitizer import hooks, sanitizer
from sm100_sim.state.warp import uniform
from sm100_sim.timing.machine_code import events, mixes
from sm100_sim.translate import native_forms
from sm100_sim.translate.blocks import uses_and_definitions
from sm100_sim.translate.kernel import translate

pytestmark = pytest.mark.simulator

COMPLETE = {
    "rule": Rule.BY_OBJECTS, "trace": Recorded.ENTRY, "event": Event.NONE, "effect": Effect.NONE,
    "ties": Ties.NEVER,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _same_table_afterwards():
    load_table()
    with table.temporary_rows():
        yield


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("column", COMPLETE)
@pytest.mark.parametrize("cell", ["absent", "not a value"])
def test_a_row_with_a_hole_is_refused(column, cell):
    row = {name: value for name, value in COMPLETE.items() if name != column}
    if cell != "absent":
        row[column] = cell
    with pytest.raises(IncompleteRow, match=f"'planted.row'.*{column}.*accepted are"):
        machine_op("planted.row", **row)(lambda instruction, kernel: None)
    assert "planted.row" not in rows()
    machine_op("planted.row", **COMPLETE)(lambda instruction, kernel: None)


def test_a_hole_for_some_modifiers_is_one():
    row = {**COMPLETE, "event": ByModifier({"global": Event.TMA_STORE}, None)}
    with pytest.raises(IncompleteRow, match="'event'"):
        machine_op("planted.row", **row)(lambda instruction, kernel: None)


def test_a_module_with_such_a_row_cannot_be_imported(tmp_path, monkeypatch):
    source = "".join(
        f"from sm100_sim.isa.{module} import {name}\n"
        for module, name in (("columns", "Effect, Event, Recorded, Ties"), ("table", "machine_op"))
    ) + (
        "@machine_op('planted.row', trace=Recorded.ENTRY, event=Event.NONE, effect=Effect.NONE,\n"
        "            ties=Ties.NEVER)\n"
        "def bind(instruction, kernel):\n    return lambda warp, lanes: None\n"
    )
    (tmp_path / "planted_instructions.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(IncompleteRow, match=r"'planted.row'.*'rule'"):
        importlib.import_module("planted_instructions")
    assert "planted_instructions" not in sys.modules


@pytest.mark.parametrize(
    "row",
    [
        {"rule": Rule.ARRIVE}, {"trace": Recorded.ENTRY}, {"event": Event.ARRIVE},
        {"effect": Effect.MMA}, {"synchronises": True}, {"native": NativeForm.ORDER},
        {"rule": Rule.LOGGED}, {"access": columns.MemoryAccess.LOAD},
    ],
)  # fmt: skip
def test_an_inline_row_says_nothing_that_nobody_would_do(row):
    with pytest.raises(IncompleteRow, match=r"planted.row"):
        table.inline_op("planted.row", **{"rule": Rule.COMPUTES, "ties": Ties.NEVER, **row})(
            lambda emitter, instruction: None
        )


@pytest.mark.parametrize(
    "row",
    [
        {"rule": Rule.FENCE}, {"rule": Rule.COMPUTES, "effect": Effect.STORE},
        {"rule": Rule.NOT_FOLLOWED, "effect": Effect.MMA},
        {"trace": Recorded.NOTHING, "event": Event.MMA}, {"rule": Rule.LOGGED},
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself_is_refused(row):
    with pytest.raises(IncompleteRow, match=r"planted.row"):
        machine_op("planted.row", **{**COMPLETE, **row})(lambda instruction, kernel: None)


def _used(column: str) -> set:
    cells = [getattr(row, column) for row in rows().values()]
    return {
        value
        for cell in cells
        for value in (cell.values if isinstance(cell, ByModifier) else (cell,))
    }


@pytest.mark.parametrize(
    ("column", "values"),
    [("rule", Rule), ("trace", Recorded), ("event", Event), ("effect", Effect), ("ties", Ties),
     ("native", NativeForm), ("access", columns.MemoryAccess), ("mix", columns.Mix),
     ("jump", columns.Jump)],
)  # fmt: skip
def test_every_value_of_a_column_stands_in_a_row(column, values):
    assert _used(column) - {None} == set(values)


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("atom.shared.add.u32 %r0, [smem], %r1;", {"%r1"}, {"%r0"}),
        ("red.shared.add.u32 [smem], %r1;", {"%r1"}, set()),
        ("bar.red.popc.u32 %r0, 1, %p1;", {"%p1"}, {"%r0"}),
        ("bar.sync %r0;", {"%r0"}, set()),
        ("mbarrier.try_wait.parity.shared.b64 %p0, [smem], %r1;", {"%r1"}, {"%p0"}),
        ("mbarrier.arrive.shared.b64 %rd0, [%r1];", {"%r1"}, {"%rd0"}),
        ("setp.eq.u32 %p0, %r0, %r1;", {"%r0", "%r1"}, {"%p0"}),
        ("st.shared.v2.b32 [%r0], {%r1, %r2};", {"%r0", "%r1", "%r2"}, set()),
    ],
)  # fmt: skip
def test_what_an_instruction_reads_and_writes(text, reads, writes):
    kernel = parse_module(kernel_text(text, 0))["test"]
    used, defined, _ = uses_and_definitions(kernel.instructions[0])
    assert {r.name for r in used} == reads and {r.name for r in defined} == writes


def test_what_the_sanitizer_does_not_follow_is_listed():
    documented = (DOCS / "sanitizer.md").read_text().split("## What it does not see")[1]
    for name, row in rows().items():
        if row.rule is Rule.NOT_FOLLOWED:
            assert re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|[.:]\w)", documented), name


# ---------------------------------------------------------------- those who act on them


@pytest.mark.parametrize(
    ("module", "handler", "missing"),
    [
        (hooks, "@_hook(Rule.INVALIDATE)\n", "Rule.INVALIDATE"),
        (native_forms, "@_form(NativeForm.COMMIT)\n", "NativeForm.COMMIT"),
        (sanitizer, "Effect.CANCEL: Sanitizer._copy,", "clc.try_cancel"),
        (mixes, '    _feature("vote", 3.0, r"VOTE", Mix.VOTE),\n', "Mix.VOTE"),
        (events, '    Event.BULK_WAIT: r"DEPBAR\\.LE",\n', "bulk_wait"),
    ],
)  # fmt: skip
def test_a_value_that_nobody_acts_on_is_refused_at_import(module, handler, missing):
    source = Path(module.__file__).read_text()
    assert source.count(handler) == 1
    again = ModuleType(module.__name__)
    again.__package__ = module.__package__
    exec(compile(source, module.__file__, "exec"), vars(again))
    with pytest.raises(ValueError, match=rf"without a handler: \['{missing}'\]"):
        exec(compile(source.replace(handler, ""), module.__file__, "exec"), vars(again))


def test_a_handler_of_no_value_is_refused():
    with pytest.raises(ValueError, match=r"handled and no value .*: \['planted'\]"):
        require_complete("planted", Ties, {*Ties, "planted"})


# ---------------------------------------------------------------- no opcodes beside the table

#: Files of other packages that may name opcodes -> (what they name, a regular expression; why).
ALLOWED = {
    "ptx/parser.py": (r"bra, brx|ld, st|instruction.opcode == 'brx'", "syntax of the PTX language"),
    "run/residency.py": (r"mbarrier\.(init|inval)", "words of errors"),
    "sanitizer/findings.py": (r"ld, st", "kinds of access to tensor memory"),
    "sanitizer/compiled/records.py": (r"ld, st", "the same, numbered for native code"),
    "sanitizer/sanitizer.py": (r"(ld|st), st", "the same"),
    "command/page.py": (
        r"bar.sync|bar.sync, barrier.cluster.wait|barrier.cluster.wait"
        r"|'(mbarrier|commit)' not in entry.opcode",
        "colours and edges of a page's timeline",
    ),
    "sanitizer/memory/load_waits.py": (
        r"st, stmatrix, red, atom|mbarrier\.arrive|instruction\.opcode\.startswith\(_ARRIVALS\)"
        r"|instruction\.opcode == 'mov'",
        "what stores a register, and what arrives",
    ),
    "timing/machine_code/conflicts.py": (r"ldmatrix, stmatrix", "kinds of access to shared memory"),
    "timing/machine_code/events.py": (r".*'NANOSLEEP.SYNCS'", "SASS"),
    "timing/machine_code/resources.py": (r".*instruction.opcode.*", "SASS"),
    "timing/machine_code/warpgroups.py": (r".*instruction\.opcode.*", "SASS"),
    "timing/machine_code/mixes.py": (
        r"pattern.match\(instruction.opcode\)|re.match\(self.named, instruction.name\)",
        "SASS; arithmetic by its type, which is no part of the table",
    ),
    "timing/program.py": (r"'[\w.:]+' (not )?in .*opcode", "modifiers of what was recorded; SASS"),
}  # fmt: skip


def _documentation(tree: ast.Module) -> set[int]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, holders) and isinstance(node.body[0], ast.Expr)
    }


def _names_opcodes(text: str) -> bool:
    """Return True if a string is a dotted opcode or a prefix of some, regular expressions
    included."""
    text = text.replace("\\", "").rstrip(".")
    if not re.fullmatch(r"[a-z]\w*(\.|::)[\w.:]*", text):
        return False
    return any(
        text == name or text.startswith(f"{name}.") or name.startswith((f"{text}.", text))
        for name in rows()
    )


def _is_opcode(node: ast.expr) -> bool:
    instruction = (
        isinstance(node, ast.Attribute)
        and node.attr == "name"
        and isinstance(node.value, ast.Name)
        and node.value.id in ("instruction", "i")
    )
    return instruction or isinstance(node, ast.Attribute) and node.attr == "opcode"


def _opcodes_in(source: str) -> Iterator[str]:
    """Opcodes that code names: dotted ones anywhere, short ones in comparisons and collections."""
    tree = ast.parse(source)
    documentation, names = _documentation(tree), rows()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                if _names_opcodes(text):
                    yield text
            case ast.Compare(left=left, comparators=others):
                if any(map(_is_opcode, (left, *others))):
                    yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=value, attr="startswith" | "match"), args=args):
                if any(map(_is_opcode, (value, *args))):
                    yield ast.unparse(node)
            case (
                ast.Tuple(elts=items)
                | ast.List(elts=items)
                | ast.Set(elts=items)
                | ast.Dict(keys=items)
            ):
                found = [
                    item.value
                    for item in items
                    if isinstance(item, ast.Constant) and item.value in names
                ]
                if len(found) > 1:
                    yield ", ".join(found)


@pytest.mark.parametrize("source", [
    '_NAMES = ("tcgen05.ld", "tcgen05.st")', "_PATTERN = r'mbarrier\\.try_wait'",
    'if instruction.opcode == "mov": pass', 'if instruction.name.startswith("bar"): pass',
    '_JUMPS = {"bra": 1, "exit": 2}', 'x = instruction.opcode in _LIST',
    'prefix = "tcgen05.fence::before"',
])  # fmt: skip
def test_a_list_of_opcodes_is_seen(source):
    assert list(_opcodes_in(source))


def test_opcodes_are_named_in_the_table_only():
    # Tools write programs in PTX; the table is in isa.
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] not in ("isa", "tools"):
            pattern, _ = ALLOWED.get(name, ("(?!)", ""))
            said = list(_opcodes_in(path.read_text()))
            assert bool(said) == (name in ALLOWED), (name, said)
            found[name] = [text for text in said if not re.fullmatch(pattern, text)]
    assert {name: said for name, said in found.items() if said} == {}


# ---------------------------------------------------------------- a new instruction

FILL = """
mov.u32 %r0, %tid.x;  setp.ne.u32 %p0, %r0, 0;  mov.u32 %r1, 0;  mov.u32 %r4, smem;
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;
fill.async.shared::cta.b32 [smem+16], 41, [smem];
READY: bar.sync 0;
W: mbarrier.try_wait.parity.shared.b64 %p1, [smem], %r1;  @!%p1 bra W;
and.b32 %r2, %r0, 3;  shl.b32 %r2, %r2, 2;  add.u32 %r2, %r2, %r4;
ld.shared.b32 %r3, [%r2+16];
shl.b32 %r2, %r0, 2;  cvt.u64.u32 %rd0, %r2;  add.u64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r3;
"""
_WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p1, [smem], %r1;  @!%p1 bra W;\n"


@pytest.fixture
def fill():
    """The instruction that docs/simulator.md adds, as it stands there: one row."""
    chapter = (DOCS / "simulator.md").read_text().split("## Adding an instruction")[1]
    code = chapter.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/simulator.md", "exec"), {
        "machine_op": machine_op, "split_modifiers": split_modifiers, "effect_of": effect_of,
        "shared_address": shared_address, "submit": submit, "uniform": uniform, "np": np,
        "Rule": Rule, "Recorded": Recorded, "Event": Event, "Effect": Effect, "Ties": Ties,
    })  # fmt: skip
    yield
    forget_kernels()


def _filled(text: str = FILL, **options):
    out = np.zeros(64, np.uint32)
    report = run_kernel_text(text, [out], block=(64, 1, 1), **options)
    return out, report


@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "lazy"}, *({"seed": seed} for seed in range(4)), {"sanitize": True},
     {"sanitize": "strict"}, {"sanitize": True, "seed": 3}, {"trace": True}],
    ids=str,
)  # fmt: skip
def test_a_new_instruction_runs_everywhere(options):
    out, report = _filled(**options)
    assert (out == 41).all() and report.findings == []
    assert report.instructions["fill.async"]["warps"] == 1


@pytest.mark.usefixtures("fill")
def test_a_new_instruction_is_traced_timed_and_tied():
    _, report = _filled(trace=True)
    (entry,) = (e for e in report.trace if e.opcode == "fill.async.shared::cta.b32")
    assert entry.operands[1] == 41
    assert events.ptx_kind(entry.opcode) == Event.STORE_ASYNC
    assert table.lookup(entry.opcode)[0].ties is Ties.NEVER


@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"schedule": "lazy"}])
def test_a_missing_wait_for_a_new_instruction_is_found(options):
    _, report = _filled(FILL.replace(_WAIT, ""), sanitize=True, **options)
    assert {finding.kind for finding in report.findings} >= {"copy-in-flight"}


@pytest.mark.usefixtures("fill")
def test_an_operation_that_no_row_names_is_refused():
    row = rows()["fill.async"]
    with table.temporary_rows(dataclasses.replace(row, effect=Effect.NONE)):
        with pytest.raises(ValueError, match=r"fill.async.*names no effect"):
            _filled()


def test_a_new_instruction_that_synchronises_is_a_mutant():
    machine_op("settle.async", synchronises=True, **COMPLETE)(
        lambda instruction, kernel: lambda warp, lanes: None
    )
    kernel = parsed_kernel(kernel_text("settle.async;  bar.sync 0;", 0), "test")
    names = [i.opcode for i in synchronisation(translate(kernel))]
    forget_kernels()
    assert names == ["settle.async", "bar.sync"]
