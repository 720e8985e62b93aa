"""The native run loop and memory checks, shared by all kernels, in LLVM IR.

``run(context)`` executes one warp: it picks the lanes at the lowest program point, runs their
block's function, interprets its terminator from the block table, and returns when Python is
needed. A refused access (`addresses`) ends the run after its block.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from sm100_sim.isa.emitter import context_offset
from sm100_sim.state.warp import LOCAL_WINDOW, SHARED_WINDOW

from .access_log import LOG_ACCESS
from .addresses import ADDRESSES

BLOCK_RECORD = np.dtype(
    [
        ("function", np.uint64),
        ("kind", np.int32),
        ("target", np.int32),
        ("following", np.int32),
        ("predicate", np.int32),
        ("invert", np.uint32),
        ("align_kind", np.int32),
        ("align_value", np.uint32),
        ("target_count", np.uint32),
        ("targets", np.uint64),
        ("selector", np.int32),
        ("unused", np.int32),
        ("native", np.uint64),
        ("operation", np.uint64),
    ]
)
"""One row of the block table. ``predicate`` is the guard's slot or -1; ``align_kind`` 1 means
``align_value`` is the mask of lanes that must have converged, 2 that it is the slot of the
register that holds it; ``targets`` points to uint32 block indices of a brx.idx. ``native`` is the
routine of a machine operation that has one (`native_forms`), else 0, and ``operation`` what it
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


def runtime_ir() -> str:
    """Text of the runtime module; its function attributes #0 are not defined."""
    text = _RUN + ADDRESSES + LOG_ACCESS
    text = re.sub(r"\$(\w+)", lambda match: str(context_offset(match[1])), text)
    places: Any = BLOCK_RECORD.fields
    fields = {"size": BLOCK_RECORD.itemsize, **{name: places[name][1] for name in places}}
    text = re.sub(r"#([a-z]\w+)", lambda match: str(fields[match[1]]), text)
    lanes = ", ".join(f"i64 {lane}" for lane in range(32))
    text = text.replace("<LANE_IDS>", f"<{lanes}>")
    text = text.replace("SHARED_TOP", str(SHARED_WINDOW >> 56))
    text = text.replace("LOCAL_TOP", str(LOCAL_WINDOW >> 56))
    return text
