"""Division of the last wave of query tiles by itself.

Where all tiles take equally long, a GPU works on them in waves of as many as it holds clusters, and
the last wave may have few: 1,024 tiles on 76 clusters are thirteen waves and a half, and take
fourteen. No order of whole tiles avoids that. The last blocks of queries of every sequence and head
are then a launch of their own, in KV splits (`splits`): half waves, or shorter ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..gpus.devices import Gpu
from .forward_problem import Problem
from .splits import BY_RULE, rows_a_step

__all__ = ["LastWave", "last_wave"]

#: The most KV splits of a tile of the last wave.
MOST_PARTS = 8


class LastWave(NamedTuple):
    """Last wave of a call. queries: of each sequence, in whole tiles, before those of the wave.
    parts: KV splits of the wave."""

    queries: int
    parts: int

    def problems(self, problem: Problem) -> tuple[Problem, Problem]:
        """Return (problem of the queries before, problem of the last wave's)."""
        batch, rows, *others = problem.q_shape
        first, rest = (
            replace(problem, q_shape=(batch, count, *others), max_seqlen_q=count)
            for count in (self.queries, rows - self.queries)
        )
        return first, replace(rest, num_splits=self.parts)


def last_wave(problem: Problem, num_splits: int, gpu: Gpu) -> LastWave | None:
    """Return how a call is split that leaves the number of splits to the operator; None where all
    of its tiles are done at once soonest, or less than `least_saved` steps are saved.

    Tiles must take equally long, and queries must not know which rows they are: no bound on the
    keys of a query, one length of all sequences, no score_mod. The greatest logits have one tensor
    of one launch. The result is equal for all calls of the same shapes on such a GPU.
    """
    kernel, options = problem.tiles, problem.options
    is_equal = options.window == (None, None) and not problem.tables
    is_plain = options.score_mod is None and options.mask_mod is None and not options.max_logits
    launch = kernel.launch_steps
    if num_splits != BY_RULE or launch is None or not (is_equal and is_plain):
        return None
    blocks = -(-problem.max_seqlen_q // problem.tile_queries)
    columns, clusters = problem.num_tiles // blocks, gpu.clusters(kernel.cluster)
    steps, full = -(-problem.max_seqlen_k // kernel.keys), problem.num_tiles // clusters
    part_rows = kernel.rows / rows_a_step(problem, gpu)

    def span(tiles: int, parts: int = 1) -> float:
        """Steps of a launch, and those in which HBM takes in and gives back the parts."""
        waves = -(-tiles * parts // clusters)
        results = parts * tiles * part_rows if parts > 1 else 0.0
        return waves * (-(-steps // parts) + kernel.part_steps) + results

    def divided(first: int, parts: int) -> float:
        return span(first * columns) + span((blocks - first) * columns, parts) + launch

    # One wave more is divided where the last one alone is too full to gain by it.
    firsts = (waves * clusters // columns for waves in (full, full - 1))
    counts = range(2, min(steps, MOST_PARTS) + 1)
    choices = [(first, parts) for first in firsts if 0 < first < blocks for parts in counts]
    best = min(choices, key=lambda choice: divided(*choice), default=None)
    if best is None or span(problem.num_tiles) - divided(*best) < kernel.least_saved:
        return None
    return LastWave(best[0] * problem.tile_queries, best[1])
