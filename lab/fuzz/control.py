"""Families of control flow: divergence and reconvergence, and warp operations under masks.

Lanes execute a warp operation together only if they are exactly those of its membermask. The
generator carries the mask along: a constant, or a register that a ballot filled before the
branch. Where it does not know who executes, it writes no warp operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .arithmetic import Registers
from .program import REDUCTIONS, Launch, Piece, Program, Writer, writer
from .straight import finish

_FULL = 0xFFFFFFFF


@dataclass(frozen=True)
class Mask:
    """The lanes that execute here: `operand` as PTX has it; `lanes` where it is a constant."""

    operand: str
    lanes: int | None = None


def _constant(lanes: int) -> Mask:
    return Mask(f"{lanes:#010x}", lanes)


class Flow:
    """Writes nested control flow for one program. warp: whether warp operations occur. A budget of
    instructions keeps programs small."""

    def __init__(self, w: Writer, registers: Registers, budget: int, warp: bool) -> None:
        self.w, self.registers, self.budget, self.warp = w, registers, budget, warp

    def pieces(self, mask: Mask | None, depth: int) -> list[Piece]:
        """A sequence of statements that the lanes of `mask` execute; None: nobody knows which."""
        found = []
        for _ in range(self.w.random.randrange(2, 5 if depth else 12)):
            if self.budget <= 0:
                break
            self.budget -= 1
            found.append(self._statement(mask, depth))
        return found

    def _statement(self, mask: Mask | None, depth: int) -> Piece:
        compound: list[Callable[[Any, int], Piece]]
        compound = [self._branch, self._loop, self._switch, self._forward]
        if mask is not None:
            compound += [self._constant_branch, self._voted_branch, self._voted_loop]
        if depth < 3 and self.w.chance(0.3):
            return self.w.random.choice(compound)(mask, depth + 1)
        if self.warp and mask is not None and self.w.chance(0.45):
            return self._warp_operation(mask)
        if self.w.chance(0.02):
            return Piece(f"nanosleep.u32 {self.w.random.randrange(200)};\n")
        return self.registers.instruction()

    def _block(self, mask: Mask | None, depth: int) -> tuple[Piece, ...]:
        return tuple(self.pieces(mask, depth))

    def _branch(self, mask: Mask | None, depth: int) -> Piece:
        """Emit if and else on a predicate that differs from lane to lane."""
        other, end = self.w.label(), self.w.label()
        sign, predicate = self.w.random.choice(("", "!")), self.registers.pick("p")
        return Piece(
            f"@{sign}{predicate} bra {other};\n",
            (
                Piece("", self._block(None, depth), fixed=True),
                Piece(f"bra {end};\n{other}:\n", self._block(None, depth), fixed=True),
            ),
            f"{end}:\n{self._join(mask)}",
        )

    def _join(self, mask: Mask | None) -> str:
        if mask is None or self.w.chance(0.5):
            return ""
        return f"bar.warp.sync {mask.operand};\n"

    def _count(self) -> tuple[str, str]:
        """Return (register, text) of a fresh counter of 0 to 3, other in each lane."""
        count = self.w.register("b32")
        shift = self.w.random.randrange(0, 30)
        return count, (
            f"shr.u32 {count}, {self.registers.pick('r')}, {shift};\nand.b32 {count}, {count}, 3;\n"
        )

    def _loop(self, mask: Mask | None, depth: int) -> Piece:
        """Up to three rounds of a body; lanes leave it at different times."""
        again, end = self.w.label(), self.w.label()
        count, text = self._count()
        more = self.w.register("pred")
        return Piece(
            f"{text}{again}:\nsetp.eq.u32 {more}, {count}, 0;\n@{more} bra {end};\n"
            f"sub.u32 {count}, {count}, 1;\n",
            self._block(None, depth),
            f"bra {again};\n{end}:\n{self._join(mask)}",
        )

    def _switch(self, mask: Mask | None, depth: int) -> Piece:
        """brx.idx over three cases; a case may fall through into the next one."""
        labels, end = [self.w.label() for _ in range(3)], self.w.label()
        table, index = self.w.label(), self.w.register("b32")
        inside = [
            Piece(f"{label}:\n", self._block(None, depth), self._leave(end), fixed=True)
            for label in labels
        ]
        return Piece(
            f"rem.u32 {index}, {self.registers.pick('r')}, 3;\n"
            f"{table}: .branchtargets {', '.join(labels)};\nbrx.idx {index}, {table};\n",
            tuple(inside),
            f"{end}:\n{self._join(mask)}",
        )

    def _leave(self, end: str) -> str:
        return "" if self.w.chance(0.3) else f"bra {end};\n"

    def _forward(self, mask: Mask | None, depth: int) -> Piece:
        """Jumps into and over one another's ranges, as no structured program has them."""
        first, second, end = (self.w.label() for _ in range(3))
        ways = [self._fresh_predicate() for _ in range(3)]
        return Piece(
            f"{ways[0][0]}@{ways[0][1]} bra {second};\n",
            (
                Piece("", self._block(None, depth), fixed=True),
                Piece(
                    f"{ways[1][0]}@{ways[1][1]} bra {end};\n{first}:\n",
                    self._block(None, depth),
                    fixed=True,
                ),
                Piece(f"{second}:\n", self._block(None, depth), fixed=True),
            ),
            f"{ways[2][0]}@{ways[2][1]} bra {end};\n{self.registers.instruction().before}{end}:\n"
            f"{self._join(mask)}",
        )

    def _fresh_predicate(self) -> tuple[str, str]:
        """A comparison and its result; ptxas 13.0 loses values of predicates that live longer."""
        predicate = self.w.register("pred")
        compare = self.w.random.choice(("lt", "ge", "eq"))
        bits, low = self.w.register("b32"), self.w.random.choice((0, 1, 2))
        return (
            f"and.b32 {bits}, {self.registers.pick('r')}, 3;\n"
            f"setp.{compare}.u32 {predicate}, {bits}, {low};\n"
        ), predicate

    def _constant_branch(self, mask: Mask, depth: int) -> Piece:
        """Lanes of a constant set go one way, the others the other way."""
        if mask.lanes is None or mask.lanes.bit_count() < 2:
            return self._voted_branch(mask, depth)
        chosen = mask.lanes & self._lane_set()
        if chosen in (0, mask.lanes):
            chosen = mask.lanes & -mask.lanes
        inside, bit = self.w.register("pred"), self.w.register("b32")
        other, end = self.w.label(), self.w.label()
        return Piece(
            f"shr.u32 {bit}, {chosen:#010x}, %lane;\nand.b32 {bit}, {bit}, 1;\n"
            f"setp.eq.u32 {inside}, {bit}, 0;\n@{inside} bra {other};\n",
            (
                Piece("", self._block(_constant(chosen), depth), fixed=True),
                Piece(
                    f"bra {end};\n{other}:\n",
                    self._block(_constant(mask.lanes & ~chosen), depth),
                    fixed=True,
                ),
            ),
            f"{end}:\n{self._join(mask)}",
        )

    def _lane_set(self) -> int:
        """Halves, quarters, every other lane, or any set."""
        choose = self.w.random
        drawn = choose.getrandbits(32), choose.getrandbits(32)
        return choose.choice((0xFFFF, 0xFF00FF00, 0x0F0F0F0F, 0x55555555, 1, 1 << 31, *drawn))

    def _voted_branch(self, mask: Mask, depth: int) -> Piece:
        """A branch on data whose sides know by a ballot who takes them."""
        yes, no = self.w.register("b32"), self.w.register("b32")
        other, end = self.w.label(), self.w.label()
        predicate = self.w.register("pred")
        return Piece(
            f"setp.lt.s32 {predicate}, {self.registers.pick('r')}, {self.registers.pick('r')};\n"
            f"vote.sync.ballot.b32 {yes}, {predicate}, {mask.operand};\n"
            f"xor.b32 {no}, {yes}, {mask.operand};\n@!{predicate} bra {other};\n",
            (
                Piece("", self._block(Mask(yes), depth), fixed=True),
                Piece(f"bra {end};\n{other}:\n", self._block(Mask(no), depth), fixed=True),
            ),
            f"{end}:\n{self._join(mask)}",
        )

    def _voted_loop(self, mask: Mask, depth: int) -> Piece:
        """A loop whose every round knows by a ballot which lanes are still in it."""
        count, text = self._count()
        inside, more = self.w.register("b32"), self.w.register("pred")
        again, end = self.w.label(), self.w.label()
        return Piece(
            f"{text}mov.b32 {inside}, {mask.operand};\n{again}:\nsetp.ne.u32 {more}, {count}, 0;\n"
            f"vote.sync.ballot.b32 {inside}, {more}, {inside};\n@!{more} bra {end};\n"
            f"sub.u32 {count}, {count}, 1;\n",
            self._block(Mask(inside), depth),
            f"bra {again};\n{end}:\n{self._join(mask)}",
        )

    # ------------------------------------------------------------ warp operations

    def _warp_operation(self, mask: Mask) -> Piece:
        choose, registers = self.w.random, self.registers
        kinds = [self._vote, self._match, self._redux, self._elect, self._shuffle]
        return Piece(choose.choice(kinds)(mask, registers))

    def _vote(self, mask: Mask, registers: Registers) -> str:
        mode = self.w.random.choice(("all", "any", "uni", "ballot"))
        sign = self.w.random.choice(("", "!"))
        source = f"{sign}{registers.pick('p')}, {mask.operand}"
        if mode == "ballot":
            return f"vote.sync.ballot.b32 {registers.pick('r')}, {source};\n"
        return f"vote.sync.{mode}.pred {registers.pick('p')}, {source};\n"

    def _match(self, mask: Mask, registers: Registers) -> str:
        value, bits = self.w.register("b32"), self.w.random.choice((0, 1, 3, 7))
        text = f"and.b32 {value}, {registers.pick('r')}, {bits};\n"
        kind = "b32"
        if self.w.chance(0.3):
            wide, kind = self.w.register("b64"), "b64"
            text += f"mov.b64 {wide}, {{{registers.pick('r')}, {value}}};\n"
            text += f"and.b64 {wide}, {wide}, 0x300000001;\n"
            value = wide
        if self.w.chance(0.5):
            return f"{text}match.any.sync.{kind} {registers.pick('r')}, {value}, {mask.operand};\n"
        return (
            f"{text}match.all.sync.{kind} {registers.pick('r')}|{registers.pick('p')}, {value},"
            f" {mask.operand};\n"
        )

    def _redux(self, mask: Mask, registers: Registers) -> str:
        form = self.w.random.choice(REDUCTIONS)
        return f"redux.sync.{form} {registers.pick('r')}, {registers.pick('r')}, {mask.operand};\n"

    def _elect(self, mask: Mask, registers: Registers) -> str:
        return f"elect.sync {registers.pick('r')}|{registers.pick('p')}, {mask.operand};\n"

    def _shuffle(self, mask: Mask, registers: Registers) -> str:
        destination = registers.pick("r")
        if self.w.chance(0.5):
            destination += f"|{registers.pick('p')}"
        source = registers.pick("r")
        if mask.lanes == _FULL:
            mode = self.w.random.choice(("up", "down", "bfly", "idx"))
            lane = registers.pick("r") if self.w.chance(0.5) else str(self.w.random.randrange(32))
            segment = 32 - self.w.random.choice((2, 4, 8, 16, 32))
            clamp = 0 if mode == "up" else 31
            if self.w.chance(0.2):
                clamp = self.w.random.randrange(32)
            return (
                f"shfl.sync.{mode}.b32 {destination}, {source}, {lane}, "
                f"{segment << 8 | clamp}, {mask.operand};\n"
            )
        # Elsewhere only lanes of the mask may be read: its highest or lowest, or the own one.
        lane, text = self.w.register("b32"), ""
        way = self.w.random.randrange(3)
        if way == 0:
            text = f"bfind.u32 {lane}, {mask.operand};\n"
        elif way == 1:
            text = f"brev.b32 {lane}, {mask.operand};\nclz.b32 {lane}, {lane};\n"
        else:
            lane = "%lane"
        return f"{text}shfl.sync.idx.b32 {destination}, {source}, {lane}, 31, {mask.operand};\n"


