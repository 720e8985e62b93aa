"""Families of programs that may hang: unbalanced barriers, exits, and register pools.

Every warp (or warpgroup) has a list of operations of its own. The hardware ends such a program or
it does not; the simulator must say the same. Each thread that gets to its end stores a mark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sm100_sim.state.barriers import most_registers

from .program import Launch, Piece, Program, Writer, random_words, writer

_HEAD = """.reg .b32 %thread, %unit, %mark, %index;
.reg .b64 %out, %step, %state;
.reg .pred %other, %done;
mov.u32 %thread, %tid.x;
mov.u32 %index, %ctaid.x;
mov.u32 %mark, %ntid.x;
mad.lo.u32 %index, %index, %mark, %thread;
ld.param.u64 %out, [p1];
mul.wide.u32 %step, %index, 4;
add.u64 %out, %out, %step;
"""
#: Mark that a thread stores when it has done everything.
DONE = 0x600D


def _sections(
    w: Writer, lists: list[list[str]], per_unit: int, last: str = "", fixed: bool = False
) -> list[Piece]:
    """One section a unit of `per_unit` threads: its operations, `last`, the mark, exit. fixed: no
    operation can be left out."""
    pieces = []
    for unit, operations in enumerate(lists):
        following = w.label()
        pieces.append(
            Piece(
                f"div.u32 %unit, %thread, {per_unit};\nsetp.ne.u32 %other, %unit, {unit};\n"
                f"@%other bra {following};\n",
                tuple(Piece(text, fixed=fixed) for text in operations),
                f"{last}mov.u32 %mark, {DONE};\nst.global.u32 [%out], %mark;\nexit;\n"
                f"{following}:\n",
                fixed=True,
            )
        )
    return pieces


def _program(
    family: str, seed: int, w: Writer, head: str, pieces: list[Piece], launch: Launch
) -> Program:
    threads = launch.grid * launch.block
    return Program(
        family, seed, _HEAD + w.declarations() + head, tuple(pieces), "ret;\n", launch,
        (random_words(w.random, 4),), (np.zeros(threads, np.uint32),), may_hang=True,
    )  # fmt: skip


def named(seed: int) -> Program:
    """Named barriers whose counts fit by chance; some warps or lanes leave early."""
    w = writer("named", seed)
    warps = w.random.randrange(2, 7)
    counts = {number: 32 * w.random.randrange(1, warps + 1) for number in range(1, 4)}
    length = w.random.randrange(1, 4)
    whole = w.chance(0.4)

    def operation() -> str:
        if whole and w.chance(0.4):
            return w.random.choice(("bar.sync 0;\n", "barrier.sync 0;\n"))
        number = w.random.randrange(1, 3)
        kind = w.random.choice(("bar.sync", "bar.sync", "bar.arrive", "barrier.sync.aligned"))
        return f"{kind} {number}, {counts[number]};\n"

    common = [operation() for _ in range(length)]
    lists = []
    for _ in range(warps):
        own = list(common) if w.chance(0.75) else [operation() for _ in range(length)]
        if w.chance(0.15):
            own.insert(w.random.randrange(length + 1), _leave(w))
        lists.append(own)
    return _program("named", seed, w, "", _sections(w, lists, 32), Launch(1, 32 * warps))


def _leave(w: Writer) -> str:
    """The whole warp, or some of its lanes, exit."""
    if w.chance(0.5):
        return "exit;\n"
    lane, gone = w.register("b32"), w.register("pred")
    return (
        f"and.b32 {lane}, %thread, 31;\nsetp.lt.u32 {gone}, {lane}, "
        f"{w.random.randrange(1, 32)};\n@{gone} exit;\n"
    )


def waits(seed: int) -> Program:
    """Warps arrive at two mbarriers and wait for their phases; half the programs miss something."""
    w = writer("waits", seed)
    warps, rounds = w.random.randrange(2, 6), w.random.randrange(1, 4)
    counts = [warps, warps]
    order = [w.random.randrange(2) for _ in range(rounds)]
    lists = [
        [step for which in order for step in (_arrive(w, which, True), "wait")]
        for _ in range(warps)
    ]
    _spoil(w, counts, order, lists)
    for own in lists:
        phases = [0, 0]
        for place, which in enumerate(order):
            own[2 * place + 1] = _spin(w, which, phases[which] & 1)
            phases[which] += 1
    head = (
        ".shared .align 8 .b64 bars[2];\nsetp.ne.u32 %other, %thread, 0;\n"
        + "".join(
            f"@!%other mbarrier.init.shared::cta.b64 [bars+{8 * i}], {count};\n"
            for i, count in enumerate(counts)
        )
        + "bar.sync 0;\n"
    )
    return _program("waits", seed, w, head, _sections(w, lists, 32), Launch(1, 32 * warps))


def _spoil(w: Writer, counts: list[int], order: list[int], lists: list[list[str]]) -> None:
    """Perhaps expect one arrival more, or let a warp miss one arrival, or one's bytes."""
    place = w.random.randrange(len(order))
    kind = w.random.randrange(6)
    if kind == 0:
        counts[order[place]] += 1
    elif kind == 1:
        w.random.choice(lists)[2 * place] = ""
    elif kind == 2:
        w.random.choice(lists)[2 * place] = _arrive(w, order[place], False)


