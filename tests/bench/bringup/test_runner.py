"""The runner of the bringup: failures are told apart, named, and do not stop it; it goes on where
it ended. In the simulator; nothing here needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import ROOT
from simulated_target import SIMULATOR

from bench.bringup import child, outcome, report, runner, stages
from bench.bringup.outcome import Outcome, Target
from bench.bringup.runner import BringupRun, Stopped, read_results
from sm100_sim.translate import kernel as translation

pytestmark = pytest.mark.simulator

#: A step sleeps for an hour, so its limit is the time that the test takes.
PLANTED = replace(stages.named("planted"), limit=4.0)
FAILURES = {"wait": "hang", "stuck": "hang", "fault": "fault", "wrong": "failed", "killed": "fault"}


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """A directory in which all failures were planted."""
    # Seconds where the cache is empty, which are no part of a step's limit.
    translation.routine_address("run")
    directory = tmp_path_factory.mktemp("planted")
    wanted = [f"planted/{step}" for name in FAILURES for step in (name, f"behind {name}")]
    BringupRun(directory, SIMULATOR).stage(PLANTED, wanted)
    return directory


@pytest.mark.parametrize("name", FAILURES)
def test_a_planted_failure_is_called_what_it_is(name, planted):
    found = read_results(planted)["planted"][name]
    assert found["state"] == FAILURES[name], found


@pytest.mark.parametrize("name", FAILURES)
def test_the_step_behind_a_failure_passes(name, planted):
    assert read_results(planted)["planted"][f"behind {name}"]["state"] == "passed"


def test_a_hang_is_named_by_kernel_and_step(planted):
    found = read_results(planted)["planted"]
    assert "no end within 4 s; last it said: the process sleeps" in found["stuck"]["text"]
    assert "mbarrier" in found["wait"]["values"]["message"]
    assert "0x40" in found["fault"]["text"], "the address of the stray store"
    assert "status -9" in found["killed"]["text"]


def test_reports_name_every_failure(planted):
    results = read_results(planted)
    text = report.text(SIMULATOR, results)
    assert all(f"  {name}: {state}" in text for name, state in FAILURES.items())
    content = report.content(SIMULATOR, results, "")
    assert content["stages"]["planted"]["counts"] == {
        "hang": 2,
        "fault": 2,
        "failed": 1,
        "passed": 5,
    }
    json.dumps(content, allow_nan=False)


def test_a_run_goes_on_where_it_ended(tmp_path):
    """A run continues also behind a line that was cut off; `forget` runs a stage again."""
    stage = stages.named("machine")
    BringupRun(tmp_path, SIMULATOR).stage(stage, ["machine/host"])
    path = tmp_path / runner.RESULTS
    first = path.read_text()
    path.write_text(first + '{"stage": "machine", "item": "vers')
    heard = []
    again = BringupRun(tmp_path, SIMULATOR, lambda *what: heard.append(what[:2]))
    again.stage(stage)
    assert heard == [("machine", "versions"), ("machine", "settings")]
    assert path.read_text().startswith(first)
    again.forget("machine")
    assert "machine" not in read_results(tmp_path)
    again.stage(stage, ["machine/host"])
    assert heard[2:] == [("machine", "host")]


def test_a_directory_belongs_to_one_machine(tmp_path):
    BringupRun(tmp_path, SIMULATOR)
    with pytest.raises(ValueError, match="name another directory with --out"):
        BringupRun(tmp_path, Target("gpu", "another", (9, 0), 132))


def test_nothing_more_is_started_on_a_machine_that_does_not_answer(tmp_path, monkeypatch):
    """A target whose GPU does not exist: its first step faults, and so does the question."""
    monkeypatch.setattr(runner, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = BringupRun(tmp_path, Target("gpu", "no such GPU", (10, 0), 148))
    with pytest.raises(Stopped, match="no longer answers"):
        run.stage(stages.named("golden"), ["golden/warp/vote*"])
    steps = read_results(tmp_path)["golden"]
    assert len(steps) == 1 and next(iter(steps.values()))["state"] == "fault"


def test_a_process_in_which_no_step_begins_ends_the_rung(tmp_path, monkeypatch):
    """A broken installation, say: one fault for the stage, not one for each of its steps."""
    run = BringupRun(tmp_path, SIMULATOR)
    monkeypatch.setattr(run, "_items", lambda stage: ["one", "two", "three"])
    monkeypatch.setattr(run, "_check_answers", lambda: None)
    run.stage(replace(stages.named("machine"), name="no such stage"))
    (found,) = read_results(tmp_path)["no such stage"].items()
    assert found[0] == "*" and found[1]["state"] == "fault"
    assert "is not known" in found[1]["values"]["stderr"]


def test_a_process_that_does_not_go_stops_the_run(tmp_path, monkeypatch):
    """A driver may hold a process; the step that hung is in the results all the same."""
    kill = runner.Child.kill
    monkeypatch.setattr(runner.Child, "kill", lambda self: kill(self) or "it is still there")
    run = BringupRun(tmp_path, SIMULATOR)
    with pytest.raises(Stopped, match="still there"):
        run._some(replace(PLANTED, limit=1.0), ["stuck"])
    assert read_results(tmp_path)["planted"]["stuck"]["state"] == "hang"


def test_a_rung_that_cannot_run_says_why(tmp_path):
    """The kernels on a GPU of compute capability 8.0."""
    run = BringupRun(tmp_path, Target("gpu", "an Ampere GPU", (8, 0), 108))
    run.stage(stages.named("kernels"))
    (found,) = read_results(tmp_path)["kernels"].values()
    assert found["state"] == "skipped" and "this GPU has 8.0" in found["text"]


def test_what_was_missing_may_come_later(tmp_path):
    """The stage's own outcome is dropped once its steps can be listed."""
    stage = stages.named("machine")
    run = BringupRun(tmp_path, SIMULATOR)
    run._keep(stage, "*", Outcome("skipped", "not installed").as_json())
    assert set(read_results(tmp_path)["machine"]) == {"*"}
    run.stage(stage, ["machine/host"])
    assert set(read_results(tmp_path)["machine"]) == {"host"}


