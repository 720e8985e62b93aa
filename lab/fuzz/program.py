"""A random program: pieces that can be left out one by one, and the frame around them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sm100_sim.state.tensormap import TensorMap
from sm100_sim.tools.golden.cases import HEADER, Case
from sm100_sim.tools.golden.inputs import SPECIAL_F32, SPECIAL_INTEGERS
from sm100_sim.tools.golden.ptx_text import declare

#: Words of input that every thread reads into its registers.
WORDS = 8
#: Operations of redux, red.async and atomics on 32 bits whose result no order changes.
REDUCTIONS = (
    *("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32"),
    *("and.b32", "or.b32", "xor.b32"),
)


@dataclass(frozen=True)
class Piece:
    """Text that stands or goes as a whole: `before`, the pieces `inside`, `after`. A program stays
    legal whichever pieces are left out, unless they are `fixed`."""

    before: str
    inside: tuple[Piece, ...] = ()
    after: str = ""
    fixed: bool = False


@dataclass(frozen=True)
class Launch:
    """Grid, block and cluster (x extents), and directives behind the parameter list."""

    grid: int = 1
    block: int = 64
    cluster: int = 1
    directives: str = ""


@dataclass(frozen=True)
class Program:
    """One program of a family, made from a seed. head, tail: what every variant has. inputs,
    outputs, tensor_maps: as in `golden.Case`. may_hang: the hardware may never end it, so it runs
    where that costs nobody else anything."""

    family: str
    seed: int
    head: str
    pieces: tuple[Piece, ...]
    tail: str
    launch: Launch
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    tensor_maps: tuple[tuple[int, TensorMap], ...] = ()
    may_hang: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}/{self.seed}"

    def numbered(self) -> list[Piece]:
        """All pieces, outer ones before those inside them; `dropped` holds indices of these."""
        return list(_walk(self.pieces))

    def case(self, dropped: frozenset[int] = frozenset()) -> Case:
        """The golden case of the program without the dropped pieces."""
        count = iter(range(len(self.numbered())))
        body = "".join(_text(piece, dropped, count, True) for piece in self.pieces)
        parameters = declare(len(self.inputs), len(self.outputs), len(self.tensor_maps))
        ptx = f"{HEADER}{parameters}\n{self.launch.directives}{{\n{self.head}{body}{self.tail}}}\n"
        return Case(
            self.name, "fuzz", ptx, self.inputs, self.outputs, self.tensor_maps, self.launch.grid,
            self.launch.block, self.launch.cluster,
        )  # fmt: skip


def _walk(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        yield from _walk(piece.inside)


def _text(piece: Piece, dropped: frozenset[int], count: Iterator[int], wanted: bool) -> str:
    """Text of a piece; every piece takes its number whether it is wanted or not."""
    wanted = next(count) not in dropped and wanted
    inside = [_text(one, dropped, count, wanted) for one in piece.inside]
    return f"{piece.before}{''.join(inside)}{piece.after}" if wanted else ""


@dataclass
class Writer:
    """Source of choices, fresh labels and fresh registers of one program."""

    random: random.Random
    labels: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def register(self, kind: str) -> str:
        """A register no other piece uses; kind: b16, b32, b64 or pred."""
        number = self.kinds.get(kind, 0)
        self.kinds[kind] = number + 1
        return f"%{kind}_{number}"

    def declarations(self) -> str:
        """Declarations of all registers made so far."""
        return "".join(
            f".reg .{kind} %{kind}_<{count}>;\n" for kind, count in sorted(self.kinds.items())
        )

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability


def writer(family: str, seed: int) -> Writer:
    """The writer of a program; the same on every machine and Python."""
    return Writer(random.Random(f"{family}:{seed}"))


def random_words(source: random.Random, count: int) -> np.ndarray:
    """uint32 (count,): a third any bits, the rest small, special integers and float patterns."""
    words = np.frombuffer(source.randbytes(4 * count), np.uint32).copy()
    choice = np.frombuffer(source.randbytes(count), np.uint8)
    pick = np.frombuffer(source.randbytes(4 * count), np.uint32)
    special = SPECIAL_INTEGERS.astype(np.uint32)
    moderate = (words & np.uint32(0x807FFFFF)) | (np.uint32(115) + pick % 24) << np.uint32(23)
    kinds = [
        words % np.uint32(80),
        special[pick % len(special)],
        SPECIAL_F32[pick % len(SPECIAL_F32)],
        moderate,
    ]
    for number, values in enumerate(kinds):
        words = np.where(choice % 6 == number, values, words)
    return words.astype(np.uint32)
