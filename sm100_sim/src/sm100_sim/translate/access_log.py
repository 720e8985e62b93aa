"""The log of memory accesses that native code keeps for whoever observes a launch.

A log is a header of LOG_HEADER bytes (u32 records in use, u32 records that fit, u64 address of the
function that empties it) followed by records of LOG_RECORD. Kernels that were translated without
`sanitize` never write to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np

from sm100_sim.state.warp import aligned_zeros

#: mask: lanes; width: bytes of each access; tag: instruction index * 2 + 1 for a store; addresses:
#: host addresses by lane.
LOG_RECORD = np.dtype(
    [
        ("mask", np.uint32),
        ("width", np.uint32),
        ("tag", np.uint32),
        ("unused", np.uint32),
        ("addresses", np.uint64, (32,)),
    ]
)
LOG_HEADER = 64
#: Records of a log.
RECORDS = 512

#: log_access(context, mask, addresses, width, tag) in LLVM IR; $name is a context field's offset.
LOG_ACCESS = """
define void @log_access(ptr %c, i32 %mask, ptr %addresses, i32 %width, i32 %tag) #0 {
entry:
  %nothing = icmp eq i32 %mask, 0
  br i1 %nothing, label %end, label %some
some:
  %log_at = getelementptr i8, ptr %c, i64 $log
  %log = load ptr, ptr %log_at
  %count0 = load i32, ptr %log
  %limit_at = getelementptr i8, ptr %log, i64 4
  %limit = load i32, ptr %limit_at
  %full = icmp uge i32 %count0, %limit
  br i1 %full, label %drain, label %append
drain:
  %function_at = getelementptr i8, ptr %log, i64 8
  %function = load ptr, ptr %function_at
  call void %function()
  br label %append
append:
  %count = load i32, ptr %log
  %count1 = add i32 %count, 1
  store i32 %count1, ptr %log
  %count64 = zext i32 %count to i64
  %offset = mul i64 %count64, LOG_RECORD
  %first = add i64 %offset, LOG_HEADER
  %record = getelementptr i8, ptr %log, i64 %first
  store i32 %mask, ptr %record
  %width_at = getelementptr i8, ptr %record, i64 4
  store i32 %width, ptr %width_at
  %tag_at = getelementptr i8, ptr %record, i64 8
  store i32 %tag, ptr %tag_at
  %values = load <32 x i64>, ptr %addresses, align 64
  %values_at = getelementptr i8, ptr %record, i64 16
  store <32 x i64> %values, ptr %values_at, align 16
  br label %end
end:
  ret void
}
""".replace("LOG_RECORD", str(LOG_RECORD.itemsize)).replace("LOG_HEADER", str(LOG_HEADER))


class AccessLog:
    """One log, used by whichever warp runs. drain: called when it is full."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._raw = aligned_zeros((LOG_HEADER + RECORDS * LOG_RECORD.itemsize,), np.uint8)
        self._error: BaseException | None = None
        self._drain = drain
        self._callback = ctypes.CFUNCTYPE(None)(self._full)
        header = self._raw[:LOG_HEADER].view(np.uint32)
        header[1] = RECORDS
        drain_address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self._raw[8:16].view(np.uint64)[0] = drain_address
        self._count = ctypes.c_uint32.from_buffer(self._raw.data)
        self._records = self._raw[LOG_HEADER:].view(LOG_RECORD)

    @property
    def address(self) -> int:
        """Return the address of the log, for the context of a warp."""
        return self._raw.__array_interface__["data"][0]

    @property
    def waiting(self) -> bool:
        """Return True if there are records, or an error of an earlier drain."""
        return self._count.value > 0 or self._error is not None

    @property
    def failed(self) -> bool:
        """Return True if there is an error of an earlier drain."""
        return self._error is not None

    def _full(self) -> None:
        # An exception cannot cross native code: it is raised at the next drain.
        try:
            self._drain()
        except BaseException as error:
            self._error = self._error or error
            self._count.value = 0

    def records(self) -> np.ndarray:
        """Return the records of the log (`LOG_RECORD`), emptying it. Raises the error of an earlier
        drain.

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
        """Yield (instruction index, write, width, host addresses of the executing lanes) of
        records."""
        masks = records["mask"]
        for row, (mask, width, tag) in enumerate(
            zip(masks.tolist(), records["width"].tolist(), records["tag"].tolist(), strict=True)
        ):
            addresses = records["addresses"][row]
            if mask != 0xFFFFFFFF:
                addresses = addresses[(mask >> np.arange(32)) & 1 == 1]
            yield tag >> 1, bool(tag & 1), width, addresses
