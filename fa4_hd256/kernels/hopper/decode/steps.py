"""The steps of the decode kernel as data, for the check of the plan (`drain`), and its loads.

`tests/operator/kernels/test_hopper_steps.py` holds the kernel to this table.  K and V are read into
registers and given back before all of them are multiplied; P is in shared memory and is no operand
here: the softmax's own barriers stand around it (`consumers` NOTE [barriers of a step]), as one
does behind Q in f16 (`queries` NOTE [Q in place]).
"""

from __future__ import annotations

from typing import Any

from fa4_hd256.kernels.steps import (
    CLAIM_STEPS,
    Act,
    Action,
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
)

__all__ = ["PIECE_GROUPS", "decode_steps"]

#: Of 64 columns each: of a group a thread reads a piece of each of its keys of K.
PIECE_GROUPS = 4



def decode_steps(config: Any) -> StepTable:
    """config: of the kernel; see there what of it says how K and V become products."""
    kv_stages, q_stages = config.kv_stages, config.q_stages
    rings = (Ring("kv", "kv_loaded", "kv_free"), Ring("q", "q_loaded", "q_free"))
    loads = tuple(fill(Load.one(name, name.lower(), "kv", "kv")) for name in "KV")
    load = Role("load", (Act(loads),), end=(wait("kv_free"),) * kv_stages, claims=CLAIM_STEPS)
    queries = Role(
        "queries",
        (Act((fill(Load.one("Q", "q", "q", "q")),), When.FIRST),),
        end=(wait("q_free"),) * q_stages,
    )
    products, uses = _products_of_k(config)
    summed = (done(0), *uses)
    taken = _take("V")
    values = (*taken, *summed) if config.is_roomy else (*summed, *taken)
    first, second = ((multiply(f"PV{block}"), touch(f"PV{block}")) for block in range(2))
    between: tuple[Action, ...] = () if config.is_roomy else (done(0), first[1])
    touches = (first[1], second[1]) if config.is_roomy else (second[1],)
    results = first[0], *between, second[0], done(0), *touches
    consumers = Role(
        "consumers",
        (
            Act((*products, *values, *results)),
            Act((arrive("q_free"),), When.LAST),
        ),
        enter=(wait("q_loaded"),),
    )
    return StepTable(rings, roles=(load, queries, consumers))


def _products_of_k(config: Any) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """(K to registers and QK, what uses the results of products that have not been waited for).  A
    part's registers are written again when its product is done."""
    queries, (taken, read_keys, given) = read("q", "Q"), _take("K")
    parts, buffers = config.qk_parts, config.part_buffers
    if buffers == parts:
        return (taken, read_keys, given, multiply("QK", queries)), (touch("QK"),)
    names = [f"QK{part}" for part in range(parts)]
    # The bytes of the last group of pieces are read before the first part of one some before it.
    last = (PIECE_GROUPS - config.pieces_ahead) * parts // PIECE_GROUPS
    found: list[Action] = [taken]
    for part, name in enumerate(names):
        if part == last:
            found += [read_keys, given]
        if part >= buffers:
            found += [done(buffers - 1), touch(names[part - buffers])]
        found.append(multiply(name, queries))
    return tuple(found), tuple(map(touch, names[-buffers:]))


def _take(content: str) -> tuple[Action, ...]:
    """A tile to registers."""
    return wait("kv_loaded"), read("kv", content), arrive("kv_free")
