"""Families about mbarriers: sequences of operations by one thread, and asynchronous arrivals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sm100_sim.tools.golden.rules.cluster import BULK_REDUCTIONS

from .arithmetic import Registers
from .program import Launch, Piece, Program, Writer, random_words, writer
from .shared import Phases
from .straight import finish

_THREADS = 64


@dataclass
class _Model:
    """State of an mbarrier that decides which operations are legal."""

    expected: int
    pending: int
    transactions: int = 0

    def settle(self) -> None:
        """Begin the next phase if this one is complete."""
        if not self.pending and not self.transactions:
            self.pending = self.expected


def sequences(seed: int) -> Program:
    """One thread works on two mbarriers; after each operation it asks both for their phases. A word
    of the result: bits 0 and 1 are test_wait of parities 0 and 1, bit 2 is test_wait of the latest
    state, bits 8 and up the pending count of the state that the operation returned."""
    w = writer("sequences", seed)
    counts = [w.random.randrange(1, 7) for _ in range(2)]
    models = [_Model(count, count) for count in counts]
    steps = []
    for place in range(w.random.randrange(6, 26)):
        which = w.random.randrange(2)
        text = _operation(w, models[which], which) + _ask(which, place)
        models[which].settle()
        steps.append(text)
    init = "".join(
        f"mbarrier.init.shared::cta.b64 [bars+{8 * i}], {count};\nmov.b64 %state{i}, 0;\n"
        f"mov.b32 %has{i}, 0;\n"
        for i, count in enumerate(counts)
    )
    head = (
        ".shared .align 8 .b64 bars[2];\n.reg .b64 %state<2>, %out;\n.reg .pred %done;\n"
        f".reg .b32 %has<2>, %word, %bit;\nld.param.u64 %out, [p1];\n{init}"
    )
    # Later operations are legal only after all earlier ones: the program is one piece.
    return Program(
        "sequences", seed, head, (Piece("".join(steps), fixed=True),), "ret;\n", Launch(1, 1),
        (random_words(w.random, 4),), (np.zeros(len(steps), np.uint32),),
    )  # fmt: skip


def _operation(w: Writer, model: _Model, which: int) -> str:
    """An operation that is legal now; the model takes note of it."""
    choose, names = w.random, ["expect_tx", "complete_tx"]
    if model.transactions:
        names += ["balance"] * (2 if model.pending else 6)
    if model.pending:
        names += ["arrive"] * 5 + ["arrive.expect_tx"] * 2
    if model.pending > 1:
        names += ["arrive.noComplete"]
    if model.pending and model.expected > 1:
        names += ["arrive_drop", "arrive_drop.expect_tx"]
    name, nbytes = choose.choice(names), 16 * choose.randrange(1, 5)
    if name == "balance":
        name = "complete_tx" if model.transactions > 0 else "expect_tx"
        nbytes = abs(model.transactions)
    if name in ("expect_tx", "complete_tx"):
        model.transactions += nbytes if name == "expect_tx" else -nbytes
        return (
            f"mbarrier.{name}.relaxed.cta.shared::cta.b64 [bars+{8 * which}], {nbytes};\n"
            "mov.b32 %word, 0;\n"
        )
    count = 1
    if name in ("arrive", "arrive.noComplete", "arrive_drop"):
        most = model.pending - (name == "arrive.noComplete")
        if name == "arrive_drop":
            most = min(most, model.expected - 1)
        count = choose.randrange(1, most + 1)
    if name.endswith("expect_tx"):
        model.transactions += nbytes
    if "drop" in name:
        model.expected -= count
    model.pending -= count
    operand = nbytes if name.endswith("expect_tx") else count
    return (
        f"mbarrier.{name}.shared::cta.b64 %state{which}, [bars+{8 * which}], {operand};\n"
        f"mov.b32 %has{which}, 1;\nmbarrier.pending_count.b64 %word, %state{which};\n"
        "shl.b32 %word, %word, 8;\n"
    )


def _ask(which: int, place: int) -> str:
    text = ""
    for parity in range(2):
        text += (
            f"mbarrier.test_wait.parity.shared::cta.b64 %done, [bars+{8 * which}], {parity};\n"
            f"selp.u32 %bit, {1 << parity}, 0, %done;\nor.b32 %word, %word, %bit;\n"
        )
    return (
        f"{text}setp.eq.u32 %done, %has{which}, 0;\n@%done bra PAST{place};\n"
        f"mbarrier.test_wait.shared::cta.b64 %done, [bars+{8 * which}], %state{which};\n"
        f"selp.u32 %bit, 4, 0, %done;\nor.b32 %word, %word, %bit;\nPAST{place}:\n"
        f"st.global.u32 [%out+{4 * place}], %word;\n"
    )


class _Arrivals(Phases):
    """Phases in which something asynchronous arrives at a barrier."""

    def phase(self) -> Piece:
        kinds = (self._copied, self._copied, self._combined)
        work = tuple(self.registers.instruction() for _ in range(self.w.random.randrange(3)))
        return Piece("", (*work, Piece(self.w.random.choice(kinds)(), fixed=True)), "bar.sync 0;\n")

    def _copied(self) -> str:
        """cp.async of every thread, one or two of them before its arrival."""
        choose = self.w.random
        size = choose.choice((4, 8, 16))
        counted = self.w.chance(0.5)
        init, address = self.barrier(self.threads)
        state, source, slot = (self.w.register(kind) for kind in ("b64", "b64", "b32"))
        text = (
            f"{init}bar.sync 0;\nmul.wide.u32 {source}, %thread, {size};\n"
            f"add.u64 {source}, {source}, %more_in;\n"
            f"mad.lo.u32 {slot}, %thread, {size}, %tile;\n"
        )
        for number in range(choose.randrange(1, 3)):
            text += (
                f"cp.async.ca.shared.global [{slot}+{number * size * self.threads}], "
                f"[{source}+{16 * choose.randrange(8)}], {size};\n"
            )
        if counted:
            text += f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{address}];\n"
        else:
            text += (
                f"cp.async.mbarrier.arrive.shared::cta.b64 [{address}];\n"
                f"mbarrier.arrive.shared::cta.b64 {state}, [{address}];\n"
            )
        read, near = self._slot(self.registers.pick("r"), size, 1, 0)
        return (
            f"{text}{self.wait(address, 0)}{read}"
            f"ld.shared.b32 {self.registers.pick('r')}, [{near}];\n"
        )

    def _combined(self) -> str:
        """A bulk reduction of one half of the tile into the other."""
        choose = self.w.random
        size, form = 16 * choose.randrange(1, 64), choose.choice(BULK_REDUCTIONS)
        target = 4096 + 16 * choose.randrange((4096 - size) // 16 + 1)
        init, address = self.barrier(1)
        first, state, here, there, read = (
            self.w.register(kind) for kind in ("pred", "b64", "b32", "b32", "b32")
        )
        text, slot = self._slot("%thread", 16, choose.randrange(1, 64, 2), 0)
        names = ", ".join(self.registers.pick("r") for _ in range(4))
        upper = self.registers.pick("r")
        return (
            f"{init}{text}st.shared.v4.b32 [{slot}], {{{names}}};\n"
            f"st.shared.v4.b32 [{slot}+4096], {{{upper}, {upper}, {upper}, {upper}}};\n"
            f"fence.proxy.async;\nbar.sync 0;\nsetp.eq.u32 {first}, %thread, 0;\n"
            f"@{first} mbarrier.arrive.expect_tx.shared::cta.b64 {state}, [{address}], "
            f"{size};\n"
            f"add.u32 {here}, %tile, {16 * choose.randrange((4096 - size) // 16 + 1)};\n"
            f"add.u32 {there}, %tile, {target};\n"
            f"@{first} cp.reduce.async.bulk.shared::cluster.shared::cta."
            f"mbarrier::complete_tx::bytes.{form} [{there}], [{here}], {size}, [{address}];\n"
            f"{self.wait(address, 0)}add.u32 {read}, %thread, {choose.randrange(size // 4)};\n"
            f"rem.u32 {read}, {read}, {size // 4};\nmad.lo.u32 {read}, {read}, 4, %tile;\n"
            f"ld.shared.b32 {self.registers.pick('r')}, [{read}+{target}];\n"
        )


def arrivals(seed: int) -> Program:
    """cp.async that arrives at an mbarrier, and bulk reductions in shared memory."""
    w = writer("arrivals", seed)
    registers = Registers(w, ("integer",))
    phases = _Arrivals(w, registers, _THREADS)
    pieces = [phases.phase() for _ in range(w.random.randrange(2, 5))]
    head = f"{phases.head()}.reg .b64 %more_in;\nld.param.u64 %more_in, [p1];\n"
    # Bulk reductions into shared::cluster need a launch of clusters, be they of one CTA.
    launch = Launch(1, _THREADS, directives=".reqnctapercluster 1, 1, 1\n")
    return finish(
        w, registers, "arrivals", seed, pieces, launch, extra_head=head,
        extra_inputs=(random_words(w.random, 512),), may_hang=True,
    )  # fmt: skip
