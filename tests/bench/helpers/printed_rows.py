"""Rows that a long command prints while it works, and times of two mixes of exp2."""

from __future__ import annotations

import numpy as np

from bench.measure import exp2
from bench.measure.exp2 import Times
from bench.tables import ready
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern

HALF = Ex2Pattern(4, 2)


def noting(monkeypatch, capfd):
    """Return a function that yields what it is given, and notes what is on stderr before each."""
    monkeypatch.delenv("FA4_HD256_PROGRESS", raising=False)
    monkeypatch.setattr(ready, "LATER", 0.0)
    texts = [""]

    def noted(found):
        for one in found:
            texts[0] += capfd.readouterr().err
            noted.before.append(texts[0])
            yield one

    noted.before = []
    return noted


def rows_in(text):
    """Count the rows below their heading; nothing else may be on stderr."""
    lines = text.splitlines()
    assert all(line.startswith("| ") for line in lines), text
    return max(0, len(lines) - 1)


def times(hardware: float, half: float) -> dict:
    """Return times of hardware exp2 and of `HALF` in each class of lengths."""
    return {
        (pattern, name): Times(np.array([seconds, 0.99 * seconds, 1.01 * seconds]), "clusters", 1.0)
        for pattern, seconds in ((HARDWARE_ONLY, hardware), (HALF, half))
        for name in exp2.SEQLENS
    }
