"""Tile schedulers for persistent kernels: one protocol, static and dynamic implementations.

`order` says which tile comes when, `static`, `clc` and `counter` who gets it, `choice` which of
them a call uses; `protocol` is what a kernel programs against.
"""

from .choice import BACKWARD_PREFERS_CLC, clc_requested, prefers_clc, scheduler_class
from .clc import ClcScheduler
from .coordinates import tile_coordinates
from .counter import CounterScheduler
from .order import PackedBlocks, TileOrder, TileProblem, section_heads_for
from .protocol import CLUSTER_SIZE, TileScheduler, WorkTile, of_clusters
from .static import StaticPersistentScheduler

__all__ = [
    "BACKWARD_PREFERS_CLC",
    "CLUSTER_SIZE",
    "ClcScheduler",
    "CounterScheduler",
    "PackedBlocks",
    "StaticPersistentScheduler",
    "TileOrder",
    "TileProblem",
    "TileScheduler",
    "WorkTile",
    "clc_requested",
    "of_clusters",
    "prefers_clc",
    "scheduler_class",
    "section_heads_for",
    "tile_coordinates",
]
