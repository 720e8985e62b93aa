"""Contexts of the warp roles of the Blackwell decode kernels, and the rings of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from ...forward.context import ForwardContext
from ...forward.decode_rows import BARRIER
from ...plan.edges import RingRecord, RingState
from ..pair_kernel import PairContext


@dataclass(frozen=True)
class BlackwellDecodeContext(ForwardContext, PairContext):
    """State that every warp role of one CTA shares.

    Buffers in `smem`: "q" (rows, 256, q_stages) and "kv" (keys of a step, 128, half_stages) as they
    are loaded; "p" (rows, keys of a step, 1), P^T; "maxima" and "sums" (rows, softmax warps)
    float32, of each warp's keys; "inverses" (rows, 1) float32, the factors of the rows of O.
    """

    #: Buffers with values of each row.
    of_rows: ClassVar[tuple[str, ...]] = ("maxima", "sums", "inverses")

    #: First row of the tile that this warp's group of the softmax has; differs between groups.
    first_row: Int32 | int = 0
    #: Number of the named barrier at which this group's warps meet.
    barrier: Int32 | int = BARRIER


@dataclass(frozen=True)
class BlackwellE4m3DecodeContext(BlackwellDecodeContext):
    """State that every warp role of one CTA shares, with K and V in e4m3.

    Buffers in `smem` besides, or otherwise: "q" (columns, 128, q_stages), both parts of each row
    in e4m3, bytes in twos; "q_rows", the same memory as Q is loaded; "factors" (rows, q_stages)
    float32, by which scores of a row are multiplied.
    """

    of_rows: ClassVar[tuple[str, ...]] = (*BlackwellDecodeContext.of_rows, "factors")


@dataclass(kw_only=True)
class DecodeLoadRings(RingRecord):
    kv: RingState
    q: RingState


@dataclass(kw_only=True)
class DecodeMmaRings(RingRecord):
    kv: RingState
    q: RingState
    s: RingState
    p: RingState
    o: RingState


@dataclass(kw_only=True)
class DecodeSoftmaxRings(RingRecord):
    """Buffers that a softmax warp uses next: of S, and of O of the step before."""

    s: RingState
    o: RingState
