"""Shadow of a memory: for each granule the last write and the reads since.

A granule holds the number of a state, and a state is immutable: (write, reads). What follows a
state by an access is found in native code (`tracking`), which asks Python about pairs of accesses
that are not plainly ordered.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from ctypes import c_uint32, c_uint64
from typing import Any

import numpy as np

from sm100_sim.jit.engine import native_engine
from sm100_sim.native.compiler import module_text

from ..compiled.records import IN_FLIGHT, KINDS, AccessRow, Buffer, ShadowRecord
from ..compiled.tracking import FIRST_STATE, UNTRACKED, touch_cells, touch_rows

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_ROW_BYTES = ctypes.sizeof(AccessRow)


class Access:
    """One access, or many of one instruction at one time.

    agent, clock: it is complete for whoever's frontier has at least `clock` at `agent`; clock is
    None while it is in flight. kind: one of `records.KINDS`. write: whether it writes. warp: number
    of the issuing warp in the cluster; issued: its generic clock then. instruction, cta, index: for
    reports (CTA coordinates and warp index). detail: more for reports. order: of an MMA, tcgen05.cp
    or shift, what decides after which others it executes (its opcode, accumulator and instruction
    descriptor). number: its row among the accesses of its cluster, 0 for none yet.
    """

    __slots__ = (
        "_agent", "_clock", "kind", "write", "warp", "_issued", "instruction", "cta", "index",
        "detail", "order", "number", "_table",
    )  # fmt: skip

    def __init__(self, state: Any, agent: int, clock: int | None, kind: str, write: bool) -> None:
        self._agent = agent
        self._clock = clock
        self.kind = kind
        self.write = write
        self.warp = state.number
        self._issued = state.clock
        self.instruction = state.instruction
        self.cta = state.warp.cta.ctaid
        self.index = state.warp.index
        self.detail = ""
        self.order: tuple = ()
        self.number = 0
        self._table: AccessTable | None = None

    @property
    def agent(self) -> int:
        return self._agent

    @property
    def clock(self) -> int | None:
        return self._clock

    @property
    def issued(self) -> int:
        return self._issued

    def complete(self, agent: int, clock: int) -> None:
        """Set the agent and its clock at which the access completes."""
        self._agent, self._clock = agent, clock
        self._renew()

    def reissue(self, clock: int) -> None:
        """Set the clock of its warp at which the access counts as issued."""
        self._issued = clock
        self._renew()

    def _renew(self) -> None:
        if self._table is not None:
            self._table.write_row(self)


def signal_detail(address: int) -> str:
    """Describe a copy that signals the mbarrier at a shared address, for a report."""
    return (
        f"signals the mbarrier at shared offset {address & 0xFFFFFF:#x} of CTA rank {address >> 24}"
    )


class AccessTable:
    """The accesses of a cluster by number, from FIRST_STATE on.

    issuer: (number of a warp, index of an instruction) -> (CTA coordinates, warp index,
    instruction), for those that native code has made.
    """

    def __init__(self, issuer: Callable[[int, int], tuple[Any, int, Any]]) -> None:
        self.buffer = Buffer(np.dtype((np.void, _ROW_BYTES)), FIRST_STATE)
        self._objects: dict[int, Access] = {}
        self._issuer = issuer

    def add(self, access: Access) -> int:
        """The number of an access."""
        if not access.number:
            self.buffer.reserve(1)
            record = self.buffer.record
            access.number = record.count
            record.count += 1
            access._table = self
            self._objects[access.number] = access
            self.write_row(access)
        return access.number

    def row(self, number: int) -> AccessRow:
        """The row of an access."""
        return AccessRow.from_address(self.buffer.record.data + number * _ROW_BYTES)

    def write_row(self, access: Access) -> None:
        """Tell native code of an access as it is now."""
        row, clock = self.row(access.number), access.clock
        row.agent, row.clock = access.agent, IN_FLIGHT if clock is None else clock
        row.kind, row.write = _KIND_NUMBERS[access.kind], access.write
        row.warp, row.issued = access.warp, access.issued
        row.index = access.instruction.index if access.instruction else -1

    def __getitem__(self, number: int) -> Access:
        access = self._objects.get(number)
        if access is None:
            access = self._objects[number] = self._made_natively(number)
        row = self.row(number)
        access._agent, access._issued = row.agent, row.issued
        access._clock = None if row.clock == IN_FLIGHT else row.clock
        return access

    def _made_natively(self, number: int) -> Access:
        row, access = self.row(number), Access.__new__(Access)
        access.warp, access.kind, access.write = row.warp, KINDS[row.kind], bool(row.write)
        access.cta, access.index, access.instruction = self._issuer(row.warp, row.index)
        access.detail = signal_detail(row.signal) if row.signal else ""
        access.order, access.number, access._table = (), number, self
        return access


Judge = Callable[[Access | int, Access, np.ndarray, str, bool], None]


class Shadow:
    """States of the granules of one memory.

    plane: int32 array of state numbers, (n, m). judge(before, access, frontier, where, reached):
    called for conflicting pairs that native code does not find ordered, `before` an Access or one
    of the special states' numbers; reached: it is known to be complete, and lacks a proxy fence.
    accesses: of the cluster. agents: clocks of agents in a frontier of `size` numbers.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        where: str,
        judge: Judge,
        accesses: AccessTable,
        layout: Any,
        in_order: bool = True,
    ) -> None:
        self.plane = np.zeros(shape, np.int32)
        self.where = where
        self._judge, self._accesses, self._size = judge, accesses, layout.size
        self._states = Buffer(np.int32, FIRST_STATE)
        self.record = ShadowRecord(
            plane=self.plane.ctypes.data,
            states=self._states.address,
            accesses=accesses.buffer.address,
            judge=ctypes.cast(_judge, ctypes.c_void_p).value,
            cells=self.plane.size,
            agents=layout.agents,
            in_order=in_order,
            last=UNTRACKED,
        )
        self.address = ctypes.addressof(self.record)
        self._rows, self._cells, _ = _routines()
        _shadows[self.address] = self

    def touch(self, region: Any, access: Access, frontier: np.ndarray) -> None:
        """Record an access to `plane[region]` and check it against what is there.

        region: a slice or an array of rows, or a pair of them for rows and columns; two arrays are
        the coordinates of granules. Raises IndexError for what lies outside.
        """
        number, width = self._accesses.add(access), self.plane.shape[1]
        rows, columns = region if type(region) is tuple else (region, None)
        who = self.address, number, access.write, frontier.ctypes.data
        if type(rows) is slice and (columns is None or type(columns) is slice):
            first, last, _ = rows.indices(self.plane.shape[0])
            if columns is None:
                inside = self._rows(*who, first * width, max(last - first, 0) * width, 0, 1)
            else:
                low, high, _ = columns.indices(width)
                start, count = first * width + low, max(high - low, 0)
                inside = self._rows(*who, start, count, width, max(last - first, 0))
        else:
            cells, unit = rows, width
            if columns is not None:
                if type(rows) is slice:
                    rows = np.arange(*rows.indices(self.plane.shape[0]))[:, None]
                cells, unit = (rows * width + columns).reshape(-1), 1
            cells = np.ascontiguousarray(cells, np.int64)
            inside = self._cells(*who, cells.ctypes.data, len(cells), unit)
        if not inside:
            raise IndexError(f"{self.where}: an access outside {self.plane.shape} granules")
        raise_failure()

    def update(self, region: Any, access: Access, frontier: np.ndarray) -> None:
        """Record a read and then a write of the same cells by one operation."""
        write, access.write = access.write, False
        self.touch(region, access, frontier)
        access.write = write
        self._accesses.write_row(access)
        self.touch(region, access, frontier)

    def judge(self, before: int, access: int, frontier: int, reached: bool) -> None:
        """Judge a pair for native code: numbers of a special state or access and of an access, the
        address of a frontier, and whether the first is known to be complete."""
        known = np.ctypeslib.as_array((ctypes.c_int32 * self._size).from_address(frontier))
        first = before if before < FIRST_STATE else self._accesses[before]
        self._judge(first, self._accesses[access], known, self.where, reached)


