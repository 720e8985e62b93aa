"""Checks that the machine still computes: a kernel that adds, and its result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages.gpu import run_case
from sm100_sim.tools.golden import Case
from sm100_sim.tools.golden.cases import HEADER
from sm100_sim.tools.golden.ptx_text import declare

THREADS = 128
_PTX = f"""{HEADER}{declare(0, 1)}
{{
.reg .b64 %at, %place;
.reg .b32 %i;
ld.param.u64 %at, [p0];
mov.u32 %i, %tid.x;
mul.wide.u32 %place, %i, 4;
add.u64 %at, %at, %place;
mul.lo.u32 %i, %i, 3;
st.global.u32 [%at], %i;
ret;
}}
"""
#: Thread i writes 3 i.
TRIPLES = Case("answers/triples", "answers", _PTX, (), (np.zeros(THREADS, np.uint32),))


def items(target: Target) -> list[str]:
    return ["triples"]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Run the kernel and look at every word."""
    note(f"kernel of {TRIPLES.name}, 1 CTA of {THREADS} threads")
    (found,) = run_case(target, TRIPLES)
    right = np.array_equal(found, 3 * np.arange(THREADS, dtype=np.uint32))
    return Outcome("passed" if right else "failed", "" if right else f"gave {found[:8].tolist()}")
