"""Context of the warp roles of the Hopper forward, and records of its consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ....schedulers.protocol import WorkTile
from ....softmax_emu.online import OnlineSoftmax
from ...forward.context import ForwardContext
from ...plan.edges import RingState, SharedByReference


@dataclass(frozen=True)
class HopperForwardContext(ForwardContext):
    """State that every warp role of one CTA shares. Buffers in `smem`: those of the kernel's
    `_operands`, which has their shapes."""


@dataclass(frozen=True)
class Fragments(SharedByReference):
    """A warpgroup thread's p, o: P and O in registers; q, k, v: descriptors."""

    p: cute.Tensor
    o: cute.Tensor
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


#: Softmax of both rows of a thread.
RowSoftmax = tuple[OnlineSoftmax, OnlineSoftmax]


class Running(NamedTuple):
    softmax: RowSoftmax
    k: RingState
    v: RingState


class WarpgroupTile(NamedTuple):
    work: WorkTile
    first_row: Int32
    q_loaded: RingState


class StepKeys(NamedTuple):
    """Keys of a step. first: the first key. mask: None where every row sees all of them; else the
    words of both rows of a thread, each None without a tree (`WarpgroupForward._nodes`); of a
    listed step its `ListedBits`, or the number of its tile where a mask_mod says what is seen.
    left: steps behind this one."""

    first: Int32
    mask: Any
    left: Int32
