"""The PTX parser: operands, scopes, layouts, locations and errors; spin recognition."""

from __future__ import annotations

import pytest
from harness import compile_body, kernel_text

from sm100_sim.ptx.parser import PtxSyntaxError, parse_module


def parse(body: str, params: str = "", head: str = ""):
    return parse_module(kernel_text(body, params, head))["test"]


def test_parameters_are_laid_out_by_alignment():
    kernel = parse(
        "",
        """.param .align 4 .b8 p0[12], .param .u64 p1, .param .align 64 .b8 p2[128],
        .param .f32 p3, .param .u64 .ptr .global .align 16 p4""",
    )
    assert [(p.offset, p.size) for p in kernel.params] == [
        (0, 12),
        (16, 8),
        (64, 128),
        (192, 4),
        (200, 8),
    ]
    assert kernel.param_bytes == 208


def test_directives_of_the_entry():
    text = kernel_text("").replace("test()", "test()\n.reqntid 512, 2\n.minnctapersm 3\n")
    kernel = parse_module(text)["test"]
    assert kernel.reqntid == (512, 2, 1) and kernel.min_ctas_per_sm == 3


def test_static_shared_stands_before_dynamic():
    kernel = parse(
        ".shared .align 8 .b8 inner[24];\n.reg .b32 %r; mov.b32 %r, inner;",
        head=".extern .shared .align 128 .b8 dynamic[];\n.shared .b32 outer;",
    )
    offsets = {name: (s.offset, s.size, s.dynamic) for name, s in kernel.shared.items()}
    assert offsets == {
        "outer": (1024, 4, False),
        "inner": (1032, 24, False),
        "dynamic": (1152, 0, True),
    }
    assert kernel.dynamic_shared_offset == 1152
    only = parse("", head=".extern .shared .align 1024 .b8 dynamic[];")
    assert only.dynamic_shared_offset == 1024


def test_operand_forms():
    kernel = parse("""
        .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<5>; .reg .b32 desc_lo;
        elect.sync %r1|%p1, -1;
        elect.sync _|%p2, 0xffffffff;
        @!%p1 st.shared.v2.b32 [desc_lo + 0x10], {%r1, %r2};
        cp.async.bulk.tensor.2d.x.y [%r1+-8], [%rd1, {%r2, %r3}], [%r4], %rd2;
        mov.b32 %r5, 0fFF800000;
        mov.b64 %rd3, 0d3FF0000000000000;
        selp.b32 %r1, -5, 017, !%p3;
        mov.u32 %r2, %tid.x;
        mov.b64 {%r1, _}, %rd1;
    """)
    elect, drop, store, tma, infinity, one, select, special, unpack, _ = kernel.instructions
    pair = elect.operands[0]
    assert pair.kind == "pair" and [o.kind for o in pair.items] == ["reg", "pred"]
    assert drop.operands[0].items[0].kind == "sink" and drop.operands[1].value == 0xFFFFFFFF
    assert store.guard.negated and store.operands[0].value == 16
    assert store.operands[0].base.name == "desc_lo"
    assert [o.name for o in store.operands[1].items] == ["%r1", "%r2"]
    assert tma.operands[0].value == -8 and tma.operands[1].base.name == "%rd1"
    assert [o.name for o in tma.operands[1].items[0].items] == ["%r2", "%r3"]
    assert len(tma.operands) == 4 and tma.name == "cp.async.bulk.tensor.2d.x.y"
    assert (infinity.operands[1].type, infinity.operands[1].value) == ("f32", 0xFF800000)
    assert (one.operands[1].type, one.operands[1].value) == ("f64", 0x3FF0000000000000)
    assert [o.value for o in select.operands[1:3]] == [-5, 15] and select.operands[3].negated
    assert special.operands[1].kind == "special"
    assert unpack.operands[0].items[1].kind == "sink"


def test_inner_scopes_hide_registers_and_labels():
    kernel = parse("""
        .reg .b32 %r<3>; .reg .b32 x;
        mov.b32 x, 1;
        { .reg .b32 x; mov.b32 x, 2; LOOP: bra LOOP; }
        { .reg .b32 x; mov.b32 x, 3; LOOP: bra LOOP; }
        mov.b32 x, 4;
    """)
    moves = [i.operands[0].register for i in kernel.instructions if i.opcode == "mov"]
    assert moves[0] is moves[3] and len({id(r) for r in moves}) == 3
    branches = [i for i in kernel.instructions if i.opcode == "bra"]
    assert [b.operands[0].value for b in branches] == [b.index for b in branches]


