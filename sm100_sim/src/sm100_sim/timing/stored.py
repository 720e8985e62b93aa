"""Traced programs as bytes: what a replay needs of a kernel, without its code.

Simulating a kernel and matching its trace takes seconds, a replay of the result a hundredth of one;
who keeps the program can replay it under any number of constant sets.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from .machine_code.resources import Instructions
from .program import Compiled, Program

_COUNTS = ("barriers", "sms", "unmatched", "ambiguous")


@dataclass(frozen=True)
class StoredProgram:
    """Arguments of `replay_program`, and figures of the match.

    warps: (CTA rank, warp) of each row. work: clocks of the tensor core of one CTA by the closed
    forms. unmatched, ambiguous: as in `Compiled`.
    """

    instructions: Instructions
    program: Program
    warps: list[tuple[int, int]]
    work: float
    unmatched: int
    ambiguous: int

    @classmethod
    def of(cls, compiled: Compiled) -> StoredProgram:
        """Return the stored form of a traced program."""
        return cls(
            compiled.instructions, compiled.program, list(compiled.warps), compiled.work,
            compiled.unmatched, compiled.ambiguous,
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, content: bytes) -> StoredProgram:
        """The program that `as_bytes` was called of."""
        with np.load(io.BytesIO(content), allow_pickle=False) as held:
            counts = dict(zip(_COUNTS, held["counts"].tolist(), strict=True))
            program = Program(**{
                name: counts[name] if name in counts else held[f"program.{name}"]
                for name in Program._fields
            })  # fmt: skip
            code = Instructions(*(held[f"code.{name}"] for name in Instructions._fields))
            warps = [(int(rank), int(warp)) for rank, warp in held["warps"]]
            work = float(held["work"])
        return cls(code, program, warps, work, counts["unmatched"], counts["ambiguous"])

    def as_bytes(self) -> bytes:
        """Compressed arrays (numpy's .npz)."""
        counts = [*(getattr(self.program, name) for name in _COUNTS[:2]), self.unmatched,
                  self.ambiguous]  # fmt: skip
        arrays = {
            f"program.{name}": value
            for name, value in self.program._asdict().items()
            if name not in _COUNTS
        }
        arrays |= {f"code.{name}": value for name, value in self.instructions._asdict().items()}
        into = io.BytesIO()
        np.savez_compressed(
            into, warps=np.array(self.warps, np.int64), work=np.float64(self.work),
            counts=np.array(counts, np.int64), **arrays,
        )  # fmt: skip
        return into.getvalue()

    def text_of(self, number: int) -> str:
        """An instruction in a message: its number, since its code is not kept."""
        return f"instruction {number}"
