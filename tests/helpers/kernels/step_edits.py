"""Tables of steps with one action changed, for tests of the proof."""

from __future__ import annotations

from dataclasses import replace

from fa4_hd256.kernels.plan.edges import EdgeTable
from fa4_hd256.kernels.proof.steps import Verb


def edits(table, change):
    """Yield (what, the table) with one action changed, of all that `change` makes another one of;
    it returns actions in place of one, or None."""
    for number, role in enumerate(table.roles):
        for what, edited in edits_of_role(role, change):
            roles = (*table.roles[:number], edited, *table.roles[number + 1 :])
            yield f"{role.name}, {what}", replace(table, roles=roles)


def edits_of_role(role, change):
    """Yield the edits of a role but for its end: the forward's load warp waits there for what is
    known."""
    for place, act in enumerate(role.acts):
        for what, actions in edits_of_actions(act.actions, change):
            acts = list(role.acts)
            acts[place] = replace(act, actions=actions)
            yield f"act {place}, {act.when.value}: {what}", replace(role, acts=tuple(acts))
    for name in ("enter", "skip", "idle"):
        for what, actions in edits_of_actions(getattr(role, name), change):
            yield f"{name}: {what}", replace(role, **{name: actions})


def edits_of_actions(actions, change):
    for i, action in enumerate(actions):
        others = change(action)
        if others is not None:
            yield str(action), (*actions[:i], *others, *actions[i + 1 :])


def lacking(table, verb):
    """The table without its last action of this verb; the table where there is none."""
    return [table, *(t for _, t in edits(table, lambda a: () if a.verb is verb else None))][-1]


def waiting_less(table):
    """The table whose last wait for products leaves one more under way."""

    def change(action):
        if action.verb is not Verb.DONE:
            return None
        return (replace(action, pending=action.pending + 1),)

    return [t for _, t in edits(table, change)][-1]


def role_of(table, name):
    return next(role for role in table.roles if role.name == name)


def with_role(table, name, **changes):
    """The table with fields of a role changed; a function makes the field of the one before."""

    def changed(role):
        made = {
            key: value(getattr(role, key)) if callable(value) else value
            for key, value in changes.items()
        }
        return replace(role, **made)

    return replace(
        table, roles=tuple(changed(role) if role.name == name else role for role in table.roles)
    )


def with_actions(table, name, change):
    """The table with actions of a role changed: `change` returns those in place of one."""

    def acts(before):
        return tuple(
            replace(act, actions=tuple(new for action in act.actions for new in change(action)))
            for act in before
        )

    return with_role(table, name, acts=acts)


def without(table, name, *actions):
    """The table with actions of a role left out, wherever they stand."""
    return with_actions(table, name, lambda action: () if action in actions else (action,))


def with_edge(edges, name, **changes):
    return EdgeTable(tuple(replace(e, **changes) if e.name == name else e for e in edges.edges))


def with_stages(edges, **stages):
    return EdgeTable(
        tuple(replace(edge, stages=stages.get(edge.name, edge.stages)) for edge in edges.edges)
    )
