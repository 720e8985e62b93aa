"""The log in which native code notes its accesses to memory (`codegen_log`), as Python sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np

from sm100_sim.state.warp import aligned_zeros
from sm100_sim.translate.access_log import LOG_HEADER, LOG_RECORD

RECORDS = 512


class AccessLog:
    """One log, used by whichever warp runs. drain: called when it is full."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._raw = aligned_zeros((LOG_HEADER + RECORDS * LOG_RECORD.itemsize,), np.uint8)
        self._error: BaseException | None = None
        self._drain = drain
        self._callback = ctypes.CFUNCTYPE(None)(self._full)
        header = self._raw[:LOG_HEADER].view(np.uint32)
        header[1] = RECORDS
        self._raw[8:16].view(np.uint64)[0] = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._count = ctypes.c_uint32.from_buffer(self._raw)
        self._records = self._raw[LOG_HEADER:].view(LOG_RECORD)

    @property
    def address(self) -> int:
        """For the context of a warp."""
        return self._raw.__array_interface__["data"][0]

    @property
    def waiting(self) -> bool:
        """Whether there are records, or an error of an earlier drain."""
        return self._count.value > 0 or self._error is not None

    @property
    def failed(self) -> bool:
        """Whether there is an error of an earlier drain."""
        return self._error is not None

    def _full(self) -> None:
        # An exception cannot cross native code: it is raised at the next drain.
        try:
            self._drain()
        except BaseException as error:
            self._error = self._error or error
            self._count.value = 0

    def records(self) -> np.ndarray:
        """What is in the log (`LOG_RECORD`), emptying it. Raises the error of an earlier drain.

        The same record several times running, as polling makes it, is given once.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        records = self._records[: self._count.value].copy()
        self._count.value = 0
        if len(records) > 1:
            raw = records.view(np.uint64).reshape(len(records), -1)
            records = records[np.append(True, (raw[1:] != raw[:-1]).any(axis=1))]
        return records

    def first(self) -> np.ndarray:
        """The first record, taking it and those like it that follow at once out of the log.

        Raises the error of an earlier drain.
        """
        count = self._count.value if self._error is None else 0
        if not count:
            return self.records()
        raw = self._records[:count].view(np.uint64).reshape(count, -1)
        others = np.flatnonzero((raw != raw[0]).any(axis=1))
        left = self._records[others[0] : count].copy() if len(others) else self._records[:0]
        record = self._records[:1].copy()
        self._records[: len(left)] = left
        self._count.value = len(left)
        return record

    @staticmethod
    def accesses(records: np.ndarray) -> Iterator[tuple[int, bool, int, np.ndarray]]:
        """(instruction index, write, width, host addresses of the executing lanes) of records."""
        masks = records["mask"]
        for row, (mask, width, tag) in enumerate(
            zip(masks.tolist(), records["width"].tolist(), records["tag"].tolist(), strict=True)
        ):
            addresses = records["addresses"][row]
            if mask != 0xFFFFFFFF:
                addresses = addresses[(mask >> np.arange(32)) & 1 == 1]
            yield tag >> 1, bool(tag & 1), width, addresses
