"""Age of a table of docs/tables: the commit that printed it, and what has changed since."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from bench.tables.origin import ROOT, changed_files, git
from fa4_hd256.run.native_cache import meaning_of

#: Parts that figures may depend on: name -> folders.
PARTS = {
    "kernels": ("fa4_hd256/kernels", "schedulers", "softmax_emu"),
    "calls": ("fa4_hd256",),
    "simulator": ("sm100_sim/src",),
    "bench": ("bench",),
}


def printed_at(text: str) -> str | None:
    """The commit that a table's file names; None where it was printed outside a checkout."""
    found = re.search(r"\bcommit ([0-9a-f]{7,40})\b", text)
    return found and found.group(1)


def changed_since(commit: str, root: Path = ROOT) -> str:
    """Return how many files of each part mean something else than at a commit, or that nobody
    knows. Of Python the meaning counts, without comments, docstrings and positions; of JSON every
    byte."""
    folders = sorted({folder for part in PARTS.values() for folder in part})
    listed = changed_files(root, commit, folders)
    if listed is None:
        return f"{commit} is not in this checkout"
    changed = [path for path in listed if _differs(root, commit, path)]
    counts = Counter(_part(path) for path in changed)
    return ", ".join(f"{name} {counts[name]}" for name in PARTS if counts[name]) or "nothing"


def _part(path: str) -> str:
    """The first whose folder holds it."""
    return next(
        name for name, folders in PARTS.items()
        if any(path.startswith(f"{folder}/") for folder in folders)
    )  # fmt: skip


def _differs(root: Path, commit: str, path: str) -> bool:
    before, file = git(root, "show", f"{commit}:{path}"), root / path
    if before is None or not file.exists():
        return True
    if not path.endswith(".py"):
        return before != file.read_bytes()
    try:
        return meaning_of([(path, before)]) != meaning_of([(path, file.read_bytes())])
    except SyntaxError:
        return True
