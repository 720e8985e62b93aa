"""Kernels with one planted bug each, made from correct ones by deleting or replacing a line.

A line that a bug concerns carries a tag, `/*name*/`, in front. `without(text, "name")` deletes the
line, `changed(text, "name", line)` replaces it.
"""

from __future__ import annotations

import re


def changed(text: str, tag: str, line: str) -> str:
    """`text` with the one tagged line replaced by `line`."""
    result, count = re.subn(rf"^/\*{re.escape(tag)}\*/.*$", line, text, flags=re.M)
    assert count == 1, f"{count} lines are tagged {tag}"
    return result


def without(text: str, *tags: str) -> str:
    """`text` without the tagged lines."""
    for tag in tags:
        text = changed(text, tag, "")
    return text


START = """
mov.u32 %r0, %tid.x;  shr.u32 %r1, %r0, 5;  and.b32 %r2, %r0, 31;
mov.u32 %r3, smem;  shl.b32 %r5, %r0, 2;  add.u32 %r5, %r5, %r3;
setp.ne.u32 %p0, %r0, 0;
"""

# A full/empty ring of one slot: warp 0 fills 128 bytes of shared memory, warp 1 reads them.
RING = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
mbarrier.init.shared.b64 [smem+8], 32;
READY:
/*start*/ bar.sync 0;
shl.b32 %r5, %r2, 2;  add.u32 %r5, %r5, %r3;
mov.u32 %r4, 0;  mov.u32 %r9, 0;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra CONSUMER;
PRODUCE:
and.b32 %r6, %r4, 1;  xor.b32 %r6, %r6, 1;
/*empty*/ W0: mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r6;  @!%p2 bra W0;
/*fill*/ st.shared.b32 [%r5+64], %r4;
/*publish*/ mbarrier.arrive.shared.b64 _, [smem];
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 6;
@%p3 bra PRODUCE;
bra END;
CONSUMER:
and.b32 %r6, %r4, 1;
/*full*/ W1: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r6;  @!%p2 bra W1;
/*read*/ ld.shared.b32 %r7, [%r5+64];
add.u32 %r9, %r9, %r7;
/*release*/ mbarrier.arrive.shared.b64 _, [smem+8];
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 6;
@%p3 bra CONSUMER;
END:
"""
)

# A ring with two slots, 128 bytes each.
STAGES = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
mbarrier.init.shared.b64 [smem+8], 32;
mbarrier.init.shared.b64 [smem+16], 32;
mbarrier.init.shared.b64 [smem+24], 32;
READY:
bar.sync 0;
shl.b32 %r5, %r2, 2;  add.u32 %r5, %r5, %r3;
mov.u32 %r4, 0;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra CONSUMER;
PRODUCE:
and.b32 %r6, %r4, 1;  shl.b32 %r8, %r6, 3;  add.u32 %r8, %r8, %r3;
shr.u32 %r10, %r4, 1;  and.b32 %r10, %r10, 1;  xor.b32 %r10, %r10, 1;
W0: mbarrier.try_wait.parity.shared.b64 %p2, [%r8+16], %r10;  @!%p2 bra W0;
/*slot*/ shl.b32 %r11, %r6, 7;
add.u32 %r11, %r11, %r5;
st.shared.b32 [%r11+128], %r4;
mbarrier.arrive.shared.b64 _, [%r8];
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 6;
@%p3 bra PRODUCE;
bra END;
CONSUMER:
and.b32 %r6, %r4, 1;  shl.b32 %r8, %r6, 3;  add.u32 %r8, %r8, %r3;
shr.u32 %r10, %r4, 1;  and.b32 %r10, %r10, 1;
W1: mbarrier.try_wait.parity.shared.b64 %p2, [%r8], %r10;  @!%p2 bra W1;
shl.b32 %r11, %r6, 7;  add.u32 %r11, %r11, %r5;
ld.shared.b32 %r7, [%r11+128];
mbarrier.arrive.shared.b64 _, [%r8+16];
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 6;
@%p3 bra CONSUMER;
END:
"""
)

