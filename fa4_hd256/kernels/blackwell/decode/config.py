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
                                           halves, 8 slices each), 16 exponentials per thread

With N = 16 an MMA takes what reading K and V takes from shared memory, and nothing for rows that
are not there; all 128 threads of the softmax have as many scores.  P^T in tensor memory would have
to be A, so that V^T were B with d as N: P would be M = 64 rows again.  So P goes to shared memory,
4 KiB per step.

The chain is one after the other, softmax (some 450), P V (some 730), for which nothing waits but
the next P: about 1,200 clocks, half of what the loads take at best.  So P and O have one
buffer and the softmax rescales O by itself.

NOTE [two groups].  Of 64 rows a thread that has a key has 64 scores, offsets and sums, which no 255
registers hold.  So two groups of four warps have 32 rows each, and all keys: four warps reach all
lanes of tensor memory.  A group finds its maxima, rescales its columns of O^T and stores its rows
by itself, and meets at a barrier of its own; what a thread does at a tile's start and end is half.
Twelve warps are launched with 168 registers per thread.  What the other roles give back makes 200
of the softmax's, with which it raises the maxima of eight rows at a time.

NOTE [halves].  K and V come in halves of 128 columns: 32 KiB, a stage.  Five or six of them are
160 to 192 KiB under way, where HBM gives its rate from 128 KiB on (sm100_sim/docs/facts.md).

NOTE [e4m3].  K and V in e4m3 are operands of kind::f8f6f4 as they lie in memory, K-major and
MN-major: nothing converts them.  What is multiplied with them must be e4m3, too, of which two parts
have as many bits as a bf16: x = hi + lo / 16, hi and then what is left, times 16, rounded to e4m3.
The parts are rows of one operand, so that N is twice the rows and a tile of K or V is read once: a
step of 128 keys takes half of the MMAs' clocks, and half of the bytes (lab/notes.md has the
errors).  Q is brought to [128, 256) by a power of two a row, which the softmax takes back; P by
`HEADROOM`.  A row takes a warp some 130 clocks, so that a warpgroup of its own does it, where the
rows have been loaded to (`kernels.forward.e4m3` NOTE [Q in place]): a tile's first MMA
waits for all of them.  The softmax adds the parts of S, and those of O at the end.

Converting K and V to bf16 in shared memory instead would read 64 KiB per step and write 128 KiB
there, beside the 64 KiB that TMA writes and the 128 KiB that the MMAs read: 3,072 clocks of its
port, for a step whose bytes HBM brings in 2,150.

NOTE [NVFP4].  A code times its block's scale has six bits of significand at most, and is a multiple
of 2^-10 below 2^12: float16 holds it exactly, e4m3 does not.  A step is 36 KiB, 1,210 clocks of an
SM's part of HBM.  Its float16 in shared memory would take 1,024 clocks of the port to write and
1,024 to read.  So K and V^T are A in tensor memory, where four warps store them from registers, and
the port has the bytes, 288 clocks to write and about 700 to read, and B, of few rows
(`nvfp4_operands`).  Q becomes float16 where it was loaded, brought to [2^14, 2^15) by a power of
two a row; the same four warps do so.

NOTE [gathered scales].  The scales of a row are 16 bytes, and of four rows, as TMA gathers them,
64: fewer than TMA's addresses in shared memory are apart.  So where rows are gathered the lanes of
the load warp copy scales by cp.async, with barriers of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from ....softmax_emu.pattern import Ex2Pattern
from ...forward.tiles import DECODE_ROWS, ForwardTiles, check_decode, check_threshold
from ...limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM
from ...nvfp4_format import NVFP4, NVFP4_BLOCK
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
from ..pair_plan import check_ring, common_regions

# Elements of a sum that one instruction multiplies (`instructions.mma_chain`).
MMA_K = 16

#: Halves of the head's columns: of K and V as they are loaded, of O as it is made.
HALVES = (0, 1)

BLOCK_KV = 128  # keys of a step: M of S, a lane of tensor memory each
HALF = HEAD_DIM // len(HALVES)  # columns of a buffer of K or V: M of a half of O
GROUP_ROWS = 32  # of a group of the softmax, at most

