"""Bytes of dS of a call, as lab/docs/ds_bytes.md prints them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.suite import Case, ragged_lengths
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.packed_ds import begins_of
from fa4_hd256.kernels.backward.ds_tiles import DS_TILE_BYTES, count_blocks, count_tiles
from fa4_hd256.kernels.rows.sequences import DS_BEGINS
from lab.model.calls import backward_problem

PAGE = Path(__file__).parents[2] / "docs" / "ds_bytes.md"
HEADS = 16, 2
RAGGED = ragged_lengths(64, 4096)


def case(lengths, causal=True, left=None, packed=False) -> Case:
    return Case("test", lengths, *HEADS, causal, packed=packed, window=(left, None))


CASES = {
    "1 x 8192, full": case(((8192, 8192),), False),
    "1 x 8192, causal": case(((8192, 8192),)),
    "1 x 32768, causal": case(((32768, 32768),)),
    "1 x (2048, 32768), causal": case(((2048, 32768),)),
    "1 x 65536, window (1023, 0)": case(((65536, 65536),), left=1023),
    "4 x 8192, window (4095, 0)": case(((8192, 8192),) * 4, left=4095),
    "packed 64, 1 to 4002, full": case(RAGGED, False, packed=True),
    "packed 64, 1 to 4002, causal": case(RAGGED, packed=True),
    "packed 64, 1 to 4002, window (1023, 0)": case(RAGGED, left=1023, packed=True),
    "packed 16, all 1024, causal": case(((1024, 1024),) * 16, packed=True),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes(name):
    one = CASES[name]
    problem = backward_problem(one)
    longest = (max(lengths) for lengths in zip(*one.lengths))
    blocks = [count_blocks(length) for length in longest]
    pairs = one.heads * len(one.lengths) * blocks[0] * blocks[1] * 4 * DS_TILE_BYTES
    window = problem.forward.options.window
    visible = one.heads * sum(count_tiles(n, window) for n in one.lengths) * DS_TILE_BYTES
    read = counted(problem, one).ds_bytes if one.packed else problem.ds_bytes
    assert visible <= read <= problem.ds_bytes <= pairs
    figures = (f"{number / 2**30:.3f}" for number in (pairs, problem.ds_bytes, read, visible))
    assert f"| {name} | {' | '.join(figures)} |\n" in PAGE.read_text()


def counted(problem, one) -> BackwardProblem:
    """Return the problem with what `get_backward_metadata` says of its sequences."""
    forward = replace(problem.forward, ragged=(*problem.forward.ragged, DS_BEGINS))
    _, tiles = begins_of(one.lengths, forward.options.window)
    return replace(problem, forward=forward, listed_tiles=tiles)
