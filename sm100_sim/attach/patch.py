"""Replacing attributes of other modules for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """`owner.name` becomes `value`; an attribute that is inherited or missing is added."""

    owner: Any
    name: str
    value: Any


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """The patches hold inside the context; afterwards everything is as it was."""
    undo: list[Patch] = []
    try:
        for patch in list(patches):
            undo.append(Patch(patch.owner, patch.name, vars(patch.owner).get(patch.name, _ABSENT)))
            setattr(patch.owner, patch.name, patch.value)
        yield
    finally:
        for patch in reversed(undo):
            if patch.value is _ABSENT:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.value)
