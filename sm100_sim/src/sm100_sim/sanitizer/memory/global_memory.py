"""Global memory: who wrote each byte pair, and whether those who read or overwrite it know that."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from sm100_sim.isa.copies.tiles import window

from .. import findings
from ..compiled.records import KINDS, Buffer, GlobalRecord, RangeRecord, WriterRow
from ..findings import Finding, place
from ..rules import Rules
from ..state import WarpState
from .shadow import Access

#: Bytes of global memory in a granule: the smallest element that kernels store here.
GRANULE = 2
_ROW_BYTES = ctypes.sizeof(WriterRow)


class Writer(NamedTuple):
    """A write, and the number of the cluster that made it."""

    access: Access
    cluster: int


class Writers:
    """The writes of a launch by number, from 1 on; native code makes some (`draining`)."""

    def __init__(self, sanitizer: Rules) -> None:
        self._sanitizer = sanitizer
        self.buffer = Buffer(np.dtype((np.void, _ROW_BYTES)), 1)
        self._known: dict[int, Writer] = {}
        self._last: tuple = ()

    def add(self, access: Access, cluster: int) -> int:
        """The number of a write that a cluster makes; the same for the parts of one."""
        record = self.buffer.record
        part_of = cluster, access.agent, access.clock, access.instruction.index
        if self._last == (record.count, part_of):
            return record.count - 1
        self.buffer.reserve(1)
        number, row = record.count, self._row(record.count)
        record.count += 1
        row.cluster, row.agent, row.clock, row.index = part_of
        row.warp, row.issued, row.kind = access.warp, access.issued, KINDS.index(access.kind)
        row.rank = access.warp // self._sanitizer.layout.warps
        self._known[number] = Writer(access, cluster)
        self._last = record.count, part_of
        return number

    def _row(self, number: int) -> WriterRow:
        return WriterRow.from_address(self.buffer.record.data + number * _ROW_BYTES)

    def __getitem__(self, number: int) -> Writer:
        if number not in self._known:
            self._known[number] = self._made_natively(self._row(number))
        return self._known[number]

    def _made_natively(self, row: WriterRow) -> Writer:
        machine, access = self._sanitizer.machine, Access.__new__(Access)
        access.warp, access.kind, access.write = row.warp, KINDS[row.kind], True
        access.cta = machine.ctaid(row.cluster, row.rank)
        access.index = row.warp % self._sanitizer.layout.warps
        access.instruction = machine.compiled.instructions[row.index]
        access.detail, access.order, access.number, access._table = "", (), 0, None
        access._agent, access._clock, access._issued = row.agent, row.clock, row.issued
        return Writer(access, row.cluster)


class GlobalWrites:
    """Writes by plain stores and bulk stores; atomics and reductions are free.

    A granule holds the number of its last write in `writers`, 0 for none. Planes of granules exist
    for the ranges that have been written. address: of what native code sees of it.
    """

    def __init__(self, sanitizer: Rules, memory: Any) -> None:
        self._sanitizer = sanitizer
        self._memory = memory
        table = memory.table[:, :2]
        self._starts, self._ends = (np.ascontiguousarray(side) for side in table.T)
        self._planes: dict[int, np.ndarray] = {}
        self.writers = Writers(sanitizer)
        self._ranges = (RangeRecord * len(table))(*(RangeRecord(*r) for r in table.tolist()))
        self._record = GlobalRecord(
            ctypes.addressof(self._ranges), len(table), self.writers.buffer.address
        )
        self.address = ctypes.addressof(self._record)

    def guard(self) -> None:
        """Let Python check all stores from now on."""
        self._record.guarded = 1

    # ------------------------------------------------------------ where

    def _range(self, address: int) -> int:
        """Index of the range that holds an address, -1 for none."""
        index = int(np.searchsorted(self._starts, np.uint64(address), "right")) - 1
        return index if index >= 0 and address < int(self._ends[index]) else -1

    def _plane(self, address: int, create: bool) -> tuple[np.ndarray, int] | None:
        """Return (plane, start) of the range that holds an address; None if there is nothing to
        see."""
        index = self._range(address)
        if index < 0:
            return None
        plane = self._planes.get(index)
        if plane is None:
            if not create:
                return None
            count = -(-int(self._ends[index] - self._starts[index]) // GRANULE)
            plane = self._planes[index] = np.zeros(count + 1, np.int32)
            self._ranges[index].plane = plane.ctypes.data
            self._sanitizer.follow_writes()
        return plane, int(self._starts[index])

    def _by_range(self, addresses: np.ndarray) -> list[np.ndarray]:
        """Host addresses, those of one range together."""
        places = np.searchsorted(self._starts, addresses, "right")
        if (places == places[0]).all():
            return [addresses]
        return [addresses[places == place] for place in np.unique(places)]

    def _cells(self, addresses: np.ndarray, width: int, create: bool) -> tuple | None:
        """Return (plane, granules) of accesses of `width` bytes at host addresses."""
        found = self._plane(int(addresses[0]), create)
        if found is None:
            return None
        plane, low = found
        cells = (addresses - np.uint64(low)).astype(np.int64) // GRANULE
        if width > GRANULE:
            cells = (cells[:, None] + np.arange(width // GRANULE)).reshape(-1)
        if int(cells.max()) >= len(plane) or int(cells.min()) < 0:
            return None
        return plane, cells

    def _region(self, where: tuple, create: bool) -> tuple | None:
        """Return (plane or a view of it, index) of (tensor map, coordinates) or (start, bytes)."""
        if isinstance(where[0], int):
            start, size = where
            found = self._plane(start, create)
            if found is None:
                return None
            first = (start - found[1]) // GRANULE
            return found[0], slice(first, first + -(-size // GRANULE))
        inside = window(*where)
        found = None if inside is None else self._plane(inside.start, create)
        if found is None:
            return None
        plane, low = found
        if any(s % GRANULE for s in (*inside.strides[:-1], inside.shape[-1], inside.start - low)):
            return None
        view = np.lib.stride_tricks.as_strided(
            plane[(inside.start - low) // GRANULE :],
            (*inside.shape[:-1], inside.shape[-1] // GRANULE),
            (*(4 * s // GRANULE for s in inside.strides[:-1]), 4),
        )
        return view, ...

    def has_plane(self, address: int) -> bool:
        """Return True if the launch has written to the range that holds an address."""
        return self._range(address) in self._planes

    def numbers(self, start: int, size: int) -> list[int]:
        """Numbers of the writes that have left something in [start, start + size)."""
        found = self._region((start, size), False)
        return [] if found is None else [n for n in np.unique(found[0][found[1]]).tolist() if n]

    def written_here(self, address: int) -> bool:
        """Return True if an address is in memory that the launch may write."""
        return self._range(address) >= 0

    # ------------------------------------------------------------ accesses

    def store(self, state: WarpState, addresses: np.ndarray, width: int) -> None:
        """st.global of `width` bytes at host addresses."""
        self._sanitizer.maps.changed(state, addresses, width)
        access = Access(state, state.generic, state.clock, "generic", True)
        for some in self._by_range(addresses):
            found = self._cells(some, width, True)
            if found is not None:
                self._mark(state, found[0], found[1], access)

    def copy(self, state: WarpState, stored: tuple, clock: int) -> None:
        """A bulk store with that clock: (tensor map, coordinates) or (start, bytes)."""
        found = self._region(stored, True)
        if found is not None:
            access = Access(state, state.bulk, clock, "bulk", True)
            self._mark(state, found[0], found[1], access)

    def load(self, state: WarpState, addresses: np.ndarray, width: int) -> None:
        """ld.global, or reads of cp.async, of `width` bytes at host addresses."""
        if not self._planes:
            return
        access = Access(state, state.generic, state.clock, "generic", False)
        for some in self._by_range(addresses):
            found = self._cells(some, width, False)
            if found is not None:
                self._read(state, found[0], found[1], access)

    def fetch(self, state: WarpState, loaded: tuple) -> None:
        """A bulk or tensor copy reads (start, bytes) or (tensor map, coordinates)."""
        found = self._region(loaded, False) if self._planes else None
        if found is not None:
            self._read(state, found[0], found[1], Access(state, -1, None, "tma", False))

    def _mark(self, state: WarpState, plane: np.ndarray, cells: Any, access: Access) -> None:
        number = self.writers.add(access, state.cluster.number)
        before = plane[cells]
        if before.any():
            self._overwritten(np.unique(before).tolist(), access)
        plane[cells] = number

    def _overwritten(self, numbers: list[int], access: Access) -> None:
        for number in filter(None, numbers):
            before = self.writers[number].access
            if before.cta != access.cta:
                text = (
                    "two CTAs write one element of global memory: "
                    f"{place(before.instruction, before.cta, before.index)}, then "
                    f"{place(access.instruction, access.cta, access.index)}; each output element "
                    "belongs to one CTA, or is combined by an atomic, or by a CTA that has read it"
                )
                pair = before, access
                key = (before.instruction.index, access.instruction.index)
                self._sanitizer.report(
                    Finding(
                        "two-writers",
                        text,
                        findings.sites(*pair),
                        "global memory",
                        findings.parties(*pair),
                        text.rpartition("; ")[2],
                    ),
                    key,
                )

    def _read(self, state: WarpState, plane: np.ndarray, cells: Any, access: Access) -> None:
        values = plane[cells]
        if not values.any():
            return
        handed_over = []
        for number in filter(None, np.unique(values).tolist()):
            writer = self.writers[number]
            if not self.known(state, writer):
                self._race(writer, access, state)
            elif writer.cluster == state.cluster.number and self._sanitizer.needs_fence(
                writer.access, access, state.frontier
            ):
                self._report(
                    findings.race(writer.access, access, "global memory", True), writer, access
                )
            elif writer.access.cta != access.cta:
                handed_over.append(number)
        if handed_over:
            # A reader of another's result, in order, may combine it with its own.
            plane[cells] = np.where(np.isin(values, handed_over), 0, values)

    def known(self, state: WarpState, writer: Writer) -> bool:
        """Return True if a warp knows that a write is complete."""
        access = writer.access
        if writer.cluster == state.cluster.number:
            return int(state.frontier[access.agent]) >= access.clock
        foreign = state.cluster.foreign.get(writer.cluster)
        return foreign is not None and int(foreign[access.agent]) >= access.clock

    def _race(self, writer: Writer, access: Access, state: WarpState) -> None:
        if writer.cluster != state.cluster.number:
            edge = (
                "nothing orders the two: an atomic or a release by the first cluster that an "
                "atomic or an acquire by the second reads, with all writers counted, must stand "
                "between"
            )
        elif writer.access.kind == "bulk":
            edge = (
                "cp.async.bulk.wait_group by the thread that stored, then a barrier that the "
                "reader waits for, must stand between"
            )
        else:
            edge = (
                "nothing orders the two: no arrive -> wait (mbarrier, named barrier, cluster "
                "barrier) and no release -> acquire leads from the first to the second"
            )
        text = (
            f"global memory: {findings.describe(writer.access)}, then {findings.describe(access)}: "
            f"{edge}"
        )
        pair = writer.access, access
        finding = Finding("race", text, findings.sites(*pair), "global memory",
                          findings.parties(*pair), edge)  # fmt: skip
        self._report(finding, writer, access)

    def _report(self, finding: Finding, writer: Writer, access: Access) -> None:
        key = ("global", writer.access.instruction.index, access.instruction.index)
        self._sanitizer.report(finding, key)
