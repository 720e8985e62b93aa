"""How long Hopper's kernel of dV and dS waits for Q and dO: `python -m bench.measure.dv_loads`.

A warp of the kernel that has nothing to do under the static scheduler waits for each load, too, and
notes the clock; the load warp notes when it asks.  Of the last tile of every CTA, in a call that
fills the GPU, percentiles of the clocks of an SM.  Needs a Hopper GPU and the compiler.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any, cast

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Int32, Int64

from bench.suite import Case
from fa4_hd256 import flash_attn_func
from fa4_hd256.kernels.hopper.backward.dv import DvKernel

from .providers import Inputs

#: (sequences, queries and keys of each), heads 16/16.
SHAPES = ((4, 4096), (16, 1024))
STEPS, SMS = 1024, 256
#: What is noted of a step: Q asked for, Q there, dO asked for, dO there.
ASKED_Q, HAS_Q, ASKED_DOUT, HAS_DOUT, KINDS = range(5)
PERCENTILES = (5, 25, 50, 75, 95)


@cute.jit
def _note(log: cutlass.Constexpr, kind: cutlass.Constexpr, step: Int32) -> None:
    """log: address of int64 (SMS, KINDS, STEPS)."""
    row = Int64(cute.arch.block_idx()[0]) * KINDS + kind
    place = cute.make_ptr(
        Int64, Int64(log) + 8 * (row * STEPS + Int64(step)), cute.AddressSpace.gmem, assumed_align=8
    )
    clock = cute.arch.clock64()
    with cute.arch.elect_one():
        cute.make_tensor(place, cute.make_layout(1))[0] = Int64(clock)


class _Watched(DvKernel):
    """The kernel with notes in memory at `log`."""

    log = 0

    @cute.jit
    def _fill(self, context: Any, load: Any, which: tuple, states: Any) -> Any:
        ring = self.steps.ring(load.ring)
        state, loaded = states[ring.freed], context.barriers[ring.full]
        context.barriers[ring.freed].wait(state)
        loaded.expect_bytes(state)
        buffer = 0 if cutlass.const_expr(loaded.edge.stages == 1) else state.index
        if cutlass.const_expr(load.ring in ("q", "dout")):
            _note(self.log, ASKED_Q if load.ring == "q" else ASKED_DOUT, which[1].index)
        for copy in load.copies:
            self.copy(context, copy, which, (loaded.pointer(state), buffer))
        states.advance(ring.freed)
        return states

    @cute.jit
    def schedule(self, context: Any) -> None:
        """In place of the scheduler warp, which the static scheduler leaves idle."""
        states = self.edges.waiter_states(*(ring.full for ring in self.steps.rings))
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                step = self.first_position(context, work)
                for _ in cutlass.range(0, num_steps, unroll=1):
                    context.barriers["q_loaded"].wait(states["q_loaded"])
                    _note(self.log, HAS_Q, step.index)
                    states.advance("q_loaded")
                    context.barriers["dout_loaded"].wait(states["dout_loaded"])
                    _note(self.log, HAS_DOUT, step.index)
                    states.advance("dout_loaded")
                    step = self.next_position(step)
            work = scheduler.advance_to_next_work()


def _summary(clocks: np.ndarray) -> dict[str, float]:
    found = {str(q): float(np.percentile(clocks, q)) for q in PERCENTILES}
    return found | {"mean": round(float(clocks.mean()), 1)}


def measure() -> dict[str, Any]:
    """Of each shape: clocks from asking to having, and from step to step."""
    log = torch.zeros(SMS, KINDS, STEPS, dtype=torch.int64, device="cuda")
    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name}
    _Watched.log = log.data_ptr()
    for name in ("_fill", "schedule", "log"):
        setattr(DvKernel, name, getattr(_Watched, name))
    for batch, length in SHAPES:
        case = Case("loads", ((length, length),) * batch, 16, 16, False)
        inputs = Inputs.random(case, torch.device("cuda"), torch.bfloat16)
        for leaf in inputs.leaves:
            leaf.requires_grad_()
        out = cast(torch.Tensor, flash_attn_func(*inputs.leaves, use_clc=False))
        backward = partial(out.backward, torch.ones_like(out), retain_graph=True)
        for _ in range(2):
            backward()
        torch.cuda.synchronize()
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        noted = log.cpu().numpy()[:sms, :, 2 : length // 64]
        found[f"{batch} x {length}"] = {
            "Q": _summary(noted[:, HAS_Q] - noted[:, ASKED_Q]),
            "dO": _summary(noted[:, HAS_DOUT] - noted[:, ASKED_DOUT]),
            "step": _summary(np.diff(noted[:, HAS_Q], axis=1)),
        }
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
