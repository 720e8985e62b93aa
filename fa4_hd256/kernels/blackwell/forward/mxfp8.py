"""The forward kernel for Q, K and V in mxfp8: `e4m3`, with a scale for each block of 32 elements.

Both MMAs are kind::mxf8f6f4 with block scales, which the tensor core applies: those of Q and K
along the head's columns, those of V along the keys.  Scales lie in global memory in atoms of 128
rows x 4 blocks (`fa4_hd256.quantize.mxfp8`), and come with the tiles that they are of, on the same
barriers.  Two atoms, 1 KiB, belong to each: the CTA's own 128 rows of Q, but all 128 keys of K and
all 256 columns of V, since each CTA multiplies with all of B.

NOTE [scales over S].  O and two S fill tensor memory.  Scales lie in columns of an S that is in
registers already, copied there by tcgen05.cp before each MMA, which comes after it: those of
QK(i + 1) over S(i), which the softmax has read (s_read); those of PV(i) over the same, behind P(i).
QK(i + 2), which writes S there, is issued after both, as it is for P's sake (`kernel`, NOTE [S and
P share columns]).  S(i) is read while PV(i - 1) runs, so that QK(i + 1) seldom waits for it.

NOTE [scales of P].  P is rounded as it is in e4m3, with scales of 1, in each lane the same word.
So the softmax stores them, in place of a copy, each of its groups two of the four columns.

NOTE [scales behind the last key].  Keys that a sequence does not have are zeros, but 0 x NaN is
NaN: no scale of V in the atom of the last key may be 0xFF, in blocks without a key neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....schedulers.protocol import WorkTile
from ....softmax_emu.online import OnlineSoftmax
from ...block_scales import ATOMS
from ...context import KernelParts
from ...forward.context import ForwardKernelTensors
from ...operands import SharedMemory, TmaTensor
from ...plan.edges import RingState
from ...problem_class import DESCALES, OptionalTensors, ProblemClass
from ...ranges import traced
from ..instructions import fence_after_thread_sync, fence_before_thread_sync
from ..scale_tiles import ScaleTiles, load_scales, scale_buffers, scale_tensor
from ..scaled_mma import ScaledMma, copy_scales
from ..tmem import tmem_buffer, tmem_store
from .config import P_LOG2
from .context import BlackwellForwardContext as Context
from .context import LoadRings, MmaRings, ScoreRow, SoftmaxRings
from .kernel import ForwardKernel, KvTile
from .mxfp8_config import SCALE_COLUMNS, Mxfp8Config
from .two_groups import GROUPS, GroupScores, softmax_group

#: Four scales of 1, E8M0.
ONES = 0x7F7F7F7F


@dataclass(frozen=True)
class Mxfp8Context(ScaleTiles, Context):
    """State that every warp role of one CTA shares. first_tiles: see `ScaleTiles`."""

    first_tiles: tuple[Int32, Int32] | None = None

    def of_tile(self, work: WorkTile) -> Mxfp8Context:
        return replace(super().of_tile(work), first_tiles=self.counted(work))


@dataclass(kw_only=True)
class Mxfp8MmaRings(MmaRings):
    """The rings of `MmaRings`, and read, which waits for s_read of the S before: its only stage."""

    read: RingState


@dataclass(frozen=True)
class ReadScores(GroupScores):
    def load(self, context: Context, address: Int32, row: ScoreRow, key: Int32, mask: Any) -> Any:
        """Return the row's scores, and say that scales may lie over S."""
        scores = GroupScores.load(self, context, address, row, key, mask)
        read = context.barriers["s_read"]
        fence_before_thread_sync()
        read.arrive(read.edge.producer_state(), is_converged=True)
        # Or ptxas moves the arrival behind the maximum.
        cute.arch.sync_warp()
        return scores

    def update_max(
        self, context: Context, softmax: OnlineSoftmax, scores: cute.Tensor, rings: SoftmaxRings
    ) -> Float32:
        """Return the base's factor; store this group's half of P's scales once both have read S."""
        factor = super().update_max(context, softmax, scores, rings)
        words = cute.make_rmem_tensor(SCALE_COLUMNS["p"][1] // GROUPS, Int32)
        words.fill(ONES)
        start, distance = self.config.tmem.buffers("p_scales", self.config.s_stages)
        place = start + rings.s.index * distance + softmax_group() * cute.size(words)
        tmem_store(cute.recast_tensor(words, Float32), context.warp_lanes + place)
        return factor


class ForwardMxfp8Kernel(ForwardKernel):
    """See the module's docstring; the arguments are those of `ForwardKernel`."""

    context_class = Mxfp8Context
    q_bytes = kv_bytes = 1
    p_log2 = P_LOG2
    scores_class = ReadScores

    def __init__(
        self, config: Mxfp8Config, problem_class: ProblemClass, parts: KernelParts
    ) -> None:
        super().__init__(config, problem_class, parts)
        self.scaled_qk = ScaledMma.of(self.qk)
        self.pv0, self.pv1 = (
            ScaledMma.of(mma, numbers)
            for mma, numbers in zip((self.pv0, self.pv1), config.p_slices.values(), strict=True)
        )

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: OptionalTensors
    ) -> ForwardKernelTensors:
        scales: dict[str, Any] = {name: scale_tensor(getattr(optional, name)) for name in DESCALES}
        return super().kernel_tensors(operands, lse, optional._replace(**scales))

    def descriptors(self, tensors: ForwardKernelTensors) -> tuple[TmaTensor, ...]:
        scales = (getattr(tensors.optional, name) for name in DESCALES)
        return *super().descriptors(tensors), *scales

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        found = super().smem(memory)
        for name, stages in (("q", self.config.q_stages), ("kv", self.config.kv_stages)):
            found[f"{name}_scales"] = scale_buffers(memory, f"{name}_scales", stages)
        return found

    # ------------------------------------------------------------ load

    def _load_q(self, context: Context, work: WorkTile, rings: LoadRings) -> LoadRings:
        """Load this CTA's rows of Q, and their scales to the same barrier."""
        state = rings.q.copy()
        loaded: LoadRings = super()._load_q(context, work, rings)
        place = context.query(work), self.first_row(context, work), work.head
        self._load_scales(context, "q", work, place, state)
        return loaded

    def _load_kv(
        self, context: Context, work: WorkTile, kv_tile: KvTile, name: str, rings: LoadRings
    ) -> LoadRings:
        """Load this CTA's half of K or V, and the scales of all of it to the same barrier."""
        state = rings.kv.copy()
        loaded: LoadRings = super()._load_kv(context, work, kv_tile, name, rings)
        place = context.key(work), self.keys.first_row(kv_tile), work.head // context.heads_per_kv
        self._load_scales(context, name, work, place, state)
        return loaded

    def _load_scales(
        self,
        context: Context,
        name: str,
        work: WorkTile,
        place: tuple[Any, Int32, Int32],
        state: RingState,
    ) -> None:
        """Load the scales of a tile.  place: (its sequence, first row, head)."""
        assert isinstance(context, Mxfp8Context), "context_class says so"
        (sequence, row, head), ring = place, "q" if name == "q" else "kv"
        source: Any = getattr(context, f"{name}_descale")
        tile = context.scale_tile(name, work, row)
        target = context.barriers[f"{ring}_loaded"].pointer(state), state.index
        load_scales(source, context.smem[f"{ring}_scales"], (sequence.batch, head, tile), target)

    # ------------------------------------------------------------ mma

    def _issue_mmas(self, context: Context, rings: MmaRings) -> Mxfp8MmaRings:
        read = context.barriers["s_read"]
        own = Mxfp8MmaRings(**vars(rings), read=read.edge.waiter_state())
        own = super()._issue_mmas(context, own)
        read.wait_for_all(own.read)
        return own

    @traced("QK")
    def _qk(self, context: Context, rings: Mxfp8MmaRings) -> Mxfp8MmaRings:
        """S = Q K^T of a step, its scales over the other S."""
        barriers = context.barriers
        barriers["kv_loaded"].wait(rings.kv)
        barriers["s_read"].wait(rings.read)
        rings.read.advance()
        fence_after_thread_sync()
        scales = []
        for name, ring, state in (("q", "q", rings.q), ("k", "kv", rings.kv)):
            first, distance = self.tmem_plan.buffers(f"{name}_scales", self.config.s_stages)
            target = context.tmem.toint() + first + (1 - rings.s.index) * distance
            copy_scales(target, _buffer(context, f"{ring}_scales", state), ATOMS)
            scales.append(target)
        q, k = _buffer(context, "q", rings.q), _buffer(context, "k", rings.kv)
        s = tmem_buffer(context.tmem, self.tmem_plan, "s", rings.s)
        self.scaled_qk.issue_scaled(s, q, k, False, (scales[0], scales[1]))
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        barriers["s_done"].commit(rings.s)
        rings.s.advance()
        return rings

    def issue_pv(
        self, context: Context, mma: Any, rings: MmaRings, p_ring: RingState, adds: Boolean | bool
    ) -> None:
        """Issue an MMA of PV, before the first one the copy of V's scales behind P."""
        if mma is self.pv0:
            of_v = self._in_tmem(context, "v_scales", p_ring)
            copy_scales(of_v, _buffer(context, "kv_scales", rings.kv), ATOMS)
        p, *scales = (
            self._in_tmem(context, name, p_ring) for name in ("p", "p_scales", "v_scales")
        )
        o = self._in_tmem(context, "o", rings.o)
        v = _buffer(context, "v", rings.kv)
        mma.issue_scaled(o, p, v, adds, (scales[0], scales[1]))

    def _in_tmem(self, context: Context, name: str, state: RingState) -> Int32:
        return tmem_buffer(context.tmem, self.tmem_plan, name, state)


def _buffer(context: Context, name: str, state: RingState) -> cute.Pointer:
    return context.smem[name][None, None, state.index].iterator
