"""dS in mxfp8 in global memory, between the kernel that makes it and the GEMMs that read it.

The tiles are those of `ds_tiles`, 128 keys x 128 queries, with the same numbers. Each holds codes,
then their scales twice, an atom of 512 bytes each. dK reduces over queries, dQ over keys: the atom
of dK has a row for each key, that of dQ a row for each query (`fa4_hd256.quantize.mxfp8`, NOTE
[atoms]).

NOTE [square blocks]. A scale is that of 32 keys x 32 queries. So it is that of 32 queries of a key
and that of 32 keys of a query, and one code serves both GEMMs. Scales are powers of two, and e4m3
has 14 octaves of normal numbers below 448. So a code has the relative error that it would have with
a scale of its row alone, unless it lies 2^14 below the largest of its block.

Codes lie as the tensor core reads them without a swizzle: core matrices of 8 rows of 16 bytes (PTX
ISA 9.7.16.4, canonical layouts). The code of (key k, query q) is at byte q // 16 * 2048 + k * 16 +
q % 16. For dK that is a K-major operand, for dQ an MN-major one.
"""

from __future__ import annotations

from ..block_scales import ATOM_BYTES
from ..limits import ELEMENT_BYTES
from .ds_tiles import DS_TILE

#: Consecutive queries of a key, a byte each, and the bytes from one such run to the next.
RUN_CODES = 16
RUN_BYTES = DS_TILE * RUN_CODES
#: Bytes of the codes of a tile, and of the whole tile.
CODE_BYTES = DS_TILE * DS_TILE
TILE_BYTES = CODE_BYTES + 2 * ATOM_BYTES
#: The tile counted in elements of 16 bits, as kernels get it.
TILE_ELEMENTS = TILE_BYTES // ELEMENT_BYTES
#: Which of the two atoms of scales.
FOR_DK, FOR_DQ = 0, 1
