"""`python -m bench gate`: what a sigmoid gate of the result costs, in the kernel and apart.

Without a gate, with `out_gate=` of each element and of each query and head, and with the gate
applied by PyTorch, compiled and eager; the forward alone and with its backward, with a cold and
with a warm L2. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
from itertools import chain

from bench.measure import gates
from bench.measure.settings import COLD, WARM, Sampling
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer
from bench.tables.ready import results
from bench.tables.results import emit


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if a result is wrong."""
    sampling, limit = Sampling(arguments.warmup, arguments.runs), TimeLimit(arguments.within)
    timers = {state: CudaTimer(l2=state) for state in (COLD, WARM)}
    jobs = [(case, one) for one in gates.PASSES for case in gates.CASES]
    begun = (gates.measured(job, timers, sampling) for job in limit.begun(jobs))
    found = results(begun, len(jobs), gates.COLUMNS, lambda rows: rows, "measuring")
    rows = list(chain.from_iterable(found))
    emit(limit.noted(gates.table(rows)), arguments)
    return int(any(row["failed"] for row in rows))
