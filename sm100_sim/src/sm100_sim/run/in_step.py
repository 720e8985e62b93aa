"""Operations shared between Python and native code: accumulator chains, and copies by TMA
descriptors.

Only where asynchronous operations take effect at once does native code issue them.
"""

from __future__ import annotations

import ctypes
from typing import Any

from sm100_sim.isa.columns import Effect, NativeForm
from sm100_sim.isa.table import effect_of, row_of
from sm100_sim.isa.tensor.descriptors import decode_instruction
from sm100_sim.isa.tensor.tcgen05 import participants
from sm100_sim.isa.tensor.tensor_core import Mma
from sm100_sim.native import layout
from sm100_sim.native.calling import callable_of
from sm100_sim.native.products import CHAIN_IN_PYTHON, perform_issued
from sm100_sim.state.events import AsyncOp
from sm100_sim.state.warp import address

from .observer import Executor
from .residency import ResidentWarp


def in_step(machine: Any, instruction: Any, execute: Executor) -> Executor:
    """The executor of an instruction, so that native code goes on where Python stopped."""
    row = row_of(instruction)
    if row.chain:
        return lambda warp, lanes: _with_chain(execute, warp, lanes)
    if row.native is NativeForm.TILE:
        stores = effect_of(instruction) is Effect.TMA_STORE
        pointer = address(instruction.operands[0 if stores else 1], 64)

        def copy(warp: ResidentWarp, lanes: int) -> None:
            execute(warp, lanes)
            machine.learn_tensor_map(pointer(warp, lanes))

        return copy
    return execute


def _with_chain(execute: Executor, warp: ResidentWarp, lanes: int) -> Any:
    """Execute with the warp's chain in Python's hands, as long as it is not ended."""
    context, chains = warp.context, warp.cta.tmem.open_chains
    if has_native_chain(warp):
        chains[warp.index] = native_chain(warp)
    outcome = execute(warp, lanes)
    context.chain_length = CHAIN_IN_PYTHON if warp.index in chains else 0
    return outcome


def native_chain(warp: ResidentWarp) -> tuple[Any, list[Mma]]:
    """The accumulator chain that native code holds for a warp, as `tcgen05` keeps one."""
    chain = layout.Chain.from_address(warp.context.chain)
    descriptor = decode_instruction(chain.descriptor, "f16", chain.group)
    ctas = participants(warp.cta, chain.group)
    run = [
        Mma(
            ctas,
            descriptor,
            chain.d,
            chain.a[i],
            chain.b[i],
            bool(chain.a_in_tmem),
            bool(i or chain.accumulate),
        )
        for i in range(warp.context.chain_length)
    ]
    return warp.compiled.block_instruction[chain.block], run


def has_native_chain(warp: ResidentWarp) -> bool:
    """Return True if native code holds an accumulator chain of a warp."""
    return 0 < warp.context.chain_length < CHAIN_IN_PYTHON


def perform_natively(operation: AsyncOp) -> bool:
    """Let native code perform a run of MMAs that Python has issued; False if it does not cover it.

    The same routine performs the runs that native code has issued, whatever the schedule.
    """
    touches = operation.touches
    run = () if touches is None else touches.mmas
    if touches is None or not run or len(run) > layout.CHAIN_LIMIT:
        return False
    head, warp = run[0], touches.warp
    if head.descriptor.kind.name != "f16" or head.descriptor.ws or head.scale or head.disabled_bits:
        return False
    chain = layout.Chain(
        d=head.d,
        descriptor=head.descriptor.raw,
        accumulate=head.accumulate,
        group=len(head.ctas),
        a_in_tmem=head.a_in_tmem,
        a=tuple(mma.a for mma in run),
        b=tuple(mma.b for mma in run),
    )
    context = ctypes.addressof(warp.context)
    return callable_of(perform_issued)(context, ctypes.addressof(chain), len(run))
