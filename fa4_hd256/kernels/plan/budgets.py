"""Registers, shared memory and tensor memory of a CTA: who has what, as data that checks itself.

`check_fields` checks the kinds of a configuration's fields before anything is derived from them.
"""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints

from ...words import one_of, shown
from ..limits import SMEM_CAPACITY, SWIZZLE_ALIGNMENT, WARP_SIZE
from .edges import BARRIER_BYTES, EdgeTable

# Tensor memory of one SM: 128 lanes of 512 32-bit columns (PTX ISA 9.7.16.1).
TMEM_COLUMNS = 512

REGISTERS_PER_SM = 65_536
REGISTER_GRANULE = 8  # registers per thread are allotted in multiples of this
WARPS_PER_WARPGROUP = 4


@dataclass(frozen=True)
class RegisterPlan:
    """Registers a thread of each warpgroup once its role has begun, in the order of the warps.

    budgets: (roles, registers per thread) of each warpgroup. setmaxnreg (PTX ISA 9.7.20.5) moves
    registers between the warpgroups of a CTA and only those that the CTA was launched with: what
    the SM's register file has left over belongs to nobody, and a warpgroup that requests more than
    the others give back waits forever (measured on an H200, docs/silicon.md).  Raises ValueError
    for budgets that the instruction rejects or the launch cannot serve.
    """

    budgets: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for roles, budget in self.budgets:
            if budget % REGISTER_GRANULE or not 24 <= budget <= 256:
                raise ValueError(
                    f"register budget {budget} of {roles}; accepted are multiples of 8 from 24 to "
                    "256"
                )
        if self.needed > self.launched:
            named = ", ".join(f"{roles} {budget}" for roles, budget in self.budgets)
            raise ValueError(
                f"register budgets {named}: the CTA's {self.num_threads} threads would need "
                f"{self.needed} registers, but are launched with {self.launched} "
                f"({self.at_launch} each), and setmaxnreg moves only those; lower a budget"
            )

    @property
    def num_threads(self) -> int:
        return len(self.budgets) * WARPS_PER_WARPGROUP * WARP_SIZE

    @property
    def at_launch(self) -> int:
        return REGISTERS_PER_SM // self.num_threads // REGISTER_GRANULE * REGISTER_GRANULE

    @property
    def launched(self) -> int:
        return self.num_threads * self.at_launch

    @property
    def needed(self) -> int:
        return sum(budget for _, budget in self.budgets) * WARPS_PER_WARPGROUP * WARP_SIZE


class WarpPlan:
    """Base of the plans of a kernel's warps: frozen dataclasses with a field for each role, its
    warps, None where there is no such role, and a field `registers_...` for each budget. Raises
    ValueError for budgets that the launch cannot serve (`RegisterPlan`)."""

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.registers

    @property
    def warpgroups(self) -> tuple[tuple[str, str], ...]:
        """(roles as they are named, the budget's field) of each warpgroup, in order; a plan has its
        own."""
        raise NotImplementedError

    @property
    def registers(self) -> RegisterPlan:
        return RegisterPlan(
            tuple((roles, getattr(self, budget)) for roles, budget in self.warpgroups)
        )

    @property
    def num_warps(self) -> int:
        return len(self.warpgroups) * WARPS_PER_WARPGROUP

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP_SIZE


@dataclass(frozen=True)
class SmemRegion:
    """One buffer: `stages` times `stage_bytes`; `note` says what else uses it, and when."""

    name: str
    stages: int
    stage_bytes: int
    alignment: int
    note: str = ""

    @property
    def num_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @classmethod
    def operand(cls, name: str, stages: int, stage_bytes: int, note: str) -> SmemRegion:
        return cls(name, stages, stage_bytes, SWIZZLE_ALIGNMENT, note)


def common_regions(edges: EdgeTable, scheduler_bytes: int) -> tuple[SmemRegion, ...]:
    """Return the regions that every kernel has at the end of its shared memory."""
    note = "of the dynamic scheduler; allocated by its set-up"
    return (
        SmemRegion("barriers", edges.num_barriers, BARRIER_BYTES, 8, "mbarriers"),
        SmemRegion("scheduler", 1, scheduler_bytes, 16, note),
    )


