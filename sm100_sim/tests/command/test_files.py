"""Traces of a run: the line at its end, PTX, SARIF, JUnit and the page."""

import json
import re
from argparse import Namespace
from xml.etree import ElementTree

import numpy as np
import pytest

import sm100_sim
from sm100_sim.__main__ import main
from sm100_sim.command import flags
from sm100_sim.command.files import write_files
from sm100_sim.command.outcome import Outcome
from sm100_sim.command.summary import looked_for, summary
from sm100_sim.terminal import short_name

RACE = """.version 8.6
.target sm_100a
.address_size 64
.file 1 "kernel.cu"
.visible .entry _Z6spread3f(.param .u64 out)
{
.shared .align 4 .b32 cell;
.shared .align 8 .b64 barrier;
.reg .pred %p0;
.reg .b32 %r<3>;
.reg .b64 %rd0;
mov.u32 %r0, %tid.x;
setp.ne.u32 %p0, %r0, 0;
.loc 1 7 3
@!%p0 st.shared.u32 [cell], 5;
.loc 1 8 3, function_name $L, inlined_at 1 30 5
ld.shared.u32 %r1, [cell];
HANG
ld.param.u64 %rd0, [out];
st.global.u32 [%rd0], %r1;
ret;
}
"""
HANG = """@!%p0 mbarrier.init.shared.b64 [barrier], 1;
bar.sync 0;
AGAIN: mbarrier.try_wait.parity.shared.b64 %p0, [barrier], 0;
@!%p0 bra AGAIN;"""


@pytest.fixture(scope="module", params=["race", "alone", "hang"])
def outcome(request):
    text = RACE.replace("HANG", {"race": "bar.sync 0;", "alone": "", "hang": HANG}[request.param])
    found = Outcome(modules={"_Z6spread3f": text})
    try:
        found.reports.append(sm100_sim.launch_ptx(
            text, "_Z6spread3f", [np.zeros(1, np.uint32)], block=64,
            options=sm100_sim.Options(sanitize=True, trace=True),
        ))  # fmt: skip
    except sm100_sim.Hang as hang:
        found.failures.append(hang)
    return found


@pytest.fixture
def written(outcome, tmp_path):
    names = {"keep_ptx": "ptx", "html": "page.html", "sarif": "found.sarif", "junit": "found.xml"}
    write_files(Namespace(**{k: str(tmp_path / name) for k, name in names.items()}), outcome)
    return tmp_path


def test_ptx_is_kept_under_the_name_in_the_source(written, outcome):
    assert (written / "ptx" / "spread.ptx").read_text() == outcome.modules["_Z6spread3f"]


def test_sarif_has_both_places_of_a_race_and_an_error_of_the_launch(written, outcome):
    (run,) = json.loads((written / "found.sarif").read_text())["runs"]
    race, *errors = run["results"]
    places = [*race["locations"], *race["relatedLocations"]]
    lines = [place["physicalLocation"]["region"]["startLine"] for place in places]
    assert lines == [7, 8] and race["ruleId"] == "race"
    assert places[0]["physicalLocation"]["artifactLocation"]["uri"] == "kernel.cu"
    assert [error["ruleId"] for error in errors] == ["Hang"] * len(outcome.failures)
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {
        result["ruleId"] for result in run["results"]
    }


def test_junit_has_a_case_for_the_kernel(written, outcome):
    suite = ElementTree.parse(written / "found.xml").getroot()
    (case,) = suite
    assert case.get("name") == "spread" and suite.get("failures") == suite.get("tests") == "1"
    assert case[0].get("message").startswith("race in shared memory")
    assert [error.tag for error in case[1:]] == ["error"] * len(outcome.failures)


def test_the_page_has_the_stacks_and_the_picture(written, outcome):
    text = (written / "page.html").read_text()
    assert "race in shared memory" in text and "kernel.cu:7" in text
    assert text.index("kernel.cu:8") < text.index("kernel.cu:30"), "the caller comes below"
    assert ("<h2>Hang</h2>" in text) == bool(outcome.failures)
    assert re.search(r"code,pre\{font:13px ui-monospace", text)
    if not outcome.failures:  # an error leaves no trace
        synchronises = "bar.sync" in outcome.modules["_Z6spread3f"]
        timeline = text[text.index("<title>timeline</title>") :]
        assert ("bar.sync" in timeline) == synchronises
        first, second = timeline.index("st.shared.u32, PTX"), timeline.index("ld.shared.u32, PTX")
        assert first < second, "the accesses of the finding stand there, too"
        assert "<title>happens-before</title>" in text
        picture = text[text.index("<svg") : text.index("</svg>")]
        assert "CTA (0, 0, 0) warp 0" in picture and "CTA (0, 0, 0) warp 1" in picture
        assert picture.count("stroke-dasharray") == 1
        assert ("bar.sync" in picture) == synchronises


def test_the_end_of_a_run(outcome, monkeypatch):
    """Findings in the kernel's own name, then the GPU, the schedule and what was looked for."""
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200")
    monkeypatch.setenv("SM100_SIM_SANITIZE", "wait-ld")
    *_, last = lines = summary(outcome.reports, outcome.failures).splitlines()
    assert "1 cause in spread" in "\n".join(lines)
    assert last == looked_for()
    assert "ran as H200 (132 SMs, sm_90a), schedule plain; looked for tcgen05.ld without" in last
    monkeypatch.setenv("SM100_SIM_SANITIZE", "0")
    assert "errors and hangs alone; --sanitize looks for races, too" in looked_for([3])
    assert "schedule seed 3" in looked_for([3])


def test_waits_of_a_hang_are_grouped(outcome):
    for hang in outcome.failures:
        (place,) = re.findall(r"^  \d+\. (.*)", hang.message, re.M)
        assert place.startswith("CTA (0, 0, 0) warps 0-1 at kernel.cu:8: `mbarrier.try_wait")


@pytest.mark.parametrize(("name", "short"), [
    ("_Z6spread3f", "spread"), ("_ZN4ours8combinedILi5EEEvPKfPfi", "ours::combined"),
    ("kernel_cutlass_scale_kernel_tensorptrf32gmemalign16o641_0", "scale_kernel"),
    ("kernel_cutlass_kernel_flash_attncuteflash_fwdFlashForward_tensorptrbf16_0", "FlashForward"),
    ("matmul", "matmul"), ("k" * 90, "k" * 40 + "..." + "k" * 17),
])  # fmt: skip
def test_names_of_kernels_are_shortened(name, short):
    assert short_name(name) == short


@pytest.mark.parametrize("flag", ["--sanitize=all", "--nothing"])
def test_a_wrong_flag_is_refused(flag, capsys):
    with pytest.raises(SystemExit) as end:
        main([flag, "script.py"])
    assert end.value.code == 2 and "usage: python -m sm100_sim" in capsys.readouterr().err


def test_words_behind_a_script_are_its_own():
    """A script's flags may begin like the simulator's, or be the same."""
    made = flags.parser("", "test", "SCRIPT.py")
    made.add_argument("args", nargs="...")
    own = ["--s", "8", "--sanitize", "--seed", "9"]
    for front in (["--sanitize", "--seed", "3"], ["--sanitize=1", "--seed=3"]):
        choice = flags.parsed(made, [*front, "script.py", *own], in_front=True)
        assert (choice.sanitize, choice.seed, choice.file) == ("1", "3", "script.py")
        assert choice.args == own
