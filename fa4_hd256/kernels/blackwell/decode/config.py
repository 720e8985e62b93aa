"""Configuration of the decode kernel: rows, stages, warps, and the plans that follow.

NOTE [keys as M].  A few query rows against many keys are bound by HBM: a step of 128 keys is
128 KiB, 4,300 clocks of an SM's part of 8 TB/s and at least 2,600 of its interface to L2, however
few the rows.  What must hide behind it is the chain of a step, by the timing model in clocks for
16 rows:

    pair tile of the forward, 256 rows     two MMAs of M = 256 and the softmax of 128 columns a row:
                                           2,100 to 2,600, and a pair of SMs works on one tile
    S = Q K^T with M = 64, a CTA           S 1,024 (N = 128, 16 slices of 64), P V 1,024 (N = 256, 8
                                           slices of 128): 16 of 64 rows live, and of four warps one
                                           has all exponentials, 128 a row
    S^T = K Q^T, keys as M, N = 16         S 576 (16 slices of 36, operands bind), O^T 576 (two
                                           halves, 8 slices each), 16 exponentials a thread

With N = 16 a product takes what reading K and V takes from shared memory, and nothing for rows that
are not there; all 128 threads of the softmax have as many scores.  P^T in tensor memory would have
to be A, so that V^T were B with d as N: P would be M = 64 rows again.  So P goes to shared memory,
4 KiB a step.

The chain is one after the other, softmax (some 450), P V (some 730), for which nothing waits but
the next P: about 1,200 clocks, half of what the loads take at best.  So P and O have one
buffer and the softmax rescales O by itself.

NOTE [halves].  K and V come in halves of 128 columns: 32 KiB, a stage.  Five or six of them are
160 to 192 KiB under way, where HBM gives its rate from 128 KiB on (docs/facts.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fa4_hd256.kernels.blackwell.pair_plan import check_plan, check_ring, common_regions
from fa4_hd256.kernels.edges import Edge, EdgeTable, Signal
from fa4_hd256.kernels.kernel_set import ForwardTiles
from fa4_hd256.kernels.limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM, SWIZZLE_ALIGNMENT
from fa4_hd256.kernels.plans import (
    SmemPlan,
    SmemRegion,
    TmemPlan,
    TmemRegion,
    WarpPlan,
    describe_plans,
)
from fa4_hd256.kernels.steps import StepTable
from softmax_emu.pattern import Ex2Pattern

from .steps import HALVES, decode_steps

__all__ = ["BLOCK_KV", "DECODE", "ROWS", "DecodeConfig", "DecodeWarpPlan"]

BLOCK_KV = 128  # keys of a step: M of S, a lane of tensor memory each
HALF = HEAD_DIM // len(HALVES)  # columns of a buffer of K or V: M of a half of O

#: Query rows of a tile that are offered: N of both products.
ROWS = (16, 32, 64)


@dataclass(frozen=True)
class DecodeWarpPlan(WarpPlan):
    """Warp indices and register budgets of a CTA: the softmax, then a warp for each other role."""

    softmax: tuple[int, ...] = (0, 1, 2, 3)
    mma: int = 4
    load: int = 5
    scheduler: int = 6
    registers_softmax: int = 256
    registers_other: int = 256

    WARPGROUPS = (("softmax", "registers_softmax"), ("the other roles", "registers_other"))
    ROLES = (
        WARPGROUPS[0],
        *((role, "registers_other") for role in ("mma", "load", "scheduler")),
    )

    @property
    def scheduled_warps(self) -> int:
        """Warps that run the tile loop."""
        return len(self.softmax) + 3


@dataclass(frozen=True)
class DecodeConfig:
    """Everything static about the decode kernel that a user or a tuner may set.

    rows: query rows of a tile, one of `ROWS`: those of the heads that share keys, of a few queries.
    half_stages: buffers of the ring that halves of K and V tiles share.
    q_stages: Q buffers; with two, the next tile's Q is loaded while this tile is worked on.
    ex2_pattern: which score elements take the polynomial exp2; its columns are the rows, so that
        a pattern which leaves the last fragment to the hardware leaves all of 16 or 32 rows.
    rescale_threshold: in log2 units; O is rescaled only when a row's maximum grew by more.
    ordered_tiles: the longest tiles first and heads grouped for L2 (`schedulers.order`).
    """

    rows: int = 16
    half_stages: int = 6
    q_stages: int = 2
    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    rescale_threshold: float = 8.0
    warps: DecodeWarpPlan = field(default_factory=DecodeWarpPlan)
    ordered_tiles: bool = True

    block_kv = BLOCK_KV
    s_stages = 2

    def __post_init__(self) -> None:
        if self.rows not in ROWS:
            accepted = ", ".join(map(str, ROWS))
            raise ValueError(f"rows is {self.rows}; accepted are {accepted}")
        check_ring("half_stages", self.half_stages)
        if self.q_stages not in (1, 2):
            raise ValueError(f"q_stages is {self.q_stages}; accepted are 1 and 2")
        if not 0 <= self.rescale_threshold <= 15:
            raise ValueError(
                f"rescale_threshold is {self.rescale_threshold}; accepted are 0 to 15 "
                "(P reaches 2^threshold and must stay finite in float16)"
            )
        check_plan("the decode kernel", self)

    @property
    def tiles(self) -> ForwardTiles:
        """What the host must know of its tiles."""
        return ForwardTiles(
            self.rows, self.rows, BLOCK_KV, 1, step_seconds=1e-6, least_saved=4,
            most_rows=self.rows, step_bytes=2 * BLOCK_KV * HEAD_DIM * ELEMENT_BYTES, most_parts=64,
            pads=True, kind="forward_decode",
        )  # fmt: skip

    @property
    def q_bytes(self) -> int:
        """Q of a tile."""
        return self.rows * HEAD_DIM * ELEMENT_BYTES

    @property
    def half_bytes(self) -> int:
        """A half of a K or V tile."""
        return BLOCK_KV * HALF * ELEMENT_BYTES

    @property
    def smem(self) -> SmemPlan:
        softmax = len(self.warps.softmax)
        return SmemPlan(
            (
                SmemRegion("kv", self.half_stages, self.half_bytes, SWIZZLE_ALIGNMENT,
                           "128 keys x 128 columns of K or V"),
                SmemRegion("q", self.q_stages, self.q_bytes, SWIZZLE_ALIGNMENT,
                           f"{self.rows} rows x 256"),
                SmemRegion("p", 1, self.rows * BLOCK_KV * ELEMENT_BYTES, 128,
                           f"P^T, 128 keys x {self.rows} rows"),
                SmemRegion("maxima", softmax, self.rows * FLOAT_BYTES, 16,
                           "of each row, by warp"),
                SmemRegion("sums", softmax, self.rows * FLOAT_BYTES, 16, "of each row, by warp"),
                SmemRegion("inverses", 1, self.rows * FLOAT_BYTES, 16, "1/sum of each row"),
                *common_regions(self.edges),
            )
        )  # fmt: skip

    @property
    def tmem(self) -> TmemPlan:
        rows = self.rows
        regions = [
            TmemRegion(f"o{half}", half * rows, rows, None,
                       f"O^T accumulator, columns {half * HALF} to {half * HALF + HALF - 1}")
            for half in HALVES
        ]  # fmt: skip
        end = len(HALVES) * rows
        regions += [
            TmemRegion(f"s{stage}", end + stage * rows, rows, None, f"S^T, 128 keys x {rows} rows")
            for stage in range(self.s_stages)
        ]
        return TmemPlan(tuple(regions))

    @property
    def edges(self) -> EdgeTable:
        commit, loaded = Signal.COMMIT_CTA, Signal.TMA_CTA
        return EdgeTable(
            (
                Edge("q_loaded", self.q_stages, loaded, "load", 1, "mma", "Q in SMEM",
                     transaction_bytes=self.q_bytes),
                Edge("q_free", self.q_stages, commit, "mma", 1, "load",
                     "Q buffer: the tile's last QK is done", True),
                Edge("kv_loaded", self.half_stages, loaded, "load", 1, "mma",
                     "half of a K or V tile in SMEM", transaction_bytes=self.half_bytes),
                Edge("kv_free", self.half_stages, commit, "mma", 1, "load",
                     "its buffer: the MMAs are done", True),
                Edge("s_done", self.s_stages, commit, "mma", 1, "softmax", "S in TMEM"),
                Edge("p_done", 1, Signal.WARPS_CTA, "softmax", len(self.warps.softmax), "mma",
                     "P in SMEM, O rescaled or drained"),
                Edge("o_done", 1, commit, "mma", 1, "softmax", "O += P V done"),
            )
        )  # fmt: skip

    @property
    def steps(self) -> StepTable:
        return decode_steps()

    @classmethod
    def tuned(
        cls, causal: bool, seqlen_k: int, gpu: str, tiles: ForwardTiles, paged: bool = False
    ) -> DecodeConfig:
        """The default configuration of a call with such tiles; see `ForwardConfig.tuned`."""
        return next(config for config in DECODE if config.tiles == tiles)

    def score_elements(self, products: int) -> int:
        """Elements of S that so many MMA instructions of QK and PV, K = 16 each, stand for."""
        per_step = HEAD_DIM // 16 + len(HALVES) * BLOCK_KV // 16
        return products // per_step * self.rows * BLOCK_KV

    def describe(self) -> str:
        """All plans as Markdown, as `python -m fa4_hd256 plan` prints them."""
        head = (
            f"decode: {self.rows} query rows x {BLOCK_KV} keys per CTA and step, "
            f"head_dim {HEAD_DIM}; {self.ex2_pattern}; "
            f"rescale threshold 2^{self.rescale_threshold:g}"
        )
        return describe_plans(head, self)


#: Of 16, 32 and 64 rows: as many stages as fit.
DECODE = (
    DecodeConfig(16),
    DecodeConfig(32, half_stages=5),
    DecodeConfig(64, half_stages=5, q_stages=1),
)
