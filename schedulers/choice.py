"""Choose the scheduler of a call: `use_clc=`, else the environment variable FA_CLC, else a rule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .protocol import CLUSTER_SIZE, of_clusters

VARIABLE = "FA_CLC"

#: The default of every backward. Where tiles are equal, too, CTA pairs with a share of their own
#: fall apart by their speeds, and what tiles of dK and of dQ read of dS at the same time they then
#: read from HBM twice (lab/notes.md has it measured).
BACKWARD_PREFERS_CLC = True

#: Tiles of the grid for each one that holds rows, up to which the dynamic scheduler is preferred.
MOST_EMPTY = 6


def prefers_clc(
    bounded: bool, rows: int, capacity: int, shared: bool = False, most_empty: int = MOST_EMPTY
) -> bool:
    """The default: the dynamic scheduler where tiles differ in length and most of them are there,
    and wherever SMs are shared.

    bounded: whether the mask bounds the keys on either side, so that tiles differ; so they do where
    sequences have fewer rows than the longest one. rows, capacity: query rows of all sequences, and
    those that the grid has room for (`grid_rows`): a static scheduler counts past empty tiles, and
    the dynamic one requests each. shared: kernels of other streams may hold SMs meanwhile. Of a
    static grid the clusters that then find no place start when others have done all their tiles,
    which takes up to twice as long; the dynamic scheduler gives their tiles to those that run.
    most_empty: tiles of the grid for each one that holds rows, up to which the dynamic scheduler is
    preferred. By the timing model for a B200 (lab/notes.md); nobody has measured it.
    """
    return shared or ((bounded or rows < capacity) and rows * most_empty >= capacity)


def grid_rows(rows: int, sequences: int, longest: int, block: int) -> int:
    """Query rows that the forward's grid has room for, of so many in packed sequences: as many
    blocks for each sequence as the longest one has, or all in a row (`order.PackedBlocks`). block:
    rows of the largest tile."""
    return min(sequences * longest, rows + sequences * block)


def clc_requested(
    use_clc: bool | None = None, default: bool = False, environment: Mapping[str, str] | None = None
) -> bool:
    """Return True if a call gets the dynamic scheduler: cluster launch control on Blackwell, a
    counter in memory on Hopper.

    `use_clc` decides where it is True or False; else FA_CLC where it is set (1 = CLC, 0 = static);
    else `default`. Read it once per call and make the result part of the compile key.

    Raises TypeError for another type of `use_clc`, ValueError for another value of FA_CLC.
    """
    if use_clc is not None:
        if not isinstance(use_clc, bool):
            kind = type(use_clc).__name__
            raise TypeError(f"use_clc must be True, False or None, got a value of type {kind}")
        return use_clc
    value = (os.environ if environment is None else environment).get(VARIABLE)
    if value not in (None, "0", "1"):
        raise ValueError(
            f"{VARIABLE} is {value!r}; accepted are 0 (static tile scheduler) and 1 (dynamic "
            "scheduler by cluster launch control). Unset it or set one of the two"
        )
    return default if value is None else value == "1"


def scheduler_class(use_clc: bool, cluster_size: int = CLUSTER_SIZE, counts: bool = False) -> Any:
    """The scheduler class for a resolved choice (see `clc_requested`) and clusters of so many CTAs.
    counts: the dynamic one is that by a counter in global memory, for GPUs without cluster launch
    control."""
    if not use_clc:
        from .static import StaticPersistentScheduler

        return of_clusters(StaticPersistentScheduler, cluster_size)
    if counts:
        from .counter import CounterScheduler

        return of_clusters(CounterScheduler, cluster_size)
    from .clc import ClcScheduler

    return of_clusters(ClcScheduler, cluster_size)
