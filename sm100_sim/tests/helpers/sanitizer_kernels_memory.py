"""Kernels that copy, or work on global memory, with lines to delete or replace."""

from __future__ import annotations

from sanitizer_kernels import START

# Two copies of 128 bytes signal one barrier.
TWO_COPIES = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
@%p0 bra WAIT;
/*expect*/ mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+1024], [%rd8], 128, [smem];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes\
 [smem+1152], [%rd8+128], 128, [smem];
WAIT:
W: mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0;  @!%p1 bra W;
ld.shared.b32 %r7, [%r5+1024];
ld.shared.b32 %r8, [%r5+1152];
/*left*/ bar.warp.sync -1;
"""
)

# A tile of 128 bytes whose last 64 lie behind the end of the tensor: zeros are put there.
TAIL = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
@%p0 bra CLEAR;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+1024], [%rd8], 64, [smem];
CLEAR:
setp.lt.u32 %p2, %r0, 16;  mov.u32 %r9, 0;
/*zeros*/ @!%p2 st.shared.b32 [%r5+1024], %r9;
/*meet*/ bar.sync 0;
W: mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0;  @!%p1 bra W;
xor.b32 %r10, %r5, 64;
ld.shared.b32 %r7, [%r10+1024];
"""
)

# Warp 0 copies 128 bytes with cp.async, warp 1 reads them: group and barrier.
COPY_GROUP = (
    START
    + """
setp.ne.u32 %p1, %r1, 0;
@%p1 bra MEET;
shl.b32 %r4, %r0, 2;  cvt.u64.u32 %rd0, %r4;  add.u64 %rd0, %rd0, %rd8;
cp.async.ca.shared.global [%r5+1024], [%rd0], 4;
/*commit*/ cp.async.commit_group;
/*wait*/ cp.async.wait_group 0;
MEET:
/*meet*/ bar.sync 0;
@!%p1 bra END;
ld.shared.b32 %r7, [%r5+896];
END:
"""
)

# A copy through an mbarrier that tracks it.
COPY_BARRIER = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
READY:
bar.sync 0;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READER;
shl.b32 %r4, %r0, 2;  cvt.u64.u32 %rd0, %r4;  add.u64 %rd0, %rd0, %rd8;
cp.async.ca.shared.global [%r5+1024], [%rd0], 4;
/*track*/ cp.async.mbarrier.arrive.noinc.shared.b64 [smem];
bra END;
READER:
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;  @!%p2 bra W;
ld.shared.b32 %r7, [%r5+896];
END:
"""
)

# Copies through two mbarriers that track them; who waits fences for the bulk stores that read them.
COPY_STAGES = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
mbarrier.init.shared.b64 [smem+8], 32;
READY:
bar.sync 0;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READER;
shl.b32 %r4, %r0, 2;  cvt.u64.u32 %rd0, %r4;  add.u64 %rd0, %rd0, %rd8;
cp.async.ca.shared.global [%r5+1024], [%rd0], 4;
/*track*/ cp.async.mbarrier.arrive.noinc.shared.b64 [smem];
cp.async.ca.shared.global [%r5+1152], [%rd0], 4;
cp.async.mbarrier.arrive.noinc.shared.b64 [smem+8];
bra END;
READER:
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;  @!%p2 bra W;
/*proxy*/ fence.proxy.async.shared::cta;
setp.ne.u32 %p3, %r2, 0;
@%p3 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%rd8+128], [smem+1024], 128;
V: mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], 0;  @!%p2 bra V;
/*second proxy*/ fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [%rd8+256], [smem+1152], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
)

# cp.async to shared memory, which a bulk store sends out again.
COPY_THROUGH = (
    START
    + """
shl.b32 %r4, %r0, 2;  cvt.u64.u32 %rd0, %r4;  add.u64 %rd0, %rd0, %rd8;
/*early*/ mov.u32 %r6, 0;
cp.async.ca.shared.global [%r5+1024], [%rd0], 4;
cp.async.commit_group;
/*between*/ mov.u32 %r6, 0;
cp.async.wait_group 0;
/*proxy*/ fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%rd8+128], [smem+1024], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
)

