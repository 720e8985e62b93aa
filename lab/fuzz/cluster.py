"""Family of clusters: shared memory of other CTAs, remote arrivals, copies between CTAs.

Phases as in `shared`, each ended by a barrier of the whole cluster.
"""

from __future__ import annotations

from .arithmetic import Registers
from .program import REDUCTIONS, Launch, Piece, Program, Writer, writer
from .shared import TILE, Phases
from .straight import finish

THREADS = 64


class ClusterPhases(Phases):
    """Writes phases for clusters of `size` CTAs of 64 threads."""

    def __init__(self, w: Writer, registers: Registers, size: int) -> None:
        super().__init__(w, registers, THREADS)
        self.size = size

    def sync(self) -> str:
        """Barrier of the cluster, in one of its forms that order memory."""
        arrive = self.w.random.choice(("arrive", "arrive.release"))
        wait = self.w.random.choice(("wait", "wait.acquire"))
        aligned = self.w.random.choice(("", ".aligned"))
        return f"barrier.cluster.{arrive}{aligned};\nbarrier.cluster.{wait}{aligned};\n"

    def head(self) -> str:
        """Shared memory as in `Phases`; %rank; every CTA has begun before the first phase."""
        return f"{super().head()}.reg .b32 %rank;\nmov.u32 %rank, %cluster_ctarank;\n{self.sync()}"

    def phase(self) -> Piece:
        kinds = [
            self._write_there, self._write_there, self._read_there, self._red_there,
            self._arrive_there, self._store_async, self._reduce_async, self._push,
            self._split_barrier, self._own,
        ]  # fmt: skip
        work = tuple(self.registers.instruction() for _ in range(self.w.random.randrange(3)))
        return Piece("", (*work, Piece(self.w.random.choice(kinds)(), fixed=True)), self.sync())

    def _own(self) -> str:
        return self.exchange("bar.sync 0;\n")

    def _target(self) -> tuple[str, str]:
        """A rank that is a permutation of the own one: text and register."""
        rank = self.w.register("b32")
        shift = str(self.w.random.randrange(self.size))
        if self.w.chance(0.3):
            return f"xor.b32 {rank}, %rank, {self.w.random.randrange(self.size)};\n", rank
        return (
            f"add.u32 {rank}, %rank, {shift};\nand.b32 {rank}, {rank}, {self.size - 1};\n",
            rank,
        )

    def _there(self, address: str, rank: str) -> tuple[str, str, str]:
        """An address in the CTA of a rank: text, state space, register."""
        if self.w.chance(0.7):
            far = self.w.register("b32")
            return f"mapa.shared::cluster.u32 {far}, {address}, {rank};\n", ".shared::cluster", far
        near, far = self.w.register("b64"), self.w.register("b64")
        return (
            (
                f"cvt.u64.u32 {near}, {address};\ncvta.shared.u64 {near}, {near};\n"
                f"mapa.u64 {far}, {near}, {rank};\n"
            ),
            "",
            far,
        )

    def _shuffled(self, size: int) -> tuple[str, str]:
        return self._slot(
            "%thread", size, self.w.random.randrange(1, 64, 2), self.w.random.randrange(64)
        )

    def _write_there(self) -> str:
        """Each thread writes a slot of its own in another CTA; that CTA reads any of its slots."""
        registers, choose = self.registers, self.w.random
        size, kind, count = choose.choice(((4, "b32", 1), (8, "v2.b32", 2), (16, "v4.b32", 4)))
        rank_text, rank = self._target()
        text, slot = self._shuffled(size)
        far_text, space, far = self._there(slot, rank)
        read, near = self._slot(registers.pick("r"), size, 1, 0)
        names = ", ".join(registers.pick("r") for _ in range(count))
        found = ", ".join(f"%r{k}" for k in choose.sample(range(registers.files["r"]), count))
        return (
            (
                f"{rank_text}{text}{far_text}st{space}.{kind} [{far}], {{{names}}};\n{self.sync()}"
                f"{read}ld.shared.{kind} {{{found}}}, [{near}];\n"
            )
            .replace("{" + names + "}", "{" + names + "}" if count > 1 else names)
            .replace("{" + found + "}", "{" + found + "}" if count > 1 else found)
        )

    def _read_there(self) -> str:
        """Each thread writes its own CTA's slot and reads any slot of any CTA."""
        registers = self.registers
        text, slot = self._shuffled(4)
        read, near = self._slot(registers.pick("r"), 4, 1, 0)
        rank = self.w.register("b32")
        far_text, space, far = self._there(near, rank)
        number = self.w.register("b32")
        return (
            f"{text}st.shared.b32 [{slot}], {registers.pick('r')};\n{self.sync()}{read}"
            f"rem.u32 {rank}, {registers.pick('r')}, {self.size};\n{far_text}"
            f"ld{space}.b32 {registers.pick('r')}, [{far}];\n"
            + (
                f"getctarank.shared::cluster.u32 {number}, {far};\n"
                f"add.u32 {registers.pick('r')}, {number}, 5;\n"
                if space
                else ""
            )
        )

    def _red_there(self) -> str:
        """Reductions into slots of CTAs that data chooses."""
        registers = self.registers
        form = self.w.random.choice(
            ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "add.u64")
        )
        value, text = registers.pick("r"), ""
        size = 8 if form.endswith("64") else 4
        if size == 8:
            value = self.w.register("b64")
            text = f"mov.b64 {value}, {{{registers.pick('r')}, {registers.pick('r')}}};\n"
        rank, slot = self.w.register("b32"), self.w.register("b32")
        far_text, space, far = self._there(slot, rank)
        scope = self.w.random.choice((".relaxed.cluster", ".release.cluster", ""))
        guard = f"@{registers.pick('p')} " if self.w.chance(0.5) else ""
        read = self.w.register("b32")
        return (
            f"{text}rem.u32 {rank}, {registers.pick('r')}, {self.size};\n"
            f"and.b32 {slot}, {registers.pick('r')}, 15;\n"
            f"mad.lo.u32 {slot}, {slot}, {size}, %tile;\n{far_text}"
            f"{guard}red{scope}{space}.{form} [{far}], {value};\n{self.sync()}"
            f"and.b32 {read}, %thread, 31;\nmad.lo.u32 {read}, {read}, 4, %tile;\n"
            f"ld.shared.b32 {registers.pick('r')}, [{read}];\n"
        )

    def _far_barrier(self, count: int | str, rank: str) -> tuple[str, str, str, str]:
        """An mbarrier of each CTA, and its address in the CTA of a rank: (text that makes it, text
        that makes the far address, address, far address)."""
        init, address = self.barrier(count)
        far = self.w.register("b32")
        return (
            f"{init}fence.mbarrier_init.release.cluster;\n{self.sync()}",
            f"mapa.shared::cluster.u32 {far}, {address}, {rank};\n",
            address,
            far,
        )

    def _cluster_wait(self, address: str, parity: int) -> str:
        text = self.wait(address, parity)
        return text.replace("parity.shared", "parity.acquire.cluster.shared")

    def _arrive_there(self) -> str:
        """Data and arrivals go to one other CTA, several rounds."""
        rank_text, rank = self._target()
        init, near_text, address, far = self._far_barrier(THREADS, rank)
        text, slot = self._shuffled(4)
        far_text, space, place = self._there(slot, rank)
        read, near = self._slot(self.registers.pick("r"), 4, 1, 0)
        body = ""
        for turn in range(self.w.random.randrange(1, 3)):
            again = self.sync() if turn else ""
            body += (
                f"{again}st{space}.b32 [{place}], {self.registers.pick('r')};\n"
                f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{far}];\n"
                f"{self._cluster_wait(address, turn & 1)}{read}"
                f"ld.shared.b32 {self.registers.pick('r')}, [{near}];\n"
            )
        return f"{rank_text}{init}{near_text}{text}{far_text}{body}"

    def _expecting(self, nbytes: int, rank: str) -> tuple[str, str, str]:
        """A barrier of one arrival that expects bytes: text, own address, address there."""
        init, near_text, address, far = self._far_barrier(1, rank)
        first, state = self.w.register("pred"), self.w.register("b64")
        return (
            (
                f"{init}{near_text}setp.eq.u32 {first}, %thread, 0;\n"
                f"@{first} mbarrier.arrive.expect_tx.shared::cta.b64 {state}, [{address}], "
                f"{nbytes};\n"
            ),
            address,
            far,
        )

    def _store_async(self) -> str:
        """st.async of every thread into another CTA."""
        registers, choose = self.registers, self.w.random
        size, kind, count = choose.choice(((4, "b32", 1), (8, "v2.b32", 2), (16, "v4.b32", 4)))
        rank_text, rank = self._target()
        head, address, far = self._expecting(size * THREADS, rank)
        text, slot = self._shuffled(size)
        place = self.w.register("b32")
        names = ", ".join(registers.pick("r") for _ in range(count))
        value = names if count == 1 else f"{{{names}}}"
        read, near = self._slot(registers.pick("r"), 4, 1, 0)
        return (
            f"{rank_text}{head}{text}mapa.shared::cluster.u32 {place}, {slot}, {rank};\n"
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} [{place}], "
            f"{value}, [{far}];\n{self._cluster_wait(address, 0)}{read}"
            f"ld.shared.b32 {registers.pick('r')}, [{near}];\n"
        )

    def _reduce_async(self) -> str:
        """red.async of every thread into sixteen slots of another CTA."""
        registers = self.registers
        form = self.w.random.choice(REDUCTIONS)
        rank_text, rank = self._target()
        head, address, far = self._expecting(4 * THREADS, rank)
        slot, place, read = (self.w.register("b32") for _ in range(3))
        return (
            f"{rank_text}{head}and.b32 {slot}, {registers.pick('r')}, 15;\n"
            f"mad.lo.u32 {slot}, {slot}, 4, %tile;\n"
            f"mapa.shared::cluster.u32 {place}, {slot}, {rank};\n"
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes."
            f"{form} [{place}], {registers.pick('r')}, [{far}];\n"
            f"{self._cluster_wait(address, 0)}and.b32 {read}, %thread, 15;\n"
            f"mad.lo.u32 {read}, {read}, 4, %tile;\n"
            f"ld.shared.b32 {registers.pick('r')}, [{read}];\n"
        )

    def _push(self) -> str:
        """A bulk copy of part of the lower half of the tile into another CTA's upper half."""
        choose = self.w.random
        size = 16 * choose.randrange(1, TILE // 32 + 1)
        source = 16 * choose.randrange((TILE // 2 - size) // 16 + 1)
        target = TILE // 2 + 16 * choose.randrange((TILE // 2 - size) // 16 + 1)
        rank_text, rank = self._target()
        head, address, far = self._expecting(size, rank)
        first, here, there, read = (self.w.register(kind) for kind in ("pred", *["b32"] * 3))
        word = choose.randrange(size // 4)
        text, slot = self._slot("%thread", 4, 1, 0)
        return (
            f"{rank_text}{text}st.shared.b32 [{slot}], {self.registers.pick('r')};\n"
            f"fence.proxy.async;\n{head}setp.eq.u32 {first}, %thread, 0;\n"
            f"add.u32 {here}, %tile, {source};\nadd.u32 {there}, %tile, {target};\n"
            f"mapa.shared::cluster.u32 {there}, {there}, {rank};\n"
            f"@{first} cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            f"[{there}], [{here}], {size}, [{far}];\n{self._cluster_wait(address, 0)}"
            f"add.u32 {read}, %thread, {word};\nrem.u32 {read}, {read}, {size // 4};\n"
            f"mad.lo.u32 {read}, {read}, 4, %tile;\n"
            f"ld.shared.b32 {self.registers.pick('r')}, [{read}+{target}];\n"
        )

    def _split_barrier(self) -> str:
        """Work between arrive and wait of the cluster's barrier; relaxed arrivals order nothing."""
        form = self.w.random.choice((".relaxed.aligned", ".relaxed", ".aligned"))
        wait = ".aligned" if form.endswith("aligned") else ""
        work = "".join(self.registers.instruction().before for _ in range(3))
        return f"barrier.cluster.arrive{form};\n{work}barrier.cluster.wait{wait};\n"


def cluster(seed: int) -> Program:
    """Phases of a cluster of 2, 4 or 8 CTAs."""
    w = writer("cluster", seed)
    size = w.random.choice((2, 2, 4, 8))
    registers = Registers(w, ("integer",))
    phases = ClusterPhases(w, registers, size)
    pieces = [phases.phase() for _ in range(w.random.randrange(2, 5))]
    launch = Launch(
        size * w.random.choice((1, 1, 2)), THREADS, size, f".reqnctapercluster {size}, 1, 1\n"
    )
    return finish(w, registers, "cluster", seed, pieces, launch, extra_head=phases.head())
