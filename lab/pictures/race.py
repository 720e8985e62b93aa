"""A race as the sanitizer sees it: a small kernel with a planted bug, run, its finding drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import sm100_sim
from lab.pictures.svg import BLUE, GREEN, GREY, INK, RED, RULE, Drawing, Point, tint

#: Warp 0 fills a slot of shared memory, warp 1 reads it, twice. Each line with a comment is drawn.
#: The bug: warp 1 gives the slot back before it has read.
KERNEL = """
.version 8.7
.target sm_100a
.address_size 64
.extern .shared .align 128 .b8 smem[];
.visible .entry race() {
.reg .pred %p<4>;
.reg .b32 %r<9>;
mov.u32 %r0, %tid.x;
and.b32 %r1, %r0, 31;
shr.u32 %r2, %r0, 5;
mov.u32 %r3, smem;
shl.b32 %r1, %r1, 2;
add.u32 %r1, %r1, %r3;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [smem], 32;
mbarrier.init.shared.b64 [smem+8], 32;
READY:
bar.sync 0;
mov.u32 %r4, 0;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra READER;
WRITER:
xor.b32 %r5, %r4, 1;
W0: mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r5;  // 0 wait empty
@!%p2 bra W0;
st.shared.b32 [%r1+128], %r4;  // 0 fill the slot
mbarrier.arrive.shared.b64 _, [smem];  // 0 arrive full
add.u32 %r4, %r4, 1;
setp.lt.u32 %p3, %r4, 2;
@%p3 bra WRITER;
bra END;
READER:
W1: mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r4;  // 1 wait full
@!%p2 bra W1;
mbarrier.arrive.shared.b64 _, [smem+8];  // 1 arrive empty
ld.shared.b32 %r6, [%r1+128];  // 1 read the slot
add.u32 %r4, %r4, 1;
setp.lt.u32 %p3, %r4, 2;
@%p3 bra READER;
END:
ret;
}
"""


class Operation(NamedTuple):
    """A drawn line of the kernel: its warp, what it does, its position."""

    warp: int
    what: str
    line: int


def operations() -> list[Operation]:
    """Return the operations of one round, by warp and program order."""
    found = []
    for number, text in enumerate(KERNEL.split("\n"), 1):
        _, _, comment = text.partition("// ")
        if comment:
            warp, what = comment.split(" ", 1)
            found.append(Operation(int(warp), what, number))
    return found


def planted_race() -> sm100_sim.Finding:
    """The sanitizer's finding in `KERNEL`. Raises RuntimeError if it does not find the race."""
    report = run_text(KERNEL)
    for finding in report.findings:
        if isinstance(finding, sm100_sim.Finding) and finding.kind == "race":
            return finding
    raise RuntimeError(f"no race was found in the planted kernel: {report.findings}")


def run_text(ptx: str, **schedule: Any) -> sm100_sim.Report:
    """The sanitized run of a kernel with 64 threads and no parameters, under a schedule."""
    options = sm100_sim.Options(sanitize=True, **schedule)
    return sm100_sim.launch_ptx(ptx, "race", [], block=64, dynamic_smem=1024, options=options)


_LANES = (190.0, 540.0)
_TOP, _ROW, _HALF, _TALL = 128, 62, 78, 15
#: Rows of the operations that are drawn, by warp: the first round, then as much of the second as
#: the race needs. A wait stands below the arrival that it waits for.
_ROWS = ((0.0, 1.0, 2.0, 4.3, 5.3, 6.3), (2.6, 3.6, 5.0, 6.9))


