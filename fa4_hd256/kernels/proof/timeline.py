"""The timeline of a kernel's steps as Markdown, from the same table as the roles (`steps`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..plan.edges import EdgeTable
from .steps import Act, Action, EdgeUse, Load, Product, Role, StepTable, Verb, When


@dataclass(frozen=True)
class Place:
    """Place in a tile at which an MMA is issued.

    step: its number in words.  first, last: the condition under which the step is the tile's first
    or last one, in words; "" where it always is, None where it never is.
    """

    step: str
    first: str | None
    last: str | None

    def edges(self, uses: tuple[EdgeUse, ...]) -> str:
        """The edges of such steps, each with its condition."""
        found = []
        for use in uses:
            condition = {When.FIRST: self.first, When.LAST: self.last}.get(use.when, "")
            if condition is not None:
                found.append(f"{use.edge} ({condition})" if condition else use.edge)
        return ", ".join(found)

    def loads(self, loads: tuple[Load, ...]) -> str:
        found = []
        for load in loads:
            of_tile = load.when is When.FIRST
            if of_tile and self.first is None:
                continue
            suffix = f" in {load.pieces}" if load.pieces > 1 else ""
            suffix += f" ({self.first})" if of_tile and self.first else ""
            step = "" if of_tile else f"({self.step})"
            found += [f"{copy.content}{step}{suffix}" for copy in load.copies]
        return ", ".join(found)


FIRST = Place("0", first="", last="n = 1")
FOLLOWING = Place("i", first=None, last="i = n - 1")
BEFORE = Place("i - 1", first="i = 1", last=None)
LAST = Place("n - 1", first="n = 1", last="")
NEXT = Place("0'", first="", last="n' = 1")
ANY = Place("i", first="i = 0", last="i = n - 1")


def describe_steps(steps: StepTable, edges: EdgeTable) -> str:
    """Describe what load and MMA do for a tile of n steps, then what the other roles do, as tables.

    An MMA and its loads stand in one row; 0' is the first step of the next tile.  "in 2": in two
    pieces, each with a buffer of its own.
    """
    rows = ["| step of n | load | MMA | waits for | commits |", "|" + "---|" * 5]
    rows += [f"| {' | '.join(row)} |" for row in _rows(steps)]
    freed = ", ".join(ring.freed for ring in steps.loaded_rings)
    tail = ", ".join(steps.mma_edge(steps.ring(name)) for name in steps.mma_tail(edges))
    rows.append(f"| after the last tile | waits for {freed} | | {tail} | |")
    roles = ["| other role | in | waits for | arrives on |", "|" + "---|" * 4]
    roles += [f"| {' | '.join(row)} |" for role in steps.roles for row in _acts(role)]
    return "\n".join(rows) + "\n\n" + "\n".join(roles)


def describe_roles(steps: StepTable) -> str:
    """Describe what the roles of a table without MMAs do in a tile, in their order, as a table.

    (rest n): until at most n of the warpgroup's MMAs are under way.  Of roles that are groups of
    warps of one role the first alone.
    """
    rows, seen = ["| role | in | does |", "|" + "---|" * 3], {""}
    for role in steps.roles:
        if role.of and role.of in seen:
            continue
        seen.add(role.of)
        others = (
            ("a tile with steps, first of all", role.enter),
            ("a step that it leaves out", role.skip),
            ("a tile of which it leaves out all", role.idle),
        )
        for when, actions in others:
            if actions:
                words = "; ".join(word for action in actions for word in _words(action))
                rows.append(f"| {role.name} | {when} | {words} |")
        for act in role.acts:
            words = "; ".join(word for action in act.actions for word in _words(action))
            rows.append(f"| {role.name} | {_when(act)} | {words} |")
        ends = ", ".join(dict.fromkeys(action.where for action in role.end))
        if ends:
            rows.append(f"| {role.name} | after the last tile | waits for all of {ends} |")
    return "\n".join(rows)


def _words(action: Action) -> Iterator[str]:
    """Yield an action in words, if a reader should see it."""
    if action.load is not None:
        suffix = f" in {action.load.pieces}" if action.load.pieces > 1 else ""
        yield f"fills {action.where}: {action.load.content}{suffix}"
    elif action.verb is Verb.MULTIPLY:
        yield action.content
    elif action.verb is Verb.DONE:
        yield f"(rest {action.pending})"
    elif action.verb is not Verb.TOUCH:
        yield f"{action.verb.value} {action.content or action.where}"


def _rows(steps: StepTable) -> Iterator[tuple[str, ...]]:
    if not steps.looks_ahead:
        for product in steps.products:
            yield "i = 0 .. n - 1", *_row(product, ANY)
        return
    ahead = [product for product in steps.products if product.is_ahead]
    for product in ahead:
        yield "start", *_row(product, FIRST)
    for product in steps.products:
        yield "i = 1 .. n - 1", *_row(product, FOLLOWING if product.is_ahead else BEFORE)
    for product in steps.products:
        if product.is_ahead:
            yield "end, if the next tile has steps", *_row(product, NEXT)
        else:
            yield "end", *_row(product, LAST)


def _row(product: Product, place: Place) -> tuple[str, ...]:
    name = f"{product.name}({place.step})"
    if product.pieces > 1:
        name += f" in {product.pieces}"
    waits, commits = place.edges(product.waits), place.edges(product.commits)
    return place.loads(product.loads), name, waits, commits


def _acts(role: Role) -> Iterator[tuple[str, ...]]:
    for act in role.acts:
        waits, arrives = (
            ", ".join(dict.fromkeys(a.where for a in act.actions if a.verb is verb))
            for verb in (Verb.WAIT, Verb.ARRIVE)
        )
        yield role.name, _when(act), waits, arrives
    ends = [action.where for action in role.end if action.verb is Verb.WAIT]
    if ends:
        yield role.name, "after the last tile", ", ".join(ends), ""


def _when(act: Act) -> str:
    words = act.when.value
    if act.of_tile_before:
        return f"{words}, for the tile before"
    return f"{words}, for the following one" if act.is_ahead else words
