"""Outcome of running a program, and the files that carry outcomes from machine to machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sm100_sim.tools.golden.cases import Case

from .families import program, split

#: Outcomes: outputs, no end, a refusal (an error of the driver or of the simulator), and, of a
#: program whose end depends on the schedule, nothing to compare.
ENDED, HANG, REFUSED, VARIES = "ended", "hang", "refused", "varies"


@dataclass(frozen=True)
class Variant:
    """A program without some of its pieces."""

    name: str
    dropped: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        return self.name + "".join(f"-{number}" for number in self.dropped)

    def case(self) -> Case:
        return program(self.name).case(frozenset(self.dropped))

    @property
    def may_hang(self) -> bool:
        """Return True if the program may never end."""
        return program(self.name).may_hang


def variant(key: str) -> Variant:
    """The variant of a key. Raises ValueError for text that is none."""
    name, *dropped = key.split("-")
    split(name)
    if not all(number.isdecimal() for number in dropped):
        raise ValueError(f"{key!r}: behind the program's name stand numbers of pieces to leave out")
    return Variant(name, tuple(map(int, dropped)))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: `state`, a digest of the program and one of its outputs, the error's text,
    and, on a GPU, the registers per thread of the launch."""

    state: str
    program: str
    output: str = ""
    text: str = ""
    registers: int = 0

    def agrees(self, other: Outcome) -> bool:
        """Return True if two machines say the same of one program. Raises ValueError if they ran
        different programs."""
        if self.program != other.program:
            raise ValueError(
                "the two outcomes are of different programs; both sides must run the "
                "same version of lab.fuzz"
            )
        if VARIES in (self.state, other.state):
            return True
        return self.state == other.state and self.output == other.output


def digest(outputs: Iterable[np.ndarray]) -> str:
    """16 hexadecimal digits of a program's outputs."""
    state = hashlib.sha256()
    for array in outputs:
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]


def save(path: Path, outcomes: dict[str, Outcome], about: dict | None = None) -> None:
    """Write outcomes by key as JSON; about: the device and the like."""
    rows = {
        key: {name: value for name, value in asdict(outcome).items() if value}
        for key, outcome in outcomes.items()
    }
    path.write_text(json.dumps({"about": about or {}, "outcomes": rows}, indent=0) + "\n")


def load(path: Path) -> tuple[dict[str, Outcome], dict]:
    """Outcomes by key, and what `save` was told about them."""
    found = json.loads(path.read_text())
    return {key: Outcome(**row) for key, row in found["outcomes"].items()}, found["about"]
