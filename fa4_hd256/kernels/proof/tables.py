"""Budgets and edges of a plan as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable

from ..limits import SMEM_CAPACITY
from ..plan.budgets import TMEM_COLUMNS, SmemPlan, TmemPlan, WarpPlan
from ..plan.edges import EdgeTable


def _table(titles: str, rows: Iterable[tuple[object, ...]]) -> str:
    """Return a table. titles: of the columns, separated by commas."""
    columns = titles.split(", ")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def warps_table(plan: WarpPlan) -> str:
    """Return the roles, their warps and registers."""
    rows: list[tuple[object, ...]] = [
        (role, getattr(plan, role), getattr(plan, budget))
        for role, budget in plan.ROLES
        if getattr(plan, role) is not None
    ]
    own = plan.registers
    registers = f"{own.needed} of {own.launched}, {own.at_launch} a thread at launch"
    total = "total", f"{own.num_threads} threads", registers
    return _table("role, warps, registers a thread", [*rows, total])


def smem_table(plan: SmemPlan) -> str:
    """Return the map of shared memory."""
    offsets = plan.offsets()
    rows = [(r.name, offsets[r.name], r.stages, r.stage_bytes, r.num_bytes, r.note)
            for r in plan.regions]  # fmt: skip
    table = _table("SMEM region, offset, stages, bytes a stage, bytes, note", rows)
    return f"{table}\n| total | | | | {plan.num_bytes} of {SMEM_CAPACITY} | |"


def tmem_table(plan: TmemPlan) -> str:
    """Return the map of tensor memory."""
    rows = [(r.name, f"{r.start}..{r.start + r.columns - 1}", r.alias_of or "", r.note)
            for r in plan.regions]  # fmt: skip
    table = _table("TMEM region, columns, lies over, note", rows)
    return f"{table}\n| total | {plan.allocated_columns} of {TMEM_COLUMNS} | | |"


def edges_table(table: EdgeTable) -> str:
    """Return the edges: who arrives, how often, who waits, and for what."""
    return _table(
        "edge, stages, arrives, count, waits, starts, guards",
        [
            (
                edge.name,
                edge.stages,
                f"{edge.producer}: {edge.signal.value}",
                edge.arrive_count,
                edge.consumer,
                "complete" if edge.initially_complete else "pending",
                edge.guards,
            )
            for edge in table.edges
        ],
    )