# Three warps arrive at a barrier in each round; the fourth waits for it and lets them go on.
GATE = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 96;
mbarrier.init.shared.b64 [smem+8], 32;
READY:
bar.sync 0;
mov.u32 %r4, 0;
/*trips*/ mov.u32 %r8, 3;
setp.eq.u32 %p1, %r1, 3;
@%p1 bra WAITER;
ROUND:
/*arrive*/ mbarrier.arrive.shared.b64 _, [smem];
and.b32 %r6, %r4, 1;
W0: mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r6;  @!%p2 bra W0;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, %r8;
@%p3 bra ROUND;
/*leave*/ bra END;
WAITER:
and.b32 %r6, %r4, 1;
W1: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r6;  @!%p2 bra W1;
mbarrier.arrive.shared.b64 _, [smem+8];
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, %r8;
@%p3 bra WAITER;
END:
"""
)

# Two warps arrive at a barrier of two, alternately, and wait for each other.
TURNS = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 2;
READY:
bar.sync 0;
mov.u32 %r4, 0;
LOOP:
bar.warp.sync -1;
/*who*/ setp.eq.u32 %p1, %r2, 0;
@%p1 mbarrier.arrive.shared.b64 _, [smem];
and.b32 %r6, %r4, 1;
W: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r6;  @!%p2 bra W;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 3;
@%p3 bra LOOP;
"""
)

# Two warps hand a line of shared memory to and fro through named barriers.
NAMED = (
    START
    + """
shl.b32 %r5, %r2, 2;  add.u32 %r5, %r5, %r3;
mov.u32 %r4, 0;
/*return*/ mov.u32 %r8, 1;
setp.eq.u32 %p1, %r1, %r8;
@%p1 bra READER;
WRITE:
st.shared.b32 [%r5], %r4;
/*arrive*/ bar.arrive 1, 64;
/*back*/ bar.sync 2, 64;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 3;
@%p3 bra WRITE;
bra END;
READER:
/*sync*/ bar.sync 1, 64;
ld.shared.b32 %r7, [%r5];
/*free*/ bar.arrive 2, 64;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 3;
@%p3 bra READER;
END:
"""
)

# The CTAs of a pair write their own shared memory, and CTA 0 reads both: a release of shared memory
# alone and a relaxed arrive tell it when.
OWN_SHARED = (
    START
    + """
mov.u32 %r10, %cluster_ctarank;
mov.u32 %r11, 0;
mapa.shared::cluster.u32 %r12, %r3, %r11;
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 64;
fence.mbarrier_init.release.cluster;
READY:
/*start*/ barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
st.shared.b32 [%r5+256], %r0;
/*release*/ fence.release.sync_restrict::shared::cta.cluster;
/*arrive*/ mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r12];
setp.ne.u32 %p1, %r10, 0;
@%p1 bra DONE;
/*wait*/ W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [smem], 0; @!%p2 bra W;
mov.u32 %r11, 1;
mapa.shared::cluster.u32 %r13, %r5, %r11;
ld.shared::cluster.b32 %r7, [%r13+256];
DONE:
/*end*/ barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
"""
)

# Eight warps give registers away and eight take them.
REGISTERS = (
    START
    + """
setp.gt.u32 %p1, %r1, 7;
@%p1 bra TAKE;
/*give*/ setmaxnreg.dec.sync.aligned.u32 40;
bra END;
TAKE:
setmaxnreg.inc.sync.aligned.u32 208;
END:
"""
)

# The CTAs of a pair write into each other's shared memory.
PAIR = (
    START
    + """
mov.u32 %r10, %cluster_ctarank;
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
/*init fence*/ fence.mbarrier_init.release.cluster;
READY:
/*start*/ barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
xor.b32 %r11, %r10, 1;
mapa.shared::cluster.u32 %r12, %r3, %r11;
add.u32 %r13, %r12, %r5;  sub.u32 %r13, %r13, %r3;
st.shared::cluster.b32 [%r13+256], %r0;
/*arrive*/ mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];
/*wait*/ W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [smem], 0; @!%p1 bra W;
ld.shared.b32 %r7, [%r5+256];
/*end*/ barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
"""
)

# CTA 1 of a pair arrives at a barrier of CTA 0, where nobody waits.
ONE_WAY = (
    START
    + """
mov.u32 %r10, %cluster_ctarank;
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
mov.u32 %r11, 0;
mapa.shared::cluster.u32 %r12, %r3, %r11;
setp.eq.u32 %p1, %r10, 0;
@%p1 bra DONE;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];
DONE:
/*end*/ barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
"""
)

