"""Sizes and rates of the Hopper forward's tiles that the host must know, too."""

from __future__ import annotations

__all__ = [
    "BLOCK_KV",
    "CTAS",
    "DECODE_SECONDS",
    "SECONDS",
    "SHORT_BLOCK_KV",
    "WARPGROUP_ROWS",
]

WARPGROUP_ROWS = 64  # query rows of a warpgroup
BLOCK_KV = 80  # keys of a step
SHORT_BLOCK_KV = 64  # of a short one
CTAS = 1  # of a cluster

#: Seconds of a key: 2 x 1280 clocks of the tensor core for 80 of them and two warpgroups, at 1.7
#: GHz; and for one warpgroup, 885 ns for 64 where memory does not bind (an H200, lab/notes.md).
SECONDS = 1.5e-6 / 80
DECODE_SECONDS = 0.885e-6 / 64
