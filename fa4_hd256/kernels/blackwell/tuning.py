"""The tuning table: which mix of exp2 a call gets by default, by mask, length and GPU.

`tuning.json` beside this file holds it; `python -m bench ex2-sweep --write` makes it. An entry
says whether it was measured or modelled, and on what.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern

TABLE = Path(__file__).with_name("tuning.json")

#: Classes of seqlen_k: the most keys of each, None for no limit.
SEQLEN_CLASSES: dict[str, int | None] = {"short": 2048, "medium": 16384, "long": None}


@dataclass(frozen=True)
class TunedPattern:
    """One choice. gpu: "B200", "B300". causal: whether the mask bounds the keys on the right.
    is_e4m3: of the kernel for q, k and v in e4m3. seqlen_class: of `SEQLEN_CLASSES`. basis:
    "measured" or "modelled"; machine: on what."""

    gpu: str
    causal: bool
    seqlen_class: str
    pattern: Ex2Pattern
    basis: str
    machine: str
    is_e4m3: bool = False

    def __post_init__(self) -> None:
        if self.seqlen_class not in SEQLEN_CLASSES:
            raise ValueError(
                f"seqlen_class {self.seqlen_class!r}; accepted are {', '.join(SEQLEN_CLASSES)}"
            )

    @property
    def key(self) -> tuple[str, bool, str, bool]:
        return self.gpu, self.causal, self.seqlen_class, self.is_e4m3


def seqlen_class(seqlen_k: int) -> str:
    """The class of a problem's longest key sequence."""
    return next(name for name, most in SEQLEN_CLASSES.items() if most is None or seqlen_k <= most)


@functools.cache
def read(path: Path = TABLE) -> dict[tuple[str, bool, str, bool], TunedPattern]:
    """The entries of a table by key. Raises ValueError for a file that is no such table, or one
    with two entries for a key."""
    try:
        listed = json.loads(path.read_text())["exp2"]
        entries = [TunedPattern(**{**e, "pattern": Ex2Pattern(**e["pattern"])}) for e in listed]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is not a tuning table: {error}") from error
    by_key = {entry.key: entry for entry in entries}
    if len(by_key) < len(entries):
        raise ValueError(f"{path.name} has two entries for one mask, length, GPU and dtype")
    return by_key


def write(entries: list[TunedPattern], path: Path = TABLE) -> None:
    """Put entries into a table, in place of those with their keys; others stay."""
    existing = read(path) if path.exists() else {}
    listed: list[dict[str, Any]] = [
        asdict(entry) for entry in (existing | {entry.key: entry for entry in entries}).values()
    ]
    path.write_text(json.dumps({"exp2": listed}, indent=1) + "\n")
    read.cache_clear()


def pattern_for(
    causal: bool, seqlen_k: int, gpu: str, path: Path = TABLE, is_e4m3: bool = False
) -> Ex2Pattern:
    """The tuned mix; hardware only where the table has no entry."""
    entry = read(path).get((gpu, causal, seqlen_class(seqlen_k), is_e4m3))
    return HARDWARE_ONLY if entry is None else entry.pattern
