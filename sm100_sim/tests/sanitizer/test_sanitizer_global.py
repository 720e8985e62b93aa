"""Global memory under the sanitizer: native code and Python (a lazy run) find the same."""

import numpy as np
import pytest
from kernel_text import run_kernel_text

pytestmark = pytest.mark.simulator

#: Access widths in bytes: type and registers of a load or store.
FORMS = {
    1: ("u8", "%r6"), 2: ("u16", "%r6"), 4: ("b32", "%r6"), 8: ("v2.b32", "{%r6, %r7}"),
    16: ("v4.b32", "{%r6, %r7, %r4, %r5}"),
}  # fmt: skip
START = """
mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;  and.b32 %r2, %r0, 31;
mov.u32 %r4, 0;  mov.u32 %r5, 0;  mov.u32 %r6, 0;  mov.u32 %r7, 0;
"""


def findings(body: str, arrays: int = 1, warps: int = 1) -> list:
    """Return the findings of two CTAs of a cluster, the same in native code and in Python."""
    found = [
        run_kernel_text(
            START + body,
            [np.zeros(1024, np.uint32) for _ in range(arrays)],
            grid=(2, 1, 1),
            cluster=(2, 1, 1),
            block=(32 * warps, 1, 1),
            sanitize=True,
            schedule=schedule,
        ).findings
        for schedule in ("eager", "lazy")
    ]
    assert list(map(str, found[0])) == list(map(str, found[1]))
    return found[0]


def access(opcode: str, width: int, row: str, array: int = 8) -> str:
    """A load or store of element %r0 of a row of 1024 bytes, by register or number."""
    kind, registers = FORMS[width]
    place = f"[%rd{array - 8}]"
    operands = f"{registers}, {place}" if opcode == "ld" else f"{place}, {registers}"
    return (
        f"mov.u32 %r10, {row};  mad.lo.u32 %r10, %r10, 1024, 0;  mad.lo.u32 %r10, %r0, {width}, "
        f"%r10;  cvt.u64.u32 %rd{array - 8}, %r10;  "
        f"add.u64 %rd{array - 8}, %rd{array - 8}, %rd{array};\n"
        f"{opcode}.global.{kind} {operands};\n"
    )


MEET = "barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;\n"
SWAP = "xor.b32 %r11, %r1, 1;\n"


@pytest.mark.parametrize("width", FORMS)
def test_rows_of_their_own_are_clean(width):
    own = access("st", width, "%r1")
    assert findings(own + access("ld", width, "%r1") + own) == []


@pytest.mark.parametrize("width", FORMS)
def test_one_row_has_two_writers(width):
    (finding,) = findings(access("st", width, "0"))
    assert finding.kind == "two-writers"
    assert "CTA (0, 0, 0) warp 0, then" in finding and "CTA (1, 0, 0) warp 0;" in finding


@pytest.mark.parametrize(("between", "expected"), [(MEET, []), ("", ["race"])])
@pytest.mark.parametrize("width", FORMS)
def test_the_other_row_is_read_in_order_only(width, between, expected):
    """A row that was read is free to be overwritten by its reader."""
    body = access("st", width, "%r1") + between + SWAP + access("ld", width, "%r11") + between
    assert [finding.kind for finding in findings(body)] == expected
    if not expected:
        assert findings(body + access("st", width, "%r11")) == []


@pytest.mark.parametrize(("between", "expected"), [("bar.sync 0;\n", []), ("", ["race"])])
def test_warps_of_one_cta_read_in_order_only(between, expected):
    own = access("st", 4, "%r1")
    other = "xor.b32 %r0, %r0, 32;\n" + access("ld", 4, "%r1")
    found = findings(own + between + other, warps=2)
    assert [finding.kind for finding in found] == expected


@pytest.mark.parametrize("rows", [("%r1", "%r1"), ("0", "%r1"), ("%r1", "0")])
def test_lanes_may_go_to_two_tensors(rows):
    """Even lanes go to the first, odd ones to the second."""
    places = "".join(access("ld", 4, row, 8 + n) for n, row in enumerate(rows))
    body = places.replace("ld.global", "// ld.global") + (
        "and.b32 %r12, %r0, 1;  setp.eq.u32 %p1, %r12, 1;  selp.b64 %rd2, %rd1, %rd0, %p1;\n"
        "st.global.b32 [%rd2], %r6;\n"
    )
    found = [finding.kind for finding in findings(body, arrays=2)]
    assert found == ["two-writers"] * ("0" in rows)