def test_a_label_reaches_out_of_its_scope():
    kernel = parse("{ .reg .pred p; @p bra OUT; }\nOUT:")
    assert kernel.instructions[0].operands[0].value == 1


def test_branch_targets():
    kernel = parse(".reg .b32 %r<2>;\nTABLE: .branchtargets A, B;\nbrx.idx %r1, TABLE;\nA:\nB:")
    targets = kernel.instructions[0].operands[1]
    assert targets.kind == "targets" and [o.value for o in targets.items] == [1, 1]


def test_locations_and_lines():
    text = (
        kernel_text(
            ".reg .b32 %r<3>;\n.loc 2 41 7\nmov.b32 %r1, 0; // begin inline asm\n"
            "/* a\n comment */ mov.b32 %r2, %r1;"
        )
        + '\n.file 2 "kernel.py"\n'
    )
    first, second, _ = parse_module(text)["test"].instructions
    assert first.source == ("kernel.py", 41) and second.source == ("kernel.py", 41)
    lines = text.split("\n")
    assert "mov.b32 %r1" in lines[first.line - 1] and "mov.b32 %r2" in lines[second.line - 1]
    assert first.text == "mov.b32 %r1, 0"


@pytest.mark.parametrize(
    "body,what",
    [
        ("mov.b32 %r1, 0;", "'%r1' is not declared"),
        (".reg .b32 %r<2>; mov.b32 %r2, 0;", "'%r2' is not declared"),
        ("bra NOWHERE;", "label 'NOWHERE'"),
        (".reg .b32 %r<2>; mov.b32 %r1, 12x;", "number '12x'"),
        ("L: L:", "twice"),
    ],
)
def test_errors_name_the_statement(body, what):
    if body.startswith("mov"):
        # A name with % that nobody declares could be a special register: refused when used.
        from sm100_sim.errors import UnknownInstruction

        with pytest.raises(UnknownInstruction, match="%r1"):
            compile_body(body)
        return
    if "%r2" in body:
        from sm100_sim.errors import UnknownInstruction

        with pytest.raises(UnknownInstruction, match="%r2"):
            compile_body(body)
        return
    with pytest.raises(PtxSyntaxError, match=what.replace("(", "\\(")):
        parse(body)


WAIT = "mbarrier.try_wait.parity.shared.b64 {p}, [%r1], %r2, 10000000;"
SPINS = {
    "wait then done": "L: " + WAIT.format(p="%p1") + "@%p1 bra.uni D; bra.uni L; D:",
    "direct": "L: " + WAIT.format(p="%p1") + "@!%p1 bra L;",
    "not": "L: " + WAIT.format(p="%p1") + "not.pred %p2, %p1; @%p2 bra L;",
    "selp and setp": "L: { .reg .pred q; "
    + WAIT.format(p="q")
    + "selp.b32 %r3, 1, 0, q; } setp.eq.b32 %p2, %r3, 0; @%p2 bra L;",
    "address again": "L: add.s32 %r1, %r4, 8; " + WAIT.format(p="%p1") + "@!%p1 bra L;",
}
PEEKS = {
    "no loop": WAIT.format(p="%p1") + "@!%p1 bra L; mov.b32 %r3, 1; L:",
    "work in the loop": "L: add.s32 %r3, %r3, 1; " + WAIT.format(p="%p1") + "@!%p1 bra L;",
    "loops when true": "L: " + WAIT.format(p="%p1") + "@%p1 bra L;",
    "other wait": WAIT.format(p="%p1")
    + "@%p1 bra D; L: "
    + WAIT.format(p="%p2")
    + "@!%p2 bra L; D:",
}


def spin_flags(body: str) -> list[bool]:
    compiled = compile_body(".reg .pred %p<4>; .reg .b32 %r<5>;" + body)
    return [i.spin for i in compiled.instructions if i.opcode == "mbarrier.try_wait"]


@pytest.mark.parametrize("body", SPINS.values(), ids=SPINS)
def test_spin_loops_are_recognised(body):
    assert spin_flags(body) == [True]


@pytest.mark.parametrize("body", PEEKS.values(), ids=PEEKS)
def test_peeks_are_no_spins(body):
    assert spin_flags(body)[0] is False