def _spin(w: Writer, which: int, parity: int) -> str:
    again = w.label()
    return (
        f"{again}:\nmbarrier.try_wait.parity.shared::cta.b64 %done, [bars+{8 * which}], "
        f"{parity};\n@!%done bra {again};\n"
    )


def _arrive(w: Writer, which: int, complete: bool) -> str:
    """The first lane arrives, perhaps with bytes that it expects and, unless it forgets, has."""
    lane, first = w.register("b32"), w.register("pred")
    text = ""
    if w.chance(0.3) or not complete:
        size = w.random.randrange(1, 3) * 16
        names = ("expect", "complete") if complete else ("expect",)
        text = "".join(
            f"@{first} mbarrier.{name}_tx.relaxed.cta.shared::cta.b64 [bars+{8 * which}], {size};\n"
            for name in names
        )
    return (
        f"and.b32 {lane}, %thread, 31;\nsetp.eq.u32 {first}, {lane}, 0;\n{text}"
        f"@{first} mbarrier.arrive.shared::cta.b64 %state, [bars+{8 * which}];\n"
        "bar.warp.sync 0xffffffff;\n"
    )


def crowds(seed: int) -> Program:
    """Warps of a cluster meet a different number of times, then leave or wait for ever."""
    w = writer("crowds", seed)
    size, warps = w.random.choice((2, 4)), w.random.randrange(1, 4)
    aligned = w.random.choice(("", ".aligned"))
    pieces: list[Piece] = []
    for rank in range(size):
        other = w.label()
        lists = []
        for _ in range(warps):
            rounds = w.random.choice((0, 1, 1, 2, 3))
            own = [
                f"barrier.cluster.arrive{w.random.choice(('', '.relaxed'))}{aligned};\n"
                f"barrier.cluster.wait{aligned};\n"
                for _ in range(rounds)
            ]
            if w.chance(0.08):
                again = w.label()
                own.append(
                    f"{again}:\nmbarrier.try_wait.parity.shared::cta.b64 %done, [bars], 0;\n"
                    f"@!%done bra {again};\n"
                )
            if w.chance(0.2):
                own.insert(w.random.randrange(len(own) + 1), _leave(w))
            lists.append(own)
        pieces.append(
            Piece(
                f"mov.u32 %unit, %cluster_ctarank;\nsetp.ne.u32 %other, %unit, {rank};\n"
                f"@%other bra {other};\n",
                tuple(_sections(w, lists, 32)),
                f"{other}:\n",
                fixed=True,
            )
        )
    head = (
        ".shared .align 8 .b64 bars[1];\nsetp.ne.u32 %other, %thread, 0;\n"
        "@!%other mbarrier.init.shared::cta.b64 [bars], 1;\nbar.sync 0;\n"
    )
    launch = Launch(size, 32 * warps, size, f".reqnctapercluster {size}, 1, 1\n")
    return _program("crowds", seed, w, head, pieces, launch)


