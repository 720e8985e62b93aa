"""Registers of a launch, and setmaxnreg, which moves them between the warps of a CTA."""

from __future__ import annotations

import pytest
from kernel_text import run_kernel_text

from sm100_sim.errors import BarrierError, Hang, LaunchError
from sm100_sim.state.barriers import most_registers

pytestmark = pytest.mark.simulator


def test_setmaxnreg_waits_for_the_pool():
    """Warps that want more registers come before those that give them back in program order."""
    body = """
    mov.u32 %r0, %tid.x;  setp.ge.u32 %p0, %r0, 256;
    @%p0 bra GIVE;
    setmaxnreg.inc.sync.aligned.u32 208;
    bra END;
    GIVE: setmaxnreg.dec.sync.aligned.u32 48;
    END:
    """
    run_kernel_text(body, block=(512, 1, 1))
    with pytest.raises(Hang, match="setmaxnreg.inc to 208 registers a thread; 0 registers are"):
        run_kernel_text(
            body.replace("dec.sync.aligned.u32 48", "dec.sync.aligned.u32 128"), block=(512, 1, 1)
        )


# Registers a thread of three warpgroups after setmaxnreg; whether a kernel of 384 threads, launched
# with 168, ends on an H200.
BUDGETS = [
    ((224, 224, 56), True), ((232, 232, 40), True), ((232, 168, 104), True),
    ((224, 224, 64), False), ((216, 216, 80), False),
]  # fmt: skip


def move_registers(budgets: tuple[int, ...], **launch) -> None:
    """Run warpgroups that take (more than 168) or give registers, the largest budget first."""
    blocks = "".join(
        f"""setp.eq.u32 %p0, %r0, {group};  @!%p0 bra NEXT{group};
        setmaxnreg.{"inc" if budget > 168 else "dec"}.sync.aligned.u32 {budget};  bra END;
        NEXT{group}:
        """
        for group, budget in enumerate(budgets)
    )
    body = f"mov.u32 %r0, %tid.x;  shr.u32 %r0, %r0, 7;\n{blocks}END:"
    run_kernel_text(body, block=(128 * len(budgets), 1, 1), **launch)


@pytest.mark.parametrize(("budgets", "ends"), BUDGETS, ids=str)
def test_the_register_pool_is_that_of_the_launch(budgets, ends):
    """512 registers for three threads, one of each warpgroup, are an SM's file of 65,536 without
    its remainder, which no CTA is launched with."""
    if ends:
        move_registers(budgets)
        return
    with pytest.raises(Hang, match="the launch gave the CTA 64512, 168 a thread"):
        move_registers(budgets)


def test_a_kernel_that_was_compiled_for_fewer_registers_has_a_smaller_pool():
    """The machine code says with how many registers a thread is launched."""
    move_registers((176, 176, 152), registers=168)
    with pytest.raises(Hang, match="the launch gave the CTA 61440, 160 a thread"):
        move_registers((176, 176, 152), registers=160)


def test_no_more_than_the_kernels_own_registers_can_be_left():
    """A launch with 86 registers gets 88 of the file, but setmaxnreg.dec must stay below 86; an
    H200 ends the kernel (the golden case "found/dec within the granule")."""
    body = "setmaxnreg.dec.sync.aligned.u32 {};"
    run_kernel_text(body.format(80), block=(128, 1, 1), registers=86)
    with pytest.raises(BarrierError, match="dec to 88 registers; the warp has 86"):
        run_kernel_text(body.format(88), block=(128, 1, 1), registers=86)


def test_an_increase_to_less_is_refused():
    with pytest.raises(BarrierError, match="setmaxnreg.inc to 168 registers; the warp has 176"):
        run_kernel_text("setmaxnreg.inc.sync.aligned.u32 168;", block=(128, 1, 1), registers=176)


@pytest.mark.parametrize("threads", [384, 288])
def test_more_registers_than_the_file_has_cannot_be_launched(threads):
    """The ninth warp of 288 threads is the third of its quarter of the SM, as in 384."""
    run_kernel_text("", block=(threads, 1, 1), registers=168)
    with pytest.raises(LaunchError, match=f"{threads} threads with 176 registers each"):
        run_kernel_text("", block=(threads, 1, 1), registers=176)


@pytest.mark.parametrize(
    ("threads", "ctas", "registers"),
    [
        (160, 1, 256),
        (288, 1, 168),
        (320, 1, 168),
        (416, 1, 128),
        (544, 1, 96),
        (672, 1, 80),
        (160, 2, 168),
        (288, 2, 96),
        (96, 3, 168),
        (160, 3, 128),
        (288, 3, 72),
        (96, 4, 168),
    ],
)
def test_registers_that_fit_a_launch(threads, ctas, registers):
    """ptxas 13.1 gives these registers to a kernel of .reqntid and .minnctapersm whose
    setmaxnreg.inc requests 256 (255 of 256: so many can be named)."""
    assert most_registers(threads, ctas) == registers


def test_a_launch_has_no_more_registers_than_the_largest_increase():
    """256 threads would fit with 255 each; ptxas then compiles this for 240, so the increase is
    none (recorded of an H200: pool/35 of docs/golden.md)."""
    body = """
    mov.u32 %r0, %tid.x;  setp.ge.u32 %p0, %r0, 128;
    @%p0 bra GIVE;
    setmaxnreg.inc.sync.aligned.u32 240;
    bra END;
    GIVE: setmaxnreg.dec.sync.aligned.u32 TO;
    END:
    """
    run_kernel_text(body.replace("TO", "40"), block=(256, 1, 1))
    with pytest.raises(BarrierError, match="dec to 248 registers; the warp has 240"):
        run_kernel_text(body.replace("TO", "248"), block=(256, 1, 1))
