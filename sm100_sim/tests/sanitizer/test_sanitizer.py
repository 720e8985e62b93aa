"""Each class of bug planted in a small kernel, and its correct twin."""

import ctypes
import dataclasses
import re

import pytest
from kernel_text import run_kernel_text
from planted import BUGS, KERNELS, SCHEDULES
from project import DOCS
from sanitizer_kernels import TENSOR, changed

from sm100_sim.errors import SimulationError
from sm100_sim.sanitizer.compiled.records import LogRecord
from sm100_sim.state.tensormap import TensorMap, TensorMapError, encode
from sm100_sim.translate.access_log import LOG_RECORD

pytestmark = pytest.mark.simulator

DOCUMENT = DOCS / "sanitizer.md"


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_correct_kernels_are_clean(name, options):
    assert KERNELS[name].run(**options) == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.number}-{bug.kernel}-{bug.what}")
def test_planted_bug_is_reported(bug):
    found = bug.reported()
    assert found & bug.expected, found


def test_both_layouts_of_a_log_record_are_one():
    """The code that writes a record and the routines that read it agree."""
    offsets = {name: getattr(LogRecord, name).offset for name, _ in LogRecord._fields_}
    assert offsets == {name: offset for name, (_, offset) in LOG_RECORD.fields.items()}
    assert ctypes.sizeof(LogRecord) == LOG_RECORD.itemsize


_MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r{d}], [%r12], %rd0, %r16, %p3;\n"
_STORE = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13], {%r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0};\n"
_COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem];"

#: Two tcgen05 instructions of one thread on the same columns: name -> text, finding if the pair
#: is not one of the pipelined ones that the PTX ISA lists.
PAIRS = {
    "one accumulator": (changed(TENSOR, "commit", _MMA.format(d=10) + _COMMIT), None),
    "two accumulators": (
        changed(TENSOR, "commit", "add.u32 %r25, %r10, 8;\n" + _MMA.format(d=25) + _COMMIT),
        "mma-in-flight",
    ),
    "two stores": (changed(TENSOR, "store", 2 * _STORE), "store-in-flight"),
    "two stores, the first waited for": (
        changed(TENSOR, "store", _STORE + "tcgen05.wait::st.sync.aligned;\n" + _STORE),
        None,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_only_listed_pairs_of_tensor_instructions_are_in_order(name):
    text, expected = PAIRS[name]
    assert KERNELS["TENSOR"].run(text, sanitize="strict") == []
    found = {finding.kind for finding in KERNELS["TENSOR"].run(text, sanitize="strict-order")}
    assert found == (set() if expected is None else {expected})


@pytest.mark.parametrize("bug", BUGS[3::9], ids=lambda bug: f"{bug.number}-{bug.kernel}-{bug.what}")
def test_a_trace_beside_the_sanitizer_changes_no_finding(bug):
    found = []
    for trace in (False, True):
        try:
            said = KERNELS[bug.kernel].run(bug.text, sanitize=True, trace=trace)
        except SimulationError as error:
            said = [error.message, *error.findings]
        found.append(sorted(map(str, said)))
    assert found[0] == found[1] != []


def test_every_class_is_planted():
    """Every planted text differs from its twin, or the bug would be none."""
    assert {bug.number for bug in BUGS} == set(range(1, 24))
    assert all(bug.text != KERNELS[bug.kernel].text for bug in BUGS)


def test_the_document_names_the_kernels():
    rows = re.findall(r"^\| (\d+) \| .*\| ([A-Z_, ]+) \|$", DOCUMENT.read_text("utf-8"), re.M)
    named = {int(number): set(kernels.split(", ")) for number, kernels in rows}
    planted = {number: set() for number in named}
    for bug in BUGS:
        planted[bug.number].add(bug.kernel)
    assert named == planted


@pytest.mark.parametrize("kernel", ["SEMAPHORE", "MAPS", "OUTPUT", "COPY_GROUP", "STORES"])
def test_findings_name_both_accesses(kernel):
    """Instruction text, PTX line, CTA and warp of each, and the missing edge."""
    bugs = [bug for bug in BUGS if bug.kernel == kernel]
    texts = [
        finding
        for bug in bugs
        for finding in bug.findings()
        if finding.kind in bug.expected and finding.kind != "uninitialised-read"
    ]
    assert texts
    access = r"`[^`]+` \(PTX line \d+\), CTA \(\d, 0, 0\) warp \d"
    for text in texts:
        assert len(re.findall(access, text)) == 2, text


def test_tensors_of_size_zero_have_no_map():
    """Class 20: the driver refuses them, so the simulator does."""
    whole = TensorMap(0, "u32", (32, 4), (128,), (32, 1), (1, 1))
    encode(whole)
    with pytest.raises(TensorMapError, match="size"):
        encode(dataclasses.replace(whole, sizes=(32, 0)))


def _primed(primer: int, late: int) -> str:
    """Warp 1 fills a slot three times, warp 2 frees it; `primer` frees it first, `late` last."""
    wait = (
        "{{ .reg .pred %w; AGAIN: mbarrier.try_wait.parity.shared.b64 %w, [smem+{}], {};"
        " @!%w bra AGAIN; }}\n"
    )
    arrive = "@%p0 mbarrier.arrive.shared.b64 _, [smem+{}];\n"
    fill = "".join(wait.format(0, i % 2) + arrive.format(8) for i in range(3))
    free = "".join(
        wait.format(8, i % 2) + (arrive.format(0) if i < 2 or late == 2 else "") for i in range(3)
    )
    last = wait.format(8, 0) + wait.format(8, 1) + wait.format(8, 0) + arrive.format(0)
    return f"""
        mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; and.b32 %r2, %r0, 31;
        setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r0, 0;
        @%p1 mbarrier.init.shared.b64 [smem], 1; @%p1 mbarrier.init.shared.b64 [smem+8], 1;
        setp.eq.u32 %p2, %r0, {32 * primer}; {"" if primer == 0 else "bar.sync 0;"}
        @%p2 mbarrier.arrive.shared.b64 _, [smem];
        bar.sync 0;
        setp.eq.u32 %p3, %r1, 1; @%p3 bra FILL; setp.eq.u32 %p3, %r1, 2; @%p3 bra FREE;
        {last if late == 0 else ""} bra.uni END;
        FILL: {fill} bra.uni END;
        FREE: {free}
        END: bar.sync 0;"""


@pytest.mark.parametrize(
    "primer,late,found",
    [(0, 2, set()), (1, 2, {"arrivals-unbalanced"}), (0, 0, {"arrivals-unbalanced"})],
)
def test_who_initialises_a_barrier_of_empty_slots_may_free_them_first(primer, late, found):
    report = run_kernel_text(_primed(primer, late), block=(96, 1, 1), sanitize=True)
    assert {finding.kind for finding in report.findings} == found