# Copies global memory to shared memory, adds one to it and copies it back; twice.
COPIES = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
mov.u32 %r4, 0;
LOOP:
@%p0 bra WAIT;
/*expect*/ mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+1024], [%rd8], 128, [smem];
WAIT:
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p1, [smem], %r4;  @!%p1 bra W;
ld.shared.b32 %r7, [%r5+1024];
add.u32 %r7, %r7, 1;
st.shared.b32 [%r5+1024], %r7;
/*proxy*/ fence.proxy.async.shared::cta;
/*meet*/ bar.sync 0;
@%p0 bra NEXT;
cp.async.bulk.global.shared::cta.bulk_group [%rd8], [smem+1024], 128;
/*commit*/ cp.async.bulk.commit_group;
/*drain*/ cp.async.bulk.wait_group 0;
NEXT:
/*again*/ bar.sync 0;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p2, %r4, 2;
@%p2 bra LOOP;
"""
)

_B = (8 << 16) | (16 << 32) | (1 << 46)
_IDESC = (1 << 4) | (1 << 7) | (1 << 10) | (2 << 17) | (8 << 24)

# Four warps store A (128 x 16, bf16) to tensor memory and B (16 x 16) to shared memory; one thread
# multiplies them, everybody reads D (128 x 16, f32), and one thread multiplies once more.
TENSOR = (
    START
    + f"""
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
mbarrier.init.shared.b64 [smem+8], 128;
fence.mbarrier_init.release.cluster;
READY:
setp.ne.u32 %p1, %r1, 0;
@%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+16], 64;
ALLOCATED:
/*start*/ bar.sync 0;
ld.shared.b32 %r10, [smem+16];
shl.b32 %r11, %r1, 21;  add.u32 %r11, %r11, %r10;
add.u32 %r12, %r10, 32;  add.u32 %r13, %r11, 32;
mov.u32 %r14, 0;
st.shared.b32 [%r5+1024], %r14;
/*proxy*/ fence.proxy.async.shared::cta;
/*store*/ tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13], {{%r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0}};
/*wait st*/ tcgen05.wait::st.sync.aligned;
/*before*/ tcgen05.fence::before_thread_sync;
/*ready*/ mbarrier.arrive.shared.b64 _, [smem+8];
shr.u32 %r15, %r3, 4;  add.u32 %r15, %r15, 64;
cvt.u64.u32 %rd0, %r15;  or.b64 %rd0, %rd0, {_B};
mov.u32 %r16, {_IDESC};
mov.u32 %r17, 0;
LOOP:
@%p0 bra RESULT;
/*wait a*/ W0: mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r17;  @!%p2 bra W0;
tcgen05.fence::after_thread_sync;
setp.ne.u32 %p3, %r0, %r0;
tcgen05.mma.cta_group::1.kind::f16 [%r10], [%r12], %rd0, %r16, %p3;
/*commit*/ tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem];
RESULT:
/*wait d*/ W1: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r17;  @!%p2 bra W1;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r20, %r21, %r22, %r23}}, [%r11];
/*early use*/ add.u32 %r24, %r20, %r23;
/*wait ld*/ tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
mbarrier.arrive.shared.b64 _, [smem+8];
add.u32 %r24, %r20, %r23;
add.u32 %r17, %r17, 1;  setp.lt.u32 %p4, %r17, 2;
@%p4 bra LOOP;
/*end*/ bar.sync 0;
@%p1 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
END:
"""
)

# The only warp of a cluster takes over other clusters until nothing is left.
CANCEL = (
    START
    + """
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
mov.u32 %r4, 0;  mov.u32 %r9, 0;
LOOP:
@%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [smem+32],\
 [smem];
WAIT:
/*wait*/ W: mbarrier.try_wait.parity.shared.b64 %p1, [smem], %r4;  @!%p1 bra W;
ld.shared.b128 %q0, [smem+32];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q0;
/*proxy*/ fence.proxy.async.shared::cta;
/*meet*/ bar.sync 0;
xor.b32 %r4, %r4, 1;
/*last*/ add.u32 %r9, %r9, 1;
@%p2 bra LOOP;
"""
)

# The response is read word by word: query_cancel does not see that a request has failed.
WORDS = CANCEL.replace(
    "ld.shared.b128 %q0, [smem+32];", "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [smem+32];"
).replace(
    "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q0;",
    "and.b32 %r7, %r7, 1;  setp.ne.u32 %p2, %r7, 0;",
)
