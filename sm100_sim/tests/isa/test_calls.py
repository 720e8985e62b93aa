"""Calls of vprintf and __assertfail: formats, argument buffers, and what is an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import compile_body, run_warp

import sm100_sim
from sm100_sim.errors import MemoryFault, SimulationError, UnknownInstruction

cutlass = pytest.importorskip("cutlass")
from cutlass import cute  # noqa: E402


def constant(name: str, text: str) -> str:
    codes = ", ".join(str(code) for code in (*text.encode(), 0))
    return f".global .align 1 .b8 {name}[{len(text.encode()) + 1}] = {{{codes}}};\n"


def printing(form: str, stores: str, size: int = 64):
    """Run one vprintf of ``form`` after ``stores`` into the buffer at %buf; %d is its result."""
    body = f""".local .align 8 .b8 depot[{size}]; .reg .b64 %buf, %arg, %f; .reg .b32 %d;
        .reg .b32 %i; .reg .b64 %w;
        mov.b64 %buf, depot; cvta.local.u64 %arg, %buf; {stores}
        {{ .param .b64 param0; .param .b64 param1; .param .b32 retval0;
        st.param.b64 [param1], %arg; mov.b64 %f, form; cvta.global.u64 %f, %f;
        st.param.b64 [param0], %f; call.uni (retval0), vprintf, (param0, param1);
        ld.param.b32 %d, [retval0]; }}"""
    inputs = {"%i": np.arange(32, dtype=np.uint32) - 1, "%w": np.uint64(1 << 40)}
    inputs = {name: value for name, value in inputs.items() if name in stores}
    head = constant("form", form) + constant("word", "warp")
    return run_warp(body, inputs, ["%d"], head=head)


def test_every_kind_of_argument_is_printed_lane_by_lane(capsys):
    stores = """mov.b64 %f, word; st.local.b32 [%buf], %i; st.local.b64 [%buf+8], %w;
        st.local.b64 [%buf+16], 0d3FF8000000000000; st.local.b64 [%buf+24], %f;
        st.local.b32 [%buf+32], 65; st.local.b32 [%buf+36], 6; st.local.b32 [%buf+40], 255;"""
    run = printing("%3d|%lld|%.3f|%s|%c|%*x|%%\n", stores)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{lane - 1:3d}|{1 << 40}|1.500|warp|A|    ff|%" for lane in range(32)]
    assert (run["%d"] == 7).all()


def test_unsigned_and_signed_views_of_one_value(capsys):
    printing("%u %d %#x %i\n", "".join(f"st.local.b32 [%buf+{4 * n}], %i;" for n in range(4)))
    assert capsys.readouterr().out.splitlines()[0] == "4294967295 -1 0xffffffff -1"


def test_arguments_outside_the_stack_and_unknown_conversions_are_errors():
    with pytest.raises(MemoryFault, match="outside the stack"):
        printing("%d %d %d %d %d\n", "", size=8)
    with pytest.raises(SimulationError, match="'%y' is not defined"):
        printing("%y\n", "")
    with pytest.raises(MemoryFault, match="not a constant of the module"):
        printing("%s\n", "st.local.b64 [%buf], %w;")


def test_a_failed_assertion_ends_the_kernel():
    head = "".join(
        constant(name, text)
        for name, text in (("message", "x > 0"), ("file", "kernel.py"), ("function", "kernel"))
    )
    body = """.reg .b64 %m; .reg .pred %p; .reg .b32 %i; setp.ne.u32 %p, %i, 5; @%p bra DONE;
        { .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
        mov.b64 %m, message; st.param.b64 [p0], %m; mov.b64 %m, file; st.param.b64 [p1], %m;
        st.param.b32 [p2], 42; mov.b64 %m, function; st.param.b64 [p3], %m;
        st.param.b64 [p4], 1; call.uni __assertfail, (p0, p1, p2, p3, p4); }
        DONE:"""
    with pytest.raises(
        SimulationError,
        match=r"kernel.py:42: kernel: assertion 'x > 0' failed in "
        "lane 5",
    ):
        run_warp(body, {"%i": np.arange(32, dtype=np.uint32)}, head=head)
    run_warp(body, {"%i": np.zeros(32, np.uint32)}, head=head)


def test_other_functions_are_errors():
    for call in ("call.uni (r0), other, (p0)", "call.uni other", "call (r0), %f, (p0), prototype"):
        with pytest.raises(UnknownInstruction, match="functions that the module itself"):
            compile_body(f".param .b32 r0; .param .b32 p0; {call};")


@cute.kernel
def printing_kernel(factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    if thread < 2:
        cute.printf("thread {} of {}", thread, factor)


@cute.jit
def print_twice(factor: cutlass.Float32):
    printing_kernel(factor).launch(grid=(1, 1, 1), block=(32, 1, 1))


@pytest.mark.simulator
def test_cute_printf_prints(capsys):
    with sm100_sim.attached() as session:
        print_twice(2.5)
        torch.cuda.synchronize()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == ["thread 0 of 2.500000", "thread 1 of 2.500000"]
    assert session.reports[0].instructions["call"] == {"warps": 1, "lanes": 2}
