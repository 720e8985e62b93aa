"""Sizes of mxfp8's scales (`fa4_hd256.quantize.mxfp8`)."""

from __future__ import annotations

#: Elements of a block, which have a scale together.
SCALE_BLOCK = 32
#: Scales lie in atoms of 128 rows x 4 blocks, a byte each.
ATOM_ROWS, ATOM_BLOCKS, ATOM_BYTES = 128, 4, 512
#: Atoms of the scales of 128 rows of Q or K, or of 128 keys of V.
ATOMS = 2
