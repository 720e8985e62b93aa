"""Scheduler metadata of a call, made from the sequences' lengths on their device.

`division` gives all sequences equally many KV splits by the bounds of a call. With one long
sequence among short ones, one of its splits is then as long as all the others, and a grid for the
longest possible sequence is mostly empty. Listed splits all have the same number of keys, each
sequence has as many as it fills, and the grid has room for little more than there can be. The best
number follows from the lengths, by operations on their device alone: nothing waits for it, and a
CUDA graph makes the metadata at each replay. One tensor serves all calls of such bounds, every
layer of a model.

The metadata decides which cluster works on which keys. Beyond rounding it changes no result: the
last split of a sequence has all keys that are left, also of a sequence that has grown since.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gpus.devices import Gpu
from ..kernels.rows.scheduler_metadata import HEADER, LAST_BIT, SEQUENCE_SHIFT, UNUSED, list_length
from .checks import reads_contents
from .division import longest_row, room_for_splits, rows_per_step
from .forward_problem import Problem
from .options import MOST_SPLITS

#: The attribute of scheduler metadata that says what it was made for, as its header does, which
#: calls do not read. It turns a mismatch into an error. Copies have none: there the device
#: compares.
_MARK = "_fa4_hd256_scheduler_metadata"


def mark(words: torch.Tensor, problem: Problem, gpu: Gpu) -> None:
    """Note on scheduler metadata what it was made for."""
    room = room_for_splits(problem, gpu) or 0
    setattr(words, _MARK, (room, problem.sequences, problem.q_shape[2]))


def marked(words: Any) -> tuple[int, ...] | None:
    """Return (splits that scheduler metadata has room for, sequences, query heads); None without a
    mark."""
    return getattr(words, _MARK, None)


def scheduler_metadata_of(problem: Problem, gpu: Gpu, lengths: torch.Tensor) -> torch.Tensor:
    """Return the words of `rows.scheduler_metadata`, int32; one word for calls without KV splits.

    lengths: (batch,) int32 keys in use of each sequence. Candidates are the longest one in 1 to
    `MOST_SPLITS` splits, as far as there is room. Where every split has a cluster, a call takes as
    long as a split; else as long as all splits on all clusters, and half a split. HBM writes and
    reads the results of splits.
    """
    room = room_for_splits(problem, gpu)
    if room is None:
        return torch.zeros(1, dtype=torch.int32, device=lengths.device)
    tiles, clusters = problem.tiles, gpu.clusters(problem.tiles.cluster)
    steps = _steps(problem, lengths)
    divisors = torch.arange(1, MOST_SPLITS + 1, device=lengths.device)
    of_split = ((steps.max() + divisors - 1) // divisors).clamp(min=1)
    # A sequence without any key has one, too.
    counts = ((steps + of_split[:, None] - 1) // of_split[:, None]).clamp(min=1)
    splits, of_sequence = counts.sum(1), problem.num_tiles // problem.sequences
    alone = of_split + tiles.part_steps
    work = (steps.sum() + tiles.part_steps * splits) * of_sequence / clusters
    together = torch.maximum(work, alone) + of_split / 2
    span = torch.where(splits * of_sequence <= clusters, alone, together)
    rows = problem.max_seqlen_q * problem.q_shape[2]
    span = span + splits * (rows / rows_per_step(problem, gpu))
    span = torch.where(splits <= room, span, torch.inf)
    # By an operation: to index by a number without dimensions reads it, which waits for the device.
    best = span.argmin(dim=0, keepdim=True)
    counts = counts.index_select(0, best).squeeze(0)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    words = _words(starts, counts, room)
    keys = of_split.index_select(0, best) * tiles.keys
    made_for = (room, problem.sequences, problem.q_shape[2])
    header = [keys, *(keys.new_full((1,), number) for number in made_for)]
    return torch.cat([*header, words, starts]).to(torch.int32)


def _steps(problem: Problem, lengths: torch.Tensor) -> torch.Tensor:
    """Return (batch,) int64 steps of each sequence, at most; a window may begin within one."""
    keys = problem.tiles.keys
    begins = keys if problem.options.window[0] is not None else 0
    return (lengths.long().clamp(0, longest_row(problem)) + (begins + keys - 1)) // keys


def _words(starts: torch.Tensor, counts: torch.Tensor, room: int) -> torch.Tensor:
    places = torch.arange(room, device=starts.device)
    sequence = torch.searchsorted(starts[1:], places, right=True)
    is_used = places < starts[-1]
    sequence = sequence.clamp(max=counts.shape[0] - 1)
    number = places - starts[sequence]
    last = torch.where(number == counts[sequence] - 1, LAST_BIT, 0)
    return (sequence << SEQUENCE_SHIFT) + torch.where(is_used, number + last, UNUSED)


def check_list(words: torch.Tensor, problem: Problem) -> None:
    """Raise ValueError for scheduler metadata that is not this call's. problem: divided."""
    length = list_length(problem.num_splits, problem.sequences)
    if words.numel() != length:
        raise ValueError(
            f"scheduler_metadata has {words.numel()} words; accepted here: {length}, as "
            "get_scheduler_metadata makes for the batch, the heads and the queries of this call"
        )
    made_for = marked(words)
    if made_for is None and reads_contents(words.device):
        made_for = tuple(words[1:HEADER].tolist())
    wanted = problem.num_splits, problem.sequences, problem.q_shape[2]
    if made_for is not None and made_for != wanted:
        given, accepted = (
            f"{sequences} sequences of {heads} query heads in up to {parts} parts"
            for parts, sequences, heads in (made_for, wanted)
        )
        raise ValueError(
            f"scheduler_metadata is a list for {given}; accepted: {accepted}, as "
            "get_scheduler_metadata makes for the batch, the heads and the queries of this call"
        )
