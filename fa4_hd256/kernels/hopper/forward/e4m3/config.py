"""Configuration of the Hopper forward for Q, K and V in e4m3: stages, warps, and the plans.

NOTE [a step in clocks].  What a step of 128 rows x 128 keys takes of an SM's units:

    tensor core     QK 1,024, PV 1,024                                              2,048
    SMEM port       operands of QK 768 (Q, 2 KiB, and K, 4 KiB, of each slice),     1,792
                    of PV 512 (V^T; P is in registers), TMA writes 512
                    and where warps transpose: V read 256, V^T written 256          2,304
    MUFU            16,384 exponentials                                             1,024
    L2              K and V, 64 KiB at 50 bytes a clock                             1,311

Three warpgroups, which would share what is loaded, have no room: O alone takes 128 registers of a
thread, S 64 and P 16.

NOTE [who transposes].  wgmma reads V^T with the keys of a column in a row.  Two warps of the
forward can bring each tile there, as often as there are query tiles: their reads and writes wait
for the port behind the MMAs' operands, and with 24 registers a warp has two of them under way.  On
an H200 that takes 23 % of the time (lab/notes.md).  So where keys are dense and many query rows
share them, a launch before the forward transposes V once, and the forward loads V^T.  That takes
memory of V's size, and some 60 us for 64 MiB.  V of packed sequences, of pages and for few rows is
transposed by warps.

NOTE [range of P].  P = 2^(c s - c m + 6) is rounded to e4m3, whose largest is 448.  The running
maximum m lags by 2 in the exponent at most: a score that exceeds it by more becomes the maximum
before P is made.  So P <= 2^8 = 256 whatever the scores are, and the roundings of the exponent,
which are below 2^-1, leave it below 448.  A P of 2^-12 of a row's maximum or more keeps all bits of
e4m3, which is normal down to 2^-6; where the maximum lags, one of 2^-14.  The row's sum has P
unrounded, with the same factor of 2^6, which cancels in O / sum and in LSE (`online`, `p_log2`).

NOTE [sums of 13 bits].  wgmma of e4m3 keeps 13 bits behind the leading one of a sum and cuts off
the rest, so that O loses a little in every MMA.  Promoting O to a second accumulator, as GEMMs do,
takes 128 registers, which a thread lacks.  Nor is it needed: on an H200 the projection of O on its
float64 reference is 0.998 to 0.9993 at 1,024 to 32,768 keys of a normal distribution, an eighth of
the RMS error of 0.026 that the rounding of P brings.  KV splits shorten the sums of a part, which
are then added in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .....schedulers.protocol import COUNTER_SMEM_BYTES
from .....softmax_emu.pattern import Ex2Pattern
from ....forward.tiles import ForwardTiles
from ....limits import HEAD_DIM
from ....plan.budgets import (
    WARPS_PER_WARPGROUP,
    SmemPlan,
    SmemRegion,
    WarpPlan,
    check_budgets,
    check_fields,
    common_regions,
)
from ....plan.edges import Edge, EdgeTable, Signal
from ..config import WARPGROUP_ROWS, check_stages, query_edges, query_region

BLOCK_KV = 128  # keys of a step: a row of V^T is 128 bytes
WARPGROUPS = 2  # that work on rows
TRANSPOSERS = 2  # warps, of 64 keys each
#: Log2 of P of a row's running maximum, and of the largest P.
P_LOG2, LARGEST_P_LOG2 = 6.0, 8.0

#: Seconds of a step: `NOTE [a step in clocks]`, at 1.6 GHz.  What splitting the keys must save, and
#: what a KV split takes beside its steps, in steps.
STEP_SECONDS = 2304 / 1.6e9
LEAST_SAVED, PART_STEPS = 4.0, 1.0
#: Query rows that share a KV head up to which warps of the kernel transpose V: a launch before it,
#: which moves V twice through HBM, takes longer (measured at 1,024 and 4,096, lab/notes.md).
MOST_ROWS = 1536


@dataclass(frozen=True)
class E4m3ForwardWarpPlan(WarpPlan):
    """Warps and registers of one CTA: two warpgroups of 64 query rows, a third for the rest."""

    consumers: tuple[int, ...] = tuple(range(WARPGROUPS * WARPS_PER_WARPGROUP))
    load: int = 8
    scheduler: int = 9
    transposers: tuple[int, ...] | None = (10, 11)
    registers_consumers: int = 240
    registers_other: int = 24

    warpgroups = (
        ("the first 64 rows", "registers_consumers"),
        ("the other 64 rows", "registers_consumers"),
        ("the other roles", "registers_other"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        first = WARPGROUPS * WARPS_PER_WARPGROUP
        others = tuple(range(first, first + WARPS_PER_WARPGROUP))
        if self.consumers != tuple(range(first)):
            raise ValueError(
                f"consumers is {self.consumers}; accepted is {tuple(range(first))}: two warpgroups"
            )
        transposers = others[-TRANSPOSERS:] if self.transposers is None else self.transposers
        given = self.load, self.scheduler, *transposers
        if len(transposers) != TRANSPOSERS or sorted(given) != list(others):
            raise ValueError(
                f"load {self.load}, scheduler {self.scheduler} and transposers {self.transposers}; "
                f"accepted: a warp of {others} each, and {TRANSPOSERS} that transpose"
            )
        if transposers[1] != transposers[0] + 1:
            raise ValueError(
                f"transposers is {self.transposers}; accepted: two warps, one after the other"
            )

    @property
    def scheduled_warps(self) -> int:
        """Warps of a CTA that run the tile loop under a dynamic scheduler."""
        return len(self.consumers) + 2 + len(self.transposers or ())


@dataclass(frozen=True)
class E4m3ForwardConfig:
    """Everything static about the kernel that a user or a tuner may set.

    k_stages: buffers of K.  v_stages: of V as it is loaded, and as many of V^T.
    ex2_pattern: which score elements take the polynomial exp2.  A thread's own columns of a row, a
        quarter of the keys, are its only fragment, so that a pattern which leaves the last one to
        the hardware leaves all.
    rescale_threshold: in log2 units; O is rescaled only when the row maximum grew by more: NOTE
        [range of P].
    skips: whether a warpgroup leaves out steps that its own rows do not see.
    """

    k_stages: int = 2
    v_stages: int = 2
    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    rescale_threshold: float = LARGEST_P_LOG2 - P_LOG2
    warps: E4m3ForwardWarpPlan = field(default_factory=E4m3ForwardWarpPlan)
    skips: bool = True

    block_kv = BLOCK_KV
    warpgroups = WARPGROUPS
    ctas = 1  # of a cluster

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self)
        if not 0 <= self.rescale_threshold <= LARGEST_P_LOG2 - P_LOG2:
            raise ValueError(
                f"rescale_threshold is {self.rescale_threshold}; accepted are 0 to "
                f"{LARGEST_P_LOG2 - P_LOG2} (P reaches 2^({P_LOG2:g} + threshold) and must stay "
                "below 448, the largest e4m3)"
            )
        check_budgets(self)

    @property
    def transposes(self) -> bool:
        return self.warps.transposers is not None

    def gathering(self) -> E4m3ForwardConfig:
        raise NotImplementedError(
            "q, k and v in torch.float8_e4m3fn with a page_size that is no multiple of 16: not "
            "offered on sm_90a; accepted there: pages of a multiple of 16 rows, or q in "
            "torch.bfloat16 or torch.float16"
        )

    @property
    def tiles(self) -> ForwardTiles:
        return ForwardTiles(
            WARPGROUP_ROWS,
            self.block_q,
            BLOCK_KV,
            1,
            STEP_SECONDS,
            LEAST_SAVED,
            most_rows=MOST_ROWS if self.transposes else None,
            part_steps=PART_STEPS,
            takes_columns=not self.transposes,
            kind="forward_e4m3",
            kv_dtype=torch.float8_e4m3fn,
            q_dtype=torch.float8_e4m3fn,
        )

    @property
    def block_q(self) -> int:
        return WARPGROUPS * WARPGROUP_ROWS

    @property
    def tile_q(self) -> int:
        return self.ctas * self.block_q

    def score_elements(self, mmas: int) -> int:
        per_step = WARPS_PER_WARPGROUP * (HEAD_DIM // 32 + BLOCK_KV // 32)
        return mmas // per_step * WARPGROUP_ROWS * BLOCK_KV

    @property
    def q_bytes(self) -> int:
        """Q of one warpgroup."""
        return WARPGROUP_ROWS * HEAD_DIM

    @property
    def kv_bytes(self) -> int:
        return BLOCK_KV * HEAD_DIM

    @property
    def smem(self) -> SmemPlan:
        tile = f"{BLOCK_KV} keys x 256"
        loaded: tuple[SmemRegion, ...] = ()
        if self.transposes:
            region = SmemRegion.operand("v", self.v_stages, self.kv_bytes, f"{tile}, as loaded")
            loaded = (region,)
        return SmemPlan(
            (
                query_region(self),
                SmemRegion.operand("k", self.k_stages, self.kv_bytes, tile),
                *loaded,
                SmemRegion.operand(
                    "columns", self.v_stages, self.kv_bytes, f"V^T, 256 x {BLOCK_KV} keys"
                ),
                *common_regions(self.edges, COUNTER_SMEM_BYTES),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        consumers = len(self.warps.consumers)
        tma, warps = Signal.TMA_CTA, Signal.WARPS_CTA
        transposed: tuple[Edge, ...] = ()
        role = "load"
        columns = Edge("columns_written", self.v_stages, tma, "load", 1, "consumers",
                       "V tile in SMEM, by columns", transaction_bytes=self.kv_bytes)  # fmt: skip
        if self.warps.transposers is not None:
            role, count = "transposers", len(self.warps.transposers)
            columns = replace(
                columns, signal=warps, producer=role, producer_warps=count, transaction_bytes=0
            )
            transposed = (
                Edge("v_loaded", self.v_stages, tma, "load", 1, role,
                     "V tile in SMEM, by keys", transaction_bytes=self.kv_bytes),
                Edge("v_free", self.v_stages, warps, role, count, "load",
                     "V buffer: it is transposed", True),
            )  # fmt: skip
        return EdgeTable(
            (
                *query_edges(self),
                Edge("k_loaded", self.k_stages, tma, "load", 1, "consumers",
                     "K tile in SMEM", transaction_bytes=self.kv_bytes),
                Edge("k_free", self.k_stages, warps, "consumers", consumers, "load",
                     "K buffer: QK is done", True),
                *transposed,
                columns,
                Edge("columns_free", self.v_stages, warps, "consumers", consumers, role,
                     "V^T buffer: PV is done", True),
            )
        )  # fmt: skip

    @property
    def title(self) -> str:
        return (
            f"forward in e4m3: {self.block_q} query rows x {BLOCK_KV} keys per CTA and step, "
            f"head_dim {HEAD_DIM}; {self.ex2_pattern}; "
            f"rescale threshold 2^{self.rescale_threshold:g}"
        )
