"""Families of straight-line programs: arithmetic of every type, and predication."""

from __future__ import annotations

import numpy as np

from .arithmetic import FORMS, Registers
from .program import WORDS, Launch, Piece, Program, Writer, random_words, writer

_THREADS = 64
_CHOICES = (
    ("integer",), ("integer", "wide"), ("integer", "short"), ("float", "integer"),
    ("double", "wide"), ("half", "float"), tuple(FORMS),
)  # fmt: skip


def finish(
    w: Writer,
    registers: Registers,
    family: str,
    seed: int,
    pieces: list[Piece],
    launch: Launch,
    **more,
) -> Program:
    """The program whose threads load `registers`, run `pieces` and store the registers. more:
    further fields of `Program`; `extra_head` goes before the pieces."""
    threads = launch.grid * launch.block
    extra = more.pop("extra_head", "")
    extra_outputs = more.pop("extra_outputs", ())
    extra_inputs = more.pop("extra_inputs", ())
    tail = registers.tail(threads)
    inputs = random_words(w.random, WORDS * threads).reshape(threads, WORDS)
    outputs = np.full((registers.words, threads), 0xDDDDDDDD, np.uint32)
    head = registers.head(f"p{1 + len(extra_inputs)}") + extra
    return Program(
        family, seed, head, tuple(pieces), tail, launch, (inputs, *extra_inputs),
        (outputs, *extra_outputs), **more,
    )  # fmt: skip


def arithmetic(seed: int) -> Program:
    """Straight-line instructions, some of them predicated."""
    w = writer("arithmetic", seed)
    registers = Registers(w, _CHOICES[seed % len(_CHOICES)])
    pieces = [registers.instruction() for _ in range(w.random.randrange(15, 50))]
    return finish(w, registers, "arithmetic", seed, pieces, Launch(1, _THREADS))
