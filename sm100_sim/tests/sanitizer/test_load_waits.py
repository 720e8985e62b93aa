"""The reading "wait-ld": a left-out tcgen05.wait::ld, and nothing of kernels that wait."""

import numpy as np
import pytest
from kernel_text import run_kernel_text

pytestmark = pytest.mark.simulator

#: A warp stores two words to tensor memory, loads them by two loads, and writes their sums out. Of
#: the sums one is computed ahead of the wait, as compilers have it.
ROUND = """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;
bar.sync 0;
ld.shared.b32 %r20, [smem];
mov.u32 %r0, %laneid;
add.u32 %r1, %r0, 100;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r20], {%r0, %r1};
tcgen05.wait::st.sync.aligned;
mov.u32 %r9, 3;
AGAIN:
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r20];
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r20+1];
add.u32 %r4, %r2, %r3;
/*first*/ tcgen05.wait::ld.sync.aligned;
mul.wide.u32 %rd0, %r0, 8;
add.u64 %rd0, %rd0, %rd8;
st.global.u32 [%rd0], %r4;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r20];
/*second*/ tcgen05.wait::ld.sync.aligned;
add.u32 %r6, %r5, %r4;
st.global.u32 [%rd0+4], %r6;
add.u32 %r9, %r9, -1;
setp.ne.u32 %p0, %r9, 0;
@%p0 bra AGAIN;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;
"""
WAIT = "tcgen05.wait::ld.sync.aligned;"


def found(text, sanitize="wait-ld", **options):
    out = np.zeros(64, np.uint32)
    report = run_kernel_text(text, [out], sanitize=sanitize, **options)
    assert (out[::2] == 2 * np.arange(32) + 100).all(), "right, whether or not it waits"
    return report.findings


def lines(text, finding):
    """The instructions of a finding, from its PTX lines."""
    from kernel_text import kernel_text

    whole = kernel_text(text, 1).splitlines()
    return tuple(whole[line - 1] for line in finding.lines)


@pytest.mark.parametrize("options", [{}, {"seed": 1}], ids=["plain", "seed"])
@pytest.mark.parametrize(("left_out", "register", "store"), [
    ("first", "{%r3}", "st.global.u32 [%rd0], %r4;"),
    ("second", "{%r5}", "st.global.u32 [%rd0+4], %r6;"),
])  # fmt: skip
def test_a_left_out_wait_is_one_cause(left_out, register, store, options):
    """The load, the store of what came of it, and the wait between; arithmetic is no use."""
    text = ROUND.replace(f"/*{left_out}*/ {WAIT}", "")
    findings = found(text, **options)
    assert {finding.kind for finding in findings} == {"load-not-waited"}
    load, use = lines(text, findings[0])
    assert register in load and use == store
    assert "tcgen05.wait::ld (.sync.aligned), which must stand between" in findings[0].missing
    assert found(text, sanitize=True) == []


def test_kernels_that_wait_have_no_finding():
    assert found(ROUND) == found(ROUND, seed=1) == []


def test_a_wait_on_one_path_alone_does_not_count():
    text = ROUND.replace(f"/*second*/ {WAIT}", "@%p0 bra OVER;\n" + WAIT + "\nOVER:")
    assert {finding.kind for finding in found(text)} == {"load-not-waited"}


def test_kernels_that_rely_on_registers_throughout_are_left_alone():
    """Neither a wait::ld nor a tcgen05.fence, as in flash-attn-4's; one fence is a convention."""
    text = ROUND.replace(WAIT, "")
    assert found(text) == []
    fenced = text.replace("mov.u32 %r9, 3;", "tcgen05.fence::after_thread_sync;\nmov.u32 %r9, 3;")
    assert len(found(fenced)) >= 2
