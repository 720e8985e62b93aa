"""Kernels of CTA pairs with lines to delete or replace (see `sanitizer_kernels`)."""

from __future__ import annotations

from sanitizer_kernels import START

_PEER = """
mov.u32 %r10, %cluster_ctarank;
setp.ne.u32 %p1, %r10, 0;
xor.b32 %r11, %r10, 1;
mapa.shared::cluster.u32 %r12, %r3, %r11;
mov.u32 %r13, 0;
mapa.shared::cluster.u32 %r13, %r3, %r13;
"""
_MEET = "barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;"

# All threads of a pair arrive at a counter of CTA 0, which then reads what both CTAs wrote there.
COUNTER = (
    START
    + _PEER
    + f"""
@%p0 bra READY;
/*target*/ mbarrier.init.shared.b64 [smem], 64;
fence.mbarrier_init.release.cluster;
READY:
/*start*/ {_MEET}
shl.b32 %r14, %r10, 7;  add.u32 %r14, %r14, %r13;  add.u32 %r14, %r14, %r5;
sub.u32 %r14, %r14, %r3;
st.shared::cluster.b32 [%r14+128], %r0;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13];
@%p1 bra DONE;
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [smem], 0; @!%p2 bra W;
ld.shared.b32 %r7, [%r5+128];
ld.shared.b32 %r8, [%r5+256];
DONE:
/*end*/ {_MEET}
"""
)

# CTA 0 loads 128 bytes into both CTAs.
MULTICAST = (
    START
    + _PEER
    + f"""
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
/*expect*/ mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
READY:
/*start*/ {_MEET}
or.pred %p2, %p0, %p1;
@%p2 bra WAIT;
/*copy*/ cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster\
 [smem+1024], [%rd8], 128, [smem], 3;
WAIT:
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p3, [smem], 0;  @!%p3 bra W;
ld.shared.b32 %r7, [%r5+1024];
/*end*/ {_MEET}
"""
)

# Each CTA stores 128 bytes to its peer, asynchronously, and then adds to them.
STORES = (
    START
    + _PEER
    + f"""
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
READY:
/*start*/ {_MEET}
add.u32 %r14, %r12, %r5;  sub.u32 %r14, %r14, %r3;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r14+128], %r0, [%r12];
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p3, [smem], 0;  @!%p3 bra W;
ld.shared.b32 %r7, [%r5+128];
@%p0 bra AGAIN;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
AGAIN:
/*read*/ {_MEET}
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32\
 [%r14+128], %r0, [%r12];
/*wait sum*/ W2: mbarrier.try_wait.parity.shared.b64 %p3, [smem], 1;  @!%p3 bra W2;
ld.shared.b32 %r7, [%r5+128];
/*end*/ {_MEET}
"""
)

_B = (8 << 16) | (16 << 32) | (1 << 46)
_IDESC = (1 << 4) | (1 << 7) | (1 << 10) | (4 << 17) | (16 << 24)

# Each CTA of a pair stores its half of A (256 x 16, bf16) to tensor memory and of B (16 x 32) to
# shared memory; a thread of CTA 0 multiplies, and each CTA reads its half of D (256 x 32, f32).
PRODUCT = (
    START
    + _PEER
    + f"""
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
/*target*/ mbarrier.init.shared.b64 [smem+8], 256;
fence.mbarrier_init.release.cluster;
READY:
setp.ne.u32 %p2, %r1, 0;
/*early*/ bar.sync 0;
/*start*/ {_MEET}
/*alloc*/ @!%p2 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [smem+16], 64;
/*allocated*/ bar.sync 0;
ld.shared.b32 %r14, [smem+16];
shl.b32 %r15, %r1, 21;  add.u32 %r15, %r15, %r14;
add.u32 %r16, %r14, 32;  add.u32 %r17, %r15, 32;
mov.u32 %r18, 0;
st.shared.b32 [%r5+1024], %r18;
/*proxy*/ fence.proxy.async.shared::cta;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r17], {{%r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0}};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
/*ready*/ mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13+8];
shr.u32 %r19, %r3, 4;  add.u32 %r19, %r19, 64;
cvt.u64.u32 %rd0, %r19;  or.b64 %rd0, %rd0, {_B};
mov.u32 %r20, {_IDESC};
or.pred %p4, %p0, %p1;
@%p4 bra RESULT;
/*wait both*/ W0: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [smem+8], 0;\
 @!%p3 bra W0;
tcgen05.fence::after_thread_sync;
setp.ne.u32 %p5, %r0, %r0;
tcgen05.mma.cta_group::2.kind::f16 [%r14], [%r16], %rd0, %r20, %p5;
/*commit*/ tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64\
 [smem], 3;
RESULT:
/*wait d*/ W1: mbarrier.try_wait.parity.shared.b64 %p3, [smem], 0;  @!%p3 bra W1;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r21, %r22, %r23, %r24}}, [%r15];
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
add.u32 %r25, %r21, %r24;
/*end*/ {_MEET}
@%p2 bra END;
/*free*/ tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r14, 64;
END:
"""
)
