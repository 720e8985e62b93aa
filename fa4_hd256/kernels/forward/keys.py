"""Keys and values of a forward kernel: where the rows of a KV tile lie, and their loads.

A kernel gets a class of these with its other parts (`context.KernelParts`): for keys in pages
that of `pages`, for pages of any size that of `gathered`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import cutlass.cute as cute
from cutlass import Int32

from ..operands import LoadTarget, load_tile
from ..rows.sequences import SequenceTensors, TilePlace
from .context import ForwardContext as Context

#: A KV tile: its number, or where its rows lie, such as a `PagedTile`.
KvTile: TypeAlias = Any


def load_keys(
    source: Any, smem: cute.Tensor, place: TilePlace, target: LoadTarget, multicast: Any = None
) -> None:
    """Load rows of K or V.  place: (`KeySource.rows`, first row, column block, head)."""
    load_tile(source, smem, place, *target, multicast=multicast)


class KeySource:
    """Keys whose rows follow one another; a KV tile is its number. load: as `load_keys`."""

    load: Callable[..., None] = staticmethod(load_keys)

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.block_kv: int = kernel.config.block_kv

    def count(self, sequences: SequenceTensors, rows: Any) -> Any:
        """Return the most keys of a sequence.  rows: of K, or of a page of it."""
        return rows

    def box_rows(self, rows: int) -> int:
        return rows

    def tensor(self, name: str, view: cute.Tensor, copy: tuple[Any, int, int]) -> Any:
        return self.kernel.tma_tensor(name, view, copy)

    def first(self, context: Context, work: Any, visibility: Any, first_query: Any) -> KvTile:
        """Return the KV tile that is worked on first, the last one that is seen.  first_query: of
        the tile."""
        return visibility.last_tile(first_query, self.kernel.tile_queries)

    def next(self, kv_tile: KvTile) -> Any:
        return kv_tile - 1

    def first_row(self, kv_tile: KvTile) -> Int32 | int:
        return kv_tile * self.block_kv

    def rows(self, context: Context, work: Any, kv_tile: KvTile) -> Any:
        return context.key(work)


class ListedKeys(KeySource):
    """Keys whose KV tiles a block mask lists; a KV tile is a `ListedTile`."""

    def first(self, context: Context, work: Any, visibility: Any, first_query: Any) -> Any:
        return self.kernel.step_list(context, work).first()

    def next(self, kv_tile: KvTile) -> Any:
        return kv_tile.next()

    def first_row(self, kv_tile: KvTile) -> Int32 | int:
        return kv_tile.number * self.block_kv
