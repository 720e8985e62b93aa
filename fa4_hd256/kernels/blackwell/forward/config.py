"""The forward kernel's configuration: chosen once, checked here, and everything else derived."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ....softmax_emu.pattern import FRAGMENT_COLUMNS, Ex2Pattern
from ...forward.tiles import ForwardTiles, check_threshold
from ...limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM
from ...plan.budgets import (
    WARPS_PER_WARPGROUP,
    SmemPlan,
    SmemRegion,
    TmemPlan,
    TmemRegion,
    WarpPlan,
    check_budgets,
    check_fields,
)
from ...plan.edges import Edge, EdgeTable, Signal
from ..pair_plan import (
    BLOCK_KV,
    BLOCK_Q,
    CTAS,
    TILE_Q,
    check_ring,
    common_regions,
)

# Bytes of a row of an operand that one slice of an MMA multiplies (`instructions.mma_chain`).
SLICE_BYTES = 32

#: The halves of P, each handed over by itself: of the keys of each warpgroup of the softmax.
P_HALVES = ("p_first", "p_last")

#: Costs by the timing model (lab/notes.md): a step, and what the combining kernel costs, two or
#: three steps, four where a launch takes as long as it may.
TILES = ForwardTiles(
    BLOCK_Q,
    TILE_Q,
    BLOCK_KV,
    CTAS,
    step_seconds=1.152e-6,
    least_saved=2,
    most_parts=64,
    takes_lists=True,
    launch_steps=4,
)


@dataclass(frozen=True)
class ForwardWarpPlan(WarpPlan):
    """Warp indices and register budgets of one CTA. The first warpgroup is the softmax, or the
    first two (`two_groups`), the next one the correction, the last one holds one warp each of the
    other roles."""

    softmax: tuple[int, ...] = (0, 1, 2, 3)
    correction: tuple[int, ...] = (4, 5, 6, 7)
    mma: int = 8
    load: int = 9
    epilogue: int = 10
    scheduler: int = 11
    registers_softmax: int = 224
    registers_correction: int = 176
    registers_other: int = 104

    @property
    def warpgroups(self) -> tuple[tuple[str, str], ...]:
        return (
            *[("softmax", "registers_softmax")] * (len(self.softmax) // WARPS_PER_WARPGROUP),
            ("correction", "registers_correction"),
            ("the other roles", "registers_other"),
        )

    @property
    def scheduled_warps(self) -> int:
        """Warps of both CTAs that run the tile loop: all but the peer's MMA warp."""
        return CTAS * self.num_warps - 1


