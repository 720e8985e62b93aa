"""A first kernel: PTX text, numpy arrays, a report. It needs neither a compiler nor PyTorch.

    python examples/first_kernel.py

Each thread adds one pair of elements. The same text runs on any GPU from sm_90 on.
"""

from __future__ import annotations

import numpy as np

import sm100_sim

COUNT, THREADS = 1000, 128

PTX = """
.version 8.6
.target sm_100a
.address_size 64
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 out, .param .u32 count)
{
.reg .pred %past;
.reg .b32 %index, %size, %block, %count;
.reg .f32 %x, %y;
.reg .b64 %a, %b, %out, %offset;
mov.u32 %index, %tid.x;
mov.u32 %size, %ntid.x;
mov.u32 %block, %ctaid.x;
mad.lo.u32 %index, %block, %size, %index;
ld.param.u32 %count, [count];
setp.ge.u32 %past, %index, %count;
@%past ret;
mul.wide.u32 %offset, %index, 4;
ld.param.u64 %a, [a];
ld.param.u64 %b, [b];
ld.param.u64 %out, [out];
add.u64 %a, %a, %offset;
add.u64 %b, %b, %offset;
add.u64 %out, %out, %offset;
ld.global.f32 %x, [%a];
ld.global.f32 %y, [%b];
add.rn.f32 %x, %x, %y;
st.global.f32 [%out], %x;
ret;
}
"""


def main() -> None:
    """Add two vectors; then, without the test for the end, see what stops the launch."""
    a, b, out = np.arange(COUNT, dtype="f4"), np.ones(COUNT, "f4"), np.zeros(COUNT, "f4")
    shape = {"grid": -(-COUNT // THREADS), "block": THREADS}
    report = sm100_sim.launch_ptx(PTX, "add", [a, b, out, COUNT], **shape)
    print(f"{int((out != a + b).sum())} of {COUNT} elements differ")
    added = report.opcodes["add.rn.f32"]["lanes"]
    print(f"{report.warp_instructions} warp instructions; {added} lanes added")

    careless = PTX.replace("@%past ret;", "")
    try:
        sm100_sim.launch_ptx(careless, "add", [a, b, out, COUNT], **shape)
    except sm100_sim.MemoryFault as error:
        print(error)


if __name__ == "__main__":
    main()
