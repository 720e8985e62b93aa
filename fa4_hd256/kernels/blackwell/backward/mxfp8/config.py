"""The configuration of the backward's kernels in mxfp8 (`dv`, `products`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from .....softmax_emu.pattern import Ex2Pattern
from ....backward.mxfp8_ds import CODE_BYTES
from ....block_scales import ATOM_BYTES, SCALE_ALIGNMENT, SCALE_BYTES
from ....limits import HEAD_DIM
from ....plan.budgets import SmemPlan, SmemRegion, TmemPlan, TmemRegion, check_fields
from ....plan.edges import Edge, EdgeTable, Signal
from ...pair_plan import CTAS, common_regions, with_scale_bytes
from ..config import PIECE_BYTES, BackwardWarpPlan, DvPlan, GradientConfig, ProductsPlan

#: Columns of the two operands of a GEMM of the products: dS, and rows of Q or K.
DS_SCALE_COLUMNS, ROW_SCALE_COLUMNS = 4, 8


@dataclass(frozen=True)
class DvMxfp8Plan(DvPlan):
    """The kernel of dV and dS in mxfp8: 256 keys of a pair stay, 128 queries pass in each step.
    ring_stages: buffers of the ring that Q and dO (twice) share; a step takes three."""

    ring_stages: int = 7
    warps: BackwardWarpPlan = field(
        default_factory=lambda: BackwardWarpPlan(registers_gradient=200, registers_other=104)
    )

    @property
    def key_bytes(self) -> int:
        return self.tile_rows // CTAS * HEAD_DIM

    @property
    def smem(self) -> SmemPlan:
        stages, stats = self.ring_stages, (self.stats_stages, self.stats_bytes, 128)
        scales = SCALE_BYTES, SCALE_ALIGNMENT
        return SmemPlan(
            (
                SmemRegion.operand("k", 1, self.key_bytes, "128 keys x 256"),
                SmemRegion.operand("v", 1, self.key_bytes, "128 keys x 256"),
                SmemRegion.operand(
                    "ring", stages, PIECE_BYTES,
                    "Q or dO: 64 queries x 256; dO for dV: 128 queries x 128 columns",
                ),
                SmemRegion("k_scales", 1, *scales, "of the CTA's 128 keys"),
                SmemRegion("v_scales", 1, *scales, "of the CTA's 128 keys"),
                SmemRegion("ring_scales", stages, *scales, "of the pair's 128 queries"),
                SmemRegion("lse", *stats, "-LSE in log2 units of 128 queries"),
                SmemRegion("delta", *stats, "-delta of 128 queries"),
                SmemRegion("staged", 2, CODE_BYTES // 2, 128,
                           "codes of dS on their way out, of a warpgroup's 64 queries"),
                *common_regions(self.edges),
            )
        )  # fmt: skip

    @property
    def tmem(self) -> TmemPlan:
        s, dp = HEAD_DIM, HEAD_DIM + self.step_columns
        half, codes = self.step_columns // 2, self.step_columns // 8
        read = "once dP is in registers"
        of_s, of_dv = f"scales of S^T's {{}}, {read}", f"scales of dV's {{}}, {read}"
        of_dp = "scales of dP^T's {}, once S is in registers"
        return TmemPlan(
            (
                TmemRegion("dv", 0, HEAD_DIM, None, "dV accumulator, 128 x 256 float32"),
                TmemRegion("s", s, self.step_columns, None, "S^T, 128 x 128 float32"),
                TmemRegion("dp", dp, self.step_columns, None, "dP^T, 128 x 128 float32"),
                TmemRegion("p0", dp, codes, "dp", f"P of queries 0..63, {read}"),
                TmemRegion("p1", dp + half, codes, "dp", "P of queries 64..127"),
                TmemRegion("k_scales", dp + 16, 8, "dp", of_s.format("K")),
                TmemRegion("q_scales", dp + 24, 8, "dp", of_s.format("Q")),
                TmemRegion("dout_t_scales", dp + 32, 8, "dp", of_dv.format("dO")),
                TmemRegion("p_scales", dp + 40, 4, "dp", of_dv.format("P")),
                # Both warpgroups store the same, each over what it alone reads.
                TmemRegion("unused_scales", dp + half + 40, 4, "dp", "the same, unused"),
                TmemRegion("v_scales", s, 8, "s", of_dp.format("V")),
                TmemRegion("dout_scales", s + 8, 8, "s", of_dp.format("dO")),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        read = Edge("dp_free", 1, Signal.WARPS_PAIR, "gradient", len(self.warps.gradient), "mma",
                    "dP^T in registers: scales may lie over it", True,
                    polls=self.polls)  # fmt: skip
        edges = with_scale_bytes(super().edges, CTAS * SCALE_BYTES)
        # dP waits for each S in registers, and so no later S need.
        return EdgeTable(
            (
                *(replace(e, initially_complete=False) if e.name == "s_free" else e for e in edges),
                read,
            )
        )

    title: ClassVar[str] = (
        "dV and dS in mxfp8: 256 keys x 128 queries per CTA pair and step, head_dim 256"
    )


@dataclass(frozen=True)
class ProductsMxfp8Plan(ProductsPlan):
    """dK and dQ in mxfp8 from a stored dS: 256 rows of a pair, 128 of the sum in each step."""

    stages: int = 6

    accumulators: ClassVar[int] = 1
    step_bytes: ClassVar[int] = CODE_BYTES + PIECE_BYTES + ATOM_BYTES + SCALE_BYTES

    @property
    def smem(self) -> SmemPlan:
        rows = "Q or K: 128 rows x 128 columns"
        return SmemPlan(
            (
                SmemRegion("ds", self.stages, CODE_BYTES, 128, "128 keys x 128 queries"),
                SmemRegion.operand("rows", self.stages, PIECE_BYTES, rows),
                SmemRegion("ds_scales", self.stages, ATOM_BYTES, 128, "of the CTA's 128 rows"),
                SmemRegion(
                    "row_scales", self.stages, SCALE_BYTES, SCALE_ALIGNMENT, "of all 256 columns"
                ),
                *common_regions(self.edges),
            )
        )

    @property
    def tmem(self) -> TmemPlan:
        first = HEAD_DIM + DS_SCALE_COLUMNS
        return TmemPlan(
            (
                TmemRegion("sum", 0, HEAD_DIM, None, "dK or dQ, 128 x 256 float32"),
                TmemRegion("ds_scales", HEAD_DIM, DS_SCALE_COLUMNS, None, "scales of dS"),
                TmemRegion("row_scales", first, ROW_SCALE_COLUMNS, None, "scales of Q or K"),
            )
        )

    title: ClassVar[str] = (
        "dK and dQ in mxfp8 from stored dS: 256 rows x 128 per CTA pair and step, head_dim 256"
    )


@dataclass(frozen=True)
class Mxfp8BackwardConfig:
    """Everything static about the backward's kernels in mxfp8 that a user or a tuner may set; the
    fields are those of `BackwardConfig`. Raises ValueError for a ds_bytes below 1: these kernels
    always store dS."""

    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    dv: DvMxfp8Plan = field(default_factory=DvMxfp8Plan)
    products: ProductsMxfp8Plan = field(default_factory=ProductsMxfp8Plan)
    ds_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ds_bytes < 1:
            raise ValueError(f"ds_bytes is {self.ds_bytes}; accepted in mxfp8: 1 or more")

    def of_kernel(self, kind: str) -> GradientConfig:
        return {
            "backward_dv_mxfp8": GradientConfig(self.dv, self.ex2_pattern),
            "backward_products_mxfp8": GradientConfig(self.products),
        }[kind]

    @property
    def title(self) -> str:
        return f"backward in mxfp8: {self.ex2_pattern}"
