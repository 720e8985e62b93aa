"""The configuration of the backward's pair kernels: budgets derived and checked here.

CTA pairs work on 256 rows x 128 columns of S or dS at a time, or on 128 keys x 256 queries;
docs/kernels.md has the budgets that led to this design.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....softmax_emu.pattern import Ex2Pattern
from ...backward.ds_tiles import DS_BLOCK, DS_TILE, DS_TILE_BYTES
from ...limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM
from ...plan.budgets import (
    SmemPlan,
    SmemRegion,
    TmemPlan,
    TmemRegion,
    WarpPlan,
    check_budgets,
    check_fields,
)
from ...plan.edges import Edge, EdgeTable, Signal
from ..pair_plan import BLOCK_KV, BLOCK_Q, CTAS, TILE_Q, check_ring, common_regions

TILE_BYTES = 128 * 128 * ELEMENT_BYTES  # of one stage of a ring: 128 x 128, or 64 x 256
PIECE_BYTES = 64 * 128 * ELEMENT_BYTES  # of a ring of half as large pieces


@dataclass(frozen=True)
class BackwardWarpPlan(WarpPlan):
    """Warp indices and register budgets of one CTA, the same in all of them.

    Two warpgroups of gradient warps make P and dS, each one half of the columns; in dK/dV each one
    half of the queries of a lane half (`DkdvKernel._first_query`); in `products`, where dS is read
    from memory, they move sums out. The third warpgroup holds one
    warp each of the other roles, and one without work.
    """

    gradient: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    mma: int = 8
    load: int = 9
    scheduler: int = 10
    registers_gradient: int = 224
    registers_other: int = 56

    warpgroups = (
        ("the first gradient warpgroup", "registers_gradient"),
        ("the second gradient warpgroup", "registers_gradient"),
        ("the other roles", "registers_other"),
    )

    @property
    def scheduled_warps(self) -> int:
        """Warps of both CTAs that run the tile loop: not the peer's MMA warp."""
        return CTAS * (len(self.gradient) + 2) + 1


@dataclass(frozen=True)
class RingPlan:
    """Plan of a kernel whose passing operands share a ring.

    ring_stages: buffers of the ring.
    polls: whether waits of each step, not those of a tile, have no time hint
        (`EdgeTable.polling`).
    """

    ring_stages: int = 3
    polls: bool = False
    warps: BackwardWarpPlan = field(default_factory=BackwardWarpPlan)

    step_columns: ClassVar[int]

    def __post_init__(self) -> None:
        check_fields(self)
        check_ring("ring_stages", self.ring_stages)
        check_budgets(self)

    @property
    def stats_bytes(self) -> int:
        """LSE, or delta, of the queries of one step."""
        return self.step_columns * FLOAT_BYTES


