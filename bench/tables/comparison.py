"""Rows that compare providers: rates side by side, and how likely ours beats the best peer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from bench.suite import Case

#: Name of this project's kernels in tables.
OURS, OURS_BF16 = "ours", "ours, bf16"
#: Name of cuDNN's published rate of the same call in modelled tables.
AS_PUBLISHED = "cuDNN, as published"
#: A provider that is there for its results, not for its speed.
YARDSTICK = "PyTorch math"
#: Ours on an easier problem: how fast it may get.
BOUND = "ours, causal"
#: Ours with a mask that its kernels evaluate.
FUNCTION = "ours, mask_mod"
#: Ours with softcap=, where others have it as a score_mod.
SOFTCAP = "ours, softcap"
#: Differences of predictions below this are not ranked: the model does not resolve them.
RESOLUTION = 0.05
#: A row counts as won from this probability on, and as lost below what is left of one.
LIKELY = 0.9


@dataclass(frozen=True)
class Standing:
    """Standing of ours against the best of its peers over samples that are the same for all: draws
    of the model's constants, or rounds of an interleaved measurement.

    peer: the one with the least time on average. ratio: median of the fastest peer's time over
    ours; ratio_low, ratio_high: where a tenth of the samples lie below and above. probability: that
    ours is faster than every peer. gain: by how much on average (geometric mean). Tables have
    columns of these names.
    """

    peer: str
    ratio: float
    ratio_low: float
    ratio_high: float
    probability: float
    gain: float


def standing(seconds: Mapping[str, np.ndarray], error: float = 0.0) -> Standing | None:
    """Return the standing of ours among the providers; None where ours or every peer is missing.

    seconds: float64, by provider, equally long. error: standard deviation of the logarithm of a
    ratio beside what the samples show, 0 for none: what a model gets wrong of the ratio of two
    kernels under the best of its constants.
    """
    others = OURS, YARDSTICK, BOUND, FUNCTION, SOFTCAP
    peers = {name: t for name, t in seconds.items() if name not in others}
    if OURS not in seconds or not peers:
        return None
    best = min(peers, key=lambda name: float(np.log(peers[name]).mean()))
    logs = np.log(np.min(list(peers.values()), axis=0) / seconds[OURS])
    low, middle, high = np.exp(np.quantile(logs, (0.1, 0.5, 0.9)))
    if error:
        ahead = [0.5 * (1 + math.erf(one / error / math.sqrt(2))) for one in logs]
    else:
        ahead = (1 + np.sign(logs)) / 2
    return Standing(
        best, float(middle), float(low), float(high), float(np.mean(ahead)),
        math.expm1(float(logs.mean())),
    )  # fmt: skip


def verdict(found: Standing | None) -> str | None:
    """Return the leader: ours, the best peer, or nobody with `LIKELY`."""
    if found is None:
        return None
    if found.probability >= LIKELY:
        return OURS
    return found.peer if found.probability <= 1 - LIKELY else "open"


def comparison_row(
    case: Case,
    direction: str,
    details: dict[str, dict[str, Any]],
    seconds: Mapping[str, np.ndarray],
    error: float = 0.0,
) -> dict[str, Any]:
    """Return a row of the table: TFLOPS under each provider's name, all else in `details`. seconds,
    error: see `standing`."""
    ours, found = details.get(OURS, {}), standing(seconds, error)
    return {
        "direction": direction, "group": case.group, "shape": case.shape,
        "heads": case.heads_text, "mask": case.mask,
        "panel": f"{direction}, {case.group}, {case.mask}",
        **{name: one.get("tflops") for name, one in details.items()},
        "range": _range(ours), "of_peak": ours.get("of_peak"), "clock_mhz": ours.get("clock_mhz"),
        **standing_figures(found), "faster": verdict(found), "details": details,
    }  # fmt: skip


def standing_figures(found: Standing | None) -> dict[str, Any]:
    """Return the figures of a standing by the names that tables have for them."""
    return asdict(found) if found else dict.fromkeys(f.name for f in fields(Standing))


def _range(found: dict[str, Any]) -> str | None:
    if "tflops" not in found:
        return None
    return f"{found['tflops_low']:.0f}..{found['tflops_high']:.0f}"