@dataclass(frozen=True)
class ForwardConfig:
    """Everything static about the forward kernel that a user or a tuner may set.

    q_stages: Q buffers; with two, the next tile's Q is loaded while this tile is worked on, and
        this tile's O leaves through its own Q buffer.
    kv_stages: buffers of the ring that K and V tiles share.
    ex2_pattern: which score elements take the polynomial exp2.
    rescale_threshold: in log2 units; O is rescaled only when the row maximum grew by more.
    polls: whether waits of each step have no time hint (`EdgeTable.polling`); those of a tile, for
        Q and for slices of O, keep theirs.
    """

    q_stages: int = 2
    kv_stages: int = 3
    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    rescale_threshold: float = 8.0
    polls: bool = False
    warps: ForwardWarpPlan = field(default_factory=ForwardWarpPlan)

    is_e4m3 = False  # Q, K, V and P are of 16 bits, or e4m3 (`E4m3ForwardConfig`)
    softmax_groups = 1  # warpgroups of the softmax, which share the keys of a step
    largest_threshold = 15, "float16"  # of `rescale_threshold`, and the dtype that sets it
    # The shape the kernel is built for; derived sizes below follow from it.
    block_q = BLOCK_Q
    block_kv = BLOCK_KV
    s_stages = 2  # S buffers: QK of the following step is issued before PV of this one
    scale_stages = 2
    o_slice = 64  # columns of O that one TMA store moves: 128 bytes, the swizzle's width
    o_columns = 64  # columns of O that a correction thread rounds at a time

    def __post_init__(self) -> None:
        check_fields(self)
        if self.q_stages != 2:
            raise ValueError(
                f"q_stages is {self.q_stages}; the kernel needs 2: O is staged in its tile's own "
                "Q buffer while the next tile's Q arrives in the other"
            )
        check_ring("kv_stages", self.kv_stages)
        check_threshold(self.rescale_threshold, *self.largest_threshold)
        if len(self.warps.softmax) != self.softmax_groups * WARPS_PER_WARPGROUP:
            raise ValueError(
                f"warps.softmax has {len(self.warps.softmax)} warps; accepted are 4 in 16 bits, "
                "and 8 in e4m3, where two warpgroups share the keys of a step (`TWO_GROUPS`)"
            )
        check_budgets(self)

    @property
    def tiles(self) -> ForwardTiles:
        return TILES

    @property
    def element_bytes(self) -> int:
        return 1 if self.is_e4m3 else ELEMENT_BYTES

    @property
    def columns(self) -> int:
        return HEAD_DIM * self.element_bytes // ELEMENT_BYTES

    @property
    def mma_k(self) -> int:
        """Elements of an operand's row that one slice of an MMA multiplies."""
        return SLICE_BYTES // self.element_bytes

    @property
    def softmax_columns(self) -> int:
        return self.block_kv // self.softmax_groups

    @property
    def fragment_columns(self) -> int:
        """Columns that a softmax thread works on at a time: a quarter of its keys of a step."""
        return FRAGMENT_COLUMNS // self.softmax_groups

    @property
    def p_keys(self) -> dict[str, tuple[range, ...]]:
        """The keys of each half of P, a range for each warpgroup of the softmax."""
        columns, half = self.softmax_columns, self.softmax_columns // len(P_HALVES)
        starts = range(0, self.block_kv, columns)
        return {
            name: tuple(range(start + i * half, start + (i + 1) * half) for start in starts)
            for i, name in enumerate(P_HALVES)
        }

    @property
    def p_slices(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(key // self.mma_k for keys in ranges for key in keys[:: self.mma_k])
            for name, ranges in self.p_keys.items()
        }

    @property
    def tile_q(self) -> int:
        """Query rows of a CTA pair."""
        return CTAS * self.block_q

    def score_elements(self, mmas: int) -> int:
        """Elements of S that so many MMA instructions of QK and PV, a slice each, stand for."""
        per_step = HEAD_DIM // self.mma_k + self.block_kv // self.mma_k
        return mmas // per_step * self.tile_q * self.block_kv

    @property
    def q_bytes(self) -> int:
        """One CTA's Q of one tile."""
        return self.block_q * HEAD_DIM * self.element_bytes

    @property
    def o_bytes(self) -> int:
        """One CTA's O of one tile, of 16 bits, and its Q buffer."""
        return self.block_q * HEAD_DIM * ELEMENT_BYTES

    @property
    def kv_bytes(self) -> int:
        """One CTA's half of a K tile (64 keys) or of a V tile (128 of the head's columns)."""
        return self.block_kv // CTAS * HEAD_DIM * self.element_bytes

    @property
    def o_slices(self) -> int:
        return HEAD_DIM // self.o_slice

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(
            (
                SmemRegion.operand(
                    "q",
                    self.q_stages,
                    self.o_bytes,
                    "128 rows x 256; after the tile's last PV, staging of its O",
                ),
                SmemRegion.operand(
                    "kv",
                    self.kv_stages,
                    self.kv_bytes,
                    "K: 64 keys x 256, or V: 128 keys x 128 columns",
                ),
                SmemRegion(
                    "scale",
                    self.scale_stages,
                    self.block_q * 4,
                    16,
                    "factor, or at the end 1/sum, of each row",
                ),
                *common_regions(self.edges),
            )
        )

    @property
    def tmem(self) -> TmemPlan:
        columns, per_column = self.block_kv, FLOAT_BYTES // self.element_bytes
        regions = [TmemRegion("o", 0, HEAD_DIM, None, "O accumulator, 128 x 256 float32")]
        for stage in range(self.s_stages):
            start = HEAD_DIM + stage * columns
            regions.append(TmemRegion(f"s{stage}", start, columns, None, "S, 128 x 128 float32"))
            regions.append(
                TmemRegion(
                    f"p{stage}",
                    start,
                    columns // per_column,
                    f"s{stage}",
                    f"P, {'four e4m3' if self.is_e4m3 else 'two 16-bit'} values a column, once S "
                    "is in registers",
                )
            )
        return TmemPlan(tuple(regions))

    @property
    def edges(self) -> EdgeTable:
        softmax, correction = len(self.warps.softmax), len(self.warps.correction)
        pair, commit = Signal.WARPS_PAIR, Signal.COMMIT_PAIR
        cta = Signal.WARPS_CTA
        edges = EdgeTable(
            (
                Edge("q_loaded", self.q_stages, Signal.TMA_PAIR, "load", 1, "mma",
                     "Q in SMEM", transaction_bytes=CTAS * self.q_bytes),
                Edge("q_free", self.q_stages, cta, "epilogue", 1, "load",
                     "Q buffer: QK done and O read by its TMA store", True),
                Edge("kv_loaded", self.kv_stages, Signal.TMA_PAIR, "load", 1, "mma",
                     "K or V tile in SMEM", transaction_bytes=CTAS * self.kv_bytes),
                Edge("kv_free", self.kv_stages, commit, "mma", 1, "load",
                     "K or V buffer: its MMAs are done", True),
                Edge("s_done", self.s_stages, commit, "mma", 1, "softmax", "S in TMEM"),
                *(
                    Edge(f"{half}_done", self.s_stages, pair, "softmax", softmax, "mma",
                         f"P of keys {' and '.join(f'{k[0]} to {k[-1]}' for k in keys)} in TMEM, "
                         "over its S")
                    for half, keys in self.p_keys.items()
                ),
                Edge("o_done", 1, commit, "mma", 1, "correction", "O += P V done"),
                Edge("o_free", 1, pair, "correction", correction, "mma",
                     "O rescaled, or drained at the tile's end", True),
                Edge("scale_done", self.scale_stages, cta, "softmax", softmax, "correction",
                     "factors or 1/sums in SMEM"),
                Edge("scale_free", self.scale_stages, cta, "correction", correction, "softmax",
                     "factors read", True),
                Edge("o_staged", self.q_stages * self.o_slices, cta, "correction", correction,
                     "epilogue", "a slice of O in SMEM"),
            )
        )  # fmt: skip
        return edges.polling(self.polls, "q_loaded", "q_free", "o_staged")

    @property
    def title(self) -> str:
        return (
            f"forward{' in e4m3' if self.is_e4m3 else ''}: {self.tile_q} query rows x "
            f"{self.block_kv} keys per CTA pair and step, "
            f"head_dim {HEAD_DIM}; {self.ex2_pattern}; "
            f"rescale threshold 2^{self.rescale_threshold:g}"
        )


# ---------------------------------------------------------------- e4m3

#: P in e4m3 is 2^P_LOG2 times as large: NOTE [range of P] in `e4m3`.
P_LOG2 = 4.0

E4M3_TILES = replace(
    TILES,
    step_seconds=0.9e-6,
    kind="forward_e4m3",
    kv_dtype=torch.float8_e4m3fn,
    q_dtype=torch.float8_e4m3fn,
)

#: Two warpgroups of the softmax, each thread with half of the scores.
TWO_GROUPS = ForwardWarpPlan(
    softmax=tuple(range(8)),
    correction=(8, 9, 10, 11),
    mma=12,
    load=13,
    epilogue=14,
    scheduler=15,
    registers_softmax=144,
    registers_correction=112,
    registers_other=112,
)


@dataclass(frozen=True)
class E4m3ForwardConfig(ForwardConfig):
    """The configuration for Q, K and V in e4m3, whose softmax has two warpgroups (`two_groups`). K
    and V take half of the bytes, so that as many bytes are on their way as in 16 bits."""

    kv_stages: int = 6
    rescale_threshold: float = 4.0
    warps: ForwardWarpPlan = field(default_factory=lambda: TWO_GROUPS)

    is_e4m3 = True
    softmax_groups = 2
    largest_threshold = 4, "e4m3, times 2^4"
    o_columns = 8  # of 64, ptxas would keep a value of the tile loop on the stack

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ex2_pattern.ex2_emu_freq > self.fragment_columns:
            raise ValueError(
                f"ex2_pattern has ex2_emu_freq {self.ex2_pattern.ex2_emu_freq}; accepted in e4m3 "
                f"are 0 to {self.fragment_columns}, the columns of a fragment"
            )

    @property
    def tiles(self) -> ForwardTiles:
        return E4M3_TILES

    @property
    def smem(self) -> SmemPlan:
        note = "maximum, or at the end sum, of each row's keys of a warpgroup of the softmax"
        size = self.block_q * FLOAT_BYTES
        exchange = SmemRegion("exchange", self.softmax_groups, size, 16, note)
        q, kv, scale, *others = super().smem.regions
        return SmemPlan((q, kv, scale, exchange, *others))


#: The default configuration, but for its exp2 mix.
E4M3_CONFIG = E4m3ForwardConfig()
