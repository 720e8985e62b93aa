"""tensormap.replace and tensormap.cp_fenceproxy: TMA descriptors made or changed by a kernel.

PTX ISA, "tensormap.replace" and "tensormap.cp_fenceproxy". The fields lie as `state.tensormap`
decodes them; they are written one by one, so a descriptor need not be valid before its last field.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sm100_sim.errors import MemoryFault, Misaligned, SimulationError
from sm100_sim.state.memory import host_view
from sm100_sim.state.tensormap import TENSORMAP_BYTES
from sm100_sim.state.warp import SHARED_WINDOW, Warp, address, uniform

from ..columns import Effect, Event, Recorded, Rule, Ties
from ..shared import shared_address
from ..table import machine_op, unknown

#: Field -> (word, lowest bit, bits, what is subtracted first) for each dimension of it.
_PLACES = {
    "rank": [(2, 4, 3, 0)],
    "interleave_layout": [(2, 11, 2, 0)],
    "swizzle_mode": [(2, 13, 2, 0)],
    "swizzle_atomicity": [(2, 19, 1, 0)],
    "fill_mode": [(2, 15, 1, 0)],
    "global_dim": [(8 + n, 0, 32, 1) for n in range(5)],
    "element_stride": [(13, 3 * n, 3, 1) for n in range(5)],
    "box_dim": [((55 + n) // 4, (55 + n) % 4 * 8, 8, 1) for n in range(5)],
}
#: elemtype (PTX ISA, table of tensormap.replace) -> number in the descriptor, whether it is tf32.
_ELEMENTS = {
    **{n: (n, 0) for n in range(11)},
    11: (7, 1),
    12: (8, 1),
    13: (11, 0),
    14: (12, 0),
    15: (13, 0),
}
_ORDINAL = ("global_dim", "box_dim", "element_stride", "global_stride")
_IMMEDIATE = ("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")


def _put(words: np.ndarray, place: tuple[int, int, int, int], value: int, what: str) -> None:
    word, low, bits, less = place
    if not 0 <= value - less < 1 << bits:
        raise SimulationError(f"tensormap.replace: {what} {value} does not fit in its field")
    mask = (1 << bits) - 1 << low
    words[word] = int(words[word]) & ~mask | value - less << low


def _replace(words: np.ndarray, field: str, ordinal: int, value: int) -> None:
    """Write one field of a descriptor given as uint32 words."""
    if field == "global_address":
        words[0], words[1] = value & 0xFFFFFFFF, value >> 32
    elif field == "global_stride":
        if value % 16:
            raise Misaligned(
                f"tensormap.replace: stride of {value} bytes; it must be a multiple of 16"
            )
        words[3 + ordinal] = value >> 4 & 0xFFFFFFFF
        _put(words, (7, 4 * ordinal, 4, 0), value >> 36, "global_stride")
    elif field == "elemtype":
        number, tf32 = _ELEMENTS[value]
        _put(words, (2, 7, 4, 0), number, field)
        _put(words, (2, 16, 1, 0), tf32, field)
    else:
        _put(words, _PLACES[field][ordinal], value, field)


def _bytes_at(warp: Warp, pointer: int, space: str, write: bool) -> np.ndarray:
    """The 128 bytes of a descriptor in shared (offset with rank) or global memory."""
    if pointer % TENSORMAP_BYTES:
        raise Misaligned(f"TMA descriptor at {pointer:#x}, which is not 128-byte aligned")
    if space == "" and pointer >> 56 == SHARED_WINDOW >> 56:
        space, pointer = "shared::cta", pointer & 0xFFFFFFFF
    if space == "shared::cta":
        offset, smem = pointer & 0xFFFFFF, warp.cta.smem
        if pointer >> 24 != warp.cta.rank or offset + TENSORMAP_BYTES > smem.size:
            raise MemoryFault(
                f"TMA descriptor at shared address {pointer:#x}, outside the CTA's "
                "own shared memory"
            )
        return smem[offset : offset + TENSORMAP_BYTES]
    memory = warp.cta.cluster.machine.memory
    memory.check(pointer, TENSORMAP_BYTES, write, "TMA descriptor")
    return host_view(pointer, TENSORMAP_BYTES)


def _pointer(operand, space: str) -> Callable[[Warp, int], int]:
    return shared_address(operand) if space == "shared::cta" else address(operand, 64)


@machine_op(
    "tensormap.replace.tile",
    statistics="tensormap.replace",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_replace(instruction, kernel):
    """tensormap.replace.tile.field{.global,.shared::cta}.b1024.{b32,b64} [a], {ordinal,} value."""
    field, *rest = instruction.modifiers
    space = rest.pop(0) if rest[0] in ("global", "shared::cta") else ""
    wide = field in ("global_address", "global_stride")
    known = field in (*_PLACES, "global_address", "global_stride", "elemtype")
    if not known or rest != ["b1024", "b64" if wide else "b32"]:
        raise unknown(instruction, "field or type of tensormap.replace")
    place, *operands = instruction.operands
    ordinal = operands.pop(0) if field in _ORDINAL else None
    if len(operands) != 1 or ordinal is not None and ordinal.kind != "imm":
        raise unknown(instruction, "the ordinal must be an immediate, and one value must follow")
    index = 0 if ordinal is None else ordinal.value
    if not 0 <= index < (4 if field == "global_stride" else 5):
        raise unknown(instruction, f"ordinal {index}")
    if field in _IMMEDIATE:
        accepted = _ELEMENTS if field == "elemtype" else range(1 << _PLACES[field][0][2])
        if operands[0].kind != "imm" or operands[0].value not in accepted:
            raise unknown(instruction, f"{field} must be one of {', '.join(map(str, accepted))}")
    pointer, value = _pointer(place, space), uniform(operands[0], 64 if wide else 32)

    def execute(warp: Warp, lanes: int) -> None:
        for lane in range(32):
            if lanes >> lane & 1:
                target = _bytes_at(warp, pointer(warp, 1 << lane), space, True)
                _replace(target.view("<u4"), field, index, value(warp, 1 << lane))

    return execute


@machine_op(
    "tensormap.cp_fenceproxy",
    statistics="tensormap.replace",
    aligned=True,
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_copy_fence(instruction, kernel):
    """tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.scope.sync.aligned
    [dst], [src], 128: copies a descriptor; as a fence it changes nothing here."""
    head, scope, tail = (
        instruction.modifiers[:4],
        instruction.modifiers[4:5],
        instruction.modifiers[5:],
    )
    if (
        head != ("global", "shared::cta", "tensormap::generic", "release")
        or scope not in (("cta",), ("cluster",), ("gpu",), ("sys",))
        or tail != ("sync", "aligned")
        or len(instruction.operands) != 3
        or instruction.operands[2].value != TENSORMAP_BYTES
    ):
        raise unknown(
            instruction,
            "expected .global.shared::cta.tensormap::generic.release, a "
            "scope, .sync.aligned and 128 bytes",
        )
    target, source = address(instruction.operands[0], 64), shared_address(instruction.operands[1])

    def execute(warp: Warp, lanes: int) -> None:
        content = _bytes_at(warp, source(warp, lanes), "shared::cta", False)
        _bytes_at(warp, target(warp, lanes), "global", True)[:] = content

    return execute
