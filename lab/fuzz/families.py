"""All families of programs, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from .cluster import cluster
from .control import divergence, warp
from .copies import copies
from .hangs import HANGING
from .mbarriers import arrivals, sequences
from .memory import memory
from .program import Program
from .shared import shared
from .straight import arithmetic

FAMILIES: dict[str, Callable[[int], Program]] = {
    "arithmetic": arithmetic, "divergence": divergence, "warp": warp, "memory": memory,
    "shared": shared, "cluster": cluster, "copies": copies,
    "sequences": sequences, "arrivals": arrivals, **HANGING,
}  # fmt: skip


def split(name: str) -> tuple[str, int]:
    """Family and seed of the name FAMILY/SEED. Raises ValueError for a name of another form."""
    family, _, seed = name.partition("/")
    if family not in FAMILIES or not seed.isdecimal():
        raise ValueError(
            f"{name!r} names no program; accepted is FAMILY/SEED, where FAMILY is one of "
            f"{', '.join(FAMILIES)} and SEED a whole number"
        )
    return family, int(seed)


@lru_cache(maxsize=64)
def program(name: str) -> Program:
    """The program of a name. Raises ValueError as `split` does."""
    family, seed = split(name)
    return FAMILIES[family](seed)
