"""Progress of a command, for people who wait: on a terminal, by tqdm where that is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from .waiting import waiting_line

Item = TypeVar("Item")


def counted(found: Iterable[Item], total: int, doing: str, unit: str) -> Iterable[Item]:
    """Return what is found, with a bar that counts it."""
    if sys.stderr.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            from tqdm import tqdm

            return tqdm(found, total=total, desc=doing, unit=unit, leave=False)
    return found


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Show that a step is under way: "replaying attention"."""
    with waiting_line(what) if sys.stderr.isatty() else contextlib.nullcontext():
        yield
