"""The scheduler whose tiles are fixed at launch."""

from __future__ import annotations

from typing import Any, ClassVar

from cutlass import Int32

from .carried import Carried
from .coordinates import make_work_tile
from .order import TileOrder, TileProblem, minimum
from .protocol import CLUSTER_SIZE, WorkTile, cluster_index


class StaticPersistentScheduler(Carried):
    """Cluster c works on the tiles c, c + C, c + 2C, ... of C resident clusters; the roles exchange
    nothing."""

    CARRIED = ("index",)
    needs_scheduler_warp: ClassVar[bool] = False
    cancels_clusters: ClassVar[bool] = False
    cluster_size: ClassVar[int] = CLUSTER_SIZE
    smem_bytes: ClassVar[int] = 0

    def __init__(self, order: TileOrder, index: Int32, stride: Int32) -> None:
        self.order = order
        self.index = index
        self.stride = stride

    @classmethod
    def grid_shape(cls, problem: TileProblem, max_active_clusters: Any) -> tuple[Any, int, int]:
        """Return the grid: the clusters that run at once, at most one per tile."""
        return minimum(problem.num_tiles, max_active_clusters) * cls.cluster_size, 1, 1

    @classmethod
    def setup(cls, allocator: Any, consumer_warps: int, counter: Any = None) -> None:
        """Nothing to allocate."""

    @classmethod
    def create(cls, order: TileOrder, channel: None) -> Any:
        index, stride = cluster_index(cls.cluster_size)
        return cls(order, Int32(index), Int32(stride))

    def initial_work(self) -> WorkTile:
        return make_work_tile(self.index, self.index < self.order.num_tiles, self.order)

    def advance_to_next_work(self) -> WorkTile:
        self.index = self.index + self.stride
        return make_work_tile(self.index, self.index < self.order.num_tiles, self.order)

    def want_next_work(self) -> None:
        """Nobody to tell: the next tile is known."""

    def prefetch_next_work(self) -> None:
        """Nothing to prefetch."""

    def producer_tail(self) -> None:
        """Nothing to wait for."""