@dataclass(frozen=True)
class DqPlan(RingPlan):
    """The dQ kernel: 256 queries of a pair stay, 128 keys pass in each step; K (twice, see `dq`)
    and V share the ring."""

    tile_rows: ClassVar[int] = TILE_Q
    step_columns: ClassVar[int] = BLOCK_KV

    @property
    def query_bytes(self) -> int:
        """One CTA's Q, or dO, of one tile."""
        return BLOCK_Q * HEAD_DIM * ELEMENT_BYTES

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemRegion.operand("q", 1, self.query_bytes, "128 rows x 256"),
                SmemRegion.operand("dout", 1, self.query_bytes, "128 rows x 256"),
                SmemRegion.operand(
                    "ring",
                    self.ring_stages,
                    TILE_BYTES,
                    "K or V: 64 keys x 256; K for dQ: 128 keys x 128 columns",
                ),
                *common_regions(self.edges),
            )
        )

    @property
    def tmem(self) -> TmemPlan:
        s, dp = HEAD_DIM, HEAD_DIM + BLOCK_KV
        half = BLOCK_KV // 2
        return TmemPlan(
            (
                TmemRegion("dq", 0, HEAD_DIM, None, "dQ accumulator, 128 x 256 float32"),
                TmemRegion("s", s, BLOCK_KV, None, "S, 128 x 128 float32"),
                TmemRegion("dp", dp, BLOCK_KV, None, "dP, 128 x 128 float32"),
                TmemRegion("ds0", dp, half // 2, "dp", "dS of keys 0..63, once dP is in registers"),
                TmemRegion("ds1", dp + half, half // 2, "dp", "dS of keys 64..127"),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        gradient = len(self.warps.gradient)
        pair, commit, tma = Signal.WARPS_PAIR, Signal.COMMIT_PAIR, Signal.TMA_PAIR
        rows = CTAS * self.query_bytes
        edges = EdgeTable(
            (
                Edge("q_loaded", 1, tma, "load", 1, "mma", "Q in SMEM", transaction_bytes=rows),
                Edge("q_free", 1, commit, "mma", 1, "load", "Q: all S of the tile done", True),
                Edge("dout_loaded", 1, tma, "load", 1, "mma", "dO in SMEM", transaction_bytes=rows),
                Edge("dout_free", 1, commit, "mma", 1, "load", "dO: all dP of the tile done", True),
                Edge("ring_loaded", self.ring_stages, tma, "load", 1, "mma",
                     "K or V tile in SMEM", transaction_bytes=CTAS * TILE_BYTES),
                Edge("ring_free", self.ring_stages, commit, "mma", 1, "load",
                     "K or V buffer: its MMAs are done", True),
                Edge("s_done", 1, commit, "mma", 1, "gradient", "S in TMEM"),
                Edge("s_free", 1, pair, "gradient", gradient, "mma", "S in registers", True),
                Edge("dp_done", 1, commit, "mma", 1, "gradient", "dP in TMEM"),
                Edge("ds_done", 1, pair, "gradient", gradient, "mma", "dS in TMEM, over its dP"),
                Edge("dq_done", 1, commit, "mma", 1, "gradient", "dQ of the tile in TMEM"),
                Edge("dq_free", 1, pair, "gradient", gradient, "mma", "dQ in registers", True),
            )
        )  # fmt: skip
        return edges.polling(
            self.polls, "q_loaded", "q_free", "dout_loaded", "dout_free", "dq_done", "dq_free"
        )

    title: ClassVar[str] = "dQ: 256 queries x 128 keys per CTA pair and step, head_dim 256"


def _operand_edges(key_bytes: int, stages: int, buffer_bytes: int) -> tuple[Edge, ...]:
    """Return the edges of K and V, which stay, and of the ring of Q and dO; bytes of both CTAs."""
    commit, tma = Signal.COMMIT_PAIR, Signal.TMA_PAIR
    return (
        Edge("k_loaded", 1, tma, "load", 1, "mma", "K in SMEM", transaction_bytes=key_bytes),
        Edge("k_free", 1, commit, "mma", 1, "load", "K: all S of the tile done", True),
        Edge("v_loaded", 1, tma, "load", 1, "mma", "V in SMEM", transaction_bytes=key_bytes),
        Edge("v_free", 1, commit, "mma", 1, "load", "V: all dP of the tile done", True),
        Edge(
            "ring_loaded",
            stages,
            tma,
            "load",
            1,
            "mma",
            "Q or dO in SMEM",
            transaction_bytes=buffer_bytes,
        ),
        Edge(
            "ring_free", stages, commit, "mma", 1, "load", "Q or dO buffer: its MMAs are done", True
        ),
    )


def _score_edges(gradient: int) -> tuple[Edge, ...]:
    """Return the edges by which S^T, and dP^T until it has been read, go to the gradient warps."""
    commit, pair = Signal.COMMIT_PAIR, Signal.WARPS_PAIR
    return (
        Edge("s_done", 1, commit, "mma", 1, "gradient", "S^T in TMEM"),
        Edge("s_free", 1, pair, "gradient", gradient, "mma", "S^T in registers", True),
        Edge("dp_done", 1, commit, "mma", 1, "gradient", "dP^T in TMEM"),
    )


@dataclass(frozen=True)
class DkdvPlan(RingPlan):
    """The dK/dV kernel: 128 keys of a pair stay, units of 256 queries pass; Q and dO (each twice,
    see `dkdv`) share the ring."""

    ring_stages: int = 4

    tile_rows: ClassVar[int] = BLOCK_KV
    step_columns: ClassVar[int] = TILE_Q

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemRegion.operand("k", 1, TILE_BYTES, "64 keys x 256"),
                SmemRegion.operand("v", 1, TILE_BYTES, "64 keys x 256"),
                SmemRegion.operand(
                    "weights", 1, TILE_BYTES, "64 keys x 256 queries: P for dV, then dS for dK"
                ),
                SmemRegion.operand(
                    "ring", self.ring_stages, TILE_BYTES, "Q or dO: 128 queries x 128 columns"
                ),
                SmemRegion("lse", 1, self.stats_bytes, 128, "-LSE in log2 units of 256 queries"),
                SmemRegion("delta", 1, self.stats_bytes, 128, "-delta of 256 queries"),
                *common_regions(self.edges),
            )
        )

    @property
    def tmem(self) -> TmemPlan:
        columns = BLOCK_KV  # of every region: 64 rows in two halves of 64 lanes each
        return TmemPlan(
            (
                TmemRegion("dv", 0, columns, None, "dV accumulator, 64 x 256 float32"),
                TmemRegion("dk", columns, columns, None, "dK accumulator, 64 x 256 float32"),
                TmemRegion("s", 2 * columns, columns, None, "S^T, 64 keys x 256 queries float32"),
                TmemRegion("dp", 3 * columns, columns, None, "dP^T, 64 keys x 256 queries"),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        gradient = len(self.warps.gradient)
        pair, commit, stats = Signal.WARPS_PAIR, Signal.COMMIT_PAIR, self.stats_bytes
        cta_tma, cta, release = Signal.TMA_CTA, Signal.WARPS_CTA, Signal.WARPS_PAIR_RELEASE
        edges = EdgeTable(
            (
                *_operand_edges(CTAS * TILE_BYTES, self.ring_stages, CTAS * TILE_BYTES),
                Edge("lse_loaded", 1, cta_tma, "load", 1, "gradient", "LSE in SMEM",
                     transaction_bytes=stats),
                Edge("lse_free", 1, cta, "gradient", gradient, "load", "LSE read", True),
                Edge("delta_loaded", 1, cta_tma, "load", 1, "gradient", "delta in SMEM",
                     transaction_bytes=stats),
                Edge("delta_free", 1, cta, "gradient", gradient, "load", "delta read", True),
                *_score_edges(gradient),
                Edge("dp_free", 1, pair, "gradient", gradient, "mma", "dP^T in registers", True),
                Edge("weights_done", 1, release, "gradient", gradient, "mma",
                     "P, then dS, in SMEM"),
                Edge("weights_free", 1, commit, "mma", 1,
                     "gradient",
                     "P, then dS: its MMAs are done", True),
                Edge("sums_done", 1, commit, "mma", 1, "gradient", "dK and dV of the tile in TMEM"),
                Edge("sums_free", 1, pair, "gradient", gradient, "mma",
                     "dK and dV in registers", True),
            )
        )  # fmt: skip
        return edges.polling(
            self.polls, "k_loaded", "k_free", "v_loaded", "v_free", "sums_done", "sums_free"
        )

    title: ClassVar[str] = "dK/dV: 128 keys x 256 queries per CTA pair and step, head_dim 256"


@dataclass(frozen=True)
class DvPlan(RingPlan):
    """The kernel of dV and dS: 256 keys of a pair stay, 128 queries pass in each step; Q and dO
    (twice, see `dv`) share the ring."""

    ring_stages: int = 6
    # With 56 the load warp of packed sequences spills.
    warps: BackwardWarpPlan = field(
        default_factory=lambda: BackwardWarpPlan(registers_gradient=216, registers_other=72)
    )

    stats_stages: ClassVar[int] = 2
    tile_rows: ClassVar[int] = DS_BLOCK
    step_columns: ClassVar[int] = DS_TILE

    @property
    def key_bytes(self) -> int:
        """One CTA's K, or V, of one tile."""
        return self.tile_rows // CTAS * HEAD_DIM * ELEMENT_BYTES

    @property
    def smem(self) -> SmemPlan:
        stats = self.stats_stages, self.stats_bytes, 128
        return SmemPlan(
            (
                SmemRegion.operand("k", 1, self.key_bytes, "128 keys x 256"),
                SmemRegion.operand("v", 1, self.key_bytes, "128 keys x 256"),
                SmemRegion.operand(
                    "ring", self.ring_stages, PIECE_BYTES, "Q or dO: 64 queries x 128 columns"
                ),
                SmemRegion("lse", *stats, "-LSE in log2 units of 128 queries"),
                SmemRegion("delta", *stats, "-delta of 128 queries"),
                *common_regions(self.edges),
            )
        )

    @property
    def tmem(self) -> TmemPlan:
        s, dp = HEAD_DIM, HEAD_DIM + self.step_columns
        half = self.step_columns // 2
        return TmemPlan(
            (
                TmemRegion("dv", 0, HEAD_DIM, None, "dV accumulator, 128 x 256 float32"),
                TmemRegion("s", s, self.step_columns, None, "S^T, 128 x 128 float32"),
                TmemRegion("dp", dp, self.step_columns, None, "dP^T, 128 x 128 float32"),
                TmemRegion("p0", dp, half // 2, "dp", "P of queries 0..63, once dP is read"),
                TmemRegion("p1", dp + half, half // 2, "dp", "P of queries 64..127"),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        gradient = len(self.warps.gradient)
        pair, commit, stats = Signal.WARPS_PAIR, Signal.COMMIT_PAIR, self.stats_stages
        cta_tma, cta = Signal.TMA_CTA, Signal.WARPS_CTA
        edges = EdgeTable(
            (
                *_operand_edges(CTAS * self.key_bytes, self.ring_stages, CTAS * PIECE_BYTES),
                Edge("stats_loaded", stats, cta_tma, "load", 1, "gradient", "LSE, delta in SMEM",
                     transaction_bytes=2 * self.stats_bytes),
                Edge("stats_free", stats, cta, "gradient", gradient, "load",
                     "LSE and delta read", True),
                *_score_edges(gradient),
                Edge("p_done", 1, pair, "gradient", gradient, "mma", "P in TMEM, over its dP"),
                Edge("dv_done", 1, commit, "mma", 1, "gradient", "dV of the tile in TMEM"),
                Edge("dv_free", 1, pair, "gradient", gradient, "mma", "dV in registers", True),
            )
        )  # fmt: skip
        return edges.polling(
            self.polls, "k_loaded", "k_free", "v_loaded", "v_free", "dv_done", "dv_free"
        )

    title: ClassVar[str] = "dV and dS: 256 keys x 128 queries per CTA pair and step, head_dim 256"


@dataclass(frozen=True)
class ProductsPlan:
    """dK and dQ as plain GEMMs of a stored dS: 256 rows of a pair, 128 of the sum in each step.

    stages: steps whose operands are in SMEM at a time.
    polls: whether waits of each step, not those of a tile, have no time hint
        (`EdgeTable.polling`).
    """

    stages: int = 3
    polls: bool = False
    warps: BackwardWarpPlan = field(default_factory=BackwardWarpPlan)

    accumulators: ClassVar[int] = 2
    step_bytes: ClassVar[int] = DS_TILE_BYTES + TILE_BYTES  # that a CTA loads
    tile_rows: ClassVar[int] = DS_BLOCK
    step_columns: ClassVar[int] = DS_TILE

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stages < 2:
            raise ValueError(
                f"stages is {self.stages}; at least 2 are needed: the step in use and the next"
            )
        check_budgets(self)

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemRegion("ds", self.stages, DS_TILE_BYTES, 128, "128 keys x 128 queries"),
                SmemRegion.operand(
                    "rows", self.stages, TILE_BYTES, "Q or K: 128 rows x 128 columns"
                ),
                *common_regions(self.edges),
            )
        )

    @property
    def tmem(self) -> TmemPlan:
        note = "dK or dQ of every other tile, 128 x 256 float32"
        return TmemPlan(
            tuple(
                TmemRegion(f"sum{i}", i * HEAD_DIM, HEAD_DIM, None, note)
                for i in range(self.accumulators)
            )
        )

    @property
    def edges(self) -> EdgeTable:
        gradient, stages = len(self.warps.gradient), self.accumulators
        pair, commit, tma = Signal.WARPS_PAIR, Signal.COMMIT_PAIR, Signal.TMA_PAIR
        edges = EdgeTable(
            (
                Edge("step_loaded", self.stages, tma, "load", 1, "mma", "dS and rows in SMEM",
                     transaction_bytes=CTAS * self.step_bytes),
                Edge("step_free", self.stages, commit, "mma", 1, "load",
                     "buffers of dS and rows: their MMAs are done", True),
                Edge("sum_done", stages, commit, "mma", 1, "gradient", "the tile's sum in TMEM"),
                Edge("sum_free", stages, pair, "gradient", gradient, "mma",
                     "the tile's sum in registers", True),
            )
        )  # fmt: skip
        return edges.polling(self.polls, "sum_done", "sum_free")

    title: ClassVar[str] = (
        "dK and dQ from stored dS: 256 rows x 128 per CTA pair and step, head_dim 256"
    )


@dataclass(frozen=True)
class GradientConfig:
    """Fields of a `BackwardConfig` of one pair kernel. ex2_pattern: None without an exp2."""

    plan: DqPlan | DkdvPlan | DvPlan | ProductsPlan
    ex2_pattern: Ex2Pattern | None = None


@dataclass(frozen=True)
class BackwardConfig:
    """Everything static about the backward kernels that a user or a tuner may set.

    ex2_pattern: which elements of P take the polynomial exp2, as in the forward pass; a thread
        holds 64 columns, so fragments 0 and 1 exist.
    ds_bytes: global memory that dS may take at a time, 0 or more; the call is split so that it fits
        (`call.chunks`).  With 0 it is not stored: dK/dV and dQ each compute it.  Fewer and larger
        chunks leave fewer CTA pairs idle at their ends (lab/notes.md).

    Raises ValueError for a negative ds_bytes.
    """

    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    dq: DqPlan = field(default_factory=DqPlan)
    dkdv: DkdvPlan = field(default_factory=DkdvPlan)
    dv: DvPlan = field(default_factory=DvPlan)
    products: ProductsPlan = field(default_factory=ProductsPlan)
    ds_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ds_bytes < 0:
            raise ValueError(f"ds_bytes is {self.ds_bytes}; accepted: 0 (keep no dS) or more")

    def of_kernel(self, kind: str) -> GradientConfig:
        """Return the configuration of a kernel, by its kind in `catalogue.KINDS`. Settings of
        another kernel or of the host alone are not in it, so that changing those recompiles
        nothing."""
        return {
            "backward_dq": GradientConfig(self.dq, self.ex2_pattern),
            "backward_dkdv": GradientConfig(self.dkdv, self.ex2_pattern),
            "backward_dv": GradientConfig(self.dv, self.ex2_pattern),
            "backward_products": GradientConfig(self.products),
        }[kind]

    @property
    def title(self) -> str:
        return f"backward: {self.ex2_pattern}"