_SETS = (("integer",), ("integer", "short"), ("integer", "wide"), ("float", "integer"))


def divergence(seed: int) -> Program:
    """Nested branches, loops, switches and jumps on data, without warp operations."""
    return _flow("divergence", seed, False)


def warp(seed: int) -> Program:
    """Make a program with votes, shuffles, matches, reductions and elections among known lanes."""
    return _flow("warp", seed, True)


def _flow(family: str, seed: int, with_warp: bool) -> Program:
    w = writer(family, seed)
    registers = Registers(w, _SETS[seed % len(_SETS)])
    flow = Flow(w, registers, w.random.randrange(15, 45), with_warp)
    pieces: list[Piece] = []
    lanes = _FULL
    for _ in range(w.random.randrange(1, 4)):
        pieces += flow.pieces(_constant(lanes), 0)
        if w.chance(0.3):
            gone = lanes & (1 << w.random.randrange(32) | w.random.getrandbits(32) & 0x11111111)
            if gone and gone != lanes:
                pieces.append(_exit(w, registers, gone))
                lanes &= ~gone
    return finish(w, registers, family, seed, pieces, Launch(1, 64))


def _exit(w: Writer, registers: Registers, lanes: int) -> Piece:
    """Emit lanes that store a register and exit."""
    leaves, bit = w.register("pred"), w.register("b32")
    return Piece(
        f"shr.u32 {bit}, {lanes:#010x}, %lane;\nand.b32 {bit}, {bit}, 1;\n"
        f"setp.ne.u32 {leaves}, {bit}, 0;\n@{leaves} st.global.b32 [%out], {registers.pick('r')};\n"
        f"@{leaves} {w.random.choice(('exit', 'ret'))};\n",
        fixed=True,
    )
