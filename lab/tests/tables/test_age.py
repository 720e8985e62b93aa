"""Age of tables: of a small repository, and of those of docs/tables."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from bench.tables.origin import commit_of
from lab.tables.age import changed_since, printed_at
from lab.tables.documents import FOLDER, LAB_FOLDER

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

KERNEL = "fa4_hd256/kernels/forward.py"


@pytest.fixture
def checkout(tmp_path):
    """(root, commit) of a repository with a file of each kind."""
    files = {
        KERNEL: "STEPS = 2\n", "fa4_hd256/call/checks.py": "A = 1\n", "bench/rows.json": "[1]\n",
        "sm100_sim/src/sm100_sim/isa/table.py": "B = 1\n", "docs/kernels.md": "text\n",
    }  # fmt: skip
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        asked = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True
        )
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "m")
    return tmp_path, git("rev-parse", "HEAD")


def test_nothing_has_changed_at_first(checkout):
    root, commit = checkout
    assert changed_since(commit, root) == changed_since(commit[:12], root) == "nothing"


def test_what_means_the_same_has_not_changed(checkout):
    root, commit = checkout
    (root / KERNEL).write_text('"""What it is."""\n\n# Why.\nSTEPS = 2\n')
    (root / "docs/kernels.md").write_text("another text")
    assert changed_since(commit, root) == "nothing"


def test_what_has_changed_is_counted_by_part(checkout):
    root, commit = checkout
    (root / KERNEL).write_text("STEPS = 3\n")
    (root / "fa4_hd256/call/checks.py").unlink()
    (root / "bench/rows.json").write_text("[2]\n")
    (root / "sm100_sim/src/sm100_sim/isa/table.py").write_text("B = (\n")
    assert changed_since(commit, root) == "kernels 1, calls 1, simulator 1, bench 1"


def test_a_changed_source_makes_a_checkout_dirty_and_a_page_does_not(checkout):
    root, commit = checkout
    (root / "docs/kernels.md").write_text("another text")
    assert commit_of(root) == commit[:12]
    (root / KERNEL).write_text("STEPS = 3\n")
    assert commit_of(root) == f"{commit[:12]}-dirty"


def test_a_commit_that_is_not_there(checkout, tmp_path):
    root, _ = checkout
    assert changed_since("0" * 12, root) == "000000000000 is not in this checkout"
    assert "not in this checkout" in changed_since("0" * 12, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "commit"),
    [("numpy 2, commit 5e27f81e11e9, time", "5e27f81e11e9"), ("commit a73c744.", "a73c744"),
     ("commit 5e27f81e11e9-dirty, time", "5e27f81e11e9"), ("commit not a git checkout", None)],
)  # fmt: skip
def test_the_commit_of_a_text(text, commit):
    assert printed_at(text) == commit


def test_files_of_rates_name_their_commit():
    files = [*FOLDER.glob("throughput*.md"), *LAB_FOLDER.glob("throughput*.md")]
    assert files and all(printed_at(file.read_text("utf-8")) for file in files)
