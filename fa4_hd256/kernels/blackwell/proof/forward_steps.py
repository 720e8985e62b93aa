"""The steps of the forward kernel as data: S = Q K^T and O += P V for 128 keys at a time.

P is handed over in two halves, an edge each, and multiplied by two MMAs: that of the first 64 keys
begins while the softmax is still at the others.
"""

from __future__ import annotations

from ...context import CLAIM_STEPS
from ...proof.steps import (
    MMA,
    Act,
    Action,
    Ring,
    Role,
    StepTable,
    When,
    act,
    add,
    arrive,
    change,
    extend,
    fill,
    loaded,
    multiply,
    read,
    wait,
    wait_all,
    write,
)
from ..forward.config import P_HALVES, ForwardConfig
from ..forward.mxfp8_config import Mxfp8Config

RINGS = (
    loaded("kv"),
    # The TMA store of the O that was staged in the Q buffer reads it last.
    loaded("q"),
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
def _softmax(*read_s: Action) -> Role:
    step = (
        wait("s_done"),
        read("s", "S"),
        *read_s,
        write("scale", "factor"),
        arrive("scale_done"),
        wait("scale_free"),
        write("p_first", "first P"),
        arrive("p_first_done"),
        write("p_last", "last P"),
        arrive("p_last_done"),
    )
    acts = (
        act(wait("scale_free"), when=When.FIRST),
        act(*step),
        act(write("scale", "1/sum"), arrive("scale_done"), when=When.LAST),
    )
    return Role("softmax", acts, end=(wait_all("scale_free"),))


def _correction(o_slices: int) -> Role:
    """Return the correction's role. The factor of step i + 1 is taken before O of step i is
    touched. In the last step o_free comes before the last slice is staged: that slice is in
    registers then, and the others are staged."""
    stage = (write("staged", "O staged"), arrive("o_staged"))
    drain = (*stage * (o_slices - 1), read("o", "O"), arrive("o_free"), *stage)
    take = wait("scale_done"), read("scale", "factor"), arrive("scale_free")
    return Role(
        "correction",
        (
            act(*take, is_ahead=True),
            act(take[0], read("scale", "1/sum"), take[-1], when=When.LAST),
            act(wait("o_done"), change("o", "O")),
            act(arrive("o_free"), when=When.NOT_LAST),
            act(*drain, when=When.LAST),
        ),
    )


def _epilogue(o_slices: int) -> Role:
    store = (wait("o_staged"), read("staged", "O staged"))
    return Role("epilogue", (act(*store * o_slices, arrive("q_free"), when=When.LAST),))


def _multiply(*scales: Action) -> tuple[Act, ...]:
    return (
        act(wait("q_loaded"), when=When.FIRST, is_ahead=True),
        act(
            wait("kv_loaded"),
            *scales,
            multiply("QK", read("q", "Q"), read("kv", "K"), write("s", "S")),
            arrive("kv_free"),
            arrive("s_done"),
            is_ahead=True,
        ),
        act(
            wait("kv_loaded"),
            wait("o_free"),
            wait("p_first_done"),
            multiply("PV0", read("p_first", "first P"), read("kv", "V"), add("o", "O")),
            wait("p_last_done"),
            multiply("PV1", read("p_last", "last P"), read("kv", "V"), extend("o", "O")),
            arrive("kv_free"),
            arrive("o_done"),
        ),
    )


def forward_steps(config: ForwardConfig) -> StepTable:
    load = Role(
        "load",
        (
            act(fill("q", "Q"), when=When.FIRST, is_ahead=True),
            act(fill("kv", "K"), is_ahead=True),
            act(fill("kv", "V")),
        ),
        end=(wait_all("kv_free"), wait_all("q_free")),
        claims=CLAIM_STEPS,
        crosses=True,
    )
    rings = (*RINGS, Ring("staged", full="o_staged", over="q", parts=config.o_slices))
    scales: tuple[Action, ...] = ()
    read_s: tuple[Action, ...] = ()
    end: tuple[Action, ...] = (wait_all("o_free"),)
    if isinstance(config, Mxfp8Config):
        # The scales of QK lie over the S before it.
        rings = (*rings, Ring("s_read", full="s_read", is_permit=True))
        scales, read_s, end = (wait("s_read"),), (arrive("s_read"),), (wait_all("s_read"), *end)
    mma = Role(MMA, _multiply(*scales), end=end, crosses=True)
    others = _softmax(*read_s), _correction(config.o_slices), _epilogue(config.o_slices)
    return StepTable(rings, (load, mma, *others))
