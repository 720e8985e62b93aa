"""Checks of memory accesses in LLVM IR, a function for each state space.

A function takes the lanes' addresses in %addresses (i64 x 32), replaces them by host pointers and
returns the mask of lanes that may access %width bytes (the alignment too). A refused access is
recorded in the context (`warp.FAULT_KINDS`), the first one only; the mask is 0 then.
"""

ADDRESSES = """
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

; Of .shared and .shared::cta: the CTA's own memory.
define i32 @address_own_shared(ptr %c, i32 %lanes, ptr %addresses, i32 %width, i32 %write,
                               i32 %instruction) #0 {
entry:
  %wide = load <32 x i64>, ptr %addresses, align 64
  %a = trunc <32 x i64> %wide to <32 x i32>
  %mask = bitcast i32 %lanes to <32 x i1>
  %own_at = getelementptr i8, ptr %c, i64 $shared_base
  %own = load i32, ptr %own_at
  %own.1 = insertelement <32 x i32> poison, i32 %own, i32 0
  %own.v = shufflevector <32 x i32> %own.1, <32 x i32> poison, <32 x i32> zeroinitializer
  %difference = xor <32 x i32> %a, %own.v
  %foreign.v = icmp ugt <32 x i32> %difference, splat (i32 16777215)
  %bad.v = and <32 x i1> %foreign.v, %mask
  %bad = bitcast <32 x i1> %bad.v to i32
  %any = icmp ne i32 %bad, 0
  br i1 %any, label %fault, label %good
fault:
  call void @record_fault(ptr %c, i32 %bad, i32 9, ptr %addresses, i32 %width, i32 %instruction)
  ret i32 0
good:
  %done = call i32 @address_shared(ptr %c, i32 %lanes, ptr %addresses, i32 %width, i32 %write,
                                   i32 %instruction)
  ret i32 %done
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
