"""The plan of a backward in mxfp8: `backward` with the operands of `call.mxfp8_gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import environment
from ..call import named_configs
from ..call.chunks import divide
from ..call.memory import View
from ..call.mxfp8_gradients import Mxfp8BackwardTensors, check_division, described
from ..call.operator_arguments import ForwardValues
from ..call.options import Options
from ..gpus.devices import gpu_of
from ..gpus.family import architecture_of
from ..kernels.kernel_set import kernels_of
from .backward import Wanted, add_division, results_of
from .plan import LaunchPlan, PlanBuilder

#: Gradients of q, k and v, always all: none of these kernels makes a single one.
WANTED = Wanted()


def config_of(name: str, device: Any) -> Any:
    kind = kernels_of(architecture_of(device)).config("mxfp8_backward")
    config = named_configs.decode(name, kind)
    ds_bytes = environment.ds_bytes()
    if name == named_configs.DEFAULT and ds_bytes:
        config = replace(config, ds_bytes=ds_bytes)
    return config


def plan_call(given: Sequence[Any], values: ForwardValues) -> LaunchPlan:
    """Return the plan, whose results are (dq, dk, dv). given: the fields of
    `Mxfp8BackwardTensors`, packed sequences without a batch. values: of the forward, with the
    backward's scheduler and configuration. Raises as `described` and `check_division` do."""
    tensors = Mxfp8BackwardTensors(*given)
    batched = tensors.with_batches()
    device = batched.out.device
    config, gpu = config_of(values.config, device), gpu_of(device)
    problem = described(
        batched,
        Options.of_operator(values, (None, None)),
        (values.max_seqlen_q, values.max_seqlen_k),
    )
    builder = PlanBuilder.for_tensors(device, Mxfp8BackwardTensors._fields, tensors)
    has_batch = dict.fromkeys("qkv", tensors.q.ndim == batched.q.ndim)
    if not problem.ds_bytes:
        # No query sees a key.
        shapes = problem.forward.q_shape, problem.k_shape, problem.k_shape
        dtype = problem.forward.dtype
        zeros = [
            builder.result(name, shape, dtype, 0.0, has_batch[name[1]])
            for name, shape in zip(("dq", "dk", "dv"), shapes, strict=True)
        ]
        return builder.plan(*zeros)
    division = divide(problem, config.ds_bytes, gpu)
    check_division(division)
    named = batched._asdict().items()
    views = {name: View.of(name, tensor) for name, tensor in named if tensor is not None}
    made = add_division(builder, division, WANTED, has_batch, views, config, gpu)
    return builder.plan(*results_of(builder, WANTED, made, views)[:3])
