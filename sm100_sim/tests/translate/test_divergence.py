"""Lanes that part and meet again, wait alone, exit early; memory access and its faults."""

from __future__ import annotations

import numpy as np
import pytest
from harness import compile_body, resume, run_compiled, run_warp

from sm100_sim.errors import MemoryFault
from sm100_sim.state.warp import ALL_LANES, Environment

LANE = np.arange(32, dtype=np.uint32)


def environment(shared: np.ndarray | None = None, ranges=()) -> Environment:
    shared = np.zeros((2, 4096), np.uint8) if shared is None else shared
    return Environment(
        shared,
        np.full(len(shared), shared.shape[1], np.uint32),
        np.array(ranges, np.uint64).reshape(-1, 3),
        np.zeros(16, np.uint8),
    )


def test_loop_with_a_trip_count_per_lane():
    """sum of 1..lane: lanes leave the loop one by one and meet at the shuffle."""
    run = run_warp(
        """
        .reg .b32 %n, %sum, %all; .reg .pred %p;
        mov.u32 %n, %laneid; mov.b32 %sum, 0;
        L: setp.eq.u32 %p, %n, 0; @%p bra D;
        add.u32 %sum, %sum, %n; sub.u32 %n, %n, 1; bra.uni L;
        D: shfl.sync.idx.b32 %all, %sum, 31, 31, -1;
    """,
        {},
        ["%sum", "%all"],
    )
    assert (run["%sum"] == LANE * (LANE + 1) // 2).all()
    assert set(run["%all"]) == {31 * 32 // 2}
    assert run.count("shfl") == (1, 32)


def test_nested_branches_reconverge_for_a_vote():
    run = run_warp(
        """
        .reg .b32 %l, %d, %v; .reg .pred %p, %q;
        mov.u32 %l, %laneid; and.b32 %d, %l, 3;
        setp.lt.u32 %p, %d, 2; @%p bra A;
        setp.eq.u32 %q, %d, 2; @%q bra B;
        mov.b32 %v, 30; bra E;
        B: mov.b32 %v, 20; bra E;
        A: mov.b32 %v, 10;
        E: setp.eq.u32 %q, %v, 10;
        vote.sync.ballot.b32 %d, %q, -1;
    """,
        {},
        ["%v", "%d"],
    )
    assert (run["%v"] == np.array([10, 10, 20, 30] * 8)).all()
    assert set(run["%d"]) == {0x33333333}
    assert run.count("vote") == (1, 32)


def test_indexed_branch():
    run = run_warp(
        """
        .reg .b32 %i, %d;
        and.b32 %i, %i, 3; mov.b32 %d, 7;
        T: .branchtargets A, B, C, A;
        brx.idx %i, T;
        A: add.u32 %d, %d, 100; bra E;
        B: add.u32 %d, %d, 200; bra E;
        C: add.u32 %d, %d, 300;
        E:
    """,
        {"%i": LANE},
        ["%d"],
    )
    assert (run["%d"] == 7 + np.array([100, 200, 300, 100] * 8)).all()


def test_exited_lanes_are_not_waited_for():
    run = run_warp(
        """
        .reg .b32 %l, %d; .reg .pred %p;
        mov.u32 %l, %laneid; mov.b32 %d, 5;
        setp.ge.u32 %p, %l, 20; @%p exit;
        vote.sync.ballot.b32 %d, %p, -1;
        activemask.b32 %d;
    """,
        {},
        ["%d"],
    )
    assert (run["%d"] == np.where(LANE < 20, 0xFFFFF, 5)).all()
    assert run.stops[-1].kind == "exit"


def test_lanes_beyond_the_block_do_not_exist():
    run = run_warp(
        ".reg .b32 %d; activemask.b32 %d;", {}, ["%d"], specials={"%ntid.x": 40}, index=1
    )
    assert run["%d"][0] == 0xFF and run["%d"][8] == 0xFFF05EED


def test_only_the_lanes_that_wait_wait():
    """Lane 0 blocks at its trap; the others go on to the point where the warp must be whole."""
    compiled = compile_body(
        """
        .reg .b32 %l, %d, %m; .reg .pred %p, %q; .reg .b64 %t;
        mov.u32 %l, %laneid; mov.b32 %d, 0;
        setp.ne.u32 %p, %l, 0; @%p bra J;
        mbarrier.try_wait.parity.shared.b64 %q, [%m], 0;
        J: mov.b32 %d, 1;
        mbarrier.test_wait.parity.shared.b64 %q, [%m], 0;
        vote.sync.ballot.b32 %d, %p, -1;
    """,
        ("%d",),
    )
    seen = []

    def executor(warp, stop):
        seen.append((stop.instruction.opcode, stop.lanes))
        if len(seen) == 1:
            warp.block(stop.lanes, "barrier")
        elif len(seen) == 2:
            assert warp.runnable == ALL_LANES - 1
            assert resume(warp).kind == "blocked"
            assert warp.instruction_of(0).opcode == "mbarrier.try_wait"
            assert list(warp.waiting.values()) == ["barrier"]
            warp.unblock(1)

    run = run_compiled(compiled, {}, environment(), {"%ntid.x": 32}, executor)
    wait, test = "mbarrier.try_wait", "mbarrier.test_wait"
    assert seen == [(wait, 1), (test, ALL_LANES - 1), (wait, 1), (test, 1)]
    assert set(run["%d"]) == {0xFFFFFFFE} and not run.warp.waiting


def test_lanes_that_wait_for_each_other_are_reported():
    run = run_warp(
        """
        .reg .b32 %l, %d; .reg .pred %p;
        mov.u32 %l, %laneid; setp.lt.u32 %p, %l, 16; @%p bra A;
        bar.warp.sync -1; bra E;
        A: vote.sync.ballot.b32 %d, %p, -1;
        E:
    """,
        {},
        ["%d"],
    )
    assert run.stops[-1].kind == "divergence"
    assert run.stops[-1].instruction.opcode in ("bar.warp.sync", "vote.sync")


def test_a_membermask_asks_only_for_its_lanes():
    run = run_warp(
        """
        .reg .b32 %l, %d, %m; .reg .pred %p;
        mov.u32 %l, %laneid; setp.lt.u32 %p, %l, 16; @%p bra A;
        vote.sync.ballot.b32 %d, !%p, %m; bra E;
        A: vote.sync.ballot.b32 %d, %p, 0xffff;
        E:
    """,
        {"%m": 0xFFFF0000},
        ["%d"],
    )
    assert (run["%d"] == np.where(LANE < 16, 0xFFFF, 0xFFFF0000)).all()


def test_endless_loops_yield():
    compiled = compile_body(".reg .b32 %d; mov.b32 %d, 0; L: add.u32 %d, %d, 1; bra L;")
    from sm100_sim.state.warp import Warp

    warp = Warp(compiled, None, 0, environment(), {"%ntid.x": 32}, compiled.new_counters())
    assert resume(warp, 1000).kind == "yield" and resume(warp, 1000).kind == "yield"


def test_guarded_trap_runs_only_where_the_guard_holds():
    seen = []
    run = run_warp(
        """
        .reg .b32 %l, %d; .reg .pred %p, %q;
        mov.u32 %l, %laneid; setp.gt.u32 %p, %l, 27; mov.b32 %d, 3;
        @%p mbarrier.test_wait.parity.shared.b64 %q, [%l], 0;
        @%q mov.b32 %d, 4;
    """,
        {},
        ["%d"],
        executor=lambda warp, stop: seen.append(stop.lanes),
    )
    assert seen == [0xF0000000] and set(run["%d"]) == {3}


def test_counts_are_exact_for_guards_and_divergence():
    run = run_warp(
        """
        .reg .b32 %l, %d; .reg .pred %p; .reg .f32 %f;
        mov.u32 %l, %laneid; mov.b32 %f, 0f3F800000;
        setp.lt.u32 %p, %l, 5; @%p ex2.approx.ftz.f32 %f, %f;
        @%p bra A; fma.rn.f32 %f, %f, %f, %f; A:
    """,
        {},
        ["%f"],
    )
    assert run.count("mufu.ex2") == (1, 5) and run.count("fma") == (1, 27)
    assert set(run.floats("%f")) == {2.0}


# Warp-wide exchange.


@pytest.mark.parametrize(
    "mode,b,c",
    [
        ("idx", 5, 31),
        ("idx", 2, 0x1C03),
        ("up", 1, 0),
        ("up", 3, 0x1800),
        ("down", 1, 31),
        ("down", 4, 0x180F),
        ("bfly", 16, 31),
        ("bfly", 1, 31),
        ("bfly", 8, 0x1807),
    ],
)
def test_shuffles(mode, b, c):
    value = np.random.default_rng(5).integers(0, 2**32, 32, dtype=np.uint32)
    run = run_warp(
        f".reg .b32 %v, %d; .reg .pred %p; shfl.sync.{mode}.b32 %d|%p, %v, {b}, {c}, -1;",
        {"%v": value},
        ["%d", "%p"],
    )
    clamp, segment = c & 31, c >> 8 & 31
    for lane in range(32):
        low = lane & segment
        high = low | clamp & ~segment & 31
        source = {
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
            "idx": low | b & ~segment & 31,
        }[mode]
        inside = source >= high if mode == "up" else source <= high
        assert run["%d"][lane] == value[source if inside else lane], (mode, lane)
        assert run["%p"] >> lane & 1 == inside


def test_votes_elect_match_and_redux():
    value = (LANE * 7 + 3) % 5
    run = run_warp(
        """
        .reg .b32 %v, %e, %m, %s, %x; .reg .pred %p, %all, %any, %uni, %elected, %same;
        setp.lt.u32 %p, %v, 4;
        vote.sync.all.pred %all, %p, -1; vote.sync.any.pred %any, %p, -1;
        vote.sync.uni.pred %uni, %p, -1;
        elect.sync %e|%elected, -1;
        match.any.sync.b32 %m, %v, -1;
        match.all.sync.b32 %x|%same, %v, -1;
        redux.sync.add.s32 %s, %v, -1;
        redux.sync.max.u32 %x, %v, -1;
    """,
        {"%v": value},
        ["%all", "%any", "%uni", "%elected", "%e", "%m", "%s", "%x", "%same"],
    )
    assert run["%all"] == 0 and run["%any"] == ALL_LANES and run["%uni"] == 0
    assert run["%elected"] == 1 and set(run["%e"]) == {0} and run["%same"] == 0
    for lane in range(32):
        assert run["%m"][lane] == sum(1 << k for k in range(32) if value[k] == value[lane])
    assert set(run["%s"]) == {value.sum()} and set(run["%x"]) == {4}


# Memory.


def test_shared_loads_and_stores_of_every_width():
    shared = np.zeros((2, 8192), np.uint8)
    body = """
        .reg .b32 %a, %b, %c, %d, %x, %base; .reg .b16 %h; .reg .b64 %q, %g;
        mov.b32 %base, buffer; mad.lo.u32 %a, %x, 16, %base;
        st.shared.v4.b32 [%a], {%x, %x, %x, %b};
        st.shared.b16 [%a+2], %h;
        st.shared.b8 [%a+7], %h;
        ld.shared.v2.b32 {%c, %d}, [%a];
        ld.shared::cta.b64 %q, [%a+8];
        ld.shared.s8 %b, [%a+7];
        cvt.u64.u32 %g, %a; cvta.shared.u64 %g, %g; st.b32 [%g+12], %c;
    """
    run = run_warp(
        body,
        {"%x": LANE, "%b": 1000 + LANE, "%h": 0xABF0},
        ["%c", "%d", "%q", "%b"],
        shared=shared,
        head=".shared .align 16 .b8 buffer[512];",
        specials={"%cluster_ctarank": 1},
    )
    cells = shared[1, 1024:1536].view(np.uint32).reshape(32, 4)
    assert not shared[0].any()
    first = LANE | 0xABF0 << 16
    assert (run["%c"] == first).all() and (cells[:, 0] == first).all()
    assert (cells[:, 1] == (LANE | 0xF0 << 24)).all() and (run["%d"] == cells[:, 1]).all()
    assert (run["%q"] == (LANE.astype(np.uint64) | (1000 + LANE.astype(np.uint64)) << 32)).all()
    assert set(run["%b"]) == {0xFFFFFFF0} and (cells[:, 3] == first).all()


def test_remote_shared_and_global_memory():
    shared = np.zeros((2, 4096), np.uint8)
    data = np.arange(64, dtype=np.float32)
    out = np.zeros(32, np.float32)
    ranges = sorted((a.ctypes.data, a.ctypes.data + a.nbytes, w) for a, w in ((data, 0), (out, 1)))
    body = """
        .reg .b32 %a, %r, %x; .reg .f32 %f, %s; .reg .b64 %p, %o, %i;
        ld.param.u64 %p, [in]; ld.param.u64 %o, [out];
        mul.wide.u32 %i, %x, 4; add.s64 %p, %p, %i; add.s64 %o, %o, %i;
        ld.global.nc.L1::no_allocate.L2::128B.f32 %f, [%p];
        ld.relaxed.gpu.global.f32 %s, [%p+128];
        add.f32 %f, %f, %s; st.global.f32 [%o], %f;
        mov.b32 %a, buffer; mad.lo.u32 %a, %x, 4, %a; mapa.shared::cluster.u32 %r, %a, 1;
        st.shared::cluster.f32 [%r], %f;
    """
    params = np.array([data.ctypes.data, out.ctypes.data], np.uint64).view(np.uint8)
    run = run_warp(
        body,
        {"%x": LANE},
        [],
        shared=shared,
        ranges=ranges,
        params=params,
        param_text=".param .u64 in, .param .u64 out",
        head=".shared .align 16 .b8 buffer[128];",
    )
    assert run.stops[-1].kind == "exit"
    assert (out == data[:32] + data[32:]).all()
    assert (shared[1, 1024:1152].view(np.float32) == out).all() and not shared[0].any()


def test_local_memory_is_private_to_a_lane():
    run = run_warp(
        """
        .local .align 16 .b8 depot[32]; .reg .b64 %s, %g; .reg .b32 %x, %d, %o;
        mov.b64 %s, depot; cvta.local.u64 %g, %s;
        st.local.b32 [%s+8], %x; and.b32 %o, %x, 7; ld.b32 %d, [%g+8];
        add.u32 %d, %d, %o;
    """,
        {"%x": LANE},
        ["%d"],
    )
    assert (run["%d"] == LANE + LANE % 8).all()


@pytest.mark.parametrize(
    "code,lane,reason",
    [
        ("@%p ld.shared.b32 %d, [%a];", 9, "outside the allocated"),
        ("@%p st.shared.b64 [%a+-4], %q;", 9, "outside the allocated"),
        ("ld.shared.b32 %d, [1026];", 0, "misaligned shared"),
        ("ld.shared.b32 %d, [16];", 0, "outside the allocated"),
        ("ld.shared::cluster.b32 %d, [0x05000400];", 0, "rank outside"),
        ("@%p st.global.b32 [%g], %d;", 9, "read-only"),
        ("ld.global.b32 %d, [%g+100000];", 0, "outside the tensors"),
        ("ld.global.b64 %q, [%g+4];", 0, "misaligned global"),
        ("ld.local.b32 %d, [64];", 0, "outside the stack"),
    ],
)
def test_refused_accesses_name_lane_and_instruction(code, lane, reason):
    data = np.zeros(4, np.uint64)
    ranges = [(data.ctypes.data, data.ctypes.data + data.nbytes, 0)]
    inputs = {"%a": 0x1000, "%g": data.ctypes.data}
    run = run_warp(
        ".reg .pred %p; .reg .b32 %d, %a, %l; .reg .b64 %q, %g; mov.u32 %l, %laneid;"
        "setp.eq.u32 %p, %l, 9; mov.b32 %d, 1; mov.b64 %q, 2;" + code,
        {name: value for name, value in inputs.items() if name in code},
        [],
        ranges=ranges,
    )
    stop = run.stops[-1]
    assert stop.kind == "fault" and reason in stop.fault.reason
    assert stop.fault.lane == lane and stop.instruction.text == code[:-1]


def test_the_parameter_buffer_is_readable_by_generic_address():
    params = np.arange(8, dtype=np.uint32).view(np.uint8)
    run = run_warp(
        ".reg .b64 %a; .reg .b32 %d; mov.b64 %a, p; cvta.param.u64 %a, %a;ld.b32 %d, [%a+12];",
        {},
        ["%d"],
        params=params,
        param_text=".param .align 4 .b8 p[32]",
    )
    assert set(run["%d"]) == {3}


def test_an_address_before_zero_is_in_no_range():
    data = np.zeros(32, np.uint64)
    run = run_warp(
        ".reg .pred %p; .reg .b32 %l, %d; .reg .b64 %g; mov.u32 %l, %laneid;"
        "setp.eq.u32 %p, %l, 9; @%p mov.b64 %g, -8; ld.global.b64 %g, [%g];",
        {"%g": data.ctypes.data},
        ["%g"],
        ranges=[(data.ctypes.data, data.ctypes.data + data.nbytes, 0)],
    )
    assert run.stops[-1].kind == "fault" and run.stops[-1].fault.lane == 9


_PARAM_REGISTERS = ".reg .b64 %a, %x, %y; .reg .b32 %l, %d; mov.b64 %a, p; mov.u32 %l, %laneid;"


def test_parameters_are_loaded_by_an_offset_in_a_register():
    params = np.arange(32, dtype=np.uint64)
    run = run_warp(
        _PARAM_REGISTERS
        + """
        mad.wide.u32 %a, %l, 4, %a; ld.param.b32 %d, [%a+16]; and.b64 %a, %a, 0xF8;
        and.b64 %a, %a, 0xF0; ld.param.v2.b64 {%x, %y}, [%a+32];""",
        {},
        ["%d", "%x", "%y"],
        params=np.concatenate([params[:2], params]).view(np.uint8),
        param_text=".param .align 8 .b8 q[16], .param .align 16 .b8 p[256]",
    )
    words = params.view(np.uint32)
    assert (run["%d"] == words[4 + LANE]).all()
    first = 4 + 2 * (LANE // 4)
    assert (run["%x"] == params[first]).all() and (run["%y"] == params[first + 1]).all()


@pytest.mark.parametrize("offset", [0, 124, 1 << 63, -8, 1 << 20])
def test_an_offset_past_the_parameters_is_refused(offset):
    run = run_warp(
        _PARAM_REGISTERS
        + f"""
        .reg .pred %p; setp.eq.u32 %p, %l, 9; @%p add.s64 %a, %a, {offset};
        ld.param.v2.b32 {{%d, %l}}, [%a];""",
        {},
        ["%d"],
        params=np.zeros(128, np.uint8),
        param_text=".param .align 16 .b8 p[128]",
    )
    stop = run.stops[-1]
    if offset == 0:
        assert stop.kind == "exit"
    else:
        assert stop.kind == "fault" and stop.fault.lane == 9


# Atomics.


def test_atomics_run_lane_by_lane():
    shared = np.zeros((1, 4096), np.uint8)
    out = np.zeros(4, np.float32)
    cells = shared[0, 1024:1280].view(np.uint32)
    cells[1], cells[2], cells[3] = 0xFFFFFFFF, 5, 100
    body = """
        .reg .b32 %a, %x, %old, %c, %t; .reg .b64 %g; .reg .f32 %f;
        mov.b32 %a, buffer;
        atom.shared.add.u32 %old, [%a], %x;
        red.shared.min.s32 [%a+4], %x;
        atom.shared.cas.b32 %c, [%a+8], 5, %t;
        atom.shared.inc.u32 %x, [%a+12], 3;
        red.relaxed.gpu.global.add.f32 [%g], %f;
        red.global.add.v2.f32 [%g+8], {%f, %f};
    """
    run = run_warp(
        body,
        {"%x": LANE, "%t": 77, "%g": out.ctypes.data, "%f": 0x3F000000},
        ["%old", "%c", "%x"],
        shared=shared,
        ranges=[(out.ctypes.data, out.ctypes.data + out.nbytes, 1)],
        head=".shared .align 16 .b8 buffer[256];",
    )
    assert (run["%old"] == np.cumsum(LANE) - LANE).all() and cells[0] == LANE.sum()
    assert cells[1] == 0xFFFFFFFF
    assert list(run["%c"]) == [5] + [77] * 31 and cells[2] == 77
    assert list(run["%x"]) == [100] + [n % 4 for n in range(31)]
    assert list(out) == [16, 0, 16, 16]


def test_atomics_outside_memory_are_refused():
    with pytest.raises(MemoryFault, match="outside the writable"):
        run_warp(
            ".reg .b64 %g; .reg .b32 %x; red.global.add.u32 [%g], %x;", {"%g": 4096, "%x": 1}, []
        )
