"""Start of dS of packed sequences, by lengths that the host has read.

What a call knows without waiting for the device, the longest sequence and the sum of all, leaves
room for more than there is (`kernels.backward.ds_tiles`, NOTE [units of dS]).  Lengths that are
read once serve all layers of a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.backward.ds_tiles import count_tiles
from ..kernels.rows.sequences import DS_BEGINS
from .backward_problem import BackwardProblem
from .checks import reads_contents
from .options import Options
from .tile_mask import rounded_tiles


class BackwardMetadata(NamedTuple):
    """Result of `get_backward_metadata`. ds_begins: (batch,) int32 on the calls' device, the number
    of each sequence's first tile of dS. ds_tiles: of a query head in all sequences, rounded up.
    window: the (left, right) that it was made for, None for unbounded, right 0 where causal."""

    ds_begins: torch.Tensor
    ds_tiles: int
    window: tuple[int | None, int | None]


def begins_of(
    lengths: Sequence[tuple[int, int]], window: tuple[int | None, int | None]
) -> tuple[list[int], int]:
    """Return (the number of each sequence's first tile, tiles of all of them, rounded up so that
    batches of about as many have the same room). lengths: queries and keys of each; window: (left,
    right), None for unbounded."""
    counts = {
        pair: count_tiles(pair, window) if 0 not in pair else 0 for pair in dict.fromkeys(lengths)
    }
    *begins, total = itertools.accumulate((counts[pair] for pair in lengths), initial=0)
    return begins, rounded_tiles(total)


def read_offsets(name: str, offsets: torch.Tensor) -> list[int]:
    """Return the contents of cu_seqlens; waits for a GPU. Raises ValueError for what are no
    offsets."""
    found = offsets.tolist() if offsets.ndim == 1 else []
    if not found or found[0] != 0 or found != sorted(found):
        raise ValueError(
            f"{name} has shape {tuple(offsets.shape)} and begins with {found[:8]}; accepted: "
            "(batch + 1,) offsets that ascend from 0"
        )
    return found


def lengths_between(offsets_q: Sequence[int], offsets_k: Sequence[int]) -> list[tuple[int, int]]:
    """Queries and keys of each sequence. Raises ValueError where there are not as many."""
    if len(offsets_q) != len(offsets_k):
        raise ValueError(
            f"cu_seqlens_q has {len(offsets_q)} offsets, cu_seqlens_k {len(offsets_k)}; accepted: "
            "as many"
        )
    pairs = zip(itertools.pairwise(offsets_q), itertools.pairwise(offsets_k))
    return [(end_q - begin_q, end_k - begin_k) for (begin_q, end_q), (begin_k, end_k) in pairs]


def check_metadata(metadata: Any, causal: Any, window_size: Any, others: dict[str, Any]) -> None:
    """Check the metadata of a call of `flash_attn_varlen_func`; others: its arguments that go with
    no metadata. Raises TypeError for what `get_backward_metadata` has not made, and ValueError for
    metadata of another mask, or beside one of the others."""
    if not isinstance(metadata, BackwardMetadata):
        raise TypeError(
            f"backward_metadata is a {type(metadata).__name__}; accepted: what "
            "get_backward_metadata returned"
        )
    given = ", ".join(name for name, value in others.items() if value is not None)
    if given:
        raise ValueError(
            f"backward_metadata is given with {given}; accepted: sequences packed by cu_seqlens_q "
            f"and cu_seqlens_k, without any of {', '.join(others)}"
        )
    window = Options.check(None, causal, window_size, 0.0).window
    if window != metadata.window:
        raise ValueError(
            f"backward_metadata was made for a window of {metadata.window}, the call's is "
            f"{window}, right 0 where it is causal; accepted: get_backward_metadata with the "
            "causal and window_size of the call"
        )


def check_begins(problem: BackwardProblem, others: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless `DS_BEGINS` has room, and is of the lengths if these are read."""
    if DS_BEGINS not in others:
        return
    if problem.listed_tiles <= 0:
        raise ValueError(
            f"listed_tiles is {problem.listed_tiles} with {DS_BEGINS}; accepted: the tiles of all "
            "sequences, as get_backward_metadata counts them"
        )
    if not reads_contents(problem.forward.device):
        return
    offsets = (others[f"cu_seqlens_{side}"].tolist() for side in "qk")
    begins, tiles = begins_of(lengths_between(*offsets), problem.forward.options.window)
    given = others[DS_BEGINS].tolist()
    if (given, problem.listed_tiles) != (begins, tiles):
        raise ValueError(
            f"backward_metadata says that dS of the sequences begins at tiles {given} of "
            f"{problem.listed_tiles}, their lengths say {begins} of {tiles}; accepted: what "
            "get_backward_metadata makes of this call's offsets"
        )
