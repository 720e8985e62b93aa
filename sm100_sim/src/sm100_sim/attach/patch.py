"""Replacing attributes of other modules for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

#: Value of a patch: the owner has no attribute of this name itself.
ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """`owner.name` becomes `value`, or goes; an attribute that is inherited or missing is added."""

    owner: Any
    name: str
    value: Any


def _set(owner: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """The patches hold inside the context; afterwards everything is as it was."""
    undo: list[Patch] = []
    try:
        for patch in list(patches):
            undo.append(Patch(patch.owner, patch.name, vars(patch.owner).get(patch.name, ABSENT)))
            _set(patch.owner, patch.name, patch.value)
        yield
    finally:
        for patch in reversed(undo):
            _set(patch.owner, patch.name, patch.value)
