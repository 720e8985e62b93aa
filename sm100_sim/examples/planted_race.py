"""A planted race and its finding: one warp fills a buffer, others read it, a barrier is missing.

    python examples/planted_race.py [--barrier]

The results are right in the simulator's plain schedule, as they may be on a GPU for years. The
sanitizer finds the race all the same, because no barrier orders the store before the loads; it says
which two instructions, in which warps, and what is missing. With --barrier it finds nothing. Needs
neither a compiler nor PyTorch.
"""

from __future__ import annotations

import argparse

import numpy as np

import sm100_sim

THREADS = 128

PTX = """
.version 8.6
.target sm_100a
.address_size 64
.visible .entry broadcast(.param .u64 source, .param .u64 target)
{
.shared .align 4 .b32 buffer[32];
.reg .pred %others;
.reg .b32 %thread, %lane, %place, %x;
.reg .b64 %source, %target, %offset;
mov.u32 %thread, %tid.x;
and.b32 %lane, %thread, 31;
mov.u32 %place, buffer;
mad.lo.u32 %place, %lane, 4, %place;
setp.ge.u32 %others, %thread, 32;
@%others bra FILLED;
mul.wide.u32 %offset, %lane, 4;
ld.param.u64 %source, [source];
add.u64 %source, %source, %offset;
ld.global.u32 %x, [%source];
st.shared.u32 [%place], %x;
FILLED:
BARRIER
ld.shared.u32 %x, [%place];
mul.wide.u32 %offset, %thread, 4;
ld.param.u64 %target, [target];
add.u64 %target, %target, %offset;
st.global.u32 [%target], %x;
ret;
}
"""


def main() -> None:
    """Run the kernel under the sanitizer and print what it finds, by cause."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--barrier", action="store_true", help="with the barrier")
    barrier = "bar.sync 0;" if parser.parse_args().barrier else "// no barrier"
    source, target = np.arange(32, dtype=np.uint32), np.zeros(THREADS, np.uint32)
    report = sm100_sim.launch_ptx(
        PTX.replace("BARRIER", barrier), "broadcast", [source, target], block=THREADS,
        options=sm100_sim.Options(sanitize=True),
    )  # fmt: skip
    wrong = int((target.reshape(-1, 32) != source).sum())
    print(f"{'FAIL' if wrong else 'PASS'}: {wrong} of {THREADS} elements differ")
    print(f"causes of findings: {len(report.causes)}")
    for cause in report.causes:
        print(cause)


if __name__ == "__main__":
    main()
