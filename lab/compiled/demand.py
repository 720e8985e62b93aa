"""Demand of the kernels on each part of an SM, in closed form, from their configurations.

A kernel's work is tiles of a CTA pair, each of steps of 256 queries x 128 keys; a `Demand` is what
one CTA of the pair uses in one step, or in the rest of a tile. `Machine` constants turn it into
clocks; lab/docs/roofline.md has the formulas. Only what a step must do is counted: no waiting, no
rescaling of O, no second reading from HBM of what L2 has lost.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256.call.chunks import visible_keys
from fa4_hd256.call.forward_problem import packed_heads
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.backward.ds_tiles import DS_BLOCK, DS_TILE
from fa4_hd256.kernels.blackwell.backward.config import TILE_BYTES, BackwardConfig
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.blackwell.pair_plan import BLOCK_KV, BLOCK_Q, CTAS
from fa4_hd256.kernels.limits import ELEMENT_BYTES, HEAD_DIM
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.model.calls import backward_chunks
from lab.model.machines import B200
from sm100_sim.timing import Machine, Values, l2_share, mma_cost

#: K of one tcgen05.mma of 16-bit operands.
MMA_K = 16
#: Bytes that a warp's load of one 32-bit column of tensor memory moves.
TMEM_COLUMN_BYTES = 32 * 4
FLOAT_BYTES = 4
#: dS of 256 queries x 128 keys.
UNIT_DS_BYTES = CTAS * BLOCK_Q * BLOCK_KV * ELEMENT_BYTES
SLOTS = 4
LANES = 32


@dataclass(frozen=True)
class Demand:
    """Demand of one CTA.

    flop: of the tensor core. mma: its clocks. operand_bytes: read by it from shared memory;
    tma_bytes, warp_bytes: moved between shared memory and TMA, or the warps. exp2: results of the
    special-function units. fma: operations of the FMA pipes, one of a packed pair counted as one.
    tmem_bytes: of tcgen05.ld and st. l2_bytes: between the SM and L2.
    """

    flop: float = 0.0
    mma: float = 0.0
    operand_bytes: float = 0.0
    tma_bytes: float = 0.0
    warp_bytes: float = 0.0
    exp2: float = 0.0
    fma: float = 0.0
    tmem_bytes: float = 0.0
    l2_bytes: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        return Demand(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, count: float) -> Demand:
        return Demand(*(getattr(self, f.name) * count for f in fields(self)))

    @property
    def smem_bytes(self) -> float:
        """Everything that passes the port of shared memory."""
        return self.operand_bytes + self.tma_bytes + self.warp_bytes


def product(m: int, n: int, k: int, a_in_tmem: bool = False) -> Demand:
    """D[m, n] += A[m, k] B[k, n] by a CTA pair, B in shared memory."""
    cost, count = mma_cost(m, n, CTAS, a_in_tmem), k // MMA_K
    # The closed form gives operand reads in clocks of 128 bytes.
    return Demand(
        flop=2 * m * n * k / CTAS,
        mma=cost.compute * count,
        operand_bytes=cost.operands * 128 * count,
    )


def exponentials(elements: float, pattern: Ex2Pattern, columns: int) -> Demand:
    """2^x of scores, their scaling included; `columns` that a thread holds decide the share."""
    share = float(pattern.true_share(columns))
    # Packed: one fma scales; the polynomial adds, subtracts twice and has an fma a degree.
    fma = 1 + share * (3 + pattern.degree)
    return Demand(exp2=elements * (1 - share), fma=elements * fma)


def _tmem(columns: int) -> Demand:
    """All four warps of a group move that many columns of their 32 lanes."""
    return Demand(tmem_bytes=SLOTS * columns * TMEM_COLUMN_BYTES)


def _tma_load(size: float) -> Demand:
    return Demand(tma_bytes=size, l2_bytes=size)


@dataclass(frozen=True)
class Kernel:
    """A kernel's demands on one CTA. step: of each step; tile: of a tile beside its steps."""

    name: str
    step: Demand
    tile: Demand


