"""Tensor memory to registers and back, each thread the row of its own lane (`tmem_quads` has
another form)."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ..plan.budgets import TmemPlan
from ..plan.edges import RingState

LANES = 128

# Columns of one load unless the caller says otherwise: more in one instruction delay the first use.
DEFAULT_COLUMNS = 32


def tmem_buffer(tmem: Any, plan: TmemPlan, name: str, state: RingState) -> Int32:
    """Return the address of a ring's buffer that is in use.  tmem: first lane and column of the
    allocated tensor memory.  name: see `TmemPlan.buffers`."""
    start, distance = plan.buffers(name, state.stages)
    # The index of the only buffer is 0.
    return tmem.toint() + start + (state.index * distance if state.stages > 1 else 0)


def tmem_load(address: Any, values: cute.Tensor, each: int = DEFAULT_COLUMNS) -> None:
    """tcgen05.ld.32x32b (PTX ISA 9.7.16.8): this thread's row, as many columns as `values`.
    `address` names the warp's own lanes. `values`: register tensor of Float32, at most `each`
    columns, those of one instruction, or a multiple of them; wait before use."""
    columns = cute.size(values)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(min(columns, each))), Float32)
    tensor = _tmem_tensor(address, columns)
    copy = tcgen05.make_tmem_copy(atom, tensor)
    thread = copy.get_slice(0)
    registers = thread.partition_D(cute.make_identity_tensor((LANES, columns)))
    cute.copy(
        copy,
        thread.partition_S(tensor),
        cute.make_tensor(values.iterator, cute.make_layout(registers.shape)),
    )


def tmem_store(values: cute.Tensor, address: Any) -> None:
    """tcgen05.st.32x32b (PTX ISA 9.7.16.8) of this thread's row: one instruction."""
    columns = cute.size(values)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(columns)), Float32)
    tensor = _tmem_tensor(address, columns)
    copy = tcgen05.make_tmem_copy(atom, tensor)
    thread = copy.get_slice(0)
    registers = thread.partition_S(cute.make_identity_tensor((LANES, columns)))
    cute.copy(
        copy,
        cute.make_tensor(values.iterator, cute.make_layout(registers.shape)),
        thread.partition_D(tensor),
    )


def multiply(values: cute.Tensor, factor: Float32) -> None:
    """values *= factor, two at a time (mul.rn.f32x2)."""
    for i in range(0, cute.size(values), 2):
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(
            (values[i], values[i + 1]), (factor, factor)
        )


def multiply_rows(values: cute.Tensor, factors: cute.Tensor) -> None:
    """values *= factors, one by one, two at a time (mul.rn.f32x2)."""
    for row in range(0, cute.size(values), 2):
        values[row], values[row + 1] = cute.arch.mul_packed_f32x2(
            (values[row], values[row + 1]), (factors[row], factors[row + 1])
        )


def _tmem_tensor(address: Any, columns: int) -> cute.Tensor:
    layout = cute.make_layout((LANES, columns), stride=(1 << 16, 1))
    return cute.make_tensor(address, layout)
