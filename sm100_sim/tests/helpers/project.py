"""Folders of the simulator's project whose files the tests read and run."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "src" / "sm100_sim"
DOCS = PROJECT / "docs"
HELPERS = PROJECT / "tests" / "helpers"
