"""Digest of the code that decides a replay: a part of the key of cached replays."""

from __future__ import annotations

import functools
from pathlib import Path

from sm100_sim.jit.cache import disk_cache
from sm100_sim.jit.native_cache import meaning_of

#: Packages whose sources decide a replay: the timing model, the trace that it is given, and the
#: instruction table, whose columns say what is an event and what a block's mix is.
DECIDING = ("isa", "timing", "trace")
#: Modules of the timing model that only read what a replay has found.
READING = (
    "__main__.py",
    "chrome.py",
    "critical.py",
    "sources.py",
    "stored.py",
    "whole.py",
)
#: Files that decide how a traced program is replayed, but not the program.
REPLAYING = (
    "timing/machine_constants.py", "timing/prediction.py", "timing/replaying/engine.py",
    "timing/replaying/products.py", "timing/replaying/replay.py",
    "timing/replaying/shared_port.py", "timing/replaying/signals.py", "timing/replaying/state.py",
)  # fmt: skip


def deciding_sources(root: Path = Path(__file__).parents[1]) -> list[tuple[str, bytes]]:
    """Return (path below `root`, content) of the sources that decide a replay."""
    paths = [path for package in DECIDING for path in sorted((root / package).rglob("*.py"))]
    return [
        (path.relative_to(root).as_posix(), path.read_bytes())
        for path in paths
        if path.name not in READING
    ]


def tracing_sources(root: Path = Path(__file__).parents[1]) -> list[tuple[str, bytes]]:
    """Return the files of `deciding_sources` that decide what a traced program is."""
    return [(name, content) for name, content in deciding_sources(root) if name not in REPLAYING]


@functools.cache
def model_digest() -> str:
    """Hexadecimal digest of what the model's code means, without comments and docstrings: replays
    of one kernel, machine and seed differ only where it does."""
    return _meaning(deciding_sources())


@functools.cache
def trace_digest() -> str:
    """Return the digest of what makes a traced program, whatever replays it then."""
    return _meaning(tracing_sources())


def _meaning(sources: list[tuple[str, bytes]]) -> str:
    cache = disk_cache()
    return meaning_of(sources) if cache is None else cache.meaning(sources)