#: Registers a thread of the softmax, of the other roles and of the warps that convert, by groups of
#: the softmax and what the warps are that convert.
REGISTERS = {
    (1, None): (256, 256, 0),
    (2, None): (200, 104, 0),
    (1, "quantise"): (256, 96, 152),
    (2, "quantise"): (200, 56, 56),
    (1, "convert"): (240, 88, 176),
    (2, "convert"): (192, 56, 72),
}

#: Parts of Q and P, whose operand has e4m3.
E4M3_PARTS = 2
#: Log2 of P of a row's maximum that has just moved, in e4m3 and in NVFP4's float16: small P then
#: keep their bits down to 2^-18 of it, and to 2^-20.
HEADROOM, NVFP4_HEADROOM = 4.0, 6.0
#: The largest rescale threshold by whether P is in e4m3: P reaches 2^threshold, finite in float16,
#: and below 448 in e4m3.
LARGEST_THRESHOLD = {False: 15, True: 8}
#: Columns of tensor memory of a tile of K, or of V^T, in float16.
OPERAND_COLUMNS = HEAD_DIM // 2

#: Dtypes of K and V by the end of the kernel's kind, and how its title names them.
KV_DTYPES = {"": None, "_e4m3": torch.float8_e4m3fn, "_nvfp4": NVFP4}
TITLES = {"": "", "_e4m3": "K and V in e4m3; ", "_nvfp4": "K and V in NVFP4; "}

#: Costs by the timing model (lab/notes.md): a step, 2,624 clocks of loads at
#: an SM's part of what L2 delivers; what the combining kernel costs, in steps; what a tile takes
#: beside its steps, by its rows.
STEP_SECONDS = 1.52e-6
LEAST_SAVED = 1.0
PART_STEPS = {16: 1.25, 32: 1.5, 64: 2.25}
#: These three costs in e4m3, rougher: `python -m bench decode kv-types --modelled` has the parts
#: that follow.
E4M3_COSTS = 1e-6, 4.0, 1.0
NVFP4_COSTS = 9e-7, 4.5, 1.5


@dataclass(frozen=True)
class DecodeWarpPlan(WarpPlan):
    """Warp indices and register budgets of a CTA: the softmax, then a warp for each other role.
    queries: that which loads Q by itself. quantise, convert: a warpgroup that brings Q to e4m3, or
    Q, K and V to float16. None where nothing does."""

    softmax: tuple[int, ...]
    mma: int
    load: int
    scheduler: int
    queries: int | None
    quantise: tuple[int, ...] | None
    convert: tuple[int, ...] | None
    registers_softmax: int
    registers_other: int
    registers_quantise: int
    registers_convert: int

    @classmethod
    def of(cls, groups: int, last: str | None) -> DecodeWarpPlan:
        """groups: of the softmax, of a warpgroup each.  last: the role of the last warpgroup,
        "quantise" or "convert"; None without one."""
        first = groups * WARPS_PER_WARPGROUP
        mma, load, scheduler, queries, *others = range(first, first + 2 * WARPS_PER_WARPGROUP)
        softmax, other, converting = REGISTERS[groups, last]
        return cls(
            tuple(range(first)),
            mma,
            load,
            scheduler,
            queries if last else None,
            tuple(others) if last == "quantise" else None,
            tuple(others) if last == "convert" else None,
            softmax,
            other,
            converting if last == "quantise" else 0,
            converting if last == "convert" else 0,
        )

    @property
    def groups(self) -> int:
        return len(self.softmax) // WARPS_PER_WARPGROUP

    @property
    def warpgroups(self) -> tuple[tuple[str, str], ...]:
        softmax = (("softmax", "registers_softmax"),) * self.groups
        name = "quantise" if self.quantise else "convert"
        last = ((name, f"registers_{name}"),) if self.converting else ()
        return (*softmax, ("the other roles", "registers_other"), *last)

    @property
    def converting(self) -> tuple[int, ...]:
        return self.quantise or self.convert or ()

    @property
    def scheduled_warps(self) -> int:
        others = 4 + len(self.converting) if self.converting else 3
        return len(self.softmax) + others


