"""Configuration of the kernel that combines KV splits (`forward_combine`), and the rule that
chooses it for a call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..limits import HEAD_DIM, WARP_SIZE
from ..problem_class import ELEMENT_TYPES

#: Parts of a row, at most: two for each lane.
MOST_PARTS = 2 * WARP_SIZE
#: Warps of a CTA.
MOST_WARPS = 16
#: CTAs of a row, the most first; a lane has 8 columns of all.
SLICES = 4, 2, 1


@dataclass(frozen=True)
class CombineClass:
    """Facts of a call that are compiled into the kernel that combines KV splits. dtype: of out.
    packed: splits are listed, and queries packed by cu_seqlens_q. out_gate: as of
    `ProblemClass`."""

    dtype: torch.dtype
    packed: bool = False
    out_gate: str = ""
    use_clc: ClassVar[bool] = False
    #: Names of the `CallScalars` that the kernel gets.
    scalars: ClassVar[tuple[str, ...]] = ()

    @property
    def element_type(self) -> Any:
        return ELEMENT_TYPES[self.dtype]


@dataclass(frozen=True)
class CombineConfig:
    """num_warps: warps of a CTA. parts_at_once: parts whose loads a lane has in flight together.
    row_warps: of a row, NOTE [warps of a row]; all parts are then in flight together. lane_parts:
    parts whose weights a lane makes. slices: CTAs that have columns of a row. alone: an SM holds
    one CTA, NOTE [before the forward ends].

    Raises ValueError where the parts of an iteration do not divide the lanes of a warp, or
    `row_warps` does not divide the warps of a CTA, or is no power of two.
    """

    num_warps: int = 4
    parts_at_once: int = 4
    row_warps: int = 1
    lane_parts: int = 1
    slices: int = 1
    alone: bool = False

    def __post_init__(self) -> None:
        # Parts past the last have a weight as long as they have a lane.
        if self.parts_at_once < 1 or WARP_SIZE % self.warp_parts:
            raise ValueError(
                f"parts_at_once is {self.parts_at_once}, of {self.slices} slices; accepted: what "
                f"together divides {WARP_SIZE}"
            )
        if self.num_warps % self.row_warps or self.row_warps.bit_count() != 1:
            raise ValueError(
                f"row_warps is {self.row_warps}; accepted: powers of two that divide num_warps, "
                f"{self.num_warps}"
            )

    @property
    def cta_rows(self) -> int:
        return self.num_warps // self.row_warps

    @property
    def shares_rows(self) -> bool:
        return self.row_warps > 1 or self.slices > 1

    @property
    def warp_parts(self) -> int:
        """Parts whose loads a warp has in flight together."""
        return self.parts_at_once * self.slices

    @property
    def columns(self) -> int:
        return HEAD_DIM // self.slices


@dataclass(frozen=True)
class CombineRule:
    """Rule of a call's configuration. ctas: as many as a GPU has SMs, about."""

    config: CombineConfig = field(default_factory=CombineConfig)
    ctas: int = 128

    def of(self, parts: int, rows: int) -> CombineConfig:
        """Choose the configuration for so many parts and rows.

        While there are fewer rows than CTAs, slices of them; a warp for each `parts_at_once` that
        it then has, rounded up to a power of two; of a CTA as many rows as there are for each SM,
        while it has room. Raises ValueError for more than `MOST_PARTS`."""
        if not 1 <= parts <= MOST_PARTS:
            raise ValueError(f"{parts} KV splits; accepted: 1 to {MOST_PARTS}")
        lane_parts = -(-parts // WARP_SIZE)
        slices = next(n for n in SLICES if n == 1 or rows * n <= self.ctas)
        turns = -(-parts // (self.config.parts_at_once * slices))
        warps = 1 << (turns - 1).bit_length()
        cta_rows = 1 << (-(-rows // self.ctas) - 1).bit_length()
        alone = cta_rows * warps <= MOST_WARPS
        if not alone:
            cta_rows = max(1, self.config.num_warps // warps)
        return replace(
            self.config,
            num_warps=cta_rows * warps,
            row_warps=warps,
            lane_parts=lane_parts,
            slices=slices,
            alone=alone,
        )
