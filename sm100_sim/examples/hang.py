"""A hang and its report: an mbarrier expects more bytes than the copy brings.

    python examples/hang.py

A thread says that 512 bytes are on their way, but copies 256: whoever waits for the phase waits for
ever. On a GPU that is a process that does not end. The simulator knows when no warp can run and
nothing is in flight any more, and says who waits for what. Needs neither a compiler nor PyTorch.
"""

from __future__ import annotations

import sys

import numpy as np

import sm100_sim

THREADS, BYTES = 64, 256

PTX = """
.version 8.6
.target sm_100a
.address_size 64
.visible .entry copy(.param .u64 source, .param .u64 target, .param .u32 expected)
{
.shared .align 128 .b8 buffer[256];
.shared .align 8 .b64 barrier;
.reg .pred %first, %done;
.reg .b32 %thread, %buffer, %barrier, %expected, %x;
.reg .b64 %source, %target, %offset;
mov.u32 %thread, %tid.x;
mov.u32 %buffer, buffer;
mov.u32 %barrier, barrier;
setp.eq.u32 %first, %thread, 0;
@%first mbarrier.init.shared::cta.b64 [%barrier], 1;
@%first fence.mbarrier_init.release.cluster;
bar.sync 0;
@!%first bra WAIT;
ld.param.u32 %expected, [expected];
ld.param.u64 %source, [source];
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%barrier], %expected;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%buffer], [%source],
    256, [%barrier];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%barrier], 0;
@!%done bra WAIT;
mad.lo.u32 %buffer, %thread, 4, %buffer;
ld.shared.u32 %x, [%buffer];
mul.wide.u32 %offset, %thread, 4;
ld.param.u64 %target, [target];
add.u64 %target, %target, %offset;
st.global.u32 [%target], %x;
ret;
}
"""


def run(expected: int) -> np.ndarray:
    """Return the copied words if the barrier expects so many bytes. Raises sm100_sim.Hang."""
    source, target = (np.zeros(BYTES // 4 + 3, np.uint32) for _ in range(2))
    # Bulk copies need 16-byte boundaries, on which arrays need not start.
    start = -(source.ctypes.data // 4) % 4
    source = source[start : start + BYTES // 4]
    source[:] = np.arange(BYTES // 4)
    sm100_sim.launch_ptx(PTX, "copy", [source, target, expected], block=THREADS)
    return target[:THREADS]


def main() -> int:
    """Run it right, then with the mistake; 0 if that hangs."""
    print(f"{int((run(BYTES) != np.arange(THREADS)).sum())} of {THREADS} elements differ")
    try:
        run(2 * BYTES)
    except sm100_sim.Hang as hang:
        print(hang)
        return 0
    print("it ended")
    return 1


if __name__ == "__main__":
    sys.exit(main())
