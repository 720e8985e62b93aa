"""Granules of shared and tensor memory that an asynchronous operation touches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from sm100_sim.isa.tensor import tensor_core
from sm100_sim.isa.tensor.descriptors import decode_warpgroup_matrix, gather_plan
from sm100_sim.isa.tensor.tensor_core import Mma
from sm100_sim.isa.tensor.warpgroup import ROWS, ROWS_OF_A_WARP, Product
from sm100_sim.state.tmem import split_address

#: TMEM lanes in a granule of its shadow.
LANES_OF_A_GRANULE = 16


@lru_cache(maxsize=4096)
def operand_chunks(
    raws: tuple[int, ...], mn_major: bool, extent: int, width: int, k_bytes: int
) -> slice | np.ndarray:
    """16-byte chunks of shared memory that hold an operand, as a slice where they are adjacent."""
    plan = gather_plan(raws, mn_major, extent, width, k_bytes=k_bytes)
    return _adjacent(np.unique(plan.index))


def _used_chunks(raws: tuple[int, ...], head: Mma, width: int, k_bytes: int) -> Any:
    """16-byte chunks of B that hold the columns which a zero-column mask leaves."""
    mn_major, columns = head.descriptor.b_mn_major, head.columns
    used = columns[columns >= 0]
    plan = gather_plan(raws, mn_major, tensor_core.b_extent(head), width, k_bytes=k_bytes)
    index = plan.index[:, used * width // 16] if mn_major else plan.index[used]
    return _adjacent(np.unique(index)) if len(used) else slice(0, 0)


def _adjacent(index: np.ndarray) -> slice | np.ndarray:
    """Ascending numbers, as a slice if there is no gap."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == len(index) else index


def _lane_granules(lanes: Any) -> slice | np.ndarray:
    if isinstance(lanes, slice):
        first = (lanes.start or 0) // LANES_OF_A_GRANULE
        last = 128 if lanes.stop is None else lanes.stop
        return slice(first, -(-last // LANES_OF_A_GRANULE))
    return np.unique(np.asarray(lanes) // LANES_OF_A_GRANULE)


def mma_operands(run: list[Mma]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (CTA, "smem" or "tmem", region) that a run of one accumulator chain reads as A and B,
    with their scale factors."""
    head = run[0]
    descriptor, ctas = head.descriptor, head.ctas
    size = descriptor.kind.element_bytes, descriptor.k_bytes
    b_raws = tuple(mma.b for mma in run)
    b = operand_chunks(b_raws, descriptor.b_mn_major, tensor_core.b_extent(head), *size)
    if head.mask is not None:
        b = _used_chunks(b_raws, head, *size)
    rows = tensor_core.rows_per_cta(head)
    for cta in ctas:
        yield cta, "smem", b
        if descriptor.block:
            for which, scales in (("A", {m.scale_a for m in run}), ("B", {m.scale_b for m in run})):
                place = tensor_core.factor_place(head, which)
                cells = {address & tensor_core.SCALE_ADDRESS for address in scales}
                first = {split_address(cell)[1] + s for cell in cells for s in place.starts}
                for column in sorted(first):
                    yield cta, "tmem", (slice(column, column + place.columns), slice(0, 8))
        if not head.a_in_tmem:
            a = operand_chunks(tuple(mma.a for mma in run), descriptor.a_mn_major, rows, *size)
            yield cta, "smem", a
            continue
        columns = sorted(split_address(mma.a)[1] for mma in run)
        lanes = _lane_granules(tensor_core.a_lanes(head, rows))
        if columns == list(range(columns[0], columns[0] + 8 * len(columns), 8)):
            yield cta, "tmem", (slice(columns[0], columns[-1] + 8), lanes)
        else:
            for column in columns:
                yield cta, "tmem", (slice(column, column + 8), lanes)


@lru_cache(maxsize=4096)
def _warpgroup_operand(
    raw: int, mn_major: bool, extent: int, rows: tuple[int, int], width: int
) -> slice | np.ndarray:
    """16-byte chunks of shared memory that hold rows `rows[0]` to before `rows[1]` of an operand of
    one wgmma.mma_async."""
    index = gather_plan((raw,), mn_major, extent, width, decode_warpgroup_matrix).index
    first, end = rows
    if mn_major:
        per_chunk = 16 // width
        index = index[:, first // per_chunk : end // per_chunk]
    else:
        index = index[first:end]
    return _adjacent(np.unique(index))


def warpgroup_operands(product: Product, warp: int) -> Iterator[slice | np.ndarray]:
    """16-byte chunks of shared memory that a wgmma.mma_async reads for warp `warp` of its
    warpgroup: the warp's rows of A, and B."""
    form = product.site.form
    width = form.element_bytes
    yield _warpgroup_operand(product.b, form.b_mn_major, form.n, (0, form.n), width)
    if not form.a_in_registers:
        rows = ROWS_OF_A_WARP * warp, ROWS_OF_A_WARP * (warp + 1)
        yield _warpgroup_operand(product.a, form.a_mn_major, ROWS, rows, width)


def mma_results(head: Mma) -> Iterator[tuple[Any, tuple[slice, Any]]]:
    """Yield (CTA, region of its tensor memory) of the accumulator of an instruction."""
    for p, cta in enumerate(head.ctas):
        for part, column, lanes in tensor_core.destinations(head):
            count = len(range(*part.indices(head.descriptor.n)))
            granules = _lane_granules(lanes)
            if head.disabled is not None:
                written = np.flatnonzero(
                    ~head.disabled[p].reshape(-1, LANES_OF_A_GRANULE).all(axis=1)
                )
                whole = np.arange(8)[granules] if isinstance(granules, slice) else granules
                granules = np.intersect1d(whole, written)
            if isinstance(granules, np.ndarray):
                for granule in granules.tolist():
                    yield cta, (slice(column, column + count), slice(granule, granule + 1))
            else:
                yield cta, (slice(column, column + count), granules)
