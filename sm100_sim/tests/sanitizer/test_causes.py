"""Findings by cause, in reports, errors and what `python -m sm100_sim` prints."""

import json
import pickle
import re
import threading

import pytest
from kernel_text import run_kernel_text
from sanitizer_kernels import START, without

from sm100_sim.causes import causes_of, listed
from sm100_sim.errors import Hang
from sm100_sim.sanitizer.findings import Finding, Site

pytestmark = pytest.mark.simulator

#: Six times, warp 0 fills 128 bytes of shared memory and both warps read them by four loads.
FILLED = (
    START
    + """
shl.b32 %r5, %r2, 2;  add.u32 %r5, %r5, %r3;  mov.u32 %r4, 0;  setp.ne.u32 %p1, %r1, 0;
NEXT:
@%p1 bra READ;
st.shared.b32 [%r5], %r4;
READ:
/*full*/ bar.sync 0;
ld.shared.b32 %r12, [%r3];
ld.shared.b32 %r13, [%r3+32];
ld.shared.b32 %r14, [%r3+64];
ld.shared.v2.b32 {%r15, %r16}, [%r3+96];
/*empty*/ bar.sync 0;
add.u32 %r4, %r4, 1;  setp.lt.u32 %p3, %r4, 6;
@%p3 bra NEXT;
"""
)
REFILLED = without(FILLED, "empty")
#: Behind the loop one warp reads what the other has written, which nothing orders.
UNORDERED = """
@!%p1 st.shared.b32 [smem+512], %r0;
bar.sync 0;
@%p1 st.shared.b32 [smem+512], %r0;
@!%p1 ld.shared.b32 %r20, [smem+512];
"""
STEP = {"block": (64, 1, 1)}


def findings(text, **options):
    return run_kernel_text(text, sanitize=True, **(STEP | options)).findings


def test_loads_that_one_barrier_would_order_are_one_cause():
    """Loads are found before the store and, one time later, after it."""
    assert findings(FILLED) == []
    found = findings(REFILLED)
    assert len(found) >= 5
    (cause,) = causes_of(found)
    assert set(cause.findings) == set(found) and cause.kinds == ("race",)
    assert cause.about == "shared memory" and cause.times >= len(found)
    assert cause.ctas == ((0, 0, 0),) and cause.warps == (0, 1)
    assert set(cause.lines) == {line for finding in found for line in finding.lines}


def test_a_second_missing_edge_is_a_second_cause():
    first, second = causes_of(findings(REFILLED + UNORDERED))
    assert "[smem+512]" not in "".join(first.findings)
    assert all(text.count("[smem+512]") == 2 for text in second.findings)
    (alone,) = causes_of(findings(FILLED + UNORDERED))
    assert len(alone.findings) == len(second.findings)


def test_another_rule_is_another_cause():
    """A read of what nobody has written, in the stretch of the racing loads."""
    text = REFILLED.replace(
        "ld.shared.b32 %r12, [%r3];", "ld.shared.b32 %r12, [%r3];  ld.shared.b32 %r17, [%r3+256];"
    )
    assert [cause.kinds for cause in causes_of(findings(text))] == [
        ("uninitialised-read",),
        ("race",),
    ]


def test_ctas_and_warps_of_all_launches_are_in_it():
    found = findings(REFILLED, grid=(4, 2, 1))
    (cause,) = causes_of([*found, *findings(REFILLED)])
    assert len(cause.ctas) == 8 and "8 CTAs from (0, 0, 0) to (3, 1, 0)" in str(cause)
    assert "warps 0-1" in str(cause)
    assert len(cause.findings) == len(found)
    assert (
        cause.times
        == sum(finding.times for finding in found) + causes_of(findings(REFILLED))[0].times
    )


def test_a_cause_shows_one_finding_line_by_line():
    """The first access, the second and the missing edge; colours on a terminal alone."""
    (cause,) = causes_of(findings(REFILLED))
    head, first, second, missing = str(cause).splitlines()
    assert f"{len(cause.findings)} findings" in head and "PTX lines" in head
    one, other = cause.findings[0].parties
    for line, label, party in ((first, "first", one), (second, "second", other)):
        who = f"PTX line {party.line}, CTA (0, 0, 0) warp {party.warp})"
        assert line == f"{label + ':':9}`{party.text}` ({party.what}, {who}"
    assert missing == f"missing: {cause.findings[0].missing}"
    assert listed([cause, cause]).count("missing: ") == 2
    painted = cause.shown(colour=True)
    assert re.sub(r"\033\[[\d;]*m", "", painted) == str(cause) and painted != str(cause)


def test_copies_of_a_loop_body_are_one_cause():
    """Loads of one role, each with a stretch of its own, before one deallocation."""

    def freed(load, warp, opcode="tcgen05.ld", stretch=9):
        sites = (
            Site(load, load, opcode, (0, 0, 0), warp),
            Site(99, 99, "tcgen05.dealloc", (0, 0, 0), 4),
        )
        finding = Finding("freed-in-use", f"at {load}", sites, "tensor memory")
        finding.stretches = (load, stretch)
        return finding

    found = [
        freed(1, 4),
        freed(2, 4),
        freed(3, 8),
        freed(4, 4),
        freed(5, 4, "tcgen05.st"),
        freed(4, 4, stretch=7),
    ]
    assert [cause.lines for cause in causes_of(found)] == [(1, 2, 4, 99), (3, 99), (5, 99)]


