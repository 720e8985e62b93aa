"""The steps of the decode kernel as data: S^T = K Q^T and O^T += V^T P^T for 128 keys at a time.

K and V come in halves of 128 columns, a buffer each: the halves of K are added up in S, those of V
give the two halves of O, each 128 of the head's columns.  In e4m3 a buffer holds a whole tile of K
or V, and Q is written by a role of the kernel (`e4m3`).
"""

from __future__ import annotations

from ...proof.steps import (
    Act,
    Load,
    Operand,
    Product,
    Ring,
    Role,
    StepTable,
    When,
    again,
    arrive,
    change,
    each,
    fill,
    first,
    last,
    read,
    wait,
    write,
)
from ..decode.config import HALVES, DecodeConfig

RINGS = (
    Ring("kv", full="kv_loaded", free="kv_free"),
    Ring("q", full="q_loaded", free="q_free"),
    # QK of the step after the next writes there; before it is issued, P of S has been waited for.
    Ring("s", full="s_done"),
    # P is written when the PV before is done, which read it.
    Ring("p", full="p_done"),
    # O is rescaled, or read, between o_done and p_done, without which no PV follows.
    Ring("o", full="o_done", regions=tuple(f"o{half}" for half in HALVES)),
)


def decode_steps(config: DecodeConfig) -> StepTable:
    """QK of the following step goes before PV."""
    if config.e4m3:
        return _e4m3_steps(config.q_stages)
    scores = tuple(_qk(half) for half in HALVES)
    sums = tuple(_pv(half) for half in HALVES)
    return StepTable(RINGS, (*scores, *sums), (_softmax(),))


def _e4m3_steps(q_stages: int) -> StepTable:
    """Return the steps for tiles of K and V in e4m3, each in one buffer.  q_stages: buffers of
    Q."""
    rings = (
        *RINGS,
        # In the bytes of Q's buffer, which is refilled when both have been read.
        Ring("rows", full="rows_loaded", free="q_free", over="q"),
        Ring("factors", full="factors_ready", free="factors_free"),
    )
    rows = Load.one("Q", "q", "q_rows", "rows")
    keys = Load.one("K", "k", "kv", "kv")
    scores = Product(
        "QK",
        result=Operand("S", ring="s"),
        a=Operand("K", ring="kv"),
        b=Operand("Q", ring="q"),
        waits=(first("q_loaded"), each("kv_loaded")),
        commits=(each("kv_free"), each("s_done"), last("q_free")),
        loads=(keys,),
        is_ahead=True,
    )
    sums = tuple(_pv_of_whole(half) for half in HALVES)
    queries = Role(
        "queries",
        (Act((fill(rows),), When.FIRST),),
        # The last commits arrive at this CTA's barriers.
        end=(wait("q_free"),) * q_stages,
    )
    quantise = Role(
        "quantise",
        (
            Act((wait("rows_loaded"), wait("factors_free"), read("rows", "Q"), write("q", "Q"),
                 write("factors", "F"), arrive("q_loaded"), arrive("factors_ready")), When.FIRST),
        ),
    )  # fmt: skip
    enter = Act(
        (wait("factors_ready"), read("factors", "F"), arrive("factors_free")),
        When.FIRST,
        is_ahead=True,
    )
    return StepTable(rings, (scores, *sums), (_softmax(enter), queries, quantise))


def _softmax(*enter: Act) -> Role:
    """The role; enter: what it does in a tile's first step before all else."""
    results = [f"O{half}" for half in HALVES]
    return Role(
        "softmax",
        (
            *enter,
            Act((wait("s_done"), read("s", "S")), is_ahead=True),
            # The edge of the tile before, which has been waited for; without one this does not
            # block.
            Act((again("o_done"),), When.FIRST, is_ahead=True),
            Act((wait("o_done"), *(change("o", name) for name in results)), When.NOT_LAST),
            Act((write("p", "P"), arrive("p_done")), is_ahead=True),
            Act((wait("o_done"), *(read("o", name) for name in results)), When.LAST),
        ),
    )


def _qk(half: int) -> Product:
    """S from a half of the columns."""
    is_first, is_last = half == HALVES[0], half == HALVES[-1]
    keys = Load.one(f"K{half}", f"k{half}", "kv", "kv")
    query = Load.one("Q", "q", "q", "q", When.FIRST)
    return Product(
        f"QK{half}",
        result=Operand("S", ring="s"),
        a=Operand(f"K{half}", ring="kv"),
        b=Operand("Q", ring="q"),
        waits=(*((first("q_loaded"),) if is_first else ()), each("kv_loaded")),
        commits=(each("kv_free"), *((each("s_done"), last("q_free")) if is_last else ())),
        loads=(*((query,) if is_first else ()), keys),
        is_ahead=True,
        overwrites=When.EACH if is_first else None,
    )


def _pv(half: int) -> Product:
    """A half of O."""
    is_first, is_last = half == HALVES[0], half == HALVES[-1]
    return Product(
        f"PV{half}",
        result=Operand(f"O{half}", ring="o"),
        a=Operand(f"V{half}", ring="kv"),
        b=Operand("P", ring="p"),
        waits=(*((each("p_done"),) if is_first else ()), each("kv_loaded")),
        commits=(each("kv_free"), *((each("o_done"),) if is_last else ())),
        loads=(Load.one(f"V{half}", f"v{half}", "kv", "kv"),),
        overwrites=When.FIRST,
    )


def _pv_of_whole(half: int) -> Product:
    """A half of O, from a buffer with all columns of V."""
    is_first, is_last = half == HALVES[0], half == HALVES[-1]
    values = Load.one("V", "v", "kv", "kv")
    return Product(
        f"PV{half}",
        result=Operand(f"O{half}", ring="o"),
        a=Operand("V", ring="kv"),
        b=Operand("P", ring="p"),
        waits=(each("p_done"), each("kv_loaded")) if is_first else (),
        commits=(each("kv_free"), each("o_done")) if is_last else (),
        loads=(values,) if is_first else (),
        overwrites=When.FIRST,
    )
