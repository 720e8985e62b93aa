"""Scores of a step of the forward kernel: from tensor memory to registers, changed and masked.

NOTE [stores hidden by exponentials].  P is handed over in halves of 64 keys.  A warp that waits for
its stores to tensor memory does nothing else (tcgen05.wait::st, 60 to 300 clocks), so those of the
first half are waited for behind the exponentials of the next 32 columns.  ptxas moves arithmetic
across such a wait, but not across the loop of an mbarrier wait: the one for the factor's buffer,
over by then, stands between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...functions.kernel_functions import KernelFunctions, ScorePlaces, times_asked
from ...plan.edges import Barrier, RingState
from ..instructions import fence_before_thread_sync
from ..tmem import tmem_load
from .context import BlackwellForwardContext, ScoreRow

#: Columns that one tcgen05.ld moves: many, since each load of O shows its latency, and of several
#: loads of S ptxas may move the last ones behind first uses.
LOAD_COLUMNS = 64


class RangeMask(NamedTuple):
    """Mask of a step in which the bounds of the visible keys hide some.

    nodes: word of the row under a tree mask, None without one, and in steps before the tree's keys.
    """

    nodes: Any


@dataclass(frozen=True)
class StepScores:
    """Maker of the scores of one row, a softmax thread's, in a step.

    functions: of the call.  columns: keys of a step.  are_listed: a block mask names the steps.
    """

    functions: KernelFunctions
    columns: int
    are_listed: bool

    @cute.jit
    def load(
        self,
        context: BlackwellForwardContext,
        address: Int32,
        row: ScoreRow,
        key: Int32,
        mask: Any,
    ):
        """Return the row's scores, -inf where it does not see the key.

        address: of the warp's rows of S.  key: the first one of the step.  mask: `RangeMask`; in a
        listed step `RowBits`; None in a step whose keys the row sees all.
        """
        functions = self.functions
        scores = cute.make_rmem_tensor(self.columns, Float32)
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
            visibility = context.visibility(row.work, self.columns)
            visibility.apply(scores, row.query, key, nodes=mask.nodes)
        return scores

    def _places(
        self, context: BlackwellForwardContext, row: ScoreRow, key: Int32, keys_exist: bool
    ) -> ScorePlaces | None:
        """Return where the scores lie, for what changes them."""
        return self.functions.score_places(
            context, row.work, lambda i: (row.head, row.query, key + i), keys_exist
        )

    @cute.jit
    def _hide_unseen(
        self,
        context: BlackwellForwardContext,
        scores: cute.Tensor,
        row: ScoreRow,
        key: Int32,
        number: Int32,
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
