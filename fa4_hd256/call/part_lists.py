"""Scheduler metadata of a call, made of the sequences' lengths where these lie.

`division` divides all sequences into equally many parts by the bounds of a call: of one long
sequence among short ones a part is then as long as all that the others have, and a grid for the
longest sequence that could come is mostly empty. In a list all parts have as many keys, each
sequence as many parts as it fills, and the grid has room for little more than there can be. What is
best follows from the lengths, by operations on their device alone: nothing waits for it, and a CUDA
graph makes the list at each replay. A list serves all calls of such bounds, every layer of a model.

A list decides who works on what, never what comes of it, beyond rounding: the last part of a
sequence has all keys that are left, also of a sequence that has grown since.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gpus.devices import Gpu
from ..kernels.rows.part_list import LAST_BIT, SEQUENCE_SHIFT, UNUSED
from .division import longest_row, room_for_parts, rows_a_step
from .forward_problem import Problem
from .options import MOST_SPLITS

__all__ = ["list_of_parts", "mark", "marked"]

#: The attribute of a list that says what it was made for, as its header does, which calls do not
#: read. It turns a mismatch into an error. Copies have none: there the device compares.
_MARK = "_fa4_hd256_part_list"


def mark(words: torch.Tensor, problem: Problem, gpu: Gpu) -> None:
    """Note on a list what it was made for."""
    room = room_for_parts(problem, gpu) or 0
    setattr(words, _MARK, (room, problem.sequences, problem.q_shape[2]))


def marked(words: Any) -> tuple[int, ...] | None:
    """Return (parts that a list has room for, sequences, query heads); None where it has no
    mark."""
    return getattr(words, _MARK, None)


def list_of_parts(problem: Problem, gpu: Gpu, lengths: torch.Tensor) -> torch.Tensor:
    """`kernels.rows.part_list` of a call, int32; one word for calls that are not divided.

    lengths: (batch,) int32 keys in use of each sequence. Tried are the longest one in 1 to
    `MOST_SPLITS` parts, as far as the list has room for all. Where every part has a cluster, a call
    takes as long as a part; else as all on all clusters, and half a part. HBM takes the results of
    parts, and gives them back.
    """
    room = room_for_parts(problem, gpu)
    if room is None:
        return torch.zeros(1, dtype=torch.int32, device=lengths.device)
    tiles, clusters = problem.tiles, gpu.clusters(problem.tiles.cluster)
    steps = _steps(problem, lengths)
    divisors = torch.arange(1, MOST_SPLITS + 1, device=lengths.device)
    of_part = ((steps.max() + divisors - 1) // divisors).clamp(min=1)
    counts = _parts_of(steps, of_part[:, None])
    parts, of_sequence = counts.sum(1), problem.num_tiles // problem.sequences
    alone = of_part + tiles.part_steps
    work = (steps.sum() + tiles.part_steps * parts) * of_sequence / clusters
    together = torch.maximum(work, alone) + of_part / 2
    span = torch.where(parts * of_sequence <= clusters, alone, together)
    rows = problem.max_seqlen_q * problem.q_shape[2]
    span = span + parts * (rows / rows_a_step(problem, gpu))
    span = torch.where(parts <= room, span, torch.inf)
    # By an operation: to index by a number without dimensions reads it, which waits for the device.
    best = span.argmin(dim=0, keepdim=True)
    counts = counts.index_select(0, best).squeeze(0)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    words = _words(starts, counts, room)
    keys = of_part.index_select(0, best) * tiles.keys
    made_for = (room, problem.sequences, problem.q_shape[2])
    header = [keys, *(keys.new_full((1,), number) for number in made_for)]
    return torch.cat([*header, words, starts]).to(torch.int32)


def _steps(problem: Problem, lengths: torch.Tensor) -> torch.Tensor:
    """Return (batch,) int64 steps of each sequence, at most; a window may begin within one."""
    keys = problem.tiles.keys
    begins = keys if problem.options.window[0] is not None else 0
    return (lengths.long().clamp(0, longest_row(problem)) + (begins + keys - 1)) // keys


def _parts_of(steps: torch.Tensor, of_part: torch.Tensor) -> torch.Tensor:
    """Return how many splits each sequence fills; one also without any key."""
    return ((steps + of_part - 1) // of_part).clamp(min=1)


def _words(starts: torch.Tensor, counts: torch.Tensor, room: int) -> torch.Tensor:
    """Return (room,) words of the parts of sequences that begin at these, each with so many."""
    places = torch.arange(room, device=starts.device)
    sequence = torch.searchsorted(starts[1:], places, right=True)
    is_used = places < starts[-1]
    sequence = sequence.clamp(max=counts.shape[0] - 1)
    number = places - starts[sequence]
    last = torch.where(number == counts[sequence] - 1, LAST_BIT, 0)
    return (sequence << SEQUENCE_SHIFT) + torch.where(is_used, number + last, UNUSED)
