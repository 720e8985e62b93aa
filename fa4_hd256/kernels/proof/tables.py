"""Budgets, edges and steps of a plan as Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, cast

from ..limits import SMEM_CAPACITY
from ..plan.budgets import TMEM_COLUMNS, SmemPlan, TmemPlan, WarpPlan
from ..plan.edges import EdgeTable
from .steps import Act, Action, Role, StepTable, Verb


def _table(titles: str, rows: Iterable[tuple[object, ...]]) -> str:
    columns = titles.split(", ")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def warps_table(plan: WarpPlan) -> str:
    found = {field.name: getattr(plan, field.name) for field in fields(cast(Any, plan))}
    rows: list[tuple[object, ...]] = [
        (role, warps, found.get(f"registers_{role}", found["registers_other"]))
        for role, warps in found.items()
        if warps is not None and not role.startswith("registers_")
    ]
    own = plan.registers
    registers = f"{own.needed} of {own.launched}, {own.at_launch} a thread at launch"
    total = "total", f"{own.num_threads} threads", registers
    return _table("role, warps, registers a thread", [*rows, total])


def smem_table(plan: SmemPlan) -> str:
    offsets = plan.offsets()
    rows = [
        (r.name, offsets[r.name], r.stages, r.stage_bytes, r.num_bytes, r.note)
        for r in plan.regions
    ]
    table = _table("SMEM region, offset, stages, bytes a stage, bytes, note", rows)
    return f"{table}\n| total | | | | {plan.num_bytes} of {SMEM_CAPACITY} | |"


def tmem_table(plan: TmemPlan) -> str:
    rows = [
        (r.name, f"{r.start}..{r.start + r.columns - 1}", r.alias_of or "", r.note)
        for r in plan.regions
    ]
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


def roles_table(steps: StepTable) -> str:
    """Return what the roles do in a tile, in their order. wait(n): until at most n of the
    warpgroup's MMAs are under way. "in 2": in two pieces, each with a buffer of its own. Of roles
    that are groups of warps of one role the first alone."""
    rows, seen = [], {""}
    for role in steps.roles:
        if role.of not in seen or not role.of:
            seen.add(role.of)
            rows += [(role.name, when, words) for when, words in _done_by(role) if words]
    return _table("role, in, does", rows)


def _done_by(role: Role) -> Iterator[tuple[str, str]]:
    for when, actions in (
        ("a tile with steps, first of all", role.enter),
        ("a step that it leaves out", role.skip),
        ("a tile of which it leaves out all", role.idle),
    ):
        yield when, _words(actions)
    for act in role.acts:
        yield _when(act, role), _words(act.actions)
    yield "after the last tile", _words(role.end)


def _words(actions: Iterable[Action]) -> str:
    """Return actions in words, those that a reader should see."""
    words = "; ".join(word for action in actions for word in _word(action))
    return re.sub(r"\b(\S.*?)((?:; \1)+)(?=;|$)", _times, words)


def _times(match: re.Match) -> str:
    return f"{match[0].count(match[1])} times ({match[1]})"


def _word(action: Action) -> Iterator[str]:
    if action.verb is Verb.FILL:
        pieces = f" in {action.pieces}" if action.pieces > 1 else ""
        yield f"fills {action.where}: {action.content}{pieces}"
    elif action.verb is Verb.MULTIPLY:
        yield action.content
    elif action.verb is Verb.DONE:
        yield f"wait({action.pending})"
    elif action.verb is not Verb.TOUCH:
        yield f"{action.verb.value} {action.content or action.where}"


def _when(act: Act, role: Role) -> str:
    words = act.when.value
    if act.beside is not None:
        other = "before" if act.is_ahead else "ahead"
        words += f", beside the step {other}" if act.beside else ", alone"
    if act.of_tile_before:
        return f"{words}, for the tile before"
    if not act.is_ahead:
        return words
    return f"{words}, a step ahead{', also of the next tile' if role.crosses else ''}"