# Shared memory to tensor memory by tcgen05.cp, and from there to registers.
SCALES = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
READY:
setp.ne.u32 %p1, %r1, 0;
@!%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+16], 32;
st.shared.b32 [%r5+1024], %r0;
/*proxy*/ fence.proxy.async.shared::cta;
/*meet*/ bar.sync 0;
ld.shared.b32 %r10, [smem+16];
shl.b32 %r11, %r1, 21;  add.u32 %r11, %r11, %r10;
shr.u32 %r15, %r3, 4;  add.u32 %r15, %r15, 64;
cvt.u64.u32 %rd0, %r15;  or.b64 %rd0, %rd0, DESCRIPTOR;
@%p0 bra RESULT;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r10], %rd0;
/*commit*/ tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem];
RESULT:
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;  @!%p2 bra W;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r20, %r21, %r22, %r23}, [%r11];
tcgen05.wait::ld.sync.aligned;
add.u32 %r24, %r20, %r23;
bar.sync 0;
@%p1 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;
END:
""".replace("DESCRIPTOR", str((8 << 16) | (8 << 32) | (1 << 46)))
)

# Warp 0 stores an 8x8 matrix of 16-bit elements, warp 1 loads it.
MATRICES = (
    START
    + """
shl.b32 %r6, %r2, 4;  add.u32 %r6, %r6, %r3;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra MEET;
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r0};
MEET:
/*meet*/ bar.sync 0;
@!%p1 bra END;
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r7}, [%r6];
END:
"""
)

# All threads count in shared memory; then everybody reads the sum.
ATOMICS = (
    START
    + """
mov.u32 %r4, 0;
@!%p0 st.shared.b32 [smem], %r4;
/*clear*/ bar.sync 0;
atom.shared.add.u32 %r6, [smem], 1;
/*meet*/ bar.sync 0;
ld.shared.b32 %r7, [smem];
"""
)

# Each CTA writes 128 bytes of its own, with ordinary stores and with a bulk store.
OUTPUT = (
    START
    + """
mov.u32 %r4, %ctaid.x;
/*row*/ mov.u32 %r6, %r4;
/*tile*/ mov.u32 %r8, %r4;
shl.b32 %r6, %r6, 7;  shl.b32 %r7, %r0, 2;  add.u32 %r7, %r7, %r6;
cvt.u64.u32 %rd0, %r7;  add.u64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r4;
st.shared.b32 [%r5], %r4;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 bra END;
shl.b32 %r8, %r8, 7;  cvt.u64.u32 %rd1, %r8;  add.u64 %rd1, %rd1, %rd8;
cp.async.bulk.global.shared::cta.bulk_group [%rd1+256], [smem], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
)

# The CTAs of two pairs write a line each and count themselves; CTA 0 waits for all four and adds
# the lines up.
SEMAPHORE = (
    START
    + """
mov.u32 %r4, %ctaid.x;
shl.b32 %r6, %r4, 7;  shl.b32 %r7, %r0, 2;  add.u32 %r7, %r7, %r6;
cvt.u64.u32 %rd0, %r7;  add.u64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r4;
bar.sync 0;
@%p0 bra COUNTED;
/*count*/ red.release.gpu.global.add.u32 [%rd9], 1;
COUNTED:
setp.ne.u32 %p1, %r4, 0;
@%p1 bra END;
@%p0 bra WAITED;
POLL:
/*poll*/ ld.acquire.gpu.global.u32 %r8, [%rd9];
/*target*/ setp.lt.u32 %p2, %r8, 4;
@%p2 bra POLL;
WAITED:
bar.sync 0;
ld.global.b32 %r9, [%rd0];
/*look*/ ld.global.b32 %r10, [%rd0+128];
ld.global.b32 %r11, [%rd0+256];
ld.global.b32 %r12, [%rd0+384];
add.u32 %r9, %r9, %r10;  add.u32 %r11, %r11, %r12;  add.u32 %r9, %r9, %r11;
/*combine*/ st.global.b32 [%rd0+128], %r9;
END:
"""
)

# Warp 1 sets a tensor map in global memory (p1) from another (p2) and warp 0 uses it, twice.
MAPS = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
mov.u32 %r4, 0;
shl.b32 %r6, %r2, 2;
setp.eq.u32 %p3, %r1, 0;
LOOP:
@%p3 bra SET;
shl.b32 %r8, %r4, 7;  add.u32 %r8, %r8, %r6;
cvt.u64.u32 %rd0, %r8;  add.u64 %rd0, %rd0, %rd10;
ld.global.b32 %r9, [%rd0];
cvt.u64.u32 %rd1, %r6;  add.u64 %rd1, %rd1, %rd9;
st.global.b32 [%rd1], %r9;
/*release*/ fence.proxy.tensormap::generic.release.gpu;
SET:
/*meet*/ bar.sync 0;
/*acquire*/ fence.proxy.tensormap::generic.acquire.gpu [%rd9], 128;
@%p0 bra WAIT;
mov.u32 %r10, 0;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes\
 [smem+1024], [%rd9, {%r10}], [smem];
WAIT:
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p1, [smem], %r4;  @!%p1 bra W;
add.u32 %r11, %r3, %r6;
ld.shared.b32 %r7, [%r11+1024];
bar.sync 0;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p2, %r4, 2;
@%p2 bra LOOP;
"""
)
