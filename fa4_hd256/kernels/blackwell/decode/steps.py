"""The steps of the decode kernel as data: S^T = K Q^T and O^T += V^T P^T for 128 keys at a time.

K and V come in halves of 128 columns, a buffer each: the halves of K are added up in S, those of V
give the two halves of O, each 128 of the head's columns.
"""

from __future__ import annotations

from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.steps import (
    Act,
    Load,
    Operand,
    Part,
    Product,
    Ring,
    Role,
    StepTable,
    When,
    again,
    arrive,
    change,
    each,
    first,
    last,
    read,
    wait,
    write,
)

__all__ = ["HALVES", "MMA_K", "decode_steps"]

# Elements of a sum that one instruction multiplies (`instructions.mma_chain`).
MMA_K = 16

#: Halves of the head's columns: of K and V as they are loaded, of O as it is made.
HALVES = (0, 1)
HALF_SLICES = HEAD_DIM // len(HALVES) // MMA_K

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


def decode_steps() -> StepTable:
    """QK of the following step goes before PV."""
    results = [f"O{half}" for half in HALVES]
    scores = tuple(_qk(half) for half in HALVES)
    sums = tuple(_pv(half) for half in HALVES)
    softmax = Role(
        "softmax",
        (
            Act((wait("s_done"), read("s", "S")), is_ahead=True),
            # Of the tile before, which has been waited for; without one this does not block.
            Act((again("o_done"),), When.FIRST, is_ahead=True),
            Act((wait("o_done"), *(change("o", name) for name in results)), When.NOT_LAST),
            Act((write("p", "P"), arrive("p_done")), is_ahead=True),
            Act((wait("o_done"), *(read("o", name) for name in results)), When.LAST),
        ),
    )
    return StepTable(RINGS, (*scores, *sums), (softmax,))


def _qk(half: int) -> Product:
    """S from a half of the columns."""
    is_first, is_last = half == HALVES[0], half == HALVES[-1]
    start = half * HALF_SLICES
    keys = Load.one(f"K{half}", f"k{half}", "kv", "kv")
    query = Load.one("Q", "q", "q", "q", When.FIRST)
    return Product(
        f"QK{half}",
        result=Operand("S", "s", ring="s"),
        a=Operand(f"K{half}", "kv", ring="kv"),
        b=Operand("Q", "q", "q", Part("Q", start, start + HALF_SLICES)),
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
        result=Operand(f"O{half}", f"o{half}", ring="o"),
        a=Operand(f"V{half}", "kv", ring="kv"),
        b=Operand("P", "p", ring="p"),
        waits=(*((each("p_done"),) if is_first else ()), each("kv_loaded")),
        commits=(each("kv_free"), *((each("o_done"),) if is_last else ())),
        loads=(Load.one(f"V{half}", f"v{half}", "kv", "kv"),),
        overwrites=When.FIRST,
    )
