"""ldmatrix, stmatrix and movmatrix: 8x8 and 16x16 matrices between shared memory and a warp.

PTX ISA 9.7.15, "Warp-level matrix load/store/transpose". The rows of matrix i are 16 bytes each, at
the addresses that lanes 8i .. 8i+7 (16 lanes a matrix for m16n16) give. Thread t holds

  m8n8        bytes 4(t%4) .. 4(t%4)+3 of row t/4
  m8n8.trans  16-bit elements t/4 of the rows 2(t%4) and 2(t%4)+1
  m16n16      registers 2i, 2i+1: elements t/4 and t/4+8 of the rows 4(t%4) .. 4(t%4)+3
  m16n8       stmatrix: byte v of register i is element t/4 + 8(v/2) of row 2(t%4) + v%2
  m8n16       elements 4(t%4) .. 4(t%4)+3 of row t/4, unpacked to a byte each

Elements of 4 or 6 bits lie packed in their row and go to the low bits of their byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sm100_sim.isa import minifloat
from sm100_sim.isa.columns import MemoryAccess, Rule, Ties
from sm100_sim.isa.emitter import LANES, Emitter, splat
from sm100_sim.isa.table import computes, inline_op, split_modifiers, unknown
from sm100_sim.ptx.parser import Instruction, Operand

from .memory import host_pointers

_SPACES = ("shared", "shared::cta", "")
_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


class Piece(NamedTuple):
    """Part of a thread's register: `size` bytes at bit `at`, from byte `byte` of row `row`.

    `row` and `byte` have an entry for each thread, as has `shift`: bits to drop first; `bits`: how
    many are kept, 0 for all.
    """

    row: list[int]
    byte: list[int]
    size: int
    at: int
    shift: list[int] | None = None
    bits: int = 0


def _each(function) -> list[int]:
    return [function(t) for t in range(LANES)]


def _registers(shape: str, trans: bool, matrix: int, bits: int) -> list[list[Piece]]:
    """Pieces of every register that matrix number `matrix` fills."""
    if shape == "m8n8" and not trans:
        return [[Piece(_each(lambda t: 8 * matrix + t // 4), _each(lambda t: t % 4 * 4), 4, 0)]]
    if shape == "m8n8":
        return [[
            Piece(_each(lambda t, j=j: 8 * matrix + t % 4 * 2 + j), _each(lambda t: t // 4 * 2), 2,
                  16 * j) for j in range(2)
        ]]  # fmt: skip
    if shape == "m16n8":
        return [[
            Piece(_each(lambda t, v=v: 8 * matrix + t % 4 * 2 + v % 2),
                  _each(lambda t, v=v: t // 4 + v // 2 * 8), 1, 8 * v) for v in range(4)
        ]]  # fmt: skip
    if shape == "m8n16":
        places: list[list[tuple[int, Any, Any]]]
        places = [[(8 * matrix, lambda t: t // 4, lambda t, v=v: t % 4 * 4 + v)
                   for v in range(4)]]  # fmt: skip
    else:
        places = [
            [(16 * matrix, lambda t, v=v: t % 4 * 4 + v, lambda t, h=h: t // 4 + 8 * h)
             for v in range(4)] for h in range(2)
        ]  # fmt: skip
    return [
        [_element(first, row, column, 8 * v, bits) for v, (first, row, column) in enumerate(part)]
        for part in places
    ]


def _element(first: int, row, column, at: int, bits: int) -> Piece:
    """One element of a row of bytes, or of `bits` bits packed."""
    rows = _each(lambda t: first + row(t))
    if bits == 8:
        return Piece(rows, _each(column), 1, at)
    return Piece(rows, _each(lambda t: bits * column(t) // 8), 2, at,
                 _each(lambda t: bits * column(t) % 8), bits)  # fmt: skip


def _lane_pointers(e: Emitter, rows: str, piece: Piece) -> str:
    """Pointers of a piece: those of its rows, kept in memory, plus the byte in the row."""
    slots = e.name_for(f"getelementptr i64, ptr %scratch, <32 x i32> {e.lane_constants(piece.row)}")
    e.line(f"store <32 x i64> {rows}, ptr %scratch, align 64")
    address = e.gather("i64", slots, splat("i1", 1), 8)
    offset = e.cast("zext", e.lane_constants(piece.byte), "i32", "i64")
    address = e.binary("add", "i64", address, offset)
    return e.name_for(f"inttoptr <32 x i64> {address} to <32 x ptr>")


def _rows(
    e: Emitter, i: Instruction, op: Operand, space: str, lanes: int, write: bool
) -> tuple[str, str]:
    """Host pointers of the rows that the lowest `lanes` lanes name, and which threads may go on:
    all of them, or none if a row was refused."""
    wanted = (1 << lanes) - 1
    pointers, allowed = host_pointers(e, i, op, space, 16, write, wanted)
    mask = e.name_for(f"bitcast <32 x i1> {allowed} to i32")
    every = e.name_for(f"icmp eq i32 {mask}, {wanted}")
    return pointers, e.binary("and", "i1", e.executing(), e.broadcast("i1", every))


def _gather(e: Emitter, size: int, pointers: str, mask: str) -> str:
    kind = f"i{8 * size}"
    value = e.gather(kind, pointers, mask, 1)
    return e.cast("zext", value, kind, "i32") if size < 4 else value


def _read(e: Emitter, rows: str, mask: str, pieces: list[Piece]) -> str:
    """One register of every thread, as i32 lanes."""
    total = ""
    for piece in pieces:
        value = _gather(e, piece.size, _lane_pointers(e, rows, piece), mask)
        if piece.shift is not None:
            value = e.binary("lshr", "i32", value, e.lane_constants(piece.shift))
            value = e.binary("and", "i32", value, splat("i32", (1 << piece.bits) - 1))
        if piece.at:
            value = e.binary("shl", "i32", value, splat("i32", piece.at))
        total = e.binary("or", "i32", total, value) if total else value
    return total


def _items(i: Instruction, op: Operand, count: int) -> tuple[Operand, ...]:
    items = op.items if op.kind == "vec" else (op,)
    if len(items) != count:
        raise unknown(i, f"{len(items)} registers where the shape moves {count}")
    return items


@inline_op(
    "ldmatrix",
    aligned=True,
    defines=(0,),
    access=MemoryAccess.MATRIX_LOAD,
    rule=Rule.LOGGED,
    ties=Ties.NEVER,
)
def load_matrix(e: Emitter, i: Instruction) -> None:
    """ldmatrix.sync.aligned: m8n8{.trans}.b16, m16n16.trans.b8, and m8n16 or m16n16.trans.b8x16 of
    elements of 4 or 6 bits."""
    _, _, shape, number, trans, space, type_name, packed = split_modifiers(
        i,
        ("sync",),
        ("aligned",),
        ("m8n8", "m16n16", "m8n16"),
        tuple(_COUNTS),
        ("trans", ""),
        _SPACES,
        ("b16", "b8", "b8x16"),
        (*minifloat.PADDED, ""),
    )
    count = _COUNTS[number]
    legal = {
        "m8n8": type_name == "b16" and not packed,
        "m16n16": bool(trans)
        and count < 4
        and (type_name == "b8x16") == bool(packed)
        and type_name != "b16",
        "m8n16": not trans and type_name == "b8x16" and bool(packed),
    }[shape]
    if not legal:
        raise unknown(i, "combination of shape, number, .trans and type")
    bits = minifloat.PADDED.get(packed, 8)
    registers = [r for matrix in range(count) for r in _registers(shape, bool(trans), matrix, bits)]
    items = _items(i, i.operands[0], len(registers))
    lanes = count * (16 if shape == "m16n16" else 8)
    rows, mask = _rows(e, i, i.operands[1], space, lanes, False)
    values = [_read(e, rows, mask, pieces) for pieces in registers]
    for item, value in zip(items, values, strict=True):
        e.set(item, "i32", value)


@inline_op(
    "stmatrix", aligned=True, access=MemoryAccess.MATRIX_STORE, rule=Rule.LOGGED, ties=Ties.NEVER
)
def store_matrix(e: Emitter, i: Instruction) -> None:
    """stmatrix.sync.aligned.{m8n8.num{.trans}.b16, m16n8.num.trans.b8} [address], registers."""
    _, _, shape, number, trans, space, type_name = split_modifiers(
        i,
        ("sync",),
        ("aligned",),
        ("m8n8", "m16n8"),
        tuple(_COUNTS),
        ("trans", ""),
        _SPACES,
        ("b16", "b8"),
    )
    if (shape == "m8n8") != (type_name == "b16") or type_name == "b8" and not trans:
        raise unknown(i, "combination of shape, .trans and type")
    count = _COUNTS[number]
    items = _items(i, i.operands[1], count)
    rows, mask = _rows(e, i, i.operands[0], space, 8 * count, True)
    for matrix, item in enumerate(items):
        value = e.get(item, "i32")
        for piece in _registers(shape, bool(trans), matrix, 8)[0]:
            part = e.binary("lshr", "i32", value, splat("i32", piece.at)) if piece.at else value
            kind = f"i{8 * piece.size}"
            part = e.cast("trunc", part, "i32", kind)
            e.scatter(kind, part, _lane_pointers(e, rows, piece), mask, 1)


@computes("movmatrix", statistics="ldmatrix", aligned=True)
def move_matrix(e: Emitter, i: Instruction) -> None:
    """movmatrix.sync.aligned.m8n8.trans.b16 d, a: the 8x8 matrix of the warp, transposed."""
    split_modifiers(i, ("sync",), ("aligned",), ("m8n8",), ("trans",), ("b16",))
    value = e.get(i.operands[1], "i32")
    e.scratch_needed = True
    e.line(f"store <32 x i32> {value}, ptr %scratch, align 64")
    parts = []
    for j in range(2):  # element (t/4, 2(t%4)+j) of the result is (2(t%4)+j, t/4) of the source
        index = e.lane_constants(_each(lambda t, j=j: 2 * (4 * (t % 4 * 2 + j) + t // 8)
                                       + t // 4 % 2))  # fmt: skip
        pointers = e.name_for(f"getelementptr i16, ptr %scratch, <32 x i32> {index}")
        part = _gather(e, 2, pointers, splat("i1", 1))
        parts.append(e.binary("shl", "i32", part, splat("i32", 16 * j)) if j else part)
    e.set(i.operands[0], "i32", e.binary("or", "i32", *parts))
