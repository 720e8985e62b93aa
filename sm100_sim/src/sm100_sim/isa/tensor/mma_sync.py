"""mma.sync: matrix products of one warp, operands and result in its registers.

PTX ISA 9.7.15.5, "Matrix fragments for mma". With g = t/4 and c = t%4 of thread t, and p elements
of a factor to a register, register i and element j of it hold

  A (M x K)  row g + 8(i%2), column cp + j + 4p(i/2); with M = 8 row g, column cp + j + 4pi
  B (K x 8)  row cp + j + 4pi, column g
  C, D       two adjacent elements: row g + 8i, columns 2c and 2c+1

Products are summed in float64 and rounded once; the hardware leaves the order of additions open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sm100_sim.state.warp import ALL_LANES, vector_reader, vector_writer

from ..columns import Effect, Event, Recorded, Rule, Ties
from ..table import machine_op, split_modifiers, unknown
from . import tensor_core

#: Bytes of an element of A or B.
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "f64": 8}
_BYTE_FLOATS = ("e4m3", "e5m2")
#: Values of K by type of A, for shapes m16n8 and m8n8.
_K16 = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "s8": (16, 32), "u8": (16, 32),
        "e4m3": (16, 32), "e5m2": (16, 32), "f64": (4, 8, 16)}  # fmt: skip
_K8 = {"s8": (16,), "u8": (16,), "f64": (4,)}
_ACCUMULATORS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "s8": ("s32",),
                 "u8": ("s32",), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"),
                 "f64": ("f64",)}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """M and K of an instruction; N is 8."""

    m: int
    k: int

    def places_a(self, per: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, column) of A by [register, thread, element]."""
        i, t, j = np.ogrid[: self.m * self.k // 32 // per, :32, :per]
        high, block = (i % 2, i // 2) if self.m == 16 else (0, i)
        row, column = np.broadcast_arrays(t // 4 + 8 * high, t % 4 * per + j + 4 * per * block)
        return row, column

    def places_b(self, per: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, column) of B by [register, thread, element]."""
        i, t, j = np.ogrid[: self.k // 4 // per, :32, :per]
        row, column = np.broadcast_arrays(t % 4 * per + j + 4 * per * i, t // 4)
        return row, column

    def places_c(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, column) of C and D by [pair, thread, element of the pair]."""
        i, t, j = np.ogrid[: self.m // 8, :32, :2]
        row, column = np.broadcast_arrays(t // 4 + 8 * i, t % 4 * 2 + j)
        return row, column


def _factor(op, name: str, places, shape: tuple[int, int]):
    """Accessor of A or B as float64."""
    rows, columns = places
    read, width = vector_reader(op), _BYTES[name]
    count = len(op.items) if op.kind == "vec" else 1
    if count != rows.shape[0]:
        return None

    def matrix(warp) -> np.ndarray:
        registers = np.ascontiguousarray(read(warp))
        found = np.empty(shape)
        if name == "f64":
            found[rows, columns] = registers.view(np.float64)[:, :, None]
        else:
            raw = registers.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width])
            found[rows, columns] = tensor_core.values_of(raw, name).reshape(rows.shape)
        return found

    return matrix


_WORDS = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}


def _accumulator(op, name: str, shape: Shape):
    """Accessor of C as float64, and writer of D."""
    rows, columns = shape.places_c()
    count = len(op.items) if op.kind == "vec" else 1
    if count != rows.shape[0] * (1 if name == "f16" else 2):
        return None
    dtype = _WORDS[name]
    per_register = 2 if name == "f16" else 1

    def read_c(warp) -> np.ndarray:
        values = np.ascontiguousarray(vector_reader(op)(warp)).view(dtype)
        found = np.empty((shape.m, 8))
        values = (
            values.reshape(rows.shape)
            if per_register == 2
            else values.reshape(-1, 2, 32).transpose(0, 2, 1)
        )
        found[rows, columns] = values
        return found

    def write_d(warp, d: np.ndarray) -> None:
        values = d[rows, columns]
        if per_register == 1:
            values = values.transpose(0, 2, 1).reshape(-1, 32)
        values = np.ascontiguousarray(values.astype(dtype, copy=False))
        words = values.view(np.uint64 if name == "f64" else np.uint32).reshape(count, 32)
        vector_writer(op)(warp, ALL_LANES, words)

    return read_c, write_d


def _rounded(d: np.ndarray, name: str, saturate: bool) -> np.ndarray:
    if name == "s32":
        total = d.astype(np.int64)
        if saturate:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        return total.astype(np.uint64).astype(np.uint32).view(np.int32)
    return d


@machine_op(
    "mma.sync",
    aligned=True,
    defines=(0,),
    rule=Rule.COMPUTES,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_mma(instruction, kernel):
    """mma.sync.aligned.shape.row.col{.satfinite}.dtype.atype.btype.ctype d, a, b, c."""
    _, name, _, _, saturate, d_type, a_type, b_type, c_type = split_modifiers(
        instruction, ("aligned",), instruction.modifiers[1:2], ("row",), ("col",),
        ("satfinite", ""), tuple(_WORDS), tuple(_BYTES), tuple(_BYTES), tuple(_WORDS)
    )  # fmt: skip
    m = {"m16n8k": 16, "m8n8k1": 8, "m8n8k4": 8}.get(name[:6], 0)
    k = int(name.rpartition("k")[2]) if m else 0
    pairs = {a_type, b_type}
    mixed = pairs <= {"s8", "u8"} or pairs <= set(_BYTE_FLOATS)
    if (
        k not in (_K16 if m == 16 else _K8).get(a_type, ())
        or a_type != b_type
        and not mixed
        or d_type not in _ACCUMULATORS[a_type]
        or c_type not in _ACCUMULATORS[a_type]
    ):
        raise unknown(instruction, "shape or types of mma.sync")
    shape = Shape(m, k)
    d_op, a_op, b_op, c_op = instruction.operands
    a = _factor(a_op, a_type, shape.places_a(max(1, 4 // _BYTES[a_type])), (m, k))
    b = _factor(b_op, b_type, shape.places_b(max(1, 4 // _BYTES[b_type])), (k, 8))
    c, d = _accumulator(c_op, c_type, shape), _accumulator(d_op, d_type, shape)
    if None in (a, b, c, d):
        raise unknown(instruction, "number of registers of an operand")

    def execute(warp, lanes: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            result = a(warp) @ b(warp) + c[0](warp)
            d[1](warp, _rounded(result, d_type, bool(saturate)))

    return execute
