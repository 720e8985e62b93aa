"""Sizes of mxfp8's scales (`fa4_hd256.quantize.mxfp8`), and the operands of its gradients."""

from __future__ import annotations

import torch

#: E8M0, or its bytes.
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
#: Elements of a block, which have a scale together.
SCALE_BLOCK = 32
#: Scales lie in atoms of 128 rows x 4 blocks, a byte each.
ATOM_ROWS, ATOM_BLOCKS, ATOM_BYTES = 128, 4, 512
#: Atoms of the scales of 128 rows of Q or K, or of 128 keys of V.
ATOMS = 2
#: Of a tile of an operand: of 128 rows and all columns of the head, or of 128 keys of V.
SCALE_BYTES, SCALE_ALIGNMENT = ATOMS * ATOM_BYTES, 128
#: Operands of the gradients in mxfp8, in the order in which kernels get them: q, k, v and dout with
#: blocks along the head's columns; with a t, with blocks along the rows.
MXFP8_GRADIENT_OPERANDS = ("q", "k", "v", "dout", "q_t", "k_t", "dout_t")
