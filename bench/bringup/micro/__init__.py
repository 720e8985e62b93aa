"""Microbenchmarks: figures of a GPU that set constants of the timing model (`sm100_sim.timing`).

A microbenchmark (`table.Micro`) is a formula over the clocks of a few PTX kernels that time
themselves (`timed`). `basic`, `memory`, `tensor` and `rates` list them. `on_gpu` measures,
`simulated` only runs the kernels.
"""

from __future__ import annotations

from . import basic, memory, rates, tensor
from .table import Micro


def microbenchmarks(sms: int, has_tcgen05: bool) -> dict[str, Micro]:
    """Return the microbenchmarks of a GPU by name. has_tcgen05: compute capability 10.x."""
    found = (
        *basic.table(),
        *memory.table(),
        *tensor.table(sms),
        *rates.table(sms, sets_clock=not has_tcgen05),
    )
    return {micro.name: micro for micro in found if has_tcgen05 or not micro.tcgen05}
