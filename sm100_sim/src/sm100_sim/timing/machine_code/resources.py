"""Resources that a SASS instruction occupies, and the latency of its result, by opcode.

Latencies that the control codes express (arithmetic) need none here: the stall counts of the
compiled code are obeyed. Here are the pipe an instruction is dispatched to, for how many clocks it
keeps that pipe from other warps of its issue slot, and the latency behind a scoreboard.

The assignment to pipes was read off the stall counts that ptxas puts between neighbours: two
instructions of one pipe are at least two clocks apart (FFMA2 and IMAD; FMNMX3, SEL, ISETP, LOP3 and
F2FP among each other), two of different pipes one (FFMA2 and F2FP), MUFU eight.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from .events import sass_kind
from .sass import SassFunction, SassInstruction


class Pipe(IntEnum):
    """Execution pipes of one issue slot; NONE is never busy."""

    NONE = 0
    FMA = 1
    ALU = 2
    MUFU = 3
    UNIFORM = 4
    MEMORY = 5


class Latency(IntEnum):
    """Constant that gives the time until a scoreboard is released (`machine_constants`)."""

    FIXED = 0
    MUFU = 1
    CONSTANT_LOAD = 2
    SPECIAL = 3
    SHARED = 4
    GLOBAL_LOAD = 5
    TMEM_LOAD = 6
    TMEM_STORE = 7
    BARRIER_TEST = 8
    FENCE_CTA = 9
    FENCE_GPU = 10
    ASYNC_FENCE = 11
    ALLOCATION = 12
    OPERAND_READ = 13
    SHUFFLE = 14
    DOUBLE = 15


class Action(IntEnum):
    """Action of the replay when an instruction issues, beside occupying a pipe."""

    NONE = 0
    INIT = 1
    WAIT = 2
    ARRIVE = 3
    CLUSTER_ARRIVE = 4
    CLUSTER_WAIT = 5
    BAR_SYNC = 6
    BAR_ARRIVE = 7
    TMEM_LOAD = 8
    TMEM_STORE = 9
    TMEM_STORE_WAIT = 10
    MMA = 11
    COMMIT = 12
    TMA_LOAD = 13
    TMA_STORE = 14
    BULK_COMMIT = 15
    BULK_WAIT = 16
    SHARED = 17
    TRY_CANCEL = 18
    COPY = 19
    COPY_ARRIVE = 20
    FENCE = 21
    GLOBAL_LOAD = 22
    GLOBAL_STORE = 23
    FENCE_CTA = 24
    PRODUCT = 25
    PRODUCT_WAIT = 26
    STORE_ASYNC = 27


ACTIONS = {
    "init": Action.INIT,
    "wait": Action.WAIT,
    "arrive": Action.ARRIVE,
    "cluster_arrive": Action.CLUSTER_ARRIVE,
    "cluster_wait": Action.CLUSTER_WAIT,
    "bar_sync": Action.BAR_SYNC,
    "bar_reduce": Action.BAR_SYNC,
    "bar_arrive": Action.BAR_ARRIVE,
    "tmem_load": Action.TMEM_LOAD,
    "tmem_store": Action.TMEM_STORE,
    "tmem_store_wait": Action.TMEM_STORE_WAIT,
    "mma": Action.MMA,
    "commit": Action.COMMIT,
    "tma_load": Action.TMA_LOAD,
    "bulk_load": Action.TMA_LOAD,
    "tma_store": Action.TMA_STORE,
    "tma_reduce": Action.TMA_STORE,
    "bulk_store": Action.TMA_STORE,
    "bulk_reduce": Action.TMA_STORE,
    "bulk_commit": Action.BULK_COMMIT,
    "bulk_wait": Action.BULK_WAIT,
    "clc_try_cancel": Action.TRY_CANCEL,
    "copy": Action.COPY,
    "copy_arrive": Action.COPY_ARRIVE,
    "store_async": Action.STORE_ASYNC,
}

#: (opcode as a regular expression, pipe, clocks it is occupied, latency); the first that matches.
#: MUFU's occupancy is a constant of the machine and stands there as -1.
_TABLE = (
    (r"(MUFU|F2I|I2F|FCHK|POPC|FLO|BREV|F2F)\b", Pipe.MUFU, -1, Latency.MUFU),
    (r"FFMA2|FMUL2|FADD2|HFMA2|HADD2|HMUL2", Pipe.FMA, 2, Latency.FIXED),
    (r"FFMA|FMUL|FADD|FSWZADD", Pipe.FMA, 1, Latency.FIXED),
    (r"IMAD|VIADD\b|IDP", Pipe.FMA, 2, Latency.FIXED),
    (r"D(ADD|MUL|FMA|SETP)", Pipe.FMA, 16, Latency.DOUBLE),
    (r"LDTM", Pipe.MEMORY, 1, Latency.TMEM_LOAD),
    (r"STTM", Pipe.MEMORY, 1, Latency.TMEM_STORE),
    (r"SYNCS|ARRIVES", Pipe.MEMORY, 2, Latency.BARRIER_TEST),
    (r"(LDS|STS|LDSM|STSM|ATOMS|STAS|LDL|STL)", Pipe.MEMORY, 2, Latency.SHARED),
    (r"(SHFL|REDUX|MATCH|CREDUX)", Pipe.MEMORY, 2, Latency.SHUFFLE),
    (r"(LDG|LD|ATOMG|ATOM|REDG|RED|STG|ST|LDGSTS)\b", Pipe.MEMORY, 2, Latency.GLOBAL_LOAD),
    (r"(LDC|LDCU)\b", Pipe.UNIFORM, 1, Latency.CONSTANT_LOAD),
    (r"(S2R|S2UR|CS2R|CS2UR)\b", Pipe.NONE, 1, Latency.SPECIAL),
    (r"MEMBAR\.\w+\.CTA", Pipe.MEMORY, 1, Latency.FENCE_CTA),
    (r"(MEMBAR|ERRBAR|CGAERRBAR|CCTL)", Pipe.MEMORY, 1, Latency.FENCE_GPU),
    (r"FENCE", Pipe.MEMORY, 1, Latency.ASYNC_FENCE),
    (r"(UTCATOMSWS|USETMAXREG)", Pipe.UNIFORM, 1, Latency.ALLOCATION),
    (r"(UTC|UTMA|UBLK|UCGABAR|UGETNEXT|UVIRT)", Pipe.UNIFORM, 2, Latency.OPERAND_READ),
    (r"UMOV", Pipe.UNIFORM, 1, Latency.FIXED),
    (r"U[A-Z]", Pipe.UNIFORM, 2, Latency.FIXED),
    (r"(BRA|BRX|BSSY|BSYNC|EXIT|CALL|RET|NOP|WARPSYNC|ELECT|VOTE|BAR|DEPBAR|NANOSLEEP|YIELD|PREEXIT"
     r"|ACQBULK|BPT|JMP|BREAK)", Pipe.NONE, 1, Latency.SPECIAL),
    (r"", Pipe.ALU, 2, Latency.FIXED),
)  # fmt: skip
_PATTERNS = [
    (re.compile(pattern), pipe, interval, latency) for pattern, pipe, interval, latency in _TABLE
]
_NO_SCOREBOARD = -1
_FENCES = {"CTA": Action.FENCE_CTA, "GPU": Action.FENCE, "SYS": Action.FENCE}
_GLOBAL = {"LDG": Action.GLOBAL_LOAD, "LD": Action.GLOBAL_LOAD, "STG": Action.GLOBAL_STORE,
           "ST": Action.GLOBAL_STORE}  # fmt: skip
_LANES = 32


class Instructions(NamedTuple):
    """The instructions of a kernel as int32 arrays, one element each.

    pipe, interval: `Pipe`, clocks it is occupied (-1: MUFU's). latency: `Latency`. stall, sets,
    frees, waits: the control code, -1 for no scoreboard. action: `Action`. wavefronts: clocks of
    the shared-memory port that a warp's access takes without bank conflicts. nbytes: what a whole
    warp's access to global memory moves.
    """

    pipe: np.ndarray
    interval: np.ndarray
    latency: np.ndarray
    stall: np.ndarray
    yields: np.ndarray
    sets: np.ndarray
    frees: np.ndarray
    waits: np.ndarray
    action: np.ndarray
    wavefronts: np.ndarray
    nbytes: np.ndarray


def describe(instruction: SassInstruction) -> tuple[Pipe, int, Latency]:
    """Return (pipe, clocks it is occupied, latency class) of an instruction."""
    for pattern, pipe, interval, latency in _PATTERNS:
        if pattern.match(instruction.opcode):
            return pipe, interval, latency
    raise AssertionError("the last row of the table matches everything")


def _wavefronts(instruction: SassInstruction) -> int:
    if not re.match(r"(LDS|STS|ATOMS|STAS)", instruction.opcode):
        if re.match(r"(LDSM|STSM)", instruction.opcode):
            return int(instruction.opcode.rsplit(".", 1)[-1] or 1)
        return 0
    return _words(instruction)


def _words(instruction: SassInstruction) -> int:
    """32-bit words that a lane's access moves."""
    widths = {".256": 8, ".128": 4, ".64": 2}
    return next((words for suffix, words in widths.items() if suffix in instruction.opcode), 1)


def _action(instruction: SassInstruction, kind: str | None) -> Action:
    if kind is not None:
        return ACTIONS.get(kind.split(".")[0], Action.NONE)
    if instruction.base == "MEMBAR":
        scope = instruction.opcode.rsplit(".", 1)[-1]
        if scope not in _FENCES:
            raise ValueError(
                f"{instruction.text}: the model knows fences of {', '.join(_FENCES)} scope"
            )
        return _FENCES[scope]
    if instruction.base in _GLOBAL:
        return _GLOBAL[instruction.base]
    return Action.SHARED if _wavefronts(instruction) else Action.NONE


def _global_bytes(instruction: SassInstruction) -> int:
    """Return the bytes of all lanes, each at its own address."""
    if instruction.base not in _GLOBAL:
        return 0
    return _LANES * 4 * _words(instruction)


def instruction_arrays(function: SassFunction) -> Instructions:
    """The instructions of a function for the replay."""
    rows = []
    for instruction in function.instructions:
        pipe, interval, latency = describe(instruction)
        control = instruction.control
        action = _action(instruction, sass_kind(instruction))
        sets, frees = (_NO_SCOREBOARD if s is None else s for s in (control.sets, control.frees))
        rows.append(
            (pipe, interval, latency, control.stall, control.yields, sets, frees, control.waits,
             action, _wavefronts(instruction), _global_bytes(instruction))
        )  # fmt: skip
    return Instructions(*np.array(rows, np.int32).T.copy())
