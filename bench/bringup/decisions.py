"""Configurations that follow from a report: each result of the bringup decides by itself.

    python -m bench bringup --decide bringup_report/report.json

A `Rule` names the steps it reads, and what follows when one of them is wrong, or from what they
measured. A configuration about which nothing was measured stays as it is. No GPU is needed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.bringup.outcome import BAD

#: Steps of a report: "STAGE/STEP" -> its outcome as JSON.
Steps = Mapping[str, Mapping[str, Any]]
#: A configuration is taken for its speed if it is faster by this share.
MARGIN = 0.01
WRONG = (*BAD, "differs")
UNCHANGED, UNKNOWN = "as it is", "not measured"


@dataclass(frozen=True)
class Decision:
    """question: what is decided. chosen: in words. why: the steps it follows from. settings:
    environment variables that bring it about; none if the defaults do."""

    question: str
    chosen: str
    why: str
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """question: what is decided. reads: patterns of STAGE/STEP that must be right. chosen,
    settings: what follows where one is wrong. compares: steps of `choices` whose other
    configuration is `chosen`, taken as well where it is faster in all that were measured."""

    question: str
    reads: tuple[str, ...]
    chosen: str
    settings: dict[str, str] = field(default_factory=dict)
    compares: tuple[str, ...] = ()

    def decide(self, steps: Steps) -> Decision:
        found = {name: step for name, step in steps.items() if _matches(name, self.reads)}
        wrong = [name for name, step in found.items() if step["state"] in WRONG]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            why = f"{wrong[0]}: {steps[wrong[0]]['state']}{more}"
            return Decision(self.question, self.chosen, why, self.settings)
        times = {name: steps[name]["values"]["ratio"] for name in self.compares
                 if steps.get(name, {}).get("state") == "measured"}  # fmt: skip
        if times and min(times.values()) > 1 + MARGIN:
            why = f"{min(times.values()):.3f} times as fast or more in {', '.join(times)}"
            return Decision(self.question, self.chosen, why, self.settings)
        right = sum(step["state"] == "passed" for step in found.values())
        if not right and not times:
            missing = self.reads[:2] or self.compares
            return Decision(self.question, UNKNOWN, f"run {', '.join(missing)}")
        slower = f"; the other is no faster: {', '.join(times)}" if times else ""
        return Decision(self.question, UNCHANGED, f"{right} steps passed{slower}")


#: In the order of docs/bringup.md: what would be wrong in silence, or hang, comes first.
RULES = (
    Rule(
        "tile scheduler",
        (
            "golden/pairs/launch control*",
            "sharing/* clc",
            "kernels/* clc",
            "graph/* clc",
            "decoding/repeated*",
        ),
        "the static one",
        {"FA_CLC": "0"},
        ("choices/scheduler of the causal forward", "choices/scheduler of the causal backward"),
    ),
    Rule(
        "dS of the backward",
        ("golden/tcgen05/mma bf16 *A * plain*", "kernels/smallest backward_products"),
        "dS is recomputed, not stored",
        {"FA4_HD256_DS_BYTES": "0"},
        ("choices/dS of the full backward", "choices/dS of the causal backward"),
    ),
    Rule(
        "keys, values and queries in e4m3",
        ("golden/tcgen05/mma e4m3*",),
        "only 16-bit types: convert caches before the call",
    ),
    Rule(
        "decode kernels",
        ("golden/tcgen05/mma bf16 128x16 *", "golden/tcgen05/mma bf16 128x32 *",
         "golden/tcgen05/mma * B mn plain"),
        "none: pad queries to more than 64 rows a KV head, which takes the kernel of CTA pairs",
    ),
    Rule(
        "negative softmax scales",
        ("golden/tcgen05/mma * negated",),
        "none: negate q and pass the absolute value",
    ),
    Rule(
        "order of MMAs, P over S",
        ("golden/tcgen05/mma order *",),
        "no kernel of this package: report it",
    ),
    Rule(
        "processes that share a GPU",
        ("sharing/*",),
        "one process on a GPU at a time",
    ),
    Rule(
        "waits of the forward",
        (),
        "without a time hint: config=ForwardConfig(polls=True)",
        compares=("choices/waits of the full forward", "choices/waits of the causal forward"),
    ),
    Rule(
        "waits of the backward",
        (),
        "without a time hint: polls=True of dv and products in backward_config",
        compares=("choices/waits of the full backward", "choices/waits of the causal backward"),
    ),
)  # fmt: skip


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_read(stage: str, item: str) -> bool:
    """Return True if a decision reads a step, so that a report holds it though it passed."""
    return any(_matches(f"{stage}/{item}", rule.reads + rule.compares) for rule in RULES)


def steps_of(report: Mapping[str, Any]) -> Steps:
    """Return the steps of report.json. Raises ValueError for a file of another kind."""
    if "bringup" not in report or "stages" not in report:
        raise ValueError("this is no report.json of a bringup: it has no stages")
    return {
        f"{stage}/{item}": outcome
        for stage, found in report["stages"].items()
        for item, outcome in found["steps"].items()
    }


def decide(report: Mapping[str, Any]) -> list[Decision]:
    steps = steps_of(report)
    return [*(rule.decide(steps) for rule in RULES), *(rule(steps) for rule in _MEASURED)]


def _clock(steps: Steps) -> Decision:
    """The SMs' clock under MMAs scales every absolute rate of the timing model."""
    question = "clock of the timing model"
    found = steps.get("micro/SM clock of tensor cores", {})
    if found.get("state") != "measured":
        return Decision(question, UNKNOWN, "run micro/SM clock*")
    clock = found["values"]["value"]
    low, high = CLOCK
    if low <= clock <= high:
        return Decision(question, UNCHANGED, f"{clock:.2f} GHz, expected {low} to {high}")
    why = f"{clock:.2f} GHz, expected {low} to {high}"
    return Decision(question, "the report's: --machine report.json of every modelled command", why)


#: What the timing model expects of a B200, in GHz.
CLOCK = (1.68, 1.78)
_MEASURED: tuple[Callable[[Steps], Decision], ...] = (_clock,)


def settings(decisions: list[Decision]) -> dict[str, str]:
    """Return the environment variables of all decisions."""
    return {name: value for d in decisions for name, value in d.settings.items()}


def text(decisions: list[Decision]) -> str:
    """Return the decisions for a terminal: a line each, then what to export."""
    lines = [f"{d.question}: {d.chosen} ({d.why})" for d in decisions]
    exports = [f"export {name}={value}" for name, value in settings(decisions).items()]
    return "\n".join([*lines, *(exports or ["no variable needs to be set"])])
