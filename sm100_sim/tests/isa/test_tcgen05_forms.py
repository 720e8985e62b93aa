"""Every form of tcgen05 of PTX ISA 9.3: it is translated, or refused in words that name it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from kernel_text import kernel_text

from sm100_sim.errors import UnknownInstruction
from sm100_sim.launcher import translated_kernel

REGISTERS = ".reg .b32 %f<128>; .reg .b16 %h<4>;\n"
GROUPS = ("cta_group::1", "cta_group::2")
KINDS = ("f16", "tf32", "f8f6f4", "i8")
#: Kind with block scales -> its forms of scale vectors.
SCALED = {
    "mxf8f6f4": ("", ".scale_vec::1X", ".block32"),
    "mxf4": ("", ".scale_vec::2X", ".block32"),
    "mxf4nvf4": (".scale_vec::2X", ".scale_vec::4X", ".block16", ".block32"),
}
#: A from shared memory and from tensor memory.
A = ("%rd1", "[%r2]")
USES = ("fill", "use", "lastuse", "discard")
OF_A = ("", *(f".collector::a::{use}" for use in USES))
OF_B = ("", *(f".collector::b{n}::{use}" for n in range(4) for use in USES))
#: Shape of loads and stores -> registers of .x1.
SHAPES = {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1, "16x32bx2": 1}
COPIES = ("128x256b", "4x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23",
          "32x128b.warpx4")  # fmt: skip
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)

RUNS = ""
SPARSE, SHIFTED = "sparse MMAs are not modelled", "shifted rows of A (.ashift) are not modelled"


def registers(count: int) -> str:
    return "{" + ", ".join(f"%f{n}" for n in range(count)) + "}"


def management() -> Iterator[tuple[str, str]]:
    for group in GROUPS:
        for space in ("", ".shared::cta"):
            yield f"alloc.{group}.sync.aligned{space}.b32 [smem], 32", RUNS
        yield f"dealloc.{group}.sync.aligned.b32 %r1, 32", RUNS
        yield f"relinquish_alloc_permit.{group}.sync.aligned", RUNS
        yield f"shift.{group}.down [%r1]", RUNS
        for space in ("", ".shared::cluster"):
            signal = f"commit.{group}.mbarrier::arrive::one{space}"
            yield f"{signal}.b64 [%r2]", RUNS
            yield f"{signal}.multicast::cluster.b64 [%r2], %h1", RUNS
        for shape in COPIES:
            yield f"cp.{group}.{shape} [%r1], %rd1", RUNS
            for source in ("b6x16_p32", "b4x16_p64"):
                yield f"cp.{group}.{shape}.b8x16.{source} [%r1], %rd1", RUNS
    for what in ("wait::ld.sync.aligned", "wait::st.sync.aligned", "fence::before_thread_sync",
                 "fence::after_thread_sync"):  # fmt: skip
        yield what, RUNS


def loads_and_stores() -> Iterator[tuple[str, str]]:
    for shape, each in SHAPES.items():
        half = ", 32" if shape == "16x32bx2" else ""
        for count in COUNTS:
            data = registers(each * count)
            if each * count > 128:
                continue
            for packed in ("", ".pack::16b"):
                yield f"ld.sync.aligned.{shape}.x{count}{packed}.b32 {data}, [%r1]{half}", RUNS
            for packed in ("", ".unpack::16b"):
                yield f"st.sync.aligned.{shape}.x{count}{packed}.b32 [%r1]{half}, {data}", RUNS
            if each > 1 or shape == "16x64b" or count == 1:
                continue
            for what in ("min", "max"):
                for form in ("u32", "s32", "f32", "abs.f32", "NaN.f32", "abs.NaN.f32"):
                    opcode = f"ld.red.sync.aligned.{shape}.x{count}.{what}.{form}"
                    yield f"{opcode} {data}, %r3, [%r1]{half}", RUNS


def products() -> Iterator[tuple[str, str]]:
    for number, group in enumerate(GROUPS, 1):
        lanes = "{" + ", ".join(f"%r{4 + n}" for n in range(4 * number)) + "}, "
        for kind in KINDS:
            opcode = f"{group}.kind::{kind}"
            for a in A:
                for use in OF_A:
                    for mask in ("", lanes):
                        yield f"mma.{opcode}{use} [%r1], {a}, %rd2, %r3, {mask}%p1", RUNS
                if kind in ("f16", "tf32"):
                    yield f"mma.{opcode} [%r1], {a}, %rd2, %r3, %p1, 3", RUNS
                yield f"mma.sp.{opcode} [%r1], {a}, %rd2, [%r4], %r3, %p1", SPARSE
            for use in ("", ".collector::a::lastuse", ".collector::a::discard"):
                yield f"mma.{opcode}.ashift{use} [%r1], [%r2], %rd2, %r3, %p1", SHIFTED
        for kind, vectors in SCALED.items():
            for vector in vectors:
                opcode = f"{group}.kind::{kind}.block_scale{vector}"
                for a in A:
                    for use in OF_A:
                        scales = "[%r4], [%r5]"
                        yield f"mma.{opcode}{use} [%r1], {a}, %rd2, %r3, {scales}, %p1", RUNS
                    yield f"mma.sp.{opcode} [%r1], {a}, %rd2, [%r6], %r3, {scales}, %p1", SPARSE


def weight_stationary() -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        for a in A:
            for use in OF_B:
                opcode = f"cta_group::1.kind::{kind}{use}"
                yield f"mma.ws.{opcode} [%r1], {a}, %rd2, %r3, %p1", RUNS
                yield f"mma.ws.{opcode} [%r1], {a}, %rd2, %r3, %p1, %rd3", RUNS
                for mask in ("", ", %rd3"):
                    yield f"mma.ws.sp.{opcode} [%r1], {a}, %rd2, [%r4], %r3, %p1{mask}", SPARSE


FORMS = {
    "management": (management, 58), "loads and stores": (loads_and_stores, 316),
    "mma": (products, 448), "mma.ws": (weight_stationary, 544),
}  # fmt: skip


def translated(*forms: str) -> None:
    """Translate a kernel of these forms."""
    text = kernel_text(REGISTERS + "".join(f"tcgen05.{form};\n" for form in forms), 1)
    translated_kernel(text.replace("sm_100a", "sm_103a"), "test")  # tcgen05.ld.red is its own


@pytest.mark.parametrize("part", FORMS)
def test_a_form_is_translated_or_refused_by_name(part):
    forms, count = FORMS[part]
    known = list(forms())
    assert len(known) == len(set(known)) == count
    for of_pairs in (False, True):  # a kernel has one cta_group
        translated(*(form for form, why in known
                     if why == RUNS and (GROUPS[1] in form) == of_pairs))  # fmt: skip
    for form, why in known:
        if why != RUNS:
            with pytest.raises(UnknownInstruction, match=re.escape(f"{form.split()[0]}: {why}")):
                translated(form)
