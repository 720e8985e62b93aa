"""Schedulers whose tiles are fixed at launch."""

from __future__ import annotations

from typing import Any, ClassVar

import cutlass
from cutlass import Int32

from .order import TileOrder, TileProblem, _minimum
from .protocol import CLUSTER_SIZE, WorkTile, cluster_index, make_work_tile

__all__ = ["StaticPersistentScheduler", "StaticSingleTileScheduler"]


class _StaticScheduler:
    """Base of both static schedulers: the roles exchange nothing."""

    needs_scheduler_warp: ClassVar[bool] = False
    cancels_clusters: ClassVar[bool] = False
    cluster_size: ClassVar[int] = CLUSTER_SIZE
    smem_bytes: ClassVar[int] = 0

    def __init__(self, order: TileOrder, index: Int32, stride: Int32) -> None:
        self.order = order
        self.index = index
        self.stride = stride

    @classmethod
    def setup(cls, allocator: Any, consumer_warps: int, counter: Any = None) -> None:
        """Nothing to allocate."""
        return None

    @classmethod
    def create(cls, order: TileOrder, channel: None) -> Any:
        """The scheduler of one warp; `channel` is None."""
        index, stride = cluster_index(cls.cluster_size)
        return cls(order, Int32(index), Int32(stride))

    def initial_work(self) -> WorkTile:
        """Tile number `cluster index`."""
        return make_work_tile(self.index, self.index < self.order.num_tiles, self.order)

    def want_next_work(self) -> None:
        """Nobody to tell: the next tile is known."""

    def prefetch_next_work(self) -> None:
        """Nothing to prefetch: the next tile is known."""

    def producer_tail(self) -> None:
        """Nothing to wait for: nothing is exchanged between warps."""

    def __extract_mlir_values__(self) -> list:
        return cutlass.extract_mlir_values(self.index)

    def __new_from_mlir_values__(self, values: list) -> Any:
        index = cutlass.new_from_mlir_values(self.index, values)
        return type(self)(self.order, index, self.stride)


class StaticPersistentScheduler(_StaticScheduler):
    """Cluster c works on the tiles c, c + C, c + 2C, ... of C resident clusters."""

    @classmethod
    def grid_shape(cls, problem: TileProblem, max_active_clusters: Any) -> tuple[Any, int, int]:
        """Return the grid: the clusters that run at once, at most one per tile."""
        return _minimum(problem.num_tiles, max_active_clusters) * cls.cluster_size, 1, 1

    def advance_to_next_work(self) -> WorkTile:
        """The tile one stride on."""
        self.index = self.index + self.stride
        return make_work_tile(self.index, self.index < self.order.num_tiles, self.order)


class StaticSingleTileScheduler(_StaticScheduler):
    """One tile a cluster; the hardware's own block order balances the load."""

    @classmethod
    def grid_shape(cls, problem: TileProblem, max_active_clusters: Any) -> tuple[Any, int, int]:
        """One cluster per tile; `max_active_clusters` is not used."""
        return problem.num_tiles * cls.cluster_size, 1, 1

    def advance_to_next_work(self) -> WorkTile:
        """No further tile."""
        self.index = self.order.num_tiles
        return make_work_tile(Int32(0), self.index < self.order.num_tiles, self.order)