def test_a_killed_child_takes_its_own_children_along(tmp_path):
    """A process that a step has started (compute-sanitizer, a benchmark) does not outlive it."""
    child = BringupRun(tmp_path, SIMULATOR).start(PLANTED, ["stuck with a child"])
    assert child.hear(60) == {"begin": "stuck with a child"}
    pid = int(child.hear(60)["note"])
    with pytest.raises(TimeoutError):
        child.hear(0.1)
    assert child.kill() == "" and child.status == -9
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_an_unknown_state_or_rung_is_refused():
    with pytest.raises(ValueError, match="accepted: passed"):
        Outcome("fine")
    with pytest.raises(ValueError, match="there are machine"):
        stages.named("no such")
    assert set(outcome.BAD) <= set(outcome.STATES)


_BLOCKED = """
import sys
# None: no such module, whether it is imported or looked for, as PyTorch looks for cutlass.
sys.modules.update(dict.fromkeys(
    ("cutlass", "llvmlite", "matplotlib", "scipy", "tqdm", "numba")
))
from bench.__main__ import main
from bench.bringup import stages
for stage in (*stages.STAGES, *stages.HIDDEN):
    print(stage.name, stage.module.__name__)
"""


def test_modules_load_without_compiler_and_simulator():
    """Modules load on a machine with a GPU, numpy and cuda-bindings alone."""
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True,
                          cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(stages.STAGES) + len(stages.HIDDEN)


def test_a_command_that_takes_too_long_is_a_hang():
    def sleeps(item, target, note):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)

    outcome = child.attempt(SimpleNamespace(run=sleeps), "", SIMULATOR, None)
    assert outcome.state == "hang" and "timed out" in outcome.text
