"""Division of a forward into launches: the keys of query tiles into KV splits, and the queries of
the last wave by themselves. The backward is divided by `chunks`.

Where a call has fewer query tiles than the device holds clusters, as a decoding step with few
sequences has, the others stand idle. With KV splits, each split of a tile's keys is a tile of its
own, and a second kernel makes one result of the splits (`forward_combine`).

NOTE [fixed splits].  How many splits are best follows from all tiles of a call, so that a
sequence's bits depend on the batch that it is in.  Where they must not, each split has as many keys
as follow from max_seqlen_k and the window alone, and a sequence fills as many splits as it can.

NOTE [last wave].  Where all tiles take equally long, a GPU works on them in waves of as many as it
holds clusters, and the last wave may have few: 1,024 tiles on 76 clusters are thirteen waves and a
half, and take fourteen. No order of whole tiles avoids that. The last blocks of queries of every
sequence and head are then a launch of their own, in KV splits: half waves, or shorter ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..gpus.devices import Gpu
from ..kernels.limits import FLOAT_BYTES, HEAD_DIM
from ..kernels.mask.windows import Reach
from ..kernels.rows.sequences import SCHEDULER_METADATA
from .forward_problem import Problem
from .options import BY_RULE, FIXED_SPLITS, MOST_SPLITS, check_num_splits

# ---------------------------------------------------------------- KV splits

#: The fewest keys of a fixed split: with fewer the combining kernel takes longer than the split.
FEWEST_KEYS = 512
#: The keys of a fixed split are a multiple of this, and this is one of the keys of most steps.
SPLIT_MULTIPLE = 128
#: Listed splits of each cluster at most, beside one for each sequence.
WAVES = 2
#: Bytes that HBM writes and reads again for a row of a split's result, in float32.
ROW_BYTES = 2 * FLOAT_BYTES * HEAD_DIM
#: CTAs of a grid, which kernels count in 32 bits.
LARGEST_GRID = (1 << 31) - 1
#: Splits for each SM up to which they are spread evenly over pairs of SMs.
EVEN_SHARE = 0.36
#: How sharply the slower of two things that overlap hides the other: of a sum of powers.
SHARPNESS = 8


def divided(problem: Problem, num_splits: int, gpu: Gpu) -> Problem:
    """Return the problem with its number of KV splits.

    That is num_splits; or for `BY_RULE` what `splits_for` returns; or for `FIXED_SPLITS` ones of a
    fixed number of keys, NOTE [fixed splits]. Scheduler metadata takes precedence: the number is
    then that of the splits which it has room for, 1 where queries have several tiles. Raises as
    `check_num_splits` does.
    """
    if problem.lists_splits:
        return _with_listed_splits(problem, gpu)
    if num_splits == FIXED_SPLITS:
        return _with_fixed_splits(problem)
    chosen = check_num_splits(num_splits) or splits_for(problem, gpu)
    return replace(problem, num_splits=chosen)


def _with_fixed_splits(problem: Problem) -> Problem:
    """NOTE [fixed splits]; undivided where queries have several tiles, which fill a GPU sooner."""
    if problem.max_seqlen_q > problem.tile_queries:
        return problem
    keys = longest_row(problem)
    each = max(FEWEST_KEYS, -(-keys // (MOST_SPLITS * SPLIT_MULTIPLE)) * SPLIT_MULTIPLE)
    count = -(-keys // each)
    return replace(problem, num_splits=count, part_keys=each if count > 1 else None)


def _with_listed_splits(problem: Problem, gpu: Gpu) -> Problem:
    """Return the problem with listed splits; queries of several tiles are not split."""
    room = room_for_splits(problem, gpu)
    if room is None:
        return replace(problem, ragged=tuple(n for n in problem.ragged if n != SCHEDULER_METADATA))
    return replace(problem, num_splits=room)


def room_for_splits(problem: Problem, gpu: Gpu) -> int | None:
    """Return the splits that the scheduler metadata has room for: one for each sequence, and as
    many that every cluster has `WAVES` splits. None where queries have several tiles, which are not
    split, and where there is no sequence. Follows from the bounds of a call alone."""
    if problem.max_seqlen_q > problem.tile_queries or not problem.sequences:
        return None
    tiles = problem.num_tiles // problem.sequences
    return problem.sequences + -(-WAVES * gpu.clusters(problem.tiles.cluster) // tiles)


def longest_row(problem: Problem) -> int:
    """Return the most keys that the queries of a tile see, 1 or more."""
    reach = Reach.of(problem.options.window)
    queries, keys = reach.lengths(problem.max_seqlen_q, problem.max_seqlen_k)
    left, right = reach.window
    if left is not None and right is not None:
        keys = min(keys, left + right + min(problem.tile_queries, queries))
    return max(keys, 1)


def rows_per_step(problem: Problem, gpu: Gpu) -> float:
    """Return the rows of splits' results that HBM writes and reads in the time of a step."""
    return gpu.hbm_bytes_per_second * problem.tiles.step_seconds / ROW_BYTES


