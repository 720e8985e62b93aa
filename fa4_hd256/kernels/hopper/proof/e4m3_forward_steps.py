"""The steps of the forward for Q, K and V in e4m3 as data, as `forward_steps` has the other's."""

from __future__ import annotations

from ...context import CLAIM_STEPS
from ...proof.steps import (
    Act,
    Ring,
    Role,
    StepTable,
    When,
    arrive,
    fill,
    loaded,
    read,
    wait,
    wait_all,
    write,
)
from ..forward.e4m3.config import E4m3ForwardConfig
from .forward_steps import consumer, q_name


def e4m3_forward_steps(config: E4m3ForwardConfig) -> StepTable:
    """Return the table, with Q of each warpgroup by itself."""
    q_rings = [q_name(w) for w in range(config.warpgroups)]
    of_loads = (*q_rings, "k", *(("v",) if config.transposes else ()))
    rings = (*map(loaded, of_loads), Ring("columns", "columns_written", "columns_free"))
    queries = tuple(fill(name, "Q") for name in q_rings)
    values, v_free = fill("columns", "V^T"), "columns_free"
    if config.transposes:
        values, v_free = fill("v", "V"), "v_free"
    load = Role(
        "load",
        (Act((fill("k", "K"),)), Act(queries, When.FIRST), Act((values,))),
        end=(wait_all("k_free"), wait_all(v_free)),
        claims=CLAIM_STEPS,
    )
    consumers = (
        consumer(w, config.skips, ("columns_written", "columns_free"), ("columns", "V^T"))
        for w in range(config.warpgroups)
    )
    transposers = (TRANSPOSERS,) if config.transposes else ()
    return StepTable(rings, roles=(load, *transposers, *consumers))


#: Role of the warps that transpose V.
TRANSPOSERS = Role(
    "transposers",
    (
        Act(
            (
                wait("v_loaded"),
                wait("columns_free"),
                read("v", "V"),
                write("columns", "V^T"),
                arrive("columns_written"),
                arrive("v_free"),
            )
        ),
    ),
    end=(wait_all("columns_free"),),
)
