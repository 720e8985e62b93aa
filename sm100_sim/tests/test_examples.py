"""The scripts under examples/, by themselves or by `python -m sm100_sim`, as their texts say."""

import json
import re
import runpy
import sys

import pytest
from project import PROJECT

from sm100_sim.attach.runner import run_script

EXAMPLES = PROJECT / "examples"

pytestmark = [
    pytest.mark.simulator,
    # The packages are older than the DSL they run on here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data"),
]

pytest.importorskip("cutlass")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example under the sanitizer: what it prints, and (kinds, findings) of each cause."""
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")

    def run(name, *arguments):
        assert run_script([str(EXAMPLES / name), *arguments]) == 0
        out = capsys.readouterr().out
        causes = re.findall(r"^  \d+\. ([\w -]+?)(?: in [\w ]+)?: (\d+) finding", out, re.M)
        return out, [(kinds, int(count)) for kinds, count in causes]

    return run


def test_a_ring_that_is_filled_again_under_its_readers(run):
    """One missing barrier is one cause, and the copy is wrong."""
    out, ((kinds, count),) = run("single_warp_tma.py")
    assert kinds == "race and copy-in-flight" and count >= 10
    assert not out.startswith("0 of")


def test_the_same_ring_with_the_barrier(run):
    out, causes = run("single_warp_tma.py", "--release")
    assert causes == [] and out.startswith("0 of")


@pytest.mark.third_party
def test_rows_that_do_not_fill_a_thread_block(run):
    pytest.importorskip("quack")
    _, causes = run("quack_rows.py")
    assert {kinds for kinds, _ in causes} == {"uninitialised-read"}


@pytest.mark.third_party
@pytest.mark.sampled
def test_flash_attn_4(run):
    pytest.importorskip("flash_attn.cute")
    out, causes = run("flash_attn_4.py", "64")
    assert causes == [("two-writers", 1), ("exit-too-early", 1)]
    for line in out.splitlines()[:4]:
        ours, torchs = map(float, re.findall(r"\d\.\de-\d\d", line))
        assert ours < torchs


@pytest.mark.sampled
def test_nvidias_gemm(run):
    """The kernel that takes tiles by cluster launch control is exact and clean."""
    pytest.importorskip("cutlass.operators")
    out, causes = run("nvidia_gemm.py")
    assert out.startswith("max error 0.0e+00") and causes == []


@pytest.mark.sampled
def test_nvidias_gemm_that_frees_tensor_memory_in_use(monkeypatch, capsys):
    pytest.importorskip("cutlass.operators")
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    run_script([str(EXAMPLES / "nvidia_gemm.py"), "TgvGemmOperator"])
    shown = capsys.readouterr().out
    assert "max error 0.0e+00" in shown and "freed-in-use in tensor memory" in shown
    assert "reads columns that its CTA has freed" in shown


@pytest.fixture
def plain(monkeypatch, capsys):
    """Runs an example that is no GPU script: what it prints."""

    def plain(name, *arguments):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *map(str, arguments)])
        # Python does so for a script.
        monkeypatch.syspath_prepend(str(EXAMPLES))
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            assert not end.code
        return capsys.readouterr().out

    return plain


def test_the_first_kernel(plain):
    right, counts, *fault = plain("first_kernel.py").splitlines()
    assert right == "0 of 1000 elements differ" and counts.endswith("1000 lanes added")
    assert fault[0].startswith("global access outside the tensors") and "warp 3, lane 8" in fault[1]


def test_a_planted_race(plain):
    right, count, cause, first, second, missing = plain("planted_race.py").splitlines()
    assert right == "PASS: 0 of 128 elements differ" and count == "causes of findings: 1"
    assert cause.startswith("race in shared memory: 1 finding")
    assert "`st.shared.u32 [%place], %x` (write, " in first and first.startswith("first: ")
    assert "`ld.shared.u32 %x, [%place]` (read, " in second and second.startswith("second: ")
    assert missing.startswith("missing: nothing orders the two")
    assert plain("planted_race.py", "--barrier").endswith("causes of findings: 0\n")


def test_a_hang(plain):
    right, *report = plain("hang.py").splitlines()
    assert right == "0 of 64 elements differ"
    assert report[0].startswith("the launch hangs") and len(report) == 3
    assert "CTA (0, 0, 0) warps 0-1 at `mbarrier.try_wait" in report[1]
    assert "256 bytes pending" in report[2]


def test_a_timeline(plain, tmp_path):
    """Each of four warps and the TMA loads of eight tiles are in the trace."""
    pytest.importorskip("numba")
    out = plain("timeline.py", tmp_path / "timeline.json")
    assert "critical path of the whole run" in out and "0 events or sites unmatched" in out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"warp 0", "warp 1", "warp 2", "warp 3", "L2 to SM"} <= rows
    loads = [event for event in events if event["name"] == "load"]
    assert len(loads) == 8 and {event["args"]["bytes"] for event in loads} == {128 * 32 * 4}
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")


@pytest.mark.parametrize("page", ["docs/findings.md", "examples/README.md"])
def test_every_command_of_the_pages_names_a_script(page):
    commands = re.findall(r"(?<![\w/])examples/\w+\.py", (PROJECT / page).read_text())
    assert commands and all((PROJECT / command).is_file() for command in commands)


def test_every_example_is_listed():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