def happens_before() -> Drawing:
    """The operations of both warps, what orders them, and the pair that nothing does. Raises
    RuntimeError if the sanitizer does not find the race any more."""
    finding = planted_race()
    drawing = Drawing(
        960,
        636,
        "A race as a happens-before diagram",
        "Two warps in two rounds. Arrows lead down each warp and from each arrival to the wait "
        "that it completes. No path of arrows leads from warp 1's read of the slot to warp 0's "
        "next write of it: that pair is the race.",
    )
    drawing.heading(
        "A race: no path of arrows leads from the read to the next write",
        "warp 1 gives the slot back before it has read it; found whichever of the two comes first",
    )
    places = _places()
    sites = {_at(site.line).what: site for site in finding.sites}
    accused = tuple(
        next(key for key in places if key == (number, _at(sites[what].line)))
        for number, what in enumerate(("read the slot", "fill the slot"))
    )
    for warp, x in enumerate(_LANES):
        words = ("warp 0 fills a slot", "warp 1 reads it")[warp]
        drawing.text((x, 96), words, 15, "middle", style="bold")
        steps = [place for (_, operation), place in places.items() if operation.warp == warp]
        for (x0, y0), (x1, y1) in zip(steps, steps[1:]):
            drawing.arrow([(x0, y0 + _TALL), (x1, y1 - _TALL - 1)], GREY, 1.5)
    for begin, end in _orders(places):
        side = 1 if end[0] > begin[0] else -1
        drawing.arrow(
            [(begin[0] + _HALF * side, begin[1]), (end[0] - (_HALF + 2) * side, end[1])], BLUE, 1.8
        )
    for key, place in places.items():
        _operation(drawing, key[1], place, key in accused)
    _race(drawing, places[accused[0]], places[accused[1]])
    x = _LANES[1] + _HALF + 36
    drawing.lines(
        (x, _TOP + 3.6 * _ROW - 4),
        ["Mended: read first, then", "arrive. Then the path", "read, arrive empty,",
         "wait empty, fill", "orders the two."], 12.5, colour=GREY,
    )  # fmt: skip
    texts = [
        f"{what}: {site.opcode}, line {site.line} of the PTX, warp {site.warp}"
        for what, site in sites.items()
    ]
    drawing.lines((24, 604), [f"finding `{finding.kind}`:  {texts[0]};", texts[1]], 12.5)
    return drawing


def _places() -> dict[tuple[int, Operation], Point]:
    """(round, operation) -> where it is drawn."""
    found: dict[tuple[int, Operation], Point] = {}
    for warp, rows in enumerate(_ROWS):
        own = [operation for operation in operations() if operation.warp == warp]
        for place, row in enumerate(rows):
            number, index = divmod(place, len(own))
            found[number, own[index]] = (_LANES[warp], _TOP + row * _ROW)
    return found


def _orders(places: dict[tuple[int, Operation], Point]) -> list[tuple[Point, Point]]:
    """Return the way from each arrival to the wait of the other warp that it completes."""
    found = []
    for (number, operation), place in places.items():
        verb, _, barrier = operation.what.partition(" ")
        # The slot begins free: a wait for it belongs to the arrival of the round before.
        later = number + 1 if barrier == "empty" else number
        for (other, waiting), end in places.items():
            if verb == "arrive" and waiting.what == f"wait {barrier}" and other == later:
                found.append((place, end))
    return found


def _at(line: int) -> Operation:
    return next(operation for operation in operations() if operation.line == line)


def _operation(drawing: Drawing, operation: Operation, place: Point, accused: bool) -> None:
    x, y = place
    is_access = not operation.what.startswith(("wait", "arrive"))
    colour = RED if accused else GREEN if is_access else BLUE
    drawing.rect(x - _HALF, y - _TALL, 2 * _HALF, 2 * _TALL, tint(colour, 0.2), colour, 6, 1.5)
    drawing.text((x, y + 5), operation.what, 12.5, "middle", INK, "bold" if is_access else "")


def _race(drawing: Drawing, read: Point, write: Point) -> None:
    begin, end = (read[0] - _HALF, read[1]), (write[0] + _HALF, write[1])
    drawing.line([begin, end], RED, 2.6, "7 5")
    x, y = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
    drawing.rect(x - 66, y + 8, 132, 20, "#ffffff", RULE, 4)
    drawing.text((x, y + 22), "nothing orders them", 11.5, "middle", RED)
