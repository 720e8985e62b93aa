"""Device functions of a PTX module: calls of them run as parts of the kernel."""

import numpy as np
import pytest

import sm100_sim

HEAD = """.version 8.6
.target sm_100a
.address_size 64
"""
FUNCTIONS = """
.func (.param .b32 func_retval0) clipped(.param .b32 clipped_param_0, .param .b32 clipped_param_1)
{
.reg .pred %p<2>;
.reg .b32 %r<3>;
ld.param.s8 %r0, [clipped_param_0];
ld.param.b32 %r1, [clipped_param_1];
setp.gt.s32 %p0, %r0, %r1;
@%p0 bra OVER;
st.param.b32 [func_retval0], %r0;
ret;
OVER:
st.param.b32 [func_retval0], %r1;
ret;
}
.func (.param .align 8 .b8 func_retval0[16]) pair(.param .align 8 .b8 pair_param_0[16])
{
.reg .b32 %r<4>;
.reg .b64 %rd<2>;
ld.param.v2.b32 {%r0, %r1}, [pair_param_0];
ld.param.b64 %rd0, [pair_param_0+8];
add.u64 %rd0, %rd0, 1;
{ // callseq
.param .b32 param0;
st.param.b8 [param0], %r0;
.param .b32 param1;
st.param.b32 [param1], %r1;
.param .b32 retval0;
call.uni (retval0), clipped, (param0, param1);
ld.param.b32 %r2, [retval0];
}
st.param.v2.b32 [func_retval0], {%r2, %r0};
st.param.b64 [func_retval0+8], %rd0;
ret;
}
"""
KERNEL = """
.visible .entry both(.param .u64 data)
{
.reg .b32 %r<4>;
.reg .b64 %rd<4>;
mov.u32 %r0, %tid.x;
{
.param .align 8 .b8 param0[16];
st.param.v2.b32 [param0], {%r0, 20};
st.param.b64 [param0+8], 41;
.param .align 8 .b8 retval0[16];
call.uni (retval0), pair, (param0);
ld.param.v2.b32 {%r1, %r2}, [retval0];
ld.param.b64 %rd0, [retval0+8];
}
ld.param.u64 %rd1, [data];
mul.wide.u32 %rd2, %r0, 16;
add.u64 %rd1, %rd1, %rd2;
st.global.v2.b32 [%rd1], {%r1, %r2};
st.global.u64 [%rd1+8], %rd0;
ret;
}
"""


def test_scalars_structs_and_early_returns():
    """Lanes return at different points, an 8-bit argument is extended, calls nest."""
    data = np.zeros((128, 4), np.int32)
    sm100_sim.launch_ptx(HEAD + FUNCTIONS + KERNEL, "both", [data], block=128)
    lanes = np.arange(128)
    assert (data[:, 0] == np.minimum(lanes, 20)).all()
    assert (data[:, 1] == lanes).all() and (data[:, 2] == 42).all()


def test_an_argument_of_eight_bits_keeps_its_sign():
    data = np.zeros((256, 4), np.int32)
    sm100_sim.launch_ptx(HEAD + FUNCTIONS + KERNEL, "both", [data], block=256)
    lanes = np.arange(256).astype(np.int8).astype(np.int32)
    assert (data[:, 0] == np.minimum(lanes, 20)).all()


def refused(body: str, functions: str = "") -> str:
    text = f"{HEAD}{functions}\n.visible .entry kernel() {{ .reg .pred %p; {body} ret; }}"
    with pytest.raises((sm100_sim.PtxSyntaxError, sm100_sim.UnknownInstruction)) as raised:
        sm100_sim.launch_ptx(text, "kernel", [], block=32)
    return str(raised.value)


def test_recursion_is_refused_by_name():
    loop = ".func again() { call.uni again; ret; }"
    assert "recursion is not supported: call of again" in refused("call.uni again;", loop)


@pytest.mark.parametrize("call", ["call.uni elsewhere;", "call.uni %p, ();"])
def test_what_the_module_does_not_define_is_refused(call):
    assert "functions that the module itself defines" in refused(call)


def test_guarded_calls_are_refused():
    nothing = ".func nothing() { ret; }"
    assert "a guarded call of a function is not supported" in refused("@%p call nothing;", nothing)


def test_a_fault_names_the_call_and_the_line_inside():
    """The source line is the function's, and the stack has that of the call."""
    text = (
        HEAD + '.file 1 "kernel.cu"\n.func store(.param .b64 store_param_0)\n{\n.reg .b64 %rd<2>;\n'
        ".loc 1 3 5\n"
        "ld.param.b64 %rd0, [store_param_0];\nst.global.b64 [%rd0], 1;\nret;\n}\n"
        ".visible .entry kernel(.param .u64 data)\n{\n.reg .b64 %rd<2>;\n"
        "ld.param.u64 %rd0, [data];\n.loc 1 9 1, function_name $L, inlined_at 1 12 4\n"
        "{\n.param .b64 param0;\nst.param.b64 [param0], %rd0;\n"
        "call.uni store, (param0);\n}\nret;\n}"
    )
    with pytest.raises(sm100_sim.MemoryFault) as raised:
        sm100_sim.launch_ptx(text, "kernel", [64], block=32)
    instruction = raised.value.instruction
    assert instruction.source == ("kernel.cu", 3)
    assert instruction.stack == (("kernel.cu", 9), ("kernel.cu", 12))
