"""Rows that compare providers: rates side by side, and who is ahead beyond doubt."""

from __future__ import annotations

from typing import Any

from bench.peers import flash_attn_4
from bench.suite import Case

#: As tables name this project's kernels.
OURS = "ours"
#: Differences of predictions below this are not ranked: the model does not resolve them.
RESOLUTION = 0.05


def comparison_row(
    case: Case, direction: str, details: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """A row of the table: TFLOPS under each provider's name, everything else in `details`."""
    ours, theirs = (details.get(name, {}) for name in (OURS, flash_attn_4.PACKAGE))
    ratio = low = high = None
    if "tflops" in ours and "tflops" in theirs:
        ratio = ours["tflops"] / theirs["tflops"]
        low = ours["tflops_low"] / theirs["tflops_high"]
        high = ours["tflops_high"] / theirs["tflops_low"]
    return {
        "direction": direction, "group": case.group, "shape": case.shape,
        "heads": case.heads_text, "mask": case.mask,
        "panel": f"{direction}, {case.group}, {case.mask}",
        **{name: found.get("tflops") for name, found in details.items()},
        "range": _range(ours), "their_range": _range(theirs), "of_peak": ours.get("of_peak"),
        "clock_mhz": ours.get("clock_mhz"),
        "ratio": ratio, "ratio_low": low, "ratio_high": high, "faster": _faster(ours, theirs),
        "details": details,
    }  # fmt: skip


def _range(found: dict[str, Any]) -> str | None:
    if "tflops" not in found:
        return None
    return f"{found['tflops_low']:.0f}..{found['tflops_high']:.0f}"


def _faster(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Who is ahead; nobody where the ranges overlap or differ by less than the resolution."""
    if "tflops" not in ours or "tflops" not in theirs:
        return None
    for name, one, other in ((OURS, ours, theirs), (flash_attn_4.PACKAGE, theirs, ours)):
        apart = one["tflops_low"] > other["tflops_high"]
        if apart and one["tflops"] > (1 + RESOLUTION) * other["tflops"]:
            return name
    return "not ranked"