def test_long_register_lists_are_shortened():
    registers = ", ".join(f"%r{i}" for i in range(32))
    (cause,) = causes_of([f"machine: `tcgen05.ld {{{registers}}}, [%r1]`, `cp {{%r1, %r2}}`"])
    assert str(cause).endswith("`tcgen05.ld {%r0, ..., %r31}, [%r1]`, `cp {%r1, %r2}`")


def test_notes_that_differ_in_numbers_alone_are_one_cause():
    body = "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0;" + "".join(
        f"@%p0 mbarrier.init.shared.b64 [smem+{8 * i}], 1;" * 2 for i in range(3)
    )
    found = run_kernel_text(body).findings
    assert len(found) == 3
    (cause,) = causes_of(found)
    assert cause.kinds == ("machine",) and cause.findings == tuple(found)


def test_findings_survive_a_trip_between_processes():
    found = findings(REFILLED, grid=(2, 1, 1))
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found
    assert [str(c) for c in causes_of(copied)] == [str(c) for c in causes_of(found)]


def test_the_report_has_all_findings_and_their_causes():
    report = run_kernel_text(REFILLED, sanitize=True, **STEP)
    values = json.loads(report.to_json())
    assert values["findings"] == report.findings and len(report.findings) >= 5
    (cause,) = values["causes"]
    assert sorted(cause["findings"]) == sorted(report.findings) and cause["warps"] == [0, 1]


@pytest.mark.parametrize("sanitize", [True, "strict"])
def test_an_error_has_all_findings_and_prints_their_causes(sanitize):
    text = REFILLED + "bar.sync 1, 96;"
    with pytest.raises(Hang) as raised:
        run_kernel_text(text, sanitize=sanitize, **STEP)
    assert len(raised.value.findings) >= 5
    assert str(raised.value).count("nothing orders the two") == 1


# ---------------------------------------------------------------- python -m sm100_sim

SCRIPT = """
import signal, sys
import cutlass, torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def racy(target: cute.Tensor, hangs: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    shared = cutlass.memory.SmemAllocator()
    cells = shared.allocate_tensor(cutlass.Int32, cute.make_layout(64), 16)
    barrier = shared.allocate_array(cutlass.Int64, 1)
    cells[thread] = 0
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.sync_threads()
    cells[thread] = thread
    target[thread] = cells[63 - thread]
    if cutlass.const_expr(hangs):
        cute.arch.mbarrier_wait(barrier, 0)

@cute.jit
def both(target: cute.Tensor, hangs: cutlass.Constexpr):
    racy(target, False).launch(grid=(1, 1, 1), block=(64, 1, 1))
    racy(target, hangs).launch(grid=(1, 1, 1), block=(64, 1, 1))

how = sys.argv[1]
try:
    both(from_dlpack(torch.zeros(64, dtype=torch.int32)), how in ("hang", "caught"))
except Exception:
    if how != "caught":
        raise
if how == "raise":
    raise ValueError("results differ")
if how == "signal":
    signal.raise_signal(signal.SIGTERM)
sys.exit({"exit": 3, "text": "results differ"}.get(how))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    path = tmp_path / "racy.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("none", 0, ""), ("exit", 3, ""), ("text", 1, "results differ"), ("caught", 0, ""),
        ("raise", 1, "ValueError: results differ"), ("hang", 1, "Hang: the launch hangs"),
        ("signal", 143, "Terminated"),
    ],
)  # fmt: skip
def test_findings_come_last_however_the_script_ends(script, capfd, how, status, error):
    from sm100_sim.attach.runner import run_script

    if how == "signal" and threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread alone")
    assert run_script([script, how]) == status
    out, err = capfd.readouterr()
    assert error in err and (error != "" or "Traceback" not in err)
    assert "nothing orders" not in err, "the traceback must not hide the findings"
    # The causes are the last thing printed, those of a kernel that failed included, but for what
    # was looked for.
    head, first, second, missing, what = out.splitlines()[-5:]
    assert head.startswith("  1. race in shared memory: ")
    accesses = "racy.py:17: cells[thread] = thread", "racy.py:18: target[thread] = cells[63 - "
    assert sum(access in line for line in (first, second) for access in accesses) == 2
    assert "nothing orders the two" in missing and "looked for races" in what
    failed = how in ("hang", "caught")
    assert ("1 more failed" in out) == failed
    assert out.count("1 cause in racy") == 2
    if "Traceback" in err:
        assert err.index("Traceback") < err.index("racy.py")
        assert "runpy" not in err.partition("Traceback")[2]
        assert ("sm100_sim/src" in err) == (how == "signal"), "frames of the simulator"
