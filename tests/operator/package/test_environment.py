"""The environment variables and their one table."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import ROOT

from fa4_hd256 import environment
from fa4_hd256.run import launch as launching

PAGE = ROOT / "docs" / "api.md"


def test_the_page_lists_the_same_table():
    text = PAGE.read_text("utf-8").split("\n## Environment variables\n")[1]
    rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    assert rows == [[v.name, v.default, v.meaning] for v in environment.VARIABLES]


def test_cache_directory(monkeypatch):
    monkeypatch.delenv("FA4_HD256_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert environment.cache_directory() == Path("/x/cache/fa4_hd256")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert environment.cache_directory() == Path("/somebody/.cache/fa4_hd256")
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", "~/kernels")
    assert environment.cache_directory() == Path("/somebody/kernels")


def test_cache_directory_without_a_home(monkeypatch):
    """Containers run with user ids that no account has, and without HOME."""

    def refuse(_):
        raise RuntimeError("Could not determine home directory.")

    for name in ("FA4_HD256_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment.Path, "home", classmethod(refuse))
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: "/scratch")
    monkeypatch.setattr(environment.os, "geteuid", lambda: 77)
    assert environment.cache_directory() == Path("/scratch/fa4_hd256-77")


def test_progress_setting(monkeypatch):
    monkeypatch.setenv("FA4_HD256_PROGRESS", "1")
    assert environment.progress_wanted()
    monkeypatch.setenv("FA4_HD256_PROGRESS", "maybe")
    with pytest.raises(ValueError, match="FA4_HD256_PROGRESS is 'maybe'; accepted: 0 or 1"):
        environment.progress_wanted()


@pytest.mark.parametrize(("seconds", "appears"), [(1.0, False), (10.0, True)])
def test_the_progress_bar_appears_in_long_runs_only(monkeypatch, capsys, seconds, appears):
    clock = [0.0]
    monkeypatch.setattr(launching.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("FA4_HD256_PROGRESS", "1")
    with launching._progress() as report:
        clock[0] = seconds
        report(3, 8)
        report(8, 8)
    assert ("simulating" in capsys.readouterr().err) == appears


def test_no_progress_bar_where_it_is_switched_off(monkeypatch):
    monkeypatch.setenv("FA4_HD256_PROGRESS", "0")
    with launching._progress() as report:
        assert report is None