def pool(seed: int) -> Program:
    """Warpgroups give registers back and request more, about as many as there are."""
    w = writer("pool", seed)
    groups = w.random.randrange(1, 6)
    threads = 128 * groups
    launched = most_registers(threads)
    directive, fewer = f".reqntid {threads}, 1, 1\n.minnctapersm 1\n", 0
    if w.chance(0.3):
        launched, fewer = min(launched, 8 * w.random.randrange(4, 28)), w.random.randrange(8)
        directive = f".reqntid {threads}, 1, 1\n.maxnreg {launched - fewer}\n"
    # Budgets around what the launch has; the last group takes the rest, or a granule more or less.
    budgets = [_budget(w, launched) for _ in range(groups)]
    rest = launched * groups - sum(budgets[:-1]) + 8 * w.random.choice((-1, 0, 0, 1, 2))
    budgets[-1] = max(24, min(256, rest // 8 * 8))
    lists = [
        _moves(w, launched, budget, launched - 8 if fewer or launched == 256 else launched)
        for budget in budgets
    ]
    last = "bar.sync 0;\n" if w.chance(0.6) else ""
    # The largest step up is what the kernel is launched with at most, so none may go.
    return _program(
        "pool", seed, w, "", _sections(w, lists, 128, last, fixed=True),
        Launch(1, threads, 1, directive),
    )  # fmt: skip


def _budget(w: Writer, launched: int) -> int:
    away = 8 * w.random.randrange(-12, 9)
    return max(24, min(240, launched + away))


def _moves(w: Writer, launched: int, budget: int, most: int) -> list[str]:
    """Steps from the registers at launch to a budget, perhaps over a lower point. most: registers
    that a step down may leave; the hardware refuses more than the kernel has."""
    steps, now = [], launched
    if w.chance(0.3) and min(now, budget, most) > 24:
        low = 8 * w.random.randrange(3, min(now, budget, most) // 8 + 1)
        steps.append(("dec", low))
        now = low
    if budget != now:
        steps.append(("dec" if budget < now else "inc", budget))
    return [f"setmaxnreg.{name}.sync.aligned.u32 {count};\n" for name, count in steps]


def parts(seed: int) -> Program:
    """The lanes of a warp come to a barrier at several sites; perhaps one warp does not come."""
    w = writer("parts", seed)
    warps = w.random.randrange(1, 5)
    threads = 32 * (warps + w.chance(0.25))
    number = w.random.randrange(1, 16)
    lists = []
    for _ in range(warps):
        cuts = sorted(w.random.sample(range(1, 32), w.random.randrange(1, 3)))
        steps = []
        for _ in range(w.random.randrange(1, 3)):
            steps.append(_sites(w, cuts, f"barrier.sync {number}, {threads};\n"))
        lists.append(steps)
    rounds = min(len(steps) for steps in lists)
    return _program(
        "parts", seed, w, "", _sections(w, [steps[:rounds] for steps in lists], 32),
        Launch(1, 32 * warps),
    )  # fmt: skip


def _sites(w: Writer, cuts: list[int], barrier: str) -> str:
    """Lanes below each cut, and the rest, execute a barrier each at a place of their own."""
    lane, end = w.register("b32"), w.label()
    text = f"and.b32 {lane}, %thread, 31;\n"
    for cut in cuts:
        other, inside = w.label(), w.register("pred")
        text += (
            f"setp.ge.u32 {inside}, {lane}, {cut};\n@{inside} bra {other};\n{barrier}"
            f"bra {end};\n{other}:\n"
        )
    return f"{text}{barrier}{end}:\nbar.warp.sync 0xffffffff;\n"


def sizes(seed: int) -> Program:
    """Bulk copies whose barriers expect as many bytes, or more. With fewer the end is open: the
    hardware completes a copy's bytes in several pieces."""
    w = writer("sizes", seed)
    places = [
        (16 * w.random.randrange(1, 65), w.random.choice((0, 0, 0, 0, 16, 16)))
        for _ in range(w.random.randrange(1, 4))
    ]
    operations = []
    for number, (size, more) in enumerate(places):
        operations.append(
            f"setp.ne.u32 %other, %thread, 0;\n@!%other mbarrier.arrive.expect_tx.shared::cta.b64 "
            f"%state, [bars+{8 * number}], {size + more};\n"
            "@!%other cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[tile], [%in], {size}, [bars+{8 * number}];\n" + _spin(w, number, 0)
        )
    head = (
        ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b64 bars[4];\n.reg .b64 %in;\n"
        "ld.param.u64 %in, [p0];\nsetp.ne.u32 %other, %thread, 0;\n"
        + "".join(f"@!%other mbarrier.init.shared::cta.b64 [bars+{8 * i}], 1;\n" for i in range(4))
        + "fence.proxy.async;\nbar.sync 0;\n"
    )
    made = _program("sizes", seed, w, head, _sections(w, [operations], 64), Launch(1, 64))
    return replace(made, inputs=(random_words(w.random, 256),))


HANGING: dict[str, Callable[[int], Program]] = {
    "named": named, "parts": parts, "waits": waits, "sizes": sizes, "crowds": crowds,
    "pool": pool,
}  # fmt: skip
