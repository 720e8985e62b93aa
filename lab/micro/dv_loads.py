"""Waiting times of Hopper's kernel of dV and dS for Q and dO: `python -m lab.micro.dv_loads`.

A warp of the kernel that has nothing to do under the static scheduler waits for each load, too, and
notes the clock; the load warp notes when it issues the load.  Of the last tile of every CTA, in a
call that fills the GPU, percentiles of the clocks of an SM.  Needs a Hopper GPU and the compiler.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Int32, Int64

from bench.measure.providers import Inputs
from bench.suite import Case
from fa4_hd256 import flash_attn_func
from fa4_hd256.environment import CACHE_DIR, PREBUILT
from fa4_hd256.kernels.backward.common import BackwardContext, Step
from fa4_hd256.kernels.hopper.backward import dv
from fa4_hd256.kernels.hopper.backward.dv import STEP_QUERIES, DvKernel
from fa4_hd256.kernels.operands import LoadTarget
from fa4_hd256.schedulers import WorkTile
from lab.micro.loads_under_traffic import summary

#: (sequences, queries and keys of each), heads 16/16.
SHAPES = ((4, 4096), (16, 1024))
STEPS, SMS = 1024, 256
#: Noted times of a step: load of Q issued, Q there, load of dO issued, dO there.
ASKED_Q, HAS_Q, ASKED_DOUT, HAS_DOUT, KINDS = range(5)
ASKED = {"q": ASKED_Q, "dout": ASKED_DOUT}


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

    def _copy_queries(
        self, context: BackwardContext, name: str, work: WorkTile, step: Step, target: LoadTarget
    ) -> None:
        _note(self.log, ASKED[name], step.index)
        super()._copy_queries(context, name, work, step, target)

    @cute.jit
    def schedule(self, context: BackwardContext) -> None:
        """Wait for each load and note the clock, in place of the scheduler warp, which the static
        scheduler leaves idle."""
        states = self.edges.waiter_states("q_loaded", "dout_loaded")
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
                    step = step.following()
            work = scheduler.advance_to_next_work()


@contextlib.contextmanager
def _watched(log: int) -> Iterator[None]:
    """Calls compile the watched kernel, and keep it where no other process finds it: it writes to
    memory that is this process's alone."""
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        own = {CACHE_DIR.name: directory, PREBUILT.name: ""}
        with (
            mock.patch.dict(os.environ, own),
            mock.patch.object(_Watched, "log", log),
            mock.patch.object(dv, "DvKernel", _Watched),
        ):
            yield


def measure() -> dict[str, Any]:
    """Return, for each shape, the clocks from issue to arrival, and from step to step.

    Raises RuntimeError if the calls did not run the watched kernel.
    """
    log = torch.zeros(SMS, KINDS, STEPS, dtype=torch.int64, device="cuda")
    with _watched(log.data_ptr()):
        found = {f"{batch} x {length}": _of(log, batch, length) for batch, length in SHAPES}
    return {"device": torch.cuda.get_device_properties(0).name, **found}


def _of(log: torch.Tensor, batch: int, length: int) -> dict[str, Any]:
    log.zero_()
    case = Case("loads", ((length, length),) * batch, 16, 16, False)
    inputs = Inputs.random(case, torch.device("cuda"), torch.bfloat16)
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    out = cast(torch.Tensor, flash_attn_func(*inputs.leaves, use_clc=False))
    for _ in range(2):
        out.backward(torch.ones_like(out), retain_graph=True)
    torch.cuda.synchronize()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    noted = log.cpu().numpy()[:sms, :, 2 : length // STEP_QUERIES]
    if not noted.all():
        raise RuntimeError("a kernel without notes ran in the place of the watched one")
    return {
        "Q": summary(noted[:, HAS_Q] - noted[:, ASKED_Q]),
        "dO": summary(noted[:, HAS_DOUT] - noted[:, ASKED_DOUT]),
        "step": summary(np.diff(noted[:, HAS_Q], axis=1)),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
