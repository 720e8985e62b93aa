"""The scripts under examples/ that reproduce docs/findings.md, by `python -m sm100_sim`."""

import re

import pytest
from checkout import ROOT

from sm100_sim.attach.runner import run_script

EXAMPLES = ROOT / "examples"

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


def test_rows_that_do_not_fill_a_thread_block(run):
    pytest.importorskip("quack")
    _, causes = run("quack_rows.py")
    assert {kinds for kinds, _ in causes} == {"uninitialised-read"}


def test_flash_attn_4(run):
    pytest.importorskip("flash_attn.cute")
    out, causes = run("flash_attn_4.py", "64")
    assert causes == [("two-writers", 1), ("exit-too-early", 1)]
    for line in out.splitlines()[:4]:
        ours, torchs = map(float, re.findall(r"\d\.\de-\d\d", line))
        assert ours < torchs


def test_every_command_of_the_page_names_a_script():
    commands = re.findall(r"-m sm100_sim (examples/\S+)", (ROOT / "docs/findings.md").read_text())
    assert commands and all((ROOT / command).is_file() for command in commands)
