"""Synchronisation through memory: atomics, and loads and stores with semantics of order.

A release publishes at its address what its warp knows; a relaxed (or volatile) write what the last
fence before it covered. An acquire learns what has been published at its address; a relaxed read
does so at the next fence. Scopes are not judged, and what a cluster learns of another is known to
all its warps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..rules import Rules
from ..state import WarpState


class Flags:
    """Published knowledge, by host address and cluster."""

    def __init__(self, sanitizer: Rules) -> None:
        self._sanitizer = sanitizer
        self._published: dict[int, dict[int, np.ndarray]] = {}

    def publish(self, state: WarpState, addresses: Iterable[int], releases: bool) -> None:
        """A warp writes to flags, or changes them."""
        self._sanitizer.flush(state)
        own = state.frontier if releases else state.published
        news = {**state.cluster.foreign, state.cluster.number: own}
        for address in addresses:
            known = self._published.setdefault(address, {})
            for number, frontier in news.items():
                _merge(known, number, frontier)
        state.advance()

    def learn(self, state: WarpState, addresses: Iterable[int], acquires: bool) -> None:
        """A warp reads flags."""
        if not acquires:
            state.flags_read.update(addresses)
            return
        for address in addresses:
            for number, frontier in self._published.get(address, {}).items():
                if number == state.cluster.number:
                    self._sanitizer.acquire(state, frontier)
                else:
                    _merge(state.cluster.foreign, number, frontier)

    def fence(self, state: WarpState) -> None:
        """A fence after relaxed reads of flags."""
        if state.flags_read:
            self.learn(state, state.flags_read, True)
            state.flags_read.clear()


def _merge(known: dict[int, np.ndarray], number: int, frontier: np.ndarray) -> None:
    old = known.get(number)
    if old is None:
        known[number] = frontier.copy()
    else:
        np.maximum(old, frontier, out=old)