_shadows: weakref.WeakValueDictionary[int, Shadow] = weakref.WeakValueDictionary()
#: An exception cannot cross native code: it is raised behind it.
_failures: list[BaseException] = []


@ctypes.CFUNCTYPE(None, c_uint64, c_uint32, c_uint32, c_uint64, c_uint32)
def _judge(shadow: int, before: int, access: int, frontier: int, reached: int) -> None:
    try:
        _shadows[shadow].judge(before, access, frontier, bool(reached))
    except BaseException as error:
        keep_failure(error)


def keep_failure(error: BaseException) -> None:
    """An error in what native code has called."""
    _failures.append(error)


def raise_failure() -> None:
    """Raise the first error in what native code has called."""
    if _failures:
        error = _failures[0]
        _failures.clear()
        raise error


@functools.cache
def _routines() -> tuple[Callable[..., int], Callable[..., int], Any]:
    """touch_rows, touch_cells and what holds their code."""
    engine = native_engine(module_text((touch_rows, touch_cells)))
    whole = c_uint64
    who = c_uint32, whole, c_uint32, c_uint32, whole
    return (
        ctypes.CFUNCTYPE(*who, whole, whole, whole, whole)(
            engine.get_function_address("touch_rows")
        ),
        ctypes.CFUNCTYPE(*who, whole, whole, whole)(engine.get_function_address("touch_cells")),
        engine,
    )
