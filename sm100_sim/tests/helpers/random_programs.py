"""Random PTX programs and what an H200 made of each."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from project import PROJECT

from sm100_sim.errors import Hang, SimulationError
from sm100_sim.launcher import forget_kernels
from sm100_sim.state.tensormap import TensorMap
from sm100_sim.tools.golden.cases import Case
from sm100_sim.tools.golden.replay import replay

FILE = PROJECT / "tests" / "data" / "random_programs"
#: Ends of a program: with outputs, never, refused by the simulator, and, where the end of one that
#: may hang depends on the schedule, any.
ENDED, HANG, REFUSED, VARIES = "ended", "hang", "refused", "varies"
#: Schedules of a program that may hang, and of any other one.
_HANG_SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"seed": 1}, {"seed": 2}, {"seed": 3})
_SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"schedule": "lazy"})


@dataclass(frozen=True)
class Program:
    """A program. state, output: how it ended on an H200, and a digest of its outputs; registers:
    that each of its threads was launched with there."""

    case: Case
    may_hang: bool
    state: str
    output: str
    registers: int

    @property
    def family(self) -> str:
        return self.case.name.split("/")[0]


@functools.cache
def programs() -> dict[str, Program]:
    """Return the programs by name. Raises ValueError for one that is not the program that ran."""
    rows = json.loads(FILE.with_suffix(".json").read_text())["programs"]
    with np.load(FILE.with_suffix(".npz")) as arrays:
        found = {key: _program(key, row, arrays, i) for i, (key, row) in enumerate(rows.items())}
    for key, program in found.items():
        if program.case.digest() != rows[key]["program"]:
            raise ValueError(f"{key} is not the program that an H200 ran")
    return found


def _program(key: str, row: dict[str, Any], arrays: Any, number: int) -> Program:
    inputs, outputs = (
        tuple(arrays[f"{number}.{which}{i}"] for i in range(count))
        for which, count in zip(("in", "out"), row["counts"], strict=True)
    )
    maps = tuple(
        (buffer, TensorMap(**{k: tuple(v) if type(v) is list else v for k, v in fields.items()}))
        for buffer, fields in row["maps"]
    )
    ptx, (grid, block, cluster) = arrays[f"{number}.ptx"].tobytes().decode(), row["launch"]
    case = Case(key, "random", ptx, inputs, outputs, maps, grid, block, cluster)
    return Program(
        case, row["may_hang"], row["state"], row.get("output", ""), row.get("registers", 0)
    )


def digest(outputs: Iterable[np.ndarray]) -> str:
    """16 hexadecimal digits of outputs."""
    state = hashlib.sha256()
    for array in outputs:
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]


def simulated(program: Program) -> tuple[str, str]:
    """Return (state, digest of the outputs) of a program in the simulator, the same under several
    schedules. One whose end must not depend on them is REFUSED where it does."""
    schedules = _HANG_SCHEDULES if program.may_hang else _SCHEDULES
    found = {_once(program.case, options) for options in schedules}
    forget_kernels()
    if len(found) == 1:
        return found.pop()
    return (VARIES if program.may_hang else REFUSED), ""


def _once(case: Case, options: dict[str, Any]) -> tuple[str, str]:
    try:
        return ENDED, digest(replay(case, **options))
    except Hang:
        return HANG, ""
    except SimulationError as error:
        return REFUSED, f"{type(error).__name__}: {error}"


def agrees(program: Program, found: tuple[str, str]) -> bool:
    """Return True if the simulator says of a program what an H200 said."""
    if VARIES in (program.state, found[0]):
        return True
    return found[0] == program.state and (found[0] != ENDED or found[1] == program.output)