@dataclass(frozen=True)
class DecodeConfig:
    """Everything static about the decode kernel that a user or a tuner may set.

    rows: query rows of a tile, one of `DECODE_ROWS`: those of the heads that share keys, of a few
        queries.
    e4m3, nvfp4: K and V are; NOTE [e4m3], NOTE [NVFP4].
    half_stages: buffers of the ring that halves of K and V tiles share, in e4m3 whole tiles, of as
        many bytes, in NVFP4 whole tiles of half as many, with their scales.
    q_stages: Q buffers; with two, the next tile's Q is loaded while this tile is worked on.
    ex2_pattern: which score elements take the polynomial exp2; its columns are the rows, so that
        a pattern which leaves the last fragment to the hardware leaves all of 16 or 32 rows.
    rescale_threshold: in log2 units; O is rescaled only when a row's maximum grew by more.
    gathers: rows of K and V in NVFP4 are gathered: NOTE [gathered scales].
    """

    rows: int = 16
    half_stages: int = 6
    q_stages: int = 2
    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    rescale_threshold: float = 8.0
    e4m3: bool = False
    nvfp4: bool = False
    gathers: bool = False

    block_kv = BLOCK_KV
    s_stages = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.e4m3 and self.nvfp4:
            raise ValueError("e4m3 and nvfp4 are both set; accepted: one of them, or none")
        if self.gathers and not self.nvfp4:
            raise ValueError("gathers without nvfp4; accepted: with nvfp4 alone")
        check_decode(self.rows, self.q_stages)
        check_ring("half_stages", self.half_stages)
        largest = LARGEST_THRESHOLD[self.e4m3]
        check_threshold(self.rescale_threshold, largest, "e4m3" if self.e4m3 else "float16")
        check_budgets(self)

    def gathering(self) -> DecodeConfig:
        return replace(self, gathers=True) if self.nvfp4 else self

    @property
    def tiles(self) -> ForwardTiles:
        seconds, saved, beside = STEP_SECONDS, LEAST_SAVED, PART_STEPS[self.rows]
        if self.e4m3:
            seconds, saved, beside = E4M3_COSTS
        if self.nvfp4:
            seconds, saved, beside = NVFP4_COSTS
        return ForwardTiles(
            self.rows,
            self.rows,
            BLOCK_KV,
            1,
            seconds,
            saved,
            self.rows,
            beside,
            step_bytes=2 * (self.tile_bytes + self.scale_bytes),
            most_parts=64,
            pads=True,
            kind=f"forward_decode{self._suffix}",
            kv_dtype=KV_DTYPES[self._suffix],
        )

    @property
    def _suffix(self) -> str:
        return "_e4m3" if self.e4m3 else "_nvfp4" if self.nvfp4 else ""

    @property
    def is_scaled(self) -> bool:
        """Return True if rows of Q have scales: K and V are not of the call's type."""
        return self.e4m3 or self.nvfp4

    @property
    def softmax_rows(self) -> int:
        """Rows of a thread of the softmax, those of its group."""
        return min(self.rows, GROUP_ROWS)

    @property
    def softmax_groups(self) -> int:
        """Groups of four warps, each with all keys of a step: NOTE [two groups]."""
        return self.rows // self.softmax_rows

    @property
    def rows_at_once(self) -> int:
        """Rows of a thread whose maxima are raised at a time: all, or as registers allow."""
        return self.softmax_rows if self.softmax_groups == 1 else 8

    @property
    def warps(self) -> DecodeWarpPlan:
        return DecodeWarpPlan.of(self.softmax_groups, self._last_role)

    @property
    def _last_role(self) -> str | None:
        return "quantise" if self.e4m3 else "convert" if self.nvfp4 else None

    @property
    def kv_bytes(self) -> Any:
        """Bytes of an element of K or V."""
        return Fraction(1, 2) if self.nvfp4 else 1 if self.e4m3 else ELEMENT_BYTES

    @property
    def tile_bytes(self) -> int:
        return int(BLOCK_KV * HEAD_DIM * self.kv_bytes)

    @property
    def scale_bytes(self) -> int:
        return BLOCK_KV * HEAD_DIM // NVFP4_BLOCK if self.nvfp4 else 0

    @property
    def operand_stages(self) -> int:
        """Buffers of K and V^T in tensor memory: as many as fit beside S and O."""
        return 2 if self.rows == DECODE_ROWS[-1] else 3

    @property
    def columns(self) -> int:
        """N of both MMAs: the rows, or the rows of all parts of Q and P."""
        return self.rows * E4M3_PARTS if self.e4m3 else self.rows

    @property
    def headroom(self) -> float:
        """Log2 of P of a maximum that has just moved."""
        headroom = HEADROOM if self.e4m3 else NVFP4_HEADROOM if self.nvfp4 else 0.0
        return min(headroom, self.rescale_threshold)

    @property
    def q_bytes(self) -> int:
        """Q of a tile; of two parts in e4m3, or in float16, as many."""
        return self.rows * HEAD_DIM * ELEMENT_BYTES

    @property
    def half_bytes(self) -> int:
        """A buffer of K or V: a half of a tile, or a tile in e4m3 or NVFP4."""
        return self.tile_bytes if self.is_scaled else self.tile_bytes // len(HALVES)

    @property
    def smem(self) -> SmemPlan:
        softmax = len(self.warps.softmax) // self.softmax_groups
        half, rows = HEAD_DIM if self.is_scaled else HALF, f"{self.columns} rows"
        if self.e4m3:
            rows += " of both parts"
        factors = (
            SmemRegion("factors", self.q_stages, self.rows * FLOAT_BYTES, 16, "of each row of Q"),
        )
        text = "scales of 128 keys of K or V"
        scales = (SmemRegion.operand("kv_scales", self.half_stages, self.scale_bytes, text),)
        return SmemPlan(
            (
                SmemRegion.operand(
                    "kv", self.half_stages, self.half_bytes, f"128 keys x {half} columns of K or V"
                ),
                *(scales if self.nvfp4 else ()),
                SmemRegion.operand("q", self.q_stages, self.q_bytes, f"{rows} x 256"),
                SmemRegion(
                    "p", 1, self.rows * BLOCK_KV * ELEMENT_BYTES, 128, f"P^T, 128 keys x {rows}"
                ),
                *(factors if self.is_scaled else ()),
                SmemRegion("maxima", softmax, self.rows * FLOAT_BYTES, 16, "of each row, by warp"),
                SmemRegion("sums", softmax, self.rows * FLOAT_BYTES, 16, "of each row, by warp"),
                SmemRegion("inverses", 1, self.rows * FLOAT_BYTES, 16, "1/sum of each row"),
                *common_regions(self.edges),
            )
        )

    @property
    def tmem(self) -> TmemPlan:
        rows = self.columns
        regions = [
            TmemRegion(
                f"o{half}",
                half * rows,
                rows,
                None,
                f"O^T accumulator, columns {half * HALF} to {half * HALF + HALF - 1}",
            )
            for half in HALVES
        ]
        end = len(HALVES) * rows
        regions += [
            TmemRegion(f"s{stage}", end + stage * rows, rows, None, f"S^T, 128 keys x {rows} rows")
            for stage in range(self.s_stages)
        ]
        end += self.s_stages * rows
        regions += [
            TmemRegion(
                f"operand{stage}",
                end + stage * OPERAND_COLUMNS,
                OPERAND_COLUMNS,
                None,
                "K, or V^T, in float16, two values a column",
            )
            for stage in range(self.operand_stages if self.nvfp4 else 0)
        ]
        return TmemPlan(tuple(regions))

    @property
    def edges(self) -> EdgeTable:
        commit, loaded = Signal.COMMIT_CTA, Signal.TMA_CTA
        edge, loader, reader = "q_loaded", "load", "mma"
        if self._last_role:
            edge, loader, reader = "rows_loaded", "queries", self._last_role
        return EdgeTable(
            (
                Edge(edge, self.q_stages, loaded, loader, 1, reader, "Q in SMEM",
                     transaction_bytes=self.q_bytes),
                *(self._scaled if self.is_scaled else ()),
                Edge("q_free", self.q_stages, commit, "mma", 1, loader,
                     "Q buffer: the tile's last QK is done", True),
                *(self._converted if self.nvfp4 else self._loaded),
                Edge("s_done", self.s_stages, commit, "mma", 1, "softmax", "S in TMEM"),
                Edge("p_done", 1, Signal.WARPS_CTA, "softmax", len(self.warps.softmax), "mma",
                     "P in SMEM, O rescaled or drained"),
                Edge("o_done", 1, commit, "mma", 1, "softmax", "O += P V done"),
            )
        )  # fmt: skip

    @property
    def _loaded(self) -> tuple[Edge, ...]:
        return (
            Edge("kv_loaded", self.half_stages, Signal.TMA_CTA, "load", 1, "mma",
                 f"{'' if self.e4m3 else 'half of '}a K or V tile in SMEM",
                 transaction_bytes=self.half_bytes),
            Edge("kv_free", self.half_stages, Signal.COMMIT_CTA, "mma", 1, "load",
                 "its buffer: the MMAs are done", True),
        )  # fmt: skip

    @property
    def _converted(self) -> tuple[Edge, ...]:
        converting = len(self.warps.converting)
        loaded_bytes = self.half_bytes + (0 if self.gathers else self.scale_bytes)
        scales = (
            Edge(
                "scales_loaded",
                self.half_stages,
                Signal.COPIES_CTA,
                "load",
                1,
                "convert",
                "the scales of a K or V tile in SMEM",
            ),
            Edge(
                "scales_free",
                self.half_stages,
                Signal.WARPS_CTA,
                "convert",
                converting,
                "load",
                "their buffer has been read",
                True,
            ),
        )
        return (
            Edge("kv_loaded", self.half_stages, Signal.TMA_CTA, "load", 1, "convert",
                 "a K or V tile in SMEM", transaction_bytes=loaded_bytes),
            Edge("kv_free", self.half_stages, Signal.WARPS_CTA, "convert", converting, "load",
                 "its buffer has been read", True),
            *(scales if self.gathers else ()),
            Edge("operand_loaded", self.operand_stages, Signal.WARPS_CTA, "convert", converting,
                 "mma", "K or V^T in TMEM"),
            Edge("operand_free", self.operand_stages, Signal.COMMIT_CTA, "mma", 1, "convert",
                 "its buffer: the MMAs are done", True),
        )  # fmt: skip

    @property
    def _scaled(self) -> tuple[Edge, ...]:
        """Edges of Q, which warps convert, and of the scales that bring its rows back."""
        softmax, warps = len(self.warps.softmax), Signal.WARPS_CTA
        role, converting = self._last_role or "", len(self.warps.converting)
        return (
            Edge("q_loaded", self.q_stages, warps, role, converting, "mma",
                 "both parts of Q in SMEM" if self.e4m3 else "Q in SMEM, in float16"),
            Edge("factors_ready", self.q_stages, warps, role, converting, "softmax",
                 "a factor for each row of Q"),
            Edge("factors_free", self.q_stages, warps, "softmax", softmax, role,
                 "they have been read", True),
        )  # fmt: skip

    def score_elements(self, mmas: int) -> int:
        """Return the elements of S of so many MMA instructions of QK and PV, K = 32 bytes each."""
        k = 32 if self.e4m3 else MMA_K
        per_step = HEAD_DIM // k + len(HALVES) * BLOCK_KV // k
        return mmas // per_step * self.rows * BLOCK_KV

    @property
    def title(self) -> str:
        return (
            f"decode: {self.rows} query rows x {BLOCK_KV} keys per CTA and step, "
            f"head_dim {HEAD_DIM}; {TITLES[self._suffix]}{self.ex2_pattern}; "
            f"rescale threshold 2^{self.rescale_threshold:g}"
        )


#: Configurations of 16, 32 and 64 rows: as many stages as fit.
DECODE = (
    DecodeConfig(16),
    DecodeConfig(32, half_stages=5),
    DecodeConfig(64, half_stages=5, q_stages=1),
)
#: Configurations for K and V in e4m3.
DECODE_E4M3 = tuple(replace(config, e4m3=True) for config in DECODE)
#: Configurations for K and V in NVFP4.
DECODE_NVFP4 = tuple(
    replace(config, nvfp4=True, half_stages=stages, rescale_threshold=12.0)
    for config, stages in zip(DECODE, (10, 10, 9), strict=True)
)
