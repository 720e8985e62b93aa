"""The timing model: how long a compiled kernel would take, replayed from its own SASS.

`predict` runs a compiled function in the simulator, finds the path of every warp through the
kernel's SASS and replays it clock by clock on a model of the SMs (docs/timing.md); `attached` does
so for every launch of a GPU program. Both need numba and nvidia-cuda-nvdisasm, the extra `timing`.

| names | what |
|---|---|
| predict, attached, Prediction, ReplayError | time of launches, with the critical path |
| predict_launches | the same of kernels in PTX, Triton and CUDA C++ |
| write_trace | a prediction as a Chrome trace |
| load, machines, Machine, Constant, Values, SETS | constants of modelled GPUs, their sources |
| l2_share | what an SM gets from L2, of them |
| mma_cost, MmaCost, MEASURED | closed forms of tcgen05.mma, and what they reproduce |
| disassemble, SassFunction, SassInstruction | SASS of a cubin |
| traced_program, Compiled, replay_program, Replay | the steps of `predict` one by one |
| Action | what an event of a replay does |
| StoredProgram | a traced program as bytes, to replay it later under other constants |
| model_digest, trace_digest | what the code means that decides a replay, a traced program |
| clocks_measured, tensor_core_clocks | figures of a replay |

What is not listed here is private.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .machine_code.resources import Action
    from .machine_code.sass import SassFunction, SassInstruction, disassemble
    from .machine_constants import SETS, Constant, Machine, Values, l2_share, load, machines
    from .prediction import (
        Prediction,
        attached,
        predict,
        predict_launches,
        tensor_core_clocks,
        traced_program,
    )
    from .program import Compiled
    from .replaying.chrome import write as write_trace
    from .replaying.replay import Replay, ReplayError, clocks_measured
    from .replaying.replay import replay as replay_program
    from .sources import model_digest, trace_digest
    from .stored import StoredProgram
    from .tensor import MEASURED, MmaCost, mma_cost

__all__ = [
    "MEASURED",
    "SETS",
    "Action",
    "Compiled",
    "Constant",
    "Machine",
    "MmaCost",
    "Prediction",
    "Replay",
    "ReplayError",
    "SassFunction",
    "SassInstruction",
    "StoredProgram",
    "Values",
    "attached",
    "clocks_measured",
    "disassemble",
    "l2_share",
    "load",
    "machines",
    "mma_cost",
    "model_digest",
    "predict",
    "predict_launches",
    "replay_program",
    "tensor_core_clocks",
    "trace_digest",
    "traced_program",
    "write_trace",
]

# Loaded on first use, so that constants are there without numba and llvmlite.
_HOMES = {
    "replaying.chrome": {"write_trace": "write"},
    "machine_constants": (
        "SETS", "Constant", "Machine", "Values", "l2_share", "load", "machines",
    ),
    "prediction": (
        "Prediction", "attached", "predict", "predict_launches", "tensor_core_clocks",
        "traced_program",
    ),
    "program": ("Compiled",),
    "replaying.replay": {
        "Replay": "Replay", "ReplayError": "ReplayError", "clocks_measured": "clocks_measured",
        "replay_program": "replay",
    },
    "machine_code.resources": ("Action",),
    "machine_code.sass": ("SassFunction", "SassInstruction", "disassemble"),
    "sources": ("model_digest", "trace_digest"),
    "stored": ("StoredProgram",),
    "tensor": ("MEASURED", "MmaCost", "mma_cost"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public names; loaded on first use, so that the rest works without numba."""
    for module, names in _HOMES.items():
        if name in names:
            found = names[name] if isinstance(names, dict) else name
            return getattr(importlib.import_module(f".{module}", __name__), found)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
