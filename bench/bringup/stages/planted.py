"""Failures on purpose: hangs, a fault, a wrong result, a lost process, and a step behind each.

`--plant` runs them: whoever doubts that a hang on this GPU would be reported, and that the run
would go on, sees it here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import answers
from bench.bringup.stages.gpu import run_case
from sm100_sim.tools.golden import Case
from sm100_sim.tools.golden.cases import HEADER
from sm100_sim.tools.golden.ptx_text import declare

_BODIES = {
    # A thread waits for a phase of an mbarrier that nobody completes.
    "wait": """.shared .align 8 .b64 bar;
.reg .pred %done;
mbarrier.init.shared::cta.b64 [bar], 1;
WAITING:
mbarrier.try_wait.parity.shared::cta.b64 %done, [bar], 0;
@!%done bra WAITING;
""",
    # A loop that ends when a word in memory changes; nobody changes it.
    "spin": """.reg .b64 %at;
.reg .b32 %word;
.reg .pred %more;
ld.param.u64 %at, [p0];
AGAIN:
ld.volatile.global.u32 %word, [%at];
setp.eq.u32 %more, %word, 0;
@%more bra AGAIN;
""",
    # Two warps exchange words through shared memory, and nothing makes one wait for the other.
    "race": """.shared .align 4 .b32 words[64];
.reg .b32 %thread, %own, %other, %word;
.reg .b64 %at;
mov.u32 %thread, %tid.x;
mov.u32 %own, words;
mad.lo.u32 %own, %thread, 4, %own;
st.shared.u32 [%own], %thread;
mov.u32 %other, words;
sub.u32 %thread, 63, %thread;
mad.lo.u32 %other, %thread, 4, %other;
ld.shared.u32 %word, [%other];
ld.param.u64 %at, [p0];
mad.wide.u32 %at, %thread, 4, %at;
st.global.u32 [%at], %word;
""",
    # Nothing is mapped so low.
    "fault": """.reg .b64 %at;
.reg .b32 %word;
mov.u64 %at, 64;
mov.u32 %word, 1;
st.global.u32 [%at], %word;
""",
}


def _case(name: str) -> Case:
    ptx = f"{HEADER}{declare(0, 1)}\n{{\n{_BODIES[name]}ret;\n}}\n"
    threads = 64 if name == "race" else 1
    return Case(
        f"planted/{name}",
        "planted",
        ptx,
        (),
        (np.zeros(max(4, threads), np.uint32),),
        block=threads,
    )


def items(target: Target) -> list[str]:
    """Each failure and a step behind it."""
    failures = ("wait", "spin", "stuck", "fault", "wrong", "killed")
    return [step for name in failures for step in (name, f"behind {name}")]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Plant a failure; "behind": an ordinary step, which must pass."""
    if item.startswith("behind"):
        return answers.run("triples", target, note)
    if item == "wrong":
        case = replace(answers.TRIPLES, outputs=(np.zeros(4, np.uint32),), block=4)
        (found,) = run_case(target, case)
        wanted = [0, 3, 6, 10]
        same = found.tolist() == wanted
        return Outcome("passed" if same else "failed", f"wanted {wanted}, found {found.tolist()}")
    if item == "stuck":
        note("the process sleeps")
        time.sleep(3600)
    if item == "stuck with a child":
        with subprocess.Popen(["sleep", "3600"]) as sleeper:
            note(str(sleeper.pid))
    if item == "killed":
        note("the process kills itself")
        os.kill(os.getpid(), signal.SIGKILL)
    case = _case(item)
    note(f"kernel of {case.name}, 1 CTA of {case.block} threads")
    run_case(target, case)
    if item == "race":
        # For a sanitizer to see: the result is right or wrong by chance.
        return Outcome("passed", "two warps raced")
    return Outcome("failed", "the planted failure had no effect")