def forward(config: ForwardConfig) -> Kernel:
    """The forward kernel: S = Q K^T and O += P V; Q stays for a tile, K and V pass."""
    rows, keys = config.block_q, config.block_kv
    step = (
        product(config.tile_q, keys, HEAD_DIM)
        + product(config.tile_q, HEAD_DIM, keys, a_in_tmem=True)
        + exponentials(rows * keys, config.ex2_pattern, keys)
        # Row sums; S read, P written in half the columns; a factor per row through shared memory.
        + Demand(fma=rows * keys, exp2=rows, warp_bytes=2 * FLOAT_BYTES * rows)
        + _tmem(keys + keys // 2)
        + _tma_load(2 * config.kv_bytes)
    )
    # O: out of tensor memory, scaled, staged in shared memory, stored by TMA; LSE, 1 / sum.
    o = rows * HEAD_DIM
    tile = (
        _tma_load(config.q_bytes)
        + _tmem(HEAD_DIM)
        + Demand(fma=o, warp_bytes=config.q_bytes + 2 * FLOAT_BYTES * rows)
        + Demand(tma_bytes=config.q_bytes, l2_bytes=config.q_bytes + FLOAT_BYTES * rows)
    )
    return Kernel("forward", step, tile)


def preprocess() -> Kernel:
    """delta = rowsum(dO * O) and LSE in other units; a tile is 256 rows, no steps."""
    read = 2 * BLOCK_Q * HEAD_DIM * ELEMENT_BYTES
    rows = 3 * FLOAT_BYTES * BLOCK_Q  # LSE read, LSE and delta written
    return Kernel("preprocess", Demand(), Demand(fma=BLOCK_Q * HEAD_DIM, l2_bytes=read + rows))


def dq(config: BackwardConfig) -> Kernel:
    """S, dP and dQ += dS K; Q and dO stay for a tile; K (in two forms) and V pass."""
    tile_q, elements = CTAS * BLOCK_Q, BLOCK_Q * BLOCK_KV
    scores = product(tile_q, BLOCK_KV, HEAD_DIM)
    step = (
        scores * 2
        + product(tile_q, HEAD_DIM, BLOCK_KV, a_in_tmem=True)
        + exponentials(elements, config.ex2_pattern, BLOCK_KV // 2)
        + Demand(fma=2 * elements)  # dS = P (dP - delta)
        + _tmem(2 * BLOCK_KV + BLOCK_KV // 2)
        + _tma_load(3 * TILE_BYTES)
    )
    result = BLOCK_Q * HEAD_DIM
    tile = (
        _tma_load(2 * config.dq.query_bytes)
        + _tmem(HEAD_DIM)
        + Demand(fma=result, l2_bytes=result * ELEMENT_BYTES + 2 * FLOAT_BYTES * BLOCK_Q)
    )
    return Kernel("dQ", step, tile)


def dv(config: BackwardConfig, partial: bool = False) -> Kernel:
    """S^T, dP^T and dV += P^T dO; K and V stay; Q and dO (in two forms) pass, dS is stored.

    partial: dV is float32, to be summed.
    """
    elements, stats = DS_TILE * DS_TILE, 2 * config.dv.stats_bytes
    # Each warp reads LSE and delta of its half of the queries, eight of them in a clock.
    stats_clocks = len(config.dv.warps.gradient) * 2 * (DS_TILE // 2) // 8
    step = (
        product(DS_BLOCK, DS_TILE, HEAD_DIM) * 2
        + product(DS_BLOCK, HEAD_DIM, DS_TILE, a_in_tmem=True)
        + exponentials(elements, config.ex2_pattern, DS_TILE // 2)
        + Demand(fma=2 * elements)  # dS = P (dP - delta)
        + _tmem(2 * DS_TILE + DS_TILE // 2)
        + _tma_load(3 * TILE_BYTES + stats)
        + Demand(warp_bytes=128 * stats_clocks, l2_bytes=elements * ELEMENT_BYTES)
    )
    result = DS_TILE * HEAD_DIM
    tile = (
        _tma_load(2 * config.dv.key_bytes)
        + _tmem(HEAD_DIM)
        + Demand(l2_bytes=result * (FLOAT_BYTES if partial else ELEMENT_BYTES))
    )
    return Kernel("dV and dS", step, tile)


def products(partial: bool = False) -> Kernel:
    """dK += dS^T Q and dQ += dS K from a dS that is kept; dS and Q or K pass.

    partial: dK is float32, to be summed; the mean of both results' bytes is taken for each.
    """
    step = product(DS_BLOCK, HEAD_DIM, DS_TILE) + _tma_load(2 * TILE_BYTES)
    result = DS_TILE * HEAD_DIM
    nbytes = (ELEMENT_BYTES + (FLOAT_BYTES if partial else ELEMENT_BYTES)) / 2
    tile = _tmem(HEAD_DIM) + Demand(fma=result, l2_bytes=result * nbytes)
    return Kernel("dK and dQ from dS", step, tile)


def dkdv(config: BackwardConfig, partial: bool = False) -> Kernel:
    """S^T, dP^T, dV += P^T dO and dK += dS^T Q; K and V stay; Q and dO (in two forms) pass.

    partial: results are float32, to be summed.
    """
    unit_q, own_keys = CTAS * BLOCK_Q, BLOCK_KV // CTAS
    elements = own_keys * unit_q
    stats = 2 * config.dkdv.stats_bytes
    # Each warp reads LSE and delta of a quarter of the unit's queries, the same 16 bytes for all
    # its lanes, which take two clocks (sm100_sim/docs/facts.md).
    stats_clocks = len(config.dkdv.warps.gradient) * stats // 4 // 16 * 2
    step = (
        product(BLOCK_KV, unit_q, HEAD_DIM) * 2
        + product(BLOCK_KV, HEAD_DIM, unit_q) * 2
        + exponentials(elements, config.ex2_pattern, BLOCK_Q // 2)
        + Demand(fma=2 * elements)
        + Demand(warp_bytes=2 * elements * ELEMENT_BYTES + 128 * stats_clocks)
        + _tmem(2 * BLOCK_KV)
        + _tma_load(8 * TILE_BYTES + stats)
    )
    result = 2 * own_keys * HEAD_DIM
    tile = _tma_load(2 * TILE_BYTES) + _tmem(2 * BLOCK_KV) + Demand(
        fma=result / 2, l2_bytes=result * (FLOAT_BYTES if partial else ELEMENT_BYTES)
    )  # fmt: skip
    return Kernel("dK/dV", step, tile)


@dataclass(frozen=True)
class Total:
    """A kernel on a case. demand: of all CTAs together; hbm_bytes: each tensor once."""

    kernel: Kernel
    steps: int
    tiles: int
    demand: Demand
    hbm_bytes: float


def totals(case: Case, direction: str, config: Any = None, gpu: Gpu = B200) -> list[Total]:
    """The kernels of one direction on a case, in the order in which they run.

    config: ForwardConfig or BackwardConfig, as the direction is; None for the default one. gpu:
    decides how far query heads of dK and dV are split.
    Raises ValueError for another direction.
    """
    tokens_q, tokens_k = (sum(lengths) for lengths in zip(*case.lengths))
    query = tokens_q * case.heads * HEAD_DIM * ELEMENT_BYTES
    key = tokens_k * case.heads_kv * HEAD_DIM * ELEMENT_BYTES
    row = tokens_q * case.heads * FLOAT_BYTES
    steps, q_tiles, kv_tiles = _counts(case)
    if direction == FORWARD:
        steps, q_tiles, _ = _counts(case, packed_heads(case.heads // case.heads_kv, (), BLOCK_Q))
        counted = [(forward(config or ForwardConfig()), steps, q_tiles, 2 * query + 2 * key + row)]
    elif direction == BACKWARD:
        config = config or BackwardConfig()
        chunks = backward_chunks(case, config.ds_bytes, gpu)
        partial = chunks[0].partial
        rows = sum(one.count * sum(k for _, k in one.case.lengths) * one.case.heads_kv
                   * one.head_parts for one in chunks)  # fmt: skip
        result = rows * HEAD_DIM * (FLOAT_BYTES if partial else ELEMENT_BYTES)
        blocks = sum(-(-q // (CTAS * BLOCK_Q)) for q, _ in case.lengths) * case.heads
        counted = [(preprocess(), 0, blocks, 2 * query + 3 * row)]
        read = 2 * query + 2 * key + 2 * row
        if chunks[0].keeps_ds:
            key_blocks = sum(n.count * _key_counts(n.case)[1] * n.head_parts for n in chunks)
            key_steps, _ = _key_counts(case)
            ds = key_steps * UNIT_DS_BYTES
            of_both = key_steps + steps, key_blocks + q_tiles
            counted += [
                (dv(config, partial), key_steps, key_blocks, read + result + ds),
                (products(partial), *of_both, 2 * query + key + result + ds),
            ]
        else:
            kv_tiles = sum(n.count * _counts(n.case)[2] * n.head_parts for n in chunks)
            counted += [
                (dkdv(config, partial), steps, kv_tiles, read + 2 * result),
                (dq(config), steps, q_tiles, read + query),
            ]
    else:
        raise ValueError(f"direction {direction!r}; accepted are {FORWARD} and {BACKWARD}")
    return [
        Total(kernel, n, tiles, (kernel.step * n + kernel.tile * tiles) * CTAS, hbm)
        for kernel, n, tiles, hbm in counted
    ]


def _counts(case: Case, packed: int = 1) -> tuple[int, int, int]:
    """Return (steps, query tiles, key tiles) with any visible key; a step has 256 rows x 128 keys.

    packed: query heads whose rows share a tile.
    """
    steps = q_tiles = kv_tiles = 0
    for lengths in case.lengths:
        found = _sequence_counts(*lengths, *case.bounds, CTAS * BLOCK_Q // packed)
        steps += found[0] * case.heads // packed
        q_tiles += found[1] * case.heads // packed
        kv_tiles += found[2] * case.heads_kv
    return steps, q_tiles, kv_tiles


def _key_counts(case: Case) -> tuple[int, int]:
    """Return (steps, tiles of 256 keys) with any visible pair; a step has 256 keys x 128 queries.
    The mask is the same one with its sides exchanged."""
    left, right = case.bounds
    found = [_sequence_counts(k, q, right, left, DS_BLOCK) for q, k in case.lengths]
    steps, tiles, _ = (sum(counts) for counts in zip(*found))
    return steps * case.heads, tiles * case.heads_kv


@functools.cache
def _sequence_counts(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, rows: int
) -> tuple[int, int, int]:
    """Return the counts of one sequence and tiles of `rows` queries; the mask is aligned bottom
    right."""
    lengths, ranges = (seqlen_q, seqlen_k), []
    for begin in range(0, seqlen_q, rows):
        keys = visible_keys(begin, min(begin + rows, seqlen_q), lengths, (left, right))
        if keys:
            ranges.append(range(keys.start // BLOCK_KV, -(-keys.stop // BLOCK_KV)))
    seen = len(set(itertools.chain.from_iterable(ranges)))
    return sum(map(len, ranges)), len(ranges), seen


@dataclass(frozen=True)
class Resource:
    """clocks: of one SM for a demand. amount: what is counted, in `unit`. constants: those that
    the clocks depend on."""

    name: str
    unit: str
    amount: Callable[[Demand], float]
    rate: Callable[[Values], float]
    constants: tuple[str, ...]

    def clocks(self, demand: Demand, values: Values) -> float:
        return self.amount(demand) / self.rate(values)

    def clock_range(self, demand: Demand, machine: Machine) -> tuple[float, float]:
        """Smallest and largest clocks over the ranges of the machine's constants."""
        return extremes(lambda values: self.clocks(demand, values), machine, self.constants)


def extremes(
    function: Callable[[Values], float], machine: Machine, constants: tuple[str, ...]
) -> tuple[float, float]:
    """Smallest and largest value over the corners of the ranges of these constants."""
    ends = ((machine.constants[name].low, machine.constants[name].high) for name in constants)
    central = machine.values()
    found = [
        function(central._replace(**dict(zip(constants, corner))))
        for corner in itertools.product(*ends)
    ]
    return min(found), max(found)


RESOURCES = (
    Resource("tensor core", "clocks", lambda d: d.mma, lambda v: 1.0, ()),
    Resource("SMEM port", "B", lambda d: d.smem_bytes, lambda v: v.shared_bytes_per_clock,
             ("shared_bytes_per_clock",)),
    Resource("MUFU", "results", lambda d: d.exp2, lambda v: SLOTS * LANES / v.mufu_interval,
             ("mufu_interval",)),
    Resource("FMA", "operations", lambda d: d.fma, lambda v: float(SLOTS * LANES), ()),
    Resource("TMEM", "B", lambda d: d.tmem_bytes,
             lambda v: SLOTS * TMEM_COLUMN_BYTES * v.tmem_columns_per_clock,
             ("tmem_columns_per_clock",)),
    Resource("TMA and L2", "B", lambda d: d.l2_bytes, l2_share,
             ("l2_bytes_per_clock_sm", "l2_terabytes", "clock_ghz")),
)  # fmt: skip
HBM = "HBM"


def hbm_clocks(total: Total, values: Values) -> float:
    """Clocks until every tensor has moved once."""
    return total.hbm_bytes / (values.hbm_terabytes * 1e12) * values.clock_ghz * 1e9


def machine_clocks(total: Total, resource: Resource, values: Values) -> float:
    """Clocks of a whole case if all SMs had equal shares."""
    return resource.clocks(total.demand, values) / values.sms
