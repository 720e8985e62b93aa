"""The softmax of two warpgroups, for MMAs of 8 bits.

The tensor core takes 1,024 clocks for a step in e4m3, and so does MUFU for its exponentials; a
warpgroup alone, whose waits nothing fills, takes more than 1,500.

NOTE [keys by group].  Each group has 64 of a step's 128 keys, in every step.  Row r belongs to
thread r of both groups, whose warps reach the same lanes of tensor memory.  Groups that took steps
in turn would hold 128 scores per thread, in 256 threads more than there are registers.  They would
also wait for each other's MMAs: P(i) lies over S(i), so QK(i+2) follows PV(i), and a group's chain
from S(i) to P(i), which another warp on its scheduler makes longer, would have to fit into the
1,024 clocks of the other group's QK and PV.

NOTE [exchange].  Both threads of a row need the maximum of all of its keys before their first
exponential.  Each writes its own to shared memory, the two warps meet at a named barrier, and each
reads the other's.  All else of the softmax's state is then the same in both, but the sum: each has
that of its own keys, and they are added up behind a tile's last step, in the same way.  A thread
writes where it has read before, so that two words per row are enough.  The barrier also says that
S is in registers, of both: P of the second group lies over S of the first.

The factors for O, and 1 / sum, are written by the first group; both arrive.  P is handed over in
halves as in 16 bits, each with keys of both groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....softmax_emu.online import OnlineSoftmax
from ...limits import FLOAT_BYTES, WARP_SIZE
from ...mask.block_mask import WORD_BITS, RowBits, StepList
from ...plan.budgets import WARPS_PER_WARPGROUP
from ...plan.edges import RingState
from ..instructions import fence_after_thread_sync, fence_before_thread_sync
from .context import BlackwellForwardContext as Context
from .context import SoftmaxRings
from .scores import StepScores

#: Number of the first named barrier at which two warps with the same rows meet.
FIRST_BARRIER = 1
GROUPS = 2


@dataclass(kw_only=True)
class GroupSoftmaxRings(SoftmaxRings):
    """The rings of `SoftmaxRings`; exchange: its index says where the first group writes next."""

    exchange: RingState


@dataclass(frozen=True)
class GroupScores(StepScores):
    """See the module's docstring; fields are those of `StepScores`."""

    #: The sums of one fragment fill waits for the exponentials and the stores of others.
    sums_fragments: ClassVar[bool] = True

    def row(self) -> Int32:
        return cute.arch.thread_idx()[0] % self.config.block_q

    def rings(self) -> SoftmaxRings:
        rings = super().rings()
        return GroupSoftmaxRings(**vars(rings), exchange=RingState(GROUPS, Int32(0), Int32(0)))

    def bits(self, context: Context, steps: StepList) -> RowBits:
        # The 0 that is added depends on the row: `StepList.row`, NOTE [numbers of a thread].
        half = context.cta_rank + cute.arch.thread_idx()[0] // (GROUPS * self.config.block_q)
        words = self.config.softmax_columns // WORD_BITS
        return steps.row(half, self.row(), (softmax_group() * words, words))

    def places(
        self, context: Context, rings: SoftmaxRings, key: Int32
    ) -> tuple[Int32, Int32, Int32]:
        s, p, key = super().places(context, rings, key)
        first = softmax_group() * self.config.softmax_columns
        return s + first, p + first * self.config.element_bytes // FLOAT_BYTES, key + first

    def update_max(
        self, context: Context, softmax: OnlineSoftmax, scores: cute.Tensor, rings: SoftmaxRings
    ) -> Float32:
        own = softmax.tile_max(scores)
        return softmax.move_max(cute.arch.fmax(own, self._exchanged(context, own, rings)))

    def join_sums(self, context: Context, softmax: OnlineSoftmax, rings: SoftmaxRings) -> None:
        softmax.row_sum += self._exchanged(context, softmax.row_sum, rings)

    def _exchanged(self, context: Context, value: Float32, rings: SoftmaxRings) -> Float32:
        """Return the value of the other thread of the row: NOTE [exchange]."""
        assert isinstance(rings, GroupSoftmaxRings)
        row, place = self.row(), softmax_group() ^ rings.exchange.index
        memory = context.smem["exchange"]
        memory[row, place] = value
        fence_before_thread_sync()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.barrier(
            barrier_id=FIRST_BARRIER + warp % WARPS_PER_WARPGROUP,
            number_of_threads=GROUPS * WARP_SIZE,
        )
        fence_after_thread_sync()
        rings.exchange.advance()
        return memory[row, place ^ 1]

    def sends(self, is_row: Boolean) -> Boolean:
        return is_row & (softmax_group() == 0)

    @cute.jit
    def write_scale(self, context: Context, value: Float32, rings: SoftmaxRings):
        if softmax_group() == 0:
            context.smem["scale"][self.row(), rings.scale.index] = value


def softmax_group() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP
