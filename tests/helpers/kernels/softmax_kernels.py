"""Tiny kernels around the device code of softmax_emu, one row or one pair per thread."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_hd256.softmax_emu.exp2 import exp2_polynomial_pair
from fa4_hd256.softmax_emu.online import OnlineSoftmax, soft_cap
from fa4_hd256.softmax_emu.pattern import FRAGMENT_COLUMNS

ROWS = 128
COLUMNS = 128


@cute.kernel
def _polynomial_kernel(x: cute.Tensor, y: cute.Tensor, degree: cutlass.Constexpr):
    pair = cute.arch.block_idx()[0] * ROWS + cute.arch.thread_idx()[0]
    if pair < cute.size(x) // 2:
        y[2 * pair], y[2 * pair + 1] = exp2_polynomial_pair(x[2 * pair], x[2 * pair + 1], degree)


@cute.jit
def polynomial(x: cute.Tensor, y: cute.Tensor, degree: cutlass.Constexpr):
    """y = 2^x by the polynomial; x and y (n,) float32, n even."""
    blocks = (cute.size(x) // 2 + ROWS - 1) // ROWS
    _polynomial_kernel(x, y, degree).launch(grid=(blocks, 1, 1), block=(ROWS, 1, 1))


@cute.kernel
def _soft_cap_kernel(x: cute.Tensor, y: cute.Tensor, cap_scale: Float32, packed: cutlass.Constexpr):
    row = cute.arch.thread_idx()[0]
    scores = cute.make_rmem_tensor(COLUMNS, Float32)
    for column in cutlass.range(COLUMNS, unroll_full=True):
        scores[column] = x[row, column]
    soft_cap(scores, cap_scale, packed)
    for column in cutlass.range(COLUMNS, unroll_full=True):
        y[row, column] = scores[column]


@cute.jit
def capped(x: cute.Tensor, y: cute.Tensor, cap_scale: Float32, packed: cutlass.Constexpr):
    """y = tanh(x * cap_scale); x and y (ROWS, COLUMNS) float32."""
    _soft_cap_kernel(x, y, cap_scale, packed).launch(grid=(1, 1, 1), block=(ROWS, 1, 1))


@cute.jit
def softmax_tile(tensors, row: Int32, tile: Int32, softmax: OnlineSoftmax) -> OnlineSoftmax:
    """One score tile of one row: everything the forward kernel's softmax does."""
    scores_in, packed_out, p_out, factors_out, maxima_out = tensors
    scores = cute.make_rmem_tensor(COLUMNS, Float32)
    for column in cutlass.range(COLUMNS, unroll_full=True):
        scores[column] = scores_in[row, tile * COLUMNS + column]
    factors_out[row, tile] = softmax.update_max(scores)
    maxima_out[row, tile] = softmax.row_max
    count = COLUMNS // FRAGMENT_COLUMNS
    fragments = cute.logical_divide(scores, cute.make_layout(FRAGMENT_COLUMNS))
    for fragment in cutlass.range_constexpr(count):
        packed = cute.make_rmem_tensor(FRAGMENT_COLUMNS // 2, cutlass.Int32)
        softmax.exponentiate(fragments[None, fragment], packed, fragment, count)
        for word in cutlass.range_constexpr(FRAGMENT_COLUMNS // 2):
            first = tile * (COLUMNS // 2) + fragment * (FRAGMENT_COLUMNS // 2)
            packed_out[row, first + word] = packed[word]
    for column in cutlass.range(COLUMNS, unroll_full=True):
        p_out[row, tile * COLUMNS + column] = scores[column]
    softmax.accumulate_sum(scores)
    return softmax


@cute.kernel
def _softmax_kernel(
    tensors: tuple, results: tuple, scale_log2: Float32, settings: cutlass.Constexpr
):
    pattern, threshold, dtype, loop = settings
    row = cute.arch.thread_idx()[0]
    num_tiles = cute.size(tensors[0], mode=[1]) // COLUMNS
    softmax = OnlineSoftmax.create(scale_log2, pattern, threshold, dtype)
    softmax.reset()
    if cutlass.const_expr(loop == "while"):
        tile = Int32(0)
        while tile < num_tiles:
            softmax = softmax_tile(tensors, row, tile, softmax)
            tile += 1
    else:
        for tile in cutlass.range(num_tiles, unroll=1):
            softmax = softmax_tile(tensors, row, tile, softmax)
    results[0][row], results[1][row] = softmax.finish()


@cute.jit
def online_softmax(
    tensors: tuple, results: tuple, scale_log2: Float32, settings: cutlass.Constexpr
):
    """The online softmax over rows of any number of tiles.

    tensors: scores (128, 128 n) f32, packed P (128, 64 n) i32, p (128, 128 n) f32, factors and
    maxima (128, n) f32.  results: inverse and LSE (128,) f32.  settings: Ex2Pattern, threshold,
    dtype, "for" or "while".
    """
    _softmax_kernel(tensors, results, scale_log2, settings).launch(
        grid=(1, 1, 1), block=(ROWS, 1, 1)
    )
