"""Mutation scores of the kernels that a call launches: synchronisation left out, and whether the
sanitizer finds it.

`python -m sm100_sim mutate` does the same for a script's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sm100_sim.launcher import Options
from sm100_sim.mutation.score import Collector, Score, captured

__all__ = ["Score", "scores"]


def scores(
    call: Callable[[], Any],
    options: Options,
    seeds: int = 20,
    confirm: int | None = None,
    **others: Any,
) -> list[Score]:
    """One for each kernel that `call` launches in the simulator, in the order of their first
    launches.

    options: of every run. seeds: most of a mutant. confirm: seeds after which a mutant that a named
    edge implies counts as redundant, None for all. others: jobs, launches, kernel, accept and
    write, see `Collector`.
    """
    collector = Collector(options, seeds, confirm, **others)
    with captured(collector.take):
        call()
    return collector.scores
