"""The simulator's packages as a tower, and the life of one instruction."""

from __future__ import annotations

from lab.pictures.svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Drawing, tint

#: Floors from the ground up: packages of `sm100_sim`, and what happens there. Each imports lower
#: ones alone.
FLOORS = (
    (("ptx",), "text to instructions and operands"),
    (("jit", "native"), "LLVM in process, its code kept on disk; routines for what runs most"),
    (("state",), "registers, shared and tensor memory, mbarriers; what is in flight is an object"),
    (("host", "isa"), "host code, caught at its launch; one table of what every opcode does"),
    (("translate",), "basic blocks to LLVM, a vector of 32 lanes a register; lanes that diverge"),
    (("run",), "clusters and warps; who waits, who is woken; hangs are named"),
)
#: Observers of a run, beside the floors.
OBSERVERS = (
    ("sanitizer", "vector clocks:", "races, lifetimes"),
    ("mutation", "leaves out one", "synchronisation"),
    ("trace", "an ordered record", "of operations"),
    ("timing", "replays the SASS", "clock by clock"),
)


def simulator_tower() -> Drawing:
    """Draw what a launch passes on its way, from the ground up."""
    drawing = Drawing(
        1040,
        580,
        "The tower of the simulator",
        "Six floors, from the compiled function at the ground to the run loop at the top; beside "
        "them four packages that watch a run, and the ways in.",
    )
    drawing.heading(
        "The simulator runs the compiled kernel: host code and PTX, nothing rewritten",
        "floors from the ground up, packages of sm100_sim; each imports only those below it",
    )
    left, width, tall = 24.0, 700.0, 58.0
    ground = 520.0
    drawing.rect(left, ground, width, 42, tint(GREY, 0.16), GREY, 4, 1.5)
    drawing.text(
        (left + width / 2, ground + 26),
        "a compiled CuTe DSL function, or PTX text",
        14,
        "middle",
        style="bold",
    )
    for number, (packages, words) in enumerate(FLOORS):
        top = ground - (number + 1) * (tall + 8)
        drawing.rect(left, top, width, tall, tint(BLUE, 0.1 + 0.05 * number), BLUE, 4, 1.5)
        drawing.text((left + 18, top + 25), ", ".join(packages), 15, style="bold")
        drawing.text((left + 18, top + 45), words, 12.5, colour=INK)
    top = ground - len(FLOORS) * (tall + 8)
    drawing.text((756, top - 8), "packages that watch", 12.5, colour=GREY)
    step = (ground + 42 - top) / len(OBSERVERS)
    for number, (package, *lines) in enumerate(OBSERVERS):
        drawing.box(
            (756, top + number * step, 260, step - 10),
            [package, *lines],
            (GREEN, PURPLE, ORANGE, ORANGE)[number],
            15,
        )
    for number in range(len(OBSERVERS)):
        y = top + number * step + (step - 10) / 2
        drawing.line([(left + width, y), (756, y)], GREY, 1.5, "3 3")
    drawing.text(
        (left, top - 8),
        "the result: tensors, a Report; errors that name the line",
        12.5,
        colour=GREY,
    )
    return drawing


_STAGES = (
    ("PTX", ("tcgen05.mma", "  .cta_group::2.kind::f16", "  [d], a, b, shape, add"), GREY),
    ("bind, once", ("modifiers checked,", "operand accessors", "bound"), BLUE),
    ("execute", ("warp and lanes; the", "descriptors are decoded", "and checked"), BLUE),
    ("issued", ("an object in the pair's", "queue, behind the MMAs", "before it"), ORANGE),
    ("performed", ("a chain becomes one", "float32 product, written", "to tensor memory"), GREEN),
    ("completed", ("the commit behind it", "arrives at its mbarrier,", "and waiters wake"), GREEN),
)
_WATCHED = (
    (
        "sanitizer",
        "knows what the issuing warp knew; marks operands read and accumulator written "
        "by this warp's MMAs, in flight until a commit has been waited for",
    ),
    ("trace", "an entry with descriptors, line, and the blocks run since the last entry"),
    ("timing", "finds its UTCHMMA in the SASS; with M = 256 the tensor core takes N / 2 clocks"),
    (
        "schedule",
        "eager: performed when issued; lazy: as late as a waiter allows; seed=N: anywhere between",
    ),
)


def instruction_life() -> Drawing:
    """tcgen05.mma from text to effect, and who looks on."""
    drawing = Drawing(
        1180,
        470,
        "The life of one instruction",
        "Six stages of a tcgen05.mma: PTX text, bind, execute, issued, performed, completed; below "
        "them what the sanitizer, the trace, the timing model and the schedule make of it.",
    )
    drawing.heading(
        "The life of a tcgen05.mma: issued, performed, completed are three moments",
        "between them the schedule decides, and a race can hide",
    )
    wide, gap, top, tall = 168.0, 24.0, 92.0, 116.0
    for number, (name, words, colour) in enumerate(_STAGES):
        left = 24 + number * (wide + gap)
        drawing.rect(left, top, wide, tall, tint(colour, 0.14), colour, 6, 1.5)
        drawing.text((left + wide / 2, top + 28), name, 15, "middle", style="bold")
        for line, text in enumerate(words):
            drawing.text((left + wide / 2, top + 56 + 18 * line), text.strip(), 12, "middle", GREY)
        if number:
            drawing.arrow([(left - gap + 2, top + tall / 2), (left - 2, top + tall / 2)], INK, 1.8)
    y = 262.0
    drawing.text((24, y), "who looks on", 13, colour=GREY)
    for name, what in _WATCHED:
        y += 44
        drawing.rect(24, y - 22, 1132, 36, tint(GREY, 0.06), "none", 4)
        drawing.text((40, y + 1), name, 14, style="bold")
        drawing.text((146, y + 1), what, 12.5)
    return drawing
