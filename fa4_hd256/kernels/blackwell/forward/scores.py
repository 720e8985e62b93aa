"""Scores of a step of the forward kernel: from tensor memory to registers, changed and masked.

NOTE [stores hidden by exponentials].  P is handed over in halves of 64 keys.  A warp that waits for
its stores to tensor memory (tcgen05.wait::st) does nothing else, for 60 to 300 clocks.  So a warp
stores the first half, computes the exponentials of the next 32 columns, and only then waits for the
stores.  ptxas would move these exponentials behind that wait.  It moves none across the loop of an
mbarrier wait.  Such a wait is needed once in a step anyway: for the buffer of the next factor,
`scale_free`.  So it stands between the exponentials and the wait for the stores.  The buffer has
long been free by then, so that the mbarrier wait takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....softmax_emu.online import OnlineSoftmax
from ...functions.kernel_functions import KernelFunctions, ScorePlaces, times_asked
from ...mask.block_mask import RowBits, StepList
from ...plan.edges import Barrier, RingState
from ..instructions import fence_before_thread_sync
from ..tmem import tmem_load
from .config import ForwardConfig
from .context import BlackwellForwardContext as Context
from .context import ScoreRow, SoftmaxRings

#: Columns that one tcgen05.ld moves: many, since each load of O shows its latency, and of several
#: loads of S ptxas may move the last ones behind first uses.
LOAD_COLUMNS = 64


class RangeMask(NamedTuple):
    """Mask of a step by bounds. nodes: word of the row under a tree mask, None for none."""

    nodes: Any


@dataclass(frozen=True)
class StepScores:
    """Maker of the scores of a softmax thread in a step: of one row, all keys; `two_groups` has the
    form in which two threads share a row. config: of the kernel. functions: of the call.
    are_listed: a block mask names the steps."""

    config: ForwardConfig
    functions: KernelFunctions
    are_listed: bool

    #: Each fragment is summed up behind its store, or all of a step behind P.
    sums_fragments: ClassVar[bool] = False

    def row(self) -> Int32:
        return cute.arch.thread_idx()[0]

    def rings(self) -> SoftmaxRings:
        return SoftmaxRings.waiting(self.config.edges, s="s_done", scale="scale_free")

    def bits(self, context: Context, steps: StepList) -> RowBits:
        """Return the bits of a block mask of the thread's keys in the first step."""
        return steps.row(context.cta_rank, self.row())

    def places(
        self, context: Context, rings: SoftmaxRings, key: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """Return (where the thread's scores lie, where its P goes, its first key). key: the first
        one of the step. P lies over S: two 16-bit values per column, or four e4m3, in columns that
        they came from."""
        s = self.config.tmem["s0"].start + rings.s.index * self.config.block_kv
        address = context.warp_lanes + s
        return address, address, key

    def update_max(
        self, context: Context, softmax: OnlineSoftmax, scores: cute.Tensor, rings: SoftmaxRings
    ) -> Float32:
        return softmax.update_max(scores)

    def join_sums(self, context: Context, softmax: OnlineSoftmax, rings: SoftmaxRings) -> None:
        """Make the thread's sum that of all keys of its row, behind a tile's last step."""

    def sends(self, is_row: Boolean) -> Boolean:
        return is_row

    def write_scale(self, context: Context, value: Float32, rings: SoftmaxRings) -> None:
        """Write a value for the correction thread of the same row."""
        context.smem["scale"][self.row(), rings.scale.index] = value

    @cute.jit
    def load(self, context: Context, address: Int32, row: ScoreRow, key: Int32, mask: Any):
        """Return the row's scores, -inf where it does not see the key. address, key: of `places`.
        mask: `RangeMask`; in a listed step `RowBits`; None in a step whose keys the row sees
        all."""
        functions = self.functions
        scores = cute.make_rmem_tensor(self.config.softmax_columns, Float32)
        tmem_load(address, scores, LOAD_COLUMNS)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(functions.change.exists):
            places = self._places(context, row, key, mask is None)
            functions.change.apply(scores, context.scalars.cap_scale, places)
        if cutlass.const_expr(functions.mask_function.exists):
            self._hide_unseen(context, scores, row, key, mask.number)
        elif cutlass.const_expr(self.are_listed):
            mask.apply(scores)
        elif cutlass.const_expr(mask is not None):
            visibility = context.visibility(row.work, self.config.softmax_columns)
            visibility.apply(scores, row.query, key, nodes=mask.nodes)
        return scores

    def _places(
        self, context: Context, row: ScoreRow, key: Int32, keys_exist: bool
    ) -> ScorePlaces | None:
        return self.functions.score_places(
            context, row.work, lambda i: (row.head, row.query, key + i), keys_exist
        )

    @cute.jit
    def _hide_unseen(
        self, context: Context, scores: cute.Tensor, row: ScoreRow, key: Int32, number: Int32
    ):
        """Set the scores of a listed step that the mask_mod hides to -inf.  number: see
        `MaskFunction.hide`."""
        for _ in cutlass.range(times_asked(number), unroll=1):
            places = self.functions.mask_places(
                context, row.work, lambda i: (row.head, row.query, key + i)
            )
            self.functions.mask_function.hide(scores, places, number)


def hand_over(barrier: Barrier, state: RingState) -> None:
    """Hand what this warp has stored to tensor memory to the tensor core."""
    cute.arch.fence_view_async_tmem_store()
    fence_before_thread_sync()
    barrier.arrive(state, is_converged=True)
