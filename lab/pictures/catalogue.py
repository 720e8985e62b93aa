"""Every picture by its name: what `python -m lab pictures` writes into docs/pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from lab.pictures.barriers import barrier_graph
from lab.pictures.exp2 import exp2_error
from lab.pictures.flow import backward_flow
from lab.pictures.layouts import operand_majors, pair_operands, swizzle, tensor_memory_lanes
from lab.pictures.losses import training_losses
from lab.pictures.measured import throughput_h200
from lab.pictures.measured_bars import bars_h200
from lab.pictures.memory import memory_map
from lab.pictures.race import happens_before
from lab.pictures.rates import accuracy_of_the_model, throughput_forward, throughput_peers
from lab.pictures.simulator import instruction_life, simulator_tower
from lab.pictures.svg import Drawing
from lab.pictures.timeline import role_timeline


def _of_kernels() -> dict[str, Callable[[], Drawing]]:
    """The memory map and the barriers of each kernel on CTA pairs."""
    backward = BackwardConfig()
    kernels = {
        "forward": ("forward", ForwardConfig()),
        "dv": ("dV and dS", backward.dv),
        "products": ("dK and dQ from stored dS", backward.products),
        "dkdv": ("dK/dV with recomputed dS", backward.dkdv),
        "dq": ("dQ with recomputed dS", backward.dq),
    }
    found: dict[str, Callable[[], Drawing]] = {}
    for name, (title, plan) in kernels.items():
        found[f"memory-{name}"] = partial(_memory, title, plan)
        found[f"barriers-{name}"] = partial(_barriers, title, plan)
    return found


def _memory(title: str, plan: Any) -> Drawing:
    return memory_map(title, plan.smem, plan.tmem)


def _barriers(title: str, plan: Any) -> Drawing:
    return barrier_graph(title, plan.edges)


#: Name of the file without its suffix -> what draws it.
PICTURES: dict[str, Callable[[], Drawing]] = {
    "bars-h200": bars_h200,
    "throughput-forward": throughput_forward,
    "throughput-one-sequence": throughput_peers,
    "throughput-h200": throughput_h200,
    "model-accuracy": accuracy_of_the_model,
    "training-losses": training_losses,
    "timeline-forward": role_timeline,
    "pair-operands": pair_operands,
    "swizzle": swizzle,
    "operand-majors": operand_majors,
    "tensor-memory-lanes": tensor_memory_lanes,
    **_of_kernels(),
    "backward-flow": backward_flow,
    "exp2-error": exp2_error,
    "simulator-tower": simulator_tower,
    "instruction-life": instruction_life,
    "race": happens_before,
}
