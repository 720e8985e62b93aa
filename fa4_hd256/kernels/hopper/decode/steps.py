"""The steps of the decode kernel as data, for the check of the plan (`drain`), and its loads.

`tests/operator/kernels/test_hopper_steps.py` holds the kernel to this table.  K and V are read into
registers and given back before they are multiplied; P is in shared memory and is no operand here:
the softmax's own barriers stand around it (`consumers` NOTE [barriers of a step]).
"""

from __future__ import annotations

from fa4_hd256.kernels.steps import (
    CLAIM_STEPS,
    Act,
    Load,
    Ring,
    Role,
    StepTable,
    When,
    arrive,
    done,
    fill,
    multiply,
    read,
    touch,
    wait,
    write,
)

__all__ = ["decode_steps"]


def decode_steps(kv_stages: int, q_stages: int) -> StepTable:
    """kv_stages: buffers of K and V together; q_stages: of Q and the factors of its rows."""
    rings = (Ring("kv", "kv_loaded", "kv_free"), Ring("q", "q_loaded", "q_free"))
    loads = tuple(fill(Load.one(name, name.lower(), "kv", "kv")) for name in "KV")
    load = Role("load", (Act(loads),), end=(wait("kv_free"),) * kv_stages, claims=CLAIM_STEPS)
    quantise = Role(
        "quantise",
        (Act((wait("q_free"), write("q", "Q"), arrive("q_loaded")), When.FIRST),),
        end=(wait("q_free"),) * q_stages,
    )
    scores = (*_take("K"), multiply("QK", read("q", "Q")))
    values = (*_take("V"), done(0), touch("QK"), multiply("PV"), done(0), touch("PV"))
    consumers = Role(
        "consumers",
        (
            Act((*scores, *values)),
            Act((arrive("q_free"),), When.LAST),
        ),
        enter=(wait("q_loaded"), read("q", "Q")),
    )
    return StepTable(rings, roles=(load, quantise, consumers))


def _take(content: str) -> tuple:
    """A tile to registers."""
    return wait("kv_loaded"), read("kv", content), arrive("kv_free")
