"""A kernel with wgmma for the planted bugs: a ring of one slot, filled by one warp.

Lines that a bug concerns are tagged as in `sanitizer_kernels`.
"""

from __future__ import annotations

from sanitizer_kernels import START

_SUM = "{%r20, %r21, %r22, %r23}"
#: On the accumulator: m64n8k16 with A in shared memory, and with A in registers.
SHARED = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {_SUM}, %rd0, %rd1, %p4, 1, 1, 0, 0;"
IN_REGISTERS = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {_SUM}, {{%r24, %r25, %r26, %r27}}, "
    "%rd1, %p4, 1, 1, 0;"
)
#: The accumulator in another shape.
NARROW = f"wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {_SUM}, %rd0, %rd1, %p4, 1, 1;"

# Warp 4 fills 2 KiB of A and 256 bytes of B, swizzled in 32 bytes; warps 0 to 3 multiply them.
WARPGROUP = (
    START
    + f"""
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
mbarrier.init.shared.b64 [smem+8], 128;
READY:
bar.sync 0;
mov.u32 %r4, 0;
setp.eq.u32 %p1, %r1, 4;
@%p1 bra PRODUCE;
/*leave*/ setp.ne.u32 %p4, 1, 0;
add.u32 %r6, %r3, 1024;  shr.u32 %r6, %r6, 4;  and.b32 %r6, %r6, 0x3FFF;
cvt.u64.u32 %rd0, %r6;  or.b64 %rd0, %rd0, 0xC000001000010000;
add.u64 %rd1, %rd0, 128;
mov.u32 %r20, 0;  mov.u32 %r21, 0;  mov.u32 %r22, 0;  mov.u32 %r23, 0;
CONSUME:
mov.u32 %r24, %r4;  mov.u32 %r25, %r4;  mov.u32 %r26, %r4;  mov.u32 %r27, %r4;
and.b32 %r6, %r4, 1;
/*full*/ W1: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r6;  @!%p2 bra W1;
/*fence*/ wgmma.fence.sync.aligned;
/*product*/ {SHARED}
/*registers*/ {IN_REGISTERS}
/*commit*/ wgmma.commit_group.sync.aligned;
/*wait*/ wgmma.wait_group.sync.aligned 0;
/*release*/ mbarrier.arrive.shared.b64 _, [smem+8];
add.f32 %r28, %r20, %r23;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 4;
@%p3 bra CONSUME;
bra END;
PRODUCE:
shl.b32 %r5, %r2, 2;  add.u32 %r5, %r5, %r3;
and.b32 %r6, %r4, 1;  xor.b32 %r6, %r6, 1;
/*empty*/ W0: mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r6;  @!%p2 bra W0;
mov.u32 %r7, 0;
FILL:
st.shared.b32 [%r5+1024], %r4;
add.u32 %r5, %r5, 128;  add.u32 %r7, %r7, 1;  setp.lt.u32 %p3, %r7, 18;
@%p3 bra FILL;
/*proxy*/ fence.proxy.async.shared::cta;
mbarrier.arrive.shared.b64 _, [smem];
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 4;
@%p3 bra PRODUCE;
END:
"""
)
