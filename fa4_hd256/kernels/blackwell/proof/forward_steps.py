"""The steps of the forward kernel as data: S = Q K^T and O += P V for 128 keys at a time.

P is handed over in two halves, an edge each, and multiplied by two products: that of the first 64
keys begins while the softmax is still at the others.
"""

from __future__ import annotations

from dataclasses import replace

from ...proof.steps import (
    Act,
    Load,
    Operand,
    Product,
    Ring,
    Role,
    StepTable,
    When,
    arrive,
    change,
    each,
    first,
    read,
    wait,
    write,
)
from ..forward.config import P_HALVES, ForwardConfig

RINGS = (
    Ring("kv", full="kv_loaded", free="kv_free"),
    # The TMA store of the O that was staged in the Q buffer reads it last.
    Ring("q", full="q_loaded", free="q_free"),
    # P lies over its S, and the PV that reads it is issued before the QK that writes there again.
    Ring("s", full="s_done"),
    *(
        Ring(half, full=f"{half}_done", over="s", share=(i, len(P_HALVES)))
        for i, half in enumerate(P_HALVES)
    ),
    Ring("o", full="o_done", free="o_free"),
    Ring("scale", full="scale_done", free="scale_free"),
)

# Each wait for scale_free allows the write of a factor or of 1/sum.  A tile's first one is at its
# beginning.  Every later one is in the step before its write, where the first half of P is handed
# over: `scores`, NOTE [stores hidden by exponentials].
SOFTMAX = Role(
    "softmax",
    (
        Act((wait("scale_free"),), When.FIRST),
        Act(
            (
                wait("s_done"),
                read("s", "S"),
                write("scale", "factor"),
                arrive("scale_done"),
                wait("scale_free"),
                write("p_first", "first P"),
                arrive("p_first_done"),
                write("p_last", "last P"),
                arrive("p_last_done"),
            )
        ),
        Act((write("scale", "1/sum"), arrive("scale_done")), When.LAST),
    ),
    end=(wait("scale_free"), wait("scale_free")),
)


def _correction(o_slices: int) -> Role:
    """Return the correction's role.

    The factor of step i + 1 is taken before O of step i is touched.  In the last step o_free comes
    before the last slice is staged: that slice is in registers then, and the others are staged.
    """
    stage = (write("staged", "O staged"), arrive("o_staged"))
    drain = (*stage * (o_slices - 1), read("o", "O"), arrive("o_free"), *stage)
    return Role(
        "correction",
        (
            Act((wait("scale_done"), read("scale", "factor"), arrive("scale_free")), is_ahead=True),
            Act((wait("scale_done"), read("scale", "1/sum"), arrive("scale_free")), When.LAST),
            Act((wait("o_done"), change("o", "O"))),
            Act((arrive("o_free"),), When.NOT_LAST),
            Act(drain, When.LAST),
        ),
    )


def _epilogue(o_slices: int) -> Role:
    store = (wait("o_staged"), read("staged", "O staged"))
    return Role("epilogue", (Act((*store * o_slices, arrive("q_free")), When.LAST),))


def forward_steps(config: ForwardConfig) -> StepTable:
    """Return the table of the kernel's steps.

    With two S buffers QK of the following step goes before PV of this one; otherwise every step is
    issued by itself, QK then PV.
    """
    qk = Product(
        "QK",
        result=Operand("S", ring="s"),
        a=Operand("Q", ring="q"),
        b=Operand("K", ring="kv"),
        waits=(first("q_loaded"), each("kv_loaded")),
        commits=(each("kv_free"), each("s_done")),
        loads=(Load.one("Q", "q", "q", "q", When.FIRST), Load.one("K", "k", "k", "kv")),
        is_ahead=config.s_stages > 1,
    )
    pv0, pv1 = (
        Product(
            f"PV{i}",
            result=Operand("O", ring="o"),
            a=Operand(f"{half.removeprefix('p_')} P", ring=half),
            b=Operand("V", ring="kv"),
            waits=(each(f"{half}_done"),),
            commits=(),
            overwrites=None,
        )
        for i, half in enumerate(P_HALVES)
    )
    pv0 = replace(
        pv0,
        waits=(each("kv_loaded"), each("o_free"), *pv0.waits),
        loads=(Load.one("V", "v", "v", "kv"),),
        overwrites=When.FIRST,
    )
    pv1 = replace(pv1, commits=(each("kv_free"), each("o_done")))
    rings = (*RINGS, Ring("staged", full="o_staged", over="q", parts=config.o_slices))
    roles = (SOFTMAX, _correction(config.o_slices), _epilogue(config.o_slices))
    return StepTable(rings, (qk, pv0, pv1), roles)
