"""Windows whose bounds are negative, as windows of shorter sequences.

NOTE [negative windows].  Query i sees the keys d - left .. d + right, with d = i + seqlen_k -
seqlen_q.  A negative bound hides a fixed number of rows at the end of a sequence, whatever its
length:

* right = -n: no query sees the last n keys.  Without these keys d is smaller by n, so the right
  bound is 0 and the left one is smaller by n.
* left = -n: the last n queries see no key.  Without these queries d is larger by n, so the left
  bound is 0 and the right one is smaller by n.

Kernels therefore count tiles, steps and tiles of dS with the shorter lengths and bounds of 0 or
more.  Rows are stored by the full lengths: a hidden query gets what a query without any key gets,
and a hidden key has gradients of 0.
"""

from __future__ import annotations

from typing import NamedTuple

#: (left, right), None for unbounded.
Window = tuple[int | None, int | None]

#: More rows than any sequence has, in 32 bits.
ALL_ROWS = (1 << 31) - 1


class Reach(NamedTuple):
    """Window of a call without the rows that it hides: NOTE [negative windows].

    queries, keys: rows hidden at the end of each sequence.  window: bounds of the others, None or 0
    or more.
    """

    queries: int
    keys: int
    window: Window

    @classmethod
    def of(cls, window: Window) -> Reach:
        """Return the reach of a window; an empty one hides all keys."""
        left, right = window
        if left is not None and right is not None and left + right < 0:
            return cls(0, ALL_ROWS, (0, 0))
        queries, keys = (0 if side is None else min(max(-side, 0), ALL_ROWS) for side in window)
        if left is not None:
            left = max(left + queries - keys, 0)
        if right is not None:
            right = max(right + keys - queries, 0)
        return cls(queries, keys, (left, right))

    @property
    def hides_rows(self) -> bool:
        return self.queries > 0 or self.keys > 0

    def lengths(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        return max(seqlen_q - self.queries, 0), max(seqlen_k - self.keys, 0)