@dataclass(frozen=True)
class SmemPlan:
    """The regions of one CTA, in order; ValueError where they do not fit."""

    regions: tuple[SmemRegion, ...]

    def __post_init__(self) -> None:
        if self.num_bytes > SMEM_CAPACITY:
            each = ", ".join(f"{region.name} {region.num_bytes}" for region in self.regions)
            raise ValueError(f"shared memory: {self.num_bytes} bytes of {SMEM_CAPACITY}: {each}")

    def offsets(self) -> dict[str, int]:
        offsets, end = {}, 0
        for region in self.regions:
            start = -(-end // region.alignment) * region.alignment
            offsets[region.name] = start
            end = start + region.num_bytes
        return offsets

    @property
    def num_bytes(self) -> int:
        last = self.regions[-1]
        return self.offsets()[last.name] + last.num_bytes


@dataclass(frozen=True)
class TmemRegion:
    """Columns [start, start + columns) of all 128 lanes; `alias_of` names a region it lies over."""

    name: str
    start: int
    columns: int
    alias_of: str | None = None
    note: str = ""


@dataclass(frozen=True)
class TmemPlan:
    """The regions of tensor memory; ValueError for overlaps without an alias, or no room."""

    regions: tuple[TmemRegion, ...]

    def __post_init__(self) -> None:
        owner: dict[int, str] = {}
        for region in self.regions:
            columns = range(region.start, region.start + region.columns)
            if region.start < 0 or columns.stop > TMEM_COLUMNS:
                raise ValueError(f"{region.name} leaves the {TMEM_COLUMNS} columns")
            for column in columns:
                if region.alias_of is None and column in owner:
                    raise ValueError(f"{region.name} overlaps {owner[column]} at column {column}")
                if region.alias_of is not None and owner.get(column) != region.alias_of:
                    raise ValueError(f"{region.name} does not lie within {region.alias_of}")
                owner.setdefault(column, region.name)

    def __getitem__(self, name: str) -> TmemRegion:
        return next(region for region in self.regions if region.name == name)

    def buffers(self, name: str, count: int) -> tuple[int, int]:
        """Return (first column, distance of the next one) of so many buffers: the region of that
        name, or the regions of that name with a number, from 0 on. Raises ValueError where there
        are not so many, or they are not evenly spaced."""
        names = [name] if count == 1 and self._has(name) else [f"{name}{i}" for i in range(count)]
        missing = ", ".join(name for name in names if not self._has(name))
        if missing:
            raise ValueError(f"{name} has {count} buffers; the TMEM plan lacks {missing}")
        starts = [self[name].start for name in names]
        distances = {after - before for before, after in zip(starts, starts[1:])} or {0}
        if len(distances) > 1:
            raise ValueError(f"{', '.join(names)} are not evenly spaced: columns {starts}")
        return starts[0], distances.pop()

    def _has(self, name: str) -> bool:
        return any(region.name == name for region in self.regions)

    @property
    def allocated_columns(self) -> int:
        """Return the columns of tcgen05.alloc: a power of two from 32 to 512 (PTX ISA
        9.7.16.7.1)."""
        end = max(region.start + region.columns for region in self.regions)
        return max(32, 1 << (end - 1).bit_length())


def check_budgets(plan: Any) -> None:
    for name in ("smem", "tmem", "edges"):
        if hasattr(type(plan), name):
            getattr(plan, name)


_ACCEPTED = {int: "an int", float: "a number", bool: "True or False", str: "a str"}


def check_fields(config: Any) -> None:
    """Raise TypeError for a field of a frozen dataclass whose value is not of the field's type.
    Numbers of another type pass where they are equal to one of it: 3.0 and NumPy's 3 for an int,
    but not True."""
    kind: Any = type(config)
    hints = _hints(kind)
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _fits(hint, value):
            accepted, given = _in_words(hint), shown(value)
            if given == accepted:
                accepted, given = map(_spelled, (hint, type(value)))
            raise TypeError(f"{field.name} is {given}; accepted: {accepted}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(hint)[0], one) for one in value)
    if get_args(hint):
        return any(_fits(kind, value) for kind in get_args(hint))
    if hint is bool:
        return isinstance(value, numbers.Real) and value in (0, 1)
    if hint in (int, float):
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_number and (hint is float or math.isfinite(value) and int(value) == value)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a tuple, each {_in_words(get_args(hint)[0])}"
    if get_args(hint):
        return " or ".join(map(_in_words, get_args(hint)))
    if hint is type(None):
        return "None"
    return _ACCEPTED.get(hint) or one_of(hint)


def _spelled(kind: type) -> str:
    """The class with its module: classes of several architectures have the same name."""
    return f"a {kind.__module__}.{kind.__name__}"
