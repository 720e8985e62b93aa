"""A line on stderr while something takes long: what it is, and for how many seconds.

sm100_sim and fa4_hd256 share this file by a link.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

#: Seconds after which the line appears, and between two updates of it.
LATER = 0.5
_REFRESH = 1.0


@contextlib.contextmanager
def waiting_line(what: str) -> Iterator[None]:
    """Show `what` by tqdm if the block takes longer than `LATER`; nothing without tqdm."""
    done = threading.Event()
    shown = threading.Thread(target=_show, args=(what, done), daemon=True)
    shown.start()
    try:
        yield
    finally:
        done.set()
        shown.join()


def _show(what: str, done: threading.Event) -> None:
    if done.wait(LATER):
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return
    with tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False, initial=LATER) as line:
        while not done.wait(_REFRESH):
            line.refresh()
