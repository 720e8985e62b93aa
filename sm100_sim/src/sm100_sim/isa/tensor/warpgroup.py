"""State of a warpgroup: its wgmma instructions in flight, and their MMAs.

The four warps of a warpgroup issue each instruction on their own; it exists when all four have
issued it. Instructions between two commits are one operation of the machine, which takes effect in
the order of the commits. Consecutive instructions on one accumulator are one float32 matrix product
over the concatenated K; what is joined follows from program order alone.

PTX ISA 9.3, "Asynchronous Warpgroup Level Matrix Instructions": register fragments. With g = t / 4
and c = t % 4 of thread t in warp w of the warpgroup, and p elements of A to a register,

  A (64 x K)  register i, element e: row 16w + g + 8(i % 2), column cp + e + 4p(i / 2)
  D (64 x N)  register 4j + 2h + e (f32, s32), or half e of register 2j + h (f16):
              row 16w + g + 8h, column 8j + 2c + e
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sm100_sim.errors import SimulationError
from sm100_sim.native.layout import ProductQueue
from sm100_sim.state.events import Waiting

from ..columns import Effect
from ..shared import submit
from . import tensor_core
from .descriptors import K_BYTES, decode_warpgroup_matrix, gather_plan

#: Warps of a warpgroup, and rows of A and D that each has.
WARPS, ROWS_OF_A_WARP = 4, 16
ROWS = WARPS * ROWS_OF_A_WARP
_WIDTH = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@dataclass(frozen=True)
class Form:
    """The static part of a wgmma.mma_async: shape, types, signs and layouts of its operands.

    negate_a, negate_b: imm-scale of -1. a_mn_major, b_mn_major: imm-trans of 1.
    """

    n: int
    d_type: str
    a_type: str
    b_type: str
    a_in_registers: bool
    negate_a: bool = False
    negate_b: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False
    saturate: bool = False

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element of A and B."""
        return _WIDTH[self.a_type]

    @property
    def k(self) -> int:
        return K_BYTES // self.element_bytes

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K); M is 64."""
        return self.n, self.k

    @property
    def accumulator_registers(self) -> int:
        """Registers of D in each thread."""
        return self.n // (4 if self.d_type == "f16" else 2)


@dataclass(frozen=True, eq=False)
class Site:
    """A wgmma.mma_async of a kernel, bound to registers.

    accumulator: the registers of D. read_a: accessor of A's registers in a warp, None if A
    is in shared memory; read_d, write_d: of D's.
    """

    instruction: Any
    form: Form
    accumulator: tuple[Any, ...]
    read_a: Callable[[Any], np.ndarray] | None
    read_d: Callable[[Any], np.ndarray]
    write_d: Callable[[Any, int, np.ndarray], None]


class Product(NamedTuple):
    """A wgmma.mma_async with its descriptors read; accumulate: scale-d.

    a: 0 if A is in registers.
    """

    site: Site
    a: int
    b: int
    accumulate: bool

    def continues(self, before: Product) -> bool:
        """Return True if this instruction extends the accumulator chain that `before` belongs
        to."""
        mine, other = self.site, before.site
        return self.accumulate and mine.form == other.form and mine.accumulator == other.accumulator


class Warpgroup:
    """The wgmma instructions of one warpgroup.

    committed: groups that each warp has committed; completed: groups that have taken effect.
    latest: the instruction that each warp has issued last.
    """

    def __init__(self, cta: Any, index: int) -> None:
        self.cta = cta
        self.index = index
        self.warps = cta.warps[WARPS * index : WARPS * (index + 1)]
        self.committed = [0] * WARPS
        self.completed = 0
        self.latest: list[Product | None] = [None] * WARPS
        self._issued: list[deque[Product | None]] = [deque() for _ in range(WARPS)]
        self._exited = [warp for warp in self.warps if not warp.live]

    def issue(self, warp: Any, product: Product) -> None:
        """A warp executes wgmma.mma_async."""
        self._take(warp)
        self.latest[warp.index % WARPS] = product
        self._issue(warp, product)

    def commit(self, warp: Any, instruction: Any) -> None:
        """A warp executes wgmma.commit_group; `instruction` is that."""
        self._take(warp)
        self.committed[warp.index % WARPS] += 1
        self._issue(warp, None)
        self._submit_complete_groups(warp, instruction)

    def _take(self, warp: Any) -> None:
        """Take over what native code has issued for a warp."""
        if not warp.context.products:
            return
        queue = ProductQueue.from_address(warp.context.products)
        compiled = warp.compiled
        for i in range(queue.count):
            instruction = compiled.block_instruction[queue.block[i]]
            site = compiled.executors[instruction.index].site
            self._issue(warp, Product(site, queue.a[i], queue.b[i], queue.accumulate[i] != 0))
        queue.count = 0

    def _issue(self, warp: Any, item: Product | None) -> None:
        mine = self._issued[warp.index % WARPS]
        mine.append(item)
        for other in self._exited:
            if len(self._issued[other.index % WARPS]) < len(mine):
                raise SimulationError(self._incomplete(other.index))

    def warp_exits(self, warp: Any) -> None:
        """A warp of the CTA has exited. Raises SimulationError if it is one of this warpgroup and
        others of that have executed what it has not."""
        if warp in self.warps:
            self._exited.append(warp)
            for one in self.warps:
                self._take(one)
            mine = len(self._issued[warp.index % WARPS])
            if any(len(issued) > mine for issued in self._issued):
                raise SimulationError(self._incomplete(warp.index))

    def _incomplete(self, absent: int) -> str:
        return (
            f"warp {absent} has exited and others of warpgroup {self.index} execute wgmma "
            "instructions: all four warps do, together (the hardware ends the kernel with an "
            "illegal instruction)"
        )

    def _submit_complete_groups(self, warp: Any, instruction: Any) -> None:
        """Submit the groups that all four warps have committed."""
        while all(None in issued for issued in self._issued):
            group: list[Product] = []
            while (product := self._next(warp)) is not None:
                group.append(product)
            self._submit(warp, instruction, group)

    def _next(self, warp: Any) -> Product | None:
        """Return the instruction that the four warps have issued next; None for a commit."""
        items = [issued.popleft() for issued in self._issued]
        first = items[0]
        for number, item in enumerate(items):
            if item == first:
                continue
            raise SimulationError(
                f"the warps of warpgroup {self.index} disagree: warp {self.warps[0].index} issues "
                f"{_described(first)}, warp {self.warps[number].index} {_described(item)}; all "
                "warps of a warpgroup execute the same wgmma instructions with the same "
                "descriptors and scale-d"
            )
        return first

    def _submit(self, warp: Any, instruction: Any, group: list[Product]) -> None:
        def perform() -> None:
            with np.errstate(invalid="ignore", over="ignore"):
                for run in joined_runs(group):
                    self._multiply(run)

        def complete() -> None:
            self.completed += 1
            self.cta.cluster.machine.wake(self)

        about = group[0].site.instruction if group else instruction
        queue = "wgmma", self.cta.cluster.id, self.cta.rank, self.index
        submit(warp, about, Effect.WARPGROUP_MMA, perform, queue, complete)

    def wait(self, warp: Any, pending: int) -> Waiting | None:
        """wgmma.wait_group of a warp: what it waits for, None if at most `pending` of the groups
        that it has committed are still at work."""
        number = self.committed[warp.index % WARPS] - pending
        if self.completed >= number:
            return None
        return Waiting(f"wgmma group {number} of warpgroup {self.index}", self)

    def describe(self) -> str:
        """Describe how far each warp is."""
        counts = ", ".join(
            f"warp {warp.index}: {count}"
            for warp, count in zip(self.warps, self.committed, strict=True)
        )
        return f"{self.completed} groups are complete; committed by {counts}"

    # ------------------------------------------------------------ products

    def _multiply(self, run: list[Product]) -> None:
        """Perform an accumulator chain."""
        head = run[0]
        form, site = head.site.form, head.site
        a, b = self._operand_a(run), self._operand_b(run)
        if form.a_type in ("s8", "u8"):  # exact in float64
            product = a.astype(np.float64) @ b.astype(np.float64).T
        else:
            product = a @ b.T
        if form.negate_a != form.negate_b:
            product = -product
        if head.accumulate:
            words = np.stack([site.read_d(warp) for warp in self.warps])
            product = product + matrix_of(words, form)
        for warp, words in zip(self.warps, words_of(product, form), strict=True):
            site.write_d(warp, 0xFFFFFFFF, words)

    def _operand_a(self, run: list[Product]) -> np.ndarray:
        """A of a chain, float32 (64, K)."""
        form = run[0].site.form
        if not form.a_in_registers:
            raws = tuple(product.a for product in run)
            return self._from_shared(raws, form.a_mn_major, ROWS, form, "A")
        width = form.element_bytes
        reads = [product.site.read_a for product in run]
        words = np.stack([[read(warp) for warp in self.warps] for read in reads if read])
        # Chain, warp, upper half of K, lower half of the rows, g, c and the elements of a register.
        raw = words.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width])
        raw = raw.reshape(len(run), WARPS, 2, 2, 8, 4, 4 // width)
        raw = np.ascontiguousarray(raw.transpose(1, 3, 4, 0, 2, 5, 6)).reshape(ROWS, -1)
        return tensor_core.values_of(raw, form.a_type)

    def _operand_b(self, run: list[Product]) -> np.ndarray:
        """B of a chain, float32 (N, K)."""
        form = run[0].site.form
        raws = tuple(product.b for product in run)
        return self._from_shared(raws, form.b_mn_major, form.n, form, "B")

    def _from_shared(
        self, raws: tuple[int, ...], mn_major: bool, extent: int, form: Form, which: str
    ) -> np.ndarray:
        plan = gather_plan(raws, mn_major, extent, form.element_bytes, decode_warpgroup_matrix)
        name = form.a_type if which == "A" else form.b_type
        raw = tensor_core.gathered(self.cta, plan, form.element_bytes, which, "wgmma.mma_async")
        values = tensor_core.values_of(raw, name)
        return values.T if mn_major else values


def _described(item: Product | None) -> str:
    if item is None:
        return "a commit"
    return (
        f"`{item.site.instruction.text}` (PTX line {item.site.instruction.line}, A "
        f"{item.a:#x}, B {item.b:#x}, scale-d {int(item.accumulate)})"
    )


def joined_runs(products: list[Product]) -> list[list[Product]]:
    """Split instructions in program order into accumulator chains that are computed at once."""
    runs: list[list[Product]] = []
    for product in products:
        if runs and product.continues(runs[-1][-1]):
            runs[-1].append(product)
        else:
            runs.append([product])
    return runs


def matrix_of(words: np.ndarray, form: Form) -> np.ndarray:
    """D (64, N), float32 or int32; words: its registers, uint32 (4, registers, 32)."""
    if form.d_type == "f16":
        halves = words.view(np.float16).reshape(WARPS, form.n // 8, 2, 8, 4, 2)
        return halves.transpose(0, 2, 3, 1, 4, 5).reshape(ROWS, form.n).astype(np.float32)
    values = words.view(np.int32 if form.d_type == "s32" else np.float32)
    values = values.reshape(WARPS, form.n // 8, 2, 2, 8, 4)
    return values.transpose(0, 2, 4, 1, 5, 3).reshape(ROWS, form.n)


def words_of(matrix: np.ndarray, form: Form) -> np.ndarray:
    """The registers of D, uint32 (4, registers, 32); the inverse of `matrix_of`."""
    parts = matrix.reshape(WARPS, 2, 8, form.n // 8, 4, 2)
    if form.d_type == "f16":
        halves = parts.transpose(0, 3, 1, 2, 4, 5).astype(np.float16)
        return np.ascontiguousarray(halves).view(np.uint32).reshape(WARPS, -1, 32)
    if form.d_type == "s32":
        total = np.clip(parts, -(1 << 31), (1 << 31) - 1) if form.saturate else parts
        words = total.astype(np.int64).astype(np.uint64).astype(np.uint32)
    else:
        words = np.ascontiguousarray(parts, np.float32).view(np.uint32)
    return np.ascontiguousarray(words.transpose(0, 3, 1, 5, 2, 4)).reshape(WARPS, -1, 32)


def warpgroup_of(warp: Any) -> Warpgroup:
    """The warpgroup that a warp belongs to. Raises SimulationError if the CTA has no four warps for
    it."""
    cta, index = warp.cta, warp.index // WARPS
    found = cta.warpgroups.get(index)
    if found is None:
        if WARPS * (index + 1) > len(cta.warps):
            raise SimulationError(
                f"warp {warp.index} executes a wgmma instruction; its warpgroup are warps "
                f"{WARPS * index} to {WARPS * index + WARPS - 1}, and the CTA has "
                f"{len(cta.warps)} warps"
            )
        found = cta.warpgroups[index] = Warpgroup(cta, index)
    return found
