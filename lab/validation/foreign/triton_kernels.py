"""Kernels in Triton as its users write them: Triton's compiler makes the machine code.

The ideas are those of Triton's public tutorials: an element-wise sum, the softmax of a row in one
program, layer norm of a row in blocks, and a product with programs in groups of rows of tiles.
"""

# Triton gives a meaning of its own to annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vector_sum(x, y, out, n, BLOCK: tl.constexpr):
    """Add two vectors."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def row_softmax(x, out, stride, columns, BLOCK: tl.constexpr):
    """Softmax of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    scores = tl.load(x + row * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, axis=0))
    tl.store(out + row * stride + at, weights / tl.sum(weights, axis=0), mask=inside)


@triton.jit
def row_layer_norm(x, out, weight, bias, stride, columns, epsilon, BLOCK: tl.constexpr):
    """Layer norm of one row per program, which reads it three times."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * stride
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
        centred = tl.where(at < columns, value - mean, 0.0)
        squares += centred * centred
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + epsilon)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=inside).to(tl.float32)
        b = tl.load(bias + at, mask=inside).to(tl.float32)
        tl.store(out + at, (value - mean) * scale * w + b, mask=inside)


#: Tile of the product, and rows of tiles of a group of programs.
BM, BN, BK, GROUP = tl.constexpr(128), tl.constexpr(256), tl.constexpr(64), tl.constexpr(8)


@triton.jit
def product(a, b, c, M, N, K):
    """Compute one tile of C = A B, tiles in groups of rows, for reuse in L2."""
    program = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = program // (GROUP * columns) * GROUP
    size = min(rows - first, GROUP)
    m = first + (program % (GROUP * columns)) % size
    n = (program % (GROUP * columns)) // size
    at_m = (m * BM + tl.arange(0, BM)) % M
    at_n = (n * BN + tl.arange(0, BN)) % N
    at_k = tl.arange(0, BK)
    from_a = a + (at_m[:, None] * K + at_k[None, :])
    from_b = b + (at_k[:, None] * N + at_n[None, :])
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, tl.cdiv(K, BK)):
        total = tl.dot(tl.load(from_a), tl.load(from_b), total)
        from_a += BK
        from_b += BK * N
    to_m, to_n = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    to = c + to_m[:, None] * N + to_n[None, :]
    tl.store(to, total.to(tl.float16), mask=(to_m[:, None] < M) & (to_n[None, :] < N))
