"""The configuration of the Hopper kernels that make gradients: budgets derived and checked here.

`python -m fa4_hd256 plan --arch sm_90a` prints the plans; docs/kernels.md says how these kernels
differ from Blackwell's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....schedulers.protocol import COUNTER_SMEM_BYTES
from ...backward.ds_tiles import DS_BLOCK, DS_TILE, DS_TILE_BYTES
from ...limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM
from ...plan.budgets import (
    SmemPlan,
    SmemRegion,
    WarpPlan,
    check_budgets,
    check_fields,
    common_regions,
)
from ...plan.edges import Edge, EdgeTable, Signal

CTAS = 2  # of a cluster
ROW_BYTES = HEAD_DIM * ELEMENT_BYTES
PIECE_ROWS = 64  # of Q or K in a buffer of the GEMMs
PIECES = DS_TILE // PIECE_ROWS


@dataclass(frozen=True)
class BackwardWarpPlan(WarpPlan):
    """Warps and registers of one CTA: two warpgroups multiply, a warp of the third loads."""

    gradient: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    load: int = 8
    scheduler: int = 9
    registers_gradient: int = 240
    registers_other: int = 24

    warpgroups = (
        ("the first gradient warpgroup", "registers_gradient"),
        ("the second gradient warpgroup", "registers_gradient"),
        ("the other roles", "registers_other"),
    )

    @property
    def scheduled_warps(self) -> int:
        """Warps of both CTAs that run the tile loop under a dynamic scheduler."""
        return CTAS * (len(self.gradient) + 2)


@dataclass(frozen=True)
class DvPlan:
    """dV and dS: 256 keys of a cluster stay, 64 queries pass. q_stages, dout_stages: buffers."""

    q_stages: int = 1
    dout_stages: int = 2
    warps: BackwardWarpPlan = field(default_factory=BackwardWarpPlan)

    tile_rows: ClassVar[int] = DS_BLOCK
    step_columns: ClassVar[int] = 64

    def __post_init__(self) -> None:
        check_fields(self)
        if self.q_stages < 1 or self.dout_stages < 2:
            raise ValueError(
                f"q_stages is {self.q_stages} and dout_stages {self.dout_stages}; at least 1 and 2 "
                "are needed: dO of a step is multiplied while Q of the next is"
            )
        check_budgets(self)

    @property
    def cta_rows(self) -> int:
        return self.tile_rows // CTAS

    @property
    def smem(self) -> SmemPlan:
        keys, queries = self.cta_rows * ROW_BYTES, self.step_columns * ROW_BYTES
        stats = self.step_columns * FLOAT_BYTES
        return SmemPlan(
            (
                SmemRegion.operand("k", 1, keys, "128 keys x 256"),
                SmemRegion.operand("v", 1, keys, "128 keys x 256"),
                SmemRegion.operand("q", self.q_stages, queries, "64 queries x 256"),
                SmemRegion.operand("dout", self.dout_stages, queries, "64 queries x 256"),
                SmemRegion("lse", self.q_stages, stats, 128, "-LSE in log2 units of 64 queries"),
                SmemRegion("delta", self.dout_stages, stats, 128, "-delta of 64 queries"),
                *common_regions(self.edges, COUNTER_SMEM_BYTES),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        gradient = len(self.warps.gradient)
        tma, cta = Signal.TMA_CTA, Signal.WARPS_CTA
        shared, both = Signal.TMA_BOTH, Signal.WARPS_BOTH
        keys = self.cta_rows * ROW_BYTES
        queries = self.step_columns * (ROW_BYTES + FLOAT_BYTES)
        return EdgeTable(
            (
                Edge("k_loaded", 1, tma, "load", 1, "gradient", "K in SMEM",
                     transaction_bytes=keys),
                Edge("k_free", 1, cta, "gradient", gradient, "load", "K: all S of the tile done",
                     True),
                Edge("v_loaded", 1, tma, "load", 1, "gradient", "V in SMEM",
                     transaction_bytes=keys),
                Edge("v_free", 1, cta, "gradient", gradient, "load", "V: all dP of the tile done",
                     True),
                Edge("q_loaded", self.q_stages, shared, "load", 1, "gradient", "Q and LSE in SMEM",
                     transaction_bytes=queries),
                Edge("q_free", self.q_stages, both, "gradient", gradient, "load",
                     "Q buffer: S is done, LSE read", True),
                Edge("dout_loaded", self.dout_stages, shared, "load", 1, "gradient",
                     "dO and delta in SMEM", transaction_bytes=queries),
                Edge("dout_free", self.dout_stages, both, "gradient", gradient, "load",
                     "dO buffer: dP and dV are done, delta read", True),
            )
        )  # fmt: skip

    @property
    def title(self) -> str:
        return "dV and dS: 256 keys x 64 queries per cluster and step, head_dim 256"


@dataclass(frozen=True)
class ProductsPlan:
    """dK and dQ as plain GEMMs of a stored dS: 256 rows of a cluster, 128 of the sum in each step.
    ds_stages: buffers of dS. rows_stages: of the rows it is multiplied with, two per step."""

    ds_stages: int = 2
    rows_stages: int = 5
    warps: BackwardWarpPlan = field(default_factory=BackwardWarpPlan)

    tile_rows: ClassVar[int] = DS_BLOCK
    step_columns: ClassVar[int] = DS_TILE

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ds_stages < 2 or self.rows_stages < 3:
            raise ValueError(
                f"ds_stages is {self.ds_stages} and rows_stages {self.rows_stages}; at least 2 and "
                "3 are needed: a step's last piece is multiplied while the next step's first is"
            )
        check_budgets(self)

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemRegion.operand("ds", self.ds_stages, DS_TILE_BYTES, "128 keys x 128 queries"),
                SmemRegion.operand(
                    "rows", self.rows_stages, PIECE_ROWS * ROW_BYTES, "Q or K: 64 rows x 256"
                ),
                *common_regions(self.edges, COUNTER_SMEM_BYTES),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        gradient, tma = len(self.warps.gradient), Signal.TMA_CTA
        return EdgeTable(
            (
                Edge("ds_loaded", self.ds_stages, tma, "load", 1, "gradient", "dS in SMEM",
                     transaction_bytes=DS_TILE_BYTES),
                Edge("ds_free", self.ds_stages, Signal.WARPS_CTA, "gradient", gradient, "load",
                     "dS buffer: its MMAs are done", True),
                Edge("rows_loaded", self.rows_stages, Signal.TMA_BOTH, "load", 1, "gradient",
                     "Q or K in SMEM", transaction_bytes=PIECE_ROWS * ROW_BYTES),
                Edge("rows_free", self.rows_stages, Signal.WARPS_BOTH, "gradient", gradient,
                     "load", "Q or K buffer: its MMAs are done", True),
            )
        )  # fmt: skip

    @property
    def title(self) -> str:
        return "dK and dQ from stored dS: 256 rows x 128 per cluster and step, head_dim 256"


@dataclass(frozen=True)
class SinglePlan:
    """One gradient by itself: 256 rows of a cluster stay, 64 of the other side pass in each step.
    result: "dq", "dk" or "dv". x_stages: buffers of what scores and dS, or P, are multiplied with.
    y_stages: of what gives dP, or dV."""

    result: str
    x_stages: int = 2
    y_stages: int = 1
    warps: BackwardWarpPlan = field(default_factory=BackwardWarpPlan)

    tile_rows: ClassVar[int] = DS_BLOCK
    step_columns: ClassVar[int] = 64

    def __post_init__(self) -> None:
        check_fields(self)
        if self.result not in ("dq", "dk", "dv"):
            raise ValueError(f"result is {self.result!r}; accepted are dq, dk and dv")
        if self.x_stages < 2 or self.y_stages < 1:
            raise ValueError(
                f"x_stages is {self.x_stages} and y_stages {self.y_stages}; at least 2 and 1 are "
                "needed: the sum of a step runs beside the scores of the next"
            )
        check_budgets(self)

    @property
    def cta_rows(self) -> int:
        return self.tile_rows // CTAS

    @property
    def passing_stats(self) -> tuple[str, ...]:
        """Return which of "lse" and "delta" pass beside x and y; dQ has them by row, and dV takes
        no delta."""
        return {"dq": (), "dk": ("lse", "delta"), "dv": ("lse",)}[self.result]

    @property
    def smem(self) -> SmemPlan:
        rows, step = self.cta_rows * ROW_BYTES, self.step_columns * ROW_BYTES
        stats = self.step_columns * FLOAT_BYTES
        of_step = (
            SmemRegion("lse", self.x_stages, stats, 128, "-LSE in log2 units of 64 queries"),
            SmemRegion("delta", self.y_stages, stats, 128, "-delta of 64 queries"),
        )
        return SmemPlan(
            (
                SmemRegion.operand("a", 1, rows, "Q or K: 128 rows x 256"),
                SmemRegion.operand("g", 1, rows, "dO or V: 128 rows x 256"),
                SmemRegion.operand("x", self.x_stages, step, "K or Q: 64 rows x 256"),
                SmemRegion.operand("y", self.y_stages, step, "V or dO: 64 rows x 256"),
                *(region for region in of_step if region.name in self.passing_stats),
                *common_regions(self.edges, COUNTER_SMEM_BYTES),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        gradient, tma, both = len(self.warps.gradient), Signal.TMA_CTA, Signal.WARPS_BOTH
        shared = Signal.TMA_BOTH
        stays = (1 if self.result == "dv" else 2) * self.cta_rows * ROW_BYTES
        x_bytes, y_bytes = (
            self.step_columns * (ROW_BYTES + FLOAT_BYTES * (name in self.passing_stats))
            for name in ("lse", "delta")
        )
        return EdgeTable(
            (
                Edge("a_loaded", 1, tma, "load", 1, "gradient", "what stays in SMEM",
                     transaction_bytes=stays),
                Edge("a_free", 1, Signal.WARPS_CTA, "gradient", gradient, "load",
                     "what stays: all scores of the tile done", True),
                Edge("x_loaded", self.x_stages, shared, "load", 1, "gradient", "K or Q in SMEM",
                     transaction_bytes=x_bytes),
                Edge("x_free", self.x_stages, both, "gradient", gradient, "load",
                     "K or Q buffer: its MMAs are done", True),
                Edge("y_loaded", self.y_stages, shared, "load", 1, "gradient", "V or dO in SMEM",
                     transaction_bytes=y_bytes),
                Edge("y_free", self.y_stages, both, "gradient", gradient, "load",
                     "V or dO buffer: its MMAs are done", True),
            )
        )  # fmt: skip

    @property
    def title(self) -> str:
        return f"{self.result} alone: 256 rows x 64 per cluster and step, head_dim 256"


@dataclass(frozen=True)
class GradientConfig:
    plan: DvPlan | ProductsPlan | SinglePlan


@dataclass(frozen=True)
class BackwardConfig:
    """Everything static about the backward kernels that a user or a tuner may set.

    ds_bytes: global memory that dS may take at a time, 0 or more; the call is split so that it fits
        (`call.chunks`).  With 0 it is not stored: each gradient's kernel computes its own. By
        default there is room for eight heads over 32,768 rows under a causal mask: 8.06 GiB.

    Raises ValueError for a negative ds_bytes.
    """

    dv: DvPlan = field(default_factory=DvPlan)
    products: ProductsPlan = field(default_factory=ProductsPlan)
    single_dq: SinglePlan = SinglePlan("dq")
    single_dk: SinglePlan = SinglePlan("dk")
    single_dv: SinglePlan = SinglePlan("dv")
    ds_bytes: int = 9 << 30

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ds_bytes < 0:
            raise ValueError(f"ds_bytes is {self.ds_bytes}; accepted: 0 (keep no dS) or more")

    def of_kernel(self, kind: str) -> GradientConfig:
        return GradientConfig(getattr(self, kind.removeprefix("backward_")))

    title: ClassVar[str] = "backward"
