"""Calls native routines on CTAs made by hand, without a launch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from sm100_sim.native import layout
from sm100_sim.native.operands import CONSTANT
from sm100_sim.run.blas import sgemm
from sm100_sim.run.native_state import SCRATCH
from sm100_sim.state.warp import aligned_zeros
from sm100_sim.translate.kernel import routine_address


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def routine(name: str) -> Any:
    """routine(context, lanes, operation) of native code."""
    kind = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
    return kind(routine_address(name))


def operation(values: list[int], form: list[int] | tuple = ()) -> layout.Operation:
    """An operation whose operands are numbers."""
    made = layout.Operation()
    for i, value in enumerate(values):
        made.operands[i] = layout.Operand(CONSTANT, 0, value)
    for i, number in enumerate(form):
        made.form[i] = number
    return made


class Rig:
    """The native view of CTAs with `rank`, `smem` and `tmem`; `context` is a warp of the first."""

    def __init__(self, ctas: list[Any]) -> None:
        self.ctas = (layout.Cta * len(ctas))()
        self.operations = np.zeros((1, 2), np.uint64)
        self.scratch = [aligned_zeros((size,), np.float32) for size in SCRATCH]
        product, wide = sgemm()
        self.machine = layout.Machine(
            operations=address_of(self.operations),
            product=product,
            wide=wide,
            values_a=address_of(self.scratch[0]),
            values_b=address_of(self.scratch[1]),
            product_space=address_of(self.scratch[2]),
        )
        for cta, record in zip(ctas, self.ctas, strict=True):
            record.smem, record.smem_bytes = address_of(cta.smem), cta.smem.size
            record.tensor_memory = ctypes.addressof(cta.tmem.record)
            record.rank = cta.rank
        self.cluster = layout.Cluster(
            machine=ctypes.addressof(self.machine),
            ctas=ctypes.addressof(self.ctas),
            cta_count=len(ctas),
        )
        self.chain = layout.Chain()
        self.context = layout.Context(
            cluster=ctypes.addressof(self.cluster),
            cta=ctypes.addressof(self.ctas),
            chain=ctypes.addressof(self.chain),
        )

    def call(self, name: str, made: layout.Operation, lanes: int = 1) -> int:
        return routine(name)(ctypes.addressof(self.context), lanes, ctypes.addressof(made))
