"""Scales of keys and values in e4m3, of sequences or of pages, in the softmax of a decode kernel.

NOTE [scales].  A scale of K multiplies scores.  What a sequence's KV head has is taken into what
scores are multiplied with, at a tile's start.  What a page has is a key's, hence a thread's: it
multiplies that thread's scores.  A scale of V multiplies the row of O; a page's would have to
multiply P, whose type has few exponents.  So its logarithm is added to the scores, in the exponent
of 2, where the running maximum takes care of any size, and the sums take what each key counts
without it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...softmax_emu.by_key import KeySoftmax
from ..e4m3_codes import scale_of
from ..problem_class import OF_PAGES
from .context import DescaledContext

__all__ = ["KeyScales", "ScaledSoftmax"]

#: V's scale of a page counts as this at least: its logarithm and its reciprocal are then finite.
LEAST_SCALE = 2.0**-64


class ScaledSoftmax(KeySoftmax):
    """Softmax with the scales, NOTE [scales].  Register memory, which lives across loops:

    k_scale: what K's scale of the tile is taken into.  v_scale: (1,) V's of the tile.  key: (1,)
    this thread's first one in the step after the next, of whose next one `coming` has the scales:
    K's and V's of each key.

    Of a step alone, with scales of pages, for each of this thread's keys: log2_v of its scale of V,
    weights their reciprocals.
    """

    k_scale: cute.Tensor
    v_scale: cute.Tensor
    key: cute.Tensor
    coming: cute.Tensor
    log2_v: list[Float32]
    weights: list[Any]


class KeyScales:
    """Mixed into a decode kernel whose keys are in e4m3.

    key_steps: how far a thread's keys of a step are from its first one.  A kernel adds
    `_multiply_all(values, factor)`.
    """

    key_steps: tuple[int, ...] = (0,)

    config: Any
    problem_class: Any
    queries: Any
    _multiply_all: Any

    @property
    def of_pages(self) -> bool:
        """Return True if scales are those of pages."""
        return self.problem_class.descale == OF_PAGES

    def softmax_scale(self, context: DescaledContext) -> Float32:
        """Return what the softmax multiplies scores with.  With scales of pages scores are
        exponents of 2 before it has them."""
        return Float32(1.0) if self.of_pages else context.scalars.scale_log2

    def _make_room(self, softmax: Any) -> None:
        """The register memory of a `ScaledSoftmax`, but for k_scale."""
        keys = len(self.key_steps)
        softmax.weights = [None] * keys
        if self.of_pages:
            softmax.key = cute.make_rmem_tensor(1, Int32)
            softmax.coming = cute.make_rmem_tensor(2 * keys, Float32)
        elif self.problem_class.descale:
            softmax.v_scale = cute.make_rmem_tensor(1, Float32)
            # A tile without steps, whose O is 0, reads it, too.
            softmax.v_scale.fill(1.0)

    @cute.jit
    def _enter_scales(self, context: DescaledContext, softmax: Any, work: Any, key: Int32):
        """The scales of the tile, or of the first step's keys.  key: this thread's first one."""
        if cutlass.const_expr(self.of_pages):
            softmax.key[0] = key
            self._next_scales(context, softmax, work)
        elif cutlass.const_expr(context.k_descale is not None):
            head, batch = work.head // context.heads_per_kv, context.batch(work)
            softmax.v_scale[0] = scale_of(context.v_descale, batch, head)
            self._multiply_all(softmax.k_scale, scale_of(context.k_descale, batch, head))

    def _next_scales(self, context: DescaledContext, softmax: Any, work: Any) -> None:
        """The scales of this thread's keys in the next step, loaded a step ahead."""
        block = self.config.block_kv
        visibility = context.visibility(work, block)
        size, first_page = self.problem_class.page_size, context.first_page(context.batch(work))

        def page_of(key: Any) -> Any:
            return (key if first_page is None else key + first_page.row) // size

        # Pages without a key that some query sees may be anybody's: their entries are not read.
        first = page_of(visibility.first(self.queries(work)[0]))
        last = page_of(visibility.seqlen_k - 1)
        for number, distance in enumerate(self.key_steps):
            key = softmax.key[0] + distance if distance else softmax.key[0]
            place = cutlass.max(cutlass.min(cutlass.max(page_of(key), first), last), 0)
            page = context.sequences.tensors.page_table[context.batch(work), place]
            head = work.head // context.heads_per_kv
            softmax.coming[2 * number] = scale_of(context.k_descale, page, head)
            softmax.coming[2 * number + 1] = scale_of(context.v_descale, page, head)
        softmax.key[0] = softmax.key[0] - block

    def _take_scales(self, context: DescaledContext, softmax: Any, work: Any) -> list[Float32]:
        """Take the pages' scales of this step's keys: V's go into the softmax, K's are returned."""
        keys = range(len(self.key_steps))
        k_scales = [softmax.coming[2 * number] for number in keys]
        v_scales = [
            cute.arch.fmax(softmax.coming[2 * number + 1], Float32(LEAST_SCALE)) for number in keys
        ]
        softmax.log2_v = [cute.math.log2(scale, approx=True, ftz=True) for scale in v_scales]
        softmax.weights = [cute.arch.rcp_approx(scale) for scale in v_scales]
        self._next_scales(context, softmax, work)
        return k_scales

    def _inverse(self, softmax: Any, inverse: Float32) -> Float32:
        if self.of_pages or not self.problem_class.descale:
            return inverse
        return inverse * softmax.v_scale[0]
