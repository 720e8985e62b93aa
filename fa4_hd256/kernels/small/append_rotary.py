"""Rotary embedding, in the kernel that writes new rows to a cache: of the new rows of K, and of the
queries beside them.

The first 2 * columns elements of a row are pairs, of neighbours (2i and 2i + 1) or of halves (i and
i + columns), each rotated by the angle whose cosine and sine the tables hold for the row's position
and i. As columns are a multiple of 8, a lane's 8 elements are rotated or not as one, and the other
halves of their pairs are those of one other lane. A row whose position the tables have not becomes
NaN there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..problem_class import RotaryClass
from ..rows.views import LANE_COLUMNS

__all__ = ["RotaryRows", "RotaryTables"]


class RotaryTables(NamedTuple):
    """cos, sin: (positions, columns). begins: (batch,) int32, positions of the sequences' first
    rows. queries, rotated: (batch, rows, heads, 256), packed ones with a batch of 1; the second is
    the kernel's own. offsets: (batch + 1,) int32 of packed queries, None for others."""

    cos: Any
    sin: Any
    begins: Any
    queries: Any
    rotated: Any
    offsets: Any


class RotaryRows:
    """Rotates rows; each lane of a warp has 8 consecutive elements."""

    def __init__(self, rotary_class: RotaryClass) -> None:
        self.rotary_class = rotary_class

    def turned(self, values: cute.Tensor, tables: RotaryTables, position: Int32) -> cute.Tensor:
        """A row at a position, computed in float32, typed as before. For a whole warp."""
        if self.rotary_class.interleaved:
            return self._neighbours(values, tables, position)
        return self._halves(values, tables, position)

    def _neighbours(
        self, values: cute.Tensor, tables: RotaryTables, position: Int32
    ) -> cute.Tensor:
        pairs = LANE_COLUMNS // 2
        begin = cute.arch.lane_idx() * pairs
        is_turned = begin < cute.size(tables.cos, mode=[1])
        cos, sin = self._angles(tables, position, cutlass.select_(is_turned, begin, 0), pairs)
        own = [Float32(values[i]) for i in range(LANE_COLUMNS)]
        turned = []
        for i in range(pairs):
            one, two = own[2 * i], own[2 * i + 1]
            turned += [one * cos[i] - two * sin[i], two * cos[i] + one * sin[i]]
        return self._chosen(is_turned, turned, own, values.element_type)

    def _halves(self, values: cute.Tensor, tables: RotaryTables, position: Int32) -> cute.Tensor:
        lane, lanes = cute.arch.lane_idx(), cute.size(tables.cos, mode=[1]) // LANE_COLUMNS
        is_first, is_turned = lane < lanes, lane < 2 * lanes
        of_half = cutlass.select_(is_first, lane, lane - lanes)
        partner = cutlass.select_(is_first, lane + lanes, of_half)
        partner = cutlass.select_(is_turned, partner, lane)
        begin = cutlass.select_(is_turned, of_half, 0) * LANE_COLUMNS
        cos, sin = self._angles(tables, position, begin, LANE_COLUMNS)
        words = cute.recast_tensor(values, Int32)
        received = cute.make_rmem_tensor_like(words)
        for word in range(cute.size(words)):
            received[word] = cute.arch.shuffle_sync(words[word], partner)
        others = cute.recast_tensor(received, values.element_type)
        own = [Float32(values[i]) for i in range(LANE_COLUMNS)]
        turned = []
        for i in range(LANE_COLUMNS):
            # The second of a pair has the first one's part added, the first the second's taken off.
            signed = cutlass.select_(is_first, -sin[i], sin[i])
            turned.append(own[i] * cos[i] + Float32(others[i]) * signed)
        return self._chosen(is_turned, turned, own, values.element_type)

    def _angles(
        self, tables: RotaryTables, position: Int32, begin: Int32, count: int
    ) -> tuple[list[Float32], list[Float32]]:
        """Cosines and sines of `count` columns, NaN at a position that the tables have not."""
        is_known = (position >= 0) & (position < cute.size(tables.cos, mode=[0]))
        row = cutlass.select_(is_known, position, Int32(0))
        found = []
        for table in (tables.cos, tables.sin):
            loaded = [Float32(table[row, begin + i]) for i in range(count)]
            unknown = Float32(math.nan)
            found.append([cutlass.select_(is_known, value, unknown) for value in loaded])
        return found[0], found[1]

    def _chosen(
        self, is_turned: Any, turned: list[Float32], own: list[Float32], element_type: Any
    ) -> cute.Tensor:
        """Elements of a lane whose columns are rotated, or not."""
        rows = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        for i in range(LANE_COLUMNS):
            rows[i] = cutlass.select_(is_turned, turned[i], own[i])
        found = cute.make_rmem_tensor(LANE_COLUMNS, element_type)
        found.store(rows.load().to(element_type))
        return found