def splits_for(problem: Problem, gpu: Gpu) -> int:
    """Return the number of KV splits that minimises the estimated time of a call, the smallest of
    equals.

    It is 1 where splits save less than `least_saved` steps, and where several blocks of queries
    fill all clusters. The result is equal for all calls of the same shapes and bounds on such a
    GPU, whatever the tensors hold.
    """
    keys = longest_row(problem)
    rows = math.prod(problem.lse_shape)
    kernel, tiles = problem.tiles, problem.num_tiles
    steps, clusters = -(-keys // kernel.keys), gpu.clusters(kernel.cluster)
    # With more blocks of queries tiles may differ by the mask, and need no splits to be shared out.
    if tiles >= clusters and problem.max_seqlen_q > problem.tile_queries:
        return 1

    # Loads of all tiles from HBM, in steps of one.
    all_loads = tiles * steps * kernel.step_bytes / (gpu.hbm_bytes_per_second * kernel.step_seconds)

    def span(splits: int) -> float:
        """Return the steps of the cluster with the most splits, their start and end included,
        overlapped with all loads from HBM; then those of all splits' results."""
        waves = -(-tiles * splits // clusters)
        busy = waves * (-(-steps // splits) + kernel.part_steps)
        results = splits * rows / rows_per_step(problem, gpu) if splits > 1 else 0.0
        if not all_loads:
            return busy + results
        loads = all_loads * _unevenness(tiles * splits, clusters)
        return (busy**SHARPNESS + loads**SHARPNESS) ** (1 / SHARPNESS) + results

    best = min(range(1, min(steps, kernel.most_parts) + 1), key=span)
    return best if span(1) - span(best) >= kernel.least_saved else 1


def _unevenness(splits: int, sms: int) -> float:
    """Return the time of loads from HBM where some pairs of SMs have two splits and some one or
    none, over that where all are alike: a pair shares a port, so that those with two are behind.

    splits: of all tiles. Fitted to an H100 and an H200, 48 to 128 splits on 132 SMs: 7 % at 64 and
    0 % at 112 on the first, 4 % at 66 and 11 % at 88 on the second (lab/notes.md). Four idle SMs
    did not show.
    """
    if splits >= sms - sms // 32:
        return 1.0
    share = max((splits / sms - EVEN_SHARE) / (1 - EVEN_SHARE), 0.0)
    return 1 + share * (1 - share) ** 2


# ---------------------------------------------------------------- the last wave

#: The most KV splits of a tile of the last wave.
MOST_WAVE_SPLITS = 8


class LastWave(NamedTuple):
    """Last wave of a call, NOTE [last wave]. queries: of each sequence, in whole tiles, before
    those of the wave. splits: KV splits of the wave."""

    queries: int
    splits: int

    def problems(self, problem: Problem) -> tuple[Problem, Problem]:
        """Return (problem of the queries before, problem of the last wave's)."""
        batch, rows, *others = problem.q_shape
        first, rest = (
            replace(problem, q_shape=(batch, count, *others), max_seqlen_q=count, first_query=begin)
            for begin, count in ((0, self.queries), (self.queries, rows - self.queries))
        )
        return first, replace(rest, num_splits=self.splits)


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
    split_steps = kernel.rows / rows_per_step(problem, gpu)

    def span(tiles: int, splits: int = 1) -> float:
        """Return the steps of a launch, and those in which HBM writes and reads its splits."""
        waves = -(-tiles * splits // clusters)
        results = splits * tiles * split_steps if splits > 1 else 0.0
        return waves * (-(-steps // splits) + kernel.part_steps) + results

    def in_two(first: int, splits: int) -> float:
        return span(first * columns) + span((blocks - first) * columns, splits) + launch

    # One wave more is divided where the last one alone is too full to gain by it.
    firsts = (waves * clusters // columns for waves in (full, full - 1))
    counts = range(2, min(steps, MOST_WAVE_SPLITS) + 1)
    choices = [(first, splits) for first in firsts if 0 < first < blocks for splits in counts]
    best = min(choices, key=lambda choice: in_two(*choice), default=None)
    if best is None or span(problem.num_tiles) - in_two(*best) < kernel.least_saved:
        return None
    return LastWave(best[0] * problem.tile_queries, best[1])


# ---------------------------------------------------------------- launches


def divide_forward(problem: Problem, num_splits: int, gpu: Gpu) -> tuple[Problem, ...]:
    """Return the launches of a forward in their order, each a problem of some queries of every
    sequence; keys of the last one alone are split. num_splits: see `divided`, whose errors this
    raises."""
    last = last_wave(problem, num_splits, gpu)
    return (divided(problem, num_splits, gpu),) if last is None else last.problems(problem)


def check_grid(problem: Problem, problems: Sequence[Problem]) -> None:
    """Raise ValueError for more tiles than a grid can have. problems: of `divide_forward`."""
    if len(problems) == 1:
        (problem,) = problems
    ctas = problem.num_tiles * problem.num_splits * problem.tiles.cluster
    if ctas > LARGEST_GRID:
        raise ValueError(
            f"max_seqlen_q is {problem.max_seqlen_q}: {problem.sequences} sequences of as many "
            f"queries take {ctas} CTAs; accepted: up to {LARGEST_GRID}; as max_seqlen_q the "
            "longest sequence's, or a tensor, for the rows of q"
        )
