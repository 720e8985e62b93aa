"""The log of memory accesses that native code keeps for the sanitizer.

A log is a header of LOG_HEADER bytes (u32 records in use, u32 records that fit, u64 address of the
function that empties it) followed by records of LOG_RECORD. Kernels that were translated without
the sanitizer never write to it.
"""

from __future__ import annotations

import numpy as np

#: mask: lanes; width: bytes of each access; tag: instruction index * 2 + 1 for a store; addresses:
#: host addresses by lane.
LOG_RECORD = np.dtype([
    ("mask", np.uint32), ("width", np.uint32), ("tag", np.uint32), ("unused", np.uint32),
    ("addresses", np.uint64, (32,))])
LOG_HEADER = 64

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
