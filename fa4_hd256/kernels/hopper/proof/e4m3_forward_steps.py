"""The steps of the forward for Q, K and V in e4m3 as data, as `forward_steps` has the other's."""

from __future__ import annotations

from ...proof.steps import (
    CLAIM_STEPS,
    Act,
    Load,
    Ring,
    Role,
    StepTable,
    When,
    arrive,
    fill,
    read,
    wait,
    write,
)
from ..forward.e4m3.config import E4m3ForwardConfig
from .forward_steps import consumer, q_name


def e4m3_forward_steps(config: E4m3ForwardConfig) -> StepTable:
    """Return the table, with Q of each warpgroup by itself."""
    q_rings = [q_name(w) for w in range(config.warpgroups)]
    of_loads = (*q_rings, "k", *(("v",) if config.transposes else ()))
    rings = (
        *(Ring(name, f"{name}_loaded", f"{name}_free") for name in of_loads),
        Ring("columns", "columns_written", "columns_free"),
    )
    keys = fill(Load.one("K", "k", "k", "k"))
    queries = tuple(fill(Load.one("Q", "q", name, name)) for name in q_rings)
    values, v_free = fill(Load.one("V^T", "v", "columns", "columns")), "columns_free"
    if config.transposes:
        values, v_free = fill(Load.one("V", "v", "v", "v")), "v_free"
    load = Role(
        "load",
        (Act((keys,)), Act(queries, When.FIRST), Act((values,))),
        end=(*config.k_stages * (wait("k_free"),), *config.v_stages * (wait(v_free),)),
        claims=CLAIM_STEPS,
    )
    consumers = (
        consumer(w, config.skips, ("columns_written", "columns_free"), ("columns", "V^T"))
        for w in range(config.warpgroups)
    )
    transposers = (_transposers(config.v_stages),) if config.transposes else ()
    return StepTable(rings, roles=(load, *transposers, *consumers))


def _transposers(stages: int) -> Role:
    """Return the role of the warps that transpose V.  stages: of V, and of V^T."""
    act = Act(
        (
            wait("v_loaded"),
            wait("columns_free"),
            read("v", "V"),
            write("columns", "V^T"),
            arrive("columns_written"),
            arrive("v_free"),
        )
    )
    return Role("transposers", (act,), end=stages * (wait("columns_free"),))
