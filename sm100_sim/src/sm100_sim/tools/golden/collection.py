"""Every golden case, by group, and what is stored of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .cases import MANIFEST, Case, hash_of
from .instructions import (
    arithmetic,
    asynchronous,
    atomics,
    cluster,
    convert,
    found,
    tma,
    warp,
    wgmma,
)
from .rules import barriers as rules_barriers
from .rules import cluster as rules_cluster
from .rules import launch as rules_launch
from .rules import registers as rules_registers
from .rules import wgmma as rules_wgmma


@lru_cache(maxsize=1)
def all_cases() -> tuple[Case, ...]:
    """Every case, in a fixed order, names unique."""
    modules = (
        arithmetic,
        convert,
        warp,
        atomics,
        tma,
        cluster,
        asynchronous,
        found,
        rules_registers,
        rules_barriers,
        rules_cluster,
        rules_launch,
        wgmma,
        rules_wgmma,
    )
    cases = tuple(case for module in modules for case in module.cases())
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"golden cases share a name: {[n for n in names if names.count(n) > 1]}")
    return cases


def groups(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases by group."""
    by_group: dict[str, list[Case]] = {}
    for case in cases:
        by_group.setdefault(case.group, []).append(case)
    return by_group


def save(
    directory: Path, results: dict[str, list[np.ndarray]], manifest: dict, only: Iterable[str] = ()
) -> None:
    """Write one compressed file per group, and the manifest.

    results: case name -> its outputs (none of a case that faults). manifest: JSON object; "cases"
    (name -> digest) is added. only: the groups that were recorded; the others stay as they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    digests = {}
    manifest = {**manifest, "hashes": {}}
    if only:
        before = json.loads((directory / MANIFEST).read_text())
        kept = {case.name for case in all_cases() if case.group not in only}
        digests = {name: text for name, text in before["cases"].items() if name in kept}
        for what in ("failed", "faults", "endings", "registers", "hashes"):
            old = {name: text for name, text in before.get(what, {}).items() if name in kept}
            manifest = {**manifest, what: {**old, **manifest.get(what, {})}}
    for group, cases in groups(all_cases()).items():
        if only and group not in only:
            continue
        arrays: dict[str, Any] = {}
        for case in cases:
            if case.name in results:
                # A case that ended with an error has no outputs.
                if case.hashed:
                    manifest["hashes"][case.name] = hash_of(results[case.name])
                else:
                    arrays.update(zip(case.keys(), results[case.name]))
                digests[case.name] = case.digest()
        np.savez_compressed(directory / f"{group}.npz", **arrays)
    text = json.dumps({**manifest, "cases": digests}, indent=0, sort_keys=True)
    (directory / MANIFEST).write_text(text + "\n")
