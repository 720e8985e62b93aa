"""Families of one CTA: shared memory between barriers, named barriers, mbarriers.

A program is a sequence of phases, each ended by a barrier of the whole CTA, so that any of them
can be left out. Within a phase no two threads touch the same bytes without an order between them.
"""

from __future__ import annotations

from .arithmetic import Registers
from .program import REDUCTIONS, Launch, Piece, Program, Writer, writer
from .straight import finish

#: Bytes of shared memory that the phases use, each from its start.
TILE = 8192
_CTA = "bar.sync 0;\n"


class Phases:
    """Writes phases for a CTA of `threads` threads, a power of two from 32 on."""

    def __init__(self, w: Writer, registers: Registers, threads: int) -> None:
        self.w, self.registers, self.threads = w, registers, threads
        self.barriers = 0

    def head(self) -> str:
        """Declarations of shared memory; all of it is zero before the first phase."""
        again = self.w.label()
        bars = f".shared .align 8 .b64 bars[{self.barriers}];\n" if self.barriers else ""
        return (
            f".shared .align 1024 .b8 tile[{TILE}];\n{bars}.reg .b32 %tile, %zero, %place;\n"
            ".reg .pred %more;\nmov.u32 %tile, tile;\nshl.b32 %place, %thread, 2;\n"
            f"mov.b32 %zero, 0;\n{again}:\nadd.u32 %i0, %tile, %place;\n"
            f"st.shared.b32 [%i0], %zero;\nadd.u32 %place, %place, {4 * self.threads};\n"
            f"setp.lt.u32 %more, %place, {TILE};\n@%more bra {again};\n{_CTA}"
        )

    def phase(self) -> Piece:
        kinds = [
            self._permute, self._permute, self._atomics, self._reduction, self._named,
            self._handshake, self._matrix, self._mbarrier, self._mbarrier, self._bytes,
        ]  # fmt: skip
        if self.threads >= 128:
            kinds += [self._named, self._handshake]
        work = tuple(self.registers.instruction() for _ in range(self.w.random.randrange(4)))
        return Piece("", (*work, Piece(self.w.random.choice(kinds)(), fixed=True)), _CTA)

    def _slot(self, source: str, size: int, odd: int, shift: int) -> tuple[str, str]:
        """Address of slot (source * odd + shift) mod threads, of `size` bytes."""
        slot = self.w.register("b32")
        return (
            f"mad.lo.u32 {slot}, {source}, {odd}, {shift};\n"
            f"and.b32 {slot}, {slot}, {self.threads - 1};\n"
            f"mad.lo.u32 {slot}, {slot}, {size}, %tile;\n"
        ), slot

    def _generic(self, text: str, address: str) -> tuple[str, str, str]:
        """Return the same address in the shared window or a generic one: (text, state space,
        address)."""
        if self.w.chance(0.7):
            return text, ".shared", address
        wide = self.w.register("b64")
        return f"{text}cvt.u64.u32 {wide}, {address};\ncvta.shared.u64 {wide}, {wide};\n", "", wide

    def exchange(self, between: str) -> str:
        """Each thread writes a slot of its own; after `between` it reads any slot."""
        choose, registers = self.w.random, self.registers
        size = choose.choice((1, 2, 4, 8, 16))
        kind = choose.choice(
            {
                1: ("u8", "s8", "b8"),
                2: ("u16", "s16"),
                4: ("b32", "u32"),
                8: ("v2.b32", "b64"),
                16: ("v4.b32",),
            }[size]
        )
        text, slot = self._slot("%thread", size, choose.randrange(1, 64, 2), choose.randrange(64))
        text, space, slot = self._generic(text, slot)
        read, from_slot = self._slot(registers.pick("r"), size, 1, 0)
        read, from_space, from_slot = self._generic(read, from_slot)
        names = [registers.pick("r") for _ in range(4)]
        distinct = [f"%r{k}" for k in choose.sample(range(registers.files["r"]), 4)]
        if kind == "b64":
            wide = self.w.register("b64")
            return (
                f"{text}mov.b64 {wide}, {{{names[0]}, {names[1]}}};\n"
                f"st{space}.b64 [{slot}], {wide};\n{between}{read}"
                f"ld{from_space}.b64 {wide}, [{from_slot}];\n"
                f"mov.b64 {{{distinct[0]}, {distinct[1]}}}, {wide};\n"
            )
        if kind[0] == "v":
            count = int(kind[1])
            return (
                f"{text}st{space}.{kind} [{slot}], {{{', '.join(names[:count])}}};\n{between}"
                f"{read}ld{from_space}.{kind} {{{', '.join(distinct[:count])}}}, "
                f"[{from_slot}];\n"
            )
        return (
            f"{text}st{space}.{kind} [{slot}], {names[0]};\n{between}{read}"
            f"ld{from_space}.{kind} {distinct[0]}, [{from_slot}];\n"
        )

    def _permute(self) -> str:
        return self.exchange(_CTA)

    def _atomics(self) -> str:
        """Atomics in any order whose final values do not depend on it."""
        choose, registers = self.w.random, self.registers
        form = choose.choice((*REDUCTIONS, "add.u64", "max.u64", "min.s64", "xor.b64", "inc.u32"))
        size = 8 if form.endswith("64") else 4
        slot, value = self.w.register("b32"), registers.pick("r")
        text = ""
        if size == 8:
            value = self.w.register("b64")
            text = f"mov.b64 {value}, {{{registers.pick('r')}, {registers.pick('r')}}};\n"
        if form == "inc.u32":
            value = str(choose.choice((5, 1000)))
        start = choose.randrange(16)
        text += (
            f"and.b32 {slot}, {registers.pick('r')}, 15;\n"
            f"mad.lo.u32 {slot}, {slot}, {size}, %tile;\n"
        )
        which = choose.choice(("red", "atom"))
        target = f"{self.w.register(f'b{8 * size}')}, " if which == "atom" else ""
        read = self.w.register("b32")
        guard = f"@{registers.pick('p')} " if self.w.chance(0.5) else ""
        return (
            f"{text}{guard}{which}.shared.{form} {target}[{slot}], {value};\n{_CTA}"
            f"add.u32 {read}, %thread, {start};\nand.b32 {read}, {read}, 15;\n"
            f"mad.lo.u32 {read}, {read}, 4, %tile;\n"
            f"ld.shared.b32 {registers.pick('r')}, [{read}];\n"
        )

    def _reduction(self) -> str:
        """barrier.red over the whole CTA."""
        registers = self.registers
        number = self.w.random.randrange(16)
        source = f"{self.w.random.choice(('', '!'))}{registers.pick('p')}"
        count = f", {self.threads}" if number or self.w.chance(0.5) else ""
        if self.w.chance(0.4):
            return f"bar.red.popc.u32 {registers.pick('r')}, {number}{count}, {source};\n"
        form = self.w.random.choice(("and", "or"))
        return f"bar.red.{form}.pred {registers.pick('p')}, {number}{count}, {source};\n"

    def _warps_below(self, warps: int) -> tuple[str, str]:
        inside = self.w.register("pred")
        return f"setp.lt.u32 {inside}, %thread, {32 * warps};\n", inside

    def _named(self) -> str:
        """Two groups of warps, each with a barrier of its own number."""
        warps = self.threads // 32
        if warps < 2:
            return self.exchange("bar.warp.sync 0xffffffff;\n")
        cut = self.w.random.randrange(1, warps)
        text, inside = self._warps_below(cut)
        other, end = self.w.label(), self.w.label()
        first, second = self.w.random.sample(range(1, 16), 2)
        sync = self.w.random.choice(("bar.sync", "barrier.sync", "bar.cta.sync"))
        value, slot = self.w.register("b32"), self.w.register("b32")
        rounds = self.w.random.randrange(1, 4)

        def group(number: int, count: int) -> str:
            one = (
                f"st.shared.b32 [{slot}], {value};\n{sync} {number}, {32 * count};\n"
                f"xor.b32 {slot}, {slot}, 32;\nld.shared.b32 {value}, [{slot}];\n"
                f"add.u32 {value}, {value}, %thread;\nxor.b32 {slot}, {slot}, 32;\n"
                f"{sync} {number}, {32 * count};\n"
            )
            return one * rounds

        return (
            f"{text}mov.b32 {value}, {self.registers.pick('r')};\n"
            f"mad.lo.u32 {slot}, %thread, 4, %tile;\n@!{inside} bra {other};\n"
            f"{group(first, cut)}bra {end};\n{other}:\n{group(second, warps - cut)}{end}:\n"
            f"mov.b32 {self.registers.pick('r')}, {value};\n"
        )

    def _handshake(self) -> str:
        """Producers arrive, consumers sync, and back again on another barrier."""
        warps = self.threads // 32
        if warps < 2:
            return self.exchange("bar.warp.sync 0xffffffff;\n")
        cut = self.w.random.randrange(1, warps)
        text, inside = self._warps_below(cut)
        other, end = self.w.label(), self.w.label()
        full, empty = self.w.random.sample(range(1, 16), 2)
        slot, value = self.w.register("b32"), self.w.register("b32")
        producer = consumer = ""
        rounds = self.w.random.randrange(1, 4)
        aligned = self.w.random.choice(("bar", "barrier"))
        for number in range(rounds):
            back = number + 1 < rounds
            producer += (
                f"st.shared.b32 [{slot}], {value};\nadd.u32 {value}, {value}, 77;\n"
                f"{aligned}.arrive {full}, {self.threads};\n"
            )
            consumer += (
                f"{aligned}.sync {full}, {self.threads};\nld.shared.b32 {value}, [{slot}];\n"
            )
            if back:
                producer += f"{aligned}.sync {empty}, {self.threads};\n"
                consumer += f"{aligned}.arrive {empty}, {self.threads};\n"
        return (
            f"{text}mov.b32 {value}, {self.registers.pick('r')};\n"
            f"rem.u32 {slot}, %thread, {32 * cut};\nmad.lo.u32 {slot}, {slot}, 4, %tile;\n"
            f"@!{inside} bra {other};\n{producer}bra {end};\n{other}:\n{consumer}{end}:\n"
            f"mov.b32 {self.registers.pick('r')}, {value};\n"
        )

    def _matrix(self) -> str:
        """stmatrix or stores, then ldmatrix, within each warp's own part."""
        choose, registers = self.w.random, self.registers
        count = choose.choice((1, 2, 4))
        base, row = self.w.register("b32"), self.w.register("b32")
        part = TILE // (self.threads // 32)
        text = (
            f"shr.u32 {base}, %thread, 5;\nmad.lo.u32 {base}, {base}, {part}, %tile;\n"
            f"mad.lo.u32 {row}, %lane, {choose.randrange(1, 32, 2)}, {choose.randrange(32)};\n"
            f"and.b32 {row}, {row}, 31;\nmad.lo.u32 {row}, {row}, 16, {base};\n"
        )
        trans = choose.choice(("", ".trans"))
        names = ", ".join(registers.pick("r") for _ in range(count))
        read = ", ".join(f"%r{k}" for k in choose.sample(range(registers.files["r"]), count))
        if self.w.chance(0.5):
            write = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [{row}], {{{names}}};\n"
        else:
            values = ", ".join(registers.pick("r") for _ in range(4))
            write = f"st.shared.v4.b32 [{row}], {{{values}}};\n"
        trans = choose.choice(("", ".trans"))
        return (
            f"bar.warp.sync 0xffffffff;\n{text}{write}bar.warp.sync 0xffffffff;\n"
            f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{read}}}, [{row}];\n"
        )

    # ------------------------------------------------------------ mbarriers

    def barrier(self, count: int | str) -> tuple[str, str]:
        """A fresh mbarrier, initialised by thread 0: text and the register of its address."""
        address, first = self.w.register("b32"), self.w.register("pred")
        number = self.barriers
        self.barriers += 1
        return (
            f"mov.u32 {address}, bars;\nadd.u32 {address}, {address}, {8 * number};\n"
            f"setp.eq.u32 {first}, %thread, 0;\n"
            f"@{first} mbarrier.init.shared::cta.b64 [{address}], {count};\n"
        ), address

    def wait(self, address: str, parity: int) -> str:
        """Spin until the phase of a parity is complete."""
        again, done = self.w.label(), self.w.register("pred")
        which = self.w.random.choice(("try_wait", "test_wait"))
        return (
            f"{again}:\nmbarrier.{which}.parity.shared::cta.b64 {done}, [{address}], {parity};"
            f"\n@!{done} bra {again};\n"
        )

    def _mbarrier(self) -> str:
        """Every thread arrives and waits, several rounds; data goes along."""
        w = self.w
        rounds = w.random.randrange(1, 4)
        each = w.random.choice((1, 1, 2))
        init, address = self.barrier(each * self.threads)
        text = f"{init}{_CTA}"
        for turn in range(rounds):
            state = w.register("b64")
            form = w.random.choice(("", ".release.cta", ".release.cluster"))
            extra = f", {each}" if each > 1 or w.chance(0.3) else ""
            arrive = f"mbarrier.arrive{form}.shared::cta.b64 {state}, [{address}]{extra};\n"
            if w.chance(0.3):
                done, again = w.register("pred"), w.label()
                waiting = (
                    f"{again}:\nmbarrier.try_wait.shared::cta.b64 {done}, [{address}], "
                    f"{state};\n@!{done} bra {again};\n"
                )
            else:
                waiting = self.wait(address, turn & 1)
            text += self.exchange(arrive + waiting) + _CTA
        return text

    def _bytes(self) -> str:
        """Some threads arrive, one expects bytes, others complete them; all see the phase."""
        w = self.w
        arriving = w.random.randrange(1, self.threads)
        nbytes = w.random.randrange(1, 5000)
        init, address = self.barrier(arriving)
        here, there = w.register("pred"), w.register("pred")
        expect, back = (
            f"@{there} mbarrier.{name}_tx.relaxed.cta.shared::cta.b64 [{address}], {nbytes};\n"
            for name in ("expect", "complete")
        )
        done, state = w.register("pred"), w.register("b64")
        before, after = self.registers.pick("r"), self.registers.pick("r")
        return (
            f"{init}{_CTA}setp.lt.u32 {here}, %thread, {arriving};\n"
            f"setp.eq.u32 {there}, %thread, {w.random.randrange(self.threads)};\n{expect}{_CTA}"
            f"@{here} mbarrier.arrive.shared::cta.b64 {state}, [{address}];\n{_CTA}"
            f"mbarrier.test_wait.parity.shared::cta.b64 {done}, [{address}], 0;\n"
            f"selp.u32 {before}, 1, 0, {done};\n{_CTA}{back}{self.wait(address, 0)}"
            f"mbarrier.test_wait.parity.shared::cta.b64 {done}, [{address}], 1;\n"
            f"selp.u32 {after}, 3, 2, {done};\n"
        )


def shared(seed: int) -> Program:
    """Phases of shared memory, barriers and mbarriers in a CTA of 32 to 256 threads."""
    w = writer("shared", seed)
    threads = w.random.choice((32, 64, 128, 128, 256))
    registers = Registers(w, ("integer",))
    phases = Phases(w, registers, threads)
    pieces = [phases.phase() for _ in range(w.random.randrange(2, 6))]
    return finish(
        w, registers, "shared", seed, pieces, Launch(w.random.choice((1, 1, 2)), threads),
        extra_head=phases.head(),
    )  # fmt: skip
