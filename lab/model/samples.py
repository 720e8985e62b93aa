"""Small problems whose replays the costs of tiles are fitted to.

A sample is (queries, heads), the left bound for windowed kernels, and the number of keys if it is
another; one cluster runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from lab.model.stored_tiles import DV, dv_steps
from lab.model.tiles import DKDV, DQ, KEYS, ROWS, STEP_WORK, dkdv_units, dq_units, key_steps

Sample = tuple[int | None, ...]
Samples = tuple[Sample, ...]

#: Softcap of Gemma 2.
SAMPLE_SOFTCAP = 50.0

#: Samples of our forward, and one tile of many steps: causal ones of few tell little of the pace of
#: many.
SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1), (256, 1, None, 4096))
#: Samples of kernels that run one tile per cluster.
SINGLE_SAMPLES = ((256, 1), (512, 1), (1024, 1), (2048, 1))
#: Samples of persistent kernels of others.
PERSISTENT_SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1), (2048, 1))
#: For windowed kernels. Where the bound is 256 every step is masked; in the last two most are not.
#: Costs of masked and unmasked steps follow from both. No sample is a single short tile: one of two
#: steps never reaches the pace of the loop.
WINDOW_SAMPLES = ((512, 1, 256), (1024, 1, 256), (1024, 1, 4096), (2048, 1, 1024))
#: Tiles of one step in succession, twice: what lies between the ends of two, however short.
SHORT_SAMPLES: Samples = ((KEYS, 8, None, KEYS), (KEYS, 24, None, KEYS))
#: For kernels with KV splits, as many as stand last; how many of the 256 rows of a tile exist goes
#: in place of the first figure.
SPLIT_SAMPLES = (
    (ROWS, 1, None, 1024, 2), (ROWS, 1, None, 2048, 4), (ROWS, 1, None, 4096, 4),
)  # fmt: skip
SHORT_SPLIT_SAMPLES = ((ROWS, 1, None, 1024, 8), (ROWS, 1, None, 2048, 16))
#: Splits of samples that do not say it: of windows, and of other implementations.
SAMPLE_SPLITS = 2

#: Samples of the backward: (seqlen, query heads of one KV head).
BACKWARD_SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1))
#: Samples of a causal kernel whose masked steps have a cost of their own. Of the steps of one up to
#: 1,024 tokens two fifths or more are masked; of the last one's, two ninths.
DIAGONAL_SAMPLES = (*BACKWARD_SAMPLES, (2048, 1))
#: Samples of kernels with one tile per cluster, whose tiles are to be of different length.
BACKWARD_SINGLE_SAMPLES = ((256, 1), (512, 1), (1024, 1))
#: Stated longest packed sequence, where only a sample's is there: what an empty tile costs.
LONGEST = 4096


def parts_of(sample: Iterable[int | None]) -> tuple[int, int, int | None, int]:
    """Return (queries, heads, left bound, keys) of a sample."""
    queries, heads, left, keys = cast(
        tuple[int, int, int | None, int | None], (*sample, None, None)[:4]
    )
    return queries, heads, left, keys or queries


def forward_work(sample: Sample) -> list[tuple[float, float]]:
    """Return (work, its masked part) of each tile of a sample; nothing masked without a window,
    where what the diagonal costs is the same for each tile and part of that."""
    queries, heads, left, keys = parts_of(sample)
    found = []
    for begin in range(0, queries, ROWS):
        tile = begin, min(begin + ROWS, queries)
        steps, masked = key_steps(*tile, (queries, keys), (left, 0))
        found.append((STEP_WORK * steps, 0.0 if left is None else STEP_WORK * masked))
    return found * heads


def backward_tiles(
    which: str, sample: Sample, diagonal: bool = False, element_bytes: int = 2
) -> tuple[int, float]:
    """Return (tiles, masked work in all) of a sample of a kernel of the backward
    (`backward.Backward`); nothing masked in the products of a dS, nor without a window, unless
    `diagonal`. diagonal: masked steps of a causal kernel count, too. element_bytes: as
    `tiles.BackwardTiling`."""
    seqlen, heads, left, _ = parts_of(sample)
    lengths, bounds = (seqlen, seqlen), (left, 0)
    # Each of the two heads' parts has tiles of its own where parts of a group are summed.
    kernel, parts = which.removesuffix(" partial"), 2 if which.endswith(" partial") else 1
    blocks, key_tiles = range(-(-seqlen // ROWS)), range(-(-seqlen // KEYS))
    tiles = {
        "dq": len(blocks) * heads,
        "dkdv": len(key_tiles) * parts,
        "dv": len(blocks) * parts,
        "products": len(blocks) * (1 + -(-heads // parts)) * parts,
    }[kernel]
    if left is None and not diagonal or kernel == "products":
        return tiles, 0.0
    units: dict[str, tuple[float, list[Any]]] = {
        "dq": (DQ, [dq_units(block, lengths, bounds) for block in blocks]),
        "dkdv": (DKDV, [dkdv_units(block, lengths, bounds, ROWS) for block in key_tiles]),
        "dv": (DV, [dv_steps(block, lengths, bounds) for block in blocks]),
    }
    work, of_blocks = units[kernel]
    return tiles, work * element_bytes / 2 * heads * sum(masked for _, masked in of_blocks)
