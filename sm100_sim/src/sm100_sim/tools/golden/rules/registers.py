"""Golden cases of setmaxnreg: which register budgets a launch can be divided into, in which order.

A launch gives every thread a number of registers: here that of `.maxnreg`, else all that fit
(`.minnctapersm 1`). Each rule is kept by one case and broken by another with 8 registers more.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cases import Case
from .scripts import EXIT, MEET, SLEEP, scripted

_POOL = "setmaxnreg divides what the CTA was launched with, and nothing more"
_KNOWN = "ptxas drops setmaxnreg where it does not know the launch's registers"
_ORDER = "setmaxnreg.inc waits until others have given enough back"
_GROUP = "setmaxnreg: not executed by all warps of the warpgroup"


def _text(operation: str) -> str:
    kind, _, count = operation.partition(" ")
    if kind in ("inc", "dec"):
        return f"setmaxnreg.{kind}.sync.aligned.u32 {count};"
    return {"meet": MEET, "sleep": SLEEP, "exit": EXIT}[kind]


def _case(
    name: str,
    rule: str,
    threads: int,
    groups: list[list[str]],
    *,
    registers: int = 0,
    undefined: str = "",
    grid: int = 1,
) -> Case:
    """groups: what each warpgroup does; of a list of warps where `name` says so."""
    scripts = {
        warp: [_text(operation) for operation in groups[warp // 4]]
        for warp in range(-(-threads // 32))
    }
    return _of_warps(name, rule, threads, scripts, registers, undefined, grid)


def _of_warps(name, rule, threads, scripts, registers, undefined="", grid=1, limit="") -> Case:
    limit = limit or (f".maxnreg {registers}" if registers else ".minnctapersm 1")
    return scripted(
        f"registers/{name}",
        rule,
        scripts,
        block=threads,
        grid=grid,
        directives=f".reqntid {threads}, 1, 1\n{limit}",
        undefined=undefined,
    )


def _budgets(threads: int, registers: int, launched: int, budgets: list[int]) -> Case:
    """All warpgroups take their budget at once."""
    groups = [[f"{'inc' if budget > launched else 'dec'} {budget}"] for budget in budgets]
    name = f"{threads} threads at {registers or launched}: {'/'.join(map(str, budgets))}"
    return _case(name, _POOL, threads, groups, registers=registers)


def cases() -> Iterator[Case]:
    """All cases of this module."""
    for threads, registers, launched, *budgets in (
        (
            384,
            0,
            168,
            [224, 224, 56],
            [224, 224, 64],
            [232, 232, 40],
            [232, 168, 104],
            [216, 216, 80],
            [256, 224, 24],
            [256, 224, 32],
        ),
        (512, 0, 128, [232, 232, 24, 24], [232, 240, 24, 24]),
        (256, 0, 256, [256, 256], [24, 256]),
        (128, 0, 256, [256], [24]),
        (640, 0, 96, [168, 168, 72, 48, 24], [168, 168, 72, 56, 24]),
        (384, 128, 128, [168, 168, 48], [168, 168, 56]),
        (384, 160, 160, [216, 216, 48], [216, 216, 56]),
        (384, 162, 168, [224, 224, 56], [224, 224, 64]),
        (128, 128, 128, [128], [136]),
        (160, 128, 128, [152, 24], [160, 24]),
    ):
        for budget in budgets:
            yield _budgets(threads, registers, launched, budget)
    for name, limit in (("neither", " "), ("two CTAs an SM", ".minnctapersm 2")):
        scripts = {w: [_text("inc 224" if w < 8 else "dec 64")] for w in range(12)}
        yield _of_warps(
            f"more than the pool, launch limited by {name}", _KNOWN, 384, scripts, 0, limit=limit
        )
    yield from _orders()
    yield from _exits()
    yield from _single_warps()


def _orders() -> Iterator[Case]:
    up = ["inc 224"]
    yield _case("increase before the decrease", _ORDER, 384, [up, up, ["sleep", "dec 56"]])
    yield _case("increase before too small a decrease", _ORDER, 384, [up, up, ["sleep", "dec 64"]])
    yield _case(
        "decrease twice", _ORDER, 384, [["inc 232"], ["inc 232"], ["dec 104", "sleep", "dec 40"]]
    )
    yield _case(
        "decrease twice, too little",
        _ORDER,
        384,
        [["inc 232"], ["inc 232"], ["dec 104", "sleep", "dec 48"]],
    )
    yield _case(
        "increase twice",
        _ORDER,
        384,
        [["inc 200", "meet", "inc 232"], ["inc 200", "meet", "inc 232"], ["dec 40", "meet"]],
    )
    yield _case(
        "there and back",
        _ORDER,
        384,
        [["inc 232", "meet", "dec 40"], ["inc 232", "meet"], ["dec 40", "meet", "inc 232"]],
    )
    yield _case(
        "there and back, 8 too many",
        _ORDER,
        384,
        [["inc 232", "meet", "dec 40"], ["inc 232", "meet"], ["dec 40", "meet", "inc 240"]],
    )
    yield _case("to what it has", _ORDER, 384, [["inc 168"], ["dec 168"], ["inc 168", "dec 168"]])
    less = "setmaxnreg.inc to fewer registers than the warp has"
    yield _case(
        "increase to less frees nothing",
        _ORDER,
        384,
        [["inc 160"], ["inc 176"], []],
        undefined=less,
    )
    for count in (248, 256):
        yield _case(f"down and up to {count} from 255", _ORDER, 128, [["dec 24", f"inc {count}"]])
    more = "setmaxnreg.dec to more registers than the warp has"
    yield _case("decrease to more", _ORDER, 384, [["dec 176"], [], []], undefined=more)
    yield _case(
        "decrease to more takes nothing",
        _ORDER,
        384,
        [["sleep", "dec 176"], ["inc 224"], ["dec 112"]],
        undefined=more,
    )


def _exits() -> Iterator[Case]:
    rule = "the registers of a warp that has exited"
    yield _case("exited warpgroup", rule, 384, [["sleep", "inc 248"], ["sleep"], ["exit"]])
    yield _case(
        "exited after a decrease", rule, 384, [["inc 240"], ["inc 240"], ["dec 24", "exit"]]
    )
    yield _case(
        "exited after a decrease, its rest",
        rule,
        384,
        [["sleep", "inc 256"], ["sleep", "inc 248"], ["dec 24", "exit"]],
    )
    yield _case(
        "of another CTA of the SM",
        rule,
        384,
        [["inc 104"], ["sleep"], ["sleep"]],
        registers=80,
        grid=264,
    )


def _single_warps() -> Iterator[Case]:
    some = [_text("dec 24")]
    yield _of_warps(
        "one warp of a group gives",
        _GROUP,
        256,
        {**{w: [_text("inc 152")] for w in range(4)}, 4: some},
        128,
        _GROUP,
    )
    yield _of_warps(
        "one warp of a group gives too little",
        _GROUP,
        256,
        {**{w: [_text("inc 160")] for w in range(4)}, 4: some},
        128,
        _GROUP,
    )
    rule = "each quarter of the SM has a pool for the warps of its remainder by four"
    for name, giver in (("of the same quarter", 4), ("of another quarter", 5)):
        yield _of_warps(
            f"from a warp {name}",
            rule,
            256,
            {0: [_text("inc 200")], giver: [_text("dec 24")]},
            128,
            _GROUP,
        )
    yield _of_warps(
        "from the only warp of a group, same quarter",
        rule,
        416,
        {8: [_text("inc 208")], 12: [_text("dec 24")]},
        120,
        _GROUP,
    )
    yield _of_warps(
        "from the only warp of a group, other quarter",
        rule,
        416,
        {9: [_text("inc 208")], 12: [_text("dec 24")]},
        120,
        _GROUP,
    )
    given = {w: [_text("dec 104")] for w in range(4, 8)}
    yield _of_warps(
        "one warp of a group takes", _GROUP, 256, {0: [_text("inc 216")], **given}, 128, _GROUP
    )
    yield _of_warps(
        "one warp of a group takes too much",
        _GROUP,
        256,
        {0: [_text("inc 232")], **given},
        128,
        _GROUP,
    )
