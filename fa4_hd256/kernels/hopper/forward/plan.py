"""Sizes of the Hopper forward's tiles that the host must know, too."""

from __future__ import annotations

__all__ = [
    "BLOCK_KV",
    "BLOCK_Q",
    "CTAS",
    "SHORT_BLOCK_KV",
    "TILE_Q",
    "WARPGROUPS",
    "WARPGROUP_ROWS",
]

WARPGROUP_ROWS = 64  # query rows of a warpgroup
WARPGROUPS = 2  # of a CTA that multiply
BLOCK_Q = WARPGROUPS * WARPGROUP_ROWS  # query rows of a CTA
BLOCK_KV = 80  # keys of a step
SHORT_BLOCK_KV = 64  # of a short one
CTAS = 1  # of a cluster
TILE_Q = CTAS * BLOCK_Q  # query rows of a cluster
