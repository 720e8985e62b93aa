"""Progress of a command, for people who wait: on a terminal, by tqdm where that is installed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

#: Seconds after which a step is shown.
_LATER = 0.5
_REFRESH = 1.0


def counted(found: Iterable[Item], total: int, doing: str, unit: str) -> Iterator[Item]:
    """Yield what is found, with a bar that counts it."""
    bar = _tqdm()
    if bar is None:
        yield from found
    else:
        yield from bar(found, total=total, desc=doing, unit=unit, leave=False)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Show that a step is under way: "replaying attention"."""
    bar = _tqdm()
    if bar is None:
        yield
        return
    done = threading.Event()
    shown = threading.Thread(target=_show, args=(bar, what, done), daemon=True)
    shown.start()
    try:
        yield
    finally:
        done.set()
        shown.join()


def _show(bar: Any, what: str, done: threading.Event) -> None:
    if done.wait(_LATER):
        return
    with bar(desc=what, bar_format="{desc}: {elapsed}", leave=False, initial=_LATER) as line:
        while not done.wait(_REFRESH):
            line.refresh()


def _tqdm() -> Any:
    """tqdm's class; None where nobody looks, or without it."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm
