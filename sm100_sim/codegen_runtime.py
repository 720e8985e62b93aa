"""The native run loop and memory checks, shared by all kernels, in LLVM IR.

``run(context)`` executes one warp: it picks the lanes at the lowest program point, runs their
block's function, interprets its terminator from the block table, and returns when Python is
needed. The ``address_*`` functions turn the lanes' addresses of one access into host pointers,
refusing what lies outside; a refused access is recorded in the context (the first one counts) and
ends the run after its block.
"""

from __future__ import annotations

import re

import numpy as np

from sm100_sim.codegen_emit import context_offset
from sm100_sim.codegen_log import LOG_ACCESS
from sm100_sim.warp import LOCAL_WINDOW, SHARED_WINDOW

BLOCK_RECORD = np.dtype([
    ("function", np.uint64), ("kind", np.int32), ("target", np.int32), ("following", np.int32),
    ("predicate", np.int32), ("invert", np.uint32), ("align_kind", np.int32),
    ("align_value", np.uint32), ("target_count", np.uint32), ("targets", np.uint64),
    ("selector", np.int32), ("unused", np.int32), ("native", np.uint64),
    ("operation", np.uint64)])
"""One row of the block table. ``predicate`` is the guard's slot or -1; ``align_kind`` 1 means
``align_value`` is the mask of lanes that must have converged, 2 that it is the slot of the
register that holds it; ``targets`` points to uint32 block indices of a brx.idx. ``native`` is the
routine of a machine operation that has one (`native.forms`), else 0, and ``operation`` what it
gets."""

ALIGN_NONE, ALIGN_MASK, ALIGN_REGISTER = range(3)

# In the text below $name is the offset of a context field, @name.f a field of the block record.
_RUN = """
declare i32 @llvm.ctpop.i32(i32)
declare i32 @llvm.cttz.i32(i32, i1)
declare i32 @llvm.vector.reduce.umin.v32i32(<32 x i32>)

define i32 @run(ptr %c) #0 {
entry:
  %block = alloca i32
  %active = alloca i32
  %other = alloca i32
  %retried = alloca i32
  %ticks = alloca i64
  store i32 0, ptr %retried
  %p.live = getelementptr i8, ptr %c, i64 $live
  %p.blocked = getelementptr i8, ptr %c, i64 $blocked
  %p.parked = getelementptr i8, ptr %c, i64 $parked
  %p.budget = getelementptr i8, ptr %c, i64 $budget
  %p.stop_block = getelementptr i8, ptr %c, i64 $stop_block
  %p.stop_lanes = getelementptr i8, ptr %c, i64 $stop_lanes
  %p.fault = getelementptr i8, ptr %c, i64 $fault_kind
  %p.pcs = getelementptr i8, ptr %c, i64 $pcs
  %pcs = load ptr, ptr %p.pcs
  %p.preds = getelementptr i8, ptr %c, i64 $preds
  %preds = load ptr, ptr %p.preds
  %p.r32 = getelementptr i8, ptr %c, i64 $r32
  %r32 = load ptr, ptr %p.r32
  %p.counters = getelementptr i8, ptr %c, i64 $block_counters
  %counters = load ptr, ptr %p.counters
  %p.table = getelementptr i8, ptr %c, i64 $table
  %table = load ptr, ptr %p.table
  %budget0 = load i64, ptr %p.budget
  store i64 %budget0, ptr %ticks
  br label %dispatch

; Choose the lanes at the lowest program point among those that can run.
dispatch:
  %live = load i32, ptr %p.live
  %blocked = load i32, ptr %p.blocked
  %parked = load i32, ptr %p.parked
  %not_waiting = or i32 %blocked, %parked
  %can = xor i32 %not_waiting, -1
  %runnable = and i32 %live, %can
  %nobody = icmp eq i32 %runnable, 0
  br i1 %nobody, label %stuck, label %choose
stuck:
  %dead = icmp eq i32 %live, 0
  br i1 %dead, label %exited, label %stuck_alive
exited:
  ret i32 1
stuck_alive:
  %retried1 = load i32, ptr %retried
  %parked_any = icmp ne i32 %parked, 0
  %first_try = icmp eq i32 %retried1, 0
  %retry = and i1 %parked_any, %first_try
  br i1 %retry, label %unpark, label %give_up
; Lanes may have exited since these parked: look again, once.
unpark:
  store i32 1, ptr %retried
  store i32 0, ptr %p.parked
  br label %dispatch
give_up:
  %blocked_live = and i32 %blocked, %live
  %any_blocked = icmp ne i32 %blocked_live, 0
  br i1 %any_blocked, label %all_blocked, label %deadlock
all_blocked:
  ret i32 4
deadlock:
  %first_parked = call i32 @llvm.cttz.i32(i32 %parked, i1 false)
  %dead_pc_at = getelementptr i32, ptr %pcs, i32 %first_parked
  %dead_pc = load i32, ptr %dead_pc_at
  store i32 %dead_pc, ptr %p.stop_block
  store i32 %parked, ptr %p.stop_lanes
  ret i32 5
choose:
  %points = load <32 x i32>, ptr %pcs, align 4
  %runnable.v = bitcast i32 %runnable to <32 x i1>
  %candidates = select <32 x i1> %runnable.v, <32 x i32> %points, <32 x i32> splat (i32 2147483647)
  %lowest = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %candidates)
  %lowest.1 = insertelement <32 x i32> poison, i32 %lowest, i32 0
  %lowest.v = shufflevector <32 x i32> %lowest.1, <32 x i32> poison, <32 x i32> zeroinitializer
  %here.v = icmp eq <32 x i32> %points, %lowest.v
  %here = bitcast <32 x i1> %here.v to i32
  %not_blocked = xor i32 %blocked, -1
  %present = and i32 %live, %not_blocked
  %chosen = and i32 %here, %present
  %elsewhere = xor i32 %chosen, -1
  %others = and i32 %present, %elsewhere
  %others.v = bitcast i32 %others to <32 x i1>
  %rest = select <32 x i1> %others.v, <32 x i32> %points, <32 x i32> splat (i32 2147483647)
  %other_lowest = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %rest)
  %still_parked = and i32 %parked, %elsewhere
  store i32 %still_parked, ptr %p.parked
  store i32 %chosen, ptr %active
  store i32 %other_lowest, ptr %other
  store i32 %lowest, ptr %block
  ; Dispatching counts too, so that lanes that chase each other cannot run for ever.
  %ticks1 = load i64, ptr %ticks
  %ticks2 = sub i64 %ticks1, 1
  store i64 %ticks2, ptr %ticks
  %over = icmp slt i64 %ticks2, 0
  br i1 %over, label %out_of_budget, label %run_block
out_of_budget:
  ret i32 2

run_block:
  %b = load i32, ptr %block
  %a = load i32, ptr %active
  %b64 = zext i32 %b to i64
  %record_offset = mul i64 %b64, #size
  %record = getelementptr i8, ptr %table, i64 %record_offset
  %align_at = getelementptr i8, ptr %record, i64 #align_kind
  %align = load i32, ptr %align_at
  %unaligned = icmp eq i32 %align, 0
  br i1 %unaligned, label %execute, label %check_alignment
check_alignment:
  %value_at = getelementptr i8, ptr %record, i64 #align_value
  %value = load i32, ptr %value_at
  %by_register = icmp eq i32 %align, 2
  br i1 %by_register, label %mask_register, label %mask_known
mask_register:
  %lane0 = call i32 @llvm.cttz.i32(i32 %a, i1 false)
  %row = mul i32 %value, 32
  %cell = add i32 %row, %lane0
  %cell64 = zext i32 %cell to i64
  %mask_at = getelementptr i32, ptr %r32, i64 %cell64
  %mask_loaded = load i32, ptr %mask_at
  br label %mask_known
mask_known:
  %mask = phi i32 [ %value, %check_alignment ], [ %mask_loaded, %mask_register ]
  %live2 = load i32, ptr %p.live
  %away = xor i32 %a, -1
  %needed = and i32 %mask, %live2
  %missing = and i32 %needed, %away
  %together = icmp eq i32 %missing, 0
  br i1 %together, label %execute, label %park
park:
  call void @set_points(ptr %pcs, i32 %a, i32 %b)
  %parked2 = load i32, ptr %p.parked
  %parked3 = or i32 %parked2, %a
  store i32 %parked3, ptr %p.parked
  br label %dispatch

execute:
  store i32 0, ptr %retried
  %count_offset = mul i64 %b64, 16
  %count_at = getelementptr i8, ptr %counters, i64 %count_offset
  %count = load i64, ptr %count_at
  %count1 = add i64 %count, 1
  store i64 %count1, ptr %count_at
  %lanes_at = getelementptr i8, ptr %count_at, i64 8
  %lanes = load i64, ptr %lanes_at
  %active_count = call i32 @llvm.ctpop.i32(i32 %a)
  %active_count64 = zext i32 %active_count to i64
  %lanes1 = add i64 %lanes, %active_count64
  store i64 %lanes1, ptr %lanes_at
  %function = load ptr, ptr %record
  %empty = icmp eq ptr %function, null
  br i1 %empty, label %terminate, label %call
call:
  call void %function(ptr %c, i32 %a)
  %fault = load i32, ptr %p.fault
  %failed = icmp ne i32 %fault, 0
  br i1 %failed, label %faulted, label %terminate
faulted:
  store i32 %b, ptr %p.stop_block
  call void @set_points(ptr %pcs, i32 %a, i32 %b)
  ret i32 3

terminate:
  %kind_at = getelementptr i8, ptr %record, i64 #kind
  %kind = load i32, ptr %kind_at
  %target_at = getelementptr i8, ptr %record, i64 #target
  %target = load i32, ptr %target_at
  %following_at = getelementptr i8, ptr %record, i64 #following
  %following = load i32, ptr %following_at
  %predicate_at = getelementptr i8, ptr %record, i64 #predicate
  %predicate = load i32, ptr %predicate_at
  %always = icmp slt i32 %predicate, 0
  br i1 %always, label %guard_known, label %guard_load
guard_load:
  %invert_at = getelementptr i8, ptr %record, i64 #invert
  %invert = load i32, ptr %invert_at
  %predicate64 = zext i32 %predicate to i64
  %pred_at = getelementptr i32, ptr %preds, i64 %predicate64
  %pred = load i32, ptr %pred_at
  %pred_inverted = xor i32 %pred, %invert
  %guarded = and i32 %pred_inverted, %a
  br label %guard_known
guard_known:
  %taken = phi i32 [ %a, %terminate ], [ %guarded, %guard_load ]
  %untaken0 = xor i32 %taken, -1
  %untaken = and i32 %a, %untaken0
  %none_taken = icmp eq i32 %taken, 0
  switch i32 %kind, label %go_on [ i32 1, label %branch
                                   i32 2, label %exit
                                   i32 3, label %trap
                                   i32 4, label %indexed ]
go_on:
  br label %transition
branch:
  %all_taken = icmp eq i32 %untaken, 0
  %uniform = or i1 %all_taken, %none_taken
  %uniform_target = select i1 %none_taken, i32 %following, i32 %target
  br i1 %uniform, label %transition, label %diverge
diverge:
  call void @set_points(ptr %pcs, i32 %taken, i32 %target)
  call void @set_points(ptr %pcs, i32 %untaken, i32 %following)
  br label %dispatch
exit:
  %live3 = load i32, ptr %p.live
  %live4 = and i32 %live3, %untaken0
  store i32 %live4, ptr %p.live
  call void @set_points(ptr %pcs, i32 %untaken, i32 %following)
  br label %dispatch
trap:
  br i1 %none_taken, label %transition, label %stop
stop:
  %native_at = getelementptr i8, ptr %record, i64 #native
  %native = load ptr, ptr %native_at
  %has_native = icmp ne ptr %native, null
  br i1 %has_native, label %do_natively, label %stop_for_python
; 0: done, 1: Python must do it, 2: the lanes wait and try again when they are woken.
do_natively:
  %operation_at = getelementptr i8, ptr %record, i64 #operation
  %operation = load ptr, ptr %operation_at
  %asleep_before = load i32, ptr %p.blocked
  %outcome = call i32 %native(ptr %c, i32 %taken, ptr %operation)
  switch i32 %outcome, label %stop_for_python [ i32 0, label %done_natively
                                                i32 2, label %wait_natively ]
done_natively:
  call void @count_operation(ptr %c, i64 %b64, i32 %taken)
  %asleep_after = load i32, ptr %p.blocked
  %woke_own_lanes = icmp ne i32 %asleep_before, %asleep_after
  br i1 %woke_own_lanes, label %choose_again, label %transition
choose_again:
  call void @set_points(ptr %pcs, i32 %a, i32 %following)
  br label %dispatch
wait_natively:
  call void @set_points(ptr %pcs, i32 %untaken, i32 %following)
  call void @set_points(ptr %pcs, i32 %taken, i32 %b)
  %blocked2 = load i32, ptr %p.blocked
  %blocked3 = or i32 %blocked2, %taken
  store i32 %blocked3, ptr %p.blocked
  br label %dispatch
; Loops that poll by machine operations use up their budget too, one such operation as 200 branches.
stop_for_python:
  %ticks5 = load i64, ptr %ticks
  %ticks6 = sub i64 %ticks5, 200
  store i64 %ticks6, ptr %p.budget
  call void @set_points(ptr %pcs, i32 %a, i32 %following)
  store i32 %b, ptr %p.stop_block
  store i32 %taken, ptr %p.stop_lanes
  ret i32 0
indexed:
  call void @indexed_points(ptr %record, ptr %r32, ptr %pcs, i32 %taken)
  call void @set_points(ptr %pcs, i32 %untaken, i32 %following)
  br label %dispatch

transition:
  %next = phi i32 [ %following, %go_on ], [ %uniform_target, %branch ], [ %following, %trap ],
               [ %following, %done_natively ]
  %backward = icmp ule i32 %next, %b
  br i1 %backward, label %tick, label %forward
tick:
  %ticks3 = load i64, ptr %ticks
  %ticks4 = sub i64 %ticks3, 1
  store i64 %ticks4, ptr %ticks
  %over2 = icmp slt i64 %ticks4, 0
  br i1 %over2, label %yield, label %forward
yield:
  call void @set_points(ptr %pcs, i32 %a, i32 %next)
  ret i32 2
forward:
  %other_now = load i32, ptr %other
  %ahead = icmp ult i32 %next, %other_now
  br i1 %ahead, label %direct, label %rejoin
direct:
  store i32 %next, ptr %block
  br label %run_block
rejoin:
  call void @set_points(ptr %pcs, i32 %a, i32 %next)
  br label %dispatch
}

define internal void @set_points(ptr %pcs, i32 %lanes, i32 %point) #0 {
  %old = load <32 x i32>, ptr %pcs, align 4
  %mask = bitcast i32 %lanes to <32 x i1>
  %one = insertelement <32 x i32> poison, i32 %point, i32 0
  %all = shufflevector <32 x i32> %one, <32 x i32> poison, <32 x i32> zeroinitializer
  %new = select <32 x i1> %mask, <32 x i32> %all, <32 x i32> %old
  store <32 x i32> %new, ptr %pcs, align 4
  ret void
}

define internal void @indexed_points(ptr %record, ptr %r32, ptr %pcs, i32 %lanes) #0 {
entry:
  %count_at = getelementptr i8, ptr %record, i64 #target_count
  %count = load i32, ptr %count_at
  %last = sub i32 %count, 1
  %targets_at = getelementptr i8, ptr %record, i64 #targets
  %targets = load ptr, ptr %targets_at
  %selector_at = getelementptr i8, ptr %record, i64 #selector
  %selector = load i32, ptr %selector_at
  %row = mul i32 %selector, 32
  br label %loop
loop:
  %lane = phi i32 [ 0, %entry ], [ %lane1, %advance ]
  %bit = shl i32 1, %lane
  %in = and i32 %bit, %lanes
  %skip = icmp eq i32 %in, 0
  br i1 %skip, label %advance, label %take
take:
  %cell = add i32 %row, %lane
  %cell64 = zext i32 %cell to i64
  %value_at = getelementptr i32, ptr %r32, i64 %cell64
  %value = load i32, ptr %value_at
  %beyond = icmp ugt i32 %value, %last
  %index = select i1 %beyond, i32 %last, i32 %value
  %index64 = zext i32 %index to i64
  %target_at = getelementptr i32, ptr %targets, i64 %index64
  %target = load i32, ptr %target_at
  %lane64 = zext i32 %lane to i64
  %point_at = getelementptr i32, ptr %pcs, i64 %lane64
  store i32 %target, ptr %point_at
  br label %advance
advance:
  %lane1 = add i32 %lane, 1
  %done = icmp eq i32 %lane1, 32
  br i1 %done, label %end, label %loop
end:
  ret void
}
"""

# Each address function takes the lanes' addresses in %addresses (i64 x 32), replaces them by host
# pointers and returns the mask of lanes that may access %width bytes (the alignment too).
_ADDRESSES = """
define internal void @record_fault(ptr %c, i32 %bad, i32 %kind, ptr %addresses, i32 %width,
                                   i32 %instruction) #0 {
entry:
  %kind_at = getelementptr i8, ptr %c, i64 $fault_kind
  %earlier = load i32, ptr %kind_at
  %first = icmp eq i32 %earlier, 0
  br i1 %first, label %record, label %end
record:
  %lane = call i32 @llvm.cttz.i32(i32 %bad, i1 false)
  %address_at = getelementptr i64, ptr %addresses, i32 %lane
  %address = load i64, ptr %address_at
  store i32 %kind, ptr %kind_at
  %lane_at = getelementptr i8, ptr %c, i64 $fault_lane
  store i32 %lane, ptr %lane_at
  %fault_at = getelementptr i8, ptr %c, i64 $fault_address
  store i64 %address, ptr %fault_at
  %instruction_at = getelementptr i8, ptr %c, i64 $fault_instruction
  store i32 %instruction, ptr %instruction_at
  %width_at = getelementptr i8, ptr %c, i64 $fault_width
  store i32 %width, ptr %width_at
  br label %end
end:
  ret void
}

declare <32 x i32> @llvm.masked.gather.v32i32.v32p0(<32 x ptr>, i32, <32 x i1>, <32 x i32>)

define i32 @address_shared(ptr %c, i32 %lanes, ptr %addresses, i32 %width, i32 %write,
                           i32 %instruction) #0 {
entry:
  %wide = load <32 x i64>, ptr %addresses, align 64
  %a = trunc <32 x i64> %wide to <32 x i32>
  %mask = bitcast i32 %lanes to <32 x i1>
  %rank = lshr <32 x i32> %a, splat (i32 24)
  %offset = and <32 x i32> %a, splat (i32 16777215)
  %count_at = getelementptr i8, ptr %c, i64 $cta_count
  %count = load i32, ptr %count_at
  %count.1 = insertelement <32 x i32> poison, i32 %count, i32 0
  %count.v = shufflevector <32 x i32> %count.1, <32 x i32> poison, <32 x i32> zeroinitializer
  %rank_ok = icmp ult <32 x i32> %rank, %count.v
  %ok0 = and <32 x i1> %rank_ok, %mask
  %rank_bad = icmp uge <32 x i32> %rank, %count.v
  %bad_rank.v = and <32 x i1> %rank_bad, %mask
  %bad_rank = bitcast <32 x i1> %bad_rank.v to i32
  %any_rank = icmp ne i32 %bad_rank, 0
  br i1 %any_rank, label %fault_rank, label %range
fault_rank:
  call void @record_fault(ptr %c, i32 %bad_rank, i32 8, ptr %addresses, i32 %width,
                          i32 %instruction)
  ret i32 0
range:
  %limits_at = getelementptr i8, ptr %c, i64 $smem_limits
  %limits = load ptr, ptr %limits_at
  %limit_at = getelementptr i32, ptr %limits, <32 x i32> %rank
  %limit = call <32 x i32> @llvm.masked.gather.v32i32.v32p0(<32 x ptr> %limit_at, i32 4,
                                                            <32 x i1> %ok0,
                                                            <32 x i32> zeroinitializer)
  %width.1 = insertelement <32 x i32> poison, i32 %width, i32 0
  %width.v = shufflevector <32 x i32> %width.1, <32 x i32> poison, <32 x i32> zeroinitializer
  %end = add <32 x i32> %offset, %width.v
  %beyond = icmp ugt <32 x i32> %end, %limit
  ; The first KiB of a CTA's shared memory belongs to the hardware.
  %reserved = icmp ult <32 x i32> %offset, splat (i32 1024)
  %outside = or <32 x i1> %beyond, %reserved
  %bad_range.v = and <32 x i1> %outside, %mask
  %bad_range = bitcast <32 x i1> %bad_range.v to i32
  %any_range = icmp ne i32 %bad_range, 0
  br i1 %any_range, label %fault_range, label %alignment
fault_range:
  call void @record_fault(ptr %c, i32 %bad_range, i32 1, ptr %addresses, i32 %width,
                          i32 %instruction)
  ret i32 0
alignment:
  %low_bits = sub <32 x i32> %width.v, splat (i32 1)
  %low = and <32 x i32> %offset, %low_bits
  %odd = icmp ne <32 x i32> %low, zeroinitializer
  %bad_align.v = and <32 x i1> %odd, %mask
  %bad_align = bitcast <32 x i1> %bad_align.v to i32
  %any_align = icmp ne i32 %bad_align, 0
  br i1 %any_align, label %fault_align, label %good
fault_align:
  call void @record_fault(ptr %c, i32 %bad_align, i32 2, ptr %addresses, i32 %width,
                          i32 %instruction)
  ret i32 0
good:
  %smem_at = getelementptr i8, ptr %c, i64 $smem
  %smem = load i64, ptr %smem_at
  %stride_at = getelementptr i8, ptr %c, i64 $smem_stride
  %stride = load i64, ptr %stride_at
  %stride.1 = insertelement <32 x i64> poison, i64 %stride, i32 0
  %stride.v = shufflevector <32 x i64> %stride.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %smem.1 = insertelement <32 x i64> poison, i64 %smem, i32 0
  %smem.v = shufflevector <32 x i64> %smem.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %rank64 = zext <32 x i32> %rank to <32 x i64>
  %row = mul <32 x i64> %rank64, %stride.v
  %offset64 = zext <32 x i32> %offset to <32 x i64>
  %within = add <32 x i64> %row, %offset64
  %host = add <32 x i64> %within, %smem.v
  store <32 x i64> %host, ptr %addresses, align 64
  ret i32 %lanes
}

define i32 @address_local(ptr %c, i32 %lanes, ptr %addresses, i32 %width, i32 %write,
                          i32 %instruction) #0 {
entry:
  %wide = load <32 x i64>, ptr %addresses, align 64
  %offset = and <32 x i64> %wide, splat (i64 4294967295)
  %mask = bitcast i32 %lanes to <32 x i1>
  %bytes_at = getelementptr i8, ptr %c, i64 $local_bytes
  %bytes = load i32, ptr %bytes_at
  %bytes64 = zext i32 %bytes to i64
  %bytes.1 = insertelement <32 x i64> poison, i64 %bytes64, i32 0
  %bytes.v = shufflevector <32 x i64> %bytes.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %width64 = zext i32 %width to i64
  %width.1 = insertelement <32 x i64> poison, i64 %width64, i32 0
  %width.v = shufflevector <32 x i64> %width.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %end = add <32 x i64> %offset, %width.v
  %beyond = icmp ugt <32 x i64> %end, %bytes.v
  %low_bits = sub <32 x i64> %width.v, splat (i64 1)
  %low = and <32 x i64> %offset, %low_bits
  %odd = icmp ne <32 x i64> %low, zeroinitializer
  %wrong = or <32 x i1> %beyond, %odd
  %bad.v = and <32 x i1> %wrong, %mask
  %bad = bitcast <32 x i1> %bad.v to i32
  %any = icmp ne i32 %bad, 0
  br i1 %any, label %fault, label %good
fault:
  call void @record_fault(ptr %c, i32 %bad, i32 6, ptr %addresses, i32 %width, i32 %instruction)
  ret i32 0
good:
  %base_at = getelementptr i8, ptr %c, i64 $local
  %base = load i64, ptr %base_at
  %base.1 = insertelement <32 x i64> poison, i64 %base, i32 0
  %base.v = shufflevector <32 x i64> %base.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %row = mul <32 x i64> <LANE_IDS>, %bytes.v
  %within = add <32 x i64> %row, %offset
  %host = add <32 x i64> %within, %base.v
  store <32 x i64> %host, ptr %addresses, align 64
  ret i32 %lanes
}

; Lanes are settled range by range: the first open lane finds its range, all lanes in it are done.
define i32 @address_global(ptr %c, i32 %lanes, ptr %addresses, i32 %width, i32 %write,
                           i32 %instruction) #0 {
entry:
  %a = load <32 x i64>, ptr %addresses, align 64
  %width64 = zext i32 %width to i64
  %width.1 = insertelement <32 x i64> poison, i64 %width64, i32 0
  %width.v = shufflevector <32 x i64> %width.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %ends = add <32 x i64> %a, %width.v
  %low_bits = sub <32 x i64> %width.v, splat (i64 1)
  %low = and <32 x i64> %a, %low_bits
  %odd = icmp ne <32 x i64> %low, zeroinitializer
  %mask = bitcast i32 %lanes to <32 x i1>
  %bad.v = and <32 x i1> %odd, %mask
  %bad = bitcast <32 x i1> %bad.v to i32
  %any = icmp ne i32 %bad, 0
  br i1 %any, label %fault_align, label %begin
fault_align:
  call void @record_fault(ptr %c, i32 %bad, i32 4, ptr %addresses, i32 %width, i32 %instruction)
  ret i32 0
begin:
  %ranges_at = getelementptr i8, ptr %c, i64 $ranges
  %ranges = load ptr, ptr %ranges_at
  %count_at = getelementptr i8, ptr %c, i64 $range_count
  %count = load i32, ptr %count_at
  %hint_at = getelementptr i8, ptr %c, i64 $range_hint
  %params_at = getelementptr i8, ptr %c, i64 $params
  %params = load i64, ptr %params_at
  %param_bytes_at = getelementptr i8, ptr %c, i64 $param_bytes
  %param_bytes = load i32, ptr %param_bytes_at
  %param_bytes64 = zext i32 %param_bytes to i64
  %params_end = add i64 %params, %param_bytes64
  br label %next_lane
next_lane:
  %open = phi i32 [ %lanes, %begin ], [ %left, %covered ]
  %done = icmp eq i32 %open, 0
  br i1 %done, label %finish, label %find
finish:
  ret i32 %lanes
find:
  %lane = call i32 @llvm.cttz.i32(i32 %open, i1 false)
  %one = shl i32 1, %lane
  %address_at = getelementptr i64, ptr %addresses, i32 %lane
  %address = load i64, ptr %address_at
  %hint = load i32, ptr %hint_at
  br label %try
try:
  %tried = phi i32 [ 0, %find ], [ %tried1, %miss ]
  %index = phi i32 [ %hint, %find ], [ %index2, %miss ]
  %exhausted = icmp uge i32 %tried, %count
  br i1 %exhausted, label %try_params, label %probe
probe:
  %index64 = zext i32 %index to i64
  %row = mul i64 %index64, 24
  %start_at = getelementptr i8, ptr %ranges, i64 %row
  %start = load i64, ptr %start_at
  %end_at = getelementptr i8, ptr %start_at, i64 8
  %end = load i64, ptr %end_at
  %after = icmp uge i64 %address, %start
  %before = icmp ult i64 %address, %end
  %inside = and i1 %after, %before
  br i1 %inside, label %hit, label %miss
miss:
  %tried1 = add i32 %tried, 1
  %index1 = add i32 %index, 1
  %wrap = icmp uge i32 %index1, %count
  %index2 = select i1 %wrap, i32 0, i32 %index1
  br label %try
hit:
  store i32 %index, ptr %hint_at
  %writable_at = getelementptr i8, ptr %start_at, i64 16
  %writable = load i64, ptr %writable_at
  %read_only = icmp eq i64 %writable, 0
  br label %cover
try_params:
  %after_params = icmp uge i64 %address, %params
  %before_params = icmp ult i64 %address, %params_end
  %in_params = and i1 %after_params, %before_params
  br i1 %in_params, label %cover, label %fault_range
fault_range:
  call void @record_fault(ptr %c, i32 %one, i32 3, ptr %addresses, i32 %width, i32 %instruction)
  ret i32 0
cover:
  %first = phi i64 [ %start, %hit ], [ %params, %try_params ]
  %limit = phi i64 [ %end, %hit ], [ %params_end, %try_params ]
  %locked = phi i1 [ %read_only, %hit ], [ true, %try_params ]
  %writing = icmp ne i32 %write, 0
  %refused = and i1 %locked, %writing
  br i1 %refused, label %fault_write, label %spread
fault_write:
  call void @record_fault(ptr %c, i32 %one, i32 5, ptr %addresses, i32 %width, i32 %instruction)
  ret i32 0
spread:
  %first.1 = insertelement <32 x i64> poison, i64 %first, i32 0
  %first.v = shufflevector <32 x i64> %first.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %limit.1 = insertelement <32 x i64> poison, i64 %limit, i32 0
  %limit.v = shufflevector <32 x i64> %limit.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %from_ok = icmp uge <32 x i64> %a, %first.v
  %to_ok = icmp ule <32 x i64> %ends, %limit.v
  %begin_ok = icmp ult <32 x i64> %a, %limit.v
  %to_fit = and <32 x i1> %begin_ok, %to_ok
  %fits.v = and <32 x i1> %from_ok, %to_fit
  %fits = bitcast <32 x i1> %fits.v to i32
  %this = and i32 %fits, %one
  %straddles = icmp eq i32 %this, 0
  br i1 %straddles, label %fault_range, label %covered
covered:
  %unfit = xor i32 %fits, -1
  %left = and i32 %open, %unfit
  br label %next_lane
}

; A generic address belongs to the window that its top byte names; any other is global.
define i32 @address_generic(ptr %c, i32 %lanes, ptr %addresses, i32 %width, i32 %write,
                            i32 %instruction) #0 {
entry:
  %a = load <32 x i64>, ptr %addresses, align 64
  %top = lshr <32 x i64> %a, splat (i64 56)
  %shared.v = icmp eq <32 x i64> %top, splat (i64 SHARED_TOP)
  %local.v = icmp eq <32 x i64> %top, splat (i64 LOCAL_TOP)
  %shared_all = bitcast <32 x i1> %shared.v to i32
  %local_all = bitcast <32 x i1> %local.v to i32
  %shared = and i32 %shared_all, %lanes
  %local = and i32 %local_all, %lanes
  %windows = or i32 %shared, %local
  %outside = xor i32 %windows, -1
  %global = and i32 %lanes, %outside
  %no_shared = icmp eq i32 %shared, 0
  br i1 %no_shared, label %after_shared, label %do_shared
do_shared:
  %ok_shared = call i32 @address_shared(ptr %c, i32 %shared, ptr %addresses, i32 %width,
                                        i32 %write, i32 %instruction)
  %pointers_shared = load <32 x i64>, ptr %addresses, align 64
  store <32 x i64> %a, ptr %addresses, align 64
  br label %after_shared
after_shared:
  %s_ok = phi i32 [ 0, %entry ], [ %ok_shared, %do_shared ]
  %s_ptr = phi <32 x i64> [ %a, %entry ], [ %pointers_shared, %do_shared ]
  %no_local = icmp eq i32 %local, 0
  br i1 %no_local, label %after_local, label %do_local
do_local:
  %ok_local = call i32 @address_local(ptr %c, i32 %local, ptr %addresses, i32 %width, i32 %write,
                                      i32 %instruction)
  %pointers_local = load <32 x i64>, ptr %addresses, align 64
  store <32 x i64> %a, ptr %addresses, align 64
  br label %after_local
after_local:
  %l_ok = phi i32 [ 0, %after_shared ], [ %ok_local, %do_local ]
  %l_ptr = phi <32 x i64> [ %a, %after_shared ], [ %pointers_local, %do_local ]
  %no_global = icmp eq i32 %global, 0
  br i1 %no_global, label %join, label %do_global
do_global:
  %ok_global = call i32 @address_global(ptr %c, i32 %global, ptr %addresses, i32 %width,
                                        i32 %write, i32 %instruction)
  br label %join
join:
  %g_ok = phi i32 [ 0, %after_local ], [ %ok_global, %do_global ]
  %shared.m = bitcast i32 %shared to <32 x i1>
  %local.m = bitcast i32 %local to <32 x i1>
  %merged1 = select <32 x i1> %shared.m, <32 x i64> %s_ptr, <32 x i64> %a
  %merged = select <32 x i1> %local.m, <32 x i64> %l_ptr, <32 x i64> %merged1
  store <32 x i64> %merged, ptr %addresses, align 64
  %ok1 = or i32 %s_ok, %l_ok
  %ok = or i32 %ok1, %g_ok
  ret i32 %ok
}
"""


def runtime_ir() -> str:
    """Text of the runtime module; its function attributes #0 are not defined."""
    text = _RUN + _ADDRESSES + LOG_ACCESS
    text = re.sub(r"\$(\w+)", lambda match: str(context_offset(match[1])), text)
    fields = {"size": BLOCK_RECORD.itemsize,
              **{name: BLOCK_RECORD.fields[name][1] for name in BLOCK_RECORD.names}}
    text = re.sub(r"#([a-z]\w+)", lambda match: str(fields[match[1]]), text)
    lanes = ", ".join(f"i64 {lane}" for lane in range(32))
    text = text.replace("<LANE_IDS>", f"<{lanes}>")
    text = text.replace("SHARED_TOP", str(SHARED_WINDOW >> 56))
    text = text.replace("LOCAL_TOP", str(LOCAL_WINDOW >> 56))
    return text
