"""tcgen05.cp and tcgen05.shift: shared memory to tensor memory, and rows of tensor memory down.

PTX ISA 9.3, "tcgen05.cp", "tcgen05.shift" and "Data Movement Shape". Both take effect in the order
of issue with the MMAs of the CTA or pair. A source row of 128 or 256 bits is one or two 16-byte
chunks of a K-major matrix descriptor. A copy that decompresses makes 16 bytes of the 16 elements of
a chunk (PTX ISA, "Optional Decompression").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sm100_sim.errors import MemoryFault, TmemError
from sm100_sim.state.tmem import LANES, split_address
from sm100_sim.state.warp import uniform

from .. import minifloat
from ..columns import Effect, Event, Recorded, Rule, Ties
from ..shared import submit
from ..table import effect_of, machine_op, unknown
from .descriptors import check_operand, chunks_of, decode_matrix
from .tcgen05 import end_chain, groups, matrix_reader, operands_of, queue_of, single_thread


@dataclass(frozen=True)
class CopyShape:
    """rows: source row of each of the 128 lanes, -1 where nothing is written; chunks: 16-byte
    chunks of a source row, which take 4 columns each."""

    name: str
    rows: tuple[int, ...]
    chunks: int


def _shape(name: str, row_of, chunks: int) -> CopyShape:
    return CopyShape(name, tuple(row_of(lane) for lane in range(LANES)), chunks)


#: NOTE [tcgen05.cp lanes]: .warpx2::02_13 gives the warps 0 and 2 the first 32 rows and 1 and 3 the
#: others; .warpx2::01_23 pairs 0 with 1 and 2 with 3; .warpx4 gives all four the same 32 rows. The
#: four rows of .4x256b go to one lane of each sub-partition.
SHAPES = {
    ("128x256b", ""): _shape("128x256b", lambda lane: lane, 2),
    ("128x128b", ""): _shape("128x128b", lambda lane: lane, 1),
    ("4x256b", ""): _shape("4x256b", lambda lane: lane // 32 if lane % 32 == 0 else -1, 2),
    ("64x128b", "warpx2::02_13"): _shape("64x128b", lambda lane: lane % 64, 1),
    ("64x128b", "warpx2::01_23"): _shape("64x128b", lambda lane: lane // 64 * 32 + lane % 32, 1),
    ("32x128b", "warpx4"): _shape("32x128b", lambda lane: lane % 32, 1),
}


@lru_cache(maxsize=4096)
def source_chunks(raw: int, shape: CopyShape) -> np.ndarray:
    """16-byte chunk of shared memory for each written lane and chunk, intp (lanes, chunks)."""
    rows = [row for row in shape.rows if row >= 0]
    descriptor = decode_matrix(raw)
    check_operand(descriptor, 16 * shape.chunks)
    table = chunks_of(descriptor, False, max(rows) + 1, shape.chunks)
    return (table[rows] >> 4).astype(np.intp)


def _form_of(instruction) -> tuple[int, CopyShape, int]:
    """Return (.cta_group, shape, bits of each element of a copy that decompresses, or 0)."""
    group, rest = groups(instruction)
    formats = [part for part in rest if part.startswith("b")]
    if formats not in ([], *(["b8x16", source] for source in minifloat.PADDED)):
        accepted = " and ".join(f".b8x16.{source}" for source in minifloat.PADDED)
        raise unknown(instruction, f"formats of tcgen05.cp; accepted: {accepted}")
    rest = [part for part in rest if part not in formats]
    multicast = "".join(part for part in rest if part.startswith("warpx"))
    shape = SHAPES.get(("".join(part for part in rest if part[:1].isdigit()), multicast))
    if shape is None or len(rest) != 1 + bool(multicast):
        accepted = ", ".join(".".join(filter(None, key)) for key in SHAPES)
        raise unknown(instruction, f"shape of tcgen05.cp; accepted: {accepted}")
    return group, shape, minifloat.PADDED[formats[1]] if formats else 0


def _lanes_of(shape: CopyShape, base: int) -> np.ndarray:
    return base + np.array([lane for lane, row in enumerate(shape.rows) if row >= 0])


@machine_op(
    "tcgen05.cp",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.TMEM_COPY,
    effect=Effect.TENSOR_COPY,
    chain=True,
    ties=Ties.NEVER,
)
def bind_copy(instruction, kernel):
    """tcgen05.cp.cta_group.shape{.multicast}{.b8x16.source} [taddr], descriptor."""
    group, shape, bits = _form_of(instruction)
    target = uniform(instruction.operands[0], 32)
    source = matrix_reader(instruction, instruction.operands[1], kernel)
    effect = effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        single_thread(instruction, lanes)
        end_chain(warp)
        lane, column = split_address(target(warp, lanes))
        if lane >= (32 if shape.name == "4x256b" else 1):
            raise TmemError(f"tcgen05.cp.{shape.name} to lane {lane}; the copy starts at lane 0")
        chunks, where = source_chunks(source(warp, lanes), shape), _lanes_of(shape, lane)
        ctas = operands_of(warp.cta, group)
        for cta in ctas:
            cta.tmem.check(column, 4 * shape.chunks, "tcgen05.cp")
            _check_source(cta, chunks)

        def perform() -> None:
            for cta in ctas:
                units = cta.smem[: cta.smem.size & ~15].view(np.complex128)
                rows = units[chunks].view(np.uint8)
                rows = (minifloat.decompress(rows, bits) if bits else rows).view(np.uint32)
                cta.tmem.cells[column : column + rows.shape[1], where] = rows.T

        submit(
            warp, instruction, effect, perform, queue_of(ctas),
            cells=tuple((cta, column, 4 * shape.chunks, where, chunks) for cta in ctas),
        )  # fmt: skip

    return execute


def _check_source(cta, chunks: np.ndarray) -> None:
    end = 16 * int(chunks.max()) + 16
    if end > cta.smem.size:
        raise MemoryFault(
            f"tcgen05.cp reads shared memory up to offset {end}; the CTA has {cta.smem.size} bytes"
        )


@machine_op(
    "tcgen05.shift",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.TMEM_SHIFT,
    effect=Effect.TENSOR_SHIFT,
    chain=True,
    ties=Ties.NEVER,
)
def bind_shift(instruction, kernel):
    """tcgen05.shift.cta_group.down [taddr]: within 32 lanes and 8 columns (32 bytes), every row but
    the last moves to the next lane."""
    group, rest = groups(instruction)
    if rest != ["down"]:
        raise unknown(instruction, "expected tcgen05.shift.cta_group.down")
    target, effect = uniform(instruction.operands[0], 32), effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        single_thread(instruction, lanes)
        end_chain(warp)
        lane, column = split_address(target(warp, lanes))
        if lane % 32:
            raise TmemError(f"tcgen05.shift at lane {lane}; accepted are multiples of 32")
        ctas = operands_of(warp.cta, group)
        for cta in ctas:
            cta.tmem.check(column, 8, "tcgen05.shift")

        def perform() -> None:
            for cta in ctas:
                rows = cta.tmem.cells[column : column + 8, lane : lane + 32]
                rows[:, 1:] = rows[:, :-1].copy()

        where = np.arange(lane, lane + 32)
        submit(
            warp, instruction, effect, perform, queue_of(ctas),
            cells=tuple((cta, column, 8, where, None) for cta in ctas),
        )  # fmt: skip

    return execute
