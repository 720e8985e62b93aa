"""The model that `python -m bench training` trains: its sizes, without what trains it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Shape of the model and its batches. Every `full_every`-th layer sees all keys before a query,
    the others `window` to its left; 0: no layer has a window."""

    layers: int = 6
    hidden: int = 512
    heads: int = 4
    heads_kv: int = 2
    vocabulary: int = 512
    window: int = 255
    full_every: int = 6
    batch: int = 8
    seqlen: int = 1024

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer, None where it sees all keys before a query."""
        return None if not self.window or (layer + 1) % self.full_every == 0 else self.window
