"""Forward kernel of a call on Blackwell: chosen by the rows that share keys, and nothing else."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.blackwell.decode.config import DECODE
from fa4_hd256.kernels.blackwell.forward.config import TILES

pytestmark = pytest.mark.architecture("sm_100a")

#: Kernels by rows of a tile.
FEW, SOME, WIDE = (config.tiles for config in DECODE)
MANY = TILES


def tensors(queries, keys, heads, batch):
    """Make tensors without memory."""
    number = torch.zeros((), dtype=torch.bfloat16)
    q, k = (number.expand(batch, s, h, 256) for s, h in zip((queries, keys), heads, strict=True))
    return q, k, k


# Rows: those of all heads of a group, each query's filled up to a power of two. Groups larger than
# a tile have a tile for each head.
RULE = [
    ((1, (8, 8)), FEW, 1), ((16, (8, 8)), FEW, 1), ((17, (8, 8)), SOME, 1),
    ((32, (8, 8)), SOME, 1), ((33, (8, 8)), WIDE, 1), ((64, (8, 8)), WIDE, 1),
    ((65, (8, 8)), MANY, 1),
    ((1, (16, 1)), FEW, 16), ((2, (16, 1)), SOME, 16), ((3, (32, 2)), WIDE, 16),
    ((4, (32, 2)), WIDE, 16), ((5, (32, 2)), MANY, 16),
    ((2, (16, 2)), FEW, 8), ((4, (16, 2)), SOME, 8), ((5, (16, 2)), WIDE, 8),
    ((9, (16, 2)), MANY, 8),
    ((2, (24, 4)), FEW, 6), ((4, (24, 4)), SOME, 6), ((1, (24, 1)), SOME, 24),
    ((5, (24, 4)), WIDE, 6), ((8, (24, 4)), WIDE, 6), ((2, (24, 1)), WIDE, 24),
    # Six heads share no tile of 256 rows.
    ((9, (24, 4)), FEW, 1), ((17, (24, 4)), SOME, 1), ((33, (24, 4)), WIDE, 1),
    ((65, (24, 4)), MANY, 1),
    ((1, (40, 1)), WIDE, 40), ((1, (64, 1)), WIDE, 64), ((2, (64, 1)), MANY, 64),
    # A head's rows alone would fit.
    ((3, (64, 1)), MANY, 64),
]  # fmt: skip


@pytest.mark.parametrize(("call", "tiles", "packed"), RULE, ids=str)
def test_the_rule(call, tiles, packed):
    queries, heads = call
    for batch, keys in ((1, 1), (1, 1 << 17), (128, 4096)):
        found = Problem.describe(tensors(queries, keys, heads, batch), Options(1.0))
        assert (found.tiles, found.packed_heads) == (tiles, packed)


def test_the_longest_sequence_decides():
    """Bounds of ragged calls, whatever the lengths; heads of sequences with a length in use share
    no tile."""
    offsets = [torch.tensor([0, 1, n], dtype=torch.int32) for n in (3, 900)]
    ragged = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
    packed = tensors(3, 900, (16, 2), 1)
    for longest, tiles in ((2, FEW), (4, SOME), (5, WIDE), (9, MANY)):
        assert Problem.describe(packed, Options(1.0), None, ragged, longest, 900).tiles == tiles
    used = {"seqused_q": torch.tensor([1, 0], dtype=torch.int32)}
    found = Problem.describe(tensors(16, 300, (16, 2), 2), Options(1.0), None, used)
    assert (found.tiles, found.packed_heads) == (FEW, 1)
