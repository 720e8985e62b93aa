"""Earlier commits of flash-attn-4: what they are prepared from, and the process they run in."""

import dataclasses
import functools
import importlib.metadata
import json
import subprocess
import sys

import numpy as np
import pytest

from bench.suite import BACKWARD, FORWARD, Case
from lab.__main__ import main
from lab.model import replays
from lab.model.calls import Kind
from lab.model.peers import flash_attn_4 as model
from lab.model.peers import flash_attn_4_code, releases
from lab.model.peers.releases import RELEASES, Release, tree_id
from lab.model.predictor import replayable
from lab.published.flash_attention import BACKWARD_256, FORWARD_256

DENSE = Case("dense", ((1024, 1024),), 8, 8, True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The installed flash-attn-4 as a release: its folder is there, and empty."""
    monkeypatch.setattr(releases, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(replays, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(replays, "_memory", {})
    _, cutlass_dsl, quack = flash_attn_4_code.versions()
    found = Release("00000000", "the installed one", cutlass_dsl, quack, package="0")
    found.folder.mkdir(parents=True)
    return found


def git(folder, *arguments):
    command = ["git", "-c", "core.autocrlf=false", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def checkout(tmp_path):
    """A folder with what Git sorts in a way of its own, and a program."""
    folder = tmp_path / releases.MODULES
    (folder / "part").mkdir(parents=True)
    for name in ("part.py", "part/inner.py", "part-two.py", "run.py"):
        (folder / name).write_text(f"name = {name!r}\n")
    (folder / "run.py").chmod(0o755)
    return folder


def test_a_folder_has_the_id_that_git_gives_it(tmp_path):
    folder = checkout(tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    whole = git(tmp_path, "write-tree").strip()
    expected = git(tmp_path, "rev-parse", f"{whole}:{releases.MODULES}").strip()
    (folder / "__pycache__").mkdir()
    assert tree_id(folder) == expected
    (folder / "part" / "inner.py").write_text("changed = True\n")
    assert tree_id(folder) != expected


def test_only_the_very_files_of_a_commit_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(releases, "_install", lambda requirements, folder: None)
    folder = checkout(tmp_path)
    wanted = Release("11111111", "a commit", "4.4.2", "0.3.11", tree=tree_id(folder))
    assert "--source" in releases.unavailable(wanted)
    for source, message in ((None, "--source"), (tmp_path / "nothing", "no checkout")):
        with pytest.raises(ValueError, match=message):
            releases.prepare(wanted, source)
    (folder / "part.py").write_text("changed = True\n")
    with pytest.raises(ValueError, match="check out 11111111 without changes"):
        releases.prepare(wanted, tmp_path)
    (folder / "part.py").write_text("name = 'part.py'\n")
    releases.prepare(wanted, tmp_path)
    assert releases.unavailable(wanted) is None
    assert tree_id(wanted.folder / releases.MODULES) == wanted.tree


def test_a_failed_installation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "cache_directory", lambda: tmp_path)

    def fails(requirements, folder):
        raise RuntimeError("no such version")

    monkeypatch.setattr(releases, "_install", fails)
    wanted = Release("22222222", "a version", "0", "0", package="0")
    with pytest.raises(RuntimeError, match="no such version"):
        releases.prepare(wanted)
    assert releases.unavailable(wanted) and not list((tmp_path / "peers").iterdir())


def test_the_command_lists_what_is_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(releases, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(releases, "_install", lambda requirements, folder: None)
    assert main(["peers", "6c73fb50", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
    assert row["release"] == "6c73fb50" and str(tmp_path) in row["state"]
    assert main(["peers", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
    states = {row["release"]: row["state"].split(":")[0] for row in rows}
    assert list(states) == list(releases.ALL) and states.pop("6c73fb50") == "prepared"
    assert all("is not prepared" in state for state in states.values())
    for refused in (["0000"], ["--source", "."]):
        assert main(["peers", *refused]) == 2
        assert "commit" in capsys.readouterr().err


def test_what_differs_is_another_folder():
    one = RELEASES["27b4eb98"]
    others = [dataclasses.replace(one, **{name: "0"}) for name in ("cutlass_dsl", "quack", "tree")]
    assert len({each.folder for each in (one, *others)}) == 4
    with pytest.raises(ValueError, match="either a version"):
        Release("33333333", "both", "0", "0", package="0", tree="0")
    with pytest.raises(ValueError, match="known are 3c015f1a"):
        releases.release("4.0")


def test_the_process_imports_the_release_first(here):
    information = here.folder / "quack_kernels-9.9.dist-info"
    information.mkdir()
    about = "Metadata-Version: 2.1\nName: quack-kernels\nVersion: 9.9"
    (information / "METADATA").write_text(about)
    version = functools.partial(importlib.metadata.version, "quack-kernels")
    assert releases.call(here, version) == "9.9" != version()
    with pytest.raises(RuntimeError, match="exit status 1"):
        releases.call(here, functools.partial(importlib.metadata.version, "no-such-package"))


def test_the_process_has_default_settings(here, monkeypatch):
    monkeypatch.setenv("FA_CLC", "1")
    monkeypatch.setenv("FA4_HD256_PROGRESS", "0")
    found = releases.call(here, functools.partial(eval, "dict(__import__('os').environ)"))
    assert "FA_CLC" not in found and found["FA4_HD256_PROGRESS"] == "0"


def test_the_compiler_is_not_replaced_by_a_release(here):
    modules = here.folder / releases.MODULES
    modules.mkdir(parents=True)
    (modules / "__init__.py").write_text("")
    wraps = "from cutlass import cute\ncute.compile = len\n"
    (modules / "interface.py").write_text(wraps)
    kind = "type(__import__('cutlass').cute.compile).__name__"
    assert releases.call(here, functools.partial(eval, kind)) == "CompileCallable"
    imported = "__import__('sys').modules['flash_attn.cute.interface'].__file__"
    assert str(here.folder) in releases.call(here, functools.partial(eval, imported))


def test_another_process_may_prepare_it_first(tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "cache_directory", lambda: tmp_path)
    wanted = Release("44444444", "a version", "0", "0", package="0")

    def meanwhile(requirements, folder):
        (wanted.folder / "there").mkdir(parents=True)

    monkeypatch.setattr(releases, "_install", meanwhile)
    assert releases.prepare(wanted) == wanted.folder
    assert [path.name for path in wanted.folder.parent.iterdir()] == [wanted.folder.name]


def test_a_release_that_is_not_prepared_says_how(here):
    here.folder.rmdir()
    provider = model.FlashAttention4(here)
    assert "python -m lab peers 00000000" in provider.refuses(DENSE, FORWARD)
    with pytest.raises(RuntimeError, match="not prepared"):
        releases.call(here, importlib.metadata.distributions)


def test_of_a_release_only_what_was_measured_is_replayed(here):
    provider = model.FlashAttention4(dataclasses.replace(here, directions=(BACKWARD,)))
    assert provider.refuses(DENSE, BACKWARD) is None
    assert "direction" in provider.refuses(DENSE, FORWARD)
    packed = dataclasses.replace(DENSE, packed=True)
    assert "dense" in provider.refuses(packed, BACKWARD)
    with pytest.raises(ValueError, match="KV splits"):
        provider.variant(DENSE, FORWARD, divided=True)


def test_published_rates_find_their_release(monkeypatch):
    monkeypatch.setattr(releases, "unavailable", lambda wanted: None)
    commits = {row.build.version for row in (*FORWARD_256, *BACKWARD_256) if row.build.version}
    assert commits and commits <= set(RELEASES)
    for row in (*FORWARD_256, *BACKWARD_256):
        if row.build.version:
            assert replayable(row).release.commit == row.build.version
            assert replayable(row).variant(row.problem, row.direction).release.commit


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_release_is_traced_like_the_installed_one(here):
    """The whole way, with a release that is what is installed: one tile, the same program."""
    samples = ((256, 1),)
    (theirs,) = model.traced(model.Variant(Kind(True), release=here), samples)
    (ours,) = model.traced(model.Variant(Kind(True)), samples)
    assert theirs.program.work == ours.program.work == 2 * 2048
    for name, value in ours.program.program._asdict().items():
        assert np.array_equal(value, getattr(theirs.program.program, name)), name


@pytest.mark.simulator
@pytest.mark.parametrize("commit", RELEASES)
def test_a_prepared_release_is_followed_whole(commit):
    found = RELEASES[commit]
    reason = releases.unavailable(found)
    if reason:
        pytest.skip(reason)
    if FORWARD in found.directions:
        for one in model.traced(model.Variant(Kind(True), release=found)):
            assert one.program.unmatched == 0 and one.program.work >= 2 * 2048
    else:
        found_programs = replays.programs(*model._backward_source(Kind(False), found))
        assert all(one.program.work for one in found_programs)


#: `cutlass.memory` came after the oldest of the releases.
LOADED = """
import pathlib, sys
import lab.model.peers.flash_attn_4, lab.model.peers.frost
ours = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in ("fa4_hd256", "bench")]
assert len(ours) > 20
print([f for f in ours if "from cutlass.memory" in pathlib.Path(f).read_text("utf-8")])
"""


@pytest.mark.sampled
def test_the_process_of_a_release_loads_no_kernel_of_ours():
    """Our kernels may need what the release's CuTe DSL does not have."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
